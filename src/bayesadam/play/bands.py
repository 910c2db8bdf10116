"""From points and numbers to bands, as pure functions: what a method says of f on a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesadam.posterior import Posterior
from bayesadam.readers import Recorder

# Where the Gaussian process looks for its lengthscale and its signal's standard deviation, in units of the plane.
LENGTHSCALES = tuple(torch.logspace(math.log10(0.3), math.log10(3.0), 11, dtype=torch.float64).tolist())
_SIGNALS = torch.logspace(math.log10(0.3), math.log10(3.0), 9, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Bands:
    """Mean and standard deviation of f at every point of a grid, (g,) each; the noise is not in them."""

    mean: Tensor
    std: Tensor

    @property
    def finite(self) -> bool:
        """Whether every number can be drawn."""
        return bool((torch.isfinite(self.mean) & torch.isfinite(self.std)).all())


# --- the Gaussian process -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """k(a, b) = s² exp(−(a − b)²/2ℓ²), and the log marginal likelihood that chose it."""

    lengthscale: float
    signal: float
    evidence: float


def best_signal(x: Tensor, y: Tensor, noise: float, lengthscale: float) -> Kernel:
    """The signal of greatest marginal likelihood among a fixed few, at inputs and targets (n,), the noise σ and ℓ given.

    log p(y) = −½ Σ (qᵀy)²/λ − ½ Σ log λ − n/2 log 2π, with λ = s² e + σ² and q, e the eigenpairs of the unit kernel: one
    decomposition serves every signal.
    """
    a, b = x.double(), y.double()
    eigenvalues, vectors = torch.linalg.eigh(_unit_kernel(a, a, lengthscale))
    spectrum = _SIGNALS.square()[:, None] * eigenvalues.clamp(min=0) + noise**2
    fit = ((vectors.T @ b).square() / spectrum).sum(dim=1)
    evidence = -0.5 * (fit + spectrum.log().sum(dim=1) + len(b) * math.log(2 * math.pi))
    place = int(evidence.argmax())
    return Kernel(lengthscale, float(_SIGNALS[place]), float(evidence[place]))


def gp_bands(x: Tensor, y: Tensor, grid: Tensor, noise: float, kernel: Kernel) -> Bands:
    """The exact Gaussian process on a grid: mean k* K⁻¹ y, variance k** − k* K⁻¹ k*ᵀ, K = k + σ²."""
    a, b, at = x.double(), y.double(), grid.double()
    variance = kernel.signal**2
    gram = variance * _unit_kernel(a, a, kernel.lengthscale) + noise**2 * torch.eye(len(a), dtype=torch.float64)
    cross = variance * _unit_kernel(a, at, kernel.lengthscale)
    factor = torch.linalg.cholesky(gram)
    mean = cross.T @ torch.cholesky_solve(b[:, None], factor).squeeze(1)
    explained = torch.linalg.solve_triangular(factor, cross, upper=False).square().sum(dim=0)
    return Bands(mean.float(), (variance - explained).clamp(min=0).sqrt().float())


def _unit_kernel(a: Tensor, b: Tensor, lengthscale: float) -> Tensor:
    return torch.exp(-0.5 * ((a[:, None] - b[None, :]) / lengthscale).square())


# --- posteriors of a trained network ----------------------------------------------------------------------------------


def reach_of(posterior: Posterior, x: Tensor) -> float:
    """mean_n Σ J_n² at the inputs x, (n, 1): the variance of f under weights of unit variance."""
    ones = {name: torch.ones_like(theta) for name, theta in posterior.mode.items()}
    unit = Posterior.from_moments(posterior.model, posterior.mode, ones, 1.0).replace(noise_variance=1.0)
    return float(unit.predict(x, likelihood="regression", novelty=False).variance.mean())


def curvature_of(read: Posterior) -> float:
    """Σ B^(2p−1) v̂ᵖ over all weights: the total curvature of an example, in the units it was read in."""
    settings = read.settings
    total = sum(float(c.sum(dtype=torch.float64)) for c in read.structure.curvatures(settings.power))
    return total * settings.weight / (settings.scale * settings.n_data)


def posterior_at(read: Posterior, reach: float, *, n_data: float, prior_precision: float, noise: float) -> Posterior:
    """The posterior of precision s N c + δ, c = v̂ᵖ, at the sliders' values; nothing is trained.

    c has the units of the loss it was read from, and Adam's √v̂ shrinks as training goes on. s takes both out, so that N
    counts examples: the total curvature of an example, Σ s c, is the Gauss-Newton matrix's, mean_n Σ J_n²/σ². It is what
    `bayesadam.calibrate` does for a regression, where the noise is known. `read` is as it was read, whatever its N, δ and s;
    `reach` is mean_n Σ J_n².
    """
    scale = reach / (noise**2 * max(curvature_of(read), 1e-30))
    return read.replace(n_data=n_data, prior_precision=prior_precision, scale=scale, noise_variance=noise**2)


def kronecker_posterior(model: nn.Module, x: Tensor, *, keep: int = 25) -> Posterior:
    """The Kronecker-factored posterior of the Gauss-Newton matrix at a network's weights, for inputs x, (n, 1).

    The gradient of ½(f − y)² at a residual of 1 is J, whose squares are the matrix's: the recorder is given `keep` single
    inputs with that residual, spread evenly over the sorted ones. Its curvature is their mean Σ J².
    """
    inputs = x[x.squeeze(1).argsort()[torch.arange(keep) * len(x) // keep]].unsqueeze(1)
    with torch.no_grad():
        targets = model(inputs) - 1
    batches = zip(inputs, targets, strict=True)
    recorder = Recorder.from_batches(model, batches, lambda f, y: 0.5 * (f - y).square().mean(), keep=keep)
    return Posterior.from_recorder(model, recorder, len(x), structure="kronecker")


def linearised_bands(posterior: Posterior, grid: Tensor) -> Bands:
    """f ~ N(f(x; θ), J Σ Jᵀ) on a grid (g,)."""
    found = posterior.predict(grid[:, None], likelihood="regression", novelty=False)
    return Bands(found.mean.detach().squeeze(1), found.variance.detach().clamp(min=0).sqrt().squeeze(1))
