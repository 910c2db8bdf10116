"""What torch's own `load_state_dict` leaves to be done."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch.optim import Optimizer

from bayesadam.curvature.read import working_dtype


def keep_wide(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Put a loaded float32 state back as it was: torch casts what it loads to the parameters' type, and rounds it."""
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(saved, own, strict=True):
        if parameter.dtype != working_dtype(parameter.dtype) and parameter in optimizer.state:
            state = optimizer.state[parameter]
            for name, value in state_dict["state"][key].items():
                state[name] = value.to(state[name].device, copy=True)
