"""Whole units: scores along their paths, masks that remove them, and a smaller network without them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._alone import in_eval_mode, unwrap
from bayesadam.errors import MatchError
from bayesadam.pruning.apply import prune
from bayesadam.pruning.graph import Reader, Units, understand
from bayesadam.pruning.masks import Exclude, Ranking, Scope, excluded, nothing_removed, removals, weight_scores
from bayesadam.weights.diagonal import wide
from bayesadam.weights.mixture import require_posterior
from bayesadam.weights.posterior import Posterior


def neuron_masks(
    posterior: Posterior,
    fraction: float,
    *,
    ranking: Ranking = "snr",
    scope: Scope = "global",
    exclude: Exclude = (),
    example_input: Any,
) -> dict[str, Tensor]:
    """Masks that remove whole units, with the incoming weights, the bias and the outgoing weights of each.

    Of the n units that can be taken out (see `shrink`) round(fraction × n) are, lowest score first, except the best of
    each layer, and those with a weight outside the posterior.

    Args:
        ranking: of weights, as in `pruning_masks`; a unit's score is the sum over all that would go with it.
        scope, exclude: as in `pruning_masks`, of layers by the names of their weights.
        example_input: a batch that the model takes, to follow the units through it.
    """
    found, scores = ranked_units(posterior, ranking, exclude, example_input)
    # The best of a layer is out of reach.
    ranked = {name: score.index_fill(0, score.argmax(), torch.inf) for name, score in scores.items()}
    removed = removals(ranked, scope, fraction, spared=1)
    masks = nothing_removed(posterior)
    for units in found:
        gone = removed[f"{units.name}.weight"]
        for mask in _by_unit(units, masks):
            mask[gone.to(mask.device)] = False
    return masks


def ranked_units(
    posterior: Posterior, ranking: Ranking, exclude: Exclude, example: Any
) -> tuple[list[Units], dict[str, Tensor]]:
    """The layers whose units can be taken out, and the score of each unit by the name of its layer's weight."""
    require_posterior(posterior, "pruning")
    whole = excluded(posterior, exclude)
    with in_eval_mode(posterior.model):
        every = understand(posterior.model, _arguments(example))
    touched = {units.name: [*_own(units), *(f"{r.name}.weight" for r in units.readers)] for units in every}
    known = [units for units in every if all(name in posterior.mode for name in touched[units.name])]
    found = [units for units in known if f"{units.name}.weight" not in whole]
    scores = weight_scores(posterior, ranking, dict.fromkeys(n for units in found for n in touched[units.name]))
    sums = {}
    for units in found:
        groups = [group.reshape(units.width, -1) for group in _by_unit(units, scores)]
        each = [group.sum(1, dtype=wide(group)).to(groups[0].device) for group in groups]
        sums[f"{units.name}.weight"] = torch.stack(each).sum(0)
    return found, sums


def _own(units: Units) -> list[str]:
    """The parameters of the layer itself."""
    return [f"{units.name}.{key}" for key in ("weight", "bias") if getattr(units.layer, key) is not None]


def _by_unit(units: Units, named: Mapping[str, Tensor]) -> list[Tensor]:
    """Views of all tensors that go with the units, units first."""
    read = [reader.by_unit(named[f"{reader.name}.weight"], units.width).movedim(2, 0) for reader in units.readers]
    return [*(named[name] for name in _own(units)), *read]


@torch.no_grad()
def path_scores(posterior: Posterior, *, ranking: Ranking = "snr", example_input: Any) -> dict[str, Tensor]:
    """s_ij a_j b_i, the score of a weight times what reaches its input and what its output reaches; for `ranking=`.

    With s the scores of single weights, such as signal-to-noise ratios, a_j is the strength of the unit the weight
    reads, a_j² = Σ_k (s_jk a_k)² + s_j² with the bias last, and b_i that of the units which read its own,
    b_i² = Σ_k (s_ki b_k)²; both are 1 at the network's ends, and on average over each layer. Squared, the product sums
    over all paths through the weight: at high fractions this keeps whole paths where single scores leave stumps.

    Units are followed on `example_input`, as far as their layers are understood (see `shrink`); beyond that a weight
    keeps its own score.
    """
    require_posterior(posterior, "pruning")
    scores = weight_scores(posterior, ranking)
    with in_eval_mode(posterior.model):
        every = understand(posterior.model, _arguments(example_input))
    found = [units for units in every if f"{units.name}.weight" in scores]
    own = dict(scores)
    # a, from the input on.
    for units in found:
        square = scores[f"{units.name}.weight"].square().flatten(1).sum(dim=1)
        if f"{units.name}.bias" in scores:
            square = square + scores[f"{units.name}.bias"].square()
        arriving = _of_mean_one(square.sqrt())
        for read, reader in _readers_in(scores, units):
            scaled = reader.by_unit(scores[read], units.width) * arriving[:, None]
            scores[read] = scaled.reshape(scores[read].shape)
    # b, from the output back, by the scores without a.
    for units in reversed(found):
        total = torch.zeros(units.width, dtype=torch.float64, device=own[f"{units.name}.weight"].device)
        for read, reader in _readers_in(own, units):
            total += reader.by_unit(own[read].square(), units.width).sum(dim=(0, 1, 3), dtype=torch.float64)
        leaving = _of_mean_one(total.sqrt().to(own[f"{units.name}.weight"].dtype))
        for name in _own(units):
            if name in scores:
                along = leaving.view(-1, *[1] * (scores[name].dim() - 1))
                scores[name], own[name] = scores[name] * along, own[name] * along
    return scores


