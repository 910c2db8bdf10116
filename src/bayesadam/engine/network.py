"""Multi-layer perceptrons of one shape, many at a time: one batched computation for a whole stack of seeds."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesadam._checks import count
from bayesadam.errors import SettingError
from bayesadam.weights.draws import stream_seed

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "elu": nn.ELU,
}


@dataclass(frozen=True)
class Network:
    """A multi-layer perceptron, as a recipe; hidden units are dropped in training with the probability `dropout`."""

    n_inputs: int
    hidden: tuple[int, ...]
    n_outputs: int
    activation: str = "relu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for width in (self.n_inputs, *self.hidden, self.n_outputs):
            count("every width", width, "of inputs, hidden layers and outputs")
        if self.activation not in ACTIVATIONS:
            raise SettingError(f"activation must be one of {tuple(ACTIVATIONS)}, got {self.activation!r}")
        if not 0 <= self.dropout < 1:
            raise SettingError(f"dropout must be at least 0 and below 1, got {self.dropout!r}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' shapes by the names that `build` gives them."""
        shapes: dict[str, tuple[int, ...]] = {}
        for number, (n_in, n_out) in enumerate(self._layers()):
            shapes |= {f"layer{number}.weight": (n_out, n_in), f"layer{number}.bias": (n_out,)}
        return shapes

    def _layers(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise((self.n_inputs, *self.hidden, self.n_outputs)))

    def build(self, params: Mapping[str, Tensor]) -> nn.Sequential:
        """The network as an ordinary module with these weights."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for number, (n_in, n_out) in enumerate(self._layers()):
            layers[f"layer{number}"] = nn.Linear(n_in, n_out, device="meta")
            if number < len(self.hidden):
                layers[f"activation{number}"] = ACTIVATIONS[self.activation]()
                if self.dropout:
                    layers[f"dropout{number}"] = nn.Dropout(self.dropout)
        # Made without values first: torch would initialise them from its global generator, whose state is the user's.
        module = nn.Sequential(layers)
        module.load_state_dict({name: params[name].detach().cpu().clone() for name in self.shapes()}, assign=True)
        return module


def initial(network: Network, seeds: Sequence[int], *, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Stacked initial weights (s, *shape), U(±1/√fan-in) as torch's own; a seed's are the same in any stack."""
    params, shapes = {}, network.shapes()
    for name, shape in shapes.items():
        sources = [torch.Generator().manual_seed(stream_seed(seed, "initial", *map(ord, name))) for seed in seeds]
        uniform = torch.stack([torch.rand(shape, generator=source) for source in sources])
        params[name] = ((2 * uniform - 1) / math.sqrt(shapes[name.replace("bias", "weight")][1])).to(device)
    return params


def flatten(params: Mapping[str, Tensor]) -> Tensor:
    """Stacked weights as one matrix, one row per network, (s, weights)."""
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
    network: Network, params: Mapping[str, Tensor], x: Tensor, *, masks: Sequence[Tensor] | None = None
) -> Tensor:
    """The outputs (s, b, outputs) of a stack of networks at x, (b, inputs) for all of them or (s, b, inputs).

    `masks` are the factors of every hidden layer's units, for dropout.
    """
    h, activation = x.expand(params["layer0.bias"].shape[0], *x.shape[-2:]), ACTIVATIONS[network.activation]()
    for number in range(len(network.hidden) + 1):
        h = linear(h, params[f"layer{number}.weight"], params[f"layer{number}.bias"])
        if number < len(network.hidden):
            h = activation(h) if masks is None else activation(h) * masks[number]
    return h


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x Wᵀ + b for a stack: (s, b, in), (s, out, in), (s, out) → (s, b, out)."""
    if len(weight) == 1:
        return F.linear(x, weight[0], bias[0])
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
