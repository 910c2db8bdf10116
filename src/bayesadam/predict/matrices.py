"""Layers as matrices: z = W a at every position, whatever the layer is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bayesadam.errors import MatchError
from bayesadam.predict.network import widened
from bayesadam.weights.named import Named


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight, or rows of it, as (groups, outputs, inputs), with its bias, where it has one, as the last column.

    Attributes:
        weight, bias: the names of the parameters.
        shape: of the weight, or of its rows.
        rows: of the weight, where attention keeps three matrices in one.
        groups: of a convolution, blocks of a that do not meet.
        inputs_first: whether the weight is (inputs, outputs, ...): transposed convolutions, embeddings, transformers'
            Conv1D.
        module: the name of its layer in the model.
        tokens: whether it is an embedding, whose a is the one-hot vector of a token.
        inside: whether a is not what its module is given first, as of attention's last projection.
    """

    weight: str
    bias: str | None
    shape: torch.Size
    rows: slice | None = None
    groups: int = 1
    inputs_first: bool = False
    module: str = ""
    tokens: bool = False
    inside: bool = False

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The weight's, with the rows where they are some of it."""
        return self.weight if self.rows is None else f"{self.weight}[{self.rows.start}:{self.rows.stop}]"

    @property
    def size(self) -> tuple[int, int, int]:
        """Groups, outputs of a group, inputs of an output without the constant."""
        outputs = self.shape[1] if self.inputs_first else self.shape[0] // self.groups
        return self.groups, outputs, self.shape.numel() // (self.groups * outputs)

    @property
    def width(self) -> int:
        """The length of a, or of a pixel of it."""
        return self.shape[0] if self.inputs_first else self.shape[1] * self.groups

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

    def columns(self, v: Tensor) -> Tensor:
        """Σ v over all but the inputs, (width,), of v in the shape of the whole weight."""
        if self.inputs_first:
            return v.flatten(1).sum(dim=1)
        shape = self.groups, v.shape[0] // self.groups, self.width // self.groups, -1
        return v.reshape(shape).sum(dim=(1, 3)).flatten()

    # --- inputs -----------------------------------------------------------------------------------------------------

    def has_rows(self, a: Tensor, size: int) -> bool:
        """Whether an input has rows of its own for each of `size` examples; False where all share it.

        Raises:
            MatchError: there are more rows than examples, and nothing says whose they are.
        """
        if not a.numel():
            return False
        if self.tokens or a.dim() < 2:
            return a.dim() > 1 and a.shape[0] == size
        if a.shape[0] % size == 0 or (a.dim() > 2 and a.shape[1] == size):
            return True
        if a.shape[0] > size:
            raise MatchError(
                f"layer {self.module!r} has {len(a)} rows of inputs for {size} examples, and nothing says which rows "
                "are whose: novelty would be averaged over neighbours. Give a list of examples, such as graphs, with "
                "forward=lambda model, examples: ..., or pad them to the same number of rows, (batch, rows, ...)"
            )
        return False

    def layout(self, a: Tensor, size: int) -> tuple[Hashable, ...]:
        """All by which `pooled` tells how the examples lie in an input."""
        dims, n = a.dim(), a.shape[0]
        second = dims > 2 and a.shape[1] == size
        return self.module, dims, n == size, second, 0 if second else n // size

    def pooled(self, module: nn.Module, a: Tensor, size: int, mask: Tensor | None) -> Tensor:
        """The mean of a over positions, (size, width).

        `mask`, (size, positions), is 0 at padding.
        """
        if self.tokens:
            tokens = a.reshape(size, -1)
            weights = torch.ones_like(tokens, dtype=torch.float32) if mask is None else mask.float().expand_as(tokens)
            share = weights / weights.sum(dim=1, keepdim=True)
            return torch.zeros(size, self.width, device=a.device).scatter_add(1, tokens, share)
        a = widened(a)
        if a.dim() == 2 and a.shape[0] == size:
            return a
        if isinstance(module, _ConvNd):
            if a.shape[0] == size:
                return a.mean(dim=tuple(range(2, a.dim())))
            pixels = a.reshape(size, -1, self.width, a.shape[2:].numel())
            return pixels.mean(dim=(1, 3))
        sequence_first = isinstance(module, nn.MultiheadAttention) and not module.batch_first
        if sequence_first or (a.dim() > 2 and a.shape[0] != size and a.shape[1] == size):
            a = a.transpose(0, 1)
        a = a.reshape(size, -1, self.width)
        if mask is None or mask.shape != a.shape[:2]:
            return a.mean(dim=1)
        weights = mask.to(a)
        return torch.einsum("bp,bpd->bd", weights / weights.sum(dim=1, keepdim=True), a)


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is the linear layer of transformers' GPT-2, (inputs, outputs), which need not be installed."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), Tensor)


