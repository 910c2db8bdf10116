"""How to read what a trainer saved, where the file alone does not say: one record for every function and command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from bayesadam.curvature import StateReader


@dataclass(frozen=True)
class CheckpointOptions:
    """The options that everything takes which reads a checkpoint.

    Attributes:
        optimizer_path: the file with the optimiser's state, where it is another than that of the weights; one next to the
            weights is then not opened.
        optimizer: the name of the optimiser that wrote the state, or a reader; None identifies it by the state's keys.
        param_names: the parameter names in the optimiser's order, where the state has none of its own.
        groups_in_order: whether each of several groups was filled in the model's order, which no file says.
        weights_key: which weights, where the file holds several; dots lead down, as in `"state.model"`.
        optimizer_key: which optimiser's state, where the file holds several; `"optimizer_states.0"`.
    """

    optimizer_path: str | os.PathLike[str] | None = None
    optimizer: str | StateReader | None = None
    param_names: Sequence[str] | None = None
    groups_in_order: bool = False
    weights_key: str | None = None
    optimizer_key: str | None = None


class CheckpointKeywords(TypedDict, total=False):
    """The same as keyword arguments: `**options: Unpack[CheckpointKeywords]`."""

    optimizer_path: str | os.PathLike[str] | None
    optimizer: str | StateReader | None
    param_names: Sequence[str] | None
    groups_in_order: bool
    weights_key: str | None
    optimizer_key: str | None


DEFAULTS = CheckpointOptions()
