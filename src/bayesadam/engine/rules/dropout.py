"""Dropout: Adam at networks whose units are dropped at random, in prediction as in training (MC dropout)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.engine.network import Network, unflatten
from bayesadam.engine.rules.adam import Adam
from bayesadam.engine.rules.rule import Functions, Number, State
from bayesadam.engine.streams import Streams


@dataclass(frozen=True)
class Dropout(Adam):
    """Adam under the network's own dropout: each unit is 0 with probability r, otherwise multiplied by 1/(1 − r)."""

    def noise(self, streams: Streams, network: Network, batch: int, *lead: int) -> Tensor:
        """Masks of the inputs and of all hidden layers, each in one piece."""
        parts = []
        if network.input_dropout:
            parts.append(streams.masks(network.input_dropout, *lead, batch * network.n_inputs))
        if network.dropout:
            parts.append(streams.masks(network.dropout, *lead, batch * sum(network.hidden)))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def masks(self, noise: Tensor | None, network: Network) -> list[Tensor] | None:
        """(s, b, units) layer by layer, contiguous; first the inputs' where these are dropped, ones for layers without."""
        assert noise is not None
        widths = [network.n_inputs] * bool(network.input_dropout) + list(network.hidden) * bool(network.dropout)
        b = noise.shape[1] // sum(widths)
        parts = torch.split(noise, [b * units for units in widths], dim=1)
        ones = [] if network.dropout else [noise.new_ones(1, 1, 1)] * len(network.hidden)
        return [part.view(-1, b, units) for part, units in zip(parts, widths, strict=True)] + ones

    def sample(
        self, network: Network, weights: Tensor, state: State, n_data: Number, streams: Streams, n: int
    ) -> Functions:
        """One mask per draw, the same at every input, makes each draw a function."""
        drawn = streams.masks(network.dropout, n, sum(network.hidden)).flatten(0, 1).unsqueeze(1)
        masks = list(torch.split(drawn, list(network.hidden), dim=-1))
        return Functions(unflatten(network, weights.repeat_interleave(n, dim=0)), masks)
