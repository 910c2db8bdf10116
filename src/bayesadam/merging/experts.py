"""A trained network as merging sees it: all its tensors by name, and the second moments of those that were trained."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from bayesadam._alone import unwrap
from bayesadam.errors import BayesAdamError, FileError, MatchError, SettingError
from bayesadam.gaussian.structure import Structure
from bayesadam.lora import Scaling, scaling_of_model
from bayesadam.merging.lora import scaling_of_folder
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_one_network
from bayesadam.readers import (
    DEFAULTS,
    UNKNOWN,
    CheckpointKeywords,
    CheckpointOptions,
    Entry,
    Origin,
    Rotated,
    RotatedReader,
    Rotation,
    clean_names,
    format_of,
    identities,
    match_checkpoint,
    origin_of,
    own_parameters,
    pieces,
    read_checkpoint,
    read_entry,
    renamed,
    state_beside,
    working_dtype,
)
from bayesadam.readers.curvature import PIECE

AnyPath = str | os.PathLike[str]
Source = Posterior | AnyPath | tuple[AnyPath, AnyPath]
BaseSource = Source | nn.Module | Mapping[str, Tensor]
_STATELESS = (
    "{label} holds no optimiser state. Where that has a file of its own, keep it beside the weights under its name, "
    "optimizer.pt beside model.pt or posterior.safetensors beside model.safetensors, or in Python pass the pair (weights, "
    "state) in place of the path. The network before fine-tuning is given as base="
)


@dataclass(frozen=True, eq=False)
class Moment:
    """v̂ of one parameter, read when it is asked for.

    Attributes:
        read: v̂ of the flat weights, `PIECE` of them at a time.
        rotated: v̂ in the parameter's eigenbases; None where it has none.
        has_bases: whether it has some.
    """

    read: Callable[[], Iterator[Tensor]]
    rotated: Callable[[], Rotated | None]
    has_bases: bool = False

    def whole(self, shape: torch.Size) -> Tensor:
        """v̂ of the weights, at once."""
        found = list(self.read())
        return torch.cat(found).reshape(shape) if found else torch.zeros(shape)


@dataclass(frozen=True, eq=False)
class Expert:
    """A trained network.

    Attributes:
        label: what it is called in reports.
        weights: every tensor by name, buffers too; from a file they stay on the disk.
        moments: the second moments of what was trained, by name; a tied tensor has its own under each name.
        identity: what two names of one tied tensor have in common.
        n_data: N, where it is known.
        batch_size: B, where it is known.
        origin: how many gradients are behind its second moments, as far as that is known.
        scaling: by what an adapter's product is multiplied; None where that is not known.
    """

    label: str
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Moment]
    identity: Mapping[str, Hashable]
    n_data: float | None = None
    batch_size: int | None = None
    origin: Origin = UNKNOWN
    scaling: Scaling = field(default=lambda prefix, adapter, rank: None)

    def has_bases(self, name: str) -> bool:
        """Whether a parameter has eigenbases."""
        return name in self.moments and self.moments[name].has_bases

    @property
    def is_averaged(self) -> bool:
        """Whether its second moments are the optimiser's own, weight by weight: neither in eigenbases nor recorded."""
        return not self.origin.recorded and not any(moment.has_bases for moment in self.moments.values())

    @property
    def outline(self) -> Mapping[str, Tensor]:
        """Types and shapes of the weights, without reading them."""
        found: Mapping[str, Tensor] = getattr(self.weights, "outline", self.weights)
        return found


def reading_of(options: CheckpointKeywords) -> CheckpointOptions:
    """How files are read; the file of one state would stand for those of all."""
    if options.get("optimizer_path") is not None:
        raise SettingError(
            "optimizer_path= is the file of one state, and merging reads several: in place of the path of the weights pass the "
            "pair (weights, state)"
        )
    return CheckpointOptions(**options)


def expert_of(source: BaseSource, label: str, options: CheckpointOptions = DEFAULTS, *, trained: bool = True) -> Expert:
    """The network behind a posterior, a path, or a path with that of the optimiser's state.

    With `trained` False it need not have a state, and may be a model or its state dict.
    """
    require_one_network(source, "merging")
    if isinstance(source, Posterior):
        return _of_posterior(source, label)
    if isinstance(source, nn.Module) and not trained:
        return _of_tensors(unwrap(source).state_dict(keep_vars=True), label)
    if isinstance(source, Mapping) and not trained:
        return _of_tensors(source, label)
    if isinstance(source, tuple) and len(source) == 2:
        return _of_files(Path(source[0]), Path(source[1]), label, options)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        return _of_files(path, None, label, options) if trained or _has_state(path, options) else _alone(path, label)
    others = "" if trained else ", a model or a state dict"
    raise SettingError(
        f"cannot merge a {type(source).__name__}: pass posteriors, paths of checkpoints, or pairs of paths (weights, "
        f"optimiser's state){others}. A model alone has no curvature: Posterior.from_optimizer(model, optimizer, n_data)"
    )


