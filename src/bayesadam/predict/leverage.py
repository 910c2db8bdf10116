r"""Leverage: the posterior's own variance of a layer's outputs, relative to that of familiar inputs.

Under a Gaussian with an input side, Cov w_i = (w g_i A + δ)⁻¹ for every row of W, the variance of (W a)_i is, but for
the row's constant,

.. math::
    h(x) = a^\top (A + \epsilon \bar a I)^{-1} a

the leverage of x in that layer, a its input, averaged over positions. A is the second moment of familiar inputs
(`weights.inputs`), or what the curvature in the optimiser's state says of it: the column sums of Adam's second moment,
the right factor of a Kronecker posterior.

New classes may lie amid the known ones, where the leverage of a is small, that of a − μ is not: μ is the mean of
familiar inputs that the network takes for the same class, A the second moment of what is left.
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

from bayesadam.predict.matrices import Matrix
from bayesadam.weights.diagonal import Diagonal

Source = Literal["inputs", "gradients", "second moments"]
# ε, chosen like the exponents below on MNIST, Fashion-MNIST and texts.
RIDGE = 0.01
# Fewer inputs do not make a second moment, and more than the latter make it hardly better.
FEWEST, MOST = 20, 1000
# Wider blocks of A are cut in parts: the memory goes with the square of the width.
WIDEST = 2048
# The exponent of the mean over layers that novelty takes. A diagonal sees a layer dimly, so that those with the largest
# leverage count for more.
_MEANS: Mapping[Source, float] = {"inputs": 1.0, "gradients": 1.0, "second moments": 4.0}
# The last layers are those whose inputs the classes part.
NEAR, _WITHIN = 2, " within its class"
# Fewer familiar inputs a class leave its mean uncertain.
A_CLASS = 10


@dataclass(frozen=True, eq=False)
class Ratios:
    """r of each example, (batch,): its leverage relative to that of familiar inputs, 1 for the usual one.

    Attributes:
        gentle: of the geometric mean over layers, which moves temperatures.
        steep: of the mean, or a power mean, over layers.
        near: √(r r_c), which moves novelty, r the steep one and r_c of the mean over the last layers of what is left of
            their inputs within the predicted class; r where no classes are known.
    """

    gentle: Tensor
    steep: Tensor
    near: Tensor

    @classmethod
    def usual(cls, outputs: Tensor) -> Ratios:
        """1, where no layer is known."""
        ones = torch.ones_like(outputs.reshape(outputs.shape[0], -1)[:, 0])
        return cls(ones, ones, ones)

    def growth(self, exponent: float) -> Tensor:
        """((1 + r)/2)^exponent, by which an example's own temperature is above the common one."""
        return ((1 + self.gentle) / 2) ** exponent


@dataclass(frozen=True, eq=False)
class Leverage:
    """How far the layers of a network have to extrapolate for its inputs.

    Attributes:
        layers: the layers.
        factors: for each of `parts` W with h = |Wᵀ a|²; see `factor`.
        source: where A is from.
        medians: of log h of familiar inputs, part by part, then of the logarithms of the means over them.
        means: of the inputs of the last layers, class by class, (classes, width).
    """

    layers: tuple[Matrix, ...]
    factors: tuple[Tensor, ...]
    source: Source
    medians: Tensor | None = None
    means: tuple[Tensor, ...] = ()

    @property
    def parts(self) -> tuple[Matrix, ...]:
        """The layers, and again those whose inputs are taken within their class."""
        return *self.layers, *_within(self.layers, len(self.means))

    @cached_property
    def stacks(self) -> tuple[tuple[tuple[Matrix, ...], Tensor], ...]:
        """Layers whose factors have the same shape, with those stacked."""
        shapes: dict[torch.Size, list[int]] = {}
        for number, w in enumerate(self.factors):
            shapes.setdefault(w.shape, []).append(number)
        groups = shapes.values()
        return tuple((tuple(self.parts[i] for i in g), torch.stack([self.factors[i] for i in g])) for g in groups)

    @cached_property
    def order(self) -> Tensor:
        """The place of every layer among the stacked ones."""
        stacked = [layer.module for layers, _ in self.stacks for layer in layers]
        return torch.tensor([stacked.index(layer.module) for layer in self.parts])

    def log_h(self, inputs: Mapping[str, Tensor], outputs: Tensor | None = None) -> Tensor:
        """log h of pooled inputs by module, (batch, parts), given the logits where there are `means`."""
        if outputs is not None and self.means:
            inputs = within_class(inputs, self.layers, self.means, outputs)
        return log_leverages(inputs, self.stacks, self.order)

    def among(self, modules: Collection[str]) -> Leverage:
        """Of the layers that a forward pass runs."""
        pairs = [pair for pair in zip(self.layers, self.factors, strict=True) if pair[0].module in modules]
        return Leverage(tuple(layer for layer, _ in pairs), tuple(w for _, w in pairs), self.source)

    def against(self, log_h: Tensor) -> Leverage:
        """Relative to familiar inputs, whose leverages these are."""
        medians = log_h.nanquantile(0.5, dim=0)
        # Where a layer's inputs are mostly all 0 nothing says what is usual: it is left out.
        silent = medians <= _log(torch.zeros((), dtype=log_h.dtype)).item()
        medians = medians.masked_fill(silent & ~silent.all(), math.nan)
        means = torch.stack(_means(log_h - medians, self.source, len(self.means)), dim=1).nanquantile(0.5, dim=0)
        return replace(self, medians=torch.cat([medians, means]))

    def ratios(self, log_h: Tensor) -> Ratios:
        """Relative to familiar inputs."""
        assert self.medians is not None
        return relative(log_h, self.medians, self.source, len(self.means))


