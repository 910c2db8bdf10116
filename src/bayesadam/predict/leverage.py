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
from typing import Literal, NamedTuple

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
# From this width on A has a factor of few columns where few directions count, and of few inputs from a smaller one on.
_WIDE, _WIDE_OF_FEW = 1024, 256
# Narrower layers are taken together.
_NARROW = 128
# Wider blocks of A are cut in parts: the memory goes with the square of the width.
WIDEST = 2048
# The exponent of the mean over layers that novelty takes. A diagonal sees a layer dimly, so that those with the largest
# leverage count for more.
_MEANS: Mapping[Source, float] = {"inputs": 1.0, "gradients": 1.0, "second moments": 4.0}
# The last layers are those whose inputs the classes part.
NEAR = 2
# Fewer familiar inputs a class leave its mean uncertain.
A_CLASS = 10


class Ratios(NamedTuple):
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


# The numbers of parts that are alike, and together what `_applied` makes of their factors.
Stacks = Sequence[tuple[Sequence[int], tuple[Tensor, ...]]]


@dataclass(frozen=True, eq=False)
class Leverage:
    """How far the layers of a network have to extrapolate for its inputs.

    Its parts are the layers and, again, the last of them, with their inputs within the predicted class.

    Attributes:
        layers: the layers.
        factors: of each part, W with h = |Wᵀ a|²; see `factor` and `thin_factor`.
        source: where A is from.
        medians: of log h of familiar inputs, part by part, then of the logarithms of the means over them. NaN is of a
            part whose inputs are mostly all 0, where nothing says what is usual: it is left out.
        means: of the inputs of the last layers, class by class, (classes, width).
    """

    layers: tuple[Matrix, ...]
    factors: tuple[Tensor, ...]
    source: Source
    medians: Tensor | None = None
    means: tuple[Tensor, ...] = ()

    def stacks(self, scales: Tensor) -> Stacks:
        """The parts whose factors are alike but for their sizes, those by `scales` together, padded by zeros."""
        kinds: dict[tuple[int, ...], list[int]] = {}
        for number, w in enumerate(self.factors):
            kinds.setdefault(_kind(w), []).append(number)
        every = ((some, [_applied(self.factors[i], scales[i]) for i in some]) for some in kinds.values())
        return [(some, tuple(map(_stacked, zip(*tensors, strict=True)))) for some, tensors in every]

    def relative(self) -> tuple[Stacks, Tensor, Tensor]:
        """Factors W e^(−m/2), m the medians, by which h is relative to the usual; and the arguments of `ratios`.

        The medians of the steep mean and of novelty's are in the weights.
        """
        assert self.medians is not None
        stacks = self.stacks((-self.usual / 2).exp().nan_to_num(0))
        gentle, steep, near = self.medians[len(self.factors) :].double()
        scales = torch.stack([torch.zeros_like(steep), -steep, steep - 2 * near]) * self.power
        weights = (self.weights * scales[:, None].exp())[:, [number for numbers, _ in stacks for number in numbers]]
        return stacks, weights[:, :, None], gentle

    @property
    def usual(self) -> Tensor:
        """The median of log h of each part."""
        assert self.medians is not None
        return self.medians[: len(self.factors)]

    @property
    def power(self) -> float:
        """The exponent of the steep mean."""
        return _MEANS[self.source]

    @property
    def weights(self) -> Tensor:
        """Of the parts in the means over layers, twice, and over the last ones within their class, (3, parts)."""
        heard = ~self.usual.isnan()
        within = torch.arange(len(heard), device=heard.device) >= len(heard) - len(self.means)
        layers = (heard & ~within).double()
        last = (heard & within).double() if bool((heard & within).any()) else layers
        return torch.stack([w / w.sum() for w in (layers, layers, last)])

    def log_h(self, pooled: Mapping[str, Tensor], outputs: Tensor | None = None) -> Tensor:
        """log h of pooled inputs by module, (batch, parts), given the logits where there are `means`."""
        stacks = self.stacks(torch.ones(len(self.factors)))
        order = [number for numbers, _ in stacks for number in numbers]
        h = norms(inputs_of_parts(pooled, self.layers, self.means, outputs), stacks).square()
        return _log(h[[order.index(number) for number in range(len(order))]].T)

    def among(self, modules: Collection[str]) -> Leverage:
        """Of the layers that a forward pass runs."""
        pairs = [pair for pair in zip(self.layers, self.factors, strict=True) if pair[0].module in modules]
        return Leverage(tuple(layer for layer, _ in pairs), tuple(w for _, w in pairs), self.source)

    def against(self, log_h: Tensor) -> Leverage:
        """Relative to familiar inputs, whose leverages these are."""
        medians = log_h.nanquantile(0.5, dim=0)
        silent = medians <= _log(torch.zeros((), dtype=log_h.dtype)).item()
        known = replace(self, medians=medians.masked_fill(silent & ~silent.all(), math.nan))
        means = torch.stack(known._means(log_h)).log().nanquantile(0.5, dim=1)
        return replace(self, medians=torch.cat([known.usual, means]))

    def ratios(self, log_h: Tensor) -> Ratios:
        """Relative to familiar inputs."""
        assert self.medians is not None
        ends = self.medians[len(self.factors) :].to(log_h).exp()
        return Ratios(*(mean / end for mean, end in zip(self._means(log_h), ends, strict=True)))

    def _means(self, log_h: Tensor) -> Ratios:
        q, weights = (log_h - self.usual.to(log_h)).exp().T, self.weights[:, :, None].to(log_h)
        return ratios(q, weights, log_h.new_zeros(()), self.power, absent=True)


