"""The parts of a command, in this process or in several: each is saved when it is done, and a stopped command resumes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bayesadam._files import replacing
from bayesadam.errors import BayesAdamError
from bayesadam.paper.run import Run

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from multiprocessing.synchronize import Lock

# Does parts that belong together, and yields each by name when it is done, as plain data or as a `Failure`.
Work = Callable[[Sequence[str]], Iterable[tuple[str, Any]]]
# The ledger's entry for the time spent; no part of a command has this name.
_SECONDS = "seconds"
# Seconds between two looks at what the workers have sent.
_POLL = 0.1
_CODE_LOOKS = 100


@dataclass(frozen=True)
class Failure:
    """A part that gave no result, and why; the others' results are not lost with it."""

    reason: str


class Terminated(SystemExit):
    """SIGTERM came; the exit code is the shell's for it, 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@dataclass(frozen=True)
class Ledger:
    """Finished parts by name, as plain data on disk, so that a stopped command resumes; removed when all is done."""

    path: Path

    @classmethod
    def of(cls, out: Path, settings: Mapping[str, Any]) -> Ledger:
        """The ledger of a run with these settings; other settings have another."""
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]
        return cls(out / f"unfinished-{digest}.json")

    def read(self) -> dict[str, Any]:
        """The finished parts; none where there is no ledger or it is damaged."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, finished: Mapping[str, Any]) -> None:
        """Replace the file, whole or not at all."""
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(finished), encoding="utf-8")

    def close(self) -> None:
        """The run is done."""
        self.path.unlink(missing_ok=True)


def resumed(run: Run, *choices: str) -> tuple[Run, Ledger]:
    """The run with the seconds that earlier sessions spent on it, and its ledger.

    The ledger does not depend on the `choices`, settings that select parts, such as `"methods"`.
    """
    ledger = Ledger.of(run.out, {"seed": run.seed, "device": run.device, **run.settings, **dict.fromkeys(choices)})
    spent = ledger.read().get(_SECONDS)
    return replace(run, before=float(spent) if isinstance(spent, int | float) else 0.0), ledger


def run_parts(
    run: Run,
    ledger: Ledger,
    names: Sequence[str],
    work: Work,
    *,
    groups: Callable[[Sequence[str]], Sequence[Sequence[str]]] = lambda left: list(zip(left, strict=True)),
    jobs: int = 1,
    on_part: Callable[[Mapping[str, Any]], object] = lambda done: None,
) -> dict[str, Any]:
    """Each name's result, from the ledger or by work; failures are not written to the ledger.

    The time spent is written with every part, and when Ctrl-C or SIGTERM stops the command; a session that was killed
    counts up to its last finished part. The caller closes the ledger, once the results are written.

    Args:
        run: see `resumed`.
        groups: the unfinished names as groups, each done by one process; by default each is a group of its own.
        jobs: the number of processes, each on one core; with 1 the work is done in this one.
        on_part: called with all finished parts after each.
    """
    done = {name: result for name, result in ledger.read().items() if name in names}
    failed: dict[str, Failure] = {}
    left = [name for name in names if name not in done]

    def save() -> None:
        ledger.write({**done, _SECONDS: run.seconds})

    with _terminated_as_exception():
        try:
            with run.progress() as track, closing(_results(groups(left) if left else (), work, jobs)) as results:
                for _ in track(left, run.command):
                    name, result = next(results)
                    if isinstance(result, Failure):
                        failed[name] = result
                    else:
                        done[name] = result
                        save()
                        on_part(done)
                # To the generator's end, where the workers end.
                next(results, None)
        except (KeyboardInterrupt, Terminated):
            save()
            raise
    return {**done, **failed}


@contextmanager
def _terminated_as_exception() -> Iterator[None]:
    """SIGTERM unwinds the block as Ctrl-C does, with a message; a second one ends the process at once.

    A handler that is already set is left alone.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Terminated:
        print("bayesadam: terminated; the same command resumes with what is not finished", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _results(groups: Sequence[Sequence[str]], work: Work, jobs: int) -> Generator[tuple[str, Any], None, None]:
    """What the work yields, as it comes; when this is closed, or fails, its processes end."""
    jobs = min(jobs, len(groups))
    if jobs <= 1:
        for group in groups:
            yield from work(group)
        return
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, context, _start_worker, (sender, context.Lock()))
    others = set(multiprocessing.active_children())
    workers: set[BaseProcess] = set()

    def submit(group: Sequence[str]) -> Future[None]:
        future = pool.submit(_send_parts, work, group)
        # At once: one that is dead by the next look is no longer among the active.
        workers.update(set(multiprocessing.active_children()) - others)
        return future

    try:
        # Signals strike in the main thread: in another one, no worker is left half started.
        with ThreadPoolExecutor(1) as starter:
            pending = set(starter.map(submit, groups))
        # Only the workers can write now, so that a message cut off by a worker's death ends in EOFError.
        sender.close()
        while pending:
            done, pending = wait(pending, _POLL, FIRST_COMPLETED)
            try:
                while receiver.poll():
                    yield receiver.recv()
            except (EOFError, OSError):
                # A worker died; its future says so.
                pass
            for future in done:
                future.result()
            # The pool may overlook the death of a worker that it started while it was already waiting for the others.
            if any(worker.exitcode for worker in workers):
                raise BrokenProcessPool
        pool.shutdown()
    except BrokenProcessPool:
        # The pool, or the last lines here, end the other workers.
        code = _exit_code(workers)
        raise BayesAdamError(
            f"a worker process ended with exit code {code} (-9 often means out of memory): the same command resumes "
            "with what is not finished; --jobs 1 works in one process"
        ) from None
    finally:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        pool.shutdown(cancel_futures=True)
        receiver.close()


def _exit_code(workers: Collection[BaseProcess]) -> int | str:
    """Of the worker that failed; the pool may know of its death before its exit code can be had."""
    for _ in range(_CODE_LOOKS):
        for worker in workers:
            if worker.exitcode not in (0, None, -signal.SIGTERM):
                return worker.exitcode
        time.sleep(_POLL)
    return "unknown"


_channel: tuple[Connection[Any, Any], Lock]


def _start_worker(sender: Connection[Any, Any], lock: Lock) -> None:
    global _channel
    _channel = sender, lock
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C goes to every process of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _send_parts(work: Work, group: Sequence[str]) -> None:
    sender, lock = _channel
    for part in work(group):
        with lock:
            sender.send(part)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
