"""Predictive mixtures against explicit sums, torch's own mixtures, Monte Carlo and the definition of a quantile."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, MultivariateNormal, Normal

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import Component, LogitPredictive, NumericPredictive, Predictive
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.posterior.mixture import Mixture
from cases import mlp, orthonormal, soap, train, trained
from floats import approx, assert_close

WEIGHTS = (0.5, 0.2, 0.3)
SHAPES = [(5,), (5, 1), (5, 3), (5, 2, 3)]
LIKELIHOODS = ["regression", "classification", "binary"]
METHODS = ["linearised", "sampled", "linearised-sampled"]


def made(name: str, *moments: Tensor | None, noise_variance: Tensor | None = None, link: str = "probit") -> Predictive:
    noise = torch.zeros(()) if noise_variance is None else noise_variance
    return likelihood_of(name).predictive([Component(*moments, noise_variance=noise)], link=link)


def mixed(members: list[Predictive], weights: tuple[float, ...]) -> Predictive:
    first = members[0]
    components = [component for member in members for component in member.components]
    return first.likelihood.predictive(components, weights, link=first.link)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


@cache
def posteriors() -> list[ba.Posterior]:
    """Two diagonal ones, one of them in the likelihood form, and a Kronecker-factored one; each has a noise of its
    own.
    """
    found = []
    for seed, form in enumerate(("map", "likelihood")):
        model, optimizer = trained(3, 4, 2, dtype=torch.float64, seed=seed)
        found.append(ba.Posterior.from_optimizer(model, optimizer, 500, prior_precision=20.0, form=form))
    torch.manual_seed(2)
    model = mlp(3, 4, 2).double()
    optimizer = soap(model.parameters(), lr=1e-2, precondition_every=2)
    train(model, optimizer, seed=2)
    optimizer = orthonormal(optimizer)
    found.append(ba.Posterior.from_optimizer(model, optimizer, 500, prior_precision=20.0, structure="kronecker"))
    return [p.replace(noise_variance=[0.1 + 0.1 * i, 0.3]) for i, p in enumerate(found)]


def gaussians(shape: tuple[int, ...], *, whole: bool = False, count: int = 3) -> list[NumericPredictive]:
    """Far enough apart to have several modes, near enough to overlap."""
    found = []
    for seed in range(count):
        width = math.prod(shape[1:])
        root = random(shape[0], width, width, seed=10 + seed)
        covariance = root @ root.mT / width + 0.1 * torch.eye(width).double()
        variance = covariance.diagonal(dim1=1, dim2=2).reshape(shape)
        noise = random(*shape[1:], seed=20 + seed).square() + 0.1
        found.append(
            made(
                "regression",
                1.5 * random(*shape, seed=seed),
                variance,
                covariance if whole else None,
                noise_variance=noise,
            )
        )
    return found


def reference(members: list[NumericPredictive]) -> MixtureSameFamily:
    """The mixture over the joint outputs of an example."""
    size = len(members[0].mean)
    means = torch.stack([m.mean.reshape(size, -1) for m in members], dim=1)
    totals = torch.stack([(m.variance + m.noise_variance).reshape(size, -1) for m in members], dim=1)
    parts: Independent | MultivariateNormal = Independent(Normal(means, totals.sqrt()), 1)
    if members[0].covariance is not None:
        noises = [torch.diag_embed(m.noise_variance.expand(m.mean.shape).reshape(size, -1)) for m in members]
        parts = MultivariateNormal(
            means, torch.stack([m.covariance + noise for m, noise in zip(members, noises, strict=True)], dim=1)
        )
    return MixtureSameFamily(Categorical(torch.tensor(WEIGHTS, dtype=torch.float64).expand(size, 3)), parts)


# --- regression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["variances", "covariance"])
def test_regression_moments_and_densities_are_those_of_the_mixture(shape, whole):
    members = gaussians(shape, whole=whole)
    found, expected = mixed(members, WEIGHTS), reference(members)
    y = random(*shape, seed=7)
    assert_close(found.log_prob(y), expected.log_prob(y.reshape(5, -1)), rtol=1e-10, atol=1e-12)
    assert_close(found.mean, expected.mean.view(shape), rtol=1e-12, atol=1e-14)
    assert_close(found.total_variance, expected.variance.view(shape), rtol=1e-12, atol=1e-14)
    assert_close(found.stddev, expected.stddev.view(shape), rtol=1e-12, atol=1e-14)
    if whole:
        means = torch.stack([m.mean.reshape(5, -1) for m in members])
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        centred = means - torch.einsum("m,mbi->bi", weights, means)
        within = torch.einsum("m,mbij->bij", weights, torch.stack([m.covariance for m in members]))
        between = torch.einsum("m,mbi,mbj->bij", weights, centred, centred)
        assert_close(found.covariance, within + between, rtol=1e-12, atol=1e-14)
        assert_close(found.covariance.diagonal(dim1=1, dim2=2).reshape(shape), found.variance)
    else:
        assert found.covariance is None
    # Not the Gaussian of the same moments.
    gaussian = made("regression", found.mean, found.variance, found.covariance, noise_variance=found.noise_variance)
    assert float((gaussian.log_prob(y) - found.log_prob(y)).abs().max()) > 0.05


@pytest.mark.parametrize("level", [0.1, 0.5, 0.95, 0.999, 1 - 1e-9])
def test_the_interval_has_the_mass_asked_for_and_half_the_rest_on_either_side(level):
    members = gaussians((5, 3))
    found = mixed(members, WEIGHTS)
    low, high = found.interval(level)

    def cdf(y: Tensor) -> Tensor:
        return sum(w * Normal(m.mean, m.stddev).cdf(y) for w, m in zip(WEIGHTS, members, strict=True))

    tail = torch.full_like(low, (1 - level) / 2)
    assert_close(cdf(low), tail, rtol=1e-6, atol=1e-14)
    assert_close(1 - cdf(high), tail, rtol=1e-6, atol=1e-14)
    mirrored = mixed(
        [made("regression", -m.mean, m.variance, noise_variance=m.noise_variance) for m in members], WEIGHTS
    )
    for one, other in zip(mirrored.interval(level), (-high, -low), strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_interval_holds_its_share_of_draws():
    found = mixed(gaussians((5, 3)), WEIGHTS)
    n = 20_000
    draws = found.sample(n, generator=seeded())
    for level in (0.5, 0.9):
        low, high = found.interval(level)
        for share in ((draws < low).double(), (draws > high).double()):
            expected = (1 - level) / 2
            assert float((share.mean(dim=0) - expected).abs().max()) < 5 * math.sqrt(expected * (1 - expected) / n)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 95, math.nan])
def test_a_level_that_is_no_probability_is_named(level):
    with pytest.raises(SettingError, match=rf"level must lie between 0 and 1.* got {level}"):
        mixed(gaussians((5, 3)), WEIGHTS).interval(level)


def test_the_interval_of_members_without_any_spread():
    points = [made("regression", torch.tensor([float(i)]), torch.zeros(1)) for i in range(3)]
    low, high = mixed(points, (0.2, 0.6, 0.2)).interval(0.5)
    assert low.tolist() == approx([1.0])
    assert high.tolist() == approx([1.0])
    low, high = mixed(points, (0.2, 0.6, 0.2)).interval(0.9)
    assert low.tolist() == approx([0.0])
    assert high.tolist() == approx([2.0])


def test_draws_of_y_have_the_moments_of_the_mixture_and_come_from_one_member_each():
    members = gaussians((4, 2))
    found = mixed(members, WEIGHTS)
    n = 20_000
    draws = found.sample(n, generator=seeded())
    centred = (draws - found.mean) / found.stddev
    assert float(centred.mean(dim=0).abs().max()) < 5 / math.sqrt(n)
    assert float((centred.square().mean(dim=0) - 1).abs().max()) < 5 * math.sqrt(3 / n)
    assert torch.equal(draws, found.sample(n, generator=seeded()))
    far = [made("regression", torch.full((4, 1), 100.0 * i), torch.ones(4, 1)) for i in range(3)]
    nearest = (mixed(far, WEIGHTS).sample(n, generator=seeded()) / 100).round()[..., 0]
    assert bool((nearest == nearest[:, :1]).all())
    shares = torch.bincount(nearest[:, 0].long(), minlength=3) / n
    assert_close(shares, torch.tensor(WEIGHTS), atol=5 * math.sqrt(0.25 / n))


@pytest.mark.parametrize(("shape", "whole"), [((5,), False), ((5, 3), False), ((5, 3), True)])
def test_the_entropy_is_that_of_the_mixture(shape, whole):
    members = gaussians(shape, whole=whole)
    found = mixed(members, WEIGHTS).entropy()
    torch.manual_seed(0)
    expected = reference(members)
    # Its own error is a tenth of the tolerance, which is three standard deviations of 256 draws a member.
    scores = -expected.log_prob(expected.sample((100_000,)))
    assert_close(found, scores.mean(dim=0), atol=0.06)
    assert torch.equal(found, mixed(members, WEIGHTS).entropy())
    # Members that cannot be told apart add nothing; members that cannot be mistaken add all there is to know.
    equal = mixed([members[0]] * 3, WEIGHTS).entropy()
    assert_close(equal, members[0].entropy(), rtol=1e-9, atol=1e-9)
    apart = [made("regression", m.mean + 1e3 * i, m.variance, m.covariance) for i, m in enumerate(members)]
    known = sum(w * m.entropy() - w * math.log(w) for w, m in zip(WEIGHTS, apart, strict=True))
    assert_close(mixed(apart, WEIGHTS).entropy(), known, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["regression", "binary"])
def test_targets_of_another_shape_are_refused(kind):
    members = [made(kind, random(5, 3, seed=i), torch.ones(5, 3).double()) for i in range(2)]
    with pytest.raises(MatchError, match=r"targets have shape .*the outputs \(5, 3\)"):
        mixed(members, (0.5, 0.5)).log_prob(torch.zeros(5, 2))


# --- classification and binary --------------------------------------------------------------------------------------


def logits(kind: str, shape: tuple[int, ...], **options: object) -> list:
    return [made(kind, 2 * random(*shape, seed=i), random(*shape, seed=30 + i).square(), **options) for i in range(3)]


def entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.log()).sum(dim=-1)


@pytest.mark.parametrize("link", ["probit", "sampling"])
@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4)], ids=str)
def test_probabilities_of_classes_are_averaged(link, shape):
    members = logits("classification", shape, link=link)
    found = mixed(members, WEIGHTS)
    probs = sum(w * m.probs for w, m in zip(WEIGHTS, members, strict=True))
    assert_close(found.probs, probs, rtol=1e-12)
    assert_close(found.probs.sum(dim=-1), torch.ones(shape[:-1]).double())
    assert_close(found.entropy(), entropy(probs), rtol=1e-10)
    y = torch.randint(4, shape[:-1], generator=seeded())
    assert_close(found.log_prob(y), probs.log().gather(-1, y[..., None])[..., 0], rtol=1e-12)
    with pytest.raises(MatchError, match="class indices must be"):
        found.log_prob(y + 4)
    draws = found.sample(20_000, generator=seeded())
    assert draws.shape == (20_000, *shape[:-1])
    shares = torch.nn.functional.one_hot(draws, 4).double().mean(dim=0)
    assert float((shares - probs).abs().max()) < 5 * math.sqrt(0.25 / 20_000)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3)], ids=str)
def test_binary_outputs_of_an_example_are_one_members(shape):
    members = logits("binary", shape)
    found = mixed(members, WEIGHTS)
    probs = sum(w * m.probs for w, m in zip(WEIGHTS, members, strict=True))
    assert_close(found.probs, probs, rtol=1e-12)
    assert_close(found.entropy(), entropy(torch.stack([probs, 1 - probs], dim=-1)), rtol=1e-10)
    y = (random(*shape, seed=9) > 0).double()
    joint = sum(
        w * (m.probs * y + (1 - m.probs) * (1 - y)).reshape(5, -1).prod(dim=1)
        for w, m in zip(WEIGHTS, members, strict=True)
    )
    assert_close(found.log_prob(y), joint.log(), rtol=1e-10)
    if y[0].numel() == 1:
        chosen = (probs * y + (1 - probs) * (1 - y)).reshape(5)
        assert_close(found.log_prob(y).exp(), chosen, rtol=1e-10)
    draws = found.sample(20_000, generator=seeded())
    assert float((draws.mean(dim=0) - probs).abs().max()) < 5 * math.sqrt(0.25 / 20_000)
    # All answers to an example, over all draws of one, have the joint's frequency.
    share = (draws == y).reshape(20_000, 5, -1).all(dim=2).double().mean(dim=0)
    assert float((share - joint).abs().max()) < 5 * math.sqrt(0.25 / 20_000)


@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_mutual_information_is_what_all_draws_together_say(kind):
    """Against H[E p] − E[H p] over many draws of the logits of all members."""
    members = logits(kind, (5, 4), link="sampling")
    found = mixed(members, WEIGHTS).mutual_information()
    total = torch.zeros(5, 4).double()
    spread = 0.0
    for w, m in zip(WEIGHTS, members, strict=True):
        f = m.mean + m.variance.sqrt() * random(20_000, 5, 4, seed=40)
        p = f.softmax(dim=-1) if kind == "classification" else f.sigmoid()
        total = total + w * p.mean(dim=0)
        both = p if kind == "classification" else torch.stack([p, 1 - p], dim=-1)
        spread = spread + w * torch.special.entr(both).sum(dim=-1).mean(dim=0)
    both = total if kind == "classification" else torch.stack([total, 1 - total], dim=-1)
    assert_close(found, entropy(both) - spread, atol=0.06)
    assert bool((found >= 0).all())
    certain = [made(kind, m.mean, torch.zeros_like(m.variance)) for m in members]
    disagreement = mixed(certain, WEIGHTS)
    assert float(disagreement.mutual_information().max()) > 0.1
    agreed = mixed([certain[0]] * 3, WEIGHTS).mutual_information()
    assert_close(agreed, torch.zeros_like(agreed), atol=1e-12)


# --- draws of f -----------------------------------------------------------------------------------------------------


def test_draws_are_the_members_in_turn_and_in_proportion():
    drawn = [i + torch.arange(8).view(8, 1) / 100 for i in range(3)]
    members = [made("regression", d.mean(dim=0), d.var(dim=0), None, d) for d in drawn]
    equal = mixed(members, (1 / 3, 1 / 3, 1 / 3)).draws
    assert equal.shape == (24, 1)
    assert equal[:6, 0].floor().tolist() == [0, 1, 2, 0, 1, 2]
    uneven = mixed(members, (0.5, 0.25, 0.25)).draws
    assert torch.bincount(uneven[:, 0].long()).tolist() == [8, 4, 4]
    assert torch.bincount(uneven[:8, 0].long()).tolist() == [4, 2, 2]
    tiny = mixed(members, (0.98, 0.01, 0.01)).draws
    assert torch.equal(tiny, drawn[0])
    assert mixed(gaussians((5, 3)), WEIGHTS).draws is None


# --- predict --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("predictive", METHODS)
def test_predict_mixes_what_the_members_predict(likelihood, predictive):
    mixture = Mixture(posteriors(), WEIGHTS)
    x = random(6, 3, seed=5)
    options = {"likelihood": likelihood, "predictive": predictive, "covariance": True, "n_samples": 100}
    before = [{k: v.clone() for k, v in m.model.state_dict().items()} for m in mixture]
    found = mixture.predict(x, generator=seeded(), **options)
    assert type(found) is (NumericPredictive if likelihood == "regression" else LogitPredictive)
    again = mixture.predict(x, generator=seeded(), **options)
    assert torch.equal(found.variance, again.variance)
    exact = [m.predict(x, likelihood=likelihood, covariance=True) for m in mixture]
    expected = mixed(exact, WEIGHTS)
    slack = 0.0 if predictive == "linearised" else 0.2
    assert_close(found.mean, expected.mean, rtol=slack, atol=slack / 4)
    assert_close(found.covariance, expected.covariance, rtol=2 * slack, atol=slack / 4)
    if likelihood == "regression":
        y = expected.mean + 0.2
        density = sum(
            w * MultivariateNormal(m.mean, m.covariance + torch.diag(p.noise_variance)).log_prob(y).exp()
            for w, m, p in zip(WEIGHTS, exact, mixture, strict=True)
        )
        assert_close(found.log_prob(y), density.log(), atol=max(1e-10, slack))
    else:
        assert_close(found.probs, expected.probs, atol=slack / 4)
    if predictive == "linearised":
        assert found.draws is None
    else:
        assert found.draws.shape == (100 + 40 + 60, 6, 2)
        assert_close(found.draws.mean(dim=0), found.mean, rtol=0.2, atol=0.05)
    for member, old in zip(mixture, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in member.model.state_dict().items())


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_equal_members_predict_as_one(likelihood):
    one = posteriors()[2]
    x = random(6, 3, seed=5)
    alone = one.predict(x, likelihood=likelihood, covariance=True)
    found = Mixture([one, one], (0.3, 0.7)).predict(x, likelihood=likelihood, covariance=True)
    y = alone.sample(1, generator=seeded())[0]
    close = {"rtol": 1e-12, "atol": 1e-14}
    for name in ("mean", "variance", "covariance"):
        assert_close(getattr(found, name), getattr(alone, name), **close)
    assert_close(found.log_prob(y), alone.log_prob(y), **close)
    assert_close(found.entropy(), alone.entropy(), rtol=1e-9, atol=1e-9)
    if likelihood == "regression":
        for mine, its in zip(found.interval(0.9), alone.interval(0.9), strict=True):
            assert_close(mine, its, **close)
    else:
        assert_close(found.mutual_information(), alone.mutual_information(), rtol=1e-9, atol=1e-12)


def test_the_order_of_the_members_does_not_matter():
    parts, x = posteriors(), random(6, 3, seed=5)
    one = Mixture(parts, WEIGHTS).predict(x, likelihood="regression")
    other = Mixture(parts[::-1], WEIGHTS[::-1]).predict(x, likelihood="regression")
    y = one.mean + 0.3
    assert_close(one.log_prob(y), other.log_prob(y), rtol=1e-12)
    for mine, its in zip((one.variance, *one.interval()), (other.variance, *other.interval()), strict=True):
        assert_close(mine, its, rtol=1e-12, atol=1e-13)


def test_members_on_one_model_predict_as_on_their_own():
    parts, x = posteriors(), random(6, 3, seed=5)
    model = mlp(3, 4, 2).double()
    shared = Mixture([part.gathered(model) for part in parts], WEIGHTS).predict(x, likelihood="regression")
    own = Mixture(parts, WEIGHTS).predict(x, likelihood="regression")
    assert torch.equal(shared.mean, own.mean)
    assert torch.equal(shared.variance, own.variance)


def test_members_draw_different_weights():
    one = posteriors()[0]
    found = Mixture([one, one]).predict(
        random(6, 3), likelihood="regression", predictive="sampled", n_samples=5, generator=seeded()
    )
    assert not torch.equal(found.components[0].draws, found.components[1].draws)
    torch.manual_seed(3)
    first = Mixture([one, one]).predict(random(6, 3), likelihood="regression", predictive="sampled", n_samples=5)
    torch.manual_seed(3)
    assert torch.equal(
        Mixture([one, one]).predict(random(6, 3), likelihood="regression", predictive="sampled", n_samples=5).draws,
        first.draws,
    )


def test_mappings_and_forward_reach_every_member():
    mixture = Mixture(posteriors(), WEIGHTS)
    x = random(6, 3, seed=5)
    expected = mixture.predict(x, likelihood="regression")
    assert torch.equal(mixture.predict({"input": x}, likelihood="regression").mean, expected.mean)
    doubled = mixture.predict(x, likelihood="regression", forward=lambda model, inputs: 2 * model(inputs))
    assert_close(doubled.variance, 4 * expected.variance)


def test_float32_networks_keep_their_type():
    parts = []
    for seed in range(2):
        model, optimizer = trained(3, 4, 2, seed=seed)
        parts.append(ba.Posterior.from_optimizer(model, optimizer, 50, prior_precision=2.0).replace(noise_variance=0.1))
    found = Mixture(parts).predict(torch.randn(6, 3, generator=seeded()), likelihood="regression")
    low, high = found.interval()
    assert {t.dtype for t in (found.mean, found.variance, low, high, found.log_prob(found.mean), found.entropy())} == {
        torch.float32
    }
    cdf = sum(
        Normal(c.mean.double(), (c.variance + c.noise_variance).double().sqrt()).cdf(low.double()) / 2
        for c in found.components
    )
    assert_close(cdf, torch.full_like(cdf, 0.025), rtol=1e-4)


class Broken(nn.Module):
    """Fails on the second member's forward, after the first has predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("broken")
        return self.inner(x)


