"""Posteriors in float64 of every structure, and each as one dense Gaussian, from its definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import bayesadam as ba
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.inputs import InputSide
from cases import dense_moment, orthonormal, soap

N, DELTA, BATCH = 50, 0.7, 8
# With the input side the bias of the convolution is a column of its matrix, and that of the head stays by itself.
STRUCTURES = ("diagonal", "inputs", "kronecker", "one-sided", "recorded")


class Net(nn.Module):
    """A convolution, a norm, a matrix that no layer explains, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 3, 2), nn.LayerNorm(3)
        self.odd = nn.Parameter(torch.randn(3, 3) / 2)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.norm(self.conv(x).mT) @ self.odd).tanh()
        return self.head(h.mean(dim=1))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 12) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        (model(torch.randn(BATCH, 2, 5).double()) - 1).square().mean().backward()
        optimizer.step()


def posterior_of(structure: str, seed: int = 0) -> ba.Posterior:
    torch.manual_seed(seed)
    model = Net().double()
    how = {"prior_precision": DELTA, "batch_size": BATCH}
    if structure in ("kronecker", "one-sided"):
        sides = {"kronecker": 100, "one-sided": 2}
        optimizer = soap(model.parameters(), lr=1e-2, max_side=sides[structure], precondition_every=2)
        steps(model, optimizer)
        return ba.Posterior.from_optimizer(model, orthonormal(optimizer), N, structure="kronecker", **how)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    recorder = ba.Recorder(optimizer, keep=30, every=1)
    steps(model, optimizer, 30 if structure == "recorded" else 12)
    if structure == "recorded":
        return ba.Posterior.from_recorder(model, recorder, N, power=0.5, **how)
    posterior = ba.Posterior.from_optimizer(model, optimizer, N, **how)
    return posterior if structure == "diagonal" else with_sides(posterior)


def with_sides(posterior: ba.Posterior) -> ba.Posterior:
    """The input side of two layers, of made-up inputs: what `with_inputs` finds by running the network."""
    v, shapes = dict(posterior.curvature.second_moment), posterior.shapes
    sides = {}
    for name, bias in (("conv.weight", "conv.bias"), ("head.weight", None)):
        width = shapes[name][1:].numel() + (bias is not None)
        a = torch.randn(40, width).double() @ torch.randn(width, width).double()
        sides[name] = InputSide.of(a.T @ a / 40, shapes[name], bias)
    moments = {name: side.moments(v.pop(name), v.pop(side.bias) if side.bias else None) for name, side in sides.items()}
    return replace(posterior, curvature=Diagonal({**v, **moments}, {}, sides))


def names_of(q: ba.GaussianWeights) -> list[str]:
    """In the order of the dense matrix; a bias that is a column follows each of its rows."""
    joined = {side.bias for side in q.curvature.inputs.values()}
    return [name for name in q.mode if name not in joined]


def flat(q: ba.GaussianWeights, named: Mapping[str, Tensor]) -> Tensor:
    """(..., all weights) of weights by name with any leading dimensions."""
    parts = []
    for name in names_of(q):
        side, lead = q.curvature.inputs.get(name), named[name].dim() - len(q.shapes[name])
        matrix = named[name].flatten(lead)
        if side is not None:
            matrix = matrix.unflatten(-1, (q.shapes[name][0], -1))
            matrix = matrix if side.bias is None else torch.cat([matrix, named[side.bias].unsqueeze(-1)], dim=-1)
            matrix = matrix.flatten(-2)
        parts.append(matrix)
    return torch.cat(parts, dim=-1)


def curvature(q: ba.GaussianWeights, power: float) -> Tensor:
    """Vᵖ of all weights together."""
    blocks = []
    for name in names_of(q):
        v, side, bases = q.curvature.second_moment[name], q.curvature.inputs.get(name), q.curvature.bases
        if side is None:
            blocks.append(dense_moment(Diagonal({name: v}, {name: bases[name]} if name in bases else {}), power))
        else:
            a = side.basis @ side.spectrum.diag() @ side.basis.T
            rows = v.sum(dim=1) / side.spectrum.sum()
            blocks.append(torch.block_diag(*[g**power * a for g in rows]))
    return torch.block_diag(*blocks)


def dense(q: ba.GaussianWeights, prior: Tensor | float = DELTA) -> MultivariateNormal:
    """All weights in one Gaussian; `prior` is δ, one for all or one a weight."""
    c, s = curvature(q, q.settings.power), q.settings
    pull = torch.as_tensor(prior, dtype=torch.float64).expand(len(c)).diag()
    data = s.scale * s.n_data * (s.batch_size or 1) ** (2 * s.power - 1) * c
    sigma = torch.linalg.inv(data + pull)
    theta = flat(q, q.mode)
    return MultivariateNormal(theta if s.form == "map" else sigma @ data @ theta, (sigma + sigma.T) / 2)
