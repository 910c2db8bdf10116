"""Draws of the outputs: exactly what the drawn weights give, and with the moments they should have."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

import bayesadam as ba
from bayesadam.errors import CollapsedPredictionWarning, SettingError
from cases import mlp
from floats import assert_close
from predict.cases_networks import (
    NETWORKS,
    Lambda,
    Network,
    ScaledLinear,
    Then,
    brute_force,
    few_outputs,
    jacobian,
    normal,
    only_weights,
    posterior_over,
    predict,
    spread_inputs,
    tied_autoencoder,
)

# torch says so where an operation has no batching rule of its own; the numbers are the same.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

by_name = {network.name: network for network in NETWORKS}
every_network = pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def narrow(model: nn.Module) -> ba.Posterior:
    """Narrow enough to be sampled."""
    return posterior_over(model, n_data=1e5, prior_precision=1e4)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Every weight draw that was made, one after the other."""
    kept: list[dict[str, Tensor]] = []
    sample = ba.Posterior.sample

    def recorded(self: ba.Posterior, n: int | None = None, **options: Any) -> dict[str, Tensor]:
        draws = sample(self, n, **options)
        kept.extend([draws] if n is None else [{name: v[i] for name, v in draws.items()} for i in range(n)])
        return draws

    monkeypatch.setattr(ba.Posterior, "sample", recorded)
    return kept


