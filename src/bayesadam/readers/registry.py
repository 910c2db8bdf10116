"""One record an optimiser: where its second moment is. `register` adds a user's own.

A live optimiser is identified by its class, a saved state by its keys.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace as changed
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bayesadam.errors import SettingError, StateError
from bayesadam.readers.rotated import ROTATED_READERS, unknown_bases
from bayesadam.readers.state import Group, State, StateReader, has_tensors, outline

_BETA2 = ("betas", 1)
_TRAIN_WITH = "train with Adam, AdamW, RMSprop or Adagrad for a posterior"


def _average(name: str, *classes: str, key: str = "exp_avg_sq", **fields: Any) -> StateReader:
    """A moving average of squared gradients from 0 that needs its bias corrected."""
    return StateReader(name, classes, key=key, **{"decay": _BETA2, "bias_correction": True, **fields})


def _adam(name: str, *classes: str, **fields: Any) -> StateReader:
    return _average(name, *classes, maximum_key="max_exp_avg_sq", **fields)


def _eight_bit(name: str, stem: str, module: str) -> StateReader:
    """bitsandbytes' family of one Adam: plain or paged, with an 8-bit or a 32-bit state."""
    return _average(
        name,
        *(f"{module}.{paged}{stem}{bits}" for paged in ("", "Paged") for bits in ("", "8bit", "32bit")),
        statistic="quantised",
        key="state2",
        note="8-bit blocks: about two digits of v, and small entries of a block round to zero.",
    )


def _none(name: str, *classes: str, advice: str = _TRAIN_WITH, mark: str | None = None) -> StateReader:
    """An optimiser without a second moment per weight."""
    return StateReader(name, classes, statistic="none", advice=advice, mark=mark)


_COUPLED: dict[str, Any] = {"coupled_decay": True, "decoupled_flag": "decoupled_weight_decay"}
_TIMM: dict[str, Any] = {"coupled_decay": True, "decoupled_flag": "decoupled_decay"}
_RMS: dict[str, Any] = {"key": "square_avg", "decay": ("alpha", None), "centre_key": "grad_avg"}

READERS: tuple[StateReader, ...] = (
    _adam("adam", "torch.optim.adam.Adam", **_COUPLED),
    _adam("adamw", "torch.optim.adamw.AdamW", "timm.optim.adamw.AdamWLegacy"),
    _adam("nadam", "torch.optim.nadam.NAdam", **_COUPLED, mark="momentum_decay"),
    _adam("radam", "torch.optim.radam.RAdam", **_COUPLED),
    _adam("sparseadam", "torch.optim.sparse_adam.SparseAdam"),
    *ROTATED_READERS,
    StateReader(
        "adagrad",
        ("torch.optim.adagrad.Adagrad",),
        statistic="sum",
        key="sum",
        start="initial_accumulator_value",
        coupled_decay=True,
    ),
    _average(
        "rmsprop",
        "torch.optim.rmsprop.RMSprop",
        **_RMS,
        coupled_decay=True,
        note="RMSprop's own update leaves the bias towards zero in; the posterior divides it out, or early weights "
        "would look flat.",
    ),
    _average("adadelta", "torch.optim.adadelta.Adadelta", key="square_avg", decay=("rho", None), coupled_decay=True),
    StateReader(
        "adamax",
        ("torch.optim.adamax.Adamax",),
        statistic="root",
        key="exp_inf",
        decay=_BETA2,
        coupled_decay=True,
        note="A running maximum of |g| is an upper estimate: the posterior is narrower than Adam's.",
    ),
    StateReader(
        "adafactor",
        ("torch.optim.Adafactor", "torch.optim._adafactor.Adafactor"),
        statistic="factored",
        key="row_var, col_var or variance",
        note="Rank-one per matrix. Its average starts from the first gradient, so it has no bias to correct.",
    ),
    _average(
        "lamb", "timm.optim.lamb.Lamb", step="group", note="Decay follows the moments; the gradient norm is clipped."
    ),
    _average(
        "adan", "timm.optim.adan.Adan", decay=("betas", 2), step="group", note="Averages (g + β₂ Δg)², after Nesterov."
    ),
    _average(
        "rmsproptf",
        "timm.optim.rmsprop_tf.RMSpropTF",
        "stable_baselines3.common.sb2_compat.rmsprop_tf_like.RMSpropTFLike",
        **_RMS,
        **_TIMM,
        start=1.0,
        note="Its average starts at one; the start is subtracted, which leaves few digits before 10/(1−α) steps.",
    ),
    _average(
        "adabelief",
        "timm.optim.adabelief.AdaBelief",
        key="exp_avg_var",
        maximum_key="max_exp_avg_var",
        **_TIMM,
        note="A centred second moment, to which AdaBelief adds eps at every step.",
    ),
    _average(
        "adahessian",
        "timm.optim.adahessian.Adahessian",
        key="exp_hessian_diag_sq",
        note="The square of a true curvature: power=0.5 is already the Laplace-consistent choice.",
    ),
    _eight_bit("adam8bit", "Adam", "bitsandbytes.optim.adam"),
    _eight_bit("adamw8bit", "AdamW", "bitsandbytes.optim.adamw"),
    StateReader(
        "ogd", (), statistic="identity", note="V = 1 for every weight: the posterior is isotropic and knows no data."
    ),
    _none(
        "sgd",
        "torch.optim.sgd.SGD",
        advice="its V is the identity, as in the OGD row of the paper: ask for that isotropic posterior by name with "
        f"reader='ogd', or {_TRAIN_WITH}",
        mark="dampening",
    ),
    _none("rprop", "torch.optim.rprop.Rprop", mark="etas"),
    _none("asgd", "torch.optim.asgd.ASGD", mark="lambd"),
    _none("lbfgs", "torch.optim.lbfgs.LBFGS", mark="history_size"),
    _none(
        "muon",
        *("torch.optim.Muon", "torch.optim._muon.Muon", "timm.optim.muon.Muon"),
        advice="where AdamW trains the other parameters, pass both as a list: AdamW's are read, Muon's are listed in "
        f"posterior.omitted; otherwise {_TRAIN_WITH}",
        mark="ns_steps",
    ),
    _none("lion", "timm.optim.lion.Lion", "bitsandbytes.optim.lion.Lion", "bitsandbytes.optim.lion.Lion8bit"),
    _none("lars", "timm.optim.lars.Lars", mark="trust_coeff"),
    _none(
        "novograd",
        "timm.optim.nvnovograd.NvNovoGrad",
        advice=f"it has one number per layer, not per weight; {_TRAIN_WITH}",
    ),
)

