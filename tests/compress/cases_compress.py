"""Posteriors with chosen curvature, and the slow way to prune by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from bayesadam import Posterior
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.settings import Settings
from predict.cases_networks import Lambda


def posterior_of(
    model: nn.Module,
    moments: Mapping[str, Tensor] | None = None,
    *,
    names: Iterable[str] | None = None,
    n_data: float = 100.0,
    delta: float = 0.0,
    seed: int = 0,
    **settings: object,
) -> Posterior:
    """A posterior over some of a model's parameters, its second moments given or random, a fifth of them 0."""
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    mode, second = {}, {}
    for name in parameters if names is None else names:
        wide = torch.float64 if parameters[name].dtype == torch.float64 else torch.float32
        mode[name] = parameters[name].detach().to(wide, copy=True)
        drawn = torch.rand(mode[name].shape, generator=generator, dtype=wide)
        second[name] = moments[name] if moments else torch.where(drawn < 0.2, 0.0, drawn).to(mode[name].device)
    prior = dict.fromkeys(mode, delta)
    omitted = {name: "left out" for name in parameters if name not in mode}
    return Posterior(mode, Diagonal(second), Settings(n_data, prior, **settings), omitted, model=model)  # type: ignore[arg-type]


def sorted_masks(scores: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """The reference: one full sort by score and position; False at the first `count`."""
    flat = np.concatenate([np.asarray(scores[name], dtype=np.float64).ravel() for name in scores])
    order = np.argsort(flat, kind="stable")
    kept = np.ones(len(flat), dtype=bool)
    kept[order[:count]] = False
    masks, start = {}, 0
    for name in scores:
        size = np.asarray(scores[name]).size
        masks[name] = kept[start : start + size].reshape(np.asarray(scores[name]).shape)
        start += size
    return masks


def removed(masks: Mapping[str, Tensor]) -> int:
    return sum(int((~mask).sum()) for mask in masks.values())


def normalised() -> tuple[nn.Sequential, torch.optim.Adam, Tensor]:
    """A trained network with a batch norm, which makes the bias before it idle; its optimiser and its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias.fill_(2.0)
    optimizer, x = torch.optim.Adam(model.parameters(), lr=1e-2), torch.randn(200, 6)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for rows in torch.randint(200, (200, 32)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval(), optimizer, x


def error(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    """E|z' − z|²."""
    with torch.no_grad():
        return float((one.eval()(x) - other.eval()(x)).double().square().mean())


def twice() -> nn.Module:
    """A layer used twice before the head."""
    forward = lambda self, x: self.head(self.layer(self.layer(x).tanh()).tanh())  # noqa: E731
    return Lambda(forward, layer=nn.Linear(4, 4), head=nn.Linear(4, 2))
