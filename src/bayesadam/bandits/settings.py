"""How agents learn and explore, as data: one small class per agent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from bayesadam.engine.network import ACTIVATIONS
from bayesadam.errors import SettingError


class Check(NamedTuple):
    """What the values of a field must be; it stands in the field's type."""

    holds: Callable[[Any], bool]
    meaning: str


def is_count(value: object) -> bool:
    """Whether a value is a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any, least: float = -math.inf) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and float(value) >= least


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_share(value: Any) -> bool:
    return _is_number(value, 0) and value < 1


def _are_all(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and all(map(of, value))


Count = Annotated[int, Check(is_count, "a positive whole number")]
CountOrZero = Annotated[int, Check(lambda v: is_count(v) or (v == 0 and type(v) is int), "a whole number, 0 or more")]
Several = Annotated[int, Check(lambda v: is_count(v) and v > 1, "a whole number, 2 or more")]
Positive = Annotated[float, Check(_is_positive, "positive and finite")]
PositiveOrNone = Annotated[float | None, Check(lambda v: v is None or _is_positive(v), "positive and finite, or None")]
Factor = Annotated[float, Check(lambda v: _is_number(v, 1) and v > 1, "finite and above 1")]
NotNegative = Annotated[float, Check(lambda v: _is_number(v, 0), "finite and at least 0")]
Probability = Annotated[float, Check(lambda v: _is_number(v, 0) and v <= 1, "between 0 and 1")]
Share = Annotated[float, Check(_is_share, "at least 0 and below 1")]
Flag = Annotated[bool, Check(lambda v: isinstance(v, bool), "True or False")]
Always = Annotated[bool, Check(lambda v: v is True, "True for this agent")]
Betas = Annotated[tuple[float, float], Check(lambda v: _are_all(v, _is_share) and len(v) == 2, "two numbers in [0, 1)")]
Widths = Annotated[tuple[int, ...], Check(lambda v: _are_all(v, is_count), "a tuple of whole numbers like (100, 100)")]
Activation = Annotated[str, Check(lambda v: v in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}")]
Range = Annotated[
    tuple[float, float] | None,
    Check(
        lambda v: v is None or (_are_all(v, _is_number) and len(v) == 2 and v[0] < v[1]),
        "a tuple (low, high) with low below high, or None",
    ),
]
Form = Annotated[Literal["likelihood", "map"], Check(lambda v: v in ("likelihood", "map"), "'likelihood' or 'map'")]


@dataclass(frozen=True)
class AgentSettings:
    """What every agent has.

    Attributes:
        train_every: t_f, the rounds between two trainings.
        initial_pulls: how often every arm is pulled, in turn, before the agent chooses.
        epsilon: the share of rounds with an arm drawn at random.
        forget: the half-life, in observations of any arm, of what was learnt, for rewards that drift; None to forget nothing.
    """

    train_every: Count = 20
    initial_pulls: CountOrZero = 3
    epsilon: Probability = 0.0
    forget: PositiveOrNone = None

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            for check in getattr(hint, "__metadata__", ()):
                if not check.holds(value):
                    raise SettingError(f"{name} must be {check.meaning}, got {value!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The settings that this class has."""
        return tuple(field.name for field in fields(cls))

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        values = {name: getattr(self, name) for name in self.names()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def own(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Of the saved settings of any version, those that this class has."""
        return {name: value for name, value in {**_LATER, **given}.items() if name in cls.names()}

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> AgentSettings:
        """The inverse of `plain`; settings that the class does not have are ignored."""
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in cls.own(given).items()}
        missing = [name for name in cls.names() if name not in values]
        if missing:
            raise SettingError(f"the saved settings lack {', '.join(missing)}, which {cls.__name__} has")
        return cls(**values)


# Settings that files of before do not have, and what those meant.
_LATER: Mapping[str, Any] = {"forget": None}


@dataclass(frozen=True)
class UniformSettings(AgentSettings):
    """Nothing besides."""


@dataclass(frozen=True)
class LinearSettings(AgentSettings):
    """Bayesian linear regression per arm.

    Attributes:
        standardise: whether rewards are learnt in units of their mean and standard deviation so far.
        shape: a₀ of the inverse gamma prior of the noise.
        scale: its b₀.
        precision: λ of the weights' prior precision, in units of the noise.
    """

    standardise: Flag = False
    shape: Positive = 6.0
    scale: Positive = 6.0
    precision: Positive = 0.25


@dataclass(frozen=True)
class NetworkSettings(AgentSettings):
    """A network per run, trained by one of the engine's rules.

    Attributes:
        hidden: widths of the hidden layers.
        activation: `"relu"`, `"tanh"`, `"sigmoid"`, `"silu"`, `"gelu"` or `"elu"`.
        init_range: weights start in U[−r, r], biases at 0; None for torch's U(±1/√fan-in) of both.
        lr: the learning rate.
        lr_decay: κ of the inverse decay lr/(1 + κ t) over mini-batches t; 0 for a constant rate.
        betas: the rule's β₁ and β₂.
        average: β of the moving average of the weights that acts in their place; 0 for none.
        clip: the norm at which the gradient of each run is clipped; None for no clipping.
        batch_size: examples per mini-batch, drawn with replacement from all that was seen.
        train_steps: t_s, the mini-batches of a training.
        standardise: whether rewards are learnt in units of their mean and standard deviation so far.
    """

    hidden: Widths = (100, 100)
    activation: Activation = "relu"
    init_range: PositiveOrNone = None
    lr: Positive = 1e-3
    lr_decay: NotNegative = 0.0
    betas: Betas = (0.9, 0.999)
    average: Share = 0.0
    clip: PositiveOrNone = 5.0
    batch_size: Count = 512
    train_steps: Count = 50
    standardise: Flag = False


@dataclass(frozen=True)
class GreedySettings(NetworkSettings):
    """Adam, with a penalty and dropout as regularisers.

    Attributes:
        l2: λ of the penalty (λ/2)|θ|².
        l2_by_noise: whether λ is multiplied by the variance of the rewards' noise, which is estimated from the errors of
            predictions made before the rewards were learnt from: noisy rewards need more of a penalty.
        dropout: the rate at which hidden units are dropped in training.
    """

    l2: NotNegative = 0.0
    l2_by_noise: Flag = False
    dropout: Share = 0.0


@dataclass(frozen=True)
class DropoutSettings(GreedySettings):
    """Hidden units are dropped when the agent chooses, too."""


@dataclass(frozen=True)
class GaussianSettings(NetworkSettings):
    """A Gaussian over the weights.

    Attributes:
        n_per_round: N is the number of rounds, less what is forgotten of them, times this; None for the batch size, as in the paper.
        prior_variance: of the weights, 1/δ.
    """

    n_per_round: PositiveOrNone = None
    prior_variance: Positive = 0.1

    def n_data(self, rounds: float) -> float:
        """N after so many rounds, or so many that are not forgotten."""
        return max(rounds, 1) * (self.batch_size if self.n_per_round is None else self.n_per_round)


@dataclass(frozen=True)
class BadamSettings(GreedySettings, GaussianSettings):
    """The Gaussian that Adam's state holds.

    Attributes:
        form: of the posterior, `"likelihood"` or `"map"`.
        power: p of the curvature c = v̂ᵖ.
    """

    form: Form = "likelihood"
    power: Positive = 0.5


@dataclass(frozen=True)
class VariationalSettings(GaussianSettings):
    """A rule that learns a Gaussian by perturbing the weights: Bayes by Backprop, Vadam, IVON.

    Attributes:
        noise_variance: of a reward, NLL = error²/(2 noise variance); None to estimate it from the errors of predictions made
            before the rewards were learnt from.
        initial_std: the standard deviation that every weight starts from.
    """

    noise_variance: PositiveOrNone = 0.5
    initial_std: Positive = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_std**2 > self.prior_variance:
            raise SettingError(
                f"initial_std={self.initial_std!r} is wider than the prior (variance {self.prior_variance!r}): take at most "
                f"{math.sqrt(self.prior_variance):g}"
            )


@dataclass(frozen=True)
class BootstrapSettings(GreedySettings):
    """An ensemble.

    Attributes:
        members: networks per run; each sees an observation with a weight of its own, 0 or 2.
    """

    members: Count = 5


@dataclass(frozen=True)
class NeuralLinearSettings(LinearSettings, GreedySettings):
    """Linear regression on the last hidden layer of a greedy network.

    Attributes:
        window: observations per arm whose features are computed again after every training.
    """

    window: Count = 1000
    hidden: Annotated[Widths, Check(lambda v: v != (), "one hidden layer or more")] = (100, 100)


@dataclass(frozen=True)
class HybridSettings(GreedySettings):
    """Two exact linear heads, on the contexts and on the last hidden layer of a greedy network.

    Attributes:
        reward_range: what rewards can be, (low, high), where it is known; None for twice the range seen so far.
        exploration: α, the share of the posterior's standard deviation that acts in the end; it begins at 1.
        settling: n₀: α² falls, and the penalty l2 with it, as n₀/(n₀ + n) does over n observations.
        growth: the next training comes when there are so many times as many observations.
        hold_out: one of so many observations is kept from the network, to weigh the heads by.
    """

    reward_range: Range = None
    exploration: Probability = 0.3
    settling: Positive = 500.0
    growth: Factor = 1.3
    hold_out: Several = 10
    hidden: Annotated[Widths, Check(lambda v: v != (), "one hidden layer or more")] = (100, 100)
    train_steps: Count = 200
    standardise: Always = True
    l2_by_noise: Always = True
