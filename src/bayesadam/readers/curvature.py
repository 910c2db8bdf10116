"""The curvature V_t of a model, by parameter name, out of an optimiser or its saved state; and its origin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._shards import extremes, placed_like
from bayesadam._warnings import warn
from bayesadam.errors import MatchError
from bayesadam.readers import tracking
from bayesadam.readers.identify import opened
from bayesadam.readers.match import Entry, Match, match_optimizers, match_state_dict
from bayesadam.readers.registry import TRACKED, State, StateDict, StateReader, damage_told, working_dtype
from bayesadam.readers.rotated import Rotation, rotation_of, weight_diagonal

# A mark of groups that stand for a saved posterior whose second moments are of recorded gradients.
RECORDED_MARK = "recorded_gradients"
# bitsandbytes has used these block lengths for its optimiser states.
_BLOCK_LENGTHS = (256, 2048)


@dataclass(frozen=True, eq=False)
class Curvature:
    """The second moments v̂ of a model's gradients by parameter name, float32 (float64 for float64 parameters).

    With the steps t behind each (None where they are not counted), λ, the name of the record that read it, and why
    the other parameters of the model are omitted.
    """

    second_moment: Mapping[str, Tensor]
    steps: Mapping[str, float | None]
    weight_decay: Mapping[str, float]
    reader: Mapping[str, str]
    omitted: Mapping[str, str]


def read_optimizer(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, reader: str | StateReader | None = None
) -> Curvature:
    """Read v̂ off one live optimiser, or several of one model; `reader` overrides the record that its class has."""
    return read_match(match_optimizers(model, optimizer, reader))


def read_state_dict(
    model: nn.Module,
    state_dict: StateDict,
    *,
    optimizer: str | StateReader = "adam",
    param_names: Sequence[str] | None = None,
) -> Curvature:
    """Read v̂ out of what `optimizer.state_dict()` returned, by names, or by the model's order and every shape."""
    return read_match(match_state_dict(model, state_dict, optimizer, param_names))


def read_match(match: Match) -> Curvature:
    """v̂ of every matched parameter; refuses those that are negative, NaN or infinite."""
    moments = {}
    with torch.no_grad():
        for entry in match.entries:
            ends, moment = read_entry(entry)
            low, high = ends.tolist()
            if not (math.isfinite(low) and math.isfinite(high) and low >= 0):
                raise MatchError(
                    f"the second moment of parameter {entry.name!r} ({entry.reader.key!r}) ranges from {low:g} to "
                    f"{high:g}: it must be finite and not negative. Go back to a checkpoint before that"
                )
            moments[entry.name] = placed_like(moment, entry.parameter)
    return Curvature(
        second_moment=moments,
        steps={entry.name: entry.steps for entry in match.entries},
        weight_decay={entry.name: entry.weight_decay for entry in match.entries},
        reader={entry.name: entry.reader.name for entry in match.entries},
        omitted=match.omitted,
    )


@damage_told()
def read_entry(entry: Entry) -> tuple[Tensor, Tensor]:
    """The stored statistic's (smallest, largest) entry as one tensor, and v̂, by the table in `StateReader`."""
    parameter, reader = entry.parameter, entry.reader
    dtype = working_dtype(parameter.dtype)
    if reader.statistic == "identity":
        return torch.ones(2, dtype=dtype), torch.ones_like(parameter, dtype=dtype, requires_grad=False)
    steps = entry.steps
    if steps is not None and not (math.isfinite(steps) and steps >= 1):
        raise MatchError(f"parameter {entry.name!r} has a step count of {steps}: it has not been trained yet")
    try:
        stored = _stored(entry, dtype)
        if stored.shape != parameter.shape:
            raise MatchError(
                f"the second moment of parameter {entry.name!r} has shape {tuple(stored.shape)}, the parameter "
                f"{tuple(parameter.shape)}: the state belongs to another model, or its names are in another order"
            )
        ends = extremes(stored) if stored.numel() else torch.zeros(2, dtype=dtype)
        if reader.statistic == "sum" and stored.numel():
            ends -= reader.first(entry.group)
        return ends, _corrected(stored, entry)
    except KeyError as missing:
        raise MatchError(
            f"reader {reader.name!r} finds no {missing} for parameter {entry.name!r}; its state has "
            f"{sorted(map(str, entry.state))}. Name the optimiser that wrote it: optimizer='adamw', 'adagrad', … of a "
            "file, reader= of a live one"
        ) from None


