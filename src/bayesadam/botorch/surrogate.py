"""A small ensemble of networks fitted to a few evaluations, and the Gaussian process that its linearisation is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bayesadam._checks import count
from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, flatten, forward, initial
from bayesadam.engine.rules import Adam
from bayesadam.engine.stack import Stack, cosine, train
from bayesadam.errors import MatchError
from bayesadam.predict import white_rows
from bayesadam.predict.batches import has_graph
from bayesadam.weights.mixture import Mixture

# Below this share of the largest eigenvalue a covariance is rounding.
_JITTER = 1e-10
# E[log σ²] of the prior of the noise of standardised outcomes: it keeps a few rows from being all noise.
_USUAL_NOISE = -4.0
# The least noise, as a share of the prior variance.
_LEAST = 1e-5
# Layer inputs a, (s, n, in), and D = ∂f/∂z, (s, n, m, out), of every layer.
_Layers = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Networks of one shape, trained on all of a few rows, each with the Gaussian process of its tangent kernel.

    The linearised network is a linear model in the rows J of its Jacobian. Here these have length 1, so that a priori
    no place is more uncertain than another, and with the prior N(0, 1/δ) over its coefficients

        y ~ N(0, K/δ + σ²),    K = J Jᵀ / (|J| |J'|),    J Jᵀ = Σ_l (a_l · a_l' + 1) (D_l · D_l'),

    over layers with inputs a and D = ∂f/∂z; no Jacobian is formed. Plain rows are longest in the corners of a box,
    where an acquisition function would then stay. Training chooses the rows. δ, σ² and how much each input counts, r,
    which multiplies the inputs, ascend this evidence.

    Attributes:
        params: stacked weights by name, (s, *shape), in float64.
        x, y: standardised inputs (n, d) and outcomes (n, m).
        prior, noise: δ and σ² of each network, (s,).
        relevance: log r of each network's inputs, (s, 1, d).
    """

    network: Network
    params: dict[str, Tensor]
    x: Tensor
    y: Tensor
    prior: Tensor
    noise: Tensor
    relevance: Tensor

    @classmethod
    def fit(
        cls,
        x: Tensor,
        y: Tensor,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "silu",
        n_ensemble: int = 4,
        steps: int = 400,
        lr: float = 1e-2,
        rounds: int = 1,
        ascents: int = 40,
        seed: int = 0,
        start: Ensemble | None = None,
    ) -> Ensemble:
        """Train the networks as one stack; x (n, d) and y (n, m) are standardised.

        Every round trains at the penalty (δ σ²/2n) |θ|², with the δ and σ² that there are; the evidence follows.

        Args:
            start: networks to begin with, and their δ and σ².
        """
        count("n_ensemble", n_ensemble, "networks")
        network = Network(x.shape[1], tuple(hidden), y.shape[1], activation)
        seeds = [seed * 1000 + number for number in range(n_ensemble)]
        if start is None:
            ones = torch.ones(n_ensemble, dtype=torch.float64)
            params = {name: t.double() for name, t in initial(network, seeds).items()}
            relevance = torch.full((n_ensemble, 1, x.shape[1]), _usual_relevance(x.shape[1]), dtype=torch.float64)
            found = cls(network, params, x, y, ones, 1e-2 * ones, relevance).at_evidence(ascents)
        else:
            found = replace(start, x=x, y=y).at_evidence(ascents)
        for _ in range(rounds):
            found = found._trained(steps, lr, seeds).at_evidence(ascents)
        return found

    def _trained(self, steps: int, lr: float, seeds: Sequence[int]) -> Ensemble:
        inputs, targets = (self.x * self.relevance.exp()).float(), self.y.float()

        def batch(_: Tensor) -> tuple[Tensor, Slope]:
            return inputs, lambda f: (f - targets) / len(targets)

        weights = flatten(self.params).float()
        stack = Stack(self.network, Adam(), seeds[: len(weights)], batch, n_data=len(targets), weights=weights)
        stack.penalty = (self.noise * self.prior / len(targets)).float()[:, None]
        train(stack, [torch.zeros(steps, len(weights), 1, dtype=torch.long)], cosine(lr, steps))
        return replace(self, params={name: t.double() for name, t in stack.params.items()})

    def at_evidence(self, ascents: int) -> Ensemble:
        """With r, σ² and δ after some steps up log N(y; 0, K/δ + σ²) + log p(r) − ½ (log σ² + 4)².

        1/δ is yᵀ (K + σ² δ)⁻¹ y/n throughout. With m the mean of log r over the d inputs,

            log p(r) = −½ |log r − m|² − ½ (m + ½ log d)²:

        how smooth the function is, which m says, costs no more with many inputs than with one.
        """
        relevance = self.relevance.clone().requires_grad_()
        ratio = (self.noise * self.prior).log().clone().requires_grad_()
        optimizer = torch.optim.Adam([relevance, ratio], lr=0.1)
        for step in range(ascents + 1):
            with torch.set_grad_enabled(step < ascents):
                layers = replace(self, relevance=relevance).layers(self.x)
                targets = self.y.flatten().view(1, -1, 1).expand(len(relevance), -1, -1)
                whole = kernel(layers, layers)
                floor = ratio.exp() + _LEAST * whole.diagonal(dim1=1, dim2=2).mean(dim=1)
                root = torch.linalg.cholesky(whole + torch.diag_embed(floor[:, None].expand(whole.shape[:2])))
                white = torch.linalg.solve_triangular(root, targets, upper=False)
                size = white.square().mean(dim=(1, 2)).clamp(min=1e-12)
                log_det = 2 * root.diagonal(dim1=1, dim2=2).log().sum(dim=1)
                middle = relevance.mean(dim=2, keepdim=True)
                loss = (targets.shape[1] * size.log() + log_det).sum() / 2
                loss = loss + (relevance - middle).square().sum() / 2
                loss = loss + (middle - _usual_relevance(self.x.shape[1])).square().sum() / 2
                loss = loss + ((floor * size).log() - _USUAL_NOISE).square().sum() / 2
            if step < ascents:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return replace(self, prior=1 / size, noise=floor.detach() * size, relevance=relevance.detach())

    def layers(self, x: Tensor) -> _Layers:
        """The factors of the kernel at x, (n, d), D being divided by the length of the rows of the Jacobian."""
        x = x * self.relevance.exp()
        graph = has_graph(x)
        seen: tuple[list[Tensor], list[Tensor]] = ([], [])
        with torch.enable_grad():
            at = x if graph else x.detach().requires_grad_()
            f = forward(self.network, self.params, at, seen=seen)
            each = [
                torch.autograd.grad(f[..., c].sum(), seen[1], create_graph=graph, retain_graph=True)
                for c in range(f.shape[-1])
            ]
            slopes = [torch.stack(of_layer, dim=2) for of_layer in zip(*each, strict=True)]
        keep = (lambda t: t) if graph else torch.Tensor.detach
        pairs = [(keep(a), keep(d)) for a, d in zip(seen[0], slopes, strict=True)]
        squares = [(a.square().sum(dim=2, keepdim=True) + 1) * d.square().sum(dim=3) for a, d in pairs]
        length = torch.stack(squares).sum(dim=0).clamp(min=1e-30).sqrt()
        return [(a, d / length.unsqueeze(-1)) for a, d in pairs]

    @cached_property
    def _learnt(self) -> tuple[_Layers, Tensor, Tensor]:
        """The factors of the rows, the Cholesky factor of K + σ² δ, and (K + σ² δ)⁻¹ y'."""
        layers = self.layers(self.x)
        whole = kernel(layers, layers)
        ratio = self.noise * self.prior
        root = torch.linalg.cholesky(whole + torch.diag_embed(ratio[:, None].expand(whole.shape[:2])))
        return layers, root, torch.cholesky_solve(self.y.flatten().view(1, -1, 1).expand(len(root), -1, -1), root)

    def joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """E[f], (s, ..., q, m), and Cov[f], (s, ..., q m, q m), of every network at x, (..., q, d)."""
        batch, q, m = x.shape[:-2], x.shape[-2], self.y.shape[1]
        layers = self.layers(x.reshape(-1, x.shape[-1]))
        known, root, solved = self._learnt
        cross = kernel(known, layers)
        mean = cross.mT @ solved
        explained = torch.linalg.solve_triangular(root, cross, upper=False)
        s, n = explained.shape[:2]
        explained = explained.view(s, n, *batch, q * m).movedim(1, -2)
        blocks = [tuple(t.reshape(s, *batch, q, *t.shape[2:]) for t in pair) for pair in layers]
        covariance = kernel(blocks, blocks) - explained.mT @ explained
        return mean.view(s, *batch, q, m), covariance / self.prior.view(-1, *[1] * (covariance.dim() - 1))


