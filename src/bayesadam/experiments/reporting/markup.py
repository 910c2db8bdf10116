"""HTML and SVG as text that cannot be broken by what it holds: everything is escaped unless it is markup already."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

# Elements that have no end tag.
_EMPTY = {"meta", "br", "img"}


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """One element; children that are plain text are escaped, and so are attributes.

    An attribute's underscores become dashes, a trailing one is dropped, and one that is None or False is left out.

    >>> tag("p", "a < b", tag("br"), class_="note")
    '<p class="note">a &lt; b<br></p>'
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        parts.append(f" {shown}" if value is True else f' {shown}="{html.escape(str(value))}"')
    parts.append(">")
    if name not in _EMPTY:
        parts += [join(children), f"</{name}>"]
    return Markup("".join(parts))


def join(children: Iterable[Child]) -> Markup:
    """Children one after the other, escaped where they are plain text."""
    found: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            found.append(child)
        elif isinstance(child, str | int | float):
            found.append(html.escape(str(child), quote=False))
        else:
            found.append(join(child))
    return Markup("".join(found))


def prose(text: str) -> Markup:
    """Text with what stands in backticks as code.

    >>> prose("run `make <all>` first")
    'run <code>make &lt;all&gt;</code> first'
    """
    parts = text.split("`")
    return join(
        tag("code", part) if number % 2 and number < len(parts) - 1 else part for number, part in enumerate(parts)
    )


def data(value: Any) -> Markup:
    """JSON for a script element; no text in it can end that element.

    >>> data({"a": "</script>"})
    '<script type="application/json">{"a":"\\\\u003c/script>"}</script>'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json">{text}</script>')