@damage_told()
def read_rotated(entry: Entry) -> tuple[Tensor, Rotation] | None:
    """v̂ of one parameter in the space of its eigenbases, and these; None where it is not rotated.

    Entry (i, j) of v̂, of the parameter's shape, belongs to left eigenvector i and right eigenvector j.
    """
    if entry.reader.factors is None:
        return None
    stored, bases = entry.reader.factors(entry.state, entry.group, entry.parameter.shape)
    rotation = rotation_of(bases, stored.shape)
    if rotation is None:
        return None
    return _corrected(stored.detach().clone().reshape(entry.parameter.shape), entry), rotation


def _stored(entry: Entry, dtype: torch.dtype) -> Tensor:
    """The stored statistic s, one entry a weight, as a copy; a KeyError names the entry that the state lacks."""
    reader, state, group, shape = entry.reader, entry.state, entry.group, entry.parameter.shape
    if reader.read is not None:
        return reader.read(state, group, shape).to(dtype, copy=True)
    if reader.factors is not None:
        return weight_diagonal(*reader.factors(state, group, shape)).reshape(shape).to(dtype, copy=True)
    if reader.statistic == "factored" and state.get("variance") is None:
        # Adafactor: R C / mean(R) for matrices, the plain average under the key for vectors.
        rows, columns = state["row_var"].detach().to(dtype), state["col_var"].detach().to(dtype)
        scale = rows.mean(dim=-2, keepdim=True).clamp_(min=torch.finfo(dtype).tiny)
        return (rows / scale) @ columns  # type: ignore[no-any-return]
    if reader.statistic == "quantised":
        return _dequantised(opened(state), reader.key, dtype)
    key = reader.maximum_key if reader.maximum_key and group.get("amsgrad") else reader.key
    stored: Tensor = state[key]
    if not isinstance(stored, Tensor):
        raise MatchError(f"{key!r} of parameter {entry.name!r} is {stored!r}, which is not read from files")
    # torchao's tensors of few bits.
    if type(stored).dequantize is not Tensor.dequantize:
        stored = stored.dequantize()
    return (stored.to_dense() if stored.is_sparse else stored).detach().to(dtype, copy=True)


