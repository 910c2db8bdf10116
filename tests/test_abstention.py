"""Which inputs are answered: the exact bounds, the family of tests, and what `calibrate` and `predict` make of them."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import beta, binom
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import scores
from bayesadam.errors import CalibrationError, HeldOutWarning, MatchError, SettingError
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.likelihoods.abstention import (
    Abstention,
    binomial_cdf,
    certified,
    needed,
    remedy,
    starts,
    upper_bound,
)
from bayesadam.posterior.report import described
from cases import mlp
from floats import approx


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trials", [1, 7, 300, 20_000])
@pytest.mark.parametrize("p", [1e-4, 0.02, 0.5, 0.97])
def test_the_binomial_distribution(trials, p):
    for successes in sorted({0, 1, trials // 50, trials // 2, trials - 1, trials}):
        assert binomial_cdf(successes, trials, p) == approx(binom.cdf(successes, trials, p), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize(("errors", "trials"), [(0, 1), (0, 149), (3, 149), (40, 5000), (9, 10), (10, 10)])
@pytest.mark.parametrize("level", [0.05, 0.0125])
def test_clopper_and_pearsons_bound(errors, trials, level):
    expected = 1.0 if errors == trials else beta.ppf(1 - level, errors + 1, trials - errors)
    assert upper_bound(errors, trials, level) == approx(expected, abs=1e-10)


@pytest.mark.parametrize("risk", [0.01, 0.02, 0.3])
def test_the_fewest_examples(risk):
    n = needed(risk, 0.05)
    assert (1 - risk) ** (n - 1) <= 0.05 < (1 - risk) ** (n - 2)
    sure = torch.arange(float(n)), torch.zeros(n, dtype=torch.bool)
    assert certified(*sure, risk=risk, confidence=0.95) == (n - 1.0, n, 0, approx(0.05))
    assert certified(*(part[1:] for part in sure), risk=risk, confidence=0.95) is None


# --- the procedure --------------------------------------------------------------------------------------------------


def by_hand(doubt: np.ndarray, wrong: np.ndarray, risk: float, confidence: float) -> float | None:
    """The fallback procedure, hypothesis by hypothesis."""
    n, found, level = len(doubt), None, 0.0
    shares = starts(n, risk, 1 - confidence)
    if not shares:
        return None
    numbers, k = set(shares) | {n}, float(shares[0])
    while round(k) <= n:
        numbers.add(round(k))
        k *= 1.03
    for number in sorted(numbers):
        level += (1 - confidence) / len(shares) * (number in shares)
        t = np.sort(doubt)[number - 1]
        within = doubt <= t
        if level > 0 and binom.cdf(wrong[within].sum(), within.sum() - 1, risk) <= level * (1 + 1e-12):
            found = t
        else:
            level = 0.0
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("n", "risk", "ties"), [(400, 0.05, False), (1000, 0.05, True), (3000, 0.02, False)])
def test_the_threshold_is_that_of_the_fallback_procedure(seed, n, risk, ties):
    generator = np.random.default_rng(seed)
    doubt = generator.random(n)
    wrong = generator.random(n) < 0.3 * doubt**3
    doubt = np.ceil(30 * doubt) / 30 if ties else doubt
    found = certified(torch.tensor(doubt), torch.tensor(wrong), risk=risk, confidence=0.9)
    expected = by_hand(doubt, wrong, risk, 0.9)
    assert (found is None) == (expected is None)
    if found is not None:
        within = doubt <= expected
        assert found[:3] == (expected, within.sum(), wrong[within].sum())


WORLDS = {
    "growing": lambda u: 0.4 * u**3,
    "at the risk itself": lambda u: 0 * u + 0.0501,
    "a step": lambda u: np.where(u < 0.4, 0.05, 0.3),
    "rising and falling": lambda u: np.where((10 * u).astype(int) % 2 == 0, 0.0, 0.105),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.slow
def test_the_risk_is_exceeded_no_more_often_than_was_allowed(world):
    rate, generator, runs, n, risk = WORLDS[world], np.random.default_rng(0), 300, 400, 0.05
    grid = (np.arange(20_000) + 0.5) / 20_000
    true_risk = np.cumsum(rate(grid)) / np.arange(1, 20_001)
    exceeded = answered = 0
    for _ in range(runs):
        u = generator.random(n)
        wrong = generator.random(n) < rate(u)
        found = certified(torch.tensor(u), torch.tensor(wrong), risk=risk, confidence=0.9)
        if found is not None:
            exceeded += true_risk[int(found.threshold * 20_000)] > risk
            answered += 1
    # One world in a thousand would be beyond it by chance if the level were met exactly.
    assert exceeded <= binom.ppf(0.999, runs, 0.1)
    if world == "growing":
        assert answered > 0.9 * runs


# --- calibrated posteriors ------------------------------------------------------------------------------------------


def blobs(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three overlapping clouds."""
    y = torch.randint(3, (n,), generator=seeded(seed))
    angle = 2 * math.pi * y / 3
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.6 * torch.randn(n, 2, generator=seeded(seed + 1)), y


