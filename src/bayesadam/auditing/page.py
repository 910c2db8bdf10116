"""The page of the suspects: one HTML file that needs nothing else, from the template `page.html`."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam._version import __version__
from bayesadam.errors import MatchError

Names = Sequence[str] | Mapping[int, str]
_CHANNELS = (1, 3, 4)
_MOST_NUMBERS = 24
_MOST_CHARACTERS = 600


def write_page(
    path: Any, audit: Any, suspects: Sequence[Any], inputs: Any, names: Names | None, by: str, title: str
) -> None:
    """`Audit.report`, of suspects in the order of the page."""
    if inputs is not None and hasattr(inputs, "__len__") and len(inputs) != len(audit):
        raise MatchError(f"there are {len(inputs):,} inputs, and {len(audit):,} examples were audited")
    content = [{}] * len(suspects) if inputs is None else shown([inputs[one.index] for one in suspects])
    cards = [
        {
            "suspect": one,
            "label": _named(one.label, names),
            "predicted": _named(one.predicted, names),
            "agrees": one.label == one.predicted,
            "shown": each,
        }
        for one, each in zip(suspects, content, strict=True)
    ]
    jinja2 = require("jinja2")
    environment = jinja2.Environment(loader=jinja2.PackageLoader(__package__, "."), autoescape=True)
    style = require("markupsafe").Markup(files(__package__).joinpath("page.css").read_text("utf-8"))
    page = environment.get_template("page.html").render(
        audit=audit, cards=cards, by=by, title=title, number="{:.3g}".format, version=__version__, style=style
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _named(value: Any, names: Names | None) -> str:
    """A class by its name, a number in a few digits."""
    if isinstance(value, list):
        return ", ".join(_named(each, None) for each in value)
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value if names is None else names[value])


def shown(examples: Sequence[Any]) -> list[dict[str, str]]:
    """Items of a data set as a `picture`, inline PNG data, or a `text`; all pictures have one scale of brightness."""
    found = [_content(example) for example in examples]
    pixels = [None if isinstance(each, str) else _pixels(each) for each in found]
    scaled = [values for values in pixels if values is not None and values.dtype != torch.uint8 and values.numel()]
    # Black is 0 where no number is below.
    least = min(min((float(values.min()) for values in scaled), default=0.0), 0.0)
    most = max((float(values.max()) for values in scaled), default=1.0)
    return [
        {"text": _words(each)} if image is None else {"picture": _address(image, least, most)}
        for each, image in zip(found, pixels, strict=True)
    ]


def _content(example: Any) -> str | Tensor:
    """A text or numbers: the inputs of a pair, the first that can be shown of a mapping."""
    if isinstance(example, str):
        return example
    if isinstance(example, tuple | list) and example and not isinstance(example[0], int | float):
        return _content(example[0])
    if isinstance(example, Mapping):
        texts = [value for value in example.values() if isinstance(value, str)]
        others = [value for value in example.values() if isinstance(value, Tensor) or hasattr(value, "__array__")]
        return _content((texts or others)[0])
    values = torch.as_tensor(example if isinstance(example, Tensor) else np.array(example)).detach().cpu()
    return values.nan_to_num() if values.is_floating_point() else values


def _words(content: str | Tensor) -> str:
    """A text, or the first of the numbers."""
    if isinstance(content, str):
        return content if len(content) <= _MOST_CHARACTERS else f"{content[:_MOST_CHARACTERS]}…"
    flat = content.flatten().tolist()
    some = ", ".join(f"{value:.4g}" for value in flat[:_MOST_NUMBERS])
    return some + (f", … ({len(flat):,} numbers)" if len(flat) > _MOST_NUMBERS else "")


def _pixels(values: Tensor) -> Tensor | None:
    """(height, width, channels) of an image, channels first or last; None where it is none."""
    if values.dim() == 2 and min(values.shape) > 1:
        return values.unsqueeze(-1)
    if values.dim() == 3 and values.shape[0] in _CHANNELS:
        return values.permute(1, 2, 0)
    return values if values.dim() == 3 and values.shape[2] in _CHANNELS else None


def _address(pixels: Tensor, least: float, most: float) -> str:
    """Bytes as they are, other numbers from `least` to `most` as 0 to 255, as the address of inline PNG data."""
    if pixels.dtype != torch.uint8:
        pixels = ((pixels.double() - least) * (255 / max(most - least, 1e-12))).round().to(torch.uint8)
    buffer = io.BytesIO()
    image = pixels.squeeze(2) if pixels.shape[2] == 1 else pixels
    require("PIL.Image").fromarray(image.contiguous().numpy()).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
