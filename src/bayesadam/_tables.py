"""Tables as plain text."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: its first column to the left, the others to the right.

    >>> aligned([["layer", "weights"], ["0", "12"]])
    ['layer  weights', '0           12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
