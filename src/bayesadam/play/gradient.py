"""The gradient of a small network's squared error in closed form: several times faster than autograd at this size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bayesadam.engine.network import Network

Array = npt.NDArray[np.float32]

# φ and, by its value a = φ(z), its slope φ'(z).
_UNITS: Mapping[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "tanh": (np.tanh, lambda a: 1 - a * a),
    "relu": (lambda z: np.maximum(z, 0), lambda a: (a > 0).astype(a.dtype)),
}


def error_gradient(network: Network, flat: Array, x: Array, y: Array, masks: Sequence[Array] | None = None) -> Array:
    """∂/∂θ of mean_n (f(x_n; θ) − y_n)², (weights,), in numpy, whose calls cost less than torch's.

    With h₀ = x, z = h Wᵀ + b, h ← φ(z) m:  ∂W = Dᵀh, ∂b = Σ D, D ← (D W) m φ'(z), from D = 2 (f − y)/n backwards.

    Args:
        network: the recipe, of tanh or relu units.
        flat: the weights in the order of `bayesadam.engine.network.flatten`, (weights,).
        x: inputs, (n, inputs); n is best small, since large products are spread over cores that others need.
        y: targets, (n, outputs).
        masks: for every hidden layer what its units are multiplied with, (n, units).
    """
    unit, slope = _UNITS[network.activation]
    gradient = np.empty_like(flat)
    parts = [
        (flat[w].reshape(shape), flat[b], gradient[w].reshape(shape), gradient[b]) for w, b, shape in _layers(network)
    ]
    inputs, values = [x], []
    for number, (weight, bias, _, _) in enumerate(parts):
        z = inputs[-1] @ weight.T + bias
        if number < len(parts) - 1:
            values.append(unit(z))
            inputs.append(values[-1] if masks is None else values[-1] * masks[number])
    delta = (z - y) * np.float32(2 / y.size)
    for number in range(len(parts) - 1, -1, -1):
        weight, _, into_weight, into_bias = parts[number]
        np.matmul(delta.T, inputs[number], out=into_weight)
        np.sum(delta, axis=0, out=into_bias)
        if number:
            delta = (delta @ weight) * slope(values[number - 1])
            if masks is not None:
                delta *= masks[number - 1]
    return gradient


@lru_cache(maxsize=16)
def _layers(network: Network) -> tuple[tuple[slice, slice, tuple[int, ...]], ...]:
    """Where each layer's weight and bias lie among the flat weights, and the weight's shape."""
    shapes = list(network.shapes().values())
    ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    places = [slice(*pair) for pair in itertools.pairwise(ends)]
    return tuple(zip(places[::2], places[1::2], shapes[::2], strict=True))
