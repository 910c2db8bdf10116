"""Batches of every kind, models with calls of their own, and what is said when they do not fit."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import BayesAdamError, MatchError, SettingError
from cases import mlp
from floats import assert_close
from predict.cases_networks import METHODS, Lambda, Then, normal, posterior_over

every_method = pytest.mark.parametrize("method", METHODS)


def two_inputs(self: Any, left: Tensor, right: Tensor, offset: Tensor | float = 0.0) -> Tensor:
    return self.b(self.a(left).tanh() * right) + offset


@pytest.fixture
def posterior() -> ba.Posterior:
    torch.manual_seed(0)
    model = Lambda(two_inputs, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    return posterior_over(model, n_data=1e5, prior_precision=1e4)


@pytest.fixture
def left() -> Tensor:
    return torch.linspace(-1, 1, 27, dtype=torch.float64).view(9, 3)


@pytest.fixture
def right() -> Tensor:
    return torch.linspace(2, 0.5, 36, dtype=torch.float64).view(9, 4).sin()


def outcome(posterior: ba.Posterior, inputs: Any, method: str, **options: Any) -> Tensor:
    found = METHODS[method](posterior, inputs, **options)
    return torch.cat([found.mean, found.variance], dim=1)


# --- kinds of batches -----------------------------------------------------------------------------------------------


@every_method
def test_tuples_are_spread_and_mappings_become_keywords(posterior, left, right, method: str):
    expected = outcome(posterior, (left, right), method)
    pair = namedtuple("pair", ["first", "second"])(left, right)
    for inputs in (
        [left, right],
        pair,
        {"left": left, "right": right},
        {"right": right, "left": left},
        OrderedDict(left=left, right=right),
        UserDict(left=left, right=right),
    ):
        assert torch.equal(outcome(posterior, inputs, method), expected)


@every_method
def test_inputs_that_are_not_examples_are_passed_on_whole(posterior, left, right, method: str):
    expected = outcome(posterior, (left, right), method)
    for offset in (1.5, torch.tensor(1.5), torch.tensor([1.0, 2.0])):
        found = outcome(posterior, {"left": left, "right": right, "offset": offset}, method)
        assert_close(found[:, :2] - torch.as_tensor(offset), expected[:, :2], atol=1e-8)
        assert_close(found[:, 2:], expected[:, 2:])


@every_method
def test_a_forward_of_the_users_own(posterior, left, right, method: str):
    expected = outcome(posterior, (left, right), method)
    found = outcome(
        posterior,
        {"tokens": left, "extra": {"mask": right}},
        method,
        forward=lambda model, batch: {"logits": model(batch["tokens"], right=batch["extra"]["mask"])},
    )
    assert torch.equal(found, expected)
    scaled = outcome(posterior, (left, right), method, forward=lambda model, batch: 2 * model(*batch))
    assert_close(scaled[:, :2], 2 * expected[:, :2])
    assert_close(scaled[:, 2:], 4 * expected[:, 2:])


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda z: SimpleNamespace(logits=z, hidden=None),
        lambda z: {"logits": z, "loss": None},
        lambda z: UserDict(logits=z),
        lambda z: (z, "state"),
        lambda z: [z],
    ],
    ids=["object", "dict", "mapping", "tuple", "list"],
)
@every_method
def test_the_outputs_are_found_in_what_a_model_returns(wrapped: Any, method: str):
    net, x = mlp(3, 4, 2), torch.randn(9, 3)
    expected = outcome(posterior_over(Then(net, lambda z: z), n_data=1e5), x, method)
    assert torch.equal(outcome(posterior_over(Then(net, wrapped), n_data=1e5), x, method), expected)


# --- what changes between calls -------------------------------------------------------------------------------------


class Switched(nn.Module):
    """A network whose forward looks into a dictionary, of which torch knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.switch = {"way": "plain"}

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x).tanh())
        ways = {
            "plain": lambda: h,
            "one": lambda: h[:, :1],
            "wide": lambda: torch.cat([h, h.square()], dim=1),
            "swapped": lambda: self.a(self.b(x).tanh()),
            "also": lambda: h + self.a.weight.square().sum(),
            "alone": lambda: h.detach() + self.a.weight.sum(dim=0) * x,
            "places": lambda: torch.stack([h, h.sin()], dim=1),
        }
        return ways[self.switch["way"]]()


@pytest.mark.parametrize("way", ["one", "wide", "swapped", "also", "alone", "places"])
@pytest.mark.parametrize("inside", [True, False], ids=["model", "forward"])
def test_a_forward_may_change_between_calls(way: str, inside: bool):
    model, key, x = Switched().double(), "plain", normal(5, 3)()
    q = posterior_over(model)

    def forward(model: Switched, batch: Tensor) -> Tensor:
        model.switch["way"] = key
        return model(batch)

    options: dict[str, Any] = {} if inside else {"forward": forward}
    for run in METHODS.values():
        key = model.switch["way"] = "plain"
        run(q, x, **options)
        key = model.switch["way"] = way
        again = run(q, x, **options)
        fresh = Switched().double()
        fresh.switch["way"] = way
        expected = run(replace(q, model=fresh), x)
        assert_close(again.mean, expected.mean)
        assert_close(again.variance, expected.variance)


