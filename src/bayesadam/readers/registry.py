"""One record an optimiser: where its second moment is. `register` adds a user's own.

A live optimiser is known by its class; whose a saved state is, `identify` finds from its keys.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesadam._files import DAMAGE
from bayesadam.errors import BayesAdamError, MatchError, SettingError
from bayesadam.readers import rotated, tracking

State = Mapping[str, Any]
Group = Mapping[str, Any]
# What `optimizer.state_dict()` returns.
StateDict = Mapping[str, Any]
# For users of optimisers without a second moment.
ADVICE = (
    "call ba.track(optimizer) before training, which keeps one in its state; where AdamW trains the other parameters, "
    "pass both as a list; or ask for the isotropic posterior, V = 1, that the paper has for SGD: reader='ogd', "
    "optimizer='ogd' of a file"
)
Statistic = Literal["average", "sum", "root", "factored", "quantised", "identity", "none"]


@contextmanager
def damage_told() -> Iterator[None]:
    """Whatever a state that is not laid out as torch does raises becomes a MatchError; also a decorator."""
    try:
        yield
    except (BayesAdamError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise MatchError(f"the optimiser's state is damaged, or not laid out as torch does ({reason})") from error


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
    | none        | nothing usable                    | refused                              |

    Attributes:
        classes: the optimiser classes it reads, as types or as `"package.module.Class"`; subclasses are included.
        key: the entry of a parameter's state that holds s; `"a or b"` where it has one of two names.
        decay: the entry of the parameter group that is β, with an index where it is a tuple.
        bias_correction: whether to divide by 1 − βᵗ (the average starts from a constant).
        start: s₀, as a number or as the name of an entry of the parameter group.
        step, counter: where t is stored, per parameter or per group, and its entry.
        idle_steps: the steps that are counted but leave no gradient in s.
        coupled_decay: whether weight decay is added to the gradient before it is squared, and so leaks into v.
        decoupled_flag: an entry of the group that, where true, overrides `coupled_decay`.
        maximum_key: the running maximum that replaces `key` where the group says `amsgrad`.
        centre_key: the average gradient that is squared and subtracted where the group says `centered`.
        mark: an entry of the group that only this optimiser has, which identifies its saved states; "" where they look
            as those of others that are read differently, so that it has to be named.
        read: a function (state, group, parameter shape) → s, for layouts no field describes.
        factors: one → (s, one basis a dimension of s), for an s in rotated coordinates (`bayesadam.readers.rotated`).
        bases: entries of the state that are bases, or that bases are computed from.
        mean: a function (state, group, stored weight) → the weight that was trained; None where it is the stored one.
        note: what `doctor` says of it.
    """

    name: str
    classes: tuple[str | type, ...] = ()
    statistic: Statistic = "average"
    key: str = ""
    decay: tuple[str, int | None] | None = None
    bias_correction: bool = False
    start: float | str = 0.0
    step: Literal["state", "group"] = "state"
    counter: str = "step"
    idle_steps: int = 0
    coupled_decay: bool = False
    decoupled_flag: str | None = None
    maximum_key: str | None = None
    centre_key: str | None = None
    mark: str | None = None
    read: Callable[[State, Group, torch.Size], Tensor] | None = None
    factors: Callable[[State, Group, torch.Size], rotated.Factors] | None = None
    bases: tuple[str, ...] = ()
    mean: Callable[[State, Group, Tensor], Tensor | None] | None = None
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
            raise MatchError(f"the group's {entry!r} is {value!r}, and entry {index} of it is needed")
        return as_number(value if index is None else value[index], entry)

    def steps(self, state: State, group: Group) -> float | None:
        """t, the number of gradients behind s, or None where the optimiser does not count."""
        value = (group if self.step == "group" else state).get(self.counter)
        return None if value is None else max(as_number(value, self.counter) - self.idle_steps, 0.0)

    def first(self, group: Group) -> float:
        """s₀."""
        return as_number(group[self.start], self.start) if isinstance(self.start, str) else self.start

    @damage_told()
    def couples_decay(self, group: Group) -> bool:
        """Whether this group's weight decay is part of the squared gradient."""
        decoupled = self.decoupled_flag is not None and bool(group.get(self.decoupled_flag, False))
        decay = as_number(group.get("weight_decay") or 0.0, "weight_decay")
        return self.coupled_decay and not decoupled and decay != 0.0