def _dequantised(state: State, key: str, dtype: torch.dtype) -> Tensor:
    """Block-wise 8-bit state: code book entry × the block's largest absolute value; small tensors stay 32-bit."""
    stored: Tensor = state[key]
    if stored.dtype != torch.uint8:
        return stored.detach().to(dtype, copy=True)
    suffix = key.removeprefix("state")
    codes, largest = state[f"qmap{suffix}"], state[f"absmax{suffix}"]
    # Two lengths fit only a tensor of a single block, for which they say the same.
    lengths = [length for length in _BLOCK_LENGTHS if -(-stored.numel() // length) == largest.numel()]
    if not lengths:
        raise MatchError(f"{key!r} has {stored.numel()} entries in {largest.numel()} blocks, not of {_BLOCK_LENGTHS}")
    scales = largest.to(dtype).repeat_interleave(lengths[0])[: stored.numel()]
    values: Tensor = codes.to(dtype)[stored.flatten().long()]
    return values.mul_(scales).view(stored.shape)


def _corrected(stored: Tensor, entry: Entry) -> Tensor:
    reader, group, steps = entry.reader, entry.group, entry.steps
    if reader.statistic == "root":
        return stored.square_()
    if reader.statistic == "sum":
        if steps is None:
            raise KeyError("step")
        return stored.sub_(reader.first(group)).div_(steps)
    remaining = 1.0
    if reader.bias_correction:
        beta = reader.beta(group)
        if beta is None or steps is None:
            raise KeyError("step" if steps is None or reader.decay is None else reader.decay[0])
        # 1 − βᵗ without cancellation for β near 1.
        remaining = -math.expm1(steps * math.log(beta)) if beta > 0 else 1.0
        start = reader.first(group)
        if start:
            stored = stored.sub_(start * (1.0 - remaining)).clamp_(min=0.0)
        stored = stored.div_(remaining)
    if reader.centre_key is not None and group.get("centered"):
        centre = entry.state[reader.centre_key].detach().to(stored) / remaining
        # Rounding can leave a variance slightly below zero.
        stored = stored.addcmul_(centre, centre, value=-1.0).clamp_(min=0.0)
    return stored


@dataclass(frozen=True)
class Origin:
    """The optimisers behind second moments.

    `steps` are the fewest and the most gradients behind a parameter, `beta` the smallest β₂; None where unknown.
    `recorded` says that the gradients are a `Recorder`'s, `tracked` in words what `track` kept, if it did.
    """

    optimizers: tuple[str, ...] = ()
    steps: tuple[float, float] | None = None
    beta: float | None = None
    recorded: bool = False
    tracked: str = ""

    @property
    def fewest(self) -> float | None:
        """The fewest gradients behind a parameter, where that is known."""
        return None if self.steps is None else self.steps[0]

    def header(self) -> dict[str, Any]:
        """Plain data, for the header of a file."""
        steps = None if self.steps is None else list(self.steps)
        header = {"optimizer": list(self.optimizers), "steps": steps, "beta2": self.beta, "recorded": self.recorded}
        return {**header, "tracked": self.tracked} if self.tracked else header

    @classmethod
    def of_header(cls, header: Mapping[str, Any]) -> Origin:
        """The origin in a file's header; older files have a part of it."""
        steps, tracked = header.get("steps"), header.get("tracked") or ""
        return cls(
            tuple(header.get("optimizer") or ()),
            None if steps is None else (float(steps[0]), float(steps[-1])),
            header.get("beta2"),
            bool(header.get("recorded")),
            tracked if isinstance(tracked, str) else "",
        )


UNKNOWN = Origin()


@damage_told()
def origin_of(match: Match) -> Origin:
    """The origin of matched states."""
    steps = [count for entry in match.entries if (count := entry.steps) is not None]
    betas = [beta for entry in match.entries if 0 < (beta := entry.reader.beta(entry.group) or 0.0) < 1]
    recorded = any(RECORDED_MARK in entry.group for entry in match.entries)
    ends = (min(steps), max(steps)) if steps else None
    tracked, words = [entry for entry in match.entries if entry.reader is TRACKED], ""
    if tracked:
        counts = [entry.steps or 0.0 for entry in tracked]
        few, many, batch_size = min(counts), max(counts), batch_size_or_tracked(match, None)
        every = max(int(entry.group.get(tracking.EVERY, 1)) for entry in tracked)
        words = f"{len(tracked)} parameter{'s' * (len(tracked) != 1)}, by {few:,g}{f' to {many:,g}' * (few != many)}"
        words += " gradients, one a step" if every == 1 else f" gradients, at least one in {every:,} steps"
        words += "" if batch_size is None else f": {many * batch_size:,g} examples"
    return Origin(match.optimizers, ends, min(betas, default=None), recorded, words)


@damage_told()
def batch_size_or_tracked(match: Match, given: int | None) -> int | None:
    """B as it is given, or else as `track` was told it."""
    groups = [entry.group for entry in match.entries if entry.reader is TRACKED]
    sizes = {int(group[tracking.EXAMPLES]) for group in groups if tracking.EXAMPLES in group}
    return sizes.pop() if given is None and len(sizes) == 1 else given


def warn_of_memory(origin: Origin, label: str) -> None:
    """Warn of second moments with a short memory, or of a training that is shorter than their memory."""
    beta, steps = origin.beta, origin.fewest
    if beta is not None and beta <= 0.95:
        warn(
            f"{label} was trained with β₂ = {beta:g}: its second moment is that of the last {1 / (1 - beta):.0f} steps"
        )
    if beta is not None and steps is not None and steps * (1 - beta) < 1 - 1e-9:
        warn(f"{label} was trained for {steps:g} steps, less than the memory 1/(1−β₂) of its second moment")


def warn_of_few(origin: Origin, what: str) -> None:
    """Warn of fewer gradients than any curvature can be known by."""
    if origin.fewest is not None and origin.fewest < 20:
        more = "record 100 or more, keep=100" if origin.recorded else "train longer"
        warn(f"{what} has {origin.fewest:g} gradients behind it, too few to know the curvature by: {more}")