def waves(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two targets."""
    x = 4 * torch.rand(n, 1, generator=seeded(seed)) - 2
    noise = torch.randn(n, 2, generator=seeded(seed + 1)) * (0.1 + 0.2 * (x > 0))
    return x, torch.cat([x.sin(), x.cos()], dim=1) + noise


@cache
def trained(likelihood: str, seed: int = 0) -> ba.Posterior:
    torch.manual_seed(seed)
    record = likelihood_of(likelihood)
    x, y = data(likelihood, 300, 100)
    model = mlp(x.shape[1], 16, 3 if likelihood == "classification" else 2 * record.outputs_per_target)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        record.loss(model(x)[None], y[None]).sum().backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model, optimizer, 300, batch_size=300, likelihood=likelihood)


def data(likelihood: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    if likelihood == "classification":
        return blobs(n, seed)
    if likelihood == "binary":
        x, y = blobs(n, seed)
        return x, torch.stack([y == 0, y == 1], dim=1).float()
    x, y = waves(n, seed)
    return (x, torch.poisson((1 + y).clamp(min=0.1), generator=seeded(seed))) if likelihood == "poisson" else (x, y)


SETTINGS: dict[str, dict[str, Any]] = {
    "classification": {"risk": 0.05},
    "binary": {"risk": 0.05},
    "regression": {"risk": 0.1, "tolerance": 0.7},
    "heteroscedastic": {"risk": 0.1, "tolerance": 0.3},
    "poisson": {"risk": 0.3, "tolerance": 2.5},
}


def wrong_by_hand(p: Any, y: Tensor, tolerance: float | None) -> Tensor:
    if tolerance is not None:
        return ((p.predicted_mean - y).abs() > tolerance).any(dim=1)
    if p.likelihood.name == "binary":
        return ((p.probs > 0.5) != (y > 0.5)).any(dim=1)
    return p.probs.argmax(dim=1) != y


@pytest.mark.parametrize("by", ["confidence", "novelty"])
@pytest.mark.parametrize("likelihood", SETTINGS)
def test_what_is_answered(likelihood, by, tmp_path):
    held_out, (x, y) = data(likelihood, 600, 200), data(likelihood, 2000, 300)
    # Novelty is no good order of these errors.
    settings = SETTINGS[likelihood] | ({"risk": 0.4} if by == "novelty" else {})
    posterior = ba.calibrate(trained(likelihood), held_out, **settings, answer_by=by)
    rule, p = posterior.calibration.abstention, posterior.predict(x)
    assert (rule.n, rule.by, rule.confidence) == (600, by, 0.95)
    assert rule.threshold is not None
    assert rule.errors / rule.answered <= rule.bound <= rule.risk
    if likelihood in ("classification", "binary"):
        probs = (
            p.probs.max(dim=1).values if likelihood == "classification" else p.probs.maximum(1 - p.probs).prod(dim=1)
        )
        doubt = 1 - probs
    else:
        doubt = p.stddev.max(dim=1).values
    score = p.novelty if by == "novelty" else doubt
    assert torch.equal(p.answered, (score <= rule.threshold) & p.in_range)
    assert torch.equal(p.wrong(y), wrong_by_hand(p, y, rule.tolerance))
    assert float(p.answered.double().mean()) == approx(rule.coverage, abs=0.1)
    # Three standard errors of a rate at the risk.
    answered = p.answered
    limit = rule.risk + 3 * math.sqrt(rule.risk / int(answered.sum()))
    assert float(p.wrong(y)[answered].double().mean()) <= limit
    posterior.save(tmp_path / "posterior.safetensors")
    again = ba.Posterior.load(tmp_path / "posterior.safetensors", posterior.model)
    assert again.calibration.abstention == rule
    assert torch.equal(again.predict(x).answered, p.answered)
    assert dict(described(again))["answers"] == str(rule)
    assert f"{rule.errors} of {rule.answered} wrong" in str(again.calibration)


def test_a_rule_is_that_of_the_held_out_scores():
    held_out = blobs(600, 200)
    posterior = ba.calibrate(trained("classification"), held_out, risk=0.05)
    kept = posterior.calibration.guarantee
    # The doubt of a right answer is its LAC score; of a wrong one that is larger.
    rule = posterior.calibration.abstention
    wrong = posterior.predict(held_out[0]).wrong(held_out[1])
    assert bool((kept["classes.lac"][~wrong] <= rule.threshold).sum() == rule.answered - rule.errors)


def test_a_mixture(tmp_path):
    mixture = ba.Mixture([trained("classification"), trained("classification", 1)], [0.3, 0.7])
    found, (x, y) = ba.calibrate(mixture, blobs(600, 200), risk=0.05), blobs(500, 300)
    p, rule = found.predict(x), found.calibration.abstention
    assert 0 < int(p.answered.sum()) < 500
    assert torch.equal(p.answered, (1 - p.probs.max(dim=1).values <= rule.threshold) & p.in_range)
    assert float(p.wrong(y)[p.answered].double().mean()) < 0.08
    found.save(tmp_path / "mixture.safetensors")
    again = ba.Mixture.load(tmp_path / "mixture.safetensors", found.members[0].model)
    assert torch.equal(again.predict(x).answered, p.answered)


def test_a_deployed_rule_is_the_same():
    for by in ("confidence", "novelty"):
        posterior = ba.calibrate(trained("classification"), blobs(600, 200), risk=0.15, answer_by=by)
        x = blobs(200, 300)[0]
        served = ba.deploy(posterior)
        with torch.no_grad():
            assert torch.equal(served(x).answered, posterior.predict(x).answered)
        assert "of the held-out examples" in json.dumps(served.about["answers"])


def test_a_report_without_one_is_as_before():
    report = ba.calibrate(trained("classification"), blobs(100, 200)).calibration
    assert report.abstention is None
    assert "abstention" not in report.header()
    assert type(report).of(report.header(), report.guarantee).abstention is None


# --- nothing qualifies, and what is refused -------------------------------------------------------------------------


def test_too_few_examples_answer_nothing():
    with pytest.warns(HeldOutWarning, match="takes 300 examples at the least"):
        posterior = ba.calibrate(trained("classification"), blobs(200, 200), risk=0.01)
    x = blobs(50, 300)[0]
    assert not posterior.predict(x).answered.any()
    assert posterior.calibration.abstention.coverage == 0
    assert "do not show" in str(posterior.calibration)
    with torch.no_grad():
        assert not ba.deploy(posterior).eval()(x).answered.any()


def test_too_many_errors_name_a_risk_that_would_do():
    x, y = blobs(600, 200)
    y = torch.where(torch.rand(600, generator=seeded(5)) < 0.2, (y + 1) % 3, y)
    with pytest.warns(HeldOutWarning, match=r"a risk of about 0\.\d+") as said:
        ba.calibrate(trained("classification"), (x, y), risk=0.05)
    risk = float(str(said[0].message).rsplit("about ", 1)[1])
    assert ba.calibrate(trained("classification"), (x, y), risk=risk).calibration.abstention.answered > 0
    every = torch.arange(600.0), torch.ones(600, dtype=torch.bool)
    assert "too many of the surest" in remedy(*every, risk=0.05, confidence=0.95)


def test_without_a_risk_there_is_no_rule():
    p = ba.calibrate(trained("classification"), blobs(100, 200)).predict(blobs(5, 1)[0])
    with pytest.raises(CalibrationError, match=r"risk=0\.02"):
        p.answered  # noqa: B018
    numbers = ba.calibrate(trained("regression"), waves(100, 200)).predict(waves(5, 1)[0])
    with pytest.raises(SettingError, match="tolerance="):
        numbers.wrong(waves(5, 1)[1])
    with pytest.raises(MatchError, match="shape"):
        p.wrong(torch.zeros(4))


@pytest.mark.parametrize(
    ("likelihood", "settings", "message"),
    [
        ("classification", {"risk": 0.0}, "risk must lie"),
        ("classification", {"risk": 0.1, "confidence": 1.0}, "confidence must lie"),
        ("classification", {"risk": 0.1, "tolerance": 1.0}, "for numbers"),
        ("classification", {"risk": 0.1, "answer_by": "luck"}, "answer_by must be one of"),
        ("regression", {"risk": 0.1}, "needs tolerance="),
        ("regression", {"risk": 0.1, "tolerance": -1.0}, "needs tolerance="),
        ("regression", {"tolerance": 1.0}, "needs risk="),
    ],
)
def test_settings_that_mean_nothing(likelihood, settings, message):
    with pytest.raises(SettingError, match=message):
        ba.calibrate(trained(likelihood), data(likelihood, 100, 200), **settings)


def test_many_positions_are_refused():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    x, y = torch.randint(5, (40, 6), generator=seeded()), torch.randint(3, (40, 6), generator=seeded(1))
    optimizer = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 40, batch_size=40, likelihood="classification")
    with pytest.raises(MatchError, match="many positions"):
        ba.calibrate(posterior, (x, y), risk=0.1)
    held_out = x[:, 0], torch.where(torch.arange(40) < 2, -100, y[:, 0])
    with pytest.raises(MatchError, match="leave out"):
        ba.calibrate(posterior, held_out, risk=0.1, forward=lambda net, inputs: net(inputs))


# --- scores and picture ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_the_risk_coverage_curve(ties):
    doubt = torch.rand(60, generator=seeded())
    doubt = (doubt * 8).round() if ties else doubt
    wrong = torch.rand(60, generator=seeded(1)) < 0.3
    coverage, risk = scores.risk_coverage(doubt, wrong)
    distinct = doubt.unique()
    assert len(coverage) == len(distinct)
    for k, t in enumerate(distinct.tolist()):
        within = doubt <= t
        assert float(coverage[k]) == approx(float(within.double().mean()))
        assert float(risk[k]) == approx(float(wrong[within].double().mean()))
    each = [float(wrong[doubt <= t].double().mean()) for t in doubt.tolist()]
    assert scores.aurc(doubt, wrong) == approx(sum(each) / 60)
    reached = [c for c, r in zip(coverage.tolist(), risk.tolist(), strict=True) if r <= 0.25]
    assert scores.coverage_at(doubt, wrong, risk=0.25) == approx(max(reached, default=0.0))
    assert scores.coverage_at(doubt, torch.ones(60, dtype=torch.bool), risk=0.5) == 0
    with pytest.raises(MatchError, match="for each example"):
        scores.aurc(doubt, wrong[:-1])


def test_a_rule_in_words():
    rule = Abstention(0.02, 0.95, "confidence", None, 500, 0.3, 400, 3, 0.0194)
    assert (
        str(rule)
        == "80.0% of the held-out examples by confidence, 3 of 400 wrong: at most 0.02 wrong with 0.95 confidence"
    )