@pytest.mark.parametrize("inner", [False, True], ids=["in-place", "a-part"])
@every_method
def test_what_was_compiled_runs_uncompiled(inner: bool, method: str):
    """Dynamo would compile it anew for every hook that is put in; the user's own calls stay compiled."""
    compiled: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(1)
        return graph.forward

    plain, model = (Lambda(lambda self, x: self.b(self.a(x).tanh()), a=nn.Linear(3, 4), b=mlp(4, 2)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    if inner:
        model.b = torch.compile(model.b, backend=backend)
    else:
        model.compile(backend=backend)
    x = torch.randn(6, 3)
    model(x)
    assert len(compiled) == 1
    found = METHODS[method](posterior_over(model), x)
    assert len(compiled) == 1
    expected = METHODS[method](posterior_over(plain), x)
    if not (inner and method != "linearised"):
        # Draws depend on the parameters' names, which torch.compile changes.
        assert_close(found.mean, expected.mean)
        assert_close(found.variance, expected.variance)
    model(torch.randn(2, 7, 3))
    assert len(compiled) == 2
    torch.compiler.reset()


# --- refusals -------------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda z: "text", r"returned str, not a tensor.*pass forward="),
        (lambda z: {"scores": z}, r"returned dict, not a tensor"),
        (lambda z: (), r"returned tuple, not a tensor"),
        (lambda z: None, r"returned NoneType, not a tensor"),
        (lambda z: z.sum(), r"returned torch\.float32 \(\), not a tensor of real outputs with a row"),
        (lambda z: z.sum(dim=0), r"returned 2 rows for \d examples: its output must have the batch first"),
        (lambda z: z.T, r"returned 2 rows for \d examples"),
        (lambda z: z.argmax(dim=1), r"returned torch\.int64"),
        (lambda z: z[:, :0], r"no outputs"),
    ],
    ids=["text", "dict", "empty-tuple", "none", "number", "one-row", "batch-last", "classes", "no-outputs"],
)
def test_outputs_that_are_none_are_named(function: Any, match: str, method: str):
    with pytest.raises(BayesAdamError, match=match):
        METHODS[method](posterior_over(Then(mlp(3, 4, 2), function)), torch.randn(5, 3))


EMPTY = torch.empty(0, 3)


@every_method
@pytest.mark.parametrize(
    ("inputs", "match"),
    [(inputs, "the batch is empty") for inputs in (EMPTY, (EMPTY,), {"input": EMPTY})]
    + [(inputs, "no tensor with a batch dimension") for inputs in (3.0, "text", torch.tensor(1.0), {}, (), None)],
)
def test_inputs_without_examples_are_named(inputs: Any, match: str, method: str):
    with pytest.raises(MatchError, match=match):
        METHODS[method](posterior_over(nn.Linear(3, 2)), inputs)


@every_method
def test_the_models_own_errors_come_through(posterior, left, method: str):
    with pytest.raises(TypeError, match="right"):
        METHODS[method](posterior, left)
    with pytest.raises(RuntimeError, match="size of tensor"):
        METHODS[method](posterior, (left, normal(9, 7)()))


@every_method
@pytest.mark.parametrize("instead", [nn.Linear(3, 5).double(), nn.Identity()], ids=["wider", "none"])
def test_a_model_that_lost_a_parameter_is_named(posterior, left, right, method: str, instead: nn.Module):
    posterior.model.a = instead
    with pytest.raises(MatchError, match=r"no longer has a parameter 'a\.weight' of shape \(4, 3\)"):
        METHODS[method](posterior, (left, right))


@every_method
def test_a_sharded_posterior_is_to_be_gathered_first(posterior, left, right, method: str, monkeypatch):
    monkeypatch.setattr("bayesadam.predict.network.is_sharded", lambda tensor: True)
    with pytest.raises(SettingError, match=r"sharded over processes.*posterior\.gathered\(model\)"):
        METHODS[method](posterior, (left, right))


def test_an_output_that_is_of_no_parameter_is_refused():
    model, x = mlp(3, 4, 2), torch.randn(9, 3)
    q, other = posterior_over(model), copy.deepcopy(model)
    with pytest.raises(BayesAdamError, match=r"no_grad\(\), a detach\(\)"):
        outcome(q, x, "linearised", forward=lambda model, batch: model(batch).detach())
    with pytest.raises(BayesAdamError, match="call the model that it is given"):
        outcome(q, x, "linearised", forward=lambda model, batch: other(batch))
