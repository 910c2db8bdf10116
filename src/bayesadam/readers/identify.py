"""Whose a saved state is: a file names no class, so the optimiser is told by the entries of its state and groups."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import torch
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.readers import tracking
from bayesadam.readers.registry import (
    ADVICE,
    READERS,
    TRACKED,
    Group,
    State,
    StateDict,
    StateReader,
    keeps_none,
    registered,
)

# All fields of a record that change v̂.
_reading = attrgetter(
    *("statistic", "key", "decay", "bias_correction", "start", "step", "counter", "idle_steps"),
    *("maximum_key", "centre_key", "read", "factors"),
)


def identify_reader(optimizer: StateDict) -> StateReader:
    """The reader for a saved state; optimisers that are read alike, as RAdam is as Adam, count as one."""
    groups = {key: group for group in optimizer["param_groups"] for key in group["params"]}
    states = {key: state for key, state in optimizer["state"].items() if key in groups and has_tensors(state)}
    is_tracked = bool(states) and all(tracking.is_tracked(outline(state)) for state in states.values())
    # Of what Muon or a projection trains there is nothing to read.
    states = {key: state for key, state in states.items() if not keeps_none(outline(state), groups[key])}
    outlines = [(outline(state), groups[key]) for key, state in states.items()]
    readers = [reader for reader in registered() if reader is not TRACKED]
    fitting = [r for r in readers if outlines and all(_fits(r, *pair) for pair in outlines)]
    fitting = [r for r in fitting if r.mark is not None] or fitting
    # Readers whose own flag is in the group, where there are such; else those that expect none.
    flagged = [r for r in fitting if r.decoupled_flag is not None and r.decoupled_flag in outlines[0][1]]
    chosen = flagged or [r for r in fitting if r.decoupled_flag is None] or fitting
    if len({_reading(r) for r in chosen}) == 1:
        alike = [r for r in fitting if _reading(r) == _reading(chosen[0])]
        reader = _writer(alike, [group for _, group in outlines])
        if all(reader.steps(state, groups[key]) == 0 for key, state in states.items()):
            raise MatchError(
                f"the optimiser, {reader.name}, has not taken a step yet: train first, then save its state"
            )
        return reader
    if is_tracked and not chosen:
        return TRACKED
    keys = sorted({key for state, _ in outlines for key in state if isinstance(key, str)})
    if chosen:
        raise MatchError(
            f"the optimiser's state, with keys {keys}, may be that of {' or '.join(r.name for r in chosen)}, which are "
            f"read differently: say which with optimizer={chosen[0].name!r}"
        )
    # The later is the more particular: LARS has all that SGD has.
    without = [r for r in reversed(registered()) if r.statistic == "none"]
    used = [group for _, group in outlines] or optimizer["param_groups"]
    marked = [r.name for r in without if r.mark is not None and used and all(r.mark in group for group in used)]
    if marked:
        why = f" is {marked[0]}, which keeps no second moment per weight: its state has keys {keys}"
    elif not outlines:
        why = "'s state is empty: it has not taken a step yet: train first, then save it; or it is SGD without momentum"
    else:
        why = (
            f"'s state has keys {keys}, and no reader finds a second moment per weight in it: name the optimiser with "
            "optimizer=, or describe it with bayesadam.readers.register(StateReader(...))"
        )
    raise MatchError(f"the optimiser{why}; {ADVICE}")


def _fits(reader: StateReader, state: State, group: Group) -> bool:
    """Whether a state and its group have all entries that the record needs."""
    if reader.statistic in ("identity", "none"):
        return False
    if reader.statistic == "factored":
        return state.get("variance") is not None or ("row_var" in state and "col_var" in state)
    keys, momentum = reader.key.split(" or "), state.get("exp_avg")
    stored = next((state[key] for key in keys if isinstance(state.get(key), Tensor)), None)
    if stored is None or unknown_bases(reader, state, stored.shape):
        return False
    others = [str(key) for key, value in state.items() if isinstance(value, Tensor) and value.shape == stored.shape]
    # The mark of a reader that was registered is known to be its own; of ours it may be shared with strangers.
    own_mark = bool(reader.mark) and reader not in READERS
    described = own_mark or reader.read or reader.factors or reader.mean or not stored.dim()
    counter = (group if reader.step == "group" else state).get(reader.counter)
    contradictions = (
        reader.mark not in (None, *group),
        # NovoGrad's is one number a layer.
        isinstance(momentum, Tensor) and momentum.shape != stored.shape,
        # What else is kept may be part of what is squared: MARS keeps the last gradient, Prodigy a distance.
        not described and not all(key in keys or _HARMLESS.fullmatch(key) for key in others),
        counter is None and (reader.bias_correction or reader.statistic == "sum"),
        isinstance(reader.start, str) and reader.start not in group,
    )
    if any(contradictions):
        return False
    if reader.decay is None:
        return True
    value, index = group.get(reader.decay[0]), reader.decay[1]
    if index is None:
        return value is not None
    # β is the last unless a mark says whose they are: Adan has three, of which Adam's would be the wrong one.
    count = len(value) if isinstance(value, list | tuple) else 0
    return count == index + 1 or (reader.mark is not None and count > index)


def _writer(alike: list[StateReader], groups: Sequence[Group]) -> StateReader:
    """Of readers that compute the same, the one that the groups' flag names: torch writes it since 2.7."""
    adam, adamw = (next((reader for reader in alike if reader.name == name), None) for name in ("adam", "adamw"))
    if adam is None or adamw is None:
        return alike[0]
    flags = {group.get("decoupled_weight_decay") for group in groups}
    if flags <= {True, False}:
        return adamw if flags == {True} else adam
    note = (
        "the file does not say which. v is read alike, and without weight decay they are the same. With it, Adam adds "
        "the decay to the gradients before they are squared, and the posterior is too narrow. Say which with "
        "optimizer='adam' or 'adamw' (--optimizer)."
    )
    return replace(adam, name="adam or adamw", classes=(), coupled_decay=False, decoupled_flag=None, note=note)


