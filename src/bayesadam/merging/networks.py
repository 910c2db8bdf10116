"""A trained network as merging sees it: all its tensors by name, and the Gaussian over those that were trained."""

from __future__ import annotations

import os
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from bayesadam._alone import unwrap
from bayesadam.errors import BayesAdamError, FileError, MatchError, SettingError
from bayesadam.lora import Scaling, pairs_in, scaling_of_folder, scaling_of_model
from bayesadam.readers import CheckpointKeywords, clean_names, format_of, identities, read_checkpoint
from bayesadam.readers.checkpoint import APART
from bayesadam.readers.formats.lazy import outline_of, renamed
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.gaussian import GaussianWeights, of_match
from bayesadam.weights.inputs import InputSide
from bayesadam.weights.mixture import require_one_network
from bayesadam.weights.named import AnyPath
from bayesadam.weights.posterior import Posterior

Source = GaussianWeights | AnyPath | tuple[AnyPath, AnyPath]
BaseSource = Source | nn.Module | Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Network:
    """A trained network: every tensor by name, buffers too, and the Gaussian over the trained parameters if known.

    `identity` is the same for all names of a tied tensor; N, B and the scaling of adapters are None where not known.
    """

    label: str
    weights: Mapping[str, Tensor]
    identity: Mapping[str, Hashable]
    gaussian: GaussianWeights | None = None
    n_data: float | None = None
    batch_size: int | None = None
    scaling: Scaling | None = None

    @cached_property
    def owners(self) -> Mapping[str, str]:
        """The name in the Gaussian of each trained tensor, a tied one under all its names."""
        trained = {self.identity[name]: name for name in (self.gaussian.mode if self.gaussian else ())}
        return {name: trained[key] for name, key in self.identity.items() if key in trained}

    @property
    def outline(self) -> Mapping[str, Tensor]:
        """Types and shapes of the weights, without reading them."""
        return outline_of(self.weights)

    @property
    def curvature(self) -> Diagonal:
        """That of the Gaussian; nothing where there is none."""
        return Diagonal({}) if self.gaussian is None else self.gaussian.curvature

    def side(self, name: str) -> InputSide | None:
        """What is known of the inputs of a weight."""
        return self.curvature.inputs.get(self.owners.get(name, ""))

    def has_bases(self, name: str) -> bool:
        """Whether a parameter has eigenbases."""
        return self.owners.get(name) in self.curvature.bases

    def moment(self, name: str) -> Tensor | None:
        """v̂ of a parameter, the diagonal of V in the space of the weights; None where it was not trained."""
        if name not in self.owners:
            return None
        try:
            return self.curvature.diagonal(self.owners[name])
        except BayesAdamError as error:
            raise type(error)(f"{self.label}: {error}") from error


def network_of(
    source: BaseSource, label: str, options: CheckpointKeywords, *, trained: bool = True, bases: bool = False
) -> Network:
    """The network behind a source; with `trained` False it need not have a state, with `bases` eigenbases are read."""
    require_one_network(source, "merging")
    if isinstance(source, GaussianWeights):
        return _of_gaussian(source, label)
    if isinstance(source, nn.Module | Mapping) and not trained:
        tensors = unwrap(source).state_dict() if isinstance(source, nn.Module) else source
        return Network(label, tensors, identities(tensors))
    path, state = source if isinstance(source, tuple) else (source, None)
    if not isinstance(path, str | os.PathLike):
        raise SettingError(f"cannot merge a {type(source).__name__}. A model alone has no curvature: pass posteriors")
    try:
        return _opened(Path(path), {**options, "optimizer_path": state}, label, bases)
    except FileError:
        networks = [] if trained else format_of(Path(path)).read(Path(path)).networks
        if len(networks) != 1:
            raise
        tensors = renamed(networks[0].tensors, clean_names(networks[0].tensors))
        return Network(label, tensors, identities(tensors))


def _of_gaussian(gaussian: GaussianWeights, label: str) -> Network:
    """Its mode, with the buffers and the parameters that are not in it as they are in its model or file."""
    gaussian.require_whole("merging")
    tensors = gaussian.network_tensors()
    weights = gaussian.mode if tensors is None else tensors
    identity, scaling = identities(weights), None
    if isinstance(gaussian, Posterior):
        first = {identity[name]: theta for name, theta in gaussian.mode.items()}
        weights = {name: first.get(identity[name], t).to(t.dtype) for name, t in weights.items()}
        scaling = scaling_of_model(gaussian.model)
    return Network(label, weights, identity, gaussian, gaussian.n_data, gaussian.settings.batch_size, scaling)


def _opened(path: Path, options: CheckpointKeywords, label: str, bases: bool) -> Network:
    try:
        checkpoint = read_checkpoint(path, **options)
        recorded = checkpoint.recorded
        gaussian = GaussianWeights.open(checkpoint, recorded.n_data or 1.0, prior_precision=1.0, **options)
        match = gaussian.source.match if gaussian.source else None
        if bases and match is not None and any(entry.reader.factors is not None for entry in match.entries):
            gaussian = of_match(match, gaussian.n_data, prior_precision=1.0, structure="kronecker")
    except BayesAdamError as error:
        hint = ". Give a state in a file of its own in a pair (weights, state), the network before fine-tuning as base="
        # Here `optimizer_path` is refused.
        why, is_without, _ = str(error).partition(APART)
        raise type(error)(f"{label}: {why}{hint if is_without else ''}") from error
    weights, scaling = checkpoint.weights, scaling_of_folder(path)
    return Network(label, weights, identities(weights), gaussian, recorded.n_data, recorded.batch_size, scaling)


def networks_of(models: Sequence[Source], options: CheckpointKeywords, *, bases: bool = False) -> list[Network]:
    """The networks behind models, of one architecture: named by their files, by paths where these have one name."""
    if isinstance(models, str) or not isinstance(models, Sequence) or len(models) < 2:
        raise SettingError("merging takes one list of two or more models, merge([a, b]): posteriors, or paths")
    if options.get("optimizer_path") is not None:
        raise SettingError("pass the pair (weights, state) in place of a path: optimizer_path= is of one file")
    firsts = [source[0] if isinstance(source, tuple) else source for source in models]
    paths = [first if isinstance(first, str | os.PathLike) else f"model {i}" for i, first in enumerate(firsts, 1)]
    names = [Path(path).name for path in paths]
    labels = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    networks = [network_of(source, label, options, bases=bases) for source, label in zip(models, labels, strict=True)]
    ranks = {name for pair in pairs_in(networks[0].outline) for name in (pair.down, pair.up)}
    for other in networks[1:]:
        check_alike(networks[0], other, {**networks[0].outline, **other.outline}, ranks)
    return networks


def check_alike(first: Network, other: Network, names: Iterable[str], ranks: Container[str] = ()) -> None:
    """Refuse networks of different architectures, naming the first tensor that differs; adapters may differ in rank."""
    for name in names:
        shapes = [network.outline[name].shape if name in network.outline else None for network in (first, other)]
        if None in shapes or (shapes[0] != shapes[1] and name not in ranks):
            described = ["missing" if shape is None else f"of shape {tuple(shape)}" for shape in shapes]
            raise MatchError(
                f"{first.label} and {other.label} are of different architectures: {name!r} is {described[0]} in the "
                f"one and {described[1]} in the other"
            )
