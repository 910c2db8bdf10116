"""Whole units out of a network by Torch-Pruning: an importance, and removal after the others have made up for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bayesadam._alone import unwrap
from bayesadam._extras import require
from bayesadam.compress.conditioning import condition
from bayesadam.compress.ranking import Ranking, weight_scores
from bayesadam.errors import MatchError
from bayesadam.predict.network import Forward
from bayesadam.weights.posterior import Posterior


@torch.no_grad()
def remove_units(posterior: Posterior, pruner: Any, inputs: Any, *, forward: Forward | None = None) -> nn.Module:
    """`pruner.model` without the units that Torch-Pruning removes in its next step, the others' weights moved.

    The weights R that stay are conditioned on zeros in place of those that go, the rows of a unit and the columns that
    multiply its outputs, as in `condition`: the layers after it make up for the loss on the inputs. The zeros are then
    cut out, which changes nothing but where a norm takes its mean over channels (layer and group norms) or attention
    divides by the root of its width:

        small = copy.deepcopy(posterior.model)
        how = ba.compress.importance(posterior, small)
        pruner = torch_pruning.pruner.BasePruner(small, example, how, pruning_ratio=0.3, ignored_layers=[small.head])
        small = ba.compress.remove_units(posterior, pruner, inputs)

    Args:
        pruner: of a copy of the posterior's model, that has not pruned yet; it takes one step.
        inputs, forward: as in `condition`.
    """
    network, dense = unwrap(pruner.model), dict(posterior.model.named_parameters())
    shapes = {name: p.shape for name, p in network.named_parameters()}
    if shapes != {name: p.shape for name, p in dense.items()}:
        raise MatchError("the pruner's model is no copy of the posterior's: build the pruner on copy.deepcopy of it")
    # All units are chosen before the first group is given. From then on a parameter holds where its weights were.
    groups = pruner.step(interactive=True)
    group = next(groups, None)
    for parameter in network.parameters():
        parameter.grad = None
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
    while group is not None:
        group.prune()
        group = next(groups, None)
    places = {name: p.detach().long() for name, p in network.named_parameters()}
    masks: dict[str, Tensor] = {}
    for name, place in places.items():
        masks[name] = torch.zeros(shapes[name], dtype=torch.bool)
        masks[name].view(-1)[place] = True
    moved = dict(condition(posterior, masks, inputs, forward=forward).model.named_parameters())
    for name, parameter in network.named_parameters():
        parameter.data = moved[name].detach().flatten()[places[name].to(moved[name].device)]
    return network


@torch.no_grad()
def importance(posterior: Posterior, model: nn.Module, *, ranking: Ranking = "snr") -> Any:
    """An importance for Torch-Pruning, which takes whole channels out of `model`, the posterior's or a copy of it.

    A channel's is the sum over all weights that would go with it of their scores, as in `masks`. The scores are put
    into the parameters' gradients as score/θ, which Torch-Pruning cuts along with the weights: its Taylor importance is
    Σ |θ · gradient|. Clear them when it is done. `remove_units` has an example.
    """
    torch_pruning = require("torch_pruning")
    scores: dict[str, Tensor] = weight_scores(posterior, ranking)
    for name, parameter in unwrap(model).named_parameters():
        score = scores.get(name, torch.zeros_like(parameter)).to(parameter)
        if score.shape != parameter.shape:
            raise MatchError(f"{name!r} has shape {tuple(parameter.shape)}, in the posterior {tuple(score.shape)}")
        parameter.grad = torch.where(parameter == 0, 0, score / parameter)
    return torch_pruning.importance.GroupTaylorImportance(group_reduction="sum", normalizer=None, bias=True)
