"""The settings of the agents, each with the condition that its values meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

from bayesadam._checks import is_count, is_number
from bayesadam._schema import Check as Check
from bayesadam.errors import SettingError

Settings = TypeVar("Settings", bound="AgentSettings")


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_tuple(value: Any, holds: Any) -> bool:
    return isinstance(value, tuple) and all(map(holds, value))


def _is_range(value: Any) -> bool:
    return value is None or (_is_tuple(value, is_number) and len(value) == 2 and value[0] < value[1])


Count = Annotated[int, Check(is_count, "a positive whole number")]
CountOrZero = Annotated[int, Check(lambda v: is_count(v, 0), "a whole number, 0 or more")]
Positive = Annotated[float, Check(_is_positive, "positive and finite")]
PositiveOrNone = Annotated[float | None, Check(lambda v: v is None or _is_positive(v), "positive and finite, or None")]
NotNegative = Annotated[float, Check(lambda v: is_number(v) and v >= 0, "finite and at least 0")]
Probability = Annotated[float, Check(lambda v: is_number(v) and 0 <= v <= 1, "between 0 and 1")]
Share = Annotated[float, Check(lambda v: is_number(v) and 0 <= v < 1, "at least 0 and below 1")]
Flag = Annotated[bool, Check(lambda v: isinstance(v, bool), "True or False")]
Range = Annotated[tuple[float, float] | None, Check(_is_range, "a tuple (low, high) with low below high, or None")]
Widths = Annotated[tuple[int, ...], Check(lambda v: _is_tuple(v, is_count), "a tuple of whole numbers like (100, 100)")]


@dataclass(frozen=True)
class AgentSettings:
    """The settings of every agent.

    Attributes:
        train_every: the fewest observations between two trainings.
        initial_pulls: how often every arm is pulled, in turn, before the agent chooses.
        epsilon: the share of decisions with an arm drawn at random.
        forget: the half-life of what was learnt, in observations of any arm, for rewards that drift.
    """

    train_every: Count = 20
    initial_pulls: CountOrZero = 3
    epsilon: Probability = 0.0
    forget: PositiveOrNone = None

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            for check in getattr(hint, "__metadata__", ()):
                if not check.holds(getattr(self, name)):
                    raise SettingError(f"{name} must be {check.meaning}, got {getattr(self, name)!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The settings that this class has."""
        return tuple(field.name for field in fields(cls))

    def plain(self) -> dict[str, Any]:
        """The values by name, as JSON has them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_plain(cls: type[Settings], values: Mapping[str, Any]) -> Settings:
        """The inverse of `plain`; settings that the class does not have are ignored."""
        own: dict[str, Any] = {name: values[name] for name in cls.names()}
        return cls(**own | {name: tuple(value) for name, value in own.items() if isinstance(value, list)})


@dataclass(frozen=True)
class HybridSettings(AgentSettings):
    """Two exact linear heads, on the contexts and on the last hidden layer of a network, which `"linear"` has not.

    Attributes:
        hidden: the widths of the network's hidden layers of ReLU units; () for no network.
        lr, batch_size, train_steps: Adam's learning rate, the size of a mini-batch, and how many a training has.
        average: β of the moving average of the weights that acts in their place; 0 for none.
        l2: λ of the penalty (λ/2)|θ|², in units of the rewards' noise; it falls with the observations.
        dropout: the rate at which hidden units are dropped in training.
        reward_range: (low, high), where it is known; None for twice the range seen so far.
    """

    train_every: Count = 5
    initial_pulls: CountOrZero = 1
    hidden: Widths = (100, 100)
    lr: Positive = 4e-3
    batch_size: Count = 64
    train_steps: Count = 200
    average: Share = 0.995
    l2: NotNegative = 6e-3
    dropout: Share = 0.2
    reward_range: Range = None