# Entries of a weight's shape beside a plain average of squares.
_HARMLESS = re.compile(
    r"step|(max_)?exp_avg(_sq|_var|_fast)?|exp_inf|sum|square_avg|grad_avg|acc_delta|(state|qmap|absmax)\d|"
    r"mu_product|variance|tracked_.*|"
    r".*(momentum|master|param|fp32|kahan|comp|slow|buffer|shift).*",
    re.I,
)
_QUANT_STATE = "__bnb_optimizer_quant_state__"
# Entries that have the parameter's own shape, in every optimiser that has them.
_SHAPED_KEYS = (
    *("exp_avg", "exp_avg_sq", "rotated_exp_avg_sq", "square_avg", "sum", "exp_inf", "exp_avg_var"),
    *("variance", "state2", "state1", "momentum_buffer", "m", "z"),
)
# The names of bases in optimisers' states, and of the statistics that these are the eigenvectors of.
_BASIS_NAMES = re.compile(
    r"((q|gg|l|r)(_?[lr])?|.*(basis|bases|eigen|ortho|proj|precond_|pre_cond_).*)([._]?\d+)?", re.I
)


def opened(state: State) -> State:
    """The state with the entries that bitsandbytes' `state_dict()` nests, for FSDP, at the top level as when live."""
    hidden = state.get(_QUANT_STATE)
    return state if hidden is None else {**state, **hidden}


def outline(state: State) -> State:
    """The state without reading tensors that are still on the disk: those appear as shape and type."""
    return opened(getattr(state, "outline", state))


def has_tensors(state: object) -> bool:
    """Whether a state holds anything but a counter."""
    return isinstance(state, Mapping) and any(
        (isinstance(value, Tensor) and key != "step") or has_tensors(value) for key, value in outline(state).items()
    )


def parameter_shape(state: State, reader: StateReader | None = None) -> torch.Size | None:
    """The shape of the parameter behind a state, where a tensor in it has that shape."""
    state = outline(state)
    # GaLore's have fewer rows or columns.
    if "projector" in state:
        return None
    # What a basis is found from has the length of a side.
    stored = [key for key in reader.key.split(" or ") if key not in reader.bases] if reader is not None else []
    for key in (*stored, *_SHAPED_KEYS):
        if isinstance(state.get(key), Tensor):
            return state[key].shape  # type: ignore[no-any-return]
    if isinstance(state.get("row_var"), Tensor) and isinstance(state.get("col_var"), Tensor):
        return torch.Size((*state["row_var"].shape[:-1], state["col_var"].shape[-1]))
    return None


def unknown_bases(reader: StateReader, state: State, shape: torch.Size) -> list[str]:
    """The entries of a state that look like bases and that its reader knows nothing of.

    A second moment stored with bases is in their coordinates: read as the weights' own, every number in it is wrong.
    A `read` function is trusted.
    """
    if reader.statistic in ("identity", "none") or reader.read is not None:
        return []
    bases = []
    for key, value in outline(state).items():
        if not isinstance(key, str) or key in reader.bases:
            continue
        named = _BASIS_NAMES.fullmatch(key) is not None
        if isinstance(value, list | tuple):
            named = named or any(isinstance(inner, Tensor) and inner.dim() > 1 for inner in value)
        elif isinstance(value, Tensor):
            square = value.dim() == 2 and value.shape[0] == value.shape[1]
            named = square and (named or (len(value) > 1 and value.shape != shape))
        # A projector is an object.
        if named and not (value is None or isinstance(value, int | float | str)):
            bases.append(key)
    return bases