_registry: dict[str, StateReader] = {reader.name: reader for reader in READERS}


def registered() -> tuple[StateReader, ...]:
    """Every known reader, the user's own included."""
    return tuple(_registry.values())


def register(reader: StateReader, *, replace: bool = False) -> StateReader:
    """Add a reader for an optimiser of your own; later readers win where two name the same class.

    >>> from bayesadam.readers import StateReader, register
    >>> mine = StateReader("mine", ("my_package.MyAdam",), key="second", decay=("betas", 1), bias_correction=True)
    >>> register(mine, replace=True).name
    'mine'
    """
    if reader.name.lower() in _registry and not replace:
        raise SettingError(
            f"a reader named {reader.name!r} exists already: choose another name, or pass replace=True to override it"
        )
    if reader.statistic not in ("identity", "none") and not reader.key and reader.read is None:
        raise SettingError(f"reader {reader.name!r} needs a `key` or a `read` function to find its second moment")
    if reader.bias_correction and reader.decay is None:
        raise SettingError(f"reader {reader.name!r} asks for a bias correction but names no `decay` (its β)")
    _registry[reader.name.lower()] = reader
    return reader


def reader_named(name: str) -> StateReader:
    """The reader called `name`, in any case: `"adam"`, `"AdamW"`."""
    if name.lower() not in _registry:
        raise SettingError(
            f"no reader is named {name!r}; known: {', '.join(sorted(_registry))}. "
            "Add your own with bayesadam.readers.register(StateReader(...))"
        )
    return _registry[name.lower()]


def reader_of(optimizer: Optimizer) -> StateReader | None:
    """The reader for a live optimiser: the nearest class of its ancestry that a record names."""
    by_class = {name: reader for reader in _registry.values() for name in reader.class_names()}
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(optimizer).__mro__)
    return next((by_class[name] for name in names if name in by_class), None)


def readers_with_key(keys: Iterable[str]) -> list[str]:
    """Names of the readers whose key is among `keys`, or of those whose bases are too: a hint for error messages."""
    present = set(keys)
    fitting = [r for r in _registry.values() if present & set(r.key.replace(" or ", ", ").split(", "))]
    return [r.name for r in [r for r in fitting if present & set(r.bases)] or fitting]