def as_number(value: object, entry: str) -> float:
    """The number under an entry of a saved state or group."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise MatchError(f"the optimiser's {entry!r} is no number but {type(value).__name__}") from None


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of a posterior: float32, or float64 for float64 parameters."""
    return torch.promote_types(dtype, torch.float32)


def _schedule_free(state: State, group: Group, stored: Tensor) -> Tensor | None:
    """The average x behind y = β₁ x + (1−β₁) z, which Schedule-Free has for weights in its train mode."""
    if not group.get("train_mode") or "z" not in state:
        return None
    beta = as_number(group["betas"][0], "betas")
    return stored.detach().lerp(state["z"].to(stored), 1 - 1 / beta)


def _reader(name: str, classes: str, **fields: Any) -> StateReader:
    """A record; of the classes those without a dot are in the package of the one before them."""
    package, names = "", []
    for path in classes.split():
        package = path.rpartition(".")[0] or package
        names.append(f"{package}.{path.rpartition('.')[2]}")
    return StateReader(name, tuple(names), **fields)


def _average(name: str, classes: str, **fields: Any) -> StateReader:
    """A moving average of squared gradients from 0 that needs its bias corrected."""
    return _reader(name, classes, **{"key": "exp_avg_sq", "decay": ("betas", 1), "bias_correction": True, **fields})


_AMSGRAD = {"maximum_key": "max_exp_avg_sq"}
_COUPLED = {**_AMSGRAD, "coupled_decay": True, "decoupled_flag": "decoupled_weight_decay"}
_DECOUPLING = {"coupled_decay": True, "decoupled_flag": "weight_decouple"}
_GROUP = {"step": "group"}
_NONE = {"statistic": "none"}
_SUM = {"statistic": "sum", "key": "sum", "start": "initial_accumulator_value"}
_RMS = {"key": "square_avg", "decay": ("alpha", None), "centre_key": "grad_avg", "coupled_decay": True}
_MARKED_DECOUPLED = {"decoupled_flag": "decoupled_decay", "mark": "decoupled_decay"}
_FROM_ONE = {
    "start": 1.0,
    "note": "Its average starts at one; the start is subtracted, which leaves few digits before 10/(1−α) steps.",
}
_BELIEF = {"key": "exp_avg_var", "maximum_key": "max_exp_avg_var", "decoupled_flag": "decoupled_decay"}
_MAXIMUM = {
    "statistic": "root",
    "key": "exp_inf",
    "decay": ("betas", 1),
    "note": "A running maximum of |g| is an upper estimate: the posterior is narrower than Adam's.",
}
_ADOPT = {"key": "exp_avg_sq", "decay": ("betas", 1), "coupled_decay": True, "decoupled_flag": "decoupled"}
_SOAP = {"factors": rotated.listed, "bases": ("Q", "GG")}
_TWO_SIDED = {"factors": rotated.two_sided, "bases": ("left", "right", rotated.LEFT_KEY, rotated.RIGHT_KEY)}
_EIGHT_BITS = {
    "statistic": "quantised",
    "key": "state2",
    "note": "8-bit blocks: about two digits of v, and small entries of a block round to zero.",
}
_FEW_BITS = {
    "maximum_key": "max_exp_avg_sq",
    "mark": "",
    "note": "Blocks of few bits: small entries of a block round to zero, or up to the smallest code.",
}
_FREE = {
    "step": "group",
    "mark": "weight_lr_power",
    "mean": _schedule_free,
    "note": "The mean is the average x that it trains, not the y at which it takes gradients.",
}
_PO, _BNB, _SB3 = "pytorch_optimizer.optimizer", "bitsandbytes.optim", "stable_baselines3.common.sb2_compat"
_MUONS = ("muon.Muon", "muon_clip.MuonClip", "adago.AdaGO", "adamuon.AdaMuon", "normuon.NorMuon")
_SCHEDULE_FREE = (
    *("adamw_schedulefree.AdamWScheduleFree", "adamw_schedulefree_closure.AdamWScheduleFreeClosure"),
    *("radam_schedulefree.RAdamScheduleFree", "radam_schedulefree_closure.RAdamScheduleFreeClosure"),
)

