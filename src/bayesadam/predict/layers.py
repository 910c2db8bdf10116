"""What one use of a layer contributes to J Σ Jᵀ, given its input and the back-propagated outputs D; never a Jacobian.

Notation: b examples, c outputs of the network, p positions at which a weight is used within one example (the steps of a
sequence, the places of a convolution), D = ∂f/∂(layer output).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bayesadam.readers import Rotation

# Brings a layer's tensor, of so many examples and after so many dimensions of other kinds, into the form (b, positions, ...).
Layout = Callable[[Tensor, int, int], Tensor]


def batch_first(tensor: Tensor, size: int, lead: int) -> Tensor:
    """(b·k, ...) as (b, k, ...); k is 1 unless the batch was folded."""
    shape = tensor.shape
    return tensor.reshape(*shape[:lead], size, shape[lead] // size, *shape[lead + 1 :])


def batch_second(tensor: Tensor, size: int, lead: int) -> Tensor:
    """(l, b, ...) as (b, l, ...)."""
    return tensor.movedim(lead + 1, lead)


@dataclass(frozen=True, eq=False)
class Output:
    """A layer's output z as a place in the graph; what it holds may be freed while D is still to be taken there.

    Attributes:
        edge: where D arrives; None where nothing is differentiated.
        shape: of z.
    """

    edge: GradientEdge | None
    shape: torch.Size

    @classmethod
    def of(cls, z: Tensor) -> Output:
        """Of z itself."""
        return cls(get_gradient_edge(z) if z.requires_grad else None, z.shape)


@dataclass(frozen=True, eq=False)
class Use:
    """One use of one parameter, or of some of its rows, in a forward pass.

    Attributes:
        name: the parameter.
        output: where the layer's output z is, at which D is taken.
        rows: the rows of the parameter in use, where it is not the whole.
        layouts: ways in which the examples may lie in this layer's tensors, likeliest first.
    """

    name: str
    output: Output
    layouts: tuple[Layout, ...]
    rows: slice | None = None

    @property
    def key(self) -> tuple[str, int | None]:
        """The parameter, and the first of its rows."""
        return self.name, None if self.rows is None else self.rows.start

    def of(self, tensor: Tensor) -> Tensor:
        """The part in use of a tensor of the parameter's shape."""
        return tensor if self.rows is None else tensor[self.rows]


@dataclass(frozen=True, eq=False)
class Windows:
    """Y, (b, g, p, y), as a view (b, g, places…, features…) whose entries may lie under several windows.

    Attributes:
        view: the view.
        places: how many of its dimensions are places.
    """

    view: Tensor
    places: int