# All fields of a record that change v̂.
_reading = attrgetter(
    *("statistic", "key", "decay", "bias_correction", "start", "step", "maximum_key", "centre_key", "read")
)
_ADVICE = (
    "Train with Adam, AdamW, RMSprop or Adagrad; or choose by name, with optimizer='ogd', the isotropic posterior, "
    "V = 1, that the paper has for SGD"
)
_TRAIN_FIRST = "train first, and save the optimiser's state together with the weights"

# Entries that follow one another in this order in the groups of one optimiser alone. A user's own entries come before
# them, a scheduler's after them. Up to torch 1.11 Adam and AdamW wrote the same; from 1.12 to 2.6 AdamW had `foreach`
# before `maximize`, Adam after it; since 2.7 both are as Adam, with `decoupled_weight_decay`.
# An AdamW that 1.12 – 2.6 resumed from the file of an earlier torch has Adam's order, as torch appends what is missing.
_ORDERS = (
    ("radam", "foreach capturable decoupled_weight_decay"),
    ("adamw", "foreach maximize capturable"),
    ("adam", "amsgrad maximize foreach capturable"),
    # transformers' own AdamW.
    ("adamw", "correct_bias"),
    ("sparseadam", "eps maximize params"),
)


def identify_reader(optimizer: Mapping[str, Any], recorded: str | None = None) -> StateReader:
    """The reader for a saved state; optimisers that are read alike, Adam and AdamW, count as one, `"adam or adamw"`.

    `recorded` is the class name the trainer wrote down, which decides between several that fit.

    Raises:
        StateError: the optimiser, which is named, keeps no second moment per weight; or it has taken no step; or no
            reader knows the state, or several that differ.
    """
    states: Mapping[Any, State] = optimizer["state"]
    groups = {key: group for group in optimizer["param_groups"] for key in group["params"]}
    kept = {key: state for key, state in states.items() if key in groups and has_tensors(state)}
    held = [(outline(state), groups[key]) for key, state in kept.items()]
    if not held:
        who = _without_moment(optimizer["param_groups"], recorded)
        if who is not None:
            raise StateError(f"the optimiser is {who}, its state is empty, and it keeps no second moment. {_ADVICE}")
        adaptive = {r.decay[0] for r in registered() if r.decay} | {r.start for r in registered()}
        if any(adaptive & set(group) for group in optimizer["param_groups"]):
            raise StateError(f"the optimiser's state is empty, it has not taken a step yet: {_TRAIN_FIRST}")
        raise StateError(
            f"the optimiser's state is empty: it has not taken a step, or is SGD without momentum. {_ADVICE}"
        )
    fitting = [r for r in registered() if all(_fits(r, state, group) for state, group in held)]
    fitting = [r for r in fitting if r.mark is not None] or fitting
    named = [r for r in fitting if recorded is not None and _is_called(r, recorded)]
    # Readers whose own flag is in the group, where there are such; else those that expect none.
    flagged = [r for r in fitting if r.decoupled_flag is not None and r.decoupled_flag in held[0][1]]
    chosen = named or flagged or [r for r in fitting if r.decoupled_flag is None] or fitting
    if len({_reading(r) for r in chosen}) == 1:
        alike = [r for r in fitting if _reading(r) == _reading(chosen[0])]
        found = named[0] if named else _writer(alike, [group for _, group in held])
        if all(found.steps(state, groups[key]) == 0 for key, state in kept.items()):
            raise StateError(f"the optimiser, {found.name}, has not taken a step yet: {_TRAIN_FIRST}")
        return found
    keys = sorted({key for state, _ in held for key in state if isinstance(key, str)})
    if chosen:
        raise StateError(
            f"the optimiser's state, with keys {keys}, may be that of {' or '.join(r.name for r in chosen)}, which are "
            f"read differently: say which with optimizer={chosen[0].name!r}"
        )
    who = _without_moment([group for _, group in held], recorded) or _by_state(held)
    if who is not None:
        raise StateError(
            f"the optimiser is {who}, which keeps no second moment per weight: its state has keys {keys}. {_ADVICE}"
        )
    rows = " (Adafactor of transformers, fairseq or timm keeps such a state; only that of torch.optim is read)"
    raise StateError(
        f"the optimiser's state has keys {keys}{rows if 'exp_avg_sq_row' in keys else ''}, and no reader finds a "
        "second moment per weight in it: name the optimiser with optimizer=, or describe it with "
        f"bayesadam.readers.register(StateReader(...)). {_ADVICE}"
    )


