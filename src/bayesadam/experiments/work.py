"""The parts of a command, here or in processes side by side: each is kept as it is done, and none outlives the command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch

from bayesadam.errors import BayesAdamError
from bayesadam.experiments.ledger import Ledger
from bayesadam.experiments.run import Run

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    Channel = Connection[Any, Any]

# Does parts that belong together, and yields each by name when it is done, as plain data or as a `Failure`.
Work = Callable[[Sequence[str]], Iterable[tuple[str, Any]]]
# Seconds that a worker has to end by itself.
_TIDYING = 10.0
# No part of a command has this name.
SECONDS = "seconds"


@dataclass(frozen=True)
class Failure:
    """A part that gave no result, and why: the others' results are not lost with it."""

    reason: str


class Terminated(SystemExit):
    """SIGTERM came; the exit code is the shell's for it, 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def resumed(run: Run, *choices: str) -> tuple[Run, Ledger]:
    """The run with the seconds that earlier sessions spent on it, and its ledger, the same whatever is chosen.

    Args:
        run: the run.
        choices: the settings that say which parts there are, such as `"methods"`.
    """
    ledger = Ledger.of(run.out, {"seed": run.seed, "device": run.device, **run.settings, **dict.fromkeys(choices)})
    spent = ledger.read().get(SECONDS)
    return replace(run, before=float(spent) if isinstance(spent, int | float) else 0.0), ledger


def worked_off(
    run: Run,
    ledger: Ledger,
    names: Sequence[str],
    groups: Callable[[Sequence[str]], Sequence[Sequence[str]]],
    work: Work,
    *,
    jobs: int,
) -> dict[str, Any]:
    """Each name's result, from the ledger or by work; failures are not kept.

    The ledger notes the time with every part, and when the command is stopped by Ctrl-C or SIGTERM: a session that was
    killed outright counts up to the last part it finished.

    Args:
        run: the run; see `resumed`.
        ledger: to be closed by the caller, when the results are where they belong.
        names: of all parts.
        groups: those of the names which are left, as groups whose parts belong together.
        work: does such a group.
        jobs: processes side by side, of one core each; with 1, the work is done here.
    """
    done = {name: result for name, result in ledger.read().items() if name in names}
    failed: dict[str, Failure] = {}
    left = [name for name in names if name not in done]

    def note() -> None:
        ledger.write({**done, SECONDS: run.seconds})

    with _told_when_terminated():
        try:
            with run.progress() as track, closing(_results_of(groups(left), work, jobs)) as results:
                for _ in track(left, run.command):
                    name, result = next(results)
                    if isinstance(result, Failure):
                        failed[name] = result
                    else:
                        done[name] = result
                        note()
                # To the generator's end, where the last workers are let go.
                next(results, None)
        except (KeyboardInterrupt, Terminated):
            note()
            raise
    return {**done, **failed}


@contextmanager
def _told_when_terminated() -> Iterator[None]:
    """SIGTERM unwinds what is inside, as Ctrl-C does, and a line says so; a second one ends the process at once.

    A handler that is there already is left alone.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Terminated:
        print("bayesadam: terminated; the same command goes on with what is not finished", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _results_of(groups: Sequence[Sequence[str]], work: Work, jobs: int) -> Generator[tuple[str, Any], None, None]:
    """What the work yields, as it comes; when this is closed, or fails, its processes end."""
    if min(jobs, len(groups)) <= 1:
        for group in groups:
            yield from work(group)
        return
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(groups))
    workers: dict[Channel, SpawnProcess] = {}

    def start(group: Sequence[str]) -> None:
        ours, theirs = context.Pipe()
        worker = context.Process(target=_serve, args=(theirs, work), daemon=True)
        worker.start()
        workers[ours] = worker
        # The worker's end is its own alone, so that the death of a worker is seen here.
        theirs.close()
        ours.send(group)

    try:
        # Signals strike in the main thread: in another one, no worker is left half started.
        with ThreadPoolExecutor(1) as starter:
            list(starter.map(start, [waiting.pop() for _ in range(min(jobs, len(groups)))]))
        busy = list(workers)
        while busy:
            ready = wait(busy)
            for channel in [channel for channel in busy if channel in ready]:
                found = _received(channel, workers[channel])
                if found is not None:
                    yield found
                elif waiting:
                    channel.send(waiting.pop())
                else:
                    # Nothing is left for it to do: it ends by itself, and tidies up.
                    channel.send(None)
                    workers[channel].join(_TIDYING)
                    busy.remove(channel)
    finally:
        for worker in workers.values():
            worker.kill()
        for worker in workers.values():
            worker.join()


def _received(channel: Channel, worker: SpawnProcess) -> tuple[str, Any] | None:
    try:
        message: tuple[str, Any] | BayesAdamError | None = channel.recv()
    except (EOFError, ConnectionResetError):
        worker.join()
        raise BayesAdamError(
            f"one of the processes side by side ended with exit code {worker.exitcode} (-9 is often want of memory): the same "
            "command goes on with what is not finished; --jobs 1 does it in one process"
        ) from None
    if isinstance(message, BayesAdamError):
        raise message
    return message


# --- in a process of its own ------------------------------------------------------------------------------------------


def _serve(channel: Channel, work: Work) -> None:
    """Do one group after the other, and send each part, an error of the library, or None at the group's end; None ends it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C goes to every process of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while (group := channel.recv()) is not None:
        try:
            for part in work(group):
                channel.send(part)
            channel.send(None)
        except BayesAdamError as error:
            channel.send(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