def test_models_come_back_when_a_member_fails():
    parts = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Broken().double()
        optimizer = torch.optim.Adam(model.parameters())
        model(random(8, 3)).square().mean().backward()
        optimizer.step()
        parts.append(ba.Posterior.from_optimizer(model.train(), optimizer, 50, prior_precision=1.0))
    mixture = Mixture(parts)
    before = [{k: v.clone() for k, v in m.model.state_dict().items()} for m in mixture]
    parts[1].model.broken = True
    for predictive in METHODS:
        with pytest.raises(RuntimeError, match="broken"):
            mixture.predict(random(6, 3), likelihood="regression", predictive=predictive)
    for member, old in zip(mixture, before, strict=True):
        assert member.model.training
        assert all(torch.equal(value, old[name]) for name, value in member.model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"likelihood": "counts"}, "likelihood must be one of"),
        ({"predictive": "exact"}, "predictive must be one of"),
        ({"n_samples": 0}, "n_samples"),
        ({"link": "logit"}, "link must be one of"),
        ({"memory_budget": 0}, "memory_budget"),
    ],
)
def test_options_that_are_none_are_named(options, match):
    with pytest.raises(SettingError, match=match):
        Mixture(posteriors(), WEIGHTS).predict(random(6, 3), **{"likelihood": "regression", **options})