def _usual_relevance(width: int) -> float:
    """log r at which a unit's input has the same variance, however many inputs there are."""
    return -0.5 * math.log(width)


def kernel(left: Any, right: Any) -> Tensor:
    """Σ_l (a · a' + 1) (D · D'), (..., n m, k m), of the factors of layers at n and at k inputs."""
    total: Any = 0
    for (a, d), (b, e) in zip(left, right, strict=True):
        inputs, slopes = a @ b.mT + 1, d.flatten(-3, -2) @ e.flatten(-3, -2).mT
        m = d.shape[-2]
        total = total + slopes * inputs.repeat_interleave(m, dim=-2).repeat_interleave(m, dim=-1)
    found: Tensor = total
    return found


@dataclass(frozen=True, eq=False)
class Process:
    """The Gaussian process of several networks: the moments of their mixture, and what was observed since.

    Each has its own mean f_m and covariance k_m, of an `Ensemble`, or f and J Σ J'ᵀ of a posterior; the covariance is
    Σ π (k_m + (f_m − f̄)(f'_m − f̄')). Conditioning on new observations is exact for this process; no weight changes.

    Attributes:
        networks: over standardised inputs and outcomes; a mixture of posteriors of a regression serves too.
        inputs: centre and scale of the inputs, (2, d).
        outcomes: centre and scale of the outcomes, (2, m).
        observed: standardised inputs, (..., k, d), outcomes and their noise, (..., k, m), since the networks' training.
    """

    networks: Ensemble | Mixture
    inputs: Tensor
    outcomes: Tensor
    observed: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def fit(cls, X: Tensor, Y: Tensor, *, start: Process | None = None, **settings: Any) -> Process:
        """Of inputs (n, d) and outcomes (n, m); `start` begins with another one's networks, and trains less.

        See `Ensemble.fit` for the settings.
        """
        if X.dim() != 2 or Y.dim() != 2 or len(X) != len(Y) or not len(X):
            raise MatchError(f"X has shape {tuple(X.shape)} and Y {tuple(Y.shape)}: they must be (n, d) and (n, m)")
        X, Y = X.detach().double(), Y.detach().double()
        inputs, outcomes, before = _standard(X), _standard(Y), None
        if start is not None and isinstance(start.networks, Ensemble):
            inputs, before = start.inputs, start.networks
            settings = {"steps": 100, "ascents": 5, **settings}
        x, y = (X - inputs[0]) / inputs[1], (Y - outcomes[0]) / outcomes[1]
        return cls(Ensemble.fit(x, y, start=before, **settings), inputs, outcomes)

    @property
    def noise(self) -> Tensor:
        """σ² of the outcomes, (m,)."""
        if isinstance(self.networks, Ensemble):
            noise = self.networks.noise.mean()
        else:
            noise = torch.stack([torch.as_tensor(q.noise_variance).double() for q in self.networks]).mean(dim=0)
        return noise.expand(self.outcomes.shape[1]) * self.outcomes[1].square()

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
            batch: Any = torch.broadcast_shapes(*(t.shape[:-2] for t in (*old, *new)))  # type: ignore[no-untyped-call]
            new = [
                torch.cat([a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])], dim=-2)
                for a, b in zip(old, new, strict=True)
            ]
        return replace(self, observed=(new[0], new[1], new[2]))

    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised moments, matched to those of the mixture."""
        if isinstance(self.networks, Ensemble):
            each, total = self.networks.joint(x)
            shares = torch.full((len(each),), 1 / len(each), dtype=torch.float64)
        else:
            batch, q, means, covariances = x.shape[:-2], x.shape[-2], [], []
            for member in self.networks:
                mean, rows = white_rows(member, x.reshape(-1, x.shape[-1]).to(next(iter(member.draw_types().values()))))
                rows = rows.double().reshape(*batch, q * mean.shape[1], -1)
                means.append(mean.double().view(*batch, q, -1))
                covariances.append(rows @ rows.mT)
            each, total = torch.stack(means), torch.stack(covariances)
            shares = torch.tensor(self.networks.weights, dtype=torch.float64)
        shares = shares.view(-1, *[1] * x.dim())
        mean = (shares * each).sum(dim=0)
        away = (each - mean).flatten(-2)
        return mean, (shares * (total + away[..., :, None] * away[..., None, :])).sum(dim=0)

    def _conditioned(self, x: Tensor, seen: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Given what was observed: the usual conditional Gaussian."""
        batch: Any = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # type: ignore[no-untyped-call]
        points = [t.expand(*batch, *t.shape[-2:]) for t in (seen, x)]
        mean, covariance = self._joint(torch.cat(points, dim=-2))
        k, m = seen.shape[-2] * y.shape[-1], y.shape[-1]
        floor = noise + _JITTER * covariance.diagonal(dim1=-2, dim2=-1).amax(dim=-1)[..., None, None]
        inner = covariance[..., :k, :k] + torch.diag_embed(floor.expand(*batch, *noise.shape[-2:]).flatten(-2))
        cross = covariance[..., :k, k:]
        root = torch.linalg.cholesky(inner)
        solved = torch.cholesky_solve(cross, root)
        residual = (y - mean[..., : seen.shape[-2], :]).flatten(-2).unsqueeze(-1)
        moved = (solved.mT @ residual).reshape(*batch, x.shape[-2], m)
        return mean[..., seen.shape[-2] :, :] + moved, covariance[..., k:, k:] - cross.mT @ solved


def _standard(columns: Tensor) -> Tensor:
    """Centre and scale of each column, (2, d); 1 for one that does not vary."""
    spread = columns.std(dim=0) if len(columns) > 1 else torch.zeros_like(columns[0])
    return torch.stack([columns.mean(dim=0), torch.where(spread > 1e-12, spread, torch.ones_like(spread))])