def diagonal_of(structure: Structure, name: str) -> Tensor:
    """The diagonal of V in the space of the weights: v̂, or Q_L² v̂ (Q_R²)ᵀ, squared entry by entry."""
    v = structure.second_moment[name]
    return structure.bases[name].diagonal(v) if name in structure.bases else v


def _of_posterior(posterior: Posterior, label: str) -> Expert:
    """Its mode, with the buffers and the parameters that are not in it as they are in its model."""
    posterior.require_whole("merging")
    held = posterior.model.state_dict(keep_vars=True)
    tensors = {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}
    first = {id(parameter): name for name, parameter in own_parameters(posterior.model).items()}
    owners = {name: first.get(id(tensor)) for name, tensor in tensors.items()}
    mode, structure = posterior.mode, posterior.structure
    weights = {
        name: mode[owner].to(tensor.dtype) if (owner := owners[name]) in mode else tensor.detach()  # type: ignore[index]
        for name, tensor in tensors.items()
    }

    def read(name: str) -> Iterator[Tensor]:
        yield from torch.split(diagonal_of(structure, name).reshape(-1), PIECE)

    def rotated(name: str) -> Rotated | None:
        found = structure.bases.get(name)
        return None if found is None else Rotated(found, structure.second_moment[name])

    moments = {
        name: Moment(partial(read, owner), partial(rotated, owner), owner in structure.bases)
        for name, owner in owners.items()
        if owner is not None and owner in mode
    }
    return Expert(
        label,
        weights,
        moments,
        {name: id(tensor) for name, tensor in tensors.items()},
        posterior.n_data,
        posterior.settings.batch_size,
        posterior.origin,
        scaling_of_model(posterior.model),
    )


def _of_files(path: Path, optimizer_path: Path | None, label: str, options: CheckpointOptions) -> Expert:
    try:
        checkpoint = read_checkpoint(path, options, optimizer_path=optimizer_path)
        match = match_checkpoint(checkpoint, options=options)
    except BayesAdamError as error:
        if isinstance(error, FileError) and optimizer_path is None and path.exists() and not _has_state(path, options):
            raise FileError(_STATELESS.format(label=label)) from None
        # What is an argument where one checkpoint is read is here a pair.
        said = str(error).replace("as optimizer_path=", "as the second of a pair (weights, state), in Python")
        raise type(error)(said if label in said else f"{label}: {said}") from error
    identity = identities(checkpoint.weights)
    trained = {identity[entry.name]: entry for entry in match.entries}
    moments = {name: _saved(trained[key]) for name, key in identity.items() if key in trained}
    scaling = scaling_of_folder(path)
    known = checkpoint.recorded
    return Expert(
        label, checkpoint.weights, moments, identity, known.n_data, known.batch_size, origin_of(match), scaling
    )


def _saved(entry: Entry) -> Moment:
    def read() -> Iterator[Tensor]:
        for piece in pieces(entry):
            # Not around a `yield`: the caller would be left without gradients.
            with torch.no_grad():
                v = read_entry(piece)[1].reshape(-1)
            yield from torch.split(v, PIECE)

    def rotated() -> Rotated | None:
        if not isinstance(entry.reader, RotatedReader):
            return None
        found = entry.reader.rotated(entry.state, entry.group, entry.parameter.shape)
        if found is None:
            return None
        dtype = working_dtype(entry.parameter.dtype)
        return Rotated(found.rotation.to(None, dtype), found.second_moment.to(dtype))

    return Moment(read, rotated, isinstance(entry.reader, RotatedReader))


def _has_state(path: Path, options: CheckpointOptions) -> bool:
    if state_beside(path) is not None:
        return True
    return format_of(path).read(path, options.weights_keys, options.optimizer_key).optimizer is not None


def _alone(path: Path, label: str) -> Expert:
    """The weights of a file without a state."""
    contents = format_of(path).read(path, None, None)
    if contents.weights is None:
        raise FileError(f"{path} holds no weights that can be identified: found {contents.summary}")
    return _of_tensors(renamed(contents.weights, clean_names(contents.weights)), label)


def _of_tensors(tensors: Mapping[str, Tensor], label: str) -> Expert:
    outline: Mapping[str, Tensor] = getattr(tensors, "outline", tensors)
    if not outline or not all(isinstance(tensor, Tensor) for tensor in outline.values()):
        raise MatchError(f"{label} is no state dict: it must have tensors by name")
    return Expert(label, tensors, {}, identities(tensors))


def as_operator(
    moment: Moment, shape: torch.Size, scale: float, like: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """x → K x of one parameter, K = scale × V, and K's diagonal, on the device and in the type of `like`."""
    found = moment.rotated()
    if found is None:
        own = moment.whole(shape).to(like) * scale
        return own.mul, own
    rotation: Rotation = found.rotation.to(like.device, like.dtype)
    values, dims = found.second_moment.to(like) * scale, len(shape)
    return lambda x: rotation.out_of(rotation.into(x, dims) * values, dims), rotation.diagonal(values)
