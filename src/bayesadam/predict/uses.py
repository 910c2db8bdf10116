"""What one parameter contributes to J Σ Jᵀ, from its layers' inputs and the back-propagated D; never a Jacobian.

Notation: b examples, c outputs of the network, p positions at which a weight is used within one example (the steps of a
sequence, the pixels of a convolution), D = ∂f/∂(layer output), S the variances of the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from bayesadam.errors import MatchError
from bayesadam.readers import Rotation
from bayesadam.weights.inputs import InputSide
from bayesadam.weights.named import Named

# Brings a layer's tensor, of so many examples and after so many other dimensions, into the form (b, positions, ...).
Layout = Callable[[Tensor, int, int], Tensor]
# An output of a layer as an edge of the graph, and the dimension of its batch.
Outlet = tuple[GradientEdge, int]
# Gradients of one parameter are formed in pieces of this many entries and dropped: on a CPU they fit a cache, on
# another device they fill it with work.
_PIECE = 1 << 21
_DEVICE_PIECE = 1 << 25


def batch_first(tensor: Tensor, size: int, lead: int) -> Tensor:
    """(b·k, ...) as (b, k, ...); k is 1 unless the batch was folded."""
    shape = tensor.shape
    return tensor.reshape(*shape[:lead], size, shape[lead] // size, *shape[lead + 1 :])


def batch_second(tensor: Tensor, size: int, lead: int) -> Tensor:
    """(l, b, ...) as (b, l, ...)."""
    return tensor.movedim(lead + 1, lead)


# --- uses of a parameter --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Use(ABC):
    """One use of one parameter, or of some of its rows, in a forward pass.

    Attributes:
        edge: the layer's output z as an edge of the graph, where D arrives, so that z, of that `shape`, may be freed.
        layouts: ways in which the examples may lie in this layer's tensors; the first is taken.
        rows: the rows of the parameter in use, where it is not the whole.
        rotation: the coordinates in which the parameter's variances are, where they are not its own.
        outlets: what all gradients come through of a layer that keeps examples apart and gives autograd none of its
            parameters'; that they are apart up to there is seen there.
    """

    name: str
    edge: GradientEdge
    shape: torch.Size
    layouts: tuple[Layout, ...]
    rows: slice | None = None
    rotation: Rotation | InputSide | None = None
    outlets: tuple[Outlet, ...] = ()

    @property
    def at(self) -> tuple[Any, int]:
        """The same for all uses of one output."""
        return self.edge.node, self.edge.output_nr

    @property
    def start(self) -> int | None:
        """The first of the rows in use; None of the whole parameter."""
        return None if self.rows is None else self.rows.start

    @property
    def layout(self) -> Layout:
        """How the examples lie."""
        return self.layouts[0]

    def of(self, tensor: Tensor) -> Tensor:
        """The part in use of a tensor of the parameter's shape; rotated, rows are mixed and all of them are."""
        return tensor if self.rows is None or self.rotation is not None else tensor[self.rows]

    @abstractmethod
    def total(self, d: Tensor, s: Tensor, shape: torch.Size) -> Tensor:
        """Σ_b s_b ∂f_b/∂w of the part in use, of that shape, for D in the shape of z."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Product(Use):
    """z = W a at every position, or at every pixel with a the patch there: gradients are sums Σ_p X_p Y_p.

    Attributes:
        input: the layer's.
        convolution: the layer, if it is one.
        inputs_first: whether the weight is kept as (inputs, outputs), as GPT-2's are.
    """

    input: Tensor
    convolution: _ConvNd | None = None
    inputs_first: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """The part in use, (outputs, ...), or (groups, outputs, ...); coordinates of known inputs are so already."""
        if self.transposed:
            return tensor.reshape(self.groups, -1, *tensor.shape[1:]).transpose(1, 2)
        turned = self.inputs_first and not isinstance(self.rotation, InputSide)
        return tensor.mT if turned else super().of(tensor)

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution, whose weight is (inputs, outputs / groups, *kernel)."""
        return isinstance(self.convolution, _ConvTransposeNd)

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is one matrix, (outputs, inputs) or the other way round, as rotations take it."""
        return self.groups == 1 and not self.transposed

    @property
    def groups(self) -> int:
        """Those of a convolution."""
        return 1 if self.convolution is None else self.convolution.groups

    def factors(self, d: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """X (c, b, g, p, x) and Y (b, g, p, y), the weight's parts being (g, x, y); X Q_L and Y Q_R where rotated."""
        if self.convolution is None:
            x = self.layout(d, size, 1).reshape(len(d), size, 1, -1, d.shape[-1])
        else:
            # The n images of b examples are gathered as positions.
            x = d.reshape(*d.shape[:2], self.groups, d.shape[2] // self.groups, -1).transpose(3, 4)
            x = self.layout(x, size, 1).transpose(2, 3).flatten(3, 4)
        left, right, constant = None, None, False
        if isinstance(self.rotation, InputSide):
            # The bias of the layer may be a column of its matrix.
            right, constant = self.rotation.basis, self.rotation.bias is not None
        elif self.rotation is not None:
            left, right = self.rotation.left, self.rotation.right
            left, right = (right, left) if self.inputs_first else (left, right)
            left = left if left is None or self.rows is None else left[self.rows]
        y = self.inputs(size, constant=constant).to(d.dtype)
        return x if left is None else x @ left.to(x), y if right is None else y @ right.to(y)

    def inputs(self, size: int, *, constant: bool = False) -> Tensor:
        """Y, (b, g, p, y): the inputs at every position, with a 1 at the end where asked for."""
        if self.convolution is None:
            y = self.layout(self.input.detach(), size, 0).reshape(size, 1, -1, self.input.shape[-1])
        else:
            seen = patches(self.convolution, self.input.detach(), self.shape[2:])
            # A transposed one has its kernel turned round there.
            seen = seen.flip(*range(2, len(self.shape))) if self.transposed else seen
            seen = seen.reshape(len(seen), self.groups, -1, self.shape[2:].numel()).transpose(2, 3)
            y = self.layout(seen, size, 0).transpose(1, 2).flatten(2, 3)
        return F.pad(y, (0, 1), value=1.0) if constant else y

    def total(self, d: Tensor, s: Tensor, shape: torch.Size) -> Tensor:
        """Σ_b s_b Σ_p X_p Y_p."""
        x, y = self.factors(d[None], len(s))
        return torch.einsum("bgpx,bgpy->gxy", x[0] * s.view(-1, 1, 1, 1), y).reshape(shape)


def patches(module: _ConvNd, a: Tensor, out: torch.Size) -> Tensor:
    """What a convolution sees, a view (n, channels, *kernel, *out) in any number of dimensions.

    A transposed one is a plain one, with its kernel turned round, of inputs with stride − 1 zeros between them.
    """
    dims, stride = len(out), module.stride
    if isinstance(module, _ConvTransposeNd):
        reach = [step * (size - 1) for step, size in zip(module.dilation, module.kernel_size, strict=True)]
        spread = [(size - 1) * step + 1 for size, step in zip(a.shape[2:], stride, strict=True)]
        wide = a.new_zeros(*a.shape[:2], *spread)
        places: tuple[Any, ...] = (..., *(slice(None, None, step) for step in stride))
        wide[places] = a
        ends: list[int] = []
        for i in reversed(range(dims)):
            start = reach[i] - int(module.padding[i])
            ends += [start, out[i] + reach[i] - spread[i] - start]
        a, stride = F.pad(wide, ends), (1,) * dims
    elif module.padding != "valid":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        a = F.pad(a, module._reversed_padding_repeated_twice, mode=mode)
    shapes = zip(out, stride, module.dilation, module.kernel_size, a.shape[2:], strict=True)
    if any((size - 1) * step + gap * (kernel - 1) >= there for size, step, gap, kernel, there in shapes):
        raise MatchError(
            f"a {type(module).__name__} with kernel {tuple(module.kernel_size)} gives more outputs, {tuple(out)}, than "
            "its inputs have patches: its own forward pads them. Pad in a layer before a plain convolution"
        )
    along = [step * dilation for step, dilation in zip(a.stride()[2:], module.dilation, strict=True)]
    across = [step * hop for step, hop in zip(a.stride()[2:], stride, strict=True)]
    return a.as_strided((*a.shape[:2], *module.kernel_size, *out), (*a.stride()[:2], *along, *across))


@dataclass(frozen=True, eq=False, kw_only=True)
class Addend(Use):
    """z = w ⊙ x̂ + …, with one weight a feature: biases (x̂ = 1) and the affine parts of norms.

    `scale` gives x̂ of a norm. Features are z's second dimension, as in a convolution, where `channel`, or its last.
    """

    scale: Callable[[], Tensor] | None = None
    channel: bool = False

    def gradients(self, d: Tensor, size: int, shape: torch.Size) -> Tensor:
        """D x̂ summed over positions, (c, b, *shape)."""
        if self.scale is not None:
            d = d * self.scale()
        grads = self.layout(d, size, 1)
        if self.channel:
            # (c, b, k, channels, pixels…): a folded batch has k > 1.
            grads = grads.movedim(3, -1).flatten(2, -2).sum(dim=2)
        else:
            grads = grads.reshape(len(d), size, -1, *shape).sum(dim=2)
        if isinstance(self.rotation, Rotation):
            grads = self.rotation.to(None, grads.dtype).into(grads, len(shape))
        return grads

    def total(self, d: Tensor, s: Tensor, shape: torch.Size) -> Tensor:
        """Σ_b s_b D x̂."""
        summed: Tensor = torch.tensordot(s, self.gradients(d[None], len(s), shape)[0], dims=1)
        return summed


@dataclass(frozen=True, eq=False, kw_only=True)
class Lookup(Use):
    """z = W[ids]: only the rows that an example looks up have a gradient."""

    ids: Tensor
    padding: int | None = None

    def looked_up(self, d: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Gradients (c, b, t, e) of the rows ids (b, t), position by position."""
        ids = self.layout(self.ids, size, 0).reshape(size, -1)
        grads = self.layout(d, size, 1).reshape(len(d), size, ids.shape[1], -1)
        return grads if self.padding is None else grads * (ids != self.padding)[None, :, :, None], ids

    def total(self, d: Tensor, s: Tensor, shape: torch.Size) -> Tensor:
        """Those of the rows looked up; 0 elsewhere."""
        grads, ids = self.looked_up(d[None], len(s))
        return d.new_zeros(shape).index_add_(0, ids.flatten(), (grads[0] * s.view(-1, 1, 1)).flatten(0, 1))


# --- contraction ----------------------------------------------------------------------------------------------------


# A use, and D at its output, (c, ...).
Pulled = tuple[Use, Tensor]


def joined(uses: Sequence[Use]) -> bool:
    """Whether `contracted` takes the uses of one parameter: all alike, or a table that is a matrix too."""
    kinds = {(type(use), getattr(use, "inputs_first", False)) for use in uses}
    alike = len(kinds) == 1 or kinds == {(Lookup, False), (Product, False)}
    return alike and len({use.rows is None for use in uses}) == 1


def contracted(pulled: Sequence[Pulled], size: int, variances: Sequence[Tensor], covariance: bool) -> Tensor:
    """Σ_w J²_bcw S_w, (k, b, c), or Σ_w J_bcw J_bdw S_w, (k, b, c, c), for each S, of all uses of the same rows."""
    first = pulled[0][0]
    variances = [first.of(s) for s in variances]
    pulled = [(use, d.to(variances[0].dtype)) for use, d in pulled]
    lookups = [use.looked_up(d, size) for use, d in pulled if isinstance(use, Lookup)]
    products = [use.factors(d, size) for use, d in pulled if isinstance(use, Product)]
    if not lookups and not products:
        shape = variances[0].shape
        grads = sum(use.gradients(d, size, shape) for use, d in pulled if isinstance(use, Addend))
        return torch.stack([squared((grads * s.sqrt()).flatten(2), covariance) for s in variances])
    # Several uses of one weight are more positions of it.
    factors = products[0] if products else None
    if len(products) > 1:
        factors = torch.cat([x for x, _ in products], dim=3), torch.cat([y for _, y in products], dim=2)
    if lookups:
        rows, ids = torch.cat([grads for grads, _ in lookups], dim=2), torch.cat([ids for _, ids in lookups], dim=1)
        return _lookups(rows, ids, factors, variances, covariance)
    assert isinstance(first, Product)
    assert factors is not None
    parts = [s.reshape(first.groups, -1, factors[1].shape[-1]) for s in variances]
    return _products(*factors, parts, covariance)


def columns_of(pulled: Sequence[Pulled]) -> Any:
    """The same of parameters that are columns of one matrix, of the same D at several positions; None of others.

    Of W a + V h + b + …, the matrix is (W, V, b, …) and its inputs are (a, h, 1, …).
    """
    use, d = pulled[0]
    linear = isinstance(use, Product) and use.convolution is None and not use.inputs_first
    constant = isinstance(use, Addend) and use.scale is None and not use.channel
    if len(pulled) > 1 or use.rows is not None or use.rotation is not None or not (linear or constant) or d.dim() < 4:
        return None
    return d.data_ptr(), d.shape, d.stride(), use.layouts


def contracted_columns(pulled: Sequence[Pulled], size: int, variances: Sequence[Named], covariance: bool) -> Tensor:
    """The same as the sum of what is contracted of each, in one product."""
    (first, d), width = pulled[0], pulled[0][1].shape[-1]
    like = variances[0][first.name]
    x = first.layout(d.to(like.dtype), size, 1).reshape(len(d), size, 1, -1, width)
    one = x.new_ones(()).expand(size, 1, x.shape[3], 1)
    y = torch.cat([use.inputs(size).to(x) if isinstance(use, Product) else one for use, _ in pulled], dim=3)
    parts = [torch.cat([s[use.name].reshape(1, width, -1) for use, _ in pulled], dim=2) for s in variances]
    return _products(x, y, parts, covariance)


def _lookups(
    grads: Tensor,
    ids: Tensor,
    factors: tuple[Tensor, Tensor] | None,
    variances: Sequence[Tensor],
    covariance: bool,
) -> Tensor:
    """A table that is looked up, and that may be a matrix too, as of a head tied to its embedding."""
    # The gradients of a row that comes several times are summed at its first position.
    first = (ids[:, :, None] == ids[:, None, :]).to(torch.uint8).argmax(dim=2)
    summed = torch.zeros_like(grads).scatter_add_(2, first[None, :, :, None].expand_as(grads), grads)
    roots = [s[ids].sqrt() for s in variances]
    lefts = [(summed * root).flatten(2) for root in roots]
    total = torch.stack([squared(left, covariance) for left in lefts])
    if factors is None:
        return total
    x, y = factors
    # The same rows of the product's gradients, Σ_p X Y, (c, b, t, e).
    index = ids[None, :, None, :].expand(x.shape[0], -1, x.shape[3], -1)
    same = torch.einsum("cbpt,bpe->cbte", x.squeeze(2).gather(3, index), y.squeeze(1))
    rights = [(same * root).flatten(2) for root in roots]
    total = total + _products(x, y, [s.unsqueeze(0) for s in variances], covariance)
    if not covariance:
        return total + 2 * torch.stack([(a * b).sum(dim=2).T for a, b in zip(lefts, rights, strict=True)])
    cross = torch.stack([a.transpose(0, 1) @ b.permute(1, 2, 0) for a, b in zip(lefts, rights, strict=True)])
    return total + cross + cross.mT


def _products(x: Tensor, y: Tensor, variances: Sequence[Tensor], covariance: bool) -> Tensor:
    """Of gradients Σ_p X_p Y_p, formed a piece at a time."""
    c, b, g, p, width = x.shape
    if p == 1:
        # One position: (x y)² factorises, and Σ S y² comes first.
        inputs, outputs = y.squeeze(2).square(), x.squeeze(3)
        inner = [torch.einsum("bgy,gxy->bgx", inputs, s) for s in variances]
        return torch.stack([squared((outputs * t.sqrt()).flatten(2), covariance) for t in inner])
    out = x.new_zeros(len(variances), b, c, *([c] if covariance else []))
    depth, entries = y.shape[-1], _PIECE if x.device.type == "cpu" else _DEVICE_PIECE
    step_x = max(1, min(width, entries // (c * g * depth)))
    step_b = max(1, min(b, entries // (c * g * step_x * depth)))
    for x0 in range(0, width, step_x):
        parts = [s[:, x0 : x0 + step_x] for s in variances]
        for b0 in range(0, b, step_b):
            some = x[:, b0 : b0 + step_b, ..., x0 : x0 + step_x]
            left = some.permute(1, 2, 0, 4, 3).flatten(2, 3)
            piece = (left @ y[b0 : b0 + step_b]).view(*left.shape[:2], c, -1, depth)
            if covariance:
                rows = piece.permute(2, 0, 1, 3, 4)
                share = torch.stack([squared((rows * s.sqrt()).flatten(2), True) for s in parts])
            else:
                share = torch.einsum("bgcn,kgn->kbc", piece.square_().flatten(3), torch.stack(parts).flatten(2))
            out[:, b0 : b0 + step_b] += share
    return out


def squared(rows: Tensor, covariance: bool) -> Tensor:
    """Rows (c, b, n) with themselves: Σ_n rows², (b, c), or (b, c, c)."""
    return torch.einsum("cbn,dbn->bcd", rows, rows) if covariance else torch.linalg.vector_norm(rows, dim=2).square().T
