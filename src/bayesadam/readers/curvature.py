"""The curvature V_t of a model, by parameter name, out of an optimiser or its saved state; and its origin."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._shards import extremes, placed_like
from bayesadam._warnings import warn
from bayesadam.errors import MatchError, StateError
from bayesadam.readers.match import Entry, Match, match_optimizers, match_state_dict
from bayesadam.readers.state import StateReader, second_moment, stored_statistic, working_dtype

# Weights read together, whatever the size of a tensor.
PIECE = 2**19
# A mark of groups that stand for a saved posterior whose second moments are of recorded gradients.
RECORDED_MARK = "recorded_gradients"
_SHORT_MEMORY = 0.95
_FEW = 20


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
    """Read v̂ off one live optimiser, or several that share a model (Muon and AdamW, say); nothing of theirs is changed.

    `reader` overrides the record chosen by the optimiser's class; `"ogd"` gives V = 1. `bias_correction=False` leaves
    moving averages as the optimiser keeps them.
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
                f"{tuple(parameter.shape)}: the state belongs to another model, or its names are in another order"
            )
        ends = extremes(stored) if stored.numel() else torch.zeros(2, dtype=dtype)
        if reader.statistic == "sum" and stored.numel():
            ends -= reader.first(entry.group)
        return ends, second_moment(stored, reader, entry.state, entry.group, bias_correction=bias_correction)
    except KeyError as missing:
        raise StateError(
            f"reader {reader.name!r} finds no {missing} for parameter {entry.name!r}; its state has "
            f"{sorted(map(str, entry.state))}. Name the optimiser that wrote it (optimizer='adamw', 'adagrad', …)"
        ) from None


def pieces(entry: Entry, size: int | None = None) -> Iterator[Entry]:
    """The entry in slices of the flat tensor, for memory; a statistic not stored number by number comes whole."""
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
    """Refuse a state with second moments that are negative, NaN or infinite, reading `size` of them at a time."""
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
    for device in {pair.device for pair in ends.values()}:
        names = [name for name, pair in ends.items() if pair.device == device]
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


@dataclass(frozen=True)
class Origin:
    """The optimisers behind second moments.

    `steps` are the fewest and the most gradients behind a parameter, `beta` the smallest β₂; None where unknown.
    `recorded` says that the gradients are a `Recorder`'s.
    """

    optimizers: tuple[str, ...] = ()
    steps: tuple[float, float] | None = None
    beta: float | None = None
    recorded: bool = False

    @property
    def fewest(self) -> float | None:
        """The fewest gradients behind a parameter, where that is known."""
        return None if self.steps is None else self.steps[0]

    def header(self) -> dict[str, Any]:
        """Plain data, for the header of a file."""
        steps = None if self.steps is None else list(self.steps)
        return {"optimizer": list(self.optimizers), "steps": steps, "beta2": self.beta, "recorded": self.recorded}

    @classmethod
    def of_header(cls, header: Mapping[str, Any]) -> Origin:
        """The origin in a file's header; older files have a part of it."""
        steps = header.get("steps")
        return cls(
            tuple(header.get("optimizer") or ()),
            None if steps is None else (float(steps[0]), float(steps[-1])),
            header.get("beta2"),
            bool(header.get("recorded")),
        )


UNKNOWN = Origin()


def origin_of(match: Match) -> Origin:
    """The origin of matched states."""
    counted = [entry.reader.steps(entry.state, entry.group) for entry in match.entries]
    steps = [count for count in counted if count is not None]
    known = [entry.reader.beta(entry.group) for entry in match.entries]
    betas = [beta for beta in known if beta is not None and 0 < beta < 1]
    return Origin(
        match.optimizers,
        (min(steps), max(steps)) if steps else None,
        min(betas, default=None),
        any(RECORDED_MARK in entry.group for entry in match.entries),
    )


def warn_of_memory(origin: Origin, label: str) -> None:
    """Warn of second moments with a short memory, or of a training that is shorter than their memory."""
    beta, steps = origin.beta, origin.fewest
    if beta is None:
        return
    if beta <= _SHORT_MEMORY:
        warn(
            f"{label} was trained with β₂ = {beta:g}: its second moment is that of the last {1 / (1 - beta):.0f} "
            "steps, too few to merge by. Train with β₂ of 0.99 or more"
        )
    if steps is not None and steps * (1 - beta) < 1 - 1e-9:
        warn(
            f"{label} was trained for {steps:g} steps against a memory of 1/(1−β₂) = {1 / (1 - beta):.0f}: its second "
            "moment is that of the start of training. Train longer, or with a smaller β₂, before merging"
        )


def warn_of_few(origin: Origin, what: str) -> None:
    """Warn of fewer gradients than any curvature can be known by."""
    if origin.fewest is not None and origin.fewest < _FEW:
        more = "record 100 or more, keep=100" if origin.recorded else "train longer"
        warn(f"{what} has {origin.fewest:g} gradients behind it, too few to know the curvature by: {more}")
