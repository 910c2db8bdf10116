"""Small networks of one shape, many at a time: one batched computation for a whole stack of seeds."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam.errors import SettingError
from bayesadam.structures.noise import stream_seed

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


@dataclass(frozen=True)
class Network:
    """A multi-layer perceptron, as a recipe.

    Attributes:
        n_inputs: width of the input.
        hidden: widths of the hidden layers.
        n_outputs: width of the output.
        activation: `"relu"`, `"tanh"`, `"sigmoid"`, `"silu"` or `"gelu"`.
        dropout: the chance that a hidden unit is switched off while training.
        input_dropout: the same for an input.
    """

    n_inputs: int
    hidden: tuple[int, ...]
    n_outputs: int
    activation: str = "relu"
    dropout: float = 0.0
    input_dropout: float = 0.0

    def __post_init__(self) -> None:
        widths = (self.n_inputs, *self.hidden, self.n_outputs)
        if any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in widths):
            raise SettingError(f"every width must be a positive whole number, got {widths}")
        if self.activation not in _ACTIVATIONS:
            raise SettingError(f"activation must be one of {tuple(_ACTIVATIONS)}, got {self.activation!r}")
        for name in ("dropout", "input_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 0 and below 1, got {getattr(self, name)!r}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' shapes by the names that `build` gives them."""
        widths = (self.n_inputs, *self.hidden, self.n_outputs)
        found: dict[str, tuple[int, ...]] = {}
        for number, (wide, narrow) in enumerate(itertools.pairwise(widths)):
            found[f"layer{number}.weight"] = (narrow, wide)
            found[f"layer{number}.bias"] = (narrow,)
        return found

    def build(self, params: Mapping[str, Tensor] | None = None) -> nn.Sequential:
        """The network as an ordinary module, with the given weights where there are any."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        widths = (self.n_inputs, *self.hidden, self.n_outputs)
        last = len(widths) - 2
        if self.input_dropout:
            layers["input_dropout"] = nn.Dropout(self.input_dropout)
        for number, (wide, narrow) in enumerate(itertools.pairwise(widths)):
            layers[f"layer{number}"] = nn.Linear(wide, narrow, device="meta")
            if number < last:
                layers[f"activation{number}"] = _ACTIVATIONS[self.activation]()
                if self.dropout:
                    layers[f"dropout{number}"] = nn.Dropout(self.dropout)
        # Made without values first: torch would initialise them from its global generator, whose state is the user's.
        module = nn.Sequential(layers).to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(params[name] if params is not None else torch.zeros_like(parameter))
        return module


def initial(network: Network, seeds: Sequence[int], *, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Stacked initial weights (s, *shape), U(±1/√fan-in) as torch's own; a seed's are the same in any stack."""
    found = {}
    for name, shape in network.shapes().items():
        fan_in = network.shapes()[name.replace("bias", "weight")][1]
        rows = []
        for seed in seeds:
            source = torch.Generator().manual_seed(stream_seed(seed, "initial", *map(ord, name)))
            rows.append((2 * torch.rand(shape, generator=source) - 1) / math.sqrt(fan_in))
        found[name] = torch.stack(rows).to(device)
    return found


def flatten(params: Mapping[str, Tensor]) -> Tensor:
    """Stacked weights as one matrix, a row a network, (s, weights): one tensor to draw for, to penalise, to step."""
    return torch.cat([tensor.flatten(1) for tensor in params.values()], dim=1)


def unflatten(network: Network, flat: Tensor) -> dict[str, Tensor]:
    """The inverse of `flatten`: views of its columns, by name."""
    shapes = network.shapes()
    parts = torch.split(flat, [math.prod(shape) for shape in shapes.values()], dim=1)
    return {name: part.view(-1, *shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def member(stacked: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """One network's part of stacked tensors."""
    return {name: tensor[index] for name, tensor in stacked.items()}


def forward(
    network: Network,
    params: Mapping[str, Tensor],
    x: Tensor,
    *,
    masks: Sequence[Tensor] | None = None,
    seen: tuple[list[Tensor], list[Tensor]] | None = None,
) -> Tensor:
    """The outputs (s, b, outputs) of a stack.

    Args:
        network: the recipe.
        params: stacked weights.
        x: inputs, (b, inputs) for all alike or (s, b, inputs).
        masks: for every hidden layer what its units are multiplied with, for dropout.
        seen: two lists to which every layer's input and output, before the activation, are added.
    """
    stack = params["layer0.bias"].shape[0]
    h = x.expand(stack, *x.shape[-2:])
    activation = _ACTIVATIONS[network.activation]()
    for number in range(len(network.hidden) + 1):
        z = linear(h, params[f"layer{number}.weight"], params[f"layer{number}.bias"])
        if seen is not None:
            seen[0].append(h)
            seen[1].append(z)
        h = z
        if number < len(network.hidden):
            h = activation(h)
            if masks is not None:
                h = h * masks[number]
    return h


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x Wᵀ + b for a stack: (s, b, in), (s, out, in), (s, out) → (s, b, out)."""
    if x.device.type == "cpu":
        out: Tensor = _ContiguousLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return out
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


class _ContiguousLinear(torch.autograd.Function):
    """`baddbmm` with every operand laid out: on a CPU torch hands strided ones to BLAS one small matrix at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        into_x = torch.bmm(grad, weight.contiguous()) if ctx.needs_input_grad[0] else None
        return into_x, torch.bmm(grad.mT.contiguous(), x.contiguous()), grad.sum(dim=1)
