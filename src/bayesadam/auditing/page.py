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

_CHANNELS = (1, 3, 4)
_MOST_NUMBERS = 24
_MOST_CHARACTERS = 600


def write_page(
    path: Any, audit: Any, suspects: Sequence[Any], inputs: Any, names: Sequence[str] | None, by: str
) -> None:
    """`Audit.report`, of suspects in the order of the page."""
    if inputs is not None and hasattr(inputs, "__len__") and len(inputs) != len(audit):
        raise MatchError(f"there are {len(inputs):,} inputs, and {len(audit):,} examples were audited")
    cards = [
        {
            "suspect": one,
            "label": _named(one.label, names),
            "predicted": _named(one.predicted, names),
            "shown": {} if inputs is None else shown(inputs[one.index]),
        }
        for one in suspects
    ]
    jinja2 = require("jinja2")
    environment = jinja2.Environment(loader=jinja2.PackageLoader(__package__, "."), autoescape=True)
    style = require("markupsafe").Markup(files(__package__).joinpath("page.css").read_text("utf-8"))
    page = environment.get_template("page.html").render(
        audit=audit, cards=cards, by=by, number="{:.3g}".format, version=__version__, style=style
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _named(value: Any, names: Sequence[str] | None) -> str:
    """A class by its name, numbers in a few digits."""
    if names is not None and isinstance(value, int):
        return names[value]
    return ", ".join(f"{each:g}" for each in (value if isinstance(value, list) else [value]))


def shown(example: Any) -> dict[str, str]:
    """An item of a data set as a `picture`, inline PNG data, or a `text`: of a pair the inputs."""
    if isinstance(example, Mapping):
        texts = [value for value in example.values() if isinstance(value, str)]
        return shown((texts or [value for value in example.values() if hasattr(value, "__array__")])[0])
    if isinstance(example, tuple | list) and example and not isinstance(example[0], int | float):
        return shown(example[0])
    if isinstance(example, str):
        return {"text": example if len(example) <= _MOST_CHARACTERS else f"{example[:_MOST_CHARACTERS]}…"}
    values = torch.as_tensor(example if isinstance(example, Tensor) else np.array(example)).detach().cpu()
    if values.dim() == 3 and values.shape[0] in _CHANNELS:
        values = values.permute(1, 2, 0)
    if values.dim() == 2 or (values.dim() == 3 and values.shape[2] in _CHANNELS):
        return {"picture": _png(values)}
    numbers = values.flatten().tolist()
    some = ", ".join(f"{value:.4g}" for value in numbers[:_MOST_NUMBERS])
    return {"text": some + (f", … ({len(numbers):,} numbers)" if len(numbers) > _MOST_NUMBERS else "")}


def _png(pixels: Tensor) -> str:
    """The address of inline PNG data: bytes as they are, other numbers scaled to their range; 0 is black, or above."""
    if pixels.dtype != torch.uint8:
        values = pixels.double().nan_to_num()
        least = min(float(values.min()), 0.0)
        pixels = ((values - least) * (255 / max(float(values.max()) - least, 1e-12))).round().to(torch.uint8)
    buffer = io.BytesIO()
    image = pixels.squeeze(2) if pixels.dim() == 3 and pixels.shape[2] == 1 else pixels
    require("PIL.Image").fromarray(image.contiguous().numpy()).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
