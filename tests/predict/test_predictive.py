"""Predictive distributions against torch.distributions, large Monte Carlo and the formulas of their docstrings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, MultivariateNormal, Normal

from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import Component, Predictive
from bayesadam.likelihoods import likelihood as likelihood_of
from cases import mlp
from floats import assert_close, close
from predict.cases_networks import Then, normal, posterior_over, predict

SHAPES = [(5,), (5, 1), (5, 3), (5, 2, 3)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def covariance_of(shape: tuple[int, ...]) -> Tensor:
    width = math.prod(shape[1:])
    root = random(shape[0], width, width, seed=3)
    return root @ root.mT / width + 0.1 * torch.eye(width, dtype=torch.float64)


def made(name: str, *moments: Tensor | None, link: str = "probit", noise_variance: Tensor | None = None) -> Predictive:
    noise = torch.zeros((), dtype=torch.float64) if noise_variance is None else noise_variance
    return likelihood_of(name).predictive([Component(*moments, noise_variance=noise)], link=link)


def gaussian(kind: str, shape: tuple[int, ...], *, whole: bool, scale: float = 1.0, **options: object) -> Predictive:
    covariance = scale * covariance_of(shape)
    variance = covariance.diagonal(dim1=1, dim2=2).reshape(shape)
    return made(kind, random(*shape), variance, covariance if whole else None, **options)


# --- regression -----------------------------------------------------------------------------------------------------


def noise_of(kind: str, shape: tuple[int, ...]) -> Tensor:
    if kind == "none":
        return torch.zeros((), dtype=torch.float64)
    return torch.tensor(0.3, dtype=torch.float64) if kind == "scalar" else random(*shape[1:], seed=5).square() + 0.1


@every_shape
@pytest.mark.parametrize("noise", ["none", "scalar", "by-output"])
@pytest.mark.parametrize("whole", [False, True], ids=["variances", "covariance"])
def test_regression_scores_are_those_of_the_normal_distribution(shape: tuple[int, ...], noise: str, whole: bool):
    sigma2 = noise_of(noise, shape)
    found = gaussian("regression", shape, whole=whole, noise_variance=sigma2)
    y, size = random(*shape, seed=7), shape[0]
    flat_mean, total = found.mean.reshape(size, -1), (found.variance + sigma2).reshape(size, -1)
    if whole:
        expected = MultivariateNormal(
            flat_mean, covariance_of(shape) + torch.diag_embed(sigma2.expand(shape).reshape(size, -1))
        )
        log_prob, entropy = expected.log_prob(y.reshape(size, -1)), expected.entropy()
    else:
        independent = Normal(flat_mean, total.sqrt())
        log_prob, entropy = independent.log_prob(y.reshape(size, -1)).sum(dim=1), independent.entropy().sum(dim=1)
    assert_close(found.log_prob(y), log_prob, rtol=1e-10)
    assert_close(found.entropy(), entropy, rtol=1e-10)
    assert_close(found.total_variance, total.view(shape), rtol=1e-12)
    assert_close(found.stddev, total.sqrt().view(shape), rtol=1e-12)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_the_interval_holds_y_with_the_probability_asked_for(level: float):
    found = gaussian("regression", (5, 3), whole=False, noise_variance=noise_of("by-output", (5, 3)))
    low, high = found.interval(level)
    distribution = Normal(found.mean, found.stddev)
    assert_close(distribution.cdf(high) - distribution.cdf(low), torch.full_like(low, level))
    assert_close(high - found.mean, found.mean - low)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 95, math.nan])
def test_a_level_that_is_no_probability_is_named(level: float):
    with pytest.raises(SettingError, match=rf"level must lie between 0 and 1.* got {level}"):
        gaussian("regression", (5, 3), whole=False).interval(level)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 1, 2)], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["variances", "covariance"])
def test_draws_of_y_have_its_mean_and_covariance(shape: tuple[int, ...], whole: bool):
    count, sigma2 = 20_000, noise_of("by-output", shape)
    found = gaussian("regression", shape, whole=whole, noise_variance=sigma2)
    draws = found.sample(count, generator=seeded())
    assert draws.shape == (count, *shape)
    away = (draws - found.mean).reshape(count, shape[0], -1)
    expected = torch.diag_embed((found.variance + sigma2).reshape(shape[0], -1))
    if whole:
        expected = covariance_of(shape) + torch.diag_embed(sigma2.expand(shape).reshape(shape[0], -1))
    spread = expected.diagonal(dim1=1, dim2=2)
    error = ((spread[:, :, None] * spread[:, None, :] + expected.square()) / count).sqrt()
    assert ((torch.einsum("nbc,nbd->bcd", away, away) / count - expected).abs() / error).max() < 5
    assert (away.mean(dim=0).abs() / (spread / count).sqrt()).max() < 5
    assert torch.equal(draws, found.sample(count, generator=seeded()))


def test_a_covariance_without_full_rank_can_be_drawn_from():
    direction = random(5, 3)
    covariance = direction[:, :, None] * direction[:, None, :]
    found = made("regression", torch.zeros(5, 3).double(), direction.square(), covariance)
    draws = found.sample(4_000, generator=seeded())
    assert_close(draws.var(dim=0), direction.square(), rtol=0.15, atol=1e-6)
    # All draws lie on the one line there is.
    along = (draws * direction).sum(dim=2, keepdim=True) * direction / direction.square().sum(dim=1, keepdim=True)
    assert_close(along, draws, atol=1e-5)


def test_draws_at_hand_are_used_before_new_ones_are_made():
    draws = random(30, 5, 2)
    found = made("regression", draws.mean(dim=0), draws.var(dim=0), None, draws)
    assert torch.equal(found.sample(30), draws)
    assert torch.equal(found.sample(4), draws[:4])
    assert found.sample(50, generator=seeded()).shape == (50, 5, 2)


@pytest.mark.parametrize(
    ("outputs", "targets"), [((5, 1), (5,)), ((5,), (5, 1)), ((5, 1, 3), (5, 3)), ((5, 3), (5, 3, 1))]
)
def test_targets_may_lack_or_have_dimensions_of_one(outputs: tuple[int, ...], targets: tuple[int, ...]):
    found, y = gaussian("regression", outputs, whole=False), random(*targets, seed=7)
    assert_close(found.log_prob(y), found.log_prob(y.reshape(outputs)))


@pytest.mark.parametrize("kind", ["regression", "binary"])
@pytest.mark.parametrize("targets", [(5, 2), (4, 3), (3, 5), (1, 3), (3,), (5, 3, 2), (15,), ()])
def test_targets_of_another_shape_are_refused(kind: str, targets: tuple[int, ...]):
    with pytest.raises(MatchError, match=r"targets have shape .*the outputs \(5, 3\)"):
        gaussian(kind, (5, 3), whole=False).log_prob(torch.zeros(targets))


def test_targets_are_not_silently_laid_out_another_way():
    """As many numbers as outputs, but channels last where the outputs have them first."""
    with pytest.raises(MatchError, match=r"\(5, 3, 2\), the outputs \(5, 2, 3\)"):
        gaussian("regression", (5, 2, 3), whole=False).log_prob(torch.zeros(5, 3, 2))


# --- classification -------------------------------------------------------------------------------------------------

LOGITS = [(6, 4), (6, 2), (4, 3, 5)]
every_logits = pytest.mark.parametrize("shape", LOGITS, ids=str)


@every_logits
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e6])
def test_the_probit_is_the_formula_of_the_docstring(shape: tuple[int, ...], scale: float):
    found = gaussian("classification", shape, whole=False, scale=scale)
    for place, logits in enumerate(found.mean.reshape(-1, shape[-1])):
        variance = found.variance.reshape(-1, shape[-1])[place].tolist()
        p = [math.exp(z) / sum(math.exp(other) for other in logits.tolist()) for z in logits.tolist()]
        kappa = (1 + math.pi / 8 * sum(a * b for a, b in zip(p, variance, strict=True))) ** -0.5
        scaled = [math.exp(kappa * z) for z in logits.tolist()]
        expected = torch.tensor([z / sum(scaled) for z in scaled], dtype=torch.float64)
        assert_close(found.probs.reshape(-1, shape[-1])[place], expected, rtol=1e-10)


@every_logits
@pytest.mark.parametrize("whole", [False, True], ids=["variances", "covariance"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
def test_the_likeliest_class_is_the_mean_networks_and_probabilities_sum_to_one(
    shape: tuple[int, ...], whole: bool, scale: float
):
    if whole and len(shape) == 3:
        scale = min(scale, 1.0)
    found = gaussian("classification", shape, whole=whole, scale=scale)
    assert found.probs.shape == shape
    assert torch.equal(found.probs.argmax(dim=-1), found.mean.argmax(dim=-1))
    assert_close(found.probs.sum(dim=-1), torch.ones(shape[:-1], dtype=torch.float64))
    shifted = made("classification", found.mean + 7.0, found.variance, found.covariance)
    assert_close(shifted.probs, found.probs)


@every_logits
@pytest.mark.parametrize("link", ["probit", "sampling"])
def test_without_variance_classification_is_a_softmax(shape: tuple[int, ...], link: str):
    mean = random(*shape)
    found = made("classification", mean, torch.zeros_like(mean), link=link)
    assert_close(found.probs, mean.softmax(dim=-1), rtol=1e-12)
    assert found.mutual_information().abs().max() <= 1e-12


def test_more_variance_is_less_certain():
    entropies = [
        gaussian("classification", (6, 4), whole=False, scale=scale).entropy() for scale in (1e-6, 1.0, 10.0, 1e3)
    ]
    assert all((wide > narrow).all() for narrow, wide in itertools.pairwise(entropies))
    assert entropies[-1].max() <= math.log(4)


@pytest.mark.parametrize("kind", ["classification", "binary"])
@pytest.mark.parametrize("whole", [False, True], ids=["variances", "covariance"])
def test_sampling_is_close_to_a_large_monte_carlo(kind: str, whole: bool):
    shape, count = (6, 4), 50_000
    found = gaussian(kind, shape, whole=whole, link="sampling")
    if whole:
        logits = MultivariateNormal(found.mean, covariance_of(shape)).sample((count,))
    else:
        logits = Normal(found.mean, found.variance.sqrt()).sample((count,))
    drawn = logits.softmax(dim=-1) if kind == "classification" else logits.sigmoid()
    # 200 draws of their own: five standard errors.
    assert ((found.probs - drawn.mean(dim=0)).abs() / (drawn.std(dim=0) / math.sqrt(200))).max() < 5
    assert torch.equal(found.probs, gaussian(kind, shape, whole=whole, link="sampling").probs)


@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_the_probit_is_near_the_truth(kind: str):
    found, sampled = (gaussian(kind, (6, 4), whole=False, link=link) for link in ("probit", "sampling"))
    assert (found.probs - sampled.probs).abs().max() < 0.1


@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_draws_of_the_network_decide_where_there_are_any(kind: str):
    draws = 2 * random(40, 6, 3)
    found = made(kind, draws.mean(dim=0), draws.var(dim=0), None, draws)
    each = draws.softmax(dim=-1) if kind == "classification" else draws.sigmoid()
    assert_close(found.probs, each.mean(dim=0))
    distribution = Categorical if kind == "classification" else Bernoulli
    expected = distribution(probs=found.probs).entropy() - distribution(probs=each).entropy().mean(dim=0)
    assert_close(found.mutual_information(), expected)
    assert_close(found.entropy(), distribution(probs=found.probs).entropy())


@pytest.mark.parametrize("kind", ["classification", "binary"])
@pytest.mark.parametrize("scale", [1e-8, 0.1, 10.0, 1e4])
def test_mutual_information_lies_between_nothing_and_all_entropy(kind: str, scale: float):
    found = gaussian(kind, (6, 4), whole=False, scale=scale, link="sampling")
    information = found.mutual_information()
    assert (information >= 0).all()
    assert (information <= found.entropy() + 1e-12).all()
    if scale >= 0.1:
        assert (information > 0).all()


@every_logits
def test_log_probabilities_of_classes(shape: tuple[int, ...]):
    found = gaussian("classification", shape, whole=False)
    y = torch.randint(shape[-1], shape[:-1], generator=seeded())
    assert_close(found.log_prob(y), Categorical(probs=found.probs).log_prob(y))
    assert_close(found.log_prob(y.to(torch.int32)), found.log_prob(y))
    assert_close(found.entropy(), Categorical(probs=found.probs).entropy())


def test_impossible_classes_have_a_finite_log_probability():
    found = made("classification", torch.tensor([[1e4, -1e4]]), torch.zeros(1, 2))
    assert math.isfinite(found.log_prob(torch.tensor([1])))


@pytest.mark.parametrize("shape", [(6, 4), (5,), (), (6, 1), (4, 6)])
def test_class_numbers_of_another_shape_are_refused(shape: tuple[int, ...]):
    with pytest.raises(MatchError, match=r"expected class indices of shape \(6,\), got"):
        gaussian("classification", (6, 4), whole=False).log_prob(torch.zeros(shape, dtype=torch.long))


@every_logits
def test_drawn_classes_come_up_as_often_as_their_probabilities(shape: tuple[int, ...]):
    count = 20_000
    found = gaussian("classification", shape, whole=False)
    draws = found.sample(count, generator=seeded())
    assert draws.shape == (count, *shape[:-1])
    frequency = torch.stack([(draws == c).double().mean(dim=0) for c in range(shape[-1])], dim=-1)
    error = (found.probs * (1 - found.probs) / count).sqrt()
    assert ((frequency - found.probs).abs() / error).max() < 5
    assert torch.equal(draws, found.sample(count, generator=seeded()))


# --- binary ---------------------------------------------------------------------------------------------------------


@every_shape
def test_binary_probabilities_entropies_and_scores(shape: tuple[int, ...]):
    found = gaussian("binary", shape, whole=False)
    expected = torch.sigmoid(found.mean / (1 + math.pi * found.variance / 8).sqrt())
    assert_close(found.probs, expected, rtol=1e-12)
    assert torch.equal(found.probs > 0.5, found.mean > 0)
    y = torch.bernoulli(torch.full(shape, 0.5, dtype=torch.float64), generator=seeded())
    one_by_one = Bernoulli(probs=expected).log_prob(y).reshape(shape[0], -1)
    assert_close(found.log_prob(y), one_by_one.sum(dim=1))
    assert_close(found.log_prob(y.bool()), one_by_one.sum(dim=1))
    assert_close(found.entropy(), Bernoulli(probs=expected).entropy())


@pytest.mark.parametrize("link", ["probit", "sampling"])
def test_without_variance_binary_is_a_sigmoid(link: str):
    mean = random(6, 3)
    found = made("binary", mean, torch.zeros_like(mean), link=link)
    assert_close(found.probs, mean.sigmoid(), rtol=1e-12)
    assert found.mutual_information().abs().max() <= 1e-12


def test_binary_draws_come_up_as_often_as_their_probabilities():
    found, count = gaussian("binary", (6, 3), whole=False), 20_000
    draws = found.sample(count, generator=seeded())
    assert set(draws.unique().tolist()) == {0.0, 1.0}
    error = (found.probs * (1 - found.probs) / count).sqrt()
    assert ((draws.mean(dim=0) - found.probs).abs() / error).max() < 5


# --- out of predict -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linearised", "sampled", "linearised-sampled"])
@pytest.mark.parametrize("shape", [(9,), (9, 1), (9, 3), (9, 2, 3)], ids=str)
@pytest.mark.parametrize("likelihood", ["regression", "classification", "binary"])
def test_every_shape_of_output_works_with_every_method(method: str, shape: tuple[int, ...], likelihood: str):
    torch.manual_seed(0)
    model = Then(mlp(3, 4, math.prod(shape[1:])), lambda z: z.reshape(-1, *shape[1:])).double()
    posterior = posterior_over(model, n_data=1e5, prior_precision=1e4).replace(noise_variance=0.1)
    request: Callable[[], Predictive] = lambda: predict(  # noqa: E731
        posterior, normal(9, 3)(), likelihood=likelihood, predictive=method, covariance=True, generator=seeded()
    )
    if likelihood == "classification" and shape in ((9,), (9, 1)):
        with pytest.raises(MatchError, match=r"two classes.*likelihood='binary'"):
            request()
        return
    found = request()
    assert found.mean.shape == found.variance.shape == shape
    assert found.covariance.shape == (9, math.prod(shape[1:]), math.prod(shape[1:]))
    if likelihood == "classification":
        y, drawn, rows = torch.zeros(shape[:-1], dtype=torch.long), (7, *shape[:-1]), shape[:-1]
    else:
        y, drawn, rows = torch.zeros(shape), (7, *shape), (9,)
    assert found.log_prob(y).shape == rows
    assert found.sample(7).shape == drawn
    assert torch.isfinite(found.log_prob(y)).all()
    assert torch.isfinite(found.entropy()).all()
    if likelihood == "regression":
        assert found.entropy().shape == (9,)
        assert_close(found.total_variance, found.variance + 0.1, rtol=1e-6)


def test_noise_by_output_reaches_the_prediction():
    torch.manual_seed(0)
    noise = torch.tensor([0.1, 2.0], dtype=torch.float64)
    posterior, x = posterior_over(mlp(3, 4, 2).double()), normal(4, 3)()
    assert not predict(posterior, x).noise_variance.any()
    found = predict(posterior.replace(noise_variance=noise), x)
    assert_close(found.stddev, (predict(posterior, x).variance + noise).sqrt())


def test_the_link_asked_for_is_the_one_used():
    torch.manual_seed(0)
    posterior, x = posterior_over(mlp(3, 4, 3).double()), normal(4, 3)()
    probit, sampling = (
        predict(posterior, x, likelihood="classification", link=link) for link in ("probit", "sampling")
    )
    assert torch.equal(probit.mean, sampling.mean)
    assert not close(probit.probs, sampling.probs, rtol=1e-6)