def _readers_in(scores: Mapping[str, Tensor], units: Units) -> list[tuple[str, Reader]]:
    return [(name, reader) for reader in units.readers if (name := f"{reader.name}.weight") in scores]


def _of_mean_one(tensor: Tensor) -> Tensor:
    mean = tensor.mean()
    return tensor / mean if mean > 0 else torch.ones_like(tensor)


def shrink(model: nn.Module, masks: Mapping[str, Tensor] | None = None, *, example_input: Any) -> nn.Module:
    """A new model without the units that nothing reads; in evaluation it computes the same, the original is untouched.

    A unit of a linear or convolutional layer goes where all weights that read it are 0, as the masks of `neuron_masks`
    leave them. Repeated until nothing changes; each layer keeps at least one unit, and the model its inputs and
    outputs. Units are followed from layer to layer by torch.fx through activations, dropout, batch norms, pooling,
    flattening and all else that keeps them apart. Units that pass through anything else (additions, layer norms,
    attention, groups, tied or hooked layers) stay.

    Args:
        masks: weights to set to 0 first; None where they are 0 already.
        example_input: a batch that the model takes, a tensor or a tuple of arguments. The outputs on it must agree, or
            this raises.
    """
    small, example = copy.deepcopy(unwrap(model)), _arguments(example_input)
    if masks is not None:
        prune(small, masks)
    with torch.no_grad(), in_eval_mode(small):
        expected = _outputs(small, example)
        every = understand(small, example)
        # A sum, not `any`: every round goes over all layers.
        while sum(_take_out(units) for units in every):
            pass
        if not all(map(_agree, expected, _outputs(small, example))):
            raise MatchError("the smaller model does not compute the same on example_input: is the model random?")
    return small


def _arguments(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, tuple | list) else (example,)


def _take_out(units: Units) -> bool:
    """Take out the units that nothing reads; whether there were any."""
    layer, width = units.layer, units.width
    gone = torch.ones(width, dtype=torch.bool, device=layer.weight.device)
    for reader in units.readers:
        gone &= (reader.by_unit(reader.layer.weight, width) == 0).all(3).all(1).all(0).to(gone.device)
    if bool(gone.all()):
        gone[0] = False
    if not bool(gone.any()):
        return False
    remaining = (~gone).nonzero()[:, 0]
    for reader in units.readers:
        read, columns = reader.layer, reader.layout.positions(remaining, width)
        read.weight = _kept(read.weight, columns, dim=1)
        setattr(read, "in_features" if isinstance(read, nn.Linear) else "in_channels", len(columns))
    for norm, layout in units.norms:
        channels = layout.positions(remaining, width)
        for key, parameter in norm._parameters.items():
            norm._parameters[key] = None if parameter is None else _kept(parameter, channels)
        for key, buffer in norm._buffers.items():
            if buffer is not None and buffer.dim():
                norm._buffers[key] = buffer[channels.to(buffer.device)].clone()
        norm.num_features = len(channels)  # type: ignore[assignment]
    layer.weight = _kept(layer.weight, remaining)
    if layer.bias is not None:
        layer.bias = _kept(layer.bias, remaining)
    setattr(layer, "out_features" if isinstance(layer, nn.Linear) else "out_channels", len(remaining))
    return True


def _kept(parameter: Tensor, indices: Tensor, dim: int = 0) -> nn.Parameter:
    values = parameter.detach().index_select(dim, indices.to(parameter.device))
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _outputs(model: nn.Module, example: tuple[Any, ...]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(model(*example)) if isinstance(leaf, Tensor)]


def _agree(wanted: Tensor, got: Tensor) -> bool:
    """Up to a share of the largest output: sums are taken in another order."""
    if wanted.shape != got.shape or not wanted.is_floating_point() or not wanted.numel():
        return wanted.shape == got.shape
    bound = (1e-4 if wanted.element_size() > 2 else 0.05) * float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(got, wanted, rtol=0.0, atol=bound + torch.finfo(wanted.dtype).eps, equal_nan=True)
