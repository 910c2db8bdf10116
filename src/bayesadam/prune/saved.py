"""Pruning a saved network from its optimiser's state: no model, no data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase

from bayesadam.checkpoint import read_checkpoint, read_curvature, write_pruned
from bayesadam.curvature import StateReader
from bayesadam.curvature.read import working_dtype
from bayesadam.errors import MatchError, SettingError
from bayesadam.prune.masks import Scope, check_scope, checked_fraction, removing_lowest
from bayesadam.prune.names import near
from bayesadam.prune.rankings import RANKINGS, Weights
from bayesadam.prune.report import PrunedParameter, PruningReport, saving

# N and a prior do not change the order: the ranking sees the paper's |θ| v̂^¼.
_POWER = 0.5


def prune_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    fraction: float,
    *,
    ranking: str = "snr",
    scope: Scope = "global",
    exclude: Sequence[str] = (),
    optimizer_path: str | os.PathLike[str] | None = None,
    optimizer: str | StateReader | None = None,
    param_names: Sequence[str] | None = None,
    groups_in_order: bool = False,
) -> PruningReport:
    """Write a checkpoint again with a share of its weights at zero, lowest score first; all else in it stays as it was.

    Args:
        path: what the trainer saved, see `read_checkpoint`.
        out: the file to write; with the ending `.safetensors` the weights alone.
        fraction: the share of the weights with a state to remove, 0 to 1.
        ranking: a name from `RANKINGS`.
        scope: `"global"`, all weights compete; `"layer"`, the fraction is removed from each parameter.
        exclude: patterns of names of parameters to leave whole, such as `"*.bias"`.
        optimizer_path: the optimiser's state, where it has a file of its own.
        optimizer: the optimiser that wrote it; None tells it by its keys.
        param_names: the parameter names in the optimiser's order.
        groups_in_order: your word that each of several groups was filled in the model's order.
    """
    check_scope(scope)
    share = checked_fraction(fraction)
    if ranking not in RANKINGS:
        raise SettingError(f"ranking must be one of {', '.join(map(repr, RANKINGS))}, got {ranking!r}")
    checkpoint = read_checkpoint(path, optimizer_path=optimizer_path)
    moments = read_curvature(
        checkpoint, optimizer=optimizer, param_names=param_names, groups_in_order=groups_in_order
    ).second_moment
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in moments):
            raise MatchError(f"exclude={pattern!r} matches no parameter; near it: {near(pattern, moments)}")
    eligible = [name for name in moments if not any(fnmatchcase(name, pattern) for pattern in exclude)]
    weights = {name: checkpoint.weights[name].to(working_dtype(checkpoint.weights[name].dtype)) for name in eligible}
    scores = {
        name: RANKINGS[ranking](Weights(theta, moments[name], 1.0, _POWER, 0.0, "map"))
        for name, theta in weights.items()
    }
    masks = removing_lowest(scores, weights, share, scope)
    write_pruned(checkpoint, masks, out)
    return PruningReport(
        tuple(
            PrunedParameter(
                name,
                tensor.numel(),
                kept := int(masks[name].sum()) if name in masks else tensor.numel(),
                *saving(tensor, kept),
            )
            for name, tensor in checkpoint.weights.items()
        )
    )