@dataclass(frozen=True, eq=False)
class ProductUse(Use, ABC):
    """A use whose gradients are sums over positions of products, Σ_p X_p Y_p.

    Attributes:
        input: a, the layer's input.
    """

    input: Tensor = None  # type: ignore[assignment]

    @abstractmethod
    def factors(self, d: Tensor, layout: Layout, size: int) -> tuple[Tensor, Tensor]:
        """X (c, b, g, p, x) and Y (b, g, p, y), the weight's parts being (g, x, y)."""

    @abstractmethod
    def arranged(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape as (g, x, y)."""

    def views(self, d: Tensor, layout: Layout, size: int) -> tuple[Tensor, Windows]:
        """X and Y, Y without a copy where it need not be made."""
        x, y = self.factors(d, layout, size)
        return x, Windows(y, 1)

    def restored(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """(..., g, x, y) as (..., *shape), the inverse of `arranged`."""
        return tensor.reshape(*tensor.shape[:-3], *shape)


@dataclass(frozen=True, eq=False)
class MatrixUse(ProductUse):
    """z = a Wᵀ at every position: `nn.Linear`, and the projections of attention."""

    def factors(self, d: Tensor, layout: Layout, size: int) -> tuple[Tensor, Tensor]:
        """X = D and Y = a."""
        a = layout(self.input.detach(), size, 0)
        grads = layout(d, size, 1)
        return grads.reshape(len(d), size, 1, -1, d.shape[-1]), a.reshape(size, 1, -1, a.shape[-1])

    def arranged(self, tensor: Tensor) -> Tensor:
        """(out, in) as (1, out, in)."""
        return tensor.unsqueeze(0)


@dataclass(frozen=True, eq=False)
class TransposedMatrixUse(MatrixUse):
    """z = a W: a layer that keeps its weight as (in, out), such as GPT-2's."""

    def of(self, tensor: Tensor) -> Tensor:
        """The transpose, (out, in)."""
        return tensor.mT


@dataclass(frozen=True, eq=False)
class ConvolutionUse(ProductUse):
    """z = W ∗ a: gradients are products of D with the patches of a."""

    module: nn.modules.conv._ConvNd = None  # type: ignore[assignment]

    def factors(self, d: Tensor, layout: Layout, size: int) -> tuple[Tensor, Tensor]:
        """X = D and Y the patches of a."""
        x, seen = self._of_images(d)
        return _folded(x, seen.view.flatten(2, 1 + seen.places).flatten(3), layout, size)

    def views(self, d: Tensor, layout: Layout, size: int) -> tuple[Tensor, Windows]:
        """The same with the patches as a view, where an example is one image."""
        return self._of_images(d) if len(self.input) == size else super().views(d, layout, size)

    def _of_images(self, d: Tensor) -> tuple[Tensor, Windows]:
        module, places = self.module, d.shape[3:]
        dims, groups = len(places), module.groups
        image = padded(self.input.detach(), module)
        seen = patches(image, module.kernel_size, module.stride, module.dilation, places)
        seen = seen.view(len(image), groups, -1, *seen.shape[2:])
        x = d.reshape(*d.shape[:2], groups, d.shape[2] // groups, -1).transpose(3, 4)
        order = [0, 1, *range(3 + dims, 3 + 2 * dims), *range(2, 3 + dims)]
        return x, Windows(seen.permute(order), dims)

    def arranged(self, tensor: Tensor) -> Tensor:
        """(out, in/g, kernel…) as (g, out/g, in/g · kernel)."""
        groups = self.module.groups
        return tensor.reshape(groups, tensor.shape[0] // groups, -1)


@dataclass(frozen=True, eq=False)
class RotatedUse(ProductUse):
    """A use whose weight is seen in other coordinates, X = Q_Lᵀ W Q_R: its gradients are Σ_p (X_p Q_L) (Y_p Q_R).

    Attributes:
        inner: the use as it is.
        rotation: Q_L and Q_R.
    """

    inner: ProductUse = None  # type: ignore[assignment]
    rotation: Rotation = None  # type: ignore[assignment]

    def of(self, tensor: Tensor) -> Tensor:
        """As the use itself has it."""
        return self.inner.of(tensor)

    def factors(self, d: Tensor, layout: Layout, size: int) -> tuple[Tensor, Tensor]:
        """X Q_L and Y Q_R."""
        x, y = self.inner.factors(d, layout, size)
        left, right = self.rotation.left, self.rotation.right
        if isinstance(self.inner, TransposedMatrixUse):
            left, right = right, left
        return x if left is None else x @ left.to(x), y if right is None else y @ right.to(y)

    def arranged(self, tensor: Tensor) -> Tensor:
        """As the use itself has it."""
        return self.inner.arranged(tensor)

    def restored(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """As the use itself has it."""
        return self.inner.restored(tensor, shape)


@dataclass(frozen=True, eq=False)
class TransposedConvolutionUse(ProductUse):
    """The adjoint of a convolution: gradients are products of a with the patches of D."""

    module: nn.modules.conv._ConvTransposeNd = None  # type: ignore[assignment]

    def factors(self, d: Tensor, layout: Layout, size: int) -> tuple[Tensor, Tensor]:
        """X the patches of D and Y = a."""
        module, groups = self.module, self.module.groups
        a = self.input.detach()
        spatial = a.shape[2:]
        # Every output place an input place reaches, whether or not the output kept it.
        needed = [
            (n - 1) * s + dil * (k - 1) + 1
            for n, s, dil, k in zip(spatial, module.stride, module.dilation, module.kernel_size, strict=True)
        ]
        cut = [int(pad) for pad in module.padding]
        sizes = list(zip(needed, cut, d.shape[3:], strict=True))
        padding = [side for full, pad, seen in reversed(sizes) for side in (pad, full - pad - seen)]
        flat = F.pad(d.flatten(0, 1), padding)
        u = patches(flat, module.kernel_size, module.stride, module.dilation, spatial)
        u = u.reshape(*d.shape[:2], groups, -1, spatial.numel()).transpose(3, 4)
        a = a.reshape(a.shape[0], groups, a.shape[1] // groups, -1).transpose(2, 3)
        return _folded(u, a, layout, size)

    def arranged(self, tensor: Tensor) -> Tensor:
        """(in, out/g, kernel…) as (g, out/g · kernel, in/g)."""
        groups = self.module.groups
        return tensor.reshape(groups, tensor.shape[0] // groups, -1).transpose(1, 2)

    def restored(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `arranged`."""
        return super().restored(tensor.transpose(-1, -2), shape)


@dataclass(frozen=True, eq=False)
class SumUse(Use):
    """z = w ⊙ x̂ + …, with one weight a feature: biases (x̂ = 1) and the affine parts of norms.

    Attributes:
        scale: gives x̂, of z's shape, when it is needed; None for a bias.
        channel: whether the features are z's second dimension, as in a convolution, or its last ones.
        rotation: the coordinates that the weight is seen in, where they are not its own.
    """

    scale: Callable[[], Tensor] | None = None
    channel: bool = False
    rotation: Rotation | None = None

    def gradients(self, d: Tensor, layout: Layout, size: int, shape: torch.Size) -> Tensor:
        """(c, b, *shape): the gradients themselves, which are small."""
        if self.scale is not None:
            d = d * self.scale()
        grads = layout(d, size, 1)
        if self.channel:
            # (c, b, k, channels, places…): a folded batch has k > 1.
            grads = grads.movedim(3, -1).flatten(2, -2).sum(dim=2)
        else:
            grads = grads.reshape(len(d), size, -1, *shape).sum(dim=2)
        return grads if self.rotation is None else self.rotation.to(None, grads.dtype).into(grads, len(shape))


@dataclass(frozen=True, eq=False)
class EmbeddingUse(Use):
    """z = W[ids]: only the rows that an example names have a gradient."""

    ids: Tensor = None  # type: ignore[assignment]
    padding: int | None = None

    def looked_up(self, d: Tensor, layout: Layout, size: int) -> tuple[Tensor, Tensor]:
        """Gradients (c, b, t, e) of the rows ids (b, t), place by place."""
        ids = layout(self.ids, size, 0).reshape(size, -1)
        grads = layout(d, size, 1).reshape(len(d), size, ids.shape[1], -1)
        if self.padding is not None:
            grads = grads * (ids != self.padding)[None, :, :, None]
        return grads, ids


def gathered(grads: Tensor, ids: Tensor) -> Tensor:
    """Gradients (c, b, t, e) with every row of an example at its first place, zero elsewhere."""
    first = (ids[:, :, None] == ids[:, None, :]).to(torch.uint8).argmax(dim=2)
    index = first[None, :, :, None].expand_as(grads)
    return torch.zeros_like(grads).scatter_add_(2, index, grads)


def _folded(x: Tensor, a: Tensor, layout: Layout, size: int) -> tuple[Tensor, Tensor]:
    """X (c, n, g, p, x) and Y (n, g, p, y) with the n images of b examples gathered as positions."""
    ys = layout(a, size, 0).transpose(1, 2).flatten(2, 3)
    xs = layout(x, size, 1).transpose(2, 3).flatten(3, 4)
    return xs, ys


def padded(a: Tensor, module: nn.modules.conv._ConvNd) -> Tensor:
    """A convolution's input with its padding made explicit."""
    if module.padding == "valid":
        return a
    sides = module._reversed_padding_repeated_twice
    return F.pad(a, sides) if module.padding_mode == "zeros" else F.pad(a, sides, mode=module.padding_mode)


def patches(
    a: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], places: Sequence[int]
) -> Tensor:
    """(n, channels, kernel…, places…): what a convolution sees at every place, in any number of dimensions; a view of a."""
    spatial = a.stride()[2:]
    along = [step * dil for step, dil in zip(spatial, dilation, strict=True)]
    across = [step * s for step, s in zip(spatial, stride, strict=True)]
    return a.as_strided((*a.shape[:2], *kernel, *places), (*a.stride()[:2], *along, *across))