# What `track` keeps in the state of any optimiser, free of bias.
_KEPT: dict[str, Any] = {"key": tracking.WHOLE, "decay": (tracking.DECAY, None), "counter": tracking.COUNT}
TRACKED = StateReader("tracked", **_KEPT, read=tracking.moment, bases=tracking.TENSORS)

READERS: tuple[StateReader, ...] = (
    TRACKED,
    _average("adam", "torch.optim.adam.Adam", **_COUPLED),
    # The groups of GaLore and APOLLO that have no rank are AdamW's.
    _average(
        "adamw",
        "torch.optim.adamw.AdamW timm.optim.adamw.AdamWLegacy galore_torch.adamw.AdamW apollo_torch.apollo.AdamW",
        **_AMSGRAD,
    ),
    _average("nadam", "torch.optim.nadam.NAdam", **_COUPLED, mark="momentum_decay"),
    _average("radam", "torch.optim.radam.RAdam", **_COUPLED),
    _average("sparseadam", "torch.optim.sparse_adam.SparseAdam", **_AMSGRAD),
    # The SOAP of bayesadam 0.2: saved states are read, the optimiser itself is gone.
    _average("soap", "", **_TWO_SIDED, key="exp_avg_sq or rotated_exp_avg_sq", mark="precondition_every"),
    # The soap.py of SOAP's authors, and copies of it. Its count leaves out the first gradient, as V does.
    _average("soap-reference", "soap.SOAP", **_SOAP, mark="max_precond_dim"),
    # One count for all parameters of a group: v of one that missed steps is underestimated.
    _average(
        "soap-pytorch-optimizer", f"{_PO}.soap.SOAP", **_SOAP, **_GROUP, mark="max_precondition_dim", idle_steps=1
    ),
    # The second moments of a saved posterior, diagonal or Kronecker-factored.
    _reader(
        "published", "", **_TWO_SIDED, key=rotated.MOMENT_KEY, decay=(rotated.BETA_KEY, None), mark=rotated.SAVED_MARK
    ),
    _reader("adagrad", "torch.optim.adagrad.Adagrad", **_SUM, coupled_decay=True),
    _average(
        "rmsprop",
        "torch.optim.rmsprop.RMSprop",
        **_RMS,
        mark="foreach",
        note="RMSprop's own update leaves the bias towards zero in; the posterior divides it out.",
    ),
    # A saved state of RMSpropTFLike looks as one of torch's before that had `foreach`: neither is told.
    _average("rmsprop-old", "", **_RMS),
    _average("rmsproptf-like", f"{_SB3}.rmsprop_tf_like.RMSpropTFLike", **_RMS, **_FROM_ONE),
    _average("rmsproptf", "timm.optim.rmsprop_tf.RMSpropTF", **_RMS, **_FROM_ONE, **_MARKED_DECOUPLED),
    _average("adadelta", "torch.optim.adadelta.Adadelta", key="square_avg", decay=("rho", None), coupled_decay=True),
    _reader("adamax", "torch.optim.adamax.Adamax", **_MAXIMUM, coupled_decay=True),
    # Averages that start from the first gradient have no bias to correct: Adafactor's, ADOPT's.
    _reader(
        "adafactor", "torch.optim.Adafactor torch.optim._adafactor.Adafactor", statistic="factored", key="variance"
    ),
    _reader("adopt", "timm.optim.adopt.Adopt", **_ADOPT, mark="clip_exp"),
    _average("lamb", "timm.optim.lamb.Lamb", **_GROUP, mark="grad_averaging"),
    _average("fusedadam", "apex.optimizers.fused_adam.FusedAdam", **_GROUP, mark="bias_correction"),
    _average("adabelief", "timm.optim.adabelief.AdaBelief", **_BELIEF, coupled_decay=True),
    _average("schedule-free", " ".join(f"schedulefree.{path}" for path in _SCHEDULE_FREE), **_FREE, counter="k"),
    _average("schedule-free-pytorch-optimizer", f"{_PO}.schedulefree.ScheduleFreeAdamW ScheduleFreeRAdam", **_FREE),
    _average("torchao-adam", "torchao.optim.adam.Adam8bit Adam4bit AdamFp8", **_FEW_BITS, coupled_decay=True),
    _average("torchao-adamw", "torchao.optim.adam.AdamW8bit AdamW4bit AdamWFp8", **_FEW_BITS),
    # Of three betas the last is that of the slow momentum.
    _average("ademamix", f"{_PO}.ademamix.AdEMAMix", **_GROUP, **_DECOUPLING, mark="t_alpha_beta3"),
    # Its bases are two averages of the gradient, one above the other: of two biases a square.
    _average(
        "ademamix8bit",
        f"{_BNB}.ademamix.AdEMAMix AdEMAMix8bit PagedAdEMAMix PagedAdEMAMix8bit",
        **_EIGHT_BITS,
        mark="t_beta3",
        bases=("state1",),
    ),
    _average("adam8bit", f"{_BNB}.adam.Adam Adam8bit Adam32bit PagedAdam PagedAdam8bit PagedAdam32bit", **_EIGHT_BITS),
    _average(
        "adamw8bit", f"{_BNB}.adamw.AdamW AdamW8bit AdamW32bit PagedAdamW PagedAdamW8bit PagedAdamW32bit", **_EIGHT_BITS
    ),
    _reader(
        "ogd", "", statistic="identity", note="V = 1 for every weight: the posterior is isotropic and knows no data."
    ),
    _reader("sgd", "torch.optim.sgd.SGD", **_NONE, mark="dampening"),
    _reader("lbfgs", "torch.optim.lbfgs.LBFGS", **_NONE, mark="history_size"),
    _average("muon-with-adam", "muon.MuonWithAuxAdam SingleDeviceMuonWithAuxAdam", mark="use_muon"),
    _average("muon-timm", "timm.optim.muon.Muon", mark="fallback_lr_scale"),
    # Those that average the orthogonalised update's squares beside it too.
    _average("muon-pytorch-optimizer", " ".join(f"{_PO}.muon.{path}" for path in _MUONS), **_GROUP, mark="use_muon"),
    # What they average are squares of projected gradients.
    _reader("galore", f"{_PO}.galore.GaLore {_PO}.apollo.APOLLO {_PO}.fira.Fira", **_NONE, mark="update_proj_gap"),
    _reader("muon", "torch.optim.Muon torch.optim._muon.Muon muon.Muon SingleDeviceMuon", **_NONE, mark="ns_steps"),
    _reader(
        "lion",
        f"timm.optim.lion.Lion {_BNB}.lion.Lion Lion8bit lion_pytorch.lion_pytorch.Lion {_PO}.lion.Lion",
        **_NONE,
    ),
    _reader("sgd-schedule-free", "schedulefree.sgd_schedulefree.SGDScheduleFree", **_NONE, mark="scheduled_lr"),
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
        raise SettingError(f"a reader named {reader.name!r} exists already: pass replace=True to override it")
    _registry[reader.name.lower()] = reader
    return reader


def reader_named(name: str | StateReader) -> StateReader:
    """The reader called `name`, in any case: `"adam"`, `"AdamW"`; a reader is given back."""
    if isinstance(name, StateReader):
        return name
    if name.lower() not in _registry:
        raise SettingError(f"no reader is named {name!r}; known: {', '.join(sorted(_registry))}")
    return _registry[name.lower()]


def reader_for(state: State, group: Group, reader: StateReader) -> StateReader:
    """The reader of one parameter's state, of which a flag may say that it has none: then what `track` kept counts."""
    if reader.statistic == "identity":
        return reader
    reader = next((_registry[name] for name in keeps_none(state, group)), reader)
    return TRACKED if reader.statistic == "none" and tracking.is_tracked(state) else reader


def keeps_none(state: State, group: Group) -> list[str]:
    """Who keeps no second moment of a parameter: Muon beside AdamW, by a flag of the group or state; a projection."""
    flags = {"muon": state.get("use_muon", group.get("use_muon")), "galore": group.get("rank") and "projector" in state}
    return [name for name, flag in flags.items() if flag]


def reader_of(optimizer: Optimizer) -> StateReader | None:
    """The reader for a live optimiser: the nearest class of its ancestry that a record names."""
    by_class = {name: reader for reader in _registry.values() for name in reader.class_names()}
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(optimizer).__mro__)
    return next((by_class[name] for name in names if name in by_class), None)
