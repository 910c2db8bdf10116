"""The file of a saved posterior as a checkpoint: its second moments are the optimiser's state, its mode the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam._storage import is_of_kind, read_mapped
from bayesadam.errors import FileError
from bayesadam.readers.compression import PROBE_KEY, expanded, moment, moment_shape, probe
from bayesadam.readers.curvature import RECORDED_MARK, Origin
from bayesadam.readers.formats.contents import Contents, Recorded
from bayesadam.readers.formats.files import is_safetensors
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.readers.formats.registry import Format, refuse_keys
from bayesadam.readers.rotated import (
    BETA_KEY,
    LEFT_KEY,
    MOMENT_KEY,
    PLAIN_MARK,
    RIGHT_KEY,
    ROTATED_MARK,
    ROTATED_MOMENT_KEY,
)

_ROLE = "second_moment"
_SIDES = {LEFT_KEY: "left", RIGHT_KEY: "right"}
_MARKS = {"diagonal": PLAIN_MARK, "kronecker": ROTATED_MARK}


def _read(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    refuse_keys(path, "a saved posterior has no levels", weights_key=weights_key, optimizer_key=optimizer_key)
    tensors, header = read_mapped(path)
    kind = header.get("structure")
    if kind not in _MARKS:
        raise FileError(
            f"{path} holds a {kind} posterior, which has no second moment for each weight: read it with "
            f"{'Mixture' if kind == 'mixture' else 'Posterior'}.load"
        )
    try:
        names: list[str] = header["parameters"]
        settings = header["settings"]
        n_data, prior = settings["n_data"], settings["prior_precision"]
        origin = Origin.of_header(header)
        groups: dict[float, list[str]] = {}
        for name in names:
            if name not in prior:
                raise FileError(
                    f"{path} has a prior precision for each weight of {name!r}, which no weight decay is: read it with "
                    "Posterior.load"
                )
            groups.setdefault(prior[name] / n_data, []).append(name)
        states = {name: _state(path, tensors, name, origin.fewest) for name in names}
        stored = {name: tensors[f"mode.{name}"] for name in names} if header.get("has_weights", True) else None
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise FileError(f"{path} is damaged: its header or tensors lack {error}") from None
    # 0 is the memory of no average.
    marks = {_MARKS[kind]: True, BETA_KEY: origin.beta or 0.0, **({RECORDED_MARK: True} if origin.recorded else {})}
    listed = [{"params": held, "weight_decay": decay, **marks} for decay, held in groups.items()]
    return Contents(
        weights=stored,
        optimizer={"state": states, "param_groups": listed},
        summary=f"the posterior of {len(names)} parameters"
        + (
            ""
            if stored
            else " without weights: give the file that has them, with this one beside it under its name or as optimizer_path="
        ),
        recorded=Recorded(
            step=(header.get("steps") or [None])[-1], n_data=n_data, batch_size=settings.get("batch_size")
        ),
        notes=(f"the second moments are a saved posterior's{_told(origin, header.get('compress'))}",),
    )


def _told(origin: Origin, compress: str | None) -> str:
    """Where they come from, in brackets."""
    unit = "recorded gradients" if origin.recorded else "steps"
    said = [", ".join(origin.optimizers)] if origin.optimizers else []
    said += [f"{' to '.join(f'{each:g}' for each in dict.fromkeys(origin.steps))} {unit}"] if origin.steps else []
    said += [f"kept as {compress}"] if compress else []
    return f" ({'; '.join(said)})" if said else ""


def _state(path: Path, tensors: Mapping[str, Tensor], name: str, steps: float | None) -> Lazy:
    """The state of one parameter, decoded when it is accessed, and a few of the weights that it belongs to."""
    held = {key: tensors[f"{side}.{name}"] for key, side in _SIDES.items() if f"{side}.{name}" in tensors}
    key = ROTATED_MOMENT_KEY if held else MOMENT_KEY
    shape = moment_shape(tensors, f"{_ROLE}.{name}")
    known = tensors[f"probe.{name}"] if f"probe.{name}" in tensors else probe(tensors[f"mode.{name}"])
    outline: dict[str, Any] = {key: meta(tuple(shape), torch.float32), PROBE_KEY: known}
    outline |= {side: meta(tuple(q.shape), q.dtype) for side, q in held.items()}
    outline |= {} if steps is None else {"step": steps}

    def read(wanted: str) -> Tensor:
        if wanted == key:
            return moment(tensors, f"{_ROLE}.{name}", str(path))
        stored = f"{_SIDES[wanted]}.{name}"
        return expanded({stored: tensors[stored]}, str(path))[stored]

    return Lazy(outline, read)


POSTERIOR = Format("posterior", lambda path, head: is_safetensors(path, head) and is_of_kind(path), _read)
