"""What the optimisers of this package share: settings that are checked, and a state that survives saving."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from bayesadam.errors import MatchError, SettingError
from bayesadam.readers import working_dtype

Group = Mapping[str, Any]


class CheckedOptimizer(Optimizer, ABC):
    """An optimiser whose groups are checked when they are added or loaded, and whose state is at least float32."""

    @abstractmethod
    def _check(self, settings: Group) -> None:
        """Refuse settings of one group; a KeyError is an entry that is missing."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with settings of its own."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where `state_dict()` was taken."""
        for group in state_dict["param_groups"]:
            try:
                self._check(group)
            except KeyError as missing:
                raise MatchError(
                    f"not the state dict of a {type(self).__name__}: a parameter group has no {missing}, only "
                    f"{sorted(map(str, group))}"
                ) from None
        super().load_state_dict(state_dict)
        # torch casts what it loads to the parameters' type, and rounds it.
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, own, strict=True):
            if parameter.dtype != working_dtype(parameter.dtype) and parameter in self.state:
                state = self.state[parameter]
                for name, value in state_dict["state"][key].items():
                    state[name] = value.to(state[name].device, copy=True)


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """What `step(closure)` returns."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def not_negative(name: str, value: object) -> None:
    """Refuse what is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise SettingError(f"{name} must be finite and at least 0, got {value!r}")


def two_betas(betas: tuple[float, ...]) -> None:
    """Refuse what is not (β₁, β₂)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise SettingError(f"betas must be two numbers of at least 0 and below 1, got {betas!r}")
