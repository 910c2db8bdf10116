"""A checkpoint, weights by name and the optimiser's state, whoever wrote them; and how to read it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.readers import StateReader
from bayesadam.readers.formats.choice import choose
from bayesadam.readers.formats.contents import Contents, with_choice
from bayesadam.readers.formats.lazy import renamed
from bayesadam.readers.formats.networks import Found, Keys, names_in
from bayesadam.readers.formats.pairs import state_beside
from bayesadam.readers.formats.registry import format_of
from bayesadam.readers.probes import PROBE_KEY, probe, same_weights

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class CheckpointOptions:
    """The options that everything takes which reads a checkpoint.

    Attributes:
        optimizer_path: the file with the optimiser's state, where it is another than that of the weights; one next to the
            weights is then not opened.
        optimizer: the name of the optimiser that wrote the state, or a reader; None identifies it by the state's keys.
        param_names: the parameter names in the optimiser's order, where the state has none of its own.
        groups_in_order: whether each of several groups was filled in the model's order, which no file says.
        weights_key: which weights, where the file holds several; dots lead down, as in `"state.model"`. Several networks
            that one optimiser trained, in its order: `("actor", "critic")`, or `"actor,critic"`.
        optimizer_key: which optimiser's state, where the file holds several; `"optimizer_states.0"`.
    """

    optimizer_path: str | os.PathLike[str] | None = None
    optimizer: str | StateReader | None = None
    param_names: Sequence[str] | None = None
    groups_in_order: bool = False
    weights_key: str | Sequence[str] | None = None
    optimizer_key: str | None = None

    @property
    def weights_keys(self) -> str | None:
        """`weights_key` as one text, with a comma between several."""
        return (
            self.weights_key
            if self.weights_key is None or isinstance(self.weights_key, str)
            else ",".join(self.weights_key)
        )


class CheckpointKeywords(TypedDict, total=False):
    """The same as keyword arguments: `**options: Unpack[CheckpointKeywords]`."""

    optimizer_path: str | os.PathLike[str] | None
    optimizer: str | StateReader | None
    param_names: Sequence[str] | None
    groups_in_order: bool
    weights_key: str | Sequence[str] | None
    optimizer_key: str | None


DEFAULTS = CheckpointOptions()


@dataclass(frozen=True, eq=False)
class Checkpoint(Contents):
    """What a trainer saved; tensors stay on the disk until they are used.

    The fields that are not listed are those of `Contents`.

    Attributes:
        weights: every tensor of the model, buffers too, by name without the prefixes of torch.compile and data
            parallelism.
        optimizer: the optimiser's state in torch's layout, `state` and `param_groups`.
        path: the file or folder with the weights.
        format: its format's name.
        stored_names: the name each of the weights has in the file.
        optimizer_path: the file with the optimiser's state, where it is another.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    path: Path = field(kw_only=True)
    format: str = field(kw_only=True)
    stored_names: Mapping[str, str] = field(kw_only=True)
    optimizer_path: Path | None = field(kw_only=True, default=None)

    @property
    def param_names(self) -> tuple[str, ...] | None:
        """The parameters' names in the optimiser's order, where its state has them."""
        return names_in(self.optimizer)

    def keys_to(self, name: str) -> Keys:
        """The keys that lead to one of the weights in the file's dictionary."""
        stored = self.stored_names[name]
        return self.places.get(stored, (*self.weights_at, stored))

    def n_data_or(self, given: float | None) -> float:
        """N as it is given or, for None, as the trainer recorded it."""
        known = self.recorded.n_data if given is None else given
        if known is None:
            raise SettingError(f"{self.path} does not say how many training examples there were: pass n_data=")
        return known

    def batch_size_or(self, given: int | None) -> int | None:
        """B as it is given or, for None, as it was recorded, if it was."""
        return self.recorded.batch_size if given is None else given

    def __repr__(self) -> str:
        keys = sum(len(group["params"]) for group in self.optimizer["param_groups"])
        return f"Checkpoint({str(self.path)!r}, {self.format}, {len(self.weights)} tensors, {keys} in the optimiser)"


def read_checkpoint(
    path: str | os.PathLike[str], options: CheckpointOptions = DEFAULTS, **changes: Unpack[CheckpointKeywords]
) -> Checkpoint:
    """Read a checkpoint of any known format, identified by its content.

    `path` has the weights, and the optimiser's state unless that has a file of its own; `changes` are `options` as keywords.
    """
    options = replace(options, **changes)
    path = Path(path)
    known = format_of(path)
    second = None if options.optimizer_path is None else Path(options.optimizer_path)
    if second is None:
        contents = state = known.read(path, options.weights_keys, options.optimizer_key)
    else:
        state = format_of(second).read(second, None, options.optimizer_key)
        contents = (
            known.read_with(path, options.weights_keys, state.optimizer)
            if known.read_with is not None
            else known.read(path, options.weights_keys, None)
        )
    if contents.weights is None and contents.found.networks and state.optimizer is not None:
        beside = Found(contents.found.networks, {(): state.optimizer})
        contents = with_choice(contents, choose(beside, path, None, None))
    if state.optimizer is None and second is None and (beside_it := state_beside(path)) is not None:
        return read_checkpoint(path, replace(options, optimizer_path=beside_it))
    if contents.weights is None:
        raise FileError(
            f"{path} holds no weights that can be identified: found {contents.summary}. Save model.state_dict() with "
            "the optimiser's state, or name the key with weights_key="
        )
    if state.optimizer is None:
        raise FileError(
            f"{second or path} holds no optimiser state: found {state.summary}. "
            + ("Save" if second else "Pass the file that has it as optimizer_path=, or save")
            + " optimizer.state_dict() under 'optimizer'"
        )
    stored = clean_names(contents.weights)
    weights = renamed(contents.weights, stored)
    _check_owner(path, weights, state.optimizer)
    return Checkpoint(
        **{
            **{each.name: getattr(contents, each.name) for each in fields(contents)},
            "weights": weights,
            "optimizer": state.optimizer,
            "recorded": contents.recorded.completed(state.recorded),
        },
        path=path,
        format=known.name,
        stored_names=stored,
        optimizer_path=second,
    )


def _check_owner(path: Path, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> None:
    """Refuse a saved posterior that belongs to other weights, by the few of them that are in it."""
    states = getattr(optimizer["state"], "outline", optimizer["state"])
    known = {
        name: state[PROBE_KEY]
        for name, state in states.items()
        if name in weights and isinstance(state, Mapping) and PROBE_KEY in state
    }
    found = {name: probe(weights[name]) for name in known}
    # Other shapes are refused by name once states are matched.
    if all(known[name].shape == found[name].shape for name in known) and known and not same_weights(known, found):
        raise MatchError(
            f"the weights in {path} are not those that the saved posterior belongs to: give it the weights that were "
            "published with it"
        )


def clean_names(keys: Iterable[str]) -> dict[str, str]:
    """Names without the prefixes of torch.compile and data parallelism, and the key behind each.

    >>> clean_names(["module._orig_mod.0.weight", "module._orig_mod.0.bias"])
    {'0.weight': 'module._orig_mod.0.weight', '0.bias': 'module._orig_mod.0.bias'}
    """
    keys = list(keys)
    names = [".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return dict(zip(names if len(set(names)) == len(keys) else keys, keys, strict=True))