def log_leverages(
    inputs: Mapping[str, Tensor], stacks: Sequence[tuple[Sequence[Matrix], Tensor]], order: Tensor
) -> Tensor:
    """log h of pooled inputs by module, (batch, layers), by `Leverage.stacks` and `Leverage.order`."""
    parts = [_h(torch.stack([inputs[layer.module] for layer in layers]), w, layers[0]) for layers, w in stacks]
    return _log(torch.cat([part.sum(dim=2) for part in parts])[order.to(parts[0].device)].T)


def within_class(
    inputs: Mapping[str, Tensor], layers: Sequence[Matrix], means: Sequence[Tensor], outputs: Tensor
) -> dict[str, Tensor]:
    """Pooled inputs, and of the last layers what is left of them within the predicted class of each example."""
    classes = outputs.argmax(dim=1)
    pairs = zip(layers[len(layers) - len(means) :], _within(layers, len(means)), means, strict=True)
    left = {
        within.module: inputs[layer.module] - mean.to(inputs[layer.module])[classes] for layer, within, mean in pairs
    }
    return {**inputs, **left}


def _within(layers: Sequence[Matrix], n: int) -> tuple[Matrix, ...]:
    """The last n layers, by the names of their inputs within the class."""
    return tuple(replace(layer, module=layer.module + _WITHIN) for layer in layers[len(layers) - n :])


def relative(log_h: Tensor, medians: Tensor, source: Source, near: int) -> Ratios:
    """r of examples, relative to the medians of familiar inputs, `near` parts of them within the class."""
    medians, n = medians.to(log_h), log_h.shape[1]
    r = (torch.stack(_means(log_h - medians[:n], source, near), dim=1) - medians[n:]).exp()
    return Ratios(r[:, 0], r[:, 1], r[:, -1])


def _means(log_h: Tensor, source: Source, near: int) -> list[Tensor]:
    """The logarithms of the geometric mean over layers, of the steep one and, with `near`, novelty's, (batch,) each.

    NaN is of a layer that an example does not run.
    """
    p, ran = _MEANS[source], ~log_h.isnan()
    layers, within = slice(log_h.shape[1] - near), slice(log_h.shape[1] - near, None)

    def mean(some: slice) -> Tensor:
        kept = (p * log_h).where(ran, -math.inf)[:, some].logsumexp(dim=1)
        return (kept - ran[:, some].sum(dim=1).log()) / p

    gentle, steep = log_h.where(ran, 0)[:, layers].sum(dim=1) / ran[:, layers].sum(dim=1), mean(layers)
    if not near:
        return [gentle, steep]
    own = mean(within)
    return [gentle, steep, (steep + torch.where(own.isnan(), steep, own)) / 2]


def _log(h: Tensor) -> Tensor:
    return h.clamp(min=torch.finfo(h.dtype).tiny).log()


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


