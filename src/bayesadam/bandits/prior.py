"""A learnt prior of the hybrid agent: features, what an arm's weights on them are like, and the noise."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam.bandits.linear import with_constant
from bayesadam.engine.network import Network, forward
from bayesadam.errors import FileError, MatchError

_KIND = storage.Kind("bayesadam.bandits.prior", "a saved prior", ": give the file that Prior.save wrote")
MOMENTS = ("mean", "covariance", "shape", "scale", "log_noise")
# The most that the noise's dependence on the context makes of an example.
_MOST_WEIGHT = 1e4


@dataclass(frozen=True, eq=False)
class Prior:
    """σ² ~ IG(a, b), β | σ² ~ N(m, σ² C) of an arm's weights on the features φ(x) = (h(x), x, 1), in the rewards' own units.

    A reward is β·φ(x) with noise of variance σ² exp(γ·φ(x)): what the features cannot tell counts as noise, and there may be
    much of it in one place and none in another.

    Attributes:
        network: whose last hidden layer is h; its output layer is not used.
        params: its weights by name, (1, *shape).
        mean: m, of every arm (arms, features), or (1, features) where arms are exchangeable.
        covariance: C, (arms, features, features).
        shape: a, (arms,).
        scale: b, (arms,).
        log_noise: γ, (arms, features).
    """

    network: Network
    params: Mapping[str, Tensor]
    mean: Tensor
    covariance: Tensor
    shape: Tensor
    scale: Tensor
    log_noise: Tensor

    @property
    def exchangeable(self) -> bool:
        """Whether one prior is every arm's."""
        return len(self.mean) == 1

    def to(self, device: torch.device) -> Prior:
        """The same on another device."""
        params = {name: tensor.to(device) for name, tensor in self.params.items()}
        return Prior(self.network, params, *(getattr(self, name).to(device) for name in MOMENTS))

    def features(self, contexts: Tensor) -> Tensor:
        """φ of contexts (runs, k, n), (runs, k, features), float64."""
        runs, k, width = contexts.shape
        flat = contexts.reshape(1, runs * k, width)
        h = forward(self.network, self.params, flat, n_layers=len(self.network.hidden))
        return with_constant(torch.cat([h, flat], dim=2)).view(runs, k, self.network.hidden[-1] + width + 1)

    def weights(self, features: Tensor, arms: Tensor) -> Tensor:
        """exp(−γ·φ) of examples (runs, k, features) of arms (runs, k), at most `_MOST_WEIGHT` to either side."""
        every = features @ self.log_noise.mT
        own = every.gather(2, arms.unsqueeze(2)).squeeze(2) if len(self.log_noise) > 1 else every.squeeze(2)
        most = math.log(_MOST_WEIGHT)
        return own.clamp(-most, most).neg_().exp_()

    def for_arms(self, n_arms: int) -> Prior:
        """One row per arm. An arm that came later is one drawn at random: it has the mixture's moments."""
        known = len(self.mean)
        if known > n_arms:
            raise MatchError(f"the prior is for {known} arms, and there are {n_arms}: fit one with arms='exchangeable'")
        mean, noise = self.mean.mean(dim=0), self.scale / self.shape
        apart = self.mean - mean
        spread = (noise[:, None, None] * self.covariance + apart.unsqueeze(2) * apart.unsqueeze(1)).mean(dim=0)
        shape = self.shape.mean()
        new = mean, spread / noise.mean(), shape, shape * noise.mean(), self.log_noise.mean(dim=0)
        more = n_arms - known
        old = (getattr(self, name) for name in MOMENTS)
        joined = (torch.cat([a, b.expand(more, *b.shape)]) for a, b in zip(old, new, strict=True))
        return Prior(self.network, self.params, *joined)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as safetensors."""
        storage.write(path, self.tensors(), self.header(), _KIND)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Prior:
        """The prior that `save` wrote."""
        tensors, header = storage.read(path, _KIND)
        try:
            return cls.of_tensors(tensors, header)
        except (KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{path} is not {_KIND.what}: {error!r}") from error

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, on the CPU."""
        named = {name: getattr(self, name) for name in MOMENTS}
        return {
            name: t.cpu().contiguous()
            for name, t in (named | {f"network.{n}": t for n, t in self.params.items()}).items()
        }

    def header(self) -> dict[str, Any]:
        """What the tensors do not tell."""
        return {
            "n_features": self.network.n_inputs,
            "hidden": [*self.network.hidden],
            "activation": self.network.activation,
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Prior:
        """The inverse of `tensors` and `header`."""
        network = Network(header["n_features"], tuple(header["hidden"]), 1, header["activation"], 0.0)
        names = [name for name in network.shapes() if not name.startswith(f"layer{len(network.hidden)}.")]
        return cls(network, {n: tensors[f"network.{n}"] for n in names}, *(tensors[name] for name in MOMENTS))
