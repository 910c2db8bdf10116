"""Networks of every likelihood, trained for seconds once a session, and data like those they were trained on."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.likelihoods import LIKELIHOODS, likelihood
from cases import seeded


def blobs(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three overlapping clouds."""
    y = torch.randint(3, (n,), generator=seeded(seed))
    angle = 2 * math.pi * y / 3
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.6 * torch.randn(n, 2, generator=seeded(seed + 1)), y


def waves(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two targets, whose noise depends on the input."""
    x = 4 * torch.rand(n, 1, generator=seeded(seed)) - 2
    noise = torch.randn(n, 2, generator=seeded(seed + 1)) * (0.1 + 0.2 * (x > 0))
    return x, torch.cat([x.sin(), x.cos()], dim=1) + noise


def data(name: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    if name == "classification":
        return blobs(n, seed)
    if name == "binary":
        x, y = blobs(n, seed)
        return x, torch.stack([y == 0, y == 1], dim=1).float()
    x, y = waves(n, seed)
    return (x, torch.poisson((1 + y).clamp(min=0.1), generator=seeded(seed))) if name == "poisson" else (x, y)


def fitted(name: str, x: Tensor, y: Tensor, *, width: int = 16, steps: int = 300) -> ba.Posterior:
    """Of a network of one hidden layer, trained by Adam on all the data at once."""
    kind = likelihood(name)
    outputs = 3 if name == "classification" else y.shape[1] * kind.outputs_per_target
    model = nn.Sequential(nn.Linear(x.shape[1], width), nn.Tanh(), nn.Linear(width, outputs))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        kind.loss(model(x)[None], y[None]).sum().backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model.eval(), optimizer, len(x), batch_size=len(x), likelihood=name)


@cache
def trained(name: str, seed: int = 0) -> ba.Posterior:
    torch.manual_seed(seed)
    return fitted(name, *data(name, 300, 100))


def same_answers(one: ba.Answer, other: ba.Answer) -> bool:
    """Whether two answers are the same to the bit."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


NAMES = sorted(LIKELIHOODS)
RISKS = {
    "classification": {"risk": 0.05},
    "binary": {"risk": 0.1},
    "regression": {"risk": 0.1, "tolerance": 0.7},
    "heteroscedastic": {"risk": 0.1, "tolerance": 0.3},
    "poisson": {"risk": 0.3, "tolerance": 2.5},
}
