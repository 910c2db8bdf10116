"""A saved posterior without its model: the distribution of its weights, a parameter at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam._storage import read_mapped
from bayesadam.errors import FileError
from bayesadam.gaussian.settings import Settings
from bayesadam.posterior.posterior import Posterior
from bayesadam.readers import Origin
from bayesadam.readers.compression import moment_shape

# Structures in which a parameter is independent of the others, so that it can be read without them.
_APART = ("diagonal", "kronecker")


@dataclass(frozen=True, eq=False)
class Marginal:
    """σ of a parameter's weights, |μ|/σ where the weights are known, and how many of them have v = 0."""

    stddev: Tensor
    snr: Tensor | None
    dead: int


@dataclass(frozen=True, eq=False)
class StoredPosterior:
    """The file that `Posterior.save` or `export_checkpoint` wrote; its tensors stay on the disk until they are used.

    Attributes:
        structure: `"diagonal"` or another.
        settings: N, p, s and the rest, without δ.
        prior: δ by parameter name; a parameter with one for each of its weights is not in it.
        has_weights: whether the weights are in the file.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    header: Mapping[str, Any]
    structure: str
    names: tuple[str, ...]
    settings: Settings
    prior: Mapping[str, float]
    origin: Origin
    has_weights: bool

    @classmethod
    def open(cls, path: Path, n_data: float | None = None) -> StoredPosterior:
        """Read the header; `n_data` stands for the N in it."""
        tensors, header = read_mapped(path)
        kind = str(header.get("structure"))
        if kind == "mixture":
            raise FileError(f"{path} holds a mixture of posteriors: save one of them (mixture.members) by itself")
        try:
            numbers = {**header["settings"], **({} if n_data is None else {"n_data": n_data})}
            prior = numbers.pop("prior_precision")
            settings, origin = Settings(**numbers, prior_precision={}), Origin.of_header(header)
            names = tuple(header["parameters"])
        except (KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{path} is damaged: its header lacks {error}") from None
        return cls(path, tensors, header, kind, names, settings, prior, origin, header.get("has_weights", True))

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Parameters that must be read together."""
        return [(name,) for name in self.names] if self.structure in _APART else [self.names]

    def shape(self, name: str) -> torch.Size:
        """Of one parameter."""
        if f"mode.{name}" in self.tensors:
            return self.tensors[f"mode.{name}"].shape
        if f"directions.{name}" in self.tensors:
            return self.tensors[f"directions.{name}"].shape[1:]
        return moment_shape(self.tensors, f"second_moment.{name}")

    def skeleton(self, names: Iterable[str] | None = None) -> nn.Module:
        """A module with parameters of these names and shapes, all 0, that take no memory."""
        root = nn.Module()
        for name in self.names if names is None else names:
            *parents, last = name.split(".")
            module = root
            for parent in parents:
                if parent not in module._modules:
                    setattr(module, parent, nn.Module())
                module = module.get_submodule(parent)
            setattr(module, last, nn.Parameter(torch.zeros(()).expand(self.shape(name))))
        return root

    def marginals(self, names: Sequence[str]) -> dict[str, Marginal]:
        """Those of one of the `groups`."""
        try:
            posterior = self._posterior(names)
            variance, moments = posterior.variance, posterior.structure.second_moment
        except KeyError as error:
            raise FileError(f"{self.path} is damaged: it lacks {error}") from None
        bases, mean = posterior.structure.bases, posterior.mean
        found = {}
        for name in names:
            v = bases[name].diagonal(moments[name]) if name in bases else moments[name]
            std = variance[name].sqrt()
            found[name] = Marginal(std, mean[name].abs() / std if self.has_weights else None, int((v == 0).sum()))
        return found

    def _posterior(self, names: Sequence[str]) -> Posterior:
        held = {key: tensor for key, tensor in self.tensors.items() if key.partition(".")[2] in names}
        tensors = held if self.structure in _APART else dict(self.tensors)
        model = self.skeleton(names)
        if not self.has_weights:
            tensors |= {f"mode.{name}": parameter.detach() for name, parameter in model.named_parameters()}
        prior = {name: self.prior[name] for name in names if name in self.prior}
        settings = {**self.header["settings"], "n_data": self.settings.n_data, "prior_precision": prior}
        changed = {"parameters": list(names), "settings": settings, "has_weights": True, "omitted": {}}
        header = {key: value for key, value in self.header.items() if key != "calibration"} | changed
        return replace(Posterior.unpacked(self.path, tensors, header, model), padding={})
