"""What is left of a network, moved to make up for the weights that were taken out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam.compress.masking import apply_masks, checked
from bayesadam.compress.solving import Moments, conditional
from bayesadam.compress.walking import Visit, Walk
from bayesadam.predict.matrices import Matrix, matrices_of
from bayesadam.predict.network import Forward
from bayesadam.weights.mixture import require_posterior
from bayesadam.weights.named import Named
from bayesadam.weights.networks import copy_with
from bayesadam.weights.posterior import Posterior

# The prior precision of a weight that is known to be 0: its standard deviation is 1e-15.
_KNOWN = 1e30


@torch.no_grad()
def condition(posterior: Posterior, masks: Named, inputs: Any = None, *, forward: Forward | None = None) -> Posterior:
    """The posterior given that some weights are 0: the others move to where the layers' outputs change least.

    Row by row of each matrix, layer after layer on what the layers before it now give (`compress.solving`):

        w'_R = argmin E (w'·x' − w·x)² + λ |w' − w|²

    No labels and no gradients are needed. `.model` is a copy; yours is untouched. Of a weight outside the masks it is
    known that it is 0: it has a prior precision of 10³⁰, so that draws and variances are those of the weights that
    stay, until `replace` gives the posterior another prior. In the rotated coordinates of `"inputs"` and `"kronecker"`
    no single weight can be known: only the mean is conditioned there.

    Args:
        masks: by parameter name True where a weight stays, of any parameters of the model. Linear layers, convolutions
            and the projections of attention make up for what goes; what another layer shares, tables and norms do not.
        inputs: a few hundred inputs, a batch or a loader, whose targets are left out; the first 4,096 count. None takes
            the inputs' side of the posterior, which `"inputs"` and `"kronecker"` have; a diagonal one has none, and
            nothing moves.
        forward: `forward(model, inputs)` for models whose call is unusual.
    """
    require_posterior(posterior, "conditioning")
    checked(posterior.model, masks)
    changed = [name for name, mask in masks.items() if not bool(mask.all())]
    return conditioned(posterior, posterior, masks, layers_for(posterior, inputs, changed, forward))


def conditioned(
    dense: Posterior,
    start: Posterior,
    masks: Named,
    layers: Walk | Factors | None,
    look: Callable[[Matrix, Moments], None] | None = None,
) -> Posterior:
    """The same for the outputs of `dense`, from the weights of `start`; without `layers` nothing moves.

    `look` is shown the moments of every matrix.
    """
    kept = {name: mask.to(theta.device) for name, theta in start.mode.items() if (mask := masks.get(name)) is not None}
    mode = {name: theta.masked_fill(~kept[name], 0) if name in kept else theta for name, theta in start.mode.items()}
    prior = dict(start.prior_precision)
    for name, mask in kept.items():
        if start.curvature.independent and not bool(mask.all()):
            prior[name] = torch.where(mask, torch.as_tensor(prior[name]).to(mode[name]), _KNOWN)
    # The statistics of the copy's batch norms are looked at anew.
    settings = replace(start.settings, prior_precision=prior)
    small = replace(start, mode=mode, settings=settings, running=None)
    model = copy_with(small.model, small.mean)
    small = replace(small, model=model)
    apply_masks(model, masks)
    if layers is None:
        return small
    own = dict(model.named_parameters())
    stays = {name: masks.get(name, torch.ones_like(p, dtype=torch.bool)).to(p.device) for name, p in own.items()}

    def moved(matrix: Matrix, w: Tensor, moments: Moments) -> Tensor:
        if look is not None:
            look(matrix, moments)
        support, before = matrix.with_bias(stays) != 0, matrix.with_bias(own)
        if matrix.bias is None or matrix.bias in dense.mode:
            return conditional(moments, w, support, before)
        # A bias that the posterior does not hold stays: the others explain what it leaves, z − b.
        b, support[..., -1] = before[..., -1:], False
        rest = replace(moments, c=moments.c - b * moments.a[:, -1:])
        return torch.cat([conditional(rest, w, support, before)[..., :-1], b], dim=2)

    layers.through(model, moved, "conditioning")
    moving = {name for matrix in layers.matrices.values() for name in (matrix.weight, matrix.bias)}
    mode = {name: own[name].detach().to(theta) if name in moving else theta for name, theta in small.mean.items()}
    return replace(small, mode=mode, settings=replace(settings, form="map"), running=None)


@dataclass(frozen=True, eq=False)
class Factors:
    """The input sides of a posterior in place of inputs: A = Q_R diag(Σ_i v̂_ij) Q_Rᵀ, Q_R = I where it has none."""

    dense: Posterior
    matrices: Mapping[str, Matrix]
    a: Mapping[str, Tensor]

    @classmethod
    def of(cls, dense: Posterior, weights: Collection[str]) -> Factors:
        """Of the matrices among some weights; a bias that is no column of its matrix stays as it is."""
        matrices, a, curvature = {}, {}, dense.curvature
        for matrix in (x for listed in matrices_of(dense.model).values() for x in listed if x.weight in weights):
            side, rotation = curvature.inputs.get(matrix.weight), curvature.bases.get(matrix.weight)
            bias: str | None = None
            basis: Tensor | None = None
            values = torch.ones(matrix.size[::2])
            if side is not None:
                basis, values, bias = side.basis, side.spectrum[None], side.bias
            elif matrix.weight in curvature.second_moment:
                values = matrix.into(curvature.second_moment[matrix.weight]).sum(dim=1)
                basis = None if rotation is None else rotation.left if matrix.inputs_first else rotation.right
            matrices[matrix.name] = replace(matrix, bias=bias)
            a[matrix.name] = values.diag_embed() if basis is None else basis * values[:, None] @ basis.mT
        return cls(dense, matrices, a)

    def through(self, small: nn.Module, visit: Visit, description: str) -> None:
        """Visit every matrix, as if each still got the inputs of the dense network; see `Walk.through`."""
        own = dict(small.named_parameters())
        named = {**own, **self.dense.mean}
        for name, matrix in self.matrices.items():
            w = matrix.with_bias(named)
            a = self.a[name].to(w)
            matrix.write(visit(matrix, w, Moments(a, w @ a, (w @ a * w).sum(dim=-1), math.inf)), own)


def layers_for(
    posterior: Posterior, inputs: Any, weights: Collection[str], forward: Forward | None
) -> Walk | Factors | None:
    """What is known of the inputs of some weights: by inputs, or by the posterior's own input sides."""
    if inputs is not None:
        return Walk.of(copy_with(posterior.model, posterior.mean), inputs, weights, forward)
    return None if posterior.curvature.independent else Factors.of(posterior, weights)