def inputs_of_parts(
    pooled: Mapping[str, Tensor], layers: Sequence[Matrix], means: Sequence[Tensor], outputs: Tensor | None
) -> list[Tensor]:
    """Those of the layers, (batch, width) each, and what is left of the last ones within the predicted classes."""
    inputs = [pooled[layer.module] for layer in layers]
    if not means or outputs is None:
        return inputs
    classes = outputs.argmax(dim=1)
    return inputs + [a - mean.to(a)[classes] for a, mean in zip(inputs[-len(means) :], means, strict=True)]


def norms(inputs: Sequence[Tensor], stacks: Stacks) -> Tensor:
    """√h of the inputs of each part, (parts, batch), in the order of the stacks."""
    some = []
    for numbers, w in stacks:
        width = w[0].shape[1] if w[0].dim() < 4 else 0
        alike = [_widened(inputs[i], width) for i in numbers]
        some.append(_lengths(alike[0][None] if len(alike) == 1 else torch.stack(alike), *w))
    return torch.cat(some)


def _widened(a: Tensor, width: int) -> Tensor:
    """(batch, width), with zeros where it has less."""
    return a if a.shape[1] >= width else F.pad(a, (0, width - a.shape[1]))


def ratios(q: Tensor, weights: Tensor, centre: Tensor, power: float, *, absent: bool) -> Ratios:
    """Means of relative leverages q, (parts, batch), by weights, (3, parts, 1); `centre` is the gentle mean's median.

    With `absent` NaN is of a layer that an example does not run.
    """
    ran = ~q.isnan() if absent else None
    q = q.clamp(torch.finfo(q.dtype).tiny, torch.finfo(q.dtype).max ** (1 / power) / 1e4)
    steep = q if power == 1 else q**power
    weighted = weights * torch.stack([q.log(), steep, steep])
    means = (weighted if ran is None else weighted.nan_to_num(0)).sum(dim=1)
    if ran is not None:
        whole = weights.sum(dim=1)
        share = (weights * ran).sum(dim=1) / whole
        # Where an example runs none of the last ones, those of all layers stand.
        means = means / share
        means = torch.stack([*means[:2], torch.where(share[2] > 0, means[2], means[1] * whole[2] / whole[1])])
    gentle, mean, last = means.unbind()
    mean, near = (mean, mean * last) if power == 1 else (mean ** (1 / power), (mean * last) ** (1 / power))
    return Ratios((gentle - centre).exp(), mean, near.sqrt())


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


def _blocks(a: Tensor, g: int, s: int) -> Tensor:
    """Inputs (k, b, width) as (k, g, b, s): groups of a convolution, or parts, the last padded."""
    a = F.pad(a, (0, g * s - a.shape[2])) if g * s > a.shape[2] else a
    return a.reshape(*a.shape[:2], g, s).transpose(1, 2)


def thin_factor(x: Tensor) -> Tensor | None:
    """Columns u (λ + ε ā)^(−½) of W for A = xᵀ x/m, (1, width, ·), u and λ the eigenvectors and values above ε ā.

    The rest of W is (ε ā)^(−½) in all other directions; ā is of the λ alone. None where those are more than a quarter
    of the width: W is better whole.
    """
    (m, width), wide = x.shape, x.double()
    values, vectors = torch.linalg.eigh((wide @ wide.mT if m < width else wide.mT @ wide) / m)
    keep = values > RIDGE * values.sum() / width
    if 4 * int(keep.sum()) > width:
        return None
    values, vectors = values[keep], vectors[:, keep]
    if m < width:
        vectors = wide.mT @ vectors * (m * values).rsqrt()
    columns: Tensor = vectors * (values + RIDGE * values.sum() / width).rsqrt()
    return columns.to(x.dtype)[None].contiguous()


def _is_thin(w: Tensor) -> bool:
    return w.dim() == 3 and w.shape[2] < w.shape[1]


