"""Pruning whole units, so that `shrink` makes the network smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesadam._alone import in_eval_mode
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_one_network
from bayesadam.pruning.graph import Units, understand
from bayesadam.pruning.masks import Scope, all_kept, check_scope, checked_fraction
from bayesadam.pruning.names import matching
from bayesadam.pruning.rankings import Ranking, weight_scores
from bayesadam.pruning.select import lowest
from bayesadam.structures.diagonal import wide


def rank_neurons(
    posterior: Posterior, *, ranking: Ranking = "snr", exclude: str | Sequence[str] = (), example_input: Any
) -> dict[str, Tensor]:
    """The score of each unit that can be taken out, by the name of its layer's weight.

    A unit's score is the sum of the scores of all weights that would go with it: its incoming weights, its bias, and the
    weights by which other layers read it.
    """
    return dict(_ranked(posterior, ranking, _removable(posterior, exclude, example_input)))


def neuron_masks(
    posterior: Posterior,
    fraction: float,
    *,
    ranking: Ranking = "snr",
    scope: Scope = "global",
    exclude: str | Sequence[str] = (),
    example_input: Any,
) -> dict[str, Tensor]:
    """Masks that remove whole units, with the incoming weights, the bias and the outgoing weights of each.

    Of the n units that can be taken out (see `shrink`), round(fraction × n) are, lowest score first, but for the best of each
    layer, which stays.

    Args:
        posterior: over the weights; units with a weight outside it stay.
        fraction: the share of units to remove, 0 to 1.
        ranking: of weights, as in `pruning_masks`; a unit's score is their sum.
        scope: `"global"`, all units compete; `"layer"`, the fraction is removed from each layer.
        exclude: layers whose units stay, by patterns of their weights' names.
        example_input: a batch that the model takes, to follow the units through it.
    """
    check_scope(scope)
    share = checked_fraction(fraction)
    found = _removable(posterior, exclude, example_input)
    scores = dict(_ranked(posterior, ranking, found))
    removed: dict[str, Tensor] = {}
    for names in [list(scores)] if scope == "global" else [[name] for name in scores]:
        best = {name: scores[name].argmax() for name in names}
        # The best of a layer is put out of reach, and the count cut to what is left.
        ranked = [scores[name].index_fill(0, best[name], torch.inf) for name in names]
        total = sum(len(score) for score in ranked)
        count = min(round(share * total), total - len(names))
        removed |= zip(names, lowest(ranked, [scores[name] for name in names], count), strict=True)
    masks = all_kept(posterior)
    for units in found:
        gone = removed[f"{units.name}.weight"]
        for name in _own(units):
            masks[name][gone.to(masks[name].device)] = False
        for reader in units.readers:
            mask = masks[f"{reader.name}.weight"]
            reader.by_unit(mask, units.width)[:, :, gone.to(mask.device)] = False
    return masks


def _removable(posterior: Posterior, exclude: str | Sequence[str], example: Any) -> list[Units]:
    require_one_network(posterior, "pruning")
    excluded = matching(posterior.model, exclude)
    posterior.parameters()
    with in_eval_mode(posterior.model):
        network = understand(posterior.model, example)
    return [
        units
        for units in network.units
        if f"{units.name}.weight" not in excluded and all(name in posterior.mode for name in _touched(units))
    ]


def _own(units: Units) -> tuple[str, ...]:
    """The parameters of the layer itself."""
    return (f"{units.name}.weight", *([] if units.layer.bias is None else [f"{units.name}.bias"]))


def _touched(units: Units) -> tuple[str, ...]:
    return (*_own(units), *(f"{reader.name}.weight" for reader in units.readers))


def _ranked(posterior: Posterior, ranking: Ranking, found: Sequence[Units]) -> Iterator[tuple[str, Tensor]]:
    names = dict.fromkeys(name for units in found for name in _touched(units))
    scores = weight_scores(posterior, ranking, names)
    for units in found:
        groups = [scores[name].reshape(units.width, -1) for name in _own(units)]
        for reader in units.readers:
            read = scores[f"{reader.name}.weight"]
            groups.append(reader.by_unit(read, units.width).movedim(2, 0).flatten(1))
        sums = [group.sum(1, dtype=wide(group)).to(groups[0].device) for group in groups]
        yield f"{units.name}.weight", torch.stack(sums).sum(0)
