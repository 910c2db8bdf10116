"""Folders of Accelerate's `save_state`: weights and the optimiser's state; the random states are pickles, left alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bayesadam.checkpoint.contents import Contents, Rules
from bayesadam.checkpoint.huggingface import choose, files_of, folder_format, own_names, read_tensors, read_weights

_MODEL = re.compile(r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin)")
_OPTIMIZER = re.compile(r"optimizer(_\d+)?\.bin")
_RANDOM = re.compile(r"random_states_\d+\.pkl")


def _is_accelerate(path: Path, head: bytes) -> bool:
    if not path.is_dir():
        return False
    there = files_of(path)
    # The Trainer of transformers may leave an optimizer.bin, too.
    return "trainer_state.json" not in there and any(
        _OPTIMIZER.fullmatch(name) or _RANDOM.fullmatch(name) for name in there
    )


def _accelerate_with(path: Path, weights_key: str | None, optimizer: Mapping[str, Any] | None) -> Contents:
    """One model of those that were prepared; the others are `model_1`, …, as their optimisers are `optimizer_1`, …"""
    there = sorted(files_of(path))
    models = [name for name in there if _MODEL.fullmatch(name)]
    if len(models) > 1 or weights_key is not None:
        chosen = choose(path, models, weights_key, "weights_key", "the weights of a model")
        weights, ordered = read_tensors(path / (chosen or ""))
    else:
        weights, ordered = read_weights(path)
    return Contents(
        weights=weights,
        optimizer=optimizer,
        summary=f"{len(weights)} tensors, {there[:12]}",
        ordered=ordered,
        # The user's script made the optimiser: its order follows no rule.
        rules=Rules(names=partial(own_names, list(weights))),
    )


ACCELERATE = folder_format("Accelerate", _is_accelerate, _accelerate_with, _OPTIMIZER.fullmatch)
