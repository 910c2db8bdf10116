"""The optimiser is called by its name: as its groups tell it, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import bayesadam as ba
from bayesadam.errors import MatchError
from bayesadam.readers import identify_reader, match_checkpoint, read_checkpoint
from cases import Lion, mlp, train

Make = Callable[[Iterable[Any]], Optimizer]
BOTH = "adam or adamw"


def grouped(*groups: dict[str, Any], entries: Iterable[str] = ("exp_avg", "exp_avg_sq")) -> dict[str, Any]:
    """A state with one parameter to each group."""
    state = {"step": torch.tensor(3.0)} | {entry: torch.ones(2) for entry in entries}
    return {
        "state": {key: dict(state) for key in range(len(groups))},
        "param_groups": [{**group, "params": [key]} for key, group in enumerate(groups)],
    }


def old_group(entries: str, *, weight_decay: float = 0.01) -> dict[str, Any]:
    group: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay}
    return group | dict.fromkeys(entries.split())


def saved(path: Path, model: torch.nn.Module, state: dict[str, Any]) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    return path


# --- Adam or AdamW --------------------------------------------------------------------------------------------------


def test_of_three_betas_the_mark_says_which_is_the_second_moments() -> None:
    group = {"lr": 1e-3, "betas": (0.9, 0.99, 0.9999), "weight_decay": 0.0, "step": 3}
    reader = identify_reader(grouped({**group, "weight_decouple": True, "t_alpha_beta3": None}))
    assert (reader.name, reader.beta(group)) == ("ademamix", 0.99)
    # Adan's is the last, of Adam there are two.
    for unmarked in (grouped({**group, "no_prox": False}), grouped(group)):
        with pytest.raises(MatchError, match="no reader finds"):
            identify_reader(unmarked)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({"betas": (0.9, 0.99), "use_muon": False}, "muon-with-adam"),
        ({"betas": (0.9, 0.99), "fallback_lr_scale": 1.0}, "muon-timm"),
        ({"betas": (0.9, 0.99), "clip_exp": 0.333, "decoupled": False}, "adopt"),
        ({"betas": (0.9, 0.99), "weight_lr_power": 2.0, "k": 3, "train_mode": True}, "schedule-free"),
        ({"betas": (0.9, 0.99), "weight_lr_power": 2.0, "step": 3}, "schedule-free-pytorch-optimizer"),
        ({"betas": (0.9, 0.99), "use_muon": False, "step": 3}, "muon-pytorch-optimizer"),
        ({"betas": (0.9, 0.99), "bias_correction": True, "step": 3}, "fusedadam"),
    ],
)
def test_newer_ones_are_told_by_their_mark(group: dict[str, Any], expected: str) -> None:
    state = grouped(group)
    if group.keys() & {"step", "k"}:
        state["state"][0].pop("step")
    assert identify_reader(state).name == expected


def test_a_count_in_the_group_without_a_mark_is_nobodys() -> None:
    """ADOPT, Ano and StableAdamW have the entries of RAdam, and other averages."""
    group = {"betas": (0.9, 0.99), "weight_decouple": True, "fixed_decay": False, "foreach": None, "step": 3}
    state = grouped(group)
    state["state"][0].pop("step")
    with pytest.raises(MatchError, match=r"name the optimiser with optimizer=.*ba\.track"):
        identify_reader(state)


def test_an_average_that_may_start_at_one_is_asked_for() -> None:
    """Of Stable-Baselines3's RMSprop nothing but its start differs from torch's, before that had more options."""
    group = {"lr": 1e-2, "momentum": 0, "alpha": 0.9, "eps": 1e-8, "centered": False, "weight_decay": 0}
    with pytest.raises(MatchError, match="rmsprop-old or rmsproptf-like, which are read differently: say which"):
        identify_reader(grouped(group, entries=["square_avg"]))
    for options, name in (({}, "rmsprop"), ({"decoupled_decay": False}, "rmsproptf")):
        state = grouped({**group, "foreach": None, **options}, entries=["square_avg"])
        assert identify_reader(state).name == name


@pytest.mark.parametrize("entry", ["last_grad", "p0", "s", "grok_exp_avg", "exp_avg_lr"])
def test_what_else_is_kept_may_be_part_of_what_is_squared(entry: str) -> None:
    group = {"betas": (0.9, 0.99)}
    with pytest.raises(MatchError, match=f"'{entry}'.*no reader finds"):
        identify_reader(grouped(group, entries=("exp_avg", "exp_avg_sq", entry)))
    for harmless in ("max_exp_avg_sq", "master_param", "kahan_comp", "momentum_buffer"):
        assert identify_reader(grouped(group, entries=("exp_avg", "exp_avg_sq", harmless))).name == BOTH


def test_before_torch_2_7_nothing_tells_adam_from_adamw() -> None:
    assert identify_reader(grouped(old_group("amsgrad maximize foreach capturable"))).name == BOTH


def test_either_gives_the_numbers_of_both(tmp_path: Path) -> None:
    net = mlp(3, 5, 1)
    live = torch.optim.Adam(net.parameters(), weight_decay=0.01)
    train(net, live)
    state = live.state_dict()
    state["param_groups"] = [{**old_group("amsgrad"), "params": group["params"]} for group in state["param_groups"]]
    path = saved(tmp_path / "c.pt", net, state)
    found = ba.inspect(path, n_data=100)
    assert found.optimizer == BOTH
    assert found.diagnosis.summary.startswith("c.pt trained by adam or adamw:")
    assert "coupled-decay" not in found.diagnosis.codes()
    (remark,) = [finding for finding in found.diagnosis.findings if finding.code == "optimizer"]
    assert "optimizer='adam' or 'adamw' (--optimizer)" in remark.message
    for name in ("adam", "adamw"):
        said = ba.inspect(path, n_data=100, optimizer=name)
        assert said.optimizer == name
        assert said.parameters == found.parameters
        assert ("coupled-decay" in said.diagnosis.codes()) == (name == "adam")
    posterior = ba.Posterior.from_checkpoint(path, mlp(3, 5, 1), n_data=100)
    assert set(posterior.prior_precision.values()) == {1.0}


# --- optimisers without a second moment -----------------------------------------------------------------------------


REFUSED: dict[str, tuple[Make, str]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=1e-3), "is sgd, which keeps no second moment"),
    "momentum": (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), r"is sgd, .*'momentum_buffer'"),
    "lion": (Lion, r"'s state has keys \['exp_avg'\], and no reader finds a second moment per weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimiser_without_a_second_moment_is_named(name: str) -> None:
    (make, message), net = REFUSED[name], mlp(3, 4, 1)
    live = make(net.parameters())
    train(net, live, steps=2)
    with pytest.raises(MatchError, match=f"^the optimiser ?{message}.*optimizer='ogd'"):
        identify_reader(live.state_dict())


@pytest.mark.parametrize(
    ("group", "entries", "message"),
    [
        ({"momentum": 0.9, "nesterov": True, "ns_steps": 5}, {"momentum_buffer"}, "is muon, "),
        ({"lr": 0.1}, {"momentum_buffer"}, "no reader finds a second moment"),
        ({"betas": (0.9, 0.99), "eps": 0.0}, {"state1"}, "no reader finds a second moment"),
        # Adam's own, of which someone has removed the second moment.
        ({"betas": (0.9, 0.99), "eps": 1e-8}, {"exp_avg"}, "no reader finds a second moment"),
        ({"eps": (1e-30, 1e-3)}, {"exp_avg_sq_row", "exp_avg_sq_col"}, "no reader finds a second moment"),
    ],
)
def test_others_are_named_by_what_they_keep(group: Any, entries: set[str], message: str) -> None:
    with pytest.raises(MatchError, match=message):
        identify_reader(grouped(group, entries=entries))


# --- no step taken --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adagrad]
)
def test_no_step_taken_is_told_before_any_complaint_about_the_weights(make: Make, tmp_path: Path) -> None:
    net = mlp(3, 3, 3)
    weights, biases = ([p for p in net.parameters() if p.dim() == n] for n in (2, 1))
    live = make([{"params": biases}, {"params": weights}])  # type: ignore[list-item]
    read = read_checkpoint(saved(tmp_path / "c.pt", net, live.state_dict()))
    with pytest.raises(MatchError, match="has not taken a step yet: train first"):
        match_checkpoint(read)