def read_alike(reader: StateReader) -> tuple[str, ...]:
    """The names of the other readers that compute the same, which a file may not distinguish."""
    own = reader.name.split(" or ")
    return tuple(r.name for r in registered() if r.name not in own and _reading(r) == _reading(reader))


def _fits(reader: StateReader, state: State, group: Group) -> bool:
    """Whether a state and its group have all entries that the record needs."""
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
    if reader.decay is None:
        return True
    value, index = group.get(reader.decay[0]), reader.decay[1]
    # β is the last: Adan has three, of which Adam's would be the wrong one.
    return value is not None if index is None else isinstance(value, list | tuple) and len(value) == index + 1


def _writer(alike: list[StateReader], groups: list[Group]) -> StateReader:
    """Of readers that compute the same, the one that the groups name, as far as they do."""
    by_name = {r.name: r for r in alike}
    names = {name for name in map(_writer_of, groups) if name in by_name}
    if len(names) == 1:
        return by_name[names.pop()]
    if not {"adam", "adamw"} <= by_name.keys():
        return alike[0]
    decays = {float(group.get("weight_decay") or 0.0) for group in groups} - {0.0}
    note = "the file does not say which; without weight decay they are the same."
    if decays:
        hint = "; 0.01 is AdamW's default" if 0.01 in decays else ""
        note = (
            f"the file does not say which, and it has weight decay ({', '.join(f'{d:g}' for d in sorted(decays))}"
            f"{hint}). v is read alike, and the prior is N × the weight decay. But Adam adds the decay to the "
            "gradients before they are squared: part of the prior is then in v already, and the posterior too narrow. "
            "Say which with optimizer='adam' or 'adamw' (--optimizer)."
        )
    return changed(
        by_name["adam"], name="adam or adamw", classes=(), coupled_decay=False, decoupled_flag=None, note=note
    )


def _writer_of(group: Group) -> str | None:
    """Who wrote a group, by a flag or by the order of its entries; None where neither says."""
    entries = f" {' '.join(map(str, group))} "
    ordered = next((name for name, order in _ORDERS if f" {order} " in entries), None)
    if ordered != "radam" and "decoupled_weight_decay" in group:
        return "adamw" if group["decoupled_weight_decay"] else "adam"
    return ordered


def _without_moment(groups: Sequence[Group], recorded: str | None) -> str | None:
    """The name of an optimiser without a second moment, as recorded or as every group shows."""
    known = [r for r in registered() if r.statistic == "none"]
    named = [r for r in known if recorded is not None and _is_called(r, recorded)]
    marked = [r for r in known if r.mark is not None and groups and all(r.mark in group for group in groups)]
    # The later is the more particular: LARS has all that SGD has.
    found = next(iter([*named, *reversed(marked)]), None)
    if found is None:
        return None
    title = next(iter(found.class_names()), found.name).rpartition(".")[2]
    moving = "with" if any(group.get("momentum") for group in groups) else "without"
    return f"{title} {moving} momentum" if found.name == "sgd" else title


def _by_state(held: list[tuple[State, Group]]) -> str | None:
    """The same by the entries that every state has."""
    keys = [set(state) - {"step"} for state, _ in held]
    # Lion has a momentum alone, and two β without Adam's ε.
    if all(own == {"exp_avg"} for own in keys) and all("betas" in g and "eps" not in g for _, g in held):
        return "Lion"
    if all("state1" in own and "state2" not in own for own in keys):
        return "Lion, SGD or another with one moment of bitsandbytes"
    sizes = [[getattr(state.get(key), "numel", int)() for key in ("exp_avg_sq", "exp_avg")] for state, _ in held]
    if all(moment == 1 < momentum for moment, momentum in sizes):
        return "NovoGrad"
    others = {"momentum_buffer": "SGD with momentum, LARS or Muon", "prev": "Rprop", "ax": "ASGD", "old_dirs": "LBFGS"}
    return next((who for key, who in others.items() if all(key in own for own in keys)), None)


def _is_called(reader: StateReader, name: str) -> bool:
    short = name.rpartition(".")[2].lower()
    return short == reader.name or short in {known.rpartition(".")[2].lower() for known in reader.class_names()}
