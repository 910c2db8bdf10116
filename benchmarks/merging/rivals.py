"""What merging by curvature is compared with, from the published equations: weights by name in, weights by name out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bayesadam.merging.methods import fisher

Weights = Mapping[str, Tensor]


def stacked(models: Sequence[Weights]) -> dict[str, Tensor]:
    """(models, *shape) by name."""
    return {name: torch.stack([model[name] for model in models]) for name in models[0]}


def ties(tau: Weights, density: float) -> dict[str, Tensor]:
    """The largest changes of each model, of the sign that weighs more at each weight, averaged (Yadav et al. 2023)."""
    flat = torch.cat([change.flatten(1) for change in tau.values()], dim=1)
    keep = max(1, round(density * flat.shape[1]))
    least = flat.abs().topk(keep, dim=1).values[:, -1:]
    trimmed = torch.where(flat.abs() >= least, flat, 0.0)
    agreeing = (trimmed.sign() == trimmed.sum(dim=0).sign()) & (trimmed != 0)
    merged = (trimmed * agreeing).sum(dim=0) / agreeing.sum(dim=0).clamp(min=1)
    parts = merged.split([change[0].numel() for change in tau.values()])
    return {name: part.view(tau[name].shape[1:]) for name, part in zip(tau, parts, strict=True)}


def dare(tau: Weights, density: float, seed: int) -> dict[str, Tensor]:
    """Changes dropped at random, what is left scaled up, and added (Yu et al. 2024).

    Of density 1 it is task arithmetic, Σ τᵢ (Ilharco et al. 2023).
    """
    merged = {}
    for number, (name, change) in enumerate(tau.items()):
        draw = torch.Generator().manual_seed(1000 * seed + number)
        kept = torch.rand(change.shape, generator=draw).to(change.device) < density
        merged[name] = (change * kept).sum(dim=0) / density
    return merged


def exact_fisher(model: nn.Module, x: Tensor, *, chunk: int = 250) -> dict[str, Tensor]:
    """Diagonal of the Fisher information: the mean over inputs of Σ_c p_c (∂ log p_c/∂θ)², example by example."""
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def log_prob(weights: Weights, image: Tensor, label: int) -> Tensor:
        return F.log_softmax(functional_call(model, dict(weights), (image[None],)), dim=1)[0, label]

    per_example = vmap(grad(log_prob), in_dims=(None, 0, None))
    total = {name: torch.zeros_like(theta) for name, theta in params.items()}
    for images in x.split(chunk):
        with torch.no_grad():
            probs = model(images).softmax(dim=1)
        for label in range(probs.shape[1]):
            for name, gradients in per_example(params, images, label).items():
                total[name] += torch.tensordot(probs[:, label], gradients.square(), dims=1)
    return {name: sums / len(x) for name, sums in total.items()}


def fisher_merged(experts: Sequence[Weights], fishers: Sequence[Weights]) -> dict[str, Tensor]:
    """θ = (Σ Fᵢ)⁻¹ Σ Fᵢ θᵢ (Matena & Raffel 2022)."""
    thetas, curvature, equal = stacked(experts), stacked(fishers), torch.ones(len(experts))
    return {name: fisher(theta, curvature[name], equal) for name, theta in thetas.items()}
