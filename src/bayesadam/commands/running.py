"""What every command shares: seed, folder, clock, `metrics.json`, files that are whole or absent, and resuming.

Each finished part of a long command goes to a ledger, and the same command resumes with the parts that are not in it.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import rich.table
import torch
from rich.box import SIMPLE
from rich.console import Console, RenderableType

from bayesadam._files import replacing
from bayesadam._progress import progress
from bayesadam._version import __version__
from bayesadam.errors import FileError
from bayesadam.weights.draws import stream_seed

# A file's text, or what writes the file to a path.
Content = str | Callable[[Path], object]
# Goes through a sequence, and may show how far it has come.
Track = Callable[[Any, str], Any]
# Does the named parts, and yields each by name when it is done, as plain data.
Work = Callable[[Sequence[str]], Iterable[tuple[str, Any]]]
# Settings that choose parts, and so do not change what a part's result is.
_CHOICES = ("methods", "problems", "agents")


class Table(NamedTuple):
    """Rows of texts, the first a name, the others numbers, of which the best has two asterisks on each side."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __rich__(self) -> rich.table.Table:
        view = rich.table.Table(title=self.title, title_justify="left", box=SIMPLE, pad_edge=False, show_edge=False)
        for number, heading in enumerate(self.columns):
            view.add_column(heading, justify="right" if number else "left")
        for row in self.rows:
            view.add_row(*(text.replace("**", "") for text in row))
        return view

    def markdown(self) -> str:
        """Title, note and rows."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join([f"{self.title}. {self.note}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def seeds_of(seed: int, n_seeds: int) -> tuple[int, ...]:
    """The seeds of a run's data sets and networks."""
    return tuple(1000 * seed + number for number in range(n_seeds))


def generator(seed: int, purpose: str) -> torch.Generator:
    """A generator of its own for each purpose, so that more draws for one do not change another."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose))


def as_json(found: Mapping[str, Any]) -> str:
    """JSON as `metrics.json` has it: tensors as lists, and null for what is not finite.

    >>> as_json({"a": (1, float("nan")), "b": torch.tensor([0.5])}).split()
    ['{', '"a":', '[', '1,', 'null', '],', '"b":', '[', '0.5', ']', '}']
    """

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(found), indent=2, ensure_ascii=False, allow_nan=False)


def target(out: Path, usual: str) -> tuple[Path, str]:
    """Where a command of one result writes it, and the record's name; `out` is that file if it has an ending.

    >>> target(Path("small/net.pt"), "pruned.pt")[1], str(target(Path("small"), "pruned.pt")[0])
    ('net.metrics.json', 'small/pruned.pt')
    """
    if out.suffix and not out.is_dir():
        return out, f"{out.stem}.metrics.json"
    return out / usual, "metrics.json"


@dataclass
class Run:
    """One run of a command, which prints its reports and paths; with `quiet` the paths alone.

    `settings` are all but the seed that determines the results.
    """

    command: str
    seed: int
    out: Path
    settings: Mapping[str, Any]
    device: str = "cpu"
    quiet: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """The time taken so far, over all sessions."""
        return time.perf_counter() - self.started

    @property
    def ledger(self) -> Path:
        """The finished parts of a run with these settings; other settings have another."""
        settings = {"seed": self.seed, "device": self.device, **self.settings, **dict.fromkeys(_CHOICES)}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]
        return self.out / f"unfinished-{digest}.json"

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Make the folder before the work inside; if that fails, remove the folders made for it that are empty."""
        absent = [folder for folder in (self.out, *self.out.parents) if not os.path.exists(folder)]
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            is_file = isinstance(error, FileExistsError | NotADirectoryError)
            reason = "it, or a folder above it, is a file" if is_file else error.strerror
            raise FileError(f"cannot write to {self.out}: {reason}") from None
        try:
            yield
        except BaseException:
            for folder in absent:
                with suppress(OSError):
                    folder.rmdir()
            raise

    def track(self, items: Any, description: str) -> Any:
        """The items, with a progress bar on a terminal unless quiet."""
        return items if self.quiet else progress(items, description)

    def busy(self, description: str) -> AbstractContextManager[object]:
        """A spinner on a terminal for work whose steps nobody counts, unless quiet."""
        console = Console(stderr=True)
        return nullcontext() if self.quiet or not console.is_terminal else console.status(description)

    def show(self, *reports: RenderableType) -> None:
        """Print tables and text, unless quiet; square brackets are text. A file or a pipe gets whole lines."""
        if self.quiet:
            return
        console = Console(markup=False, highlight=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 10_000
        for report in reports:
            console.print(report, end="\n\n")

    def finish(
        self, files: Mapping[str, Content], results: Mapping[str, Any], *, name: str = "metrics.json"
    ) -> tuple[Path, ...]:
        """Write the files, by name, and `metrics.json`, all or none, then print and return their paths."""
        paths = self.write({**files, name: self.metrics(results)})
        self.ledger.unlink(missing_ok=True)
        for path in paths:
            print(path)
        return paths

    def metrics(self, results: Mapping[str, Any]) -> str:
        """The text of `metrics.json`."""
        run = {"command": self.command, "version": __version__, "seed": self.seed, "device": self.device}
        found = {"seconds": round(self.seconds, 3), "settings": dict(self.settings), "results": dict(results)}
        return as_json(run | found) + "\n"

    def write(self, files: Mapping[str, Content]) -> tuple[Path, ...]:
        """Write files by name, all or none, and return their paths."""
        paths = tuple(self.out / name for name in files)
        with ExitStack() as stack:
            # None gets its name before the last is complete.
            temporaries = [stack.enter_context(replacing(path)) for path in paths]
            for temporary, content in zip(temporaries, files.values(), strict=True):
                if isinstance(content, str):
                    temporary.write_text(content, encoding="utf-8")
                else:
                    content(temporary)
        return paths


def run_parts(
    run: Run, names: Sequence[str], work: Work, on_part: Callable[[Mapping[str, Any]], object] = lambda done: None
) -> dict[str, Any]:
    """Each name's result, from the ledger or by work; the ledger's seconds count as the run's.

    `on_part` is called with all finished parts after each.
    """
    kept = json.loads(run.ledger.read_text(encoding="utf-8")) if run.ledger.exists() else {}
    run.started -= kept.get("seconds", 0.0)
    done = {name: result for name, result in kept.items() if name in names}
    left = [name for name in names if name not in done]
    for (name, result), _ in zip(work(left), run.track(left, run.command), strict=True):
        done[name] = result
        run.write({run.ledger.name: json.dumps({**done, "seconds": run.seconds})})
        on_part(done)
    return {name: done[name] for name in names}