def _kind(w: Tensor) -> tuple[int, ...]:
    """What factors that are applied together have alike: the form, and the width to a power of two."""
    if w.dim() == 3 and len(w) > 1:
        return tuple(w.shape)
    return w.dim(), _is_thin(w), max(_NARROW, 1 << (w.shape[-2] - 1).bit_length()) if w.dim() == 3 else len(w)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one, padded by zeros to the largest sizes."""
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(list(tensors))
    whole = tensors[0].new_zeros(len(tensors), *map(max, zip(*(tensor.shape for tensor in tensors), strict=True)))
    for one, tensor in zip(whole, tensors, strict=True):
        one[tuple(map(slice, tensor.shape))] = tensor
    return whole


def _applied(w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """The arguments of `_lengths` for a factor, or for the columns of a thin one, and Wᵀ a times a number."""
    if _is_thin(w):
        # d⁻² = λ + ε ā, the trace of A is Σ λ.
        width, m, square = w.shape[1], w.shape[2], w[0].double().square().sum(dim=0)
        rest = (RIDGE * (1 / square).sum() / (width + RIDGE * m)).rsqrt()
        return (w[0] * scale.to(w)), (rest * w[0] / square).mT.to(w), (rest * scale).to(w).expand(1, 1)
    w = w * scale.to(w)
    return (w[0] if w.dim() == 3 and len(w) == 1 else w,)


def _lengths(a: Tensor, w: Tensor, back: Tensor | None = None, rest: Tensor | None = None) -> Tensor:
    """|Wᵀ a| of the inputs (k, b, width) of parts whose factors are alike, (k, b)."""
    if a.dtype != w.dtype:
        dtype = torch.promote_types(a.dtype, w.dtype)
        a, w = a.to(dtype), w.to(dtype)
    if back is not None and rest is not None:
        along = torch.bmm(a, w)
        left = torch.baddbmm(a * rest.to(a), along, back.to(a), alpha=-1)
        return _length(torch.stack([_length(along), _length(left)], dim=2))
    if w.dim() == 4:
        return _length(_length(_blocks(a, *w.shape[1:3]) @ w).movedim(1, -1))
    return _length(a * w[:, None] if w.dim() == 2 else torch.bmm(a, w))


def _length(x: Tensor) -> Tensor:
    """Over the last dimension, counted from the first: torch before 2.13 traces −1 wrongly where its size is 1."""
    length: Tensor = torch.linalg.vector_norm(x, dim=x.dim() - 1)
    return length


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
    outputs: Tensor | None = None,
) -> tuple[Leverage, Tensor] | None:
    """Of m familiar inputs, A = Σ a aᵀ/m; and the log h of all n, (n, parts).

    The others have the same A as new inputs have: among them and one more, all ranks of h are equally likely, and equal
    inputs tie. The familiar ones are left out of their own, h ← (m − 1)/m · h/(1 − h/m), which makes them as large, but
    not tie.

    Embeddings are left out: of words, rare ones would look strange and the unknown word familiar. None where there is
    no other layer, or where familiar inputs are fewer than 20.

    Args:
        pooled: the inputs by module, (n, width); NaN where an example does not run a layer.
        familiar: which of them are in A, (n,) booleans.
        outputs: the logits of classes, (n, classes), by which the last inputs are taken within their class, where the
            familiar ones are enough for it.
    """
    wide = [layer for layer in layers if not layer.tokens and layer.module in pooled]
    if not wide or int(familiar.sum()) < FEWEST:
        return None
    inputs = ((layer, pooled[layer.module]) for layer in wide)
    known = {layer: a for layer, a in inputs if len(seen := a[_inside(a, familiar)]) >= FEWEST and seen.any()}
    if not known:
        return None
    last: list[tuple[Tensor, Tensor]] = []
    if outputs is not None and int(familiar.sum()) >= A_CLASS * outputs.shape[1]:
        last = [_around_class(a, familiar.to(a.device), outputs.to(a.device)) for a in list(known.values())[-NEAR:]]
    # Inputs that are the same for all have nothing left, and a layer that some do not run has no means.
    last = last if all(bool(left[familiar.to(left.device)].any() & ~left.isnan().any()) for _, left in last) else []
    factors, columns = [], []
    for layer, a in (*known.items(), *zip(list(known)[len(known) - len(last) :], (a for _, a in last), strict=True)):
        inside = _inside(a, familiar)
        m = int(inside.sum())
        is_wide = layer.groups == 1 and layer.width >= (_WIDE_OF_FEW if 4 * m <= layer.width else _WIDE)
        w = thin_factor(a[inside]) if is_wide else None
        if w is None:
            # At most 2,048 inputs in a block.
            g = layer.groups if layer.groups > 1 and not layer.inputs_first else -(-layer.width // WIDEST)
            blocks = _blocks(a[None], g, -(-layer.width // g))[0]
            x = blocks[:, inside]
            h = (blocks @ (w := factor(x.mT @ x / m))).square().sum(dim=-1)
        else:
            h = _lengths(a[None], *(one[None] for one in _applied(w, torch.ones(())))).square()
        factors.append(w)
        left_out = (m - 1) / m * h / (1 - h / m).clamp(min=1e-6)
        columns.append(torch.where(inside, left_out, h).sum(dim=0))
    log_h = _log(torch.stack(columns, dim=1))
    leverage = Leverage(tuple(known), tuple(factors), "inputs", means=tuple(mean for mean, _ in last))
    return leverage.against(log_h[familiar.to(log_h.device)]), log_h


def _inside(a: Tensor, familiar: Tensor) -> Tensor:
    """Which inputs of a layer make its A: the familiar ones that run it."""
    familiar = familiar.to(a.device)
    return familiar & ~a.isnan().any(dim=1) if bool(a.sum().isnan()) else familiar


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
