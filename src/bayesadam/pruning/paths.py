"""Scores that look beyond one weight: how much signal reaches it, and how much it hands on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesadam._alone import in_eval_mode
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_one_network
from bayesadam.pruning.graph import Units, understand
from bayesadam.pruning.rankings import Ranking, weight_scores


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
    require_one_network(posterior, "pruning")
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
                by_unit = reader.by_unit(scores[read], units.width) * arriving[units.name][:, None]
                scores[read] = by_unit.reshape(scores[read].shape)
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
                by_unit = reader.by_unit(strength[read], units.width) * arriving[units.name].square()[:, None]
                strength[read] = by_unit.reshape(strength[read].shape)
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
