r"""Leverage, its size relative to familiar inputs, and what grows with it: temperatures and novelty.

Under a Gaussian over the matrix W of a layer whose input side has curvature A, the variance of W a is proportional to

.. math::
    h(x) = a^\top (A + \epsilon \bar a I)^{-1} a

the leverage of x in that layer. A is the second moment of familiar inputs, or what the curvature in the optimiser's
state says of it: the column sums of Adam's second moment, the right factor of a Kronecker posterior.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.errors import FileError
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.predict.tap import Layer

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
        exponent: of the growth.
    """

    gentle: Tensor
    steep: Tensor
    exponent: float = 0.5

    @classmethod
    def usual(cls, outputs: Tensor) -> Ratios:
        """1, where no layer is known."""
        ones = torch.ones(len(outputs), dtype=outputs.dtype, device=outputs.device)
        return cls(ones, ones)

    @property
    def growth(self) -> Tensor:
        """((1 + r)/2)^½, or of a smaller exponent, by which an example's own temperature is above the common one."""
        return ((1 + self.gentle) / 2) ** self.exponent


@dataclass(frozen=True, eq=False)
class Leverage:
    """How far the layers of a network have to extrapolate for its inputs.

    Attributes:
        layers: the layers.
        factors: by the layer's module W, with h = |Wᵀ a|²; see `factor`.
        source: where A is from.
        medians: of log h of familiar inputs, layer by layer, then of the logarithms of both means over layers; None
            where a batch is to be its own reference.
        n_reference: the number of familiar inputs behind the medians.
        exponent: of ((1 + r)/2), by which temperatures grow: ½, or less where familiar inputs would pay for that.
    """

    layers: tuple[Layer, ...]
    factors: dict[str, Tensor]
    source: Source
    medians: Tensor | None = None
    n_reference: int = 0
    exponent: float = 0.5

    @cached_property
    def stacked(self) -> tuple[list[tuple[list[Layer], Tensor]], Tensor]:
        """Layers whose factors have the same shape, with those stacked, and the place of every layer among them."""
        groups: dict[torch.Size, list[int]] = {}
        for number, layer in enumerate(self.layers):
            groups.setdefault(self.factors[layer.module].shape, []).append(number)
        stacks = []
        for numbers in groups.values():
            alike = [self.layers[number] for number in numbers]
            each = [self.factors[layer.module] for layer in alike]
            w = each[0][None] if len(each) == 1 else torch.stack(each)
            # The same numbers, in one piece of memory and not in two.
            self.factors.update(zip((layer.module for layer in alike), w, strict=True))
            stacks.append((alike, w))
        order = torch.tensor([number for numbers in groups.values() for number in numbers]).argsort()
        return stacks, order.to(stacks[0][1].device)

    def log_h(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """log h of pooled inputs by module, (batch, layers)."""
        return log_leverages(inputs, *self.stacked)

    def among(self, modules: Collection[str]) -> Leverage:
        """Of the layers that a forward pass runs."""
        return self if self.medians is not None else replace(self, layers=_in(self.layers, modules))

    def against(self, log_h: Tensor) -> Leverage:
        """With the medians of familiar inputs, whose leverages these are."""
        medians = log_h.nanquantile(0.5, dim=0)
        means = torch.stack(means_over_layers(log_h - medians, self.source), dim=1).nanquantile(0.5, dim=0)
        return replace(self, medians=torch.cat([medians, means]), n_reference=len(log_h))

    def ratios(self, log_h: Tensor) -> Ratios:
        """Relative to familiar inputs, or to the batch itself."""
        medians = self.against(log_h).medians if self.medians is None else self.medians.to(log_h)
        assert medians is not None
        return relative(log_h, medians, self.source, self.exponent)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Leverage:
        """The same elsewhere."""
        medians = None if self.medians is None else self.medians.to(device, dtype)
        return replace(self, factors={name: w.to(device, dtype) for name, w in self.factors.items()}, medians=medians)

    def header(self) -> dict[str, Any]:
        """The plain data of a file."""
        plain = {"source": self.source, "n_reference": self.n_reference, "exponent": self.exponent}
        return {**plain, "modules": [x.module for x in self.layers]}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a file."""
        found = {f"factor.{name}": w for name, w in self.factors.items()}
        return found if self.medians is None else {**found, "medians": self.medians}

    @classmethod
    def loaded(
        cls,
        path: str | os.PathLike[str],
        layers: Sequence[Layer],
        header: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> Leverage:
        """The reverse of `header` and `tensors`, for the layers of a model."""
        try:
            modules, source = list(header["modules"]), header["source"]
            by_module = {layer.module: layer for layer in layers}
            kept = tuple(by_module[name] for name in modules)
            factors = {name: tensors[f"factor.{name}"] for name in modules}
            medians, n, exponent = tensors.get("medians"), int(header["n_reference"]), float(header["exponent"])
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is damaged, or of another model: its leverage has no {error}") from None
        for layer in kept:
            shape, expected = factors[layer.module].shape, blocks(torch.empty(1, layer.width), layer).shape[1:]
            if shape not in ((layer.width,), (*expected, expected[1])):
                raise FileError(f"{path} is damaged: the leverage of {layer.module!r} has shape {tuple(shape)}")
        if source not in _MEANS or (medians is not None and medians.shape != (len(kept) + 2,)):
            raise FileError(f"{path} is damaged: its leverage has a source {source!r}, or other layers")
        return cls(kept, factors, source, medians, n, exponent)


def log_leverages(
    inputs: Mapping[str, Tensor], stacks: Sequence[tuple[Sequence[Layer], Tensor]], order: Tensor
) -> Tensor:
    """log h of pooled inputs by module, (batch, layers), by `Leverage.stacked`."""
    each = []
    for layers, w in stacks:
        a = [inputs[layer.module] for layer in layers]
        shares = _of_alike(a[0][None] if len(a) == 1 else torch.stack(a), w, layers[0])
        each.append(shares[..., 0] if shares.shape[2] == 1 else shares.sum(dim=2))
    return _log((each[0] if len(each) == 1 else torch.cat(each)[order]).T)


def means_over_layers(log_h: Tensor, source: Source) -> tuple[Tensor, Tensor]:
    """The logarithms of the geometric mean over layers and of novelty's, (batch,) each."""
    p = _MEANS[source]
    return log_h.mean(dim=1), ((p * log_h).logsumexp(dim=1) - math.log(log_h.shape[1])) / p


def relative(log_h: Tensor, medians: Tensor, source: Source, exponent: float) -> Ratios:
    """r of examples, relative to the medians of familiar inputs."""
    gentle, steep = means_over_layers(log_h - medians[:-2], source)
    return Ratios((gentle - medians[-2]).exp(), (steep - medians[-1]).exp(), exponent)


# --- factors --------------------------------------------------------------------------------------------------------


def factor(a: Tensor) -> Tensor:
    """W of W Wᵀ = (A + ε ā)⁻¹, of blocks A (g, s, s); (A + ε ā)^(−½) of a diagonal, (d,)."""
    if a.dim() == 1:
        return (a + RIDGE * a.mean()).rsqrt()
    ridge = RIDGE * a.diagonal(dim1=1, dim2=2).double().mean()
    eye = torch.eye(a.shape[1], dtype=torch.float64, device=a.device).expand(a.shape)
    root: Tensor = torch.linalg.cholesky(a.double() + ridge * eye)
    found: Tensor = torch.linalg.solve_triangular(root, eye, upper=False).mT.to(a.dtype)
    return found.contiguous()


def blocks(a: Tensor, layer: Layer) -> Tensor:
    """Inputs (..., width) as (..., g, s): the layer's groups, or parts of at most 2,048, zeros added to the last."""
    g = layer.groups if layer.groups > 1 else -(-layer.width // WIDEST)
    s = -(-layer.width // g)
    return F.pad(a, (0, g * s - layer.width)).reshape(*a.shape[:-1], g, s)


def leverages(a: Tensor, w: Tensor, layer: Layer) -> Tensor:
    """h of inputs (b, width), the share of each block, (b, g)."""
    return _of_alike(a[None], w[None], layer)[0]


def _of_alike(a: Tensor, w: Tensor, layer: Layer) -> Tensor:
    """h of the inputs (k, b, width) of layers like this one, the share of each block, (k, b, g)."""
    if a.dtype != w.dtype:
        dtype = torch.promote_types(a.dtype, w.dtype)
        a, w = a.to(dtype), w.to(dtype)
    if w.dim() == 2:
        return (a * w[:, None]).square().sum(dim=2, keepdim=True)
    if w.shape[1] == 1:
        return torch.bmm(a, w[:, 0]).square().sum(dim=2, keepdim=True)
    return torch.einsum("kbgs,kgst->kbgt", blocks(a, layer), w).square().sum(dim=3)


def from_structure(layers: Sequence[Layer], structure: Diagonal) -> Leverage:
    """Of the curvature in an optimiser's state: the column sums of v̂, or Q diag(column sums) Qᵀ in the basis Q."""
    kept, factors = [], {}
    source: Source = "second moments"
    for layer in layers:
        v, rotation = structure.second_moment[layer.weight], structure.bases.get(layer.weight)
        basis = None if rotation is None or layer.inputs_first or layer.groups > 1 else rotation.right
        if basis is None:
            found = layer.columns(structure.diagonal(layer.weight))
        else:
            sums = v.flatten(1).sum(dim=0)
            # A convolution's columns are channels times kernel positions.
            whole = ((basis * sums) @ basis.mT).reshape(layer.width, -1, layer.width, sums.numel() // layer.width)
            found = torch.einsum("ikjk->ij", whole)
            found = found[None] if layer.width <= WIDEST else found.diagonal()
            source = "gradients"
        if bool((found > 0).any()):
            kept.append(layer)
            factors[layer.module] = factor(found.to(torch.promote_types(found.dtype, torch.float32)))
    return Leverage(tuple(kept), factors, source)


def from_inputs(
    layers: Sequence[Layer], batches: Iterable[Mapping[str, Tensor]], state: Leverage
) -> tuple[Leverage, Tensor]:
    """Of n familiar inputs, A = Σ a aᵀ/n, and their log h, (n, layers), each with its own input left out of A:

        h ← (n − 1)/n · h/(1 − h/n)

    Embeddings are left out: of words, rare ones would look strange and the unknown word familiar. The state's leverage
    stands where inputs are fewer than 20, or where there is no other layer.
    """
    batches = list(batches)
    seen = _in(layers, set.intersection(*map(set, batches)))
    wide = [layer for layer in seen if not layer.tokens]
    if not wide or sum(len(each[wide[0].module]) for each in batches) < FEWEST:
        state = state.among([layer.module for layer in seen])
        log_h = torch.cat([state.log_h(each) for each in batches]) if state.layers else torch.zeros(0, 0)
        return state.against(log_h) if state.layers else state, log_h
    kept, factors, columns = [], {}, []
    for layer in wide:
        a = torch.cat([inputs[layer.module] for inputs in batches])
        if not bool(a.any()):
            continue
        x, n = blocks(a, layer), len(a)
        w = factors[layer.module] = factor(torch.einsum("bgs,bgt->gst", x, x) / n)
        h = leverages(a, w, layer)
        kept.append(layer)
        columns.append(((n - 1) / n * h / (1 - h / n).clamp(min=1e-6)).sum(dim=1))
    log_h = _log(torch.stack(columns, dim=1))
    return Leverage(tuple(kept), factors, "inputs").against(log_h), log_h


def _in(layers: Sequence[Layer], modules: Collection[str]) -> tuple[Layer, ...]:
    return tuple(layer for layer in layers if layer.module in modules)


def _log(h: Tensor) -> Tensor:
    return h.clamp(min=torch.finfo(h.dtype).tiny).log()
