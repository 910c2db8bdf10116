"""The curvature V_t of a model, by parameter name, out of an optimiser or its saved state."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._shards import extremes, placed_like
from bayesadam.errors import MatchError, StateError
from bayesadam.readers.match import Entry, Match, match_optimizers, match_state_dict
from bayesadam.readers.reader import StateReader, second_moment, start_of, stored_statistic

# Weights read together, whatever the size of a tensor.
PIECE = 2**19


@dataclass(frozen=True, eq=False)
class Curvature:
    """The second moments v̂ of a model's gradients, and where they came from, by parameter name.

    Attributes:
        second_moment: v̂, bias-corrected, float32 (float64 for float64 parameters).
        steps: t, the steps behind each, or None where the optimiser does not count.
        weight_decay: λ of the parameter's group.
        reader: the name of the record that read it.
        omitted: the parameters of the model that have no curvature, with the reason.
    """

    second_moment: Mapping[str, Tensor]
    steps: Mapping[str, float | None]
    weight_decay: Mapping[str, float]
    reader: Mapping[str, str]
    omitted: Mapping[str, str]


def read_optimizer(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    reader: str | StateReader | None = None,
    bias_correction: bool = True,
) -> Curvature:
    """Read v̂ off one live optimiser, or several that share a model; nothing of theirs is changed.

    Args:
        model: the model they train.
        optimizer: the optimiser, or a list of them (Muon and AdamW, say).
        reader: overrides the record chosen by the optimiser's class; `"ogd"` gives V = 1.
        bias_correction: False leaves moving averages as the optimiser keeps them.
    """
    return read_match(match_optimizers(model, optimizer, reader), bias_correction=bias_correction)


def read_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    optimizer: str | StateReader = "adam",
    param_names: Sequence[str] | None = None,
    bias_correction: bool = True,
) -> Curvature:
    """Read v̂ out of what `optimizer.state_dict()` returned; see `match_state_dict` for how names are found."""
    return read_match(match_state_dict(model, state_dict, optimizer, param_names), bias_correction=bias_correction)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of a posterior: float32, or float64 for float64 parameters."""
    return torch.promote_types(dtype, torch.float32)


def read_entry(entry: Entry, *, bias_correction: bool = True) -> tuple[Tensor, Tensor]:
    """The stored statistic's (smallest, largest) entry as one tensor, and v̂."""
    parameter, reader = entry.parameter, entry.reader
    dtype = working_dtype(parameter.dtype)
    if reader.statistic == "identity":
        return torch.ones(2, dtype=dtype), torch.ones_like(parameter, dtype=dtype, requires_grad=False)
    steps = reader.steps(entry.state, entry.group)
    if steps is not None and not (math.isfinite(steps) and steps >= 1):
        raise StateError(f"parameter {entry.name!r} has a step count of {steps}: it has not been trained yet")
    try:
        stored = stored_statistic(reader, entry.state, entry.group, parameter.shape, dtype)
        if stored.shape != parameter.shape:
            raise MatchError(
                f"the second moment of parameter {entry.name!r} has shape {tuple(stored.shape)}, the parameter "
                f"{tuple(parameter.shape)}: the state belongs to another model"
            )
        ends = extremes(stored) if stored.numel() else torch.zeros(2, dtype=dtype)
        if reader.statistic == "sum" and stored.numel():
            ends -= start_of(reader, entry.group)
        return ends, second_moment(stored, reader, entry.state, entry.group, bias_correction=bias_correction)
    except KeyError as missing:
        raise StateError(
            f"reader {reader.name!r} finds no {missing} for parameter {entry.name!r}; its state has "
            f"{sorted(map(str, entry.state))}, its group {sorted(map(str, entry.group))}. Name the optimiser that wrote "
            "it (optimizer='adamw', 'adagrad', …)"
        ) from None


def pieces(entry: Entry, size: int | None = None) -> Iterator[Entry]:
    """The entry in slices of the flat tensor, so that a large one need not be in memory at once.

    A statistic that is not stored number by number, Adafactor's or an 8-bit one, comes whole.
    """
    reader, shape, size = entry.reader, entry.parameter.shape, size or PIECE
    plain = reader.read is None and reader.statistic in ("average", "sum", "root", "identity")
    if not plain or entry.parameter.numel() <= size:
        yield entry
        return
    needed = {reader.key, reader.maximum_key, reader.centre_key, "step"}
    state = {key: entry.state[key] for key in entry.state if key in needed}
    flat = {key: s.reshape(-1) for key, s in state.items() if isinstance(s, Tensor) and s.shape == shape}
    weights = entry.parameter.detach().reshape(-1)
    for start in range(0, len(weights), size):
        here = slice(start, start + size)
        part = nn.Parameter(weights[here], requires_grad=False)
        yield replace(entry, parameter=part, state={**state, **{key: value[here] for key, value in flat.items()}})


def check_entries(match: Match, size: int | None = None) -> None:
    """Refuse a state with second moments that are negative, NaN or infinite, reading so many of them at a time."""
    ends = {}
    with torch.no_grad():
        for entry in match.entries:
            found = torch.stack([read_entry(piece)[0] for piece in pieces(entry, size)])
            ends[entry.name] = torch.stack([found[:, 0].amin(), found[:, 1].amax()])
    _check_values(ends, match)


def read_match(match: Match, *, bias_correction: bool = True) -> Curvature:
    """v̂ of every matched parameter."""
    with torch.no_grad():
        read = {entry.name: read_entry(entry, bias_correction=bias_correction) for entry in match.entries}
    _check_values({name: ends for name, (ends, _) in read.items()}, match)
    return Curvature(
        second_moment={entry.name: placed_like(read[entry.name][1], entry.parameter) for entry in match.entries},
        steps={entry.name: entry.reader.steps(entry.state, entry.group) for entry in match.entries},
        weight_decay={entry.name: entry.weight_decay for entry in match.entries},
        reader={entry.name: entry.reader.name for entry in match.entries},
        omitted=match.omitted,
    )


def _check_values(ends: Mapping[str, Tensor], match: Match) -> None:
    """Refuse second moments that are negative, NaN or infinite; one transfer a device, not one a tensor."""
    by_device: dict[torch.device, list[str]] = {}
    for name, pair in ends.items():
        by_device.setdefault(pair.device, []).append(name)
    for names in by_device.values():
        table = torch.stack([ends[name].float() for name in names]).cpu()
        bad = ~torch.isfinite(table).all(dim=1) | (table[:, 0] < 0)
        if bad.any():
            index = int(bad.nonzero()[0])
            low, high = table[index].tolist()
            reader = next(entry.reader for entry in match.entries if entry.name == names[index])
            raise StateError(
                f"the second moment of parameter {names[index]!r} ({reader.key!r}) ranges from {low:g} to {high:g}: it "
                "must be finite and not negative. Training met a non-finite gradient or the file is damaged; go back "
                "to a checkpoint before that, or run bayesadam.doctor(model, optimizer)"
            )
