"""A checkpoint: weights by name and the optimiser's state, whoever wrote them and in how many files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesadam.checkpoint.contents import Recorded, Rules
from bayesadam.checkpoint.lazy import renamed
from bayesadam.checkpoint.registry import format_of
from bayesadam.errors import FileError


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a trainer saved; tensors stay on the disk until they are used.

    Attributes:
        path: the file or folder with the weights.
        format: its format's name.
        weights: every tensor of the model, buffers too, by name without the prefixes of torch.compile and data
            parallelism.
        optimizer: the optimiser's state in torch's layout, `state` and `param_groups`.
        ordered: whether `weights` are in the model's order; a safetensors file is sorted.
        stored_names: the name each of the weights has in the file.
        weights_at: the keys that lead to the weights in the file.
        recorded: what the trainer wrote beside them.
        rules: what it did without writing it down.
        optimizer_path: the file with the optimiser's state, where it is another.
    """

    path: Path
    format: str
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    ordered: bool
    stored_names: Mapping[str, str]
    weights_at: tuple[str, ...] = ()
    recorded: Recorded = field(default_factory=Recorded)
    rules: Rules = field(default_factory=Rules)
    optimizer_path: Path | None = None

    @property
    def param_names(self) -> tuple[str, ...] | None:
        """The parameters' names in the optimiser's order, where its state has them."""
        groups = self.optimizer["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        if keys and all(isinstance(key, str) for key in keys):
            return tuple(keys)
        if groups and all("param_names" in group for group in groups):
            return tuple(name for group in groups for name in group["param_names"])
        return None

    def __repr__(self) -> str:
        keys = sum(len(group["params"]) for group in self.optimizer["param_groups"])
        return f"Checkpoint({str(self.path)!r}, {self.format}, {len(self.weights)} tensors, {keys} in the optimiser)"


def read_checkpoint(
    path: str | os.PathLike[str],
    *,
    optimizer_path: str | os.PathLike[str] | None = None,
    weights_key: str | None = None,
    optimizer_key: str | None = None,
) -> Checkpoint:
    """Read a checkpoint of any known format, told by its content.

    Args:
        path: the file or folder with the weights, and with the optimiser's state unless that has a file of its own.
        optimizer_path: the file with the optimiser's state, where it is another; one that lies beside the weights is then
            not opened.
        weights_key: which weights, where the file holds several; dots lead down, as in `"state.model"`.
        optimizer_key: which optimiser's state, where there are several; `"optimizer_states.0"`.
    """
    path = Path(path)
    known = format_of(path)
    second = None if optimizer_path is None else Path(optimizer_path)
    if second is None:
        contents = state = known.read(path, weights_key, optimizer_key)
    else:
        state = format_of(second).read(second, None, optimizer_key)
        contents = (
            known.read_with(path, weights_key, state.optimizer)
            if known.read_with is not None
            else known.read(path, weights_key, None)
        )
    if contents.weights is None:
        raise FileError(
            f"{path} holds no weights that can be told as such: found {contents.summary}. Save model.state_dict() "
            "beside the optimiser's state, or name the key with weights_key="
        )
    if state.optimizer is None:
        raise FileError(
            f"{second or path} holds no optimiser state: found {state.summary}. "
            + ("Save" if second else "Pass the file that has it as optimizer_path=, or save")
            + " optimizer.state_dict() under 'optimizer'"
        )
    stored = clean_names(contents.weights)
    return Checkpoint(
        path=path,
        format=known.name,
        weights=renamed(contents.weights, stored),
        optimizer=state.optimizer,
        ordered=contents.ordered,
        stored_names=stored,
        weights_at=contents.weights_at,
        recorded=contents.recorded.completed(state.recorded),
        rules=contents.rules,
        optimizer_path=second,
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
