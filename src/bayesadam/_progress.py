"""A progress bar on standard error, for work of more than two seconds on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")
# Seconds of work before a bar is worth looking at.
PATIENCE = 2.0
# Two bars on one terminal would write over each other: the second only counts.
_terminal = Lock()


class Bar:
    """Counts steps, and draws them from the first one that ends after two seconds, if standard error is a terminal."""

    def __init__(self, description: str, total: int | None = None) -> None:
        self.description, self.total = description, total
        self.done, self.started = 0, time.monotonic()
        self._drawn: Any = None

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if self._drawn is None and time.monotonic() - self.started >= PATIENCE and sys.stderr.isatty():
            self._draw()
        if self._drawn is not None:
            self._drawn.update(self._drawn.task_ids[0], completed=self.done)

    def _draw(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            return
        if not _terminal.acquire(blocking=False):
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # What the user prints meanwhile goes where it would have gone.
        own: Any = {"redirect_stdout": sys.stdout.isatty(), "transient": True}
        self._drawn = Progress(*columns, console=Console(stderr=True), **own)
        self._drawn.add_task(self.description, total=self.total)
        self._drawn.start()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn is not None:
            self._drawn.stop()
            self._drawn = None
            _terminal.release()


def progress(items: Iterable[T], description: str) -> Iterator[T]:
    """The items one by one, with a `Bar` of how many are done."""
    with Bar(description, len(items) if isinstance(items, Sized) else None) as bar:
        for item in items:
            yield item
            bar.step()
