"""fastai's optimiser states in torch's layout.

fastai saves `{"state": [one dictionary a parameter], "hypers": [one dictionary a group]}`: all its groups in one list,
and not where one ends. With bias-corrected Adam, `sqr_avg` is torch's `exp_avg_sq`, `sqr_mom` its β₂; `do_wd` says of a
parameter that it does not decay.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bayesadam.readers.pairing import ONE_LIST

_ENTRIES = {"grad_avg": "exp_avg", "sqr_avg": "exp_avg_sq", "step": "step"}


def torch_layout(value: Any) -> Any:
    """A state that fastai's Adam wrote, in torch's layout; all else as it is.

    >>> torch_layout({"state": [], "hypers": []})
    {'state': [], 'hypers': []}
    """
    if not isinstance(value, Mapping) or value.keys() != {"state", "hypers"}:
        return value
    states, hypers = _listed(value["state"]), _listed(value["hypers"])
    if not states or not hypers or not all(isinstance(entry, Mapping) for entry in (*states, *hypers)):
        return value
    trained = [state for state in states if any(isinstance(held, Tensor) for held in state.values())]
    # No file says which parameter is in which group, so the groups must agree.
    shared = [[group.get(key) for key in ("mom", "sqr_mom", "eps", "wd")] for group in hypers]
    momentum, beta, eps, decay = shared[0]
    if not all(_ENTRIES.keys() <= state.keys() for state in trained) or any(group != shared[0] for group in shared):
        return value
    if momentum is None or beta is None:
        return value
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
    renamed = [{_ENTRIES[key]: held for key, held in state.items() if key in _ENTRIES} for state in states]
    return {"state": {n: state for n, state in enumerate(renamed) if state}, "param_groups": groups}


def _listed(held: Any) -> Sequence[Any]:
    """The entries of a list, or of fastcore's `L`."""
    inside = getattr(held, "state", None)
    items = inside.get("items") if isinstance(inside, Mapping) else held
    return items if isinstance(items, list | tuple) else ()
