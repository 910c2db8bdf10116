"""The page of the suspects: one HTML file that needs nothing else, from the template `page.html`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam._version import __version__
from bayesadam.auditing.picture import Shown, shown
from bayesadam.errors import MatchError

if TYPE_CHECKING:
    from bayesadam.auditing.table import Audit, Suspect

Names = Sequence[str] | Mapping[int, str]


def write_page(
    path: str | os.PathLike[str],
    audit: Audit,
    suspects: Sequence[Suspect],
    *,
    inputs: Any,
    names: Names | None,
    by: str,
    title: str,
) -> None:
    """`Audit.report`, of suspects in the order of the page."""
    pictures = shown([_example(inputs, one.index, len(audit)) for one in suspects]) if inputs is not None else None
    cards = [
        {
            "suspect": one,
            "label": _named(one.label, names),
            "predicted": _named(one.predicted, names),
            "agrees": one.label == one.predicted,
            "shown": Shown() if pictures is None else pictures[place],
        }
        for place, one in enumerate(suspects)
    ]
    jinja2 = require("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    style = require("markupsafe").Markup(files(__package__).joinpath("page.css").read_text("utf-8"))
    page = environment.get_template("page.html").render(
        audit=audit, cards=cards, by=by, title=title, number=_number, version=__version__, style=style
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _example(inputs: Any, index: int, count: int) -> Any:
    if not hasattr(inputs, "__getitem__") or isinstance(inputs, str | Mapping):
        raise MatchError(
            f"inputs must give an example by its number, inputs[{index}], but they are {type(inputs).__name__}: pass a tensor, "
            "a list or a data set, such as loader.dataset"
        )
    if hasattr(inputs, "__len__") and len(inputs) != count:
        raise MatchError(f"there are {len(inputs):,} inputs, and {count:,} examples were audited: pass the same ones")
    return inputs[index]


def _named(value: Any, names: Names | None) -> str:
    """A class by its name, a number in a few digits."""
    if isinstance(value, list):
        return ", ".join(_named(each, None) for each in value)
    if isinstance(value, float):
        return _number(value)
    if names is None:
        return str(value)
    try:
        return str(names[value])
    except (KeyError, IndexError):
        raise MatchError(f"names has {len(names)} entries, none for class {value}") from None


def _number(value: float) -> str:
    """Three digits.

    >>> _number(0.000123456), _number(12.3456), _number(123456.0)
    ('0.000123', '12.3', '1.23e+05')
    """
    return f"{value:.3g}"