@pytest.fixture
def activations_drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows when activations are drawn in place of weights."""
    module = sys.modules["bayesadam.predict.draws"]
    original, calls = module.activation_draws, []

    def noted(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return original(*args, **options)

    monkeypatch.setattr(module, "activation_draws", noted)
    return calls


def without_padding(posterior: ba.Posterior, theta: dict[str, Tensor]) -> dict[str, Tensor]:
    """A row of an embedding that stands for padding is never learned, and so not drawn either."""
    theta = dict(theta)
    for prefix, module in posterior.model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            name = f"{prefix}.weight"
            theta[name] = theta[name].clone()
            theta[name][module.padding_idx] = posterior.mean[name][module.padding_idx]
    return theta


# --- the draws themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # Forward mode sees through `torch.no_grad`, which is for reverse mode.
    "network",
    [n for n in NETWORKS if n.name != "a-branch-without-gradient"],
    ids=lambda network: network.name,
)
def test_draws_of_the_linearised_network_are_its_jacobian_times_the_drawn_weights(
    network: Network, drawn: list[dict[str, Tensor]]
):
    model, inputs = network.make()
    posterior = narrow(model)
    found = predict(posterior, inputs, predictive="linearised-sampled", n_samples=2, generator=seeded())
    assert found.draws.shape == (2, *found.mean.shape)
    output = spread_inputs(model, inputs)
    j = jacobian(model, list(posterior.mean), output)
    for draw, theta in zip(found.draws, drawn, strict=True):
        step = torch.cat([(theta[name] - mu).flatten() for name, mu in posterior.mean.items()])
        expected = output + (j @ step).view_as(output)
        assert_close(draw, expected.detach(), rtol=1e-8, atol=1e-10)


@every_network
def test_draws_of_the_network_are_the_network_at_the_drawn_weights(
    network: Network, drawn: list[dict[str, Tensor]], activations_drawn: list[int]
):
    model, inputs = network.make()
    posterior = narrow(model)
    with warnings.catch_warnings():
        # Three draws of a network that hardly varies over the batch may well differ more than it does.
        warnings.simplefilter("ignore", CollapsedPredictionWarning)
        found = predict(posterior, inputs, predictive="sampled", n_samples=3, generator=seeded())
    assert found.draws.shape == (3, *found.mean.shape)
    if activations_drawn:
        assert not drawn
        return
    for draw, theta in zip(found.draws, drawn, strict=True):
        caller = Lambda(lambda self, given: spread_inputs(self.model, given), model=model)
        named = {f"model.{name}": value for name, value in without_padding(posterior, theta).items()}
        with torch.no_grad():
            expected = functional_call(caller, named, (inputs,))
        assert_close(draw, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("predictive", ["sampled", "linearised-sampled"])
def test_mean_variance_and_covariance_are_those_of_the_draws(predictive: str):
    torch.manual_seed(0)
    posterior, x = narrow(Then(mlp(3, 4, 4), lambda z: z.view(-1, 2, 2)).double()), normal(5, 3)()
    found = predict(posterior, x, predictive=predictive, n_samples=7, covariance=True, generator=seeded())
    if predictive == "sampled":
        mean, count = found.draws.mean(dim=0), 6
    else:
        # The mean of the linearised network is known, so that no degree of freedom is spent on it.
        mean, count = predict(posterior, x).mean, 7
    away = (found.draws - mean).flatten(2)
    expected = sum(row[:, :, None] * row[:, None, :] for row in away) / count
    assert_close(found.mean, mean)
    assert_close(found.covariance, expected)
    assert_close(found.variance.flatten(1), expected.diagonal(dim1=1, dim2=2))


# --- moments --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_linearised_draws_have_the_exact_covariance():
    torch.manual_seed(0)
    model = Then(nn.Linear(3, 4, bias=False), few_outputs).double()
    posterior, x, count = posterior_over(model), normal(4, 3)(), 10_000
    _, expected = brute_force(posterior, lambda model: model(x))
    found = predict(posterior, x, predictive="linearised-sampled", n_samples=count, covariance=True, generator=seeded())
    variance = expected.diagonal(dim1=1, dim2=2)
    error = ((variance[:, :, None] * variance[:, None, :] + expected.square()) / count).sqrt()
    assert ((found.covariance - expected).abs() / error).max() < 5
    assert ((found.draws.mean(dim=0) - found.mean).abs() / (variance / count).sqrt()).max() < 5


def weight_draws(posterior: ba.Posterior, x: Tensor, count: int) -> Tensor:
    """f(x; θ) for many draws of all weights: what local reparameterisation must be distributed as."""
    thetas = posterior.sample(count, generator=seeded(99))
    with torch.no_grad():
        return vmap(lambda theta: functional_call(posterior.model, theta, (x,)))(thetas)


def assert_same_distribution(found: Tensor, expected: Tensor) -> None:
    """Mean, variance and third moment of every output of every example agree within five standard errors."""
    for power in (1, 2, 3):
        centre = 0.0 if power == 1 else expected.mean(dim=0)
        a, b = (found - centre) ** power, (expected - centre) ** power
        error = (a.var(dim=0) / len(a) + b.var(dim=0) / len(b)).sqrt()
        assert ((a.mean(dim=0) - b.mean(dim=0)).abs() / error).max() < 5


def joined(self: Any, x: Tensor) -> Tensor:
    return self.head(torch.cat([x, self.body(x).tanh()], dim=1))


LOCAL = {
    "mlp": lambda: mlp(3, 6, 5, 2),
    "mlp-relu": lambda: mlp(3, 6, 2, activation=nn.ReLU),
    "no-biases": lambda: only_weights(mlp(3, 6, 2)),
    "only-biases": lambda: only_biases(mlp(3, 6, 2)),
    "skip": lambda: Lambda(lambda self, x: x + self.body(x), body=mlp(3, 6, 3)),
    "joined": lambda: Lambda(joined, body=nn.Linear(3, 4), head=nn.Linear(7, 2)),
    "two-branches": lambda: Lambda(lambda self, x: self.a(x).tanh() + self.b(x).sin(), a=nn.Linear(3, 2), b=nn.Linear(3, 2)),
    "keywords": lambda: Lambda(lambda self, x: self.b(input=self.a(input=x).tanh()), a=nn.Linear(3, 4), b=nn.Linear(4, 2)),
    # These have noted how long the batch was before the draws part.
    "view-by-length": lambda: Lambda(lambda self, x: self.body(x).view(len(x), -1), body=mlp(3, 6, 2)),
    "view-and-mean": lambda: Lambda(
        lambda self, x: self.head(self.body(x).view(len(x), -1, 2).mean(dim=1)), body=mlp(3, 5, 6), head=nn.Linear(2, 2)
    ),
}  # fmt: skip


def only_biases(model: nn.Sequential) -> nn.Sequential:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", LOCAL)
def test_drawn_activations_are_distributed_as_drawn_weights_make_them(
    kind: str, size: int, drawn: list[dict[str, Tensor]], activations_drawn: list[int]
):
    torch.manual_seed(0)
    model, x, count = LOCAL[kind]().double(), normal(size, 3)(), 4_000
    posterior = posterior_over(model, n_data=20, prior_precision=4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapsedPredictionWarning)
        found = predict(posterior, x, predictive="sampled", n_samples=count, generator=seeded())
    assert activations_drawn
    assert not drawn
    assert found.draws.shape == (count, *found.mean.shape)
    assert_same_distribution(found.draws, weight_draws(posterior, x, count))


def test_examples_have_weights_of_their_own_where_activations_are_drawn():
    """Two equal examples differ within one draw, and are not correlated over draws: marginals are what is promised."""
    torch.manual_seed(0)
    x = torch.ones(2, 3, dtype=torch.float64)
    found = predict(narrow(mlp(3, 6, 1).double()), x, predictive="sampled", n_samples=4_000, generator=seeded())
    both = found.draws.squeeze(2).T
    assert abs(torch.corrcoef(both)[0, 1]) < 5 / math.sqrt(4_000)


def biases_of_a_norm() -> nn.Module:
    """As in tuning biases alone: the norm's bias looks like a linear layer's but is not one."""
    return only_biases(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)))


GLOBAL = {
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)), (3, 3, 3)),
    "sequence": (lambda: mlp(3, 4, 2), (3, 4, 3)),
    "tied": (lambda: tied_autoencoder(transposed=False), (3, 3)),
    "shared": (lambda: Lambda(lambda self, x: self.a(self.a(x).tanh()), a=nn.Linear(3, 3)), (3, 3)),
    "beside-its-layer": (lambda: Lambda(lambda self, x: self.a(x) + F.linear(x, self.a.weight).sin(), a=nn.Linear(3, 3)), (3, 3)),
    "subclass": (lambda: nn.Sequential(ScaledLinear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3, 3)),
    "bare-parameter": (lambda: Lambda(lambda self, x: self.a(x) * self.w, a=nn.Linear(3, 2), w=nn.Parameter(torch.ones(2))), (3, 3)),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (3, 3)),
    "norm-biases": (biases_of_a_norm, (3, 3)),
    "batch-norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), (3, 3)),
    "mixed-outputs-of-examples": (lambda: Lambda(lambda self, x: self.b(self.a(x.transpose(0, 1)).transpose(0, 1)), a=nn.Linear(3, 3), b=nn.Linear(3, 2)), (3, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", GLOBAL)
def test_weights_are_drawn_where_activations_would_not_do(
    kind: str, drawn: list[dict[str, Tensor]], activations_drawn: list[int]
):
    build, shape = GLOBAL[kind]
    torch.manual_seed(0)
    model, x = build().double().eval(), normal(*shape)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapsedPredictionWarning)
        predict(narrow(model), x, predictive="sampled", n_samples=4, generator=seeded())
    assert not activations_drawn
    assert len(drawn) == 4


# --- ways of computing them -----------------------------------------------------------------------------------------


class OldSine(torch.autograd.Function):
    """As most were written: nothing that torch.func could use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Sine(torch.autograd.Function):
    """With a context of its own, as torch.func wants it, but no forward mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class BatchableSine(Sine):
    generate_vmap_rule = True


class SineOnceDifferentiable(OldSine):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


def sequences(sine: Callable[[Tensor], Tensor]) -> nn.Module:
    """Sequences, so that weights and not activations are drawn."""
    torch.manual_seed(0)
    members = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 2), "scale": nn.Parameter(torch.randn(4))}
    return Lambda(lambda self, x: self.b(sine(self.a(x)) * self.scale).sum(dim=1), **members).double()


def with_item(x: Tensor) -> Tensor:
    return x.sin() if math.isfinite(x.sum().item()) else x


@pytest.mark.parametrize("predictive", ["linearised", "linearised-sampled", "sampled"])
@pytest.mark.parametrize(
    "sine",
    [OldSine.apply, Sine.apply, BatchableSine.apply, SineOnceDifferentiable.apply, with_item],
    ids=["old-function", "function", "batchable-function", "once-differentiable", "item"],
)
def test_operations_that_cannot_be_vectorised_or_pushed_forward_give_the_same(
    sine: Callable[[Tensor], Tensor], predictive: str
):
    x = normal(3, 2, 3)()
    options = {"predictive": predictive, "n_samples": 4, "covariance": True}
    expected = predict(narrow(sequences(torch.sin)), x, generator=seeded(), **options)
    found = predict(narrow(sequences(sine)), x, generator=seeded(), **options)
    assert_close(found.mean, expected.mean, rtol=1e-10)
    assert_close(found.covariance, expected.covariance, rtol=1e-8, atol=1e-14)
    if predictive != "linearised":
        assert_close(found.draws, expected.draws, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("predictive", ["linearised-sampled", "sampled"])
@pytest.mark.parametrize("budget", [1, 3_000, 30_000])
def test_draws_do_not_depend_on_the_memory_they_are_made_in(predictive: str, budget: int):
    x, posterior = normal(5, 2, 3)(), narrow(sequences(torch.sin))
    expected = predict(posterior, x, predictive=predictive, n_samples=6, generator=seeded())
    found = predict(posterior, x, predictive=predictive, n_samples=6, generator=seeded(), memory_budget=budget)
    assert_close(found.draws, expected.draws, rtol=1e-10, atol=1e-14)


def test_a_small_budget_cuts_the_batch_of_drawn_activations():
    rows: list[int] = []
    torch.manual_seed(0)
    model = Lambda(lambda self, x: rows.append(len(x)) or self.net(x), net=mlp(3, 6, 2)).double()
    posterior, x = posterior_over(model, n_data=1e3, prior_precision=100.0), normal(20, 3)()
    found = predict(posterior, x, predictive="sampled", n_samples=500, generator=seeded(), memory_budget=1_000_000)
    # The last call is the mean network's; the ones before it drew.
    assert 1 <= rows[-2] // 500 < 20
    assert_same_distribution(found.draws, weight_draws(posterior, x, 2_000))


@pytest.mark.parametrize("predictive", ["linearised-sampled", "sampled"])
@pytest.mark.parametrize("build", [lambda: mlp(3, 4, 2), lambda: sequences(torch.sin)], ids=["mlp", "sequences"])
def test_draws_are_reproducible(predictive: str, build: Callable[[], nn.Module]):
    torch.manual_seed(0)
    model = build()
    posterior = narrow(model.float())
    x = torch.randn(4, 3) if isinstance(model, nn.Sequential) else torch.randn(4, 2, 3)

    def draws(generator: torch.Generator | None) -> Tensor:
        return predict(posterior, x, predictive=predictive, n_samples=3, generator=generator).draws

    generator = seeded(1)
    first, second = draws(generator), draws(generator)
    assert torch.equal(first, draws(seeded(1)))
    assert not torch.equal(first, second)
    assert not torch.equal(first, draws(seeded(2)))
    torch.manual_seed(5)
    unseeded = draws(None)
    assert not torch.equal(unseeded, draws(None))
    torch.manual_seed(5)
    assert torch.equal(unseeded, draws(None))


@pytest.mark.parametrize("predictive", ["linearised-sampled", "sampled"])
def test_half_precision_draws_are_given_in_float32(predictive: str):
    torch.manual_seed(0)
    model, x = mlp(3, 8, 2).to(torch.bfloat16), torch.randn(4, 3).to(torch.bfloat16)
    posterior = posterior_over(model, n_data=100, prior_precision=10.0)
    found = predict(posterior, x, predictive=predictive, n_samples=300, generator=seeded())
    assert found.draws.dtype == found.mean.dtype == found.variance.dtype == torch.float32
    exact = predict(posterior, x).variance
    assert (found.variance / exact).log().abs().max() < 0.7


# --- the warning ----------------------------------------------------------------------------------------------------


@pytest.fixture
def classifier() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return mlp(8, 16, 4), torch.randn(60, 8)


@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_a_posterior_too_wide_to_be_sampled_is_pointed_out(classifier, likelihood: str):
    model, x = classifier
    wide = posterior_over(model, n_data=1e-2, prior_precision=1e-2)
    with pytest.warns(
        CollapsedPredictionWarning, match=r"too wide.*predictive='sampled'.*predictive='linearised'"
    ) as caught:
        wide.predict(x, likelihood=likelihood, predictive="sampled", generator=seeded())
    # It points at the user's line.
    assert caught[0].filename == __file__


@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_a_posterior_that_can_be_sampled_is_not(classifier, likelihood: str):
    model, x = classifier
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior_over(model, n_data=1e6, prior_precision=1e5).predict(
            x, likelihood=likelihood, predictive="sampled", generator=seeded()
        )


@pytest.mark.parametrize("x", [torch.zeros(1, 3), torch.ones(20, 3)], ids=["one-example", "equal-examples"])
def test_predictions_without_a_spread_of_their_own_raise_no_alarm(x: Tensor):
    torch.manual_seed(0)
    model = mlp(3, 4, 1)
    with torch.no_grad():
        model[2].bias -= model(x[:1]).squeeze()
    narrow(model).predict(x, likelihood="regression", predictive="sampled", generator=seeded())


@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_linearised_draws_cannot_collapse(classifier, likelihood: str):
    model, x = classifier
    wide = posterior_over(model, n_data=1e-2, prior_precision=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ba.errors.BayesAdamWarning)
        found = wide.predict(x, likelihood=likelihood, predictive="linearised-sampled", generator=seeded())
    assert_close(found.mean, model(x).detach())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_samples": 0}, "n_samples must be a whole number of at least 1 .draws., got 0"),
        ({"n_samples": 2.5}, r"got 2\.5"),
        ({"n_samples": True}, "got True"),
        ({"predictive": "mcmc"}, r"predictive must be one of .*got 'mcmc'"),
        ({"likelihood": "counts"}, r"likelihood must be one of .*got 'counts'"),
        ({"link": "softmax"}, r"link must be one of .*got 'softmax'"),
        ({"memory_budget": 0}, "memory_budget must be a whole number of at least 1 .bytes., got 0"),
    ],
)
def test_bad_options_are_named(classifier, options: dict[str, Any], match: str):
    model, x = classifier
    with pytest.raises(SettingError, match=match):
        predict(posterior_over(model), x, **options)
