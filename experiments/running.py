"""What every experiment shares: its folder, its `metrics.json`, resuming where it stopped, tables, and numbers as text.

Each finished part goes to a ledger, and the same command resumes with the parts that are not in it.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from bayesadam import __version__
from bayesadam._files import replacing
from bayesadam.errors import FileError, SettingError
from bayesadam.weights.draws import stream_seed

MISSING = "–"
# A file's text, or what writes the file to a path.
Content = str | Callable[[Path], object]
# Does the named parts, and yields each by name when it is done, as plain data.
Work = Callable[[Sequence[str]], Iterable[tuple[str, Any]]]
# Settings that choose parts, and so do not change what a part's result is.
_CHOICES = ("methods", "problems", "agents")


def finite(values: Iterable[float | None]) -> list[float]:
    """Those of `metrics.json`, where null stands for what is not finite."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def mean(values: Iterable[float | None]) -> float:
    """Over those that are finite; NaN where there is none."""
    return fmean(kept) if (kept := finite(values)) else math.nan


def fixed(value: float | None, digits: int = 3) -> str:
    """Decimals without the leading zero, as the paper has them, and a true minus sign.

    >>> fixed(0.7649), fixed(-0.909), fixed(-1.3, 2), fixed(None), fixed(-0.0001)
    ('.765', '−.909', '−1.30', '–', '.000')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 and float(text) else ""
    return sign + (text[1:] if text.startswith("0.") else text)


def digits(value: float) -> str:
    """Three digits that count, and a true minus sign.

    >>> digits(0.0317), digits(-1.304)
    ('0.0317', '−1.3')
    """
    return f"{value:.3g}".replace("-", "−") if math.isfinite(value) else MISSING


class Table(NamedTuple):
    """Rows of texts, the first a name, the others numbers, of which the best has two asterisks on each side."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join([f"{self.title}. {self.note}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def check_methods(methods: Sequence[str], titles: Collection[str]) -> None:
    """Refuse a method that is not among those with a title."""
    if not methods or any(name not in titles for name in methods):
        raise SettingError(f"--methods must be some, separated by commas, of {', '.join(titles)}, got {methods!r}")


def seeds_of(seed: int, n_seeds: int) -> tuple[int, ...]:
    """The seeds of a run's data sets and networks."""
    return tuple(1000 * seed + number for number in range(n_seeds))


def generator(seed: int, purpose: str) -> torch.Generator:
    """A generator of its own for each purpose, so that more draws for one do not change another."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose))


@dataclass
class Run:
    """One run of an experiment, which prints its tables and paths; with `quiet` the paths alone.

    `settings` are all but the seed that determines the results.
    """

    command: str
    seed: int
    out: Path
    settings: Mapping[str, Any]
    device: str = "cpu"
    quiet: bool = False
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"cannot write to {self.out}: {error.strerror}: name another folder") from error

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

    def finish(
        self,
        files: Mapping[str, Content],
        results: Mapping[str, Any],
        table: Table | None = None,
        *,
        name: str = "metrics.json",
    ) -> tuple[Path, ...]:
        """Write the files, by name, and `metrics.json` last, then print the table, and print and return their paths."""
        if table and not self.quiet:
            print(table.markdown())
        paths = self.write({**files, name: self.metrics(results)})
        self.ledger.unlink(missing_ok=True)
        print(*paths, sep="\n")
        return paths

    def metrics(self, results: Mapping[str, Any]) -> str:
        about = {"command": self.command, "version": __version__, "seed": self.seed, "device": self.device}
        rest = {"seconds": round(self.seconds, 3), "settings": dict(self.settings), "results": dict(results)}
        return json.dumps(_plain({**about, **rest}), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, files: Mapping[str, Content]) -> tuple[Path, ...]:
        """Write files by name, each whole or not at all, and return their paths."""
        for name, content in files.items():
            with replacing(self.out / name) as temporary:
                if isinstance(content, str):
                    temporary.write_text(content, encoding="utf-8")
                else:
                    content(temporary)
        return tuple(self.out / name for name in files)


def run_parts(
    run: Run, names: Sequence[str], work: Work, on_part: Callable[[Mapping[str, Any]], object] = lambda done: None
) -> dict[str, Any]:
    """Each name's result, from the ledger or by work; the ledger's seconds count as the run's.

    `on_part` is called with all finished parts after each.
    """
    kept = json.loads(run.ledger.read_text(encoding="utf-8")) if run.ledger.exists() else {}
    run.started -= kept.get("seconds", 0.0)
    done = {name: result for name, result in kept.items() if name in names}
    for name, result in work([name for name in names if name not in done]):
        done[name] = result
        run.write({run.ledger.name: json.dumps({**done, "seconds": run.seconds})})
        if not run.quiet:
            print(f"{run.command}: {name}, {len(done)} of {len(names)}, {run.seconds:.0f} s", file=sys.stderr)
        on_part(done)
    return {name: done[name] for name in names}


def _plain(value: Any) -> Any:
    """What JSON can hold: tuples as lists, and None for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
