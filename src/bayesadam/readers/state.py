"""How one optimiser keeps its second moment, as a record, and the arithmetic that turns it into v̂."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayesadam.errors import StateError

State = Mapping[str, Any]
Group = Mapping[str, Any]
Statistic = Literal["average", "sum", "root", "factored", "quantised", "identity", "none"]

# bitsandbytes has used these block lengths for its optimiser states.
_BLOCK_LENGTHS = (256, 2048)
_QUANT_STATE = "__bnb_optimizer_quant_state__"
# Entries that have the parameter's own shape, in every optimiser that has them.
_SHAPED_KEYS = (
    *("exp_avg", "exp_avg_sq", "rotated_exp_avg_sq", "square_avg", "sum", "exp_inf", "exp_avg_var"),
    *("exp_hessian_diag_sq", "variance", "state2", "state1"),
)


@dataclass(frozen=True)
class StateReader:
    """Where an optimiser keeps V_t and what must be done to it; the paper's section 2, one record an optimiser.

    | `statistic` | stored s                          | v̂                                   |
    |-------------|-----------------------------------|--------------------------------------|
    | average     | s ← β s + (1−β) g², from s₀       | (s − βᵗ s₀) / (1 − βᵗ)               |
    | sum         | s ← s + g², from s₀               | (s − s₀) / t                         |
    | root        | s ← max(β s, abs(g))              | s²                                   |
    | factored    | rows R and columns C of g²        | R C / mean(R)                        |
    | quantised   | an average, in 8-bit blocks       | dequantised, then as an average      |
    | identity    | nothing                           | 1 (the paper's OGD row)              |
    | none        | nothing usable                    | refused, with `advice`               |

    Attributes:
        classes: the optimiser classes it reads, as types or as `"package.module.Class"`; subclasses are included.
        key: the entry of a parameter's state that holds s; `"a or b"` where it has one of two names.
        decay: the entry of the parameter group that is β, with an index where it is a tuple.
        bias_correction: whether to divide by 1 − βᵗ (the average starts from a constant).
        start: s₀, as a number or as the name of an entry of the parameter group.
        step: whether t is stored per parameter (`"state"`) or per group (`"group"`).
        coupled_decay: whether weight decay is added to the gradient before it is squared, and so leaks into v.
        decoupled_flag: an entry of the group that, where true, overrides `coupled_decay`.
        maximum_key: the running maximum that replaces `key` where the group says `amsgrad`.
        centre_key: the average gradient that is squared and subtracted where the group says `centered`.
        mark: an entry of the group that only this optimiser has, which identifies its saved states.
        bases: entries of the state that are bases, or that bases are computed from; see `RotatedReader`.
        read: a function (state, group, parameter shape) → s, for layouts no field describes.
        advice: what a user of an optimiser with no second moment can do instead.
    """

    name: str
    classes: tuple[str | type, ...]
    statistic: Statistic = "average"
    key: str = ""
    decay: tuple[str, int | None] | None = None
    bias_correction: bool = False
    start: float | str = 0.0
    step: Literal["state", "group"] = "state"
    coupled_decay: bool = False
    decoupled_flag: str | None = None
    maximum_key: str | None = None
    centre_key: str | None = None
    mark: str | None = None
    bases: tuple[str, ...] = ()
    read: Callable[[State, Group, torch.Size], Tensor] | None = None
    advice: str = ""
    note: str = ""

    def class_names(self) -> tuple[str, ...]:
        """The qualified names of `classes`."""
        return tuple(c if isinstance(c, str) else f"{c.__module__}.{c.__qualname__}" for c in self.classes)

    def beta(self, group: Group) -> float | None:
        """β of the moving average, or None where there is none."""
        entry, index = self.decay or ("", None)
        value = group.get(entry)
        if value is None:
            return None
        if index is not None and (not isinstance(value, list | tuple) or len(value) <= index):
            raise StateError(f"the group's {entry!r} is {value!r}, and entry {index} of it is needed")
        return as_number(value if index is None else value[index], entry)

    def steps(self, state: State, group: Group) -> float | None:
        """t, the number of steps behind the state, or None where the optimiser does not count."""
        value = (group if self.step == "group" else state).get("step")
        return None if value is None else as_number(value, "step")

    def first(self, group: Group) -> float:
        """s₀."""
        return as_number(group[self.start], self.start) if isinstance(self.start, str) else self.start

    def couples_decay(self, group: Group) -> bool:
        """Whether this group's weight decay is part of the squared gradient."""
        decoupled = self.decoupled_flag is not None and bool(group.get(self.decoupled_flag, False))
        decay = as_number(group.get("weight_decay") or 0.0, "weight_decay")
        return self.coupled_decay and not decoupled and decay != 0.0


def as_number(value: Any, entry: str) -> float:
    """The number under an entry of a saved state or group."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise StateError(
            f"the optimiser's {entry!r} is no number but {type(value).__name__}: the state is damaged, or of an "
            "optimiser that is not known"
        ) from None


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of a posterior: float32, or float64 for float64 parameters."""
    return torch.promote_types(dtype, torch.float32)


def stored_statistic(reader: StateReader, state: State, group: Group, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The stored statistic s, one entry a weight, as a copy in `dtype`.

    Raises:
        KeyError: the state lacks an entry; its argument is that entry's name.
    """
    if reader.read is not None:
        return reader.read(state, group, shape).to(dtype, copy=True)
    if reader.statistic == "factored" and state.get("variance") is None:
        # Adafactor: R C / mean(R) for matrices, the plain average for vectors.
        rows, columns = state["row_var"].detach().to(dtype), state["col_var"].detach().to(dtype)
        scale = rows.mean(dim=-2, keepdim=True).clamp_(min=torch.finfo(dtype).tiny)
        return (rows / scale) @ columns  # type: ignore[no-any-return]
    if reader.statistic == "quantised":
        return _dequantised(opened(state), reader.key, dtype)
    key = "variance" if reader.statistic == "factored" else reader.key
    if reader.maximum_key is not None and group.get("amsgrad"):
        key = reader.maximum_key
    stored: Tensor = state[key]
    return (stored.to_dense() if stored.is_sparse else stored).detach().to(dtype, copy=True)


def _dequantised(state: State, key: str, dtype: torch.dtype) -> Tensor:
    """Block-wise 8-bit state: code book entry × the block's largest absolute value; small tensors stay 32-bit."""
    stored: Tensor = state[key]
    if stored.dtype != torch.uint8:
        return stored.detach().to(dtype, copy=True)
    suffix = key.removeprefix("state")
    if f"absmax{suffix}" not in state and f"max{suffix}" in state:
        raise StateError(
            f"{key!r} is 8-bit without blocks (bitsandbytes with block_wise=False), a layout that is not read: "
            "train with block_wise=True, or with a 32-bit optimiser"
        )
    codes, largest = state[f"qmap{suffix}"], state[f"absmax{suffix}"]
    lengths = [length for length in _BLOCK_LENGTHS if -(-stored.numel() // length) == largest.numel()]
    # Two lengths fit only a tensor of a single block, for which they say the same.
    if not lengths:
        raise StateError(
            f"{key!r} has {stored.numel()} entries in {largest.numel()} blocks, which fits none of the known block "
            f"lengths {_BLOCK_LENGTHS}"
        )
    scales = largest.to(dtype).repeat_interleave(lengths[0])[: stored.numel()]
    values: Tensor = codes.to(dtype)[stored.flatten().long()]
    return values.mul_(scales).view(stored.shape)


def second_moment(
    stored: Tensor, reader: StateReader, state: State, group: Group, *, bias_correction: bool = True
) -> Tensor:
    """v̂ from the stored statistic, in place: the table in `StateReader`; averages stay as stored without correction."""
    steps = reader.steps(state, group)
    if reader.statistic == "root":
        return stored.square_()
    if reader.statistic == "sum":
        if steps is None:
            raise KeyError("step")
        return stored.sub_(reader.first(group)).div_(steps)
    remaining = 1.0
    if bias_correction and reader.bias_correction:
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
        centre = state[reader.centre_key].detach().to(stored) / remaining
        # Rounding can leave a variance slightly below zero.
        stored = stored.addcmul_(centre, centre, value=-1.0).clamp_(min=0.0)
    return stored


def opened(state: State) -> State:
    """The state with the entries that bitsandbytes' `state_dict()` nests, for FSDP, at the top level as when live."""
    hidden = state.get(_QUANT_STATE)
    return state if hidden is None else {**state, **hidden}


def outline(state: State) -> State:
    """The state without reading tensors that are still on the disk: those appear as shape and type."""
    return opened(getattr(state, "outline", state))


def has_tensors(state: Any) -> bool:
    """Whether a state holds anything but a counter."""
    return isinstance(state, Mapping) and any(
        (isinstance(value, Tensor) and key != "step") or has_tensors(value) for key, value in outline(state).items()
    )


def parameter_shape(state: State, reader: StateReader | None = None) -> torch.Size | None:
    """The shape of the parameter behind a state, where a tensor in it has that shape."""
    state = outline(state)
    # What a basis is found from has the length of a side.
    own = [key for key in reader.key.split(" or ") if key not in reader.bases] if reader is not None else []
    for key in (*own, *_SHAPED_KEYS, "momentum_buffer"):
        if isinstance(state.get(key), Tensor):
            return state[key].shape  # type: ignore[no-any-return]
    if isinstance(state.get("row_var"), Tensor) and isinstance(state.get("col_var"), Tensor):
        return torch.Size((*state["row_var"].shape[:-1], state["col_var"].shape[-1]))
    return None
