"""Batches of every kind, models with calls of their own, and what is said when they do not fit."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import BayesAdamError, MatchError
from cases import mlp
from floats import assert_close
from predict.cases_networks import Lambda, Then, normal, posterior_over, predict

METHODS = ["linearised", "sampled", "linearised-sampled"]
every_predictive = pytest.mark.parametrize("predictive", METHODS)


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


def outcome(posterior: ba.Posterior, inputs: Any, predictive: str, **options: Any) -> Tensor:
    found = predict(
        posterior, inputs, predictive=predictive, n_samples=4, generator=torch.Generator().manual_seed(0), **options
    )
    return torch.cat([found.mean, found.variance], dim=1)


# --- kinds of batches -----------------------------------------------------------------------------------------------


@every_predictive
def test_tuples_are_spread_and_mappings_become_keywords(posterior, left, right, predictive: str):
    expected = outcome(posterior, (left, right), predictive)
    pair = namedtuple("pair", ["first", "second"])(left, right)
    for inputs in (
        [left, right],
        pair,
        {"left": left, "right": right},
        {"right": right, "left": left},
        OrderedDict(left=left, right=right),
        UserDict(left=left, right=right),
    ):
        assert torch.equal(outcome(posterior, inputs, predictive), expected)


@every_predictive
def test_inputs_that_are_not_examples_are_passed_on_whole(posterior, left, right, predictive: str):
    expected = outcome(posterior, (left, right), predictive, memory_budget=2_000)
    for offset in (1.5, torch.tensor(1.5), torch.tensor([1.0, 2.0])):
        found = outcome(posterior, {"left": left, "right": right, "offset": offset}, predictive, memory_budget=2_000)
        assert_close(found[:, :2] - torch.as_tensor(offset), expected[:, :2], atol=1e-8)
        assert_close(found[:, 2:], expected[:, 2:])


@every_predictive
def test_a_forward_of_the_users_own(posterior, left, right, predictive: str):
    expected = outcome(posterior, (left, right), predictive)
    found = outcome(
        posterior,
        {"tokens": left, "extra": {"mask": right}},
        predictive,
        forward=lambda model, batch: {"logits": model(batch["tokens"], right=batch["extra"]["mask"])},
    )
    assert torch.equal(found, expected)
    scaled = outcome(posterior, (left, right), predictive, forward=lambda model, batch: 2 * model(*batch))
    assert_close(scaled[:, :2], 2 * expected[:, :2])
    assert_close(scaled[:, 2:], 4 * expected[:, 2:])


@every_predictive
def test_a_forward_that_closes_over_a_mask_keeps_it_whole(posterior, left, predictive: str):
    """The way out for inputs as long as the batch that are not one row an example."""
    mixing = torch.linspace(0, 1, 16, dtype=torch.float64).view(4, 4)
    found = outcome(
        posterior,
        left[:4],
        predictive,
        forward=lambda model, x: model(x, torch.ones(len(x), 4, dtype=x.dtype) @ mixing),
    )
    expected = outcome(posterior, (left[:4], torch.ones(4, 4, dtype=torch.float64) @ mixing), predictive)
    assert_close(found, expected)


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
@every_predictive
def test_the_outputs_are_found_in_what_a_model_returns(wrapped: Any, predictive: str):
    torch.manual_seed(0)
    net, x = mlp(3, 4, 2), torch.randn(9, 3)
    expected = outcome(posterior_over(Then(net, lambda z: z), n_data=1e5), x, predictive)
    assert torch.equal(outcome(posterior_over(Then(net, wrapped), n_data=1e5), x, predictive), expected)


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
@every_predictive
def test_a_forward_may_change_between_calls(way: str, inside: bool, predictive: str):
    torch.manual_seed(0)
    model = Switched().double()
    found = posterior_over(model)
    x = normal(5, 3)().double()
    key = "plain"

    def forward(model: Switched, batch: Tensor) -> Tensor:
        model.switch["way"] = key
        return model(batch)

    options: dict[str, Any] = {} if inside else {"forward": forward}
    predict(found, x, predictive=predictive, n_samples=3, **options)
    key = model.switch["way"] = way
    again = predict(found, x, predictive=predictive, n_samples=3, generator=torch.Generator().manual_seed(2), **options)
    fresh = Switched().double()
    fresh.switch["way"] = way
    twin = replace(found, model=fresh)
    expected = predict(twin, x, predictive=predictive, n_samples=3, generator=torch.Generator().manual_seed(2))
    assert_close(again.mean, expected.mean)
    assert_close(again.variance, expected.variance)


@pytest.mark.parametrize("inner", [False, True], ids=["in-place", "a-part"])
@every_predictive
def test_what_was_compiled_runs_uncompiled(inner: bool, predictive: str):
    """Dynamo would compile it anew for every hook that is put in; the user's own calls stay compiled."""
    torch.manual_seed(0)
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
    found = predict(posterior_over(model), x, predictive=predictive, generator=torch.Generator().manual_seed(0))
    assert len(compiled) == 1
    expected = predict(posterior_over(plain), x, predictive=predictive, generator=torch.Generator().manual_seed(0))
    assert_close(found.mean, expected.mean)
    if not (inner and predictive == "linearised-sampled"):
        # Draws depend on the parameters' names, which torch.compile changes.
        assert_close(found.variance, expected.variance)
    model(torch.randn(2, 7, 3))
    assert len(compiled) == 2
    torch.compiler.reset()


# --- refusals -------------------------------------------------------------------------------------------------------


@every_predictive
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
def test_outputs_that_are_none_are_named(function: Any, match: str, predictive: str):
    torch.manual_seed(0)
    with pytest.raises(BayesAdamError, match=match):
        predict(posterior_over(Then(mlp(3, 4, 2), function)), torch.randn(5, 3), predictive=predictive)


@every_predictive
@pytest.mark.parametrize("inputs", [torch.empty(0, 3), (torch.empty(0, 3),), {"input": torch.empty(0, 3)}])
def test_an_empty_batch_is_named(inputs: Any, predictive: str):
    with pytest.raises(MatchError, match="the batch is empty"):
        predict(posterior_over(nn.Linear(3, 2)), inputs, predictive=predictive)


@every_predictive
@pytest.mark.parametrize("inputs", [3.0, "text", torch.tensor(1.0), {}, (), None], ids=repr)
def test_inputs_without_a_batch_are_named(inputs: Any, predictive: str):
    with pytest.raises(MatchError, match="no tensor with a batch dimension"):
        predict(posterior_over(nn.Linear(3, 2)), inputs, predictive=predictive)


@every_predictive
def test_the_models_own_errors_come_through(posterior, left, predictive: str):
    with pytest.raises(TypeError, match="right"):
        predict(posterior, left, predictive=predictive)
    with pytest.raises(RuntimeError, match="size of tensor"):
        predict(posterior, (left, normal(9, 7)()), predictive=predictive)


@every_predictive
@pytest.mark.parametrize("instead", [nn.Linear(3, 5).double(), nn.Identity()], ids=["wider", "none"])
def test_a_model_that_lost_a_parameter_is_named(posterior, left, right, predictive: str, instead: nn.Module):
    posterior.model.a = instead
    with pytest.raises(MatchError, match=r"no longer has a parameter 'a\.weight' of shape \(4, 3\)"):
        predict(posterior, (left, right), predictive=predictive)
