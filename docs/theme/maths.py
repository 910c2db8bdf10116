"""Maths as MathML, made while the site is built: no script, no font, no request.

Two notations are understood, in pages and in docstrings alike: `$…$` and `$$…$$`, and what the docstrings of the
optimisers are written in, `:math:`…`` and `.. math::`. Doctests that stand in a docstring as they are become code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from textwrap import dedent
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

_FENCE = re.compile(r"\s*(```|~~~)")
# Browsers know letters of other alphabets as characters of their own, not as a variant.
_ALPHABETS = {"script": {"N": "𝒩", "D": "𝒟", "L": "ℒ"}, "double-struck": {"R": "ℝ", "E": "𝔼"}}
# Signs that the converter takes for letters: signs have room about them.
_SIGNS = {"<mi>:</mi>": "<mo>:</mo>", "<mi>;</mi>": "<mo>;</mo>", "<mi>&#x0007E;</mi>": "<mo>∼</mo>"}
_LETTER = re.compile(r'<mi mathvariant="(script|double-struck)">(\w)</mi>')
_DIRECTIVE = re.compile(r"(\s*)\.\. math::\s*(.*)$")


def mathml(latex: str, *, block: bool) -> str:
    """A formula as a <math> element; several rows, ended by a double backslash, are aligned at their ampersands."""
    latex = " ".join(dedent(latex).split())
    if r"\\" in latex and r"\begin" not in latex:
        latex = rf"\begin{{align*}} {latex} \end{{align*}}"
    latex = latex.replace("{aligned}", "{align*}")
    found = convert(latex.replace(r"\_", "_"), display="block" if block else "inline")
    found = _LETTER.sub(lambda m: f"<mi>{_ALPHABETS[m[1]][m[2]]}</mi>", found)
    for taken, meant in {**_SIGNS, 'mathvariant="bold"': 'class="bold"'}.items():
        found = found.replace(taken, meant)
    return f'<div class="maths">{found}</div>' if block else found


class _Blocks(Preprocessor):
    """`$$` blocks, `.. math::` directives and doctests, outside fenced code."""

    def run(self, lines: list[str]) -> list[str]:
        """The lines with formulas stashed away as HTML."""
        out: list[str] = []
        fenced, at = False, 0
        while at < len(lines):
            line = lines[at]
            fenced ^= bool(_FENCE.match(line))
            directive = None if fenced else _DIRECTIVE.match(line)
            if directive:
                body, at = _until(lines, at + 1, partial(_back_at, len(directive[1])))
                out += ["", self._stored("\n".join([directive[2], *body])), ""]
            elif not fenced and line.strip() == "$$":
                body, at = _until(lines, at + 1, lambda text: text.strip() == "$$")
                out += ["", self._stored("\n".join(body)), ""]
                at += 1
            elif not fenced and line.startswith(">>> "):
                body, at = _until(lines, at, lambda text: not text.strip())
                out += ["", "```pycon", *body, "```", ""]
            else:
                out.append(line)
                at += 1
        return out

    def _stored(self, latex: str) -> str:
        return str(self.md.htmlStash.store(mathml(latex, block=True)))


def _until(lines: list[str], start: int, ends: Callable[[str], bool]) -> tuple[list[str], int]:
    """The lines from `start` on before the first that ends them, and where that is."""
    at = next((i for i in range(start, len(lines)) if ends(lines[i])), len(lines))
    return lines[start:at], at


def _back_at(margin: int, line: str) -> bool:
    return bool(line.strip()) and len(line) - len(line.lstrip()) <= margin


class _Inline(InlineProcessor):
    """`$…$` and `:math:`…``."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]
        """One formula."""
        return str(self.md.htmlStash.store(mathml(m[1], block=False))), m.start(0), m.end(0)


class Maths(Extension):
    """Registers both notations."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Blocks before fences are read, the role before code spans, dollars after them."""
        md.preprocessors.register(_Blocks(md), "maths", 29)
        md.inlinePatterns.register(_Inline(r":math:`([^`]+)`", md), "maths-role", 195)
        md.inlinePatterns.register(_Inline(r"(?<![\\$\w])\$(?!\s)([^$\n]+?)(?<!\s)\$(?![\w$])", md), "maths", 185)


def makeExtension(**options: Any) -> Maths:
    """What Markdown looks for in a module named among its extensions."""
    return Maths(**options)