def matrices_of(model: nn.Module) -> dict[nn.Module, list[Matrix]]:
    """The matrices of every module that multiplies its inputs by them, but for those that another layer has too."""
    owned = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    alone = {name: p for name, p in model.named_parameters() if owned[id(p)] == 1}
    listed: dict[nn.Module, list[Matrix]] = {}
    for name, module in model.named_modules():
        for matrix in _matrices(name, module, alone):
            if not matrix.tokens and (matrix.bias is None or matrix.bias in alone):
                listed.setdefault(module, []).append(matrix)
    return listed


def layers_of(model: nn.Module, names: Collection[str]) -> tuple[Matrix, ...]:
    """The matrix by which each layer multiplies what it is given, where its weight is among some named parameters."""
    named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in names}
    firsts = (next(_matrices(name, module, named), None) for name, module in model.named_modules())
    return tuple(matrix for matrix in firsts if matrix is not None and not matrix.inside)


def _matrices(prefix: str, m: Any, named: Named) -> Iterator[Matrix]:
    """The matrices of one module, of those weights that are named."""
    dot = f"{prefix}." if prefix else ""
    for weight, bias, rows, how in _products(m):
        if (whole := named.get(dot + weight)) is not None:
            shape = whole.shape if rows is None else torch.Size((rows.stop - rows.start, *whole.shape[1:]))
            yield Matrix(dot + weight, bias and dot + bias, shape, rows, module=prefix, **how)


def _products(m: Any) -> Iterator[tuple[str, str | None, slice | None, dict[str, Any]]]:
    """The names of one module's weights, with their bias, the rows of both, and how they are kept."""
    bias = "bias" if getattr(m, "bias", None) is not None else None
    if isinstance(m, nn.MultiheadAttention):
        for index, letter in enumerate("qkv"):
            if m._qkv_same_embed_dim:
                rows = slice(index * m.embed_dim, (index + 1) * m.embed_dim)
                yield "in_proj_weight", None if m.in_proj_bias is None else "in_proj_bias", rows, {}
            else:
                # Their biases are one parameter, which stays as it is.
                yield f"{letter}_proj_weight", None, None, {"inside": True}
        yield "out_proj.weight", None if m.out_proj.bias is None else "out_proj.bias", None, {"inside": True}
    elif isinstance(m, _ConvNd):
        yield "weight", bias, None, {"groups": m.groups, "inputs_first": isinstance(m, _ConvTransposeNd)}
    # One with a forward of its own may be given something else than tokens, as BART's positions are.
    elif isinstance(m, nn.Embedding) and type(m).forward is nn.Embedding.forward:
        yield "weight", None, None, {"tokens": True, "inputs_first": True}
    # Attention projects its output without a call of the layer that holds the matrix.
    elif isinstance(m, nn.Linear) and not isinstance(m, NonDynamicallyQuantizableLinear):
        yield "weight", bias, None, {}
    elif is_transposed_linear(m):
        yield "weight", bias, None, {"inputs_first": True}
