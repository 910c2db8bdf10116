"""Optimiser states with values of other kinds, as by hand or by a broken trainer: an error of the library, or read."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import BayesAdamError
from cases import mlp, train
from formats.fuzz import places

TENSORS = (
    *(torch.zeros(0), torch.tensor(float("nan")), torch.ones(2, 2), torch.ones(3, 4).long(), torch.ones(4).byte()),
    *(torch.ones(4, dtype=torch.complex64), torch.ones(4).bool(), torch.ones(4, 3).to_sparse(), torch.tensor(-1.0)),
)
HOSTILE: tuple[Any, ...] = (None, True, 0, -1, 10**400, 1e308, float("nan"), "x", [], {}, [[]], {"a": 1}, *TENSORS)
OPTIMISERS = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "diagonal": lambda p: torch.optim.SGD(p, lr=0.1),
    "factored": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def trained(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = mlp(3, 4, 3)
    optimizer = OPTIMISERS[name](model.parameters())
    if name in ("diagonal", "factored"):
        ba.track(optimizer, what=name, every=1, batch_size=8)
    train(model, optimizer, steps=3)
    return model, optimizer.state_dict()


def damaged(state: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    state = copy.deepcopy(state)
    for _ in range(dice.choice((1, 1, 2))):
        *way, last = dice.choice(list(places(state)))
        at: Any = state
        for key in way:
            at = at[key]
        if dice.random() < 0.15:
            del at[last]
        elif dice.random() < 0.2 and isinstance(at, dict):
            at[dice.choice([None, "x", 7, -1])] = at.pop(last)
        else:
            at[last] = copy.deepcopy(dice.choice(HOSTILE))
    return state


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("count", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_states_of_another_layout(name: str, count: int) -> None:
    (model, state), said = trained(name), {"read": 0, "refused": 0}
    reader = name if name in ("adamw", "rmsprop", "adafactor") else "sgd"
    for number in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                damage = damaged(state, random.Random(f"{name}/{number}"))
                q = ba.Posterior.from_state_dict(model, damage, 100, optimizer=reader)
                _ = q.sample(), str(q)
                said["read"] += 1
            except BayesAdamError:
                said["refused"] += 1
    assert min(said.values()) > 0
