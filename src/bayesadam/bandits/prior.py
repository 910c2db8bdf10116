"""A learnt prior of the hybrid agent: features, the weights on them that earlier problems had, and the noise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam.engine.network import Network, forward
from bayesadam.errors import FileError, MatchError

_KIND = storage.Kind("bayesadam.bandits.prior", "a saved prior", ": give the file that Prior.save wrote")
MOMENTS = ("mean", "covariance", "shape", "scale")


def features(network: Network, params: Mapping[str, Tensor], contexts: Tensor) -> Tensor:
    """φ(x) = (h(x), x, 1) of contexts (1, k, n)."""
    h = forward(network, params, contexts, n_layers=len(network.hidden))
    return F.pad(torch.cat([h, contexts], dim=2), (0, 1), value=1.0)


@dataclass(frozen=True, eq=False)
class Prior:
    """A mixture: σ² ~ IG(a, b) and β | σ² ~ N(m_k, σ² C), with each k as likely, of an arm's weights on φ(x) = (h(x), x, 1).

    Components are earlier problems, and k and σ² are those of all arms: the new problem is like one of them. Where arms are
    exchangeable components are earlier arms, and every arm has a k and σ² of its own. All in the rewards' own units.

    Attributes:
        network: whose last hidden layer is h; its output layer is not used.
        params: its weights by name, (1, *shape).
        mean: m, (components, arms, features), with one arm where they are exchangeable.
        covariance: C, (arms, features, features).
        shape: a, ().
        scale: b, ().
    """

    network: Network
    params: Mapping[str, Tensor]
    mean: Tensor
    covariance: Tensor
    shape: Tensor
    scale: Tensor

    @property
    def exchangeable(self) -> bool:
        """Whether one prior is every arm's."""
        return self.mean.shape[1] == 1

    def to(self, device: torch.device) -> Prior:
        """The same on another device."""
        params = {name: tensor.to(device) for name, tensor in self.params.items()}
        return Prior(self.network, params, *(getattr(self, name).to(device) for name in MOMENTS))

    def features(self, contexts: Tensor) -> Tensor:
        """φ of contexts (runs, k, n), (runs, k, features), float64."""
        runs, k, width = contexts.shape
        return features(self.network, self.params, contexts.reshape(1, runs * k, width)).double().view(runs, k, -1)

    def for_arms(self, n_arms: int) -> Prior:
        """One row per arm. An arm that came later is one drawn at random: it has the moments of the others together."""
        known = self.mean.shape[1]
        if known > n_arms:
            raise MatchError(f"the prior is for {known} arms, and there are {n_arms}: fit one with arms='exchangeable'")
        mean, noise, more = self.mean.mean(dim=1, keepdim=True), self.scale / self.shape, n_arms - known
        apart = self.mean - mean
        between = (apart.unsqueeze(3) * apart.unsqueeze(2)).mean(dim=(0, 1))
        new = (self.covariance.mean(dim=0) + between / noise).expand(more, -1, -1)
        joined = torch.cat([self.mean, mean.expand(-1, more, -1)], dim=1), torch.cat([self.covariance, new])
        return Prior(self.network, self.params, *joined, self.shape, self.scale)

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
