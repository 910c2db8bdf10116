"""Forward and backward passes of stacked networks, written out: the same few kernels every step, in memory taken once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayesadam.engine.network import Network, linear, unflatten
from bayesadam.engine.streams import Streams

_ATEN = torch.ops.aten
# In place on the pre-activations.
_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
}
# The gradient by the activations in, that by the pre-activations out, in place; all three need the activations alone.
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda g, h: _ATEN.threshold_backward.grad_input(g, h, 0, grad_input=g),
    "tanh": lambda g, h: _ATEN.tanh_backward.grad_input(g, h, grad_input=g),
    "sigmoid": lambda g, h: _ATEN.sigmoid_backward.grad_input(g, h, grad_input=g),
}

Layers = list[tuple[Tensor, Tensor]]


def layers_of(network: Network, flat: Tensor) -> Layers:
    """Views (n, out, in) and (n, out) of flat weights (n, weights), layer by layer."""
    parts = unflatten(network, flat)
    return [(parts[f"layer{i}.weight"], parts[f"layer{i}.bias"]) for i in range(len(network.hidden) + 1)]


class ChosenArmGradient:
    """The gradient of the mean squared error of the chosen arm, for a stack of networks.

    Args:
        network: their shape.
        weights: (n, weights); the gradient is taken at what this memory holds when asked.
        batch: examples a network.
    """

    def __init__(self, network: Network, weights: Tensor, batch: int) -> None:
        self._activate, self._back = _FORWARD[network.activation], _BACKWARD[network.activation]
        self._layers = layers_of(network, weights)
        self.gradient = torch.zeros_like(weights)
        self._into = layers_of(network, self.gradient)
        widths = (*network.hidden, network.n_outputs)
        self._outputs = [weights.new_empty(len(weights), batch, width) for width in widths]
        self._slopes = [torch.empty_like(output) for output in self._outputs]

    def __call__(
        self,
        x: Tensor,
        arms: Tensor,
        targets: Tensor,
        *,
        masks: Sequence[Tensor] | None = None,
        importance: Tensor | None = None,
    ) -> Tensor:
        """∇ (1/b) Σ_i w_i (f_{arm_i}(x_i) − target_i)², (n, weights), in memory that the next call overwrites.

        Args:
            x: (n, b, inputs).
            arms: (n, b), int64.
            targets: (n, b).
            masks: what every hidden layer's units are multiplied with, (n, b, units), for dropout.
            importance: the weights w, (n, b); None for ones.
        """
        inputs = [x]
        for number, (weight, bias) in enumerate(self._layers):
            out = torch.bmm(inputs[-1], _laid_out(weight), out=self._outputs[number]).add_(bias.unsqueeze(1))
            if number < len(self._layers) - 1:
                self._activate(out)
                inputs.append(out if masks is None else out * masks[number])
        chosen = arms.unsqueeze(2)
        errors = self._outputs[-1].gather(2, chosen).squeeze(2).sub_(targets).mul_(2 / x.shape[1])
        if importance is not None:
            errors.mul_(importance)
        slope = self._slopes[-1].zero_().scatter_(2, chosen, errors.unsqueeze(2))
        for number in reversed(range(len(self._layers))):
            into_weight, into_bias = self._into[number]
            torch.bmm(slope.mT, inputs[number], out=into_weight)
            torch.sum(slope, 1, out=into_bias)
            if number:
                slope = torch.bmm(slope, self._layers[number][0], out=self._slopes[number - 1])
                if masks is not None:
                    slope.mul_(masks[number - 1])
                slope = self._back(slope, self._outputs[number - 1])
        return self.gradient


def _laid_out(weight: Tensor) -> Tensor:
    """Wᵀ; in memory of its own on a CPU, where BLAS is slow with a second factor that is transposed."""
    return weight.mT.contiguous() if weight.device.type == "cpu" else weight.mT


def hidden_features(network: Network, layers: Layers, x: Tensor, masks: Sequence[Tensor] | None = None) -> Tensor:
    """The last hidden layer, (n, b, units)."""
    h = x
    for number, (weight, bias) in enumerate(layers[:-1]):
        h = _FORWARD[network.activation](linear(h, weight, bias))
        if masks is not None:
            h = h * masks[number]
    return h


def outputs(network: Network, layers: Layers, x: Tensor, masks: Sequence[Tensor] | None = None) -> Tensor:
    """f(x), (n, b, outputs)."""
    return linear(hidden_features(network, layers, x, masks), *layers[-1])


def sampled_outputs(network: Network, mean: Layers, variance: Layers, x: Tensor, streams: Streams) -> Tensor:
    """f(x) at weights drawn from a diagonal Gaussian, a draw of its own for every row: (n, b, outputs).

    The weights of one row only enter through its activations, so these are drawn instead (local reparameterisation):
    N(a Wᵀ + b, a² Sᵀ + s), unit by unit, exactly as if all weights had been drawn for each row.
    """
    widths = [*network.hidden, network.n_outputs]
    noise = torch.split(streams.normal(x.shape[1], sum(widths)), widths, dim=2)
    h = x
    for number, ((weight, bias), (weight_variance, bias_variance)) in enumerate(zip(mean, variance, strict=True)):
        spread = linear(h.square(), weight_variance, bias_variance).clamp_(min=0).sqrt_()
        h = linear(h, weight, bias).addcmul_(spread, noise[number])
        if number < len(network.hidden):
            h = _FORWARD[network.activation](h)
    return h
