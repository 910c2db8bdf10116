"""A trained network as merging sees it: all its tensors by name, and the Gaussian over those that were trained."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor, nn

from bayesadam._alone import unwrap
from bayesadam._warnings import warn
from bayesadam.errors import BayesAdamError, FileError, MatchError, SettingError
from bayesadam.gaussian.structure import outlined
from bayesadam.gaussian.weights import GaussianWeights
from bayesadam.lora import Pair, Scaling, scaling_of_folder, scaling_of_model
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_one_network
from bayesadam.readers import CheckpointKeywords, clean_names, format_of, identities, read_checkpoint
from bayesadam.readers.formats.lazy import renamed

AnyPath = str | os.PathLike[str]
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
    scaling: Scaling = field(default=lambda prefix, adapter, rank: None)
    # The name in the Gaussian of each trained tensor, a tied one under all its names.
    owners: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        trained = {self.identity[name]: name for name in (self.gaussian.mode if self.gaussian else ())}
        object.__setattr__(self, "owners", {n: trained[key] for n, key in self.identity.items() if key in trained})

    @property
    def outline(self) -> Mapping[str, Tensor]:
        """Types and shapes of the weights, without reading them."""
        return outlined(self.weights)

    def has_bases(self, name: str) -> bool:
        """Whether a parameter has eigenbases."""
        return name in self.owners and self.owners[name] in self.gaussian.structure.bases  # type: ignore[union-attr]

    @property
    def is_averaged(self) -> bool:
        """Whether its second moments are the optimiser's own, weight by weight: neither in eigenbases nor recorded."""
        found = self.gaussian
        return found is not None and not found.origin.recorded and not found.structure.bases and not _rotates(found)

    def moment(self, name: str) -> Tensor | None:
        """v̂ of a parameter, the diagonal of V in the space of the weights; None where it was not trained."""
        if name not in self.owners:
            return None
        try:
            return self.gaussian.structure.diagonal(self.owners[name])  # type: ignore[union-attr]
        except BayesAdamError as error:
            raise type(error)(f"{self.label}: {error}") from error


def network_of(
    source: BaseSource, label: str, options: CheckpointKeywords, *, trained: bool = True, bases: bool = False
) -> Network:
    """The network behind a posterior, a path, or a path with that of the optimiser's state.

    With `trained` False it need not have a state, and may be a model or its state dict; with `bases` the eigenbases in
    an optimiser's state are read.
    """
    require_one_network(source, "merging")
    if isinstance(source, GaussianWeights):
        return _of_gaussian(source, label)
    if isinstance(source, nn.Module | Mapping) and not trained:
        return _untrained(unwrap(source).state_dict() if isinstance(source, nn.Module) else source, label)
    if isinstance(source, tuple) and len(source) == 2:
        return _opened(Path(source[0]), Path(source[1]), label, options, bases)
    if not isinstance(source, str | os.PathLike):
        others = "" if trained else ", a model or a state dict"
        raise SettingError(
            f"cannot merge a {type(source).__name__}: pass posteriors, paths of checkpoints, or pairs of paths "
            f"(weights, optimiser's state){others}. A model alone has no curvature: use Posterior.from_optimizer"
        )
    try:
        return _opened(Path(source), None, label, options, bases)
    except FileError:
        contents = None if trained else format_of(Path(source)).read(Path(source), None, None)
        if contents is None or contents.weights is None:
            raise
        return _untrained(renamed(contents.weights, clean_names(contents.weights)), label)


def _of_gaussian(gaussian: GaussianWeights, label: str) -> Network:
    """Its mode, with the buffers and the parameters that are not in it as they are in its model or file."""
    gaussian.require_whole("merging")
    if not isinstance(gaussian, Posterior):
        weights = gaussian.mode if gaussian.source is None else gaussian.source.weights
        identity: Mapping[str, Hashable] = identities(weights)
        return Network(label, weights, identity, gaussian, gaussian.n_data, gaussian.batch_size)
    held = gaussian.model.state_dict(keep_vars=True)
    tensors = {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}
    first = {id(tensors[name]): theta for name, theta in gaussian.mode.items()}
    weights = {name: first.get(id(tensor), tensor.detach()).to(tensor.dtype) for name, tensor in tensors.items()}
    identity = {name: id(tensor) for name, tensor in tensors.items()}
    scaling = scaling_of_model(gaussian.model)
    return Network(label, weights, identity, gaussian, gaussian.n_data, gaussian.batch_size, scaling)


