"""The doctor names what is wrong with a model and its optimiser, and says nothing of what is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bayesadam as ba
from cases import fit, mlp, train, trained

ALL = ("0.weight", "0.bias")


def told(diagnosis: ba.diagnosis.Diagnosis, code: str, severity: str, parameters: tuple[str, ...], *words: str) -> None:
    """There is one such finding, of these parameters and with these words."""
    (finding,) = (each for each in diagnosis.findings if each.code == code)
    assert (finding.severity, finding.parameters) == (severity, parameters)
    assert all(word in finding.message for word in words), finding.message


def healthy(**adam: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Trained for longer than its memory of ten steps, decoupled decay, every unit alive."""
    torch.manual_seed(0)
    model = mlp(3, 4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), **{"betas": (0.9, 0.9), **adam})
    train(model, optimizer, steps=30)
    return model, optimizer


def test_a_healthy_optimiser_gets_the_implied_prior_and_no_more() -> None:
    diagnosis = ba.doctor(*healthy(weight_decay=0.1))
    assert diagnosis.codes() == ("implied-prior",)
    assert diagnosis.healthy
    assert diagnosis.summary == "Sequential trained by AdamW: 21 weights in 4 parameters have a second moment"


@pytest.mark.parametrize(("steps", "found"), [(3, True), (9, True), (11, False), (30, False)])
def test_few_steps_are_those_below_the_memory(steps: int, found: bool) -> None:
    model = mlp(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9))
    train(model, optimizer, steps=steps)
    diagnosis = ba.doctor(model, optimizer)
    assert ("few-steps" in diagnosis.codes()) == found
    if found:
        told(diagnosis, "few-steps", "warning", ALL, f"{steps} steps against a memory of 1/(1−β₂) = 10")


def test_dead_units_have_no_curvature() -> None:
    torch.manual_seed(0)
    model = mlp(3, 4, 1, activation=nn.ReLU)
    with torch.no_grad():
        model[0].weight[1] = 0.0
        model[0].bias[1] = -1.0
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9), lr=1e-4, weight_decay=0.0)
    train(model, optimizer, steps=30)
    diagnosis = ba.doctor(model, optimizer)
    # Three weights in, one bias, one weight out.
    words = ("5 of 21 weights (23.8%)", "the prior's alone, 1/δ")
    told(diagnosis, "zero-curvature", "note", (*ALL, "2.weight"), *words)
    assert diagnosis.healthy


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_values_are_an_error(bad: float) -> None:
    model, optimizer = healthy()
    optimizer.state[model[2].weight]["exp_avg_sq"][0, :2] = bad
    diagnosis = ba.doctor(model, optimizer)
    words = ("2 second moments are negative, NaN or infinite (first '2.weight')", "checkpoint")
    told(diagnosis, "bad-values", "error", ("2.weight",), *words)
    assert diagnosis.codes()[0] == "bad-values"


@pytest.mark.parametrize(
    ("dtype", "beta", "found"),
    [
        *((torch.bfloat16, 0.98, True), (torch.bfloat16, 0.95, False), (torch.float16, 0.999, True)),
        *((torch.float16, 0.99, False), (torch.float32, 0.9999, False)),
    ],
    ids=str,
)
def test_a_state_too_coarse_for_its_memory(dtype: torch.dtype, beta: float, found: bool) -> None:
    diagnosis = ba.doctor(*trained(3, 1, dtype=dtype, betas=(0.9, beta)))
    assert ("low-precision-state" in diagnosis.codes()) == found
    if found:
        told(diagnosis, "low-precision-state", "warning", ALL, str(dtype).removeprefix("torch."), "float32")


def test_coupled_decay_leaks_into_the_moment() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.9), lr=0.0, weight_decay=0.5)
    nn.init.constant_(model.weight, 4.0)
    # A gradient of three beside a decay of two: v = 25, of which the decay alone would be 4.
    fit(model, optimizer, 20 * [(torch.tensor([[3.0, 3.0]]), 0.0)], lambda f, _: f.sum())
    told(ba.doctor(model, optimizer), "coupled-decay", "warning", ("weight",), "decay up to 0.5", "AdamW")


def test_batch_norm_and_the_bias_before_it_are_noted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9))
    train(model, optimizer, steps=12)
    words = ("running statistics of batch norm (1)", "a bias right before it (0.bias)")
    told(ba.doctor(model, optimizer), "batch-norm", "note", ("0.bias",), *words)


def test_what_is_left_out_is_told_with_the_reason() -> None:
    model, _ = healthy()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([*model[0].parameters(), model[2].weight])
    train(model, optimizer, steps=3)
    words = "1 parameters, frozen (requires_grad is False); 1 parameters, not in the optimiser"
    told(ba.doctor(model, optimizer), "left-out", "note", ("0.bias", "2.bias"), words)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "SGD keeps no second moment"),
        (lambda model: torch.optim.Adam(model.parameters()), "Adam has not taken a step yet"),
        (lambda model: torch.optim.Adam(nn.Linear(2, 2).parameters()), "no parameter of Adam belongs"),
        (lambda model: None, "expected a torch optimiser"),
        (lambda model: [], "the list is empty"),
    ],
    ids=["no-moment", "no-step", "another-model", "no-optimiser", "empty-list"],
)
def test_what_cannot_be_read_is_an_error_and_no_exception(build: Callable[[nn.Module], Any], words: str) -> None:
    model = mlp(3, 1)
    diagnosis = ba.doctor(model, build(model))
    told(diagnosis, "unreadable", "error", (), words)
    assert diagnosis.codes() == ("unreadable",)
    assert not diagnosis.healthy
    assert diagnosis.summary == "Sequential: no posterior can be read"


def test_one_parameter_that_cannot_be_read_is_named_and_the_rest_examined() -> None:
    model, optimizer = healthy()
    del optimizer.state[model[0].weight]["exp_avg_sq"]
    diagnosis = ba.doctor(model, optimizer)
    told(diagnosis, "unreadable", "error", ("0.weight",), "'exp_avg_sq'")
    assert "implied-prior" in diagnosis.codes()


@pytest.mark.parametrize(
    ("build", "note"),
    [
        (lambda p: torch.optim.RMSprop(p, alpha=0.9), "rmsprop: RMSprop's own update leaves the bias"),
        (lambda p: torch.optim.Adamax(p), "adamax: A running maximum of |g| is an upper estimate"),
        (lambda p: torch.optim.Adam(p), None),
    ],
    ids=["rmsprop", "adamax", "adam"],
)
def test_a_note_on_the_optimiser(build: Callable[[Any], torch.optim.Optimizer], note: str | None) -> None:
    model = mlp(3, 1)
    optimizer = build(model.parameters())
    train(model, optimizer, steps=3)
    diagnosis = ba.doctor(model, optimizer)
    assert ("optimizer" in diagnosis.codes()) == (note is not None)
    if note is not None:
        told(diagnosis, "optimizer", "note", (), note)


def test_the_worst_comes_first() -> None:
    model = mlp(3, 4, 1)
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), weight_decay=0.1)
    train(model, optimizer, steps=3)
    optimizer.state[model[0].weight]["square_avg"][0, 0] = float("nan")
    optimizer.state[model[2].weight]["square_avg"][0, 0] = 0.0
    diagnosis = ba.doctor(model, optimizer, n_data=100)
    severities = [f.severity for f in diagnosis.findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    codes = "bad-values few-steps coupled-decay zero-curvature implied-prior left-out optimizer"
    assert sorted(diagnosis.codes()) == sorted(codes.split())
