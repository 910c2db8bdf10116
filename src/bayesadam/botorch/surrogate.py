"""A small ensemble of networks fitted to a few evaluations, and the Gaussian process that its linearisation is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesadam._checks import count
from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, flatten, initial, unflatten
from bayesadam.engine.network import member as own_part
from bayesadam.engine.rules import Adam
from bayesadam.engine.stack import Stack, cosine, train
from bayesadam.errors import MatchError
from bayesadam.gaussian.low_rank import low_rank_of
from bayesadam.gaussian.settings import Settings
from bayesadam.posterior import Mixture, Posterior
from bayesadam.predict.call import Call
from bayesadam.predict.moments import jacobians, white_rows

# Below this share of the largest eigenvalue a covariance is rounding.
_JITTER = 1e-10
# The noise as a share of the signal, from which evidence chooses.
_RATIOS = torch.logspace(-7, 1, 33, dtype=torch.float64)


def fit_mixture(
    x: Tensor,
    y: Tensor,
    *,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    n_ensemble: int = 4,
    steps: int = 600,
    lr: float = 1e-2,
    rounds: int = 2,
    seed: int = 0,
    start: Sequence[Mapping[str, Tensor]] | None = None,
) -> Mixture:
    """Networks trained as one stack on all rows, each with the exact Gauss-Newton posterior of its linearisation.

    x (n, d) and y (n, m) are standardised. Every round trains at the penalty δ σ²/N of the round before, and then takes
    δ and σ² where the evidence of the linearised network is largest: with y' = y − f + J θ,

        y' ~ N(0, J Jᵀ/δ + σ²),    q(θ) = N(θ, (Jᵀ J/σ² + δ)⁻¹).

    Args:
        start: weights by name to begin with, of each network; None draws them.
    """
    count("n_ensemble", n_ensemble, "networks")
    network = Network(x.shape[1], tuple(hidden), y.shape[1], activation)
    x, y = x.double(), y.double()
    seeds = [seed * 1000 + number for number in range(n_ensemble)]
    if start is None:
        weights = flatten(initial(network, seeds))
    else:
        weights = flatten({name: torch.stack([one[name] for one in start]).float() for name in network.shapes()})
    few, many = x.float().expand(n_ensemble, *x.shape), y.float()

    def batch(_: Tensor) -> tuple[Tensor, Slope]:
        return few, lambda f: (f - many) / len(x)

    noise, prior = torch.full((n_ensemble,), 1e-2), torch.full((n_ensemble,), 1.0)
    for _ in range(rounds):
        stack = Stack(network, Adam(), seeds, batch, n_data=len(x), weights=weights.clone())
        stack.penalty = (noise * prior / len(x))[:, None]
        train(stack, [torch.zeros(steps, n_ensemble, 1, dtype=torch.long)], cosine(lr, steps))
        weights = stack.weights
        members = []
        for number in range(n_ensemble):
            params = {name: t.double() for name, t in own_part(unflatten(network, weights), number).items()}
            members.append(_posterior(network, params, x, y))
        noise = torch.tensor([float(q.noise_variance.mean()) for q in members])
        prior = torch.tensor([float(next(iter(q.prior_precision.values()))) for q in members])
    return Mixture(members)


def _posterior(network: Network, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Posterior:
    model = network.build(params).double()
    for name, tensor in model.named_parameters():
        tensor.data = params[name]
    with torch.no_grad():
        f = model(x)
    rows = jacobians(Call(model), params, {}, x)
    flat = torch.cat([j.flatten(2) for j in rows.values()], dim=2).flatten(0, 1)
    theta = torch.cat([p.flatten() for p in params.values()])
    target = (y - f).flatten() + flat @ theta
    delta, noise = evidence(flat @ flat.T, target)
    structure = low_rank_of({name: j.flatten(0, 1) for name, j in rows.items()})
    settings = Settings(len(flat), dict.fromkeys(params, delta), 1.0, 1, scale=1 / noise)
    sigma = torch.full((y.shape[1],), noise, dtype=torch.float64)
    return Posterior(params, structure, settings, model=model, likelihood="regression", noise_variance=sigma)


def evidence(kernel: Tensor, target: Tensor) -> tuple[float, float]:
    """δ and σ² at the largest log N(y'; 0, K/δ + σ²): over ratios σ² δ, 1/δ being y'ᵀ (K + σ² δ)⁻¹ y'/n at each."""
    values, vectors = torch.linalg.eigh(kernel)
    scale = float(values.mean().clamp(min=1e-12))
    squares, values = (vectors.T @ target).square(), values.clamp(min=0) / scale
    spectra = values + _RATIOS[:, None]
    size = (squares / spectra).mean(dim=1)
    scores = -0.5 * (len(target) * size.log() + spectra.log().sum(dim=1))
    best = int(scores.argmax())
    return scale / float(size[best]), float(size[best] * _RATIOS[best])


@dataclass(frozen=True, eq=False)
class Process:
    """The Gaussian process of linearised networks: the moments of f, of a mixture matched, and what was observed since.

    k(x, x') = J Σ J'ᵀ, of several networks Σ π (k_m + (f_m − f̄)(f'_m − f̄')). Conditioning on new observations is exact
    for this process: it is what the networks' linearisation would learn, without training them again.

    Attributes:
        mixture: networks over standardised inputs and outcomes.
        inputs: centre and scale of the inputs, (2, d).
        outcomes: centre and scale of the outcomes, (2, m).
        observed: standardised inputs, (..., k, d), outcomes and their noise, (..., k, m), since the networks' training.
    """

    mixture: Mixture
    inputs: Tensor
    outcomes: Tensor
    observed: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def fit(cls, X: Tensor, Y: Tensor, *, start: Process | None = None, **settings: Any) -> Process:
        """Of inputs (n, d) and outcomes (n, m); `start` begins with another one's networks, and trains less.

        See `fit_mixture` for the settings.
        """
        if X.dim() != 2 or Y.dim() != 2 or len(X) != len(Y) or not len(X):
            raise MatchError(f"X has shape {tuple(X.shape)} and Y {tuple(Y.shape)}: they must be (n, d) and (n, m)")
        X, Y = X.detach().double(), Y.detach().double()
        inputs = _standard(X) if start is None else start.inputs
        outcomes = _standard(Y)
        weights = None
        if start is not None:
            weights = [member.mode for member in start.mixture]
            settings = {"rounds": 1, "steps": 200, **settings}
        mixture = fit_mixture((X - inputs[0]) / inputs[1], (Y - outcomes[0]) / outcomes[1], start=weights, **settings)
        return cls(mixture, inputs, outcomes)

    @property
    def noise(self) -> Tensor:
        """σ² of the outcomes, (m,)."""
        each = [torch.as_tensor(member.noise_variance).double() for member in self.mixture]
        return torch.stack(each).mean(dim=0).expand(self.outcomes.shape[1]) * self.outcomes[1].square()

    def moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """E[f], (..., q, m), and Cov[f], (..., q m, q m), of inputs (..., q, d); a point's outputs are neighbours."""
        x = (X.double() - self.inputs[0]) / self.inputs[1]
        mean, covariance = self._joint(x) if self.observed is None else self._conditioned(x, *self.observed)
        scale = self.outcomes[1].repeat(x.shape[-2])
        mean, covariance = self.outcomes[0] + self.outcomes[1] * mean, covariance * scale[:, None] * scale
        return mean.to(X.dtype), covariance.to(X.dtype)

    def observe(self, X: Tensor, Y: Tensor, noise: Tensor | None = None) -> Process:
        """Conditioned on outcomes Y, (..., k, m), at X, (..., k, d), whose batch dimensions broadcast.

        Args:
            noise: their variances, of Y's shape; None for the process's own.
        """
        x, y = (X.double() - self.inputs[0]) / self.inputs[1], (Y.double() - self.outcomes[0]) / self.outcomes[1]
        own = (self.noise if noise is None else noise.double()) / self.outcomes[1].square()
        new = [x, y, own.expand(y.shape)]
        if self.observed is not None:
            old = list(self.observed)
            batch = torch.broadcast_shapes(*(t.shape[:-2] for t in (*old, *new)))
            new = [
                torch.cat([a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])], dim=-2)
                for a, b in zip(old, new, strict=True)
            ]
        return replace(self, observed=(new[0], new[1], new[2]))

    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised moments."""
        batch, q = x.shape[:-2], x.shape[-2]
        means, covariances = [], []
        for member in self.mixture:
            mean, rows = white_rows(member, x.reshape(-1, x.shape[-1]))
            rows = rows.reshape(*batch, q * mean.shape[1], -1)
            means.append(mean.view(*batch, q, -1))
            covariances.append(rows @ rows.mT)
        shares = torch.tensor(self.mixture.weights, dtype=torch.float64).view(-1, *[1] * x.dim())
        each, total = torch.stack(means), torch.stack(covariances)
        mean = (shares * each).sum(dim=0)
        away = (each - mean).flatten(-2)
        return mean, (shares * (total + away[..., :, None] * away[..., None, :])).sum(dim=0)

    def _conditioned(self, x: Tensor, seen: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Given what was observed: the usual conditional Gaussian."""
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        points = [t.expand(*batch, *t.shape[-2:]) for t in (seen, x)]
        mean, covariance = self._joint(torch.cat(points, dim=-2))
        k, m = seen.shape[-2] * y.shape[-1], y.shape[-1]
        floor = noise + _JITTER * covariance.diagonal(dim1=-2, dim2=-1).amax(dim=-1)[..., None, None]
        inner = covariance[..., :k, :k] + torch.diag_embed(floor.expand(*batch, *noise.shape[-2:]).flatten(-2))
        cross = covariance[..., :k, k:]
        root = torch.linalg.cholesky(inner)
        solved = torch.cholesky_solve(cross, root)
        residual = (y - mean[..., : seen.shape[-2], :]).flatten(-2).unsqueeze(-1)
        moved = (solved.mT @ residual).squeeze(-1).unflatten(-1, (x.shape[-2], m))
        return mean[..., seen.shape[-2] :, :] + moved, covariance[..., k:, k:] - cross.mT @ solved


def _standard(columns: Tensor) -> Tensor:
    """Centre and scale of each column, (2, d); 1 for one that does not vary."""
    spread = columns.std(dim=0) if len(columns) > 1 else torch.zeros_like(columns[0])
    return torch.stack([columns.mean(dim=0), torch.where(spread > 1e-12, spread, torch.ones_like(spread))])
