r"""The input side of a layer: what a few hundred inputs, without labels, add to the optimiser's state.

Adam's second moment of a layer z = W a knows the output side by its rows; the inputs of the layer are in

.. math::
    A = E[a a^\top] = Q \operatorname{diag}(\lambda) Q^\top, \qquad
    g_i = \frac{\sum_j \hat v_{ij}}{\sum_j A_{jj}}

Row i of W has the curvature g_iᵖ A, in the basis Q the diagonal g_iᵖ λ_j. Where the layer has a bias, a ends with a
constant 1, and the bias is the last column of W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class InputSide:
    """A of one layer: its eigenvectors Q as columns, (s, s), its eigenvalues λ, (s,), and the layer's weight.

    `bias` names the bias that is the last column; `inputs_first` is for weights (inputs, outputs), as in GPT-2's
    layers, and not (outputs, inputs…).
    """

    basis: Tensor
    spectrum: Tensor
    shape: torch.Size
    bias: str | None = None
    inputs_first: bool = False

    @classmethod
    def of(cls, a: Tensor, shape: torch.Size, bias: str | None = None, *, inputs_first: bool = False) -> InputSide:
        """From A, (s, s), which is positive semi-definite but for rounding."""
        values, vectors = torch.linalg.eigh(a.double())
        return cls(vectors.to(a.dtype), values.clamp(min=0).to(a.dtype), shape, bias, inputs_first)

    def moments(self, v: Tensor, v_bias: Tensor | None) -> Tensor:
        """g_i λ_j, (outputs, s), of second moments of the weight, and of its bias."""
        rows = self._matrix(v).sum(dim=-1)
        rows = rows if v_bias is None else rows + v_bias.to(rows)
        total = self.spectrum.sum()
        return torch.outer(rows / torch.where(total > 0, total, 1.0), self.spectrum)

    def into(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[W b] Q, (..., outputs, s), of weights and biases with any leading dimensions."""
        matrix = self._matrix(weight)
        if self.bias is not None:
            assert bias is not None
            matrix = torch.cat([matrix, bias.to(matrix).unsqueeze(-1)], dim=-1)
        return matrix @ self.basis.to(matrix)

    def out_of(self, coordinates: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of coordinates X: X Qᵀ."""
        return self._parts(coordinates @ self.basis.to(coordinates).mT)

    def diagonal(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """The variances of the weight and of the bias where the coordinates have these: values (Q²)ᵀ."""
        return self._parts(values @ self.basis.to(values).square().mT)

    def each(self, change: Callable[[Tensor], Tensor]) -> InputSide:
        """The same with its tensors changed."""
        return replace(self, basis=change(self.basis), spectrum=change(self.spectrum))

    def _matrix(self, weight: Tensor) -> Tensor:
        """A weight as (..., outputs, inputs)."""
        lead = weight.dim() - len(self.shape)
        return weight.mT if self.inputs_first else weight.flatten(lead + 1)

    def _parts(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        bias = None if self.bias is None else matrix[..., -1]
        matrix = matrix if self.bias is None else matrix[..., :-1]
        lead = matrix.shape[:-2]
        weight = matrix.mT if self.inputs_first else matrix
        return weight.reshape(*lead, *self.shape), bias
