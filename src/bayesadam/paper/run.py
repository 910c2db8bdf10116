"""What every command shares: seed, folder, clock, progress, `metrics.json`, and files that are whole or absent."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from bayesadam._files import replacing
from bayesadam._version import __version__
from bayesadam.errors import FileError, SettingError
from bayesadam.gaussian.noise import stream_seed

# Characters to a line in a file or a pipe.
_UNBOUNDED = 10_000
T = TypeVar("T")
Writer = Callable[[Path], object]


class Track(Protocol):
    """Goes through a sequence as it is, and may show how far it has come."""

    def __call__(self, items: Sequence[T], description: str, /) -> Iterable[T]:
        """The items, one by one."""
        ...


def silent(items: Sequence[T], description: str, /) -> Iterable[T]:
    """A `Track` that shows nothing."""
    return items


def require_known(option: str, names: Sequence[str], known: Collection[str]) -> None:
    """Refuse names that are not known, and none at all."""
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise SettingError(f"{option} must be among {', '.join(known)}; got {', '.join(unknown) or 'none'}")


@dataclass(frozen=True)
class Target:
    """Where a command of one result writes it, and the record of how it was made.

    What `--out` names is a file where it has an ending and is no folder, and a folder otherwise.
    """

    file: Path
    record: str

    @classmethod
    def of(cls, out: Path, usual: str) -> Target:
        """The file `out` with `NAME.metrics.json` beside it, or in the folder `out` the usual name with `metrics.json`.

        >>> Target.of(Path("small/net.pt"), "pruned.pt").record, str(Target.of(Path("small"), "pruned.pt").file)
        ('net.metrics.json', 'small/pruned.pt')
        """
        if out.suffix and not out.is_dir():
            return cls(out, f"{out.stem}.metrics.json")
        return cls(out / usual, "metrics.json")


def text(content: str) -> Writer:
    """What writes the content to a path."""
    return lambda path: path.write_text(content, encoding="utf-8")


def new_table(title: str, headings: Sequence[str], *, n_left: int = 1) -> Table:
    """An empty table whose first `n_left` columns hold text, and the others numbers, aligned to the right."""
    view = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        view.add_column(heading, justify="left" if number < n_left else "right")
    return view


def seeds_of(seed: int, n_seeds: int) -> tuple[int, ...]:
    """The seeds of a run's data sets and networks."""
    return tuple(1000 * seed + number for number in range(n_seeds))


def generator(seed: int, purpose: str) -> torch.Generator:
    """A generator of its own for each purpose, so that more draws for one do not change another."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose))


@dataclass(frozen=True)
class Run:
    """One run of a command: what it was asked, when it began, where it writes.

    Reports and paths go to standard output, progress to standard error. With `quiet` only the paths are printed.
    `settings` is all but the seed that determines the results, as plain data; `before` the seconds that earlier sessions
    of the same run took, where it was stopped and resumed.
    """

    command: str
    seed: int
    out: Path
    settings: Mapping[str, Any]
    device: str = "cpu"
    quiet: bool = False
    started: float = field(default_factory=time.perf_counter)
    before: float = 0.0

    @property
    def seconds(self) -> float:
        """The time taken so far, over all sessions."""
        return self.before + time.perf_counter() - self.started

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """The folder made for the work inside, so that one which cannot be written to is refused before the work.

        Where that ends in an error, folders that were made for it and are empty are removed.
        """
        absent = [folder for folder in (self.out, *self.out.parents) if not os.path.exists(folder)]
        try:
            self._make_folder()
            yield
        except BaseException:
            for folder in absent:
                # One that holds something stays.
                with suppress(OSError):
                    folder.rmdir()
            raise

    def _make_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise FileError(f"cannot write to {self.out}: it, or a folder above it, is a file") from None
        except OSError as error:
            raise FileError(f"cannot write to {self.out}: {error.strerror}") from None

    @contextmanager
    def progress(self) -> Iterator[Track]:
        """Bars with the time taken and the time left, one for each sequence tracked."""
        taken = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        columns = (*taken, TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=self.quiet) as bars:

            def track(items: Sequence[T], description: str, /) -> Iterable[T]:
                return bars.track(items, total=len(items), description=description)

            yield track

    @contextmanager
    def busy(self, description: str) -> Iterator[None]:
        """That something is under way whose steps nobody counts, with the time it takes; on a terminal alone."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=self.quiet or not console.is_terminal) as bars:
            bars.add_task(description, total=None)
            yield

    def show(self, *reports: RenderableType) -> None:
        """Print tables and text, unless quiet; square brackets are text, not markup. Lines are whole but on a terminal."""
        if not self.quiet:
            console = Console(markup=False, highlight=False)
            if not console.is_terminal and "COLUMNS" not in os.environ:
                console.width = _UNBOUNDED
            for report in reports:
                console.print(report, end="\n\n")

    def _metrics_writer(self, results: Mapping[str, Any]) -> Writer:
        """What writes `metrics.json`; `seconds` are those of all sessions, so far as `before` is known."""
        found = {
            "command": self.command,
            "version": __version__,
            "seed": self.seed,
            "device": self.device,
            "seconds": round(self.seconds, 3),
            "settings": dict(self.settings),
            "results": dict(results),
        }
        return text(as_json(found) + "\n")

    def so_far(self, results: Mapping[str, Any]) -> None:
        """Write `metrics.json` alone, while there is more to come."""
        with replacing(self.out / "metrics.json") as temporary:
            self._metrics_writer(results)(temporary)

    def finish(
        self, files: Mapping[str, Writer], results: Mapping[str, Any], *, name: str = "metrics.json"
    ) -> tuple[Path, ...]:
        """Write the files and `metrics.json`, or another name for it, all or none, then print and return their paths.

        By name, `files` has what writes each to the path it is given (see `plots.png`). Of the results, what is not finite
        becomes null, as JSON has no word for it.
        """
        return self.write({**files, name: self._metrics_writer(results)})

    def write(self, writers: Mapping[str, Writer]) -> tuple[Path, ...]:
        """Write files by name, all or none, then print and return their paths."""
        paths = tuple(self.out / name for name in writers)
        with ExitStack() as stack:
            # None takes its place before the last is complete.
            temporaries = [stack.enter_context(replacing(path)) for path in paths]
            for temporary, write in zip(temporaries, writers.values(), strict=True):
                write(temporary)
        for path in paths:
            print(path)
        return paths

    def finish_file(self, target: Target, results: Mapping[str, Any]) -> tuple[Path, ...]:
        """Write the record beside the one file that is written already, then print and return both paths."""
        print(target.file)
        return (target.file, *self.finish({}, results, name=target.record))


def as_json(found: Mapping[str, Any]) -> str:
    """JSON as `metrics.json` has it."""
    return json.dumps(_plain(found), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    """Mappings, sequences, tensors and numbers as JSON knows them.

    >>> _plain({"a": (1, float("nan")), "b": torch.tensor([0.5, 2.0])})
    {'a': [1, None], 'b': [0.5, 2.0]}
    """
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
