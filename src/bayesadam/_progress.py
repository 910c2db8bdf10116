"""A progress bar on standard error, for work of more than two seconds on a terminal."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import ClassVar, TypeVar

T = TypeVar("T")
# Seconds of work before a bar is worth looking at, and between two drawings of it.
PATIENCE, _PAUSE = 2.0, 0.1
_WIDTH = 40


class Bar:
    """Counts steps, and draws them on a terminal from the first one that ends after two seconds."""

    # Two bars on one terminal would write over each other: the second only counts.
    _drawing: ClassVar["Bar | None"] = None

    def __init__(self, description: str, total: int | None = None) -> None:
        self.description, self.total, self.done = description, total, 0
        self._due = time.monotonic() + PATIENCE

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if time.monotonic() >= self._due and Bar._drawing in (None, self) and sys.stderr.isatty():
            Bar._drawing = self
            self._due = time.monotonic() + _PAUSE
            shown = f"\r{self.description} {self.done}"
            if self.total:
                shown += f"/{self.total} " + "━" * (_WIDTH * self.done // self.total)
            print(shown, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        if Bar._drawing is self:
            Bar._drawing = None
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def progress(items: Iterable[T], description: str) -> Iterator[T]:
    """The items one by one, with a `Bar` of how many are done."""
    with Bar(description, len(items) if isinstance(items, Sized) else None) as bar:
        for item in items:
            yield item
            bar.step()
