"""One record an optimiser: where its second moment is. `register` adds a user's own."""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from bayesadam.errors import SettingError
from bayesadam.readers.rotated import ROTATED_READERS
from bayesadam.readers.state import StateReader

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
        key="square_avg",
        decay=("alpha", None),
        centre_key="grad_avg",
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
        "lamb",
        "timm.optim.lamb.Lamb",
        step="group",
        note="Decay is added after the moments, so v is the data's alone. Lamb clips the global gradient norm.",
    ),
    _average(
        "adan",
        "timm.optim.adan.Adan",
        decay=("betas", 2),
        step="group",
        note="Averages (g + β₂ Δg)², the gradient with Nesterov's look-ahead.",
    ),
    _average(
        "rmsproptf",
        "timm.optim.rmsprop_tf.RMSpropTF",
        "stable_baselines3.common.sb2_compat.rmsprop_tf_like.RMSpropTFLike",
        key="square_avg",
        decay=("alpha", None),
        start=1.0,
        centre_key="grad_avg",
        coupled_decay=True,
        decoupled_flag="decoupled_decay",
        note="Its average starts at one; the start is subtracted, which leaves few digits before 10/(1−α) steps.",
    ),
    _average(
        "adabelief",
        "timm.optim.adabelief.AdaBelief",
        key="exp_avg_var",
        maximum_key="max_exp_avg_var",
        coupled_decay=True,
        decoupled_flag="decoupled_decay",
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
        "ogd",
        (),
        statistic="identity",
        note="V = 1 for every weight: the posterior is isotropic and knows nothing of the data.",
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
        advice=f"it has one number per layer, not one per weight; {_TRAIN_WITH}",
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
