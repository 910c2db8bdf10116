"""Backward passes of stacked networks, written out: the same few kernels every step, in memory allocated once."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.engine.network import Network, unflatten

_ATEN = torch.ops.aten
Loss = Callable[[Tensor], Tensor]
Slope = Callable[[Tensor], Tensor]


# φ, in place where φ' follows from φ's result, and the product of a gradient with φ', in place on the gradient.
_ACTIVATIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "relu": (torch.relu_, lambda g, h: _ATEN.threshold_backward.grad_input(g, h, 0, grad_input=g)),
    "tanh": (torch.tanh_, lambda g, h: _ATEN.tanh_backward.grad_input(g, h, grad_input=g)),
    "sigmoid": (torch.sigmoid_, lambda g, h: _ATEN.sigmoid_backward.grad_input(g, h, grad_input=g)),
    "elu": (F.elu_, lambda g, h: _ATEN.elu_backward.grad_input(g, 1, 1, 1, True, h, grad_input=g)),
    "silu": (F.silu, lambda g, z: _ATEN.silu_backward.grad_input(g, z, grad_input=g)),
    "gelu": (F.gelu, lambda g, z: _ATEN.gelu_backward.grad_input(g, z, grad_input=g)),
}


class StackedGradient:
    """The gradient of a loss of the outputs by the weights of a stack of networks, (n, weights), as they are now.

    With h₀ = x, z = h Wᵀ + b, h ← φ(z) m:  ∂W = Dᵀh, ∂b = Σ D, D ← (D W) m φ'(z), from D = ∂loss/∂f backwards.
    """

    def __init__(self, network: Network, weights: Tensor) -> None:
        self._activation, self._activation_backward = _ACTIVATIONS[network.activation]
        self._weights = weights
        self.gradient = torch.zeros_like(weights)
        self._layers, self._into = _layers(network, weights), _layers(network, self.gradient)
        self._forward = [(weight.mT, bias.unsqueeze(1)) for weight, bias in self._layers]
        self._widths = (*network.hidden, network.n_outputs)
        self._batch = 0

    def __call__(self, x: Tensor, slope: Slope, *, masks: Sequence[Tensor] | None = None) -> Tensor:
        """(n, weights), in memory that the next call overwrites, at inputs (n, b, inputs).

        `slope` maps the outputs f, (n, b, outputs), to ∂loss/∂f; `masks` are those of dropout, (n, b, units) per layer.
        """
        if self._batch != x.shape[1]:
            self._batch = x.shape[1]
            self._outputs = [self._weights.new_empty(len(self._weights), self._batch, width) for width in self._widths]
            self._dropped, self._slopes = ([torch.empty_like(z) for z in self._outputs[:-1]] for _ in range(2))
        inputs = [x]
        for number, (weight, bias) in enumerate(self._forward):
            out = torch.baddbmm(bias, inputs[-1], weight, out=self._outputs[number])
            if number < len(self._layers) - 1:
                h = self._activation(out)
                inputs.append(h if masks is None else torch.mul(h, masks[number], out=self._dropped[number]))
        delta = slope(self._outputs[-1])
        for number in reversed(range(len(self._layers))):
            into_weight, into_bias = self._into[number]
            torch.bmm(delta.mT, inputs[number], out=into_weight)
            torch.sum(delta, 1, out=into_bias)
            if number:
                delta = torch.bmm(delta, self._layers[number][0], out=self._slopes[number - 1])
                if masks is not None:
                    delta.mul_(masks[number - 1])
                delta = self._activation_backward(delta, self._outputs[number - 1])
        return self.gradient


def _layers(network: Network, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Views (n, out, in) and (n, out) of flat weights (n, weights), layer by layer."""
    parts = unflatten(network, flat)
    return [(parts[f"layer{i}.weight"], parts[f"layer{i}.bias"]) for i in range(len(network.hidden) + 1)]


def loss_and_slope(loss: Loss, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of a stack (n,) at outputs (n, b, outputs), and ∂(their sum)/∂outputs."""
    with torch.enable_grad():
        f = outputs.detach().requires_grad_()
        losses = loss(f)
        (slope,) = torch.autograd.grad(losses.sum(), f)
    return losses.detach(), slope
