"""Badam is torch.optim.Adam, bit for bit, under every flag the platform runs."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from cases import mlp

HERE = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def flag_combinations() -> list[dict[str, object]]:
    """Every pair of flags that `torch.optim.Adam` accepts, all others as usual; what a device lacks is tried out."""
    choices = {
        "amsgrad": [False, True],
        "maximize": [False, True],
        "weight_decay": [0.0, 0.01],
        "decoupled_weight_decay": [False, True],
        "capturable": [False, True],
        "lr": [1e-3, torch.tensor(1e-3)],
        "kernel": [{}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"differentiable": True}],
    }
    combinations = []
    for places in itertools.product(*(range(len(values)) for values in choices.values())):
        if sum(map(bool, places)) > 2:
            continue
        values = [own[place] for own, place in zip(choices.values(), places, strict=True)]
        flags = dict(zip(choices, values, strict=True))
        if not flags["decoupled_weight_decay"]:
            del flags["decoupled_weight_decay"]
        elif "decoupled_weight_decay" not in torch.optim.Adam(nn.Linear(1, 1).parameters()).defaults:
            continue
        kernel = flags.pop("kernel")
        combinations.append({**flags, **kernel})
    return combinations


def runs(flags: dict[str, object], device: str) -> bool:
    """Whether torch itself runs Adam with these flags here."""
    model = mlp(2, 2).to(device)
    try:
        optimizer = torch.optim.Adam(model.parameters(), **flags)
        step(model, optimizer, torch.ones(1, 2, device=device))
    except (RuntimeError, ValueError, AssertionError):
        return False
    return True


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if optimizer.defaults.get("differentiable"):
        # A differentiable step writes into leaves, which torch allows only without gradients.
        with torch.no_grad():
            optimizer.step()
    else:
        optimizer.step()


def batches(device: str, steps: int) -> Tensor:
    return torch.randn(steps, 4, 3, generator=torch.Generator().manual_seed(0)).to(device)


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return mlp(3, 7, 2).to(device)


def equal_states(a: dict, b: dict) -> bool:
    if a.keys() != b.keys():
        return False
    return all(
        torch.equal(x, y) if isinstance(x := a[key], Tensor) and isinstance(y := b[key], Tensor) else a[key] == b[key]
        for key in a
    )


RUNNABLE = [(device, flags) for device in HERE for flags in flag_combinations() if runs(flags, device)]

MARKED = [pytest.param(case, marks=[pytest.mark.cuda] * (case[0] == "cuda")) for case in RUNNABLE]


def label(case: tuple[str, dict[str, object]]) -> str:
    device, flags = case
    return device + "-" + "-".join(f"{k}={'tensor' if isinstance(v, Tensor) else v}" for k, v in flags.items())


def test_all_flags_are_exercised_somewhere():
    seen = {key for _, flags in RUNNABLE for key, value in flags.items() if value is True}
    assert {"amsgrad", "maximize", "foreach", "fused"} <= seen


@pytest.mark.parametrize("case", MARKED, ids=label)
def test_steps_and_resume_are_bit_identical(case):
    device, flags = case
    ours, theirs = network(device), network(device)
    badam = ba.Badam(ours.parameters(), **copy.deepcopy(flags))
    adam = torch.optim.Adam(theirs.parameters(), **copy.deepcopy(flags))
    data = batches(device, 10)
    for x in data[:5]:
        step(ours, badam, x)
        step(theirs, adam, x)
    # Resume crosswise: each goes on from the other's state dict.
    saved_badam, saved_adam = copy.deepcopy(badam.state_dict()), copy.deepcopy(adam.state_dict())
    badam = ba.Badam(ours.parameters(), **copy.deepcopy(flags))
    adam = torch.optim.Adam(theirs.parameters(), **copy.deepcopy(flags))
    badam.load_state_dict(saved_adam)
    adam.load_state_dict(saved_badam)
    for x in data[5:]:
        step(ours, badam, x)
        step(theirs, adam, x)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    mine, other = badam.state_dict(), adam.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    assert all(equal_states(mine["state"][key], other["state"][key]) for key in mine["state"])


def test_posterior_is_the_one_read_off_adam():
    model = network("cpu")
    badam = ba.Badam(model.parameters())
    for x in batches("cpu", 20):
        step(model, badam, x)
    ours = badam.posterior(model, 50, prior_precision=2.0)
    theirs = ba.Posterior.from_optimizer(model, badam, 50, prior_precision=2.0)
    assert all(torch.equal(ours.variance[n], theirs.variance[n]) for n in theirs.variance)
