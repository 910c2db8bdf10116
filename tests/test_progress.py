"""Bars of progress: on a terminal, once the work is long, and only the outermost."""

import io

import pytest

from bayesadam import _progress
from bayesadam._progress import Bar, progress


class Terminal(io.StringIO):
    """A standard error that says whether it is a terminal."""

    encoding = "utf-8"

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize(
    ("patience", "is_terminal", "is_shown"), [(0.0, True, True), (60.0, True, False), (0.0, False, False)]
)
def test_a_bar_is_drawn_on_a_terminal_once_the_work_is_long(patience, is_terminal, is_shown, monkeypatch):
    stderr = Terminal(is_terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_progress, "PATIENCE", patience)
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert ("counting" in stderr.getvalue()) == is_shown


def test_a_bar_inside_another_only_counts(monkeypatch):
    stderr = Terminal(True)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_progress, "PATIENCE", 0.0)
    with Bar("outer") as outer:
        outer.step()
        assert list(progress([1, 2], "inner")) == [1, 2]
    assert "outer" in stderr.getvalue()
    assert "inner" not in stderr.getvalue()