def _opened(path: Path, state: Path | None, label: str, options: CheckpointKeywords, bases: bool) -> Network:
    options = {**options, "optimizer_path": state}
    try:
        checkpoint = read_checkpoint(path, **options)
        known = checkpoint.recorded
        gaussian = GaussianWeights.open(checkpoint, known.n_data or 1.0, prior_precision=1.0, **options)
        if bases and _rotates(gaussian):
            gaussian = GaussianWeights.open(checkpoint, known.n_data or 1.0, structure="kronecker", **options)
    except BayesAdamError as error:
        # The argument of a reader of one checkpoint is a pair here.
        said = str(error).replace("as optimizer_path=", "as the second of a pair (weights, state), in Python")
        if isinstance(error, FileError) and path.exists():
            said += ". The network before fine-tuning, which needs no state, is given as base="
        raise type(error)(said if label in said else f"{label}: {said}") from error
    weights = checkpoint.weights
    scaling = scaling_of_folder(path)
    return Network(label, weights, identities(weights), gaussian, known.n_data, known.batch_size, scaling)


def _rotates(gaussian: GaussianWeights) -> bool:
    """Whether its file has the state of an optimiser with eigenbases."""
    match = gaussian.source.match if gaussian.source else None
    return match is not None and any(entry.reader.factors is not None for entry in match.entries)


def _untrained(tensors: Mapping[str, Tensor], label: str) -> Network:
    outline = outlined(tensors)
    if not outline or not all(isinstance(tensor, Tensor) for tensor in outline.values()):
        raise MatchError(f"{label} is no state dict: it must have tensors by name")
    return Network(label, tensors, identities(tensors))


def labels_of(models: Sequence[Source]) -> list[str]:
    """The names of files where these differ, their paths where they do not, numbers for posteriors; none twice."""
    sources = [source if isinstance(source, tuple) else (source,) for source in models]
    seen: list[tuple[Hashable, ...]] = []
    for parts in sources:
        key = tuple(Path(part).resolve() if isinstance(part, str | os.PathLike) else id(part) for part in parts)
        if key in seen:
            named = "one posterior" if isinstance(parts[0], GaussianWeights) else ", ".join(map(str, parts))
            raise SettingError(
                f"{named} is given twice, as models {seen.index(key) + 1} and {len(seen) + 1}: give each fine-tuned "
                "network once. One that is to count for more has a larger number in weights="
            )
        seen.append(key)
    paths = [str(parts[0]) if isinstance(parts[0], str | os.PathLike) else "" for parts in sources]
    short = [Path(path).name for path in paths]
    names = short if len(set(short)) == len(short) else paths
    return [name or f"model {number}" for number, name in enumerate(names, 1)]


def check_alike(networks: Sequence[Network], pairs: Mapping[str, Pair]) -> None:
    """Refuse networks of another architecture, naming the first tensor that differs; adapters may differ in rank."""
    first = networks[0]
    for other in networks[1:]:
        both = f"{first.label} and {other.label} are of different architectures"
        missing = [name for name in first.outline if name not in other.outline]
        unknown = [name for name in other.outline if name not in first.outline]
        if missing or unknown:
            name, owner, lacking = (missing[0], first, other) if missing else (unknown[0], other, first)
            raise MatchError(
                f"{both}: {owner.label} has {name!r}, {lacking.label} has not ({len(missing) + len(unknown)} such "
                "names). Only networks of one architecture, fine-tuned from one start, can be merged"
            )
        for name, tensor in first.outline.items():
            theirs = other.outline[name]
            if tensor.shape != theirs.shape and name not in pairs:
                raise MatchError(
                    f"{both}: {name!r} has shape {tuple(tensor.shape)} in the one and {tuple(theirs.shape)} in the "
                    "other"
                )


def check_base(base: Network, first: Network, trained: Sequence[str]) -> None:
    """Refuse a base of another architecture."""
    for name in trained:
        shape, theirs = first.outline[name].shape, base.outline.get(name)
        if theirs is None or theirs.shape != shape:
            found = "nothing of that name" if theirs is None else f"of shape {tuple(theirs.shape)}"
            raise MatchError(
                f"the base is of another architecture: {first.label} has {name!r} of shape {tuple(shape)}, the base "
                f"{found}"
            )


def warn_of_copies(networks: Sequence[Network], names: Sequence[str]) -> None:
    """Warn of networks whose trained weights are the same; reading ends with the first tensor that differs."""
    for one, other in combinations(networks, 2):
        if all(_same(one, other, name) for name in names):
            warn(
                f"{one.label} and {other.label} have the same weights: is one a copy of the other, or were both read "
                "from one model? Give each fine-tuned network once, with a larger number in weights= where it is to "
                "count for more; base= is the network before fine-tuning"
            )


def _same(one: Network, other: Network, name: str) -> bool:
    like, theirs = one.outline[name], other.outline[name]
    if like.shape != theirs.shape or like.dtype != theirs.dtype:
        return False
    own = one.weights[name].detach()
    return torch.equal(own, other.weights[name].detach().to(own.device))
