r"""Leverage: the posterior's own variance of a layer's outputs, relative to that of familiar inputs.

Under a Gaussian with an input side, Cov w_i = (w g_i A + δ)⁻¹ for every row of W, the variance of (W a)_i is, but for
the row's constant,

.. math::
    h(x) = a^\top (A + \epsilon \bar a I)^{-1} a

the leverage of x in that layer, a its input, averaged over positions. A is the second moment of familiar inputs
(`weights.inputs`), or what the curvature in the optimiser's state says of it: the column sums of Adam's second moment,
the right factor of a Kronecker posterior.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.predict.tap import Layer
from bayesadam.weights.diagonal import Diagonal

Source = Literal["inputs", "gradients", "second moments"]
# ε, chosen like the exponents below on MNIST, Fashion-MNIST and texts.
RIDGE = 0.01
# Fewer inputs do not make a second moment.
FEWEST = 20
# Wider blocks of A are cut in parts: the memory goes with the square of the width.
WIDEST = 2048
# The exponent of the mean over layers that novelty takes. A diagonal sees a layer dimly, so that those with the largest
# leverage count for more.
_MEANS: Mapping[Source, float] = {"inputs": 1.0, "gradients": 1.0, "second moments": 4.0}


@dataclass(frozen=True, eq=False)
class Ratios:
    """r of each example, (batch,): its leverage relative to that of familiar inputs, 1 for the usual one.

    Attributes:
        gentle: of the geometric mean over layers, which moves temperatures.
        steep: of the mean, or a power mean, over layers, which moves novelty.
    """

    gentle: Tensor
    steep: Tensor

    @classmethod
    def usual(cls, outputs: Tensor) -> Ratios:
        """1, where no layer is known."""
        ones = torch.ones_like(outputs.reshape(outputs.shape[0], -1)[:, 0])
        return cls(ones, ones)

    def growth(self, exponent: float) -> Tensor:
        """((1 + r)/2)^exponent, by which an example's own temperature is above the common one."""
        return ((1 + self.gentle) / 2) ** exponent


