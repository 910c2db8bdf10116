"""The header of a posterior's file, and what stands in it for weights that are published elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from bayesadam._shards import whole
from bayesadam._storage import COMPACT_VERSION, FORMAT_VERSION
from bayesadam._version import __version__
from bayesadam.errors import MatchError
from bayesadam.gaussian.settings import Settings
from bayesadam.gaussian.structure import Named, Stored
from bayesadam.readers import Origin, working_dtype
from bayesadam.readers.compression import probe, same_weights

SETTING_NAMES = tuple(f.name for f in fields(Settings))


def header_of(
    kind: str,
    settings: Settings,
    origin: Origin,
    names: Sequence[str],
    *,
    weights: bool = True,
    compress: str | None = None,
) -> dict[str, Any]:
    """What every file of a posterior says; one without weights or compressed is of the later format."""
    numbers = {name: delta for name, delta in settings.prior_precision.items() if not isinstance(delta, Tensor)}
    others = {key: getattr(settings, key) for key in SETTING_NAMES if key not in ("prior_precision", "covariant")}
    if settings.covariant:
        others["covariant"] = True
    return {
        "format": FORMAT_VERSION if weights and compress is None else COMPACT_VERSION,
        "version": __version__,
        "structure": kind,
        "parameters": list(names),
        "settings": {**others, "prior_precision": numbers},
        **origin.header(),
        **({} if weights else {"has_weights": False}),
        **({} if compress is None else {"compress": compress}),
    }


def weight_roles(mode: Named, weights: bool) -> dict[str, dict[str, Tensor]]:
    """θ_t under `mode`; without weights a few numbers of each parameter under `probe`."""
    return {"mode": dict(mode)} if weights else {"probe": {name: probe(theta) for name, theta in mode.items()}}


def own_weights(stored: Stored) -> dict[str, Tensor]:
    """θ_t of a file without weights: the model's, which must be those the posterior was read with.

    Raises:
        MatchError: the model's weights differ from the file's probes by more than a tenth of these, in the mean square.
    """
    named = {name: stored.parameters[name].detach() for name in stored.names}
    mode = {name: theta.to(working_dtype(theta.dtype), copy=True) for name, theta in named.items()}
    found = {name: probe(whole(theta)) for name, theta in mode.items()}
    known = {name: stored.tensors[f"probe.{name}"] for name in stored.names}
    if any(known[name].shape != numbers.shape for name, numbers in found.items()):
        raise stored.damaged("its probes of the weights are not of their shapes")
    if not same_weights(known, found):
        raise MatchError(
            f"{stored.path} has no weights of its own, and the model's are not those it belongs to: load the weights that "
            "were published with it into the model first"
        )
    return mode
