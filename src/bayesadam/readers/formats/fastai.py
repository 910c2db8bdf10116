"""The state of fastai's own Adam: `{"state": [one dictionary a parameter], "hypers": [one dictionary a group]}`.

All its groups are in one list, and nothing says where one ends. `sqr_mom` is β₂; `do_wd` says of a parameter that it
does not decay.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bayesadam.readers.match import ONE_LIST

_NAMES = {"grad_avg": "exp_avg", "sqr_avg": "exp_avg_sq", "step": "step"}


def torch_layout(value: Any) -> Any:
    """A state that fastai's Adam wrote, in torch's layout; all else as it is."""
    if not isinstance(value, Mapping) or value.keys() != {"state", "hypers"}:
        return value
    states, hypers = map(_items, (value["state"], value["hypers"]))
    # No file says which parameter is in which group, so the groups must agree.
    shared = [[group.get(key) for key in ("mom", "sqr_mom", "eps", "wd")] for group in hypers]
    trained = [state for state in states if any(isinstance(held, Tensor) for held in state.values())]
    if not states or not shared or any(group != shared[0] for group in shared) or None in shared[0][:2]:
        return value
    if not all(_NAMES.keys() <= state.keys() for state in trained):
        return value
    momentum, beta, eps, decay = shared[0]
    groups = [
        {
            "betas": (momentum, beta),
            "eps": eps,
            "weight_decay": float(decay or 0.0) if decays else 0.0,
            "params": [number for number, _ in members],
            ONE_LIST: True,
        }
        for decays, members in itertools.groupby(enumerate(states), lambda item: bool(item[1].get("do_wd", True)))
    ]
    renamed = [{_NAMES[key]: held for key, held in state.items() if key in _NAMES} for state in states]
    return {"state": {n: state for n, state in enumerate(renamed) if state}, "param_groups": groups}


def _items(held: Any) -> list[Mapping[str, Any]]:
    """The dictionaries of a list, or of fastcore's `L`; none where something else is among them."""
    inside = getattr(held, "state", None)
    items = inside.get("items") if isinstance(inside, Mapping) else held
    listed = list(items) if isinstance(items, list | tuple) else []
    return listed if all(isinstance(item, Mapping) for item in listed) else []