@dataclass(frozen=True, eq=False)
class Leverage:
    """How far the layers of a network have to extrapolate for its inputs.

    Attributes:
        layers: the layers.
        factors: for each layer W with h = |Wᵀ a|²; see `factor`.
        source: where A is from.
        medians: of log h of familiar inputs, layer by layer, then of the logarithms of both means over layers.
    """

    layers: tuple[Layer, ...]
    factors: tuple[Tensor, ...]
    source: Source
    medians: Tensor | None = None

    @cached_property
    def stacks(self) -> tuple[tuple[tuple[Layer, ...], Tensor], ...]:
        """Layers whose factors have the same shape, with those stacked."""
        shapes: dict[torch.Size, list[int]] = {}
        for number, w in enumerate(self.factors):
            shapes.setdefault(w.shape, []).append(number)
        groups = shapes.values()
        return tuple((tuple(self.layers[i] for i in g), torch.stack([self.factors[i] for i in g])) for g in groups)

    @cached_property
    def order(self) -> Tensor:
        """The place of every layer among the stacked ones."""
        places = {layer.module: n for n, layer in enumerate(layer for layers, _ in self.stacks for layer in layers)}
        return torch.tensor([places[layer.module] for layer in self.layers])

    def log_h(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """log h of pooled inputs by module, (batch, layers)."""
        return log_leverages(inputs, self.stacks, self.order)

    def among(self, modules: Collection[str]) -> Leverage:
        """Of the layers that a forward pass runs."""
        numbers = [number for number, layer in enumerate(self.layers) if layer.module in modules]
        of_pass = tuple(self.layers[n] for n in numbers), tuple(self.factors[n] for n in numbers)
        return Leverage(*of_pass, self.source)

    def against(self, log_h: Tensor) -> Leverage:
        """Relative to familiar inputs, whose leverages these are."""
        medians = log_h.nanquantile(0.5, dim=0)
        means = torch.stack(_means_over_layers(log_h - medians, self.source), dim=1).nanquantile(0.5, dim=0)
        return replace(self, medians=torch.cat([medians, means]))

    def ratios(self, log_h: Tensor) -> Ratios:
        """Relative to familiar inputs."""
        assert self.medians is not None
        return relative(log_h, self.medians, self.source)


def log_leverages(
    inputs: Mapping[str, Tensor], stacks: Sequence[tuple[Sequence[Layer], Tensor]], order: Tensor
) -> Tensor:
    """log h of pooled inputs by module, (batch, layers), by `Leverage.stacks` and `Leverage.order`."""
    parts = []
    for layers, w in stacks:
        a = torch.stack([inputs[layer.module] for layer in layers])
        parts.append(_blockwise(a, w, layers[0]).sum(dim=2))
    return _log(torch.cat(parts)[order.to(parts[0].device)].T)


def relative(log_h: Tensor, medians: Tensor, source: Source) -> Ratios:
    """r of examples, relative to the medians of familiar inputs."""
    medians = medians.to(log_h)
    gentle, steep = _means_over_layers(log_h - medians[:-2], source)
    return Ratios((gentle - medians[-2]).exp(), (steep - medians[-1]).exp())


def _means_over_layers(log_h: Tensor, source: Source) -> tuple[Tensor, Tensor]:
    """The logarithms of the geometric mean over layers and of novelty's, (batch,) each."""
    p = _MEANS[source]
    return log_h.mean(dim=1), ((p * log_h).logsumexp(dim=1) - math.log(log_h.shape[1])) / p


# --- factors --------------------------------------------------------------------------------------------------------


def factor(a: Tensor) -> Tensor:
    """W of W Wᵀ = (A + ε ā)⁻¹, of blocks A (g, s, s); (A + ε ā)^(−½) of a diagonal, (d,)."""
    if a.dim() == 1:
        return (a + RIDGE * a.mean()).rsqrt()
    ridge = RIDGE * a.diagonal(dim1=1, dim2=2).double().mean()
    eye = torch.eye(a.shape[1], dtype=torch.float64, device=a.device).expand(a.shape)
    root: Tensor = torch.linalg.cholesky(a.double() + ridge * eye)
    inverse: Tensor = torch.linalg.solve_triangular(root, eye, upper=False)
    return inverse.mT.to(a.dtype).contiguous()


def blocks(a: Tensor, layer: Layer) -> Tensor:
    """Inputs (..., width) as (..., g, s): the layer's groups, or parts of at most 2,048, zeros added to the last."""
    g = layer.groups if layer.groups > 1 else -(-layer.width // WIDEST)
    s = -(-layer.width // g)
    return F.pad(a, (0, g * s - layer.width)).reshape(*a.shape[:-1], g, s)


def _blockwise(a: Tensor, w: Tensor, layer: Layer) -> Tensor:
    """h of the inputs (k, b, width) of layers like this one, the share of each block, (k, b, g)."""
    dtype = torch.promote_types(a.dtype, w.dtype)
    a, w = a.to(dtype), w.to(dtype)
    if w.dim() == 2:
        return (a * w[:, None]).square().sum(dim=2, keepdim=True)
    if w.shape[1] == 1:
        return torch.bmm(a, w[:, 0]).square().sum(dim=2, keepdim=True)
    return torch.einsum("kbgs,kgst->kbgt", blocks(a, layer), w).square().sum(dim=3)


def from_structure(layers: Sequence[Layer], structure: Diagonal) -> Leverage:
    """Of the posterior: its input side, or what its curvature says of it.

    That is the right factor Q diag(column sums) Qᵀ in the basis Q, or the column sums of v̂.
    """
    kept, factors = [], []
    source: Source = "second moments"
    for layer in layers:
        right = _right_side(layer, structure)
        if right is None:
            a = layer.columns(structure.diagonal(layer.weight))
        else:
            source = "inputs" if layer.weight in structure.inputs else "gradients"
            # A convolution's columns are channels times kernel positions.
            per = len(right) // layer.width
            a = torch.einsum("ikjk->ij", right.reshape(layer.width, per, layer.width, per))
            a = a[None] if layer.width <= WIDEST else a.diagonal()
        if bool((a > 0).any()):
            kept.append(layer)
            factors.append(factor(a.to(torch.promote_types(a.dtype, torch.float32))))
    return Leverage(tuple(kept), tuple(factors), source)


def _right_side(layer: Layer, structure: Diagonal) -> Tensor | None:
    """A of a layer, (columns, columns), without the bias; None where the structure does not have it."""
    if layer.groups > 1 or layer.tokens:
        return None
    side = structure.inputs.get(layer.weight)
    if side is not None:
        columns = len(side.spectrum) - (side.bias is not None)
        return ((side.basis * side.spectrum) @ side.basis.mT)[:columns, :columns]
    rotation = structure.bases.get(layer.weight)
    if rotation is None or rotation.right is None or layer.inputs_first:
        return None
    sums = structure.second_moment[layer.weight].flatten(1).sum(dim=0)
    return (rotation.right * sums) @ rotation.right.mT


def from_inputs(
    layers: Sequence[Layer], pooled: Mapping[str, Tensor], state: Leverage | None
) -> tuple[Leverage | None, Tensor]:
    """Of n familiar inputs, A = Σ a aᵀ/n, and their log h, (n, layers), each with its own input left out of A:

        h ← (n − 1)/n · h/(1 − h/n)

    One that is there several times keeps its h, as the next of its kind will have it: of few distinct inputs the
    next is then as novel as those, not less.

    Embeddings are left out: of words, rare ones would look strange and the unknown word familiar. The state's leverage
    stands where inputs are fewer than 20, or where there is no other layer; None where there is none either.

    Args:
        pooled: the inputs by module, (n, width).
        state: the leverage that the optimiser's state gives, where there is one.
    """
    wide = [layer for layer in layers if not layer.tokens and layer.module in pooled]
    if not wide or len(pooled[wide[0].module]) < FEWEST:
        state = None if state is None else state.among(pooled)
        if state is None or not state.layers:
            return None, torch.zeros(0, 0)
        log_h = state.log_h(pooled)
        return state.against(log_h), log_h
    kept, factors, columns = [], [], []
    several = _several([pooled[layer.module] for layer in wide])
    for layer in wide:
        a = pooled[layer.module]
        if not bool(a.any()):
            continue
        x, n = blocks(a, layer), len(a)
        w = factor(torch.einsum("bgs,bgt->gst", x, x) / n)
        h = _blockwise(a[None], w[None], layer)[0]
        kept.append(layer)
        factors.append(w)
        columns.append(torch.where(several[:, None], h, (n - 1) / n * h / (1 - h / n).clamp(min=1e-6)).sum(dim=1))
    if not kept:
        return None, torch.zeros(0, 0)
    log_h = _log(torch.stack(columns, dim=1))
    return Leverage(tuple(kept), tuple(factors), "inputs").against(log_h), log_h


def _several(inputs: Sequence[Tensor]) -> Tensor:
    """Whether each example, (n,), has the same inputs (n, width) of every layer as another, but for rounding."""
    keys, generator = [], torch.Generator().manual_seed(0)
    for a in inputs:
        along = (a.double() @ torch.randn(a.shape[1], 3, generator=generator, dtype=torch.float64).to(a.device)).cpu()
        size = along.abs()[along != 0]
        keys.append(along / (size.median() if len(size) else 1.0))
    _, kinds, numbers = torch.unique(
        (1e4 * torch.stack(keys).sum(dim=0)).round(), dim=0, return_inverse=True, return_counts=True
    )
    several: Tensor = numbers[kinds] > 1
    return several.to(inputs[0].device)


def _log(h: Tensor) -> Tensor:
    return h.clamp(min=torch.finfo(h.dtype).tiny).log()
