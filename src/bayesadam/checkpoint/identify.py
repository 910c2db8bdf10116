"""Which optimiser wrote a state: by its keys, against the registry of readers."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from bayesadam.curvature.reader import Group, State, StateReader, has_tensors, outline, parameter_shape
from bayesadam.curvature.registry import registered
from bayesadam.curvature.rotated import RotatedReader, unknown_bases
from bayesadam.errors import StateError

# Kept by optimisers that have no second moment per weight.
_WITHOUT = {
    "momentum_buffer": "SGD with momentum, LARS or Muon",
    "exp_avg": "Lion or NovoGrad",
    "prev": "Rprop",
    "ax": "ASGD",
}
# All of a record that changes v̂.
_reading = attrgetter(
    *("statistic", "key", "decay", "bias_correction", "start", "step", "maximum_key", "centre_key", "read")
)
_SGD_ADVICE = (
    "For SGD the paper's posterior is isotropic, V = 1: ask for it by name with optimizer='ogd', or train with Adam, "
    "AdamW, RMSprop or Adagrad"
)


def identify_reader(optimizer: Mapping[str, Any], recorded: str | None = None) -> StateReader:
    """The reader for a saved state; optimisers that are read alike, Adam and AdamW, count as one.

    Args:
        optimizer: the state in torch's layout.
        recorded: the class name the trainer wrote down, which decides where several would do.
    """
    states: Mapping[Any, State] = optimizer["state"]
    groups = {key: group for group in optimizer["param_groups"] for key in group["params"]}
    held = [(outline(state), groups[key]) for key, state in states.items() if key in groups and has_tensors(state)]
    if not held:
        raise StateError(
            f"the optimiser's state is empty: it has not taken a step, or is SGD without momentum. {_SGD_ADVICE}"
        )
    fitting = [r for r in registered() if all(_fits(r, state, group) for state, group in held)]
    fitting = [r for r in fitting if r.mark is not None] or fitting
    named = [r for r in fitting if recorded is not None and _is_called(r, recorded)]
    chosen = named or _flagged(fitting, held[0][1])
    if len({_reading(r) for r in chosen}) == 1:
        # torch's AdamW says so by a flag in Adam's group.
        decoupled = [r for r in fitting if _reading(r) == _reading(chosen[0]) and not r.coupled_decay]
        flagged = not named and bool(held[0][1].get(chosen[0].decoupled_flag or ""))
        return decoupled[0] if flagged and decoupled else chosen[0]
    keys = sorted({str(key) for state, _ in held for key in state})
    if chosen:
        raise StateError(
            f"the optimiser's state, with keys {keys}, may be that of {' or '.join(r.name for r in chosen)}, which are "
            f"read differently: say which with optimizer={chosen[0].name!r}"
        )
    guess = next((f" ({who} keep such a state)" for key, who in _WITHOUT.items() if key in keys), "")
    raise StateError(
        f"the optimiser's state has keys {keys}{guess}, and no reader finds a second moment per weight in it: "
        "name the optimiser with optimizer=, or describe it with bayesadam.curvature.register(StateReader(...)). "
        f"{_SGD_ADVICE}"
    )


def read_alike(reader: StateReader) -> tuple[str, ...]:
    """The names of the other readers that do the very same, so that a file cannot tell them apart."""
    return tuple(r.name for r in registered() if r.name != reader.name and _reading(r) == _reading(reader))


def shape_behind(reader: StateReader, state: State) -> torch.Size | None:
    """The shape of the parameter behind a state, by what its reader reads; None where nothing has it."""
    # What a basis is found from has the length of a side.
    sides = reader.bases if isinstance(reader, RotatedReader) else ()
    key = "variance" if reader.statistic == "factored" else reader.key
    return parameter_shape(state, [k for k in (*key.split(" or "), "momentum_buffer") if k not in sides])


def _fits(reader: StateReader, state: State, group: Group) -> bool:
    """Whether a state has all that the record needs, where the record says."""
    if reader.statistic in ("identity", "none"):
        return False
    if reader.statistic == "factored":
        return state.get("variance") is not None or ("row_var" in state and "col_var" in state)
    stored = next((state[key] for key in reader.key.split(" or ") if isinstance(state.get(key), Tensor)), None)
    if stored is None or reader.mark not in (None, *group) or unknown_bases(reader, state, stored.shape):
        return False
    # NovoGrad's is one number a layer.
    momentum = state.get("exp_avg")
    if isinstance(momentum, Tensor) and momentum.shape != stored.shape:
        return False
    counted = reader.bias_correction or reader.statistic == "sum"
    if counted and (group if reader.step == "group" else state).get("step") is None:
        return False
    if isinstance(reader.start, str) and reader.start not in group:
        return False
    return reader.decay is None or _has_beta(group, *reader.decay)


def _has_beta(group: Group, entry: str, index: int | None) -> bool:
    """β is where the record says, and last: Adan has three, of which Adam's would be the wrong one."""
    value = group.get(entry)
    return value is not None and (index is None or len(value) == index + 1)


def _flagged(readers: list[StateReader], group: Group) -> list[StateReader]:
    """Those whose own entry is in the group, where there are such; else those that expect none."""
    own = [r for r in readers if r.decoupled_flag is not None and r.decoupled_flag in group]
    return own or [r for r in readers if r.decoupled_flag is None] or readers


def _is_called(reader: StateReader, name: str) -> bool:
    short = name.rpartition(".")[2].lower()
    return short == reader.name or short in {known.rpartition(".")[2].lower() for known in reader.class_names()}
