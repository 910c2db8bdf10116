"""The exact Gaussian process with an RBF kernel and a constant mean."""

import math

import torch
from torch import Tensor


def gaussian_process(theta: Tensor, x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p(y) for inputs (n, inputs) and targets (n,), and the mean and variance of f at other inputs.

    θ = (log ℓ for each input, log s², log σ², m), and k(a, b) = s² exp(−½ |(a − b)/ℓ|²), K = k + σ². Then
    log p(y) = −½ rᵀK⁻¹r − ½ log det K − n/2 log 2π with r = y − m, mean m + k*K⁻¹r, variance s² − k*K⁻¹k*ᵀ.
    """
    lengthscales, (signal, noise), mean = theta[:-3].exp(), theta[-3:-1].exp(), theta[-1]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        square = ((a[:, None] - b) / lengthscales).square().sum(dim=-1)
        return torch.exp(-0.5 * square).mul(signal)

    root = torch.linalg.cholesky(kernel(x, x) + (noise + 1e-6) * torch.eye(len(x), dtype=x.dtype))
    residual = y - mean
    solved = torch.cholesky_solve(residual[:, None], root).squeeze(1)
    evidence = -0.5 * residual @ solved - root.diagonal().log().sum() - len(y) / 2 * math.log(2 * math.pi)
    cross = kernel(x, at)
    explained = torch.linalg.solve_triangular(root, cross, upper=False).square().sum(dim=0)
    return evidence, mean + cross.T @ solved, (signal - explained).clamp(min=0)
