r"""The conditional of a Gaussian on weights that are known, one row of a matrix after the other and all at once.

A layer z = W x with the inputs x' that it now gets, A' = E[x' x'ᵀ] and C = E[z x'ᵀ], where the weights outside the
support R are 0:

.. math::
    w'_R = (A'_{RR} + λ)^{-1} (C_R + λ w_R) = \arg\min\; E (w' x' - z)^2 + λ |w' - w|^2

For x' = x this is the mean of N(w, (s N g A + δ)⁻¹) given that the others are 0; λ is a share of the mean of diag A'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# λ over the mean of diag A': .003 to .1 make no difference.
RIDGE = 0.01


@dataclass(frozen=True, eq=False)
class Moments:
    """Of the inputs x' that a matrix gets and the outputs z that it should give, per group and position.

    Attributes:
        a: E[x' x'ᵀ], (groups, inputs, inputs).
        c: E[z x'ᵀ], (groups, outputs, inputs).
        z: E[z²], (groups, outputs).
        n: of how many positions.
    """

    a: Tensor
    c: Tensor
    z: Tensor
    n: float

    @classmethod
    def of(cls, x: Tensor, z: Tensor) -> Moments:
        """From (groups, positions, inputs) and (groups, positions, outputs)."""
        n = max(x.shape[1], 1)
        return cls(x.mT @ x / n, z.mT @ x / n, z.square().sum(dim=1) / n, x.shape[1])

    def __add__(self, other: Moments) -> Moments:
        n = max(self.n + other.n, 1)
        own, theirs = self.n / n, other.n / n
        a, c, z = (own * p + theirs * q for p, q in ((self.a, other.a), (self.c, other.c), (self.z, other.z)))
        return Moments(a, c, z, self.n + other.n)

    def ridged(self, w: Tensor) -> Moments:
        """With λ in A' and λ w in C."""
        # Of inputs that are all 0 too.
        ridge = (RIDGE * self.a.diagonal(dim1=1, dim2=2).mean(dim=1)).clamp(min=1e-30)[:, None, None]
        eye = torch.eye(self.a.shape[-1], dtype=self.a.dtype, device=self.a.device)
        return Moments(self.a + ridge * eye, self.c + ridge * w, self.z, self.n)

    def alone(self) -> Tensor:
        """1 / [(A' + λ)⁻¹]_jj, (groups, 1, inputs): of the moment A'_jj of an input what no other can stand in for."""
        lower = factor(self.ridged(torch.zeros_like(self.c)).a)
        return torch.cholesky_inverse(lower).diagonal(dim1=1, dim2=2).reciprocal().to(self.a).unsqueeze(1)

    def moved(self, w: Tensor) -> Tensor:
        """E (w x' − z)² over E z², of all outputs together."""
        error = self.z.sum() + torch.einsum("goi,goi->", w @ self.a - 2 * self.c, w)
        return error.clamp(min=0) / self.z.sum().clamp(min=torch.finfo(w.dtype).tiny)


def factor(a: Tensor) -> Tensor:
    """L, A = L Lᵀ, float64, of each A, with as much more on its diagonal as one that is not positive definite takes."""
    a = a.double()
    mean, eye = a.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=1e-300), torch.eye(a.shape[-1]).to(a)
    lower, more, failed = a, torch.zeros_like(mean), torch.ones_like(mean, dtype=torch.bool)
    for share in (0, 1e-12, 1e-9, 1e-6, 1e-3, 1):
        more = torch.where(failed, share * mean, more)
        lower, info = torch.linalg.cholesky_ex(a + more[..., None, None] * eye)
        failed = info != 0
        if not bool(failed.any()):
            break
    return lower


def conditional(moments: Moments, w: Tensor, support: Tensor, start: Tensor | None = None) -> Tensor:
    """w', (groups, outputs, inputs), 0 outside the support, by conjugate gradients on all rows at once.

    Args:
        w: the dense weights.
        support: True at the weights that may move.
        start: where the search begins; None for w.
    """
    ridged = moments.ridged(w)
    inverse = ridged.a.diagonal(dim1=1, dim2=2).unsqueeze(1).clamp(min=torch.finfo(w.dtype).tiny).reciprocal()
    tolerance, steps = (1e-5, 60) if w.dtype != torch.float64 else (1e-13, 20 * w.shape[-1])
    x = torch.where(support, w if start is None else start, 0)
    residual = torch.where(support, ridged.c - x @ ridged.a, 0)
    direction = z = residual * inverse
    fit = (residual * z).sum(dim=-1, keepdim=True)
    enough = tolerance**2 * (torch.where(support, ridged.c, 0).square() * inverse).sum(dim=-1, keepdim=True)
    for step in range(steps):
        # A look at the numbers makes a GPU wait.
        if step % 5 == 0 and bool((fit <= enough).all()):
            break
        along = torch.where(support, direction @ ridged.a, 0)
        bend = (direction * along).sum(dim=-1, keepdim=True)
        # A row that has arrived stays.
        size = torch.where(bend > 0, fit / bend, 0)
        x = x + size * direction
        residual = residual - size * along
        z = residual * inverse
        fit, before = (residual * z).sum(dim=-1, keepdim=True), fit
        direction = z + torch.where(before > 0, fit / before, 0) * direction
    return x
