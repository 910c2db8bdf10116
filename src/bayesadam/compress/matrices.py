"""Layers as matrices: z = W a at every position, whatever the layer is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bayesadam.predict.network import widened
from bayesadam.predict.tap import is_transposed_linear
from bayesadam.predict.uses import patches
from bayesadam.weights.named import Named


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight, or rows of it, as (groups, outputs, inputs), with its bias, where it has one, as the last column.

    Attributes:
        weight, bias: the names of the parameters.
        shape: of the weight, or of its rows.
        rows: of the weight, where attention keeps three matrices in one.
        groups: of a convolution.
        inputs_first: whether the weight is (inputs, outputs, ...): transposed convolutions, transformers' Conv1D.
    """

    weight: str
    bias: str | None
    shape: torch.Size
    rows: slice | None = None
    groups: int = 1
    inputs_first: bool = False

    @property
    def name(self) -> str:
        """The weight's, with the rows where they are some of it."""
        return self.weight if self.rows is None else f"{self.weight}[{self.rows.start}:{self.rows.stop}]"

    @property
    def size(self) -> tuple[int, int, int]:
        """Groups, outputs of a group, inputs of an output without the constant."""
        outputs = self.shape[1] if self.inputs_first else self.shape[0] // self.groups
        return self.groups, outputs, self.shape.numel() // (self.groups * outputs)

    def into(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape, or of all its rows', as (groups, outputs, inputs)."""
        weight = weight if self.rows is None else weight[self.rows]
        if not self.inputs_first:
            return weight.reshape(self.size)
        # A kernel is turned round in a transposed convolution: see `patches`.
        kernel = tuple(range(2, weight.dim()))
        split = weight.flip(kernel).reshape(self.groups, -1, *weight.shape[1:])
        return split.transpose(1, 2).reshape(self.size)

    def out_of(self, matrix: Tensor) -> Tensor:
        """The weight, or its rows, of (groups, outputs, inputs)."""
        if not self.inputs_first:
            return matrix.reshape(self.shape)
        split = (self.groups, self.shape[1], self.shape[0] // self.groups, *self.shape[2:])
        kernel = tuple(range(2, len(self.shape)))
        return matrix.reshape(split).transpose(1, 2).reshape(self.shape).flip(kernel)

    def with_bias(self, named: Named) -> Tensor:
        """[W b] of named parameters, in float32 or wider."""
        matrix = widened(self.into(named[self.weight].detach()))
        if self.bias is None:
            return matrix
        bias = named[self.bias].detach()
        bias = bias if self.rows is None else bias[self.rows]
        return torch.cat([matrix, bias.to(matrix).reshape(*self.size[:2], 1)], dim=2)

    @torch.no_grad()
    def write(self, matrix: Tensor, named: Mapping[str, Tensor]) -> None:
        """[W b] into named parameters."""
        whole = slice(None) if self.rows is None else self.rows
        named[self.weight].detach()[whole] = self.out_of(matrix[..., : self.size[2]]).to(named[self.weight])
        if self.bias is not None:
            named[self.bias].detach()[whole] = matrix[..., -1].flatten().to(named[self.bias])

    def columns(self, a: Tensor) -> Tensor:
        """Inputs (positions, groups · inputs) as (groups, positions, inputs), with a constant 1 where W has a bias."""
        x = a.reshape(len(a), self.groups, self.size[2]).transpose(0, 1)
        return x if self.bias is None else F.pad(x, (0, 1), value=1.0)


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a matrix in a forward pass: its inputs and its outputs, position by position."""

    matrix: Matrix
    module: nn.Module
    input: Tensor
    output: Tensor

    @property
    def positions(self) -> int:
        """How often the matrix is multiplied."""
        return self.output.numel() // math.prod(self.matrix.size[:2])

    def inputs(self, rows: Tensor) -> Tensor:
        """(groups, rows, inputs) at some positions."""
        a = self.input.detach()
        if not isinstance(self.module, _ConvNd):
            return self.matrix.columns(widened(a.reshape(-1, a.shape[-1])[rows]))
        a, out = self._batched(a), self._batched(self.output).shape[2:]
        # (n, channels, *kernel, *out) → (rows, channels, *kernel).
        view = patches(self.module, a, out)
        moved = view.movedim(tuple(range(-len(out), 0)), tuple(range(1, len(out) + 1)))
        return self.matrix.columns(widened(moved[torch.unravel_index(rows, (len(a), *out))].flatten(1)))

    def outputs(self, rows: Tensor) -> Tensor:
        """(groups, rows, outputs) at some positions."""
        z = self.output.detach()
        z = self._batched(z).movedim(1, -1) if isinstance(self.module, _ConvNd) else z
        z = widened(z.reshape(-1, z.shape[-1])[rows])
        return z.reshape(len(z), *self.matrix.size[:2]).transpose(0, 1)

    def _batched(self, a: Tensor) -> Tensor:
        """Of a convolution, which may have been given one example without a batch."""
        assert isinstance(self.module, _ConvNd)
        return a if a.dim() == len(self.module.kernel_size) + 2 else a.unsqueeze(0)


def matrices_of(model: nn.Module) -> dict[nn.Module, list[Matrix]]:
    """The matrices of every module that multiplies its inputs by them, but for those that another layer has too."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owned = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    found: dict[nn.Module, list[Matrix]] = {}
    for module in model.modules():
        matrices = []
        for weight, bias, rows, how in _products(module):
            if owned[id(weight)] == 1 and id(weight) in names and (bias is None or owned[id(bias)] == 1):
                shape = weight.shape if rows is None else torch.Size((rows.stop - rows.start, *weight.shape[1:]))
                matrices.append(Matrix(names[id(weight)], names.get(id(bias)), shape, rows, **how))
        if matrices:
            found[module] = matrices
    return found


def _products(m: Any) -> Iterator[tuple[Tensor, Tensor | None, slice | None, dict[str, Any]]]:
    """The weights of one module, with their bias, the rows of both, and how they are kept."""
    if isinstance(m, nn.MultiheadAttention):
        apart = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
        for index in range(3):
            if m._qkv_same_embed_dim:
                rows = slice(index * m.embed_dim, (index + 1) * m.embed_dim)
                yield m.in_proj_weight, m.in_proj_bias, rows, {}
            else:
                # Their biases are one parameter, which stays as it is.
                yield apart[index], None, None, {}
        yield m.out_proj.weight, m.out_proj.bias, None, {}
    elif isinstance(m, _ConvNd):
        yield m.weight, m.bias, None, {"groups": m.groups, "inputs_first": isinstance(m, _ConvTransposeNd)}
    elif isinstance(m, nn.Linear) and not isinstance(m, NonDynamicallyQuantizableLinear):
        yield m.weight, m.bias, None, {}
    elif is_transposed_linear(m):
        yield m.weight, getattr(m, "bias", None), None, {"inputs_first": True}
