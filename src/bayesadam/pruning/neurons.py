"""Scores that follow units from layer to layer: pruning whole units, so that `shrink` takes them out, and whole paths."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesadam._alone import in_eval_mode
from bayesadam.gaussian.diagonal import wide
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_posterior
from bayesadam.pruning.graph import Units, understand
from bayesadam.pruning.masks import Scope, checked_fraction, compete, nothing_removed
from bayesadam.pruning.names import matching
from bayesadam.pruning.rankings import Ranking, weight_scores
from bayesadam.pruning.select import lowest


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
    share = checked_fraction(fraction)
    found = _removable(posterior, exclude, example_input)
    scores = dict(_ranked(posterior, ranking, found))
    removed: dict[str, Tensor] = {}
    for names in compete(scores, scope):
        best = {name: scores[name].argmax() for name in names}
        # The best of a layer is put out of reach, and the count cut to what is left.
        ranked = [scores[name].index_fill(0, best[name], torch.inf) for name in names]
        total = sum(len(score) for score in ranked)
        count = min(round(share * total), total - len(names))
        removed |= zip(names, lowest(ranked, [scores[name] for name in names], count), strict=True)
    masks = nothing_removed(posterior)
    for units in found:
        gone = removed[f"{units.name}.weight"]
        for name in _own(units):
            masks[name][gone.to(masks[name].device)] = False
        for reader in units.readers:
            mask = masks[f"{reader.name}.weight"]
            reader.by_unit(mask, units.width)[:, :, gone.to(mask.device)] = False
    return masks


def _removable(posterior: Posterior, exclude: str | Sequence[str], example: Any) -> list[Units]:
    require_posterior(posterior, "pruning")
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


def path_scores(posterior: Posterior, *, ranking: Ranking = "snr", example_input: Any) -> dict[str, Tensor]:
    """s_ij a_j b_i, the score of a weight times what reaches its input and what its output reaches; for `ranking=`.

    With s the scores of single weights, such as signal-to-noise ratios, a_j is the strength of the unit the weight reads,
    a_j² = Σ_k (s_jk a_k)² + s_j² with the bias last, and b_i that of the units which read its own, b_i² = Σ_k (s_ki b_k)²;
    both are 1 at the network's ends, and 1 on average over each layer. Squared, the product sums over all paths through the
    weight. A weight out of a unit that nothing reaches is worth nothing, however sure it is, and so is one into a unit that
    nothing reads: at high fractions this keeps whole paths where single scores leave stumps.

    Units are followed on `example_input`, as far as their layers are understood (see `shrink`); beyond that a weight keeps
    its own score.

    >>> from bayesadam.pruning import pruning_masks
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> adam = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(4, 3)).square().mean().backward()
    >>> adam.step()
    >>> posterior = Posterior.from_optimizer(model, adam, n_data=4)
    >>> masks = pruning_masks(posterior, 0.5, ranking=path_scores(posterior, example_input=torch.ones(1, 3)))
    """
    require_posterior(posterior, "pruning")
    own = weight_scores(posterior, ranking)
    with in_eval_mode(posterior.model), torch.no_grad():
        found = [units for units in understand(posterior.model, example_input).units if f"{units.name}.weight" in own]
    arriving, leaving = _arriving(found, own), _leaving(found, own)
    scores = dict(own)
    for units in found:
        name = f"{units.name}.weight"
        scores[name] = scores[name] * _along(leaving[units.name], scores[name])
        if f"{units.name}.bias" in scores:
            scores[f"{units.name}.bias"] = scores[f"{units.name}.bias"] * leaving[units.name]
        for reader in units.readers:
            read = f"{reader.name}.weight"
            if read in scores:
                scores[read] = reader.scaled(scores[read], arriving[units.name])
    return scores


def _arriving(found: list[Units], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """a of every layer's units, from the input on."""
    strength = {name: score.square() for name, score in own.items()}
    arriving: dict[str, Tensor] = {}
    for units in found:
        square = strength[f"{units.name}.weight"].flatten(1).sum(dim=1)
        square = square + own[f"{units.name}.bias"].square() if f"{units.name}.bias" in own else square
        arriving[units.name] = _of_mean_one(square.sqrt())
        for reader in units.readers:
            read = f"{reader.name}.weight"
            if read in strength:
                strength[read] = reader.scaled(strength[read], arriving[units.name].square())
    return arriving


def _leaving(found: list[Units], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """b of every layer's units, from the output back."""
    leaving: dict[str, Tensor] = {}
    for units in reversed(found):
        total = torch.zeros(units.width, dtype=torch.float64, device=own[f"{units.name}.weight"].device)
        for reader in units.readers:
            read = own.get(f"{reader.name}.weight")
            if read is not None:
                handed_on = read if reader.name not in leaving else read * _along(leaving[reader.name], read)
                total += reader.by_unit(handed_on.square(), units.width).sum(dim=(0, 1, 3), dtype=torch.float64)
        leaving[units.name] = _of_mean_one(total.sqrt().to(own[f"{units.name}.weight"].dtype))
    return leaving


def _along(by_output: Tensor, like: Tensor) -> Tensor:
    return by_output.view(-1, *[1] * (like.dim() - 1))


def _of_mean_one(tensor: Tensor) -> Tensor:
    mean = tensor.mean()
    return tensor / mean if mean > 0 else torch.ones_like(tensor)