def _blocks(a: Tensor, layer: Matrix) -> Tensor:
    """Inputs (..., width) as (..., g, s): groups of a convolution, or parts of at most 2,048, the last padded."""
    g = layer.groups if layer.groups > 1 and not layer.inputs_first else -(-layer.width // WIDEST)
    s = -(-layer.width // g)
    return F.pad(a, (0, g * s - layer.width)).reshape(*a.shape[:-1], g, s)


def _h(a: Tensor, w: Tensor, layer: Matrix) -> Tensor:
    """h of the inputs (k, b, width) of layers like this one, the share of each block, (k, b, g)."""
    dtype = torch.promote_types(a.dtype, w.dtype)
    a, w = a.to(dtype), w.to(dtype)
    if w.dim() == 2:
        return (a * w[:, None]).square().sum(dim=2, keepdim=True)
    if w.shape[1] == 1:
        return torch.bmm(a, w[:, 0]).square().sum(dim=2, keepdim=True)
    return torch.einsum("kbgs,kgst->kbgt", _blocks(a, layer), w).square().sum(dim=3)


def from_structure(layers: Sequence[Matrix], structure: Diagonal) -> Leverage:
    """Of the posterior: its input side, or what its curvature says of it.

    That is the right factor Q diag(column sums) Qᵀ in the basis Q, or the column sums of v̂.
    """
    factors: dict[Matrix, Tensor] = {}
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
            factors[layer] = factor(a.to(torch.promote_types(a.dtype, torch.float32)))
    return Leverage(tuple(factors), tuple(factors.values()), source)


def _right_side(layer: Matrix, structure: Diagonal) -> Tensor | None:
    """A of a layer, (columns, columns), without the bias; None where the structure does not have it."""
    if layer.groups > 1 or layer.tokens:
        return None
    side, rotation = structure.inputs.get(layer.weight), structure.bases.get(layer.weight)
    if side is not None:
        columns = len(side.spectrum) - (side.bias is not None)
        return ((side.basis * side.spectrum) @ side.basis.mT)[:columns, :columns]
    if rotation is None or rotation.right is None or layer.inputs_first:
        return None
    return (rotation.right * structure.second_moment[layer.weight].flatten(1).sum(dim=0)) @ rotation.right.mT


def chosen(n: int) -> Tensor:
    """Which of n inputs make A, (n,) booleans: a third, drawn at random, 20 to 1,000; none of fewer than 40."""
    # Of a seed that nobody shuffles by: inputs in the order of the same permutation would be the first third of them.
    order = torch.randperm(n, generator=torch.Generator().manual_seed(577215664))
    return order < (min(max(n // 3, FEWEST), MOST) if n >= 2 * FEWEST else 0)


def from_inputs(
    layers: Sequence[Matrix],
    pooled: Mapping[str, Tensor],
    familiar: Tensor,
    state: Leverage | None,
    outputs: Tensor | None = None,
) -> tuple[Leverage | None, Tensor, Tensor]:
    """Of m familiar inputs, A = Σ a aᵀ/m; the log h of all n, (n, parts); and which of them are not in A, (n,).

    The others have the same A as new inputs have: among them and one more, all ranks of h are equally likely, and equal
    inputs tie. The familiar ones are left out of their own, h ← (m − 1)/m · h/(1 − h/m), which makes them as large, but
    not tie.

    Embeddings are left out: of words, rare ones would look strange and the unknown word familiar. The state's leverage
    stands where familiar inputs are fewer than 20, or where there is no other layer; None where there is none either.

    Args:
        pooled: the inputs by module, (n, width); NaN where an example does not run a layer.
        familiar: which of them are in A, (n,) booleans.
        state: the leverage that the optimiser's state gives, where there is one.
        outputs: the logits of classes, (n, classes), by which the last inputs are taken within their class, where the
            familiar ones are enough for it.
    """
    wide = [layer for layer in layers if not layer.tokens and layer.module in pooled]
    everyone = torch.ones_like(familiar)
    if not wide or int(familiar.sum()) < FEWEST:
        state = None if state is None else state.among(pooled)
        if state is None or not state.layers:
            return None, torch.zeros(0, 0), everyone
        log_h = state.log_h(pooled)
        return state.against(log_h), log_h, everyone
    layers_inputs = ((layer, pooled[layer.module]) for layer in wide)
    known = {layer: a for layer, a in layers_inputs if len(seen := a[_inside(a, familiar)]) >= FEWEST and seen.any()}
    if not known:
        return None, torch.zeros(0, 0), everyone
    last: list[tuple[Tensor, Tensor]] = []
    if outputs is not None and int(familiar.sum()) >= A_CLASS * outputs.shape[1]:
        last = [_around_class(a, familiar.to(a.device), outputs.to(a.device)) for a in list(known.values())[-NEAR:]]
    # Inputs that are the same for all have nothing left, and a layer that some do not run has no means.
    last = last if all(bool(left[familiar.to(left.device)].any() & ~left.isnan().any()) for _, left in last) else []
    factors, columns = [], []
    for layer, a in (*known.items(), *zip(list(known)[len(known) - len(last) :], (a for _, a in last), strict=True)):
        inside = _inside(a, familiar)
        x, m = _blocks(a[inside], layer), int(inside.sum())
        factors.append(w := factor(torch.einsum("bgs,bgt->gst", x, x) / m))
        h = _h(a[None], w[None], layer)[0]
        left_out = (m - 1) / m * h / (1 - h / m).clamp(min=1e-6)
        columns.append(torch.where(inside[:, None], left_out, h).sum(dim=1))
    log_h = _log(torch.stack(columns, dim=1))
    leverage = Leverage(tuple(known), tuple(factors), "inputs", means=tuple(mean for mean, _ in last))
    return leverage.against(log_h[familiar.to(log_h.device)]), log_h, ~familiar


def _inside(a: Tensor, familiar: Tensor) -> Tensor:
    """Which inputs of a layer make its A: the familiar ones that run it."""
    return familiar.to(a.device) & ~a.isnan().any(dim=1)


def _around_class(a: Tensor, familiar: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """μ_c = (ā + Σ a)/(1 + n_c) over the n_c familiar inputs that the network takes for class c; and a − μ, (n, width).

    The familiar inputs are left out of their own mean, which makes what is left (1 + n_c)/n_c times as long.
    """
    classes = F.one_hot(outputs.argmax(dim=1), outputs.shape[1]).to(a)
    known = classes * familiar[:, None]
    counts = known.sum(dim=0)[:, None]
    means = (a[familiar].mean(dim=0) + known.T @ a) / (1 + counts)
    longer = 1 + (known @ (1 / counts.clamp(min=1)))
    return means, longer * (a - classes @ means)
