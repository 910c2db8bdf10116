"""One suite over all likelihoods: losses, Hessians, targets, distributions, against torch.distributions and draws."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Exponential, Normal, Poisson

from bayesadam.errors import CalibrationError, MatchError, SettingError
from bayesadam.likelihoods import LIKELIHOODS, Component, Likelihood, Moments, Prediction, agreed, likelihood
from floats import approx, assert_close

TARGETS = 2
every_likelihood = pytest.mark.parametrize("kind", LIKELIHOODS.values(), ids=LIKELIHOODS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _halves(f: Tensor) -> Distribution:
    mean, log_variance = f.chunk(2, dim=-1)
    return Normal(mean, (log_variance / 2).exp())


# p(y | f), observation noise of variance ½ where there is one; outputs for two targets.
EXAMPLES = {
    "regression": (lambda f: Normal(f, 0.5**0.5), TARGETS),
    "classification": (lambda f: Categorical(logits=f), 3),
    "binary": (lambda f: Bernoulli(logits=f), TARGETS),
    "heteroscedastic": (_halves, 2 * TARGETS),
    "poisson": (lambda f: Poisson(f.exp()), TARGETS),
}


def targets_of(name: str, outputs: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return EXAMPLES[name][0](outputs).sample()


def component(kind: Likelihood, mean: Tensor, variance: Tensor | None = None, **more: object) -> Component:
    noise = torch.tensor(0.5) if kind.noise else None
    return Component(Moments(mean, variance, draws=more.pop("draws", None)), noise, **more)


@every_likelihood
def test_the_loss_is_the_negative_log_likelihood_but_for_a_constant(kind):
    f = random(4, 7, EXAMPLES[kind.name][1])
    y = targets_of(kind.name, f[0])
    losses = kind.loss(f, y.expand(4, *y.shape))
    per_target = 1 if y.dim() == 1 else TARGETS
    truth = torch.stack([-EXAMPLES[kind.name][0](each).log_prob(y).sum() / (len(y) * per_target) for each in f])
    assert_close(losses.diff(), truth.diff())
    f.requires_grad_()
    (training,) = torch.autograd.grad(kind.training_loss(f, y.expand(4, *y.shape)).sum(), f)
    assert training.isfinite().all()


@every_likelihood
def test_targets_of_a_data_set(kind):
    f = random(9, EXAMPLES[kind.name][1])
    y = targets_of(kind.name, f)
    assert kind.n_outputs(torch.tensor([0, 2, 1]) if kind.name == "classification" else y) == f.shape[1]
    assert torch.equal(kind.shaped(y, f), y.to(torch.int64 if kind.name == "classification" else f.dtype))
    start = kind.start(y)
    assert start is None or start.shape == (TARGETS,)


@every_likelihood
def test_the_hessian_is_that_of_autograd(kind):
    """At y = m ± σ the average of anything quadratic in y is its expectation."""
    make, width = EXAMPLES[kind.name]
    f = random(width)
    distribution = make(f)
    targets = [targets_of(kind.name, f)]
    if isinstance(distribution, Normal | Exponential):
        targets = [distribution.mean + sign * distribution.stddev for sign in (-1, 1)]
    each = [torch.autograd.functional.hessian(lambda g, y=y: -make(g).log_prob(y).sum(), f) for y in targets]
    whole = torch.stack(each).mean(dim=0)
    noise = torch.tensor(0.5) if kind.noise else None
    assert_close(kind.hessian_diagonal(f[None], noise)[0], whole.diagonal())
    if kind.coupled:
        root = kind.hessian_root(f[None])[0]
        assert_close(root @ root.T, whole)
    else:
        assert_close(whole, whole.diagonal().diag(), atol=1e-12)


@every_likelihood
def test_the_mean_networks_distribution(kind):
    f = random(6, EXAMPLES[kind.name][1])
    truth, y = EXAMPLES[kind.name][0](f), targets_of(kind.name, f)
    p = Prediction(kind, (component(kind, f),))
    expected = truth.log_prob(y)
    assert_close(p.log_prob(y), expected if expected.dim() == 1 else expected.sum(dim=1))
    if kind.is_classes:
        assert_close(p.probs, truth.probs)
    else:
        assert_close(p.mean, truth.mean)
        assert_close(p.variance, truth.variance)
        assert_close(p.stddev, truth.stddev)


@every_likelihood
def test_the_moments_and_the_density_are_averages_over_f(kind):
    """Gaussian f against 400,000 draws of it; numbers within five standard errors, probits within three hundredths."""
    make, width = EXAMPLES[kind.name]
    mean, variance = 0.5 * random(3, width), 0.3 * random(3, width, seed=1).square()
    logarithms = {"poisson": slice(None), "heteroscedastic": slice(TARGETS, None)}.get(kind.name, slice(0))
    # Of a logarithm exp f is the mean, and its variance that relative to it.
    drawn, centre = variance.clone(), mean.clone()
    drawn[:, logarithms] = variance[:, logarithms].log1p()
    centre[:, logarithms] -= drawn[:, logarithms] / 2
    f = centre + drawn.sqrt() * random(400_000, 3, width, seed=2)
    y = targets_of(kind.name, mean)
    p, at_draws = Prediction(kind, (component(kind, mean, variance),)), make(f)
    likelihoods = at_draws.log_prob(y).exp()
    if kind.is_classes:
        assert_close(p.probs, at_draws.probs.mean(dim=0), rtol=0, atol=0.03)
        return
    error = likelihoods.std(dim=0) / 400_000**0.5
    assert ((p.distribution.log_prob(y).exp() - likelihoods.mean(dim=0)).abs() < 5 * error).all()
    first = at_draws.mean
    error = first.std(dim=0) / 400_000**0.5
    assert ((p.mean - first.mean(dim=0)).abs() < 5 * error).all()
    assert_close(p.variance, at_draws.variance.mean(dim=0) + first.var(dim=0), rtol=0.02)


@every_likelihood
def test_draws_of_f_are_averaged(kind):
    make, width = EXAMPLES[kind.name]
    draws = random(50, 4, width)
    p = Prediction(kind, (component(kind, draws.mean(dim=0), draws.var(dim=0), draws=draws),))
    y = targets_of(kind.name, draws[0])
    if kind.is_classes:
        assert_close(p.probs, make(draws).probs.mean(dim=0))
    elif kind.name != "regression":
        each = make(draws).log_prob(y)
        if kind.name == "poisson":
            assert_close(p.distribution.log_prob(y), each.logsumexp(dim=0) - torch.tensor(50.0).double().log())
        assert p.variance.isfinite().all()
    assert torch.equal(p.draws, draws)


@every_likelihood
def test_networks_are_mixed(kind):
    make, width = EXAMPLES[kind.name]
    f = random(2, 5, width)
    y = targets_of(kind.name, f[0])
    mixture = Prediction(kind, tuple(component(kind, each, weight=w) for each, w in zip(f, (0.3, 0.7), strict=True)))
    scores = [make(each).log_prob(y) for each in f]
    scores = [s if s.dim() == 1 or kind.is_classes else s.sum(dim=1) for s in scores]
    expected = torch.logsumexp(
        torch.stack([scores[0] + torch.tensor(0.3).log(), scores[1] + torch.tensor(0.7).log()]), 0
    )
    if kind.name == "binary":
        probs = 0.3 * make(f[0]).probs + 0.7 * make(f[1]).probs
        expected = Bernoulli(probs).log_prob(y).sum(dim=1)
    assert_close(mixture.log_prob(y), expected, rtol=1e-6)
    assert_close(mixture.f_mean, 0.3 * f[0] + 0.7 * f[1])
    if not kind.is_classes:
        means, variances = [make(each).mean for each in f], [make(each).variance for each in f]
        mean = 0.3 * means[0] + 0.7 * means[1]
        assert_close(mixture.mean, mean)
        spread = sum(w * (v + (m - mean).square()) for w, v, m in zip((0.3, 0.7), variances, means, strict=True))
        assert_close(mixture.variance, spread)
        assert_close(mixture.distribution.mean, mean)


def test_the_covariance_of_a_regression_counts():
    mean, root = random(4, 3), random(4, 3, 3, seed=1)
    covariance, kind = root @ root.mT, likelihood("regression")
    f = Moments(mean, covariance.diagonal(dim1=1, dim2=2), covariance)
    p, y = Prediction(kind, (Component(f, torch.tensor(0.5)),)), random(4, 3, seed=2)
    joint = torch.distributions.MultivariateNormal(mean, covariance + 0.5 * torch.eye(3))
    assert_close(p.log_prob(y), joint.log_prob(y))
    assert torch.equal(p.covariance, covariance)


def test_temperatures_divide_logits():
    for name in ("classification", "binary"):
        kind, f = likelihood(name), random(5, 3)
        cold = Prediction(kind, (component(kind, f, temperature=2.0),))
        assert_close(cold.probs, EXAMPLES[name][0](f / 2).probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["poisson", "heteroscedastic"])
def test_a_variance_of_a_logarithm_is_not_exponentiated(name, dtype):
    """Standard deviations grow as its root, and outputs that are far off leave finite numbers."""
    kind, log, variance = likelihood(name), torch.tensor([[0.0], [1.0], [500.0]]), torch.tensor([[1e6], [0.01], [1e6]])
    if name == "heteroscedastic":
        log, variance = (torch.cat([torch.zeros(3, 1), x], dim=1) for x in (log, variance * torch.ones(3, 1)))
        variance[:, 0] = 0.0
    p = Prediction(kind, (Component(Moments(log.to(dtype), variance.to(dtype))),))
    assert p.mean.isfinite().all()
    assert p.variance.isfinite().all()
    assert kind.hessian_diagonal(log.to(dtype)).isfinite().all()
    assert kind.hessian_diagonal(-log.to(dtype)).isfinite().all()
    y = torch.tensor([[0.0], [3.0], [40.0]]).to(dtype)
    assert p.log_prob(y).isfinite().all()
    if name == "poisson":
        assert_close(p.mean[:2, 0], torch.tensor([1.0, math.e], dtype=dtype))
        assert_close(p.variance[:2, 0], torch.tensor([1 + 1e6, math.e + 0.01 * math.e**2], dtype=dtype))
    else:
        assert_close(p.variance[:2, 0], torch.tensor([1.0, math.e], dtype=dtype), rtol=1e-5)


@pytest.mark.parametrize("variance", [1e-9, 1e-3, 0.5, 4.0])
@pytest.mark.parametrize("rate", [0.1, 3.0, 3e3])
def test_probabilities_of_counts_sum_to_one_without_gaps(rate, variance):
    f = Moments(torch.tensor([[rate]], dtype=torch.float64).log(), torch.tensor([[variance]], dtype=torch.float64))
    p = likelihood("poisson").distribution([Component(f)])
    y = torch.arange(int(20 * rate) + 1000, dtype=torch.float64)[:, None]
    log_probs = p.log_prob(y)[:, 0]
    assert float(log_probs.exp().sum()) == approx(1, abs=1e-2 if variance > 1 else 1e-4)
    assert float((y[:, 0] * log_probs.exp()).sum()) == approx(rate, rel=0.2 if variance > 1 else 1e-3)
    # As y grows the probabilities rise to one mode, and fall.
    rising = (log_probs[log_probs > -30].diff() > 1e-9).long()
    assert int((rising.diff() > 0).sum()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_of_a_rate_that_is_known_are_poisson(dtype):
    kind, f = likelihood("poisson"), random(50, 2).to(dtype)
    y = targets_of("poisson", f)
    p = kind.distribution([Component(Moments(f, torch.full_like(f, 1e-10)))])
    assert_close(p.log_prob(y), Poisson(f.exp()).log_prob(y), rtol=1e-5, atol=1e-5)
    assert p.sample((20,)).shape == (20, 50, 2)


def test_ends_of_intervals_of_counts():
    low, high = torch.tensor([-2.0, 1.2, 0.2, 4.0000005, 0.0]), torch.tensor([-1.0, 4.9, 0.8, 5.9999995, math.inf])
    low, high = likelihood("poisson").ends(low, high)
    assert low.tolist() == [0, 2, 1, 4, 0]
    assert high.tolist() == [0, 4, 1, 6, math.inf]


def test_heteroscedastic_noise_has_a_ceiling():
    kind = likelihood("heteroscedastic")
    wide = Moments(torch.tensor([[0.0, 200.0]]), torch.tensor([[0.0, 400.0]]))
    p = Prediction(kind, (Component(wide, torch.tensor([4.0])),))
    assert float(p.variance) <= 4.0 + 1e-5
    y = random(50, 1)
    assert_close(kind.ceiling(y), (y - y.mean()).square().max()[None])


@every_likelihood
def test_novelty_grows_with_leverage(kind):
    f = random(1, EXAMPLES[kind.name][1]).expand(6, -1)
    found = kind.novelty(f, torch.tensor([0.1, 0.5, 1.0, 3.0, 10.0, 100.0]).double())
    assert found.shape == (6,)
    assert (found.diff() > 0).all()


def test_novelty_of_tokens_is_the_mean_of_the_positions():
    kind, f, r = likelihood("classification"), random(4, 5, 3), random(4).square()
    expected = Categorical(logits=f).entropy() + 0.3 * r.log()[:, None]
    assert_close(kind.token_novelty(f, r), expected)
    assert_close(kind.novelty(f, r), expected.mean(dim=1))


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "message"),
    [
        ("classification", (4, 3), torch.zeros(4, 1), "class indices of shape"),
        ("classification", (4, 1), torch.zeros(4), "at least two classes"),
        ("heteroscedastic", (4, 3), torch.zeros(4, 1), "two outputs per target"),
        ("regression", (4, 3), torch.zeros(4, 2), "the targets have shape"),
        ("poisson", (4, 1), torch.tensor([1.5, 0, 0, 0]), "are counts"),
        ("poisson", (4, 1), torch.tensor([-1.0, 0, 0, 0]), "are counts"),
    ],
)
def test_targets_that_do_not_match(name, outputs, targets, message):
    with pytest.raises(MatchError, match=message):
        likelihood(name).matched(targets, torch.zeros(outputs))


def test_class_indices_and_zeros_and_ones():
    p = Prediction(likelihood("classification"), (Component(Moments(random(3, 4))),))
    with pytest.raises(MatchError, match="class indices must be 0 to 3, got 0 to 4"):
        p.log_prob(torch.tensor([0, 4, 1]))
    p = Prediction(likelihood("binary"), (Component(Moments(random(3, 1))),))
    with pytest.raises(MatchError, match="must be 0 or 1"):
        p.log_prob(torch.tensor([[0.0], [0.5], [1.0]]))
    with pytest.raises(MatchError, match="class indices, whole numbers"):
        likelihood("classification").shaped(torch.tensor([0.5]), torch.zeros(1))


def test_what_a_prediction_does_not_have():
    numbers = Prediction(likelihood("regression"), (Component(Moments(random(3, 1))),))
    with pytest.raises(SettingError, match="probabilities are of classes"):
        _ = numbers.probs
    with pytest.raises(CalibrationError, match=r"posterior\.tune"):
        _ = numbers.stddev
    with pytest.raises(SettingError, match="not known"):
        _ = numbers.f_variance
    with pytest.raises(SettingError, match="covariance=True"):
        _ = numbers.covariance
    with pytest.raises(SettingError, match="draws=32"):
        _ = numbers.draws
    classes = Prediction(likelihood("classification"), (Component(Moments(random(3, 4))),))
    with pytest.raises(SettingError, match=r"have \.probs"):
        _ = classes.mean


def test_which_likelihood():
    assert agreed(None, "binary").name == agreed("binary", None).name == agreed("binary", "binary").name == "binary"
    with pytest.raises(SettingError, match="posterior is for likelihood='binary'"):
        agreed("regression", "binary")
    with pytest.raises(SettingError, match="no likelihood yet"):
        agreed(None, None)
    with pytest.raises(SettingError, match="must be one of"):
        likelihood("gaussian")


MISMATCHES = [
    ("classification", torch.rand(9, 3).softmax(dim=1), None, "leave out the softmax"),
    ("classification", torch.zeros(9, 3), None, None),
    ("binary", torch.rand(9, 2), None, "leave out the sigmoid"),
    ("binary", torch.rand(9, 2) - 0.5, None, None),
    ("poisson", torch.zeros(200, 1), 5 * torch.poisson(torch.ones(200, 1)), "times as much"),
    ("poisson", torch.zeros(200, 1), torch.poisson(torch.ones(200, 1)), None),
    ("regression", torch.rand(9, 2), torch.rand(9, 2), None),
]


@pytest.mark.parametrize(("name", "outputs", "targets", "message"), MISMATCHES)
def test_outputs_of_another_likelihood(name, outputs, targets, message):
    reason = likelihood(name).mismatch(outputs, targets)
    assert (reason is None) if message is None else message in reason


def test_tiny_probabilities_keep_their_logarithm():
    p = Prediction(likelihood("classification"), (Component(Moments(torch.tensor([[0.0, 200.0]]))),))
    assert float(p.log_prob(torch.tensor([0]))) == approx(-87.3, abs=0.1)
