"""Split conformal prediction against MAPIE, counting by hand, and coverage over many replicas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bayesadam.errors import CalibrationError, SettingError
from bayesadam.likelihoods import Component, LogitPredictive, classification, likelihood
from bayesadam.likelihoods.conformal import Guarantee, class_scores, p_values, threshold, uniform_like
from floats import assert_close

METHODS = ["lac", "aps", "raps"]
LEVELS = [0.3, 0.5, 0.8, 0.9, 0.95]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_probs(*shape: int, seed: int = 0, sharpness: float = 2.0) -> Tensor:
    return (sharpness * torch.randn(shape, generator=seeded(seed), dtype=torch.float64)).softmax(dim=-1)


def drawn_classes(probs: Tensor, seed: int) -> Tensor:
    return torch.multinomial(probs, 1, generator=seeded(seed)).squeeze(1)


def made(name: str, mean: Tensor, variance: Tensor, guarantee: Guarantee | None = None, noise: Tensor | None = None):
    noise = torch.zeros(()) if noise is None and likelihood(name).noise else noise
    component = Component(mean, variance, noise_variance=noise)
    return likelihood(name).predictive([component], guarantee=guarantee)


def classes_at(probs: Tensor, guarantee: Guarantee | None) -> LogitPredictive:
    """A predictive of these probabilities."""
    return made("classification", probs.log(), torch.zeros_like(probs), guarantee)


def held_out(probs: Tensor, y: Tensor, uniform: Tensor) -> Guarantee:
    every = {method: class_scores(probs, method, uniform) for method in METHODS}
    return {f"classes.{m}": s.gather(1, y[:, None]).squeeze(1) for m, s in every.items()} | {"labels": y}


def score_by_hand(probs: list[float], k: int, method: str, uniform: float) -> float:
    """Class by class, from the papers: no sort, no cumulative sum."""
    if method == "lac":
        return 1 - probs[k]
    likelier = [p for j, p in enumerate(probs) if p > probs[k]]
    penalty = 0.05 * max(len(likelier) + 1 - 2, 0) if method == "raps" else 0.0
    return sum(likelier) + uniform * probs[k] + penalty


# --- thresholds and p-values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [*LEVELS, 0.05, 0.99, 1 / 3, 2 / 3])
@pytest.mark.parametrize("n", [1, 2, 5, 9, 19, 20, 100])
def test_the_threshold_is_the_least_score_with_enough_at_or_below_it(level, n):
    scores = torch.randn(n, generator=seeded(n), dtype=torch.float64)
    # Rational arithmetic: of n + 1 exchangeable scores at least `level` must not lie above it.
    enough = [float(s) for s in scores if int((scores <= s).sum()) >= round((n + 1) * level, 9)]
    assert float(threshold(scores, level)) == (min(enough) if enough else math.inf)


@pytest.mark.parametrize("n", [1, 4, 18, 98])
def test_one_too_few_scores_give_an_infinite_threshold(n):
    level = (n + 1) / (n + 2)
    scores = torch.randn(n + 1, 3, generator=seeded(), dtype=torch.float64)
    # (n + 2) level = n + 1: the largest of n + 1 serves, of n none does.
    assert torch.equal(threshold(scores, level), scores.max(dim=0).values)
    assert torch.equal(threshold(scores[:n], level), torch.full((3,), math.inf, dtype=torch.float64))
    assert threshold(scores[:0], level).tolist() == [math.inf] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_p_values_count_ties_as_at_least_as_large(dtype):
    generator = seeded()
    reference = torch.randint(6, (40,), generator=generator).to(dtype).sort().values
    scores = torch.randint(-1, 8, (30,), generator=generator).to(dtype)
    by_hand = [(1 + sum(r >= s for r in reference.tolist())) / 41 for s in scores.tolist()]
    found = p_values(reference, scores)
    assert found.dtype == torch.float64
    assert_close(found, torch.tensor(by_hand, dtype=torch.float64), atol=1e-15)
    assert p_values(reference, torch.tensor([math.inf], dtype=dtype)).item() == 1 / 41
    assert p_values(reference, torch.tensor([-math.inf], dtype=dtype)).item() == 1


def test_thresholds_and_p_values_say_the_same():
    reference = torch.randn(57, generator=seeded(1)).sort().values
    fresh = torch.randn(500, generator=seeded(2))
    for level in LEVELS:
        inside = fresh <= threshold(reference, level)
        assert_close(inside, p_values(reference, fresh) > 1 - level + 1e-12)


# --- scores of classes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_scores_are_those_of_the_papers(method, classes):
    probs = random_probs(20, classes)
    uniform = torch.rand(20, generator=seeded(3), dtype=torch.float64)
    by_hand = [
        [score_by_hand(row, k, method, u) for k in range(classes)]
        for row, u in zip(probs.tolist(), uniform.tolist(), strict=True)
    ]
    assert_close(class_scores(probs, method, uniform), torch.tensor(by_hand, dtype=torch.float64))


def test_scores_of_places_are_those_of_examples():
    probs, uniform = random_probs(4, 5, 3), torch.rand(4, 5, generator=seeded(), dtype=torch.float64)
    for method in METHODS:
        flat = class_scores(probs.flatten(0, 1), method, uniform.flatten())
        assert torch.equal(class_scores(probs, method, uniform), flat.view(4, 5, 3))


def test_uniform_numbers_are_the_same_every_time_and_differ_by_seed():
    probs = random_probs(1000, 3)
    one = uniform_like(probs, 1)
    assert torch.equal(one, uniform_like(probs.clone(), 1))
    assert not torch.equal(one, uniform_like(probs, 2))
    assert not torch.equal(one[:500], uniform_like(probs[:500], 1)), "every batch has its own"
    assert 0 <= float(one.min()) < 0.02
    assert 0.98 < float(one.max()) < 1
    assert abs(float(one.mean()) - 0.5) < 5 / math.sqrt(12 * 1000)


# --- MAPIE ------------------------------------------------------------------------------------------------------------


def mapie_classifier(level: float, method: str, classes: int):
    """A SplitConformalClassifier of a model whose inputs are its probabilities."""
    mapie = pytest.importorskip("mapie.classification")
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Given(ClassifierMixin, BaseEstimator):
        classes_ = np.arange(classes)
        fitted_ = True

        def fit(self, x, y):
            return self

        def predict_proba(self, x):
            return np.asarray(x)

        def predict(self, x):
            return np.asarray(x).argmax(axis=1)

    return mapie.SplitConformalClassifier(
        Given(), confidence_level=level, conformity_score=method, prefit=True, random_state=7
    )


@pytest.mark.parametrize("method", ["lac", "aps"])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("n", [40, 99, 200])
def test_sets_are_mapie_s(monkeypatch, method, level, n):
    classes = 5
    reference = mapie_classifier(level, method, classes)
    before, after = random_probs(n, classes, seed=n), random_probs(300, classes, seed=n + 1)
    y = drawn_classes(before, seed=n + 2)
    reference.conformalize(before.numpy(), y.numpy())
    params = {} if method == "lac" else {"include_last_label": "randomized"}
    _, sets = reference.predict_set(after.numpy(), conformity_score_params=params)
    # MAPIE takes off a share u of the probability, both times from the same stream; here 1 − u of it stays.
    u = {size: 1 - torch.from_numpy(np.random.RandomState(7).uniform(size=size)) for size in (n, 300)}
    monkeypatch.setattr(classification, "uniform_like", lambda probs, seed: u[len(probs)])
    found = classes_at(after, held_out(before, y, u[n])).prediction_set(level, method=method)
    assert torch.equal(found, torch.from_numpy(sets[:, :, 0]))
    assert 0 < int(found.sum()) < found.numel()


def test_raps_scores_are_mapie_s():
    scores = pytest.importorskip("mapie.conformity_scores")
    probs = random_probs(50, 6)
    uniform = torch.rand(50, generator=seeded(1), dtype=torch.float64)
    found = class_scores(probs, "raps", uniform)
    for k in range(6):
        total, rank = scores.RAPSConformityScore.get_true_label_cumsum_proba(
            np.full(50, k), probs.numpy(), np.arange(6)
        )
        plain = total - (1 - uniform.numpy())[:, None] * probs[:, k : k + 1].numpy()
        expected = scores.RAPSConformityScore._regularize_conformity_score(np.array([2]), 0.05, plain, rank)
        assert_close(found[:, k].numpy(), expected[:, 0, 0], rtol=1e-7)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("n", [30, 99])
def test_intervals_are_mapie_s(level, n):
    mapie = pytest.importorskip("mapie.regression")
    from mapie.conformity_scores import ResidualNormalisedScore
    from sklearn.base import BaseEstimator, RegressorMixin

    class Column(RegressorMixin, BaseEstimator):
        """One of the inputs as the prediction."""

        fitted_ = True

        def __init__(self, number: int = 0):
            self.number = number

        def fit(self, x, y):
            return self

        def predict(self, x):
            return np.asarray(x)[:, self.number]

    generator = seeded(n)
    mean = torch.randn(n + 200, 1, generator=generator, dtype=torch.float64)
    variance = torch.rand(n + 200, 1, generator=generator, dtype=torch.float64) + 0.1
    noise = torch.tensor([0.3], dtype=torch.float64)
    stddev = (variance + noise).sqrt()
    y = mean + 2 * stddev * torch.randn(n + 200, 1, generator=generator, dtype=torch.float64)
    x = torch.cat([mean, stddev], dim=1).numpy()
    reference = mapie.SplitConformalRegressor(
        Column(0),
        confidence_level=level,
        conformity_score=ResidualNormalisedScore(residual_estimator=Column(1), prefit=True, sym=True),
        prefit=True,
    )
    reference.conformalize(x[:n], y[:n, 0].numpy())
    _, ends = reference.predict_interval(x[n:])
    residuals = (y[:n] - mean[:n]).abs() / stddev[:n]
    predictive = made("regression", mean[n:], variance[n:], {"residuals": residuals}, noise)
    found = predictive.prediction_set(level)
    for end, expected in zip(found, (ends[:, 0, 0], ends[:, 1, 0]), strict=True):
        assert_close(end[:, 0], torch.from_numpy(expected))


# --- sets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_sets_hold_the_classes_whose_score_is_low_enough(method, by_class, level):
    classes, n = 4, 90
    before, after = random_probs(n, classes, seed=1), random_probs(50, classes, seed=2)
    y = drawn_classes(before, seed=3)
    # A batch's numbers follow from its probabilities, to the last bit.
    u, v = uniform_like(before, 5), uniform_like(classes_at(after, {}).class_probs, 1)
    scores = [score_by_hand(before[i].tolist(), int(y[i]), method, float(u[i])) for i in range(n)]

    def inside(i: int, k: int) -> bool:
        mine = [s for s, label in zip(scores, y.tolist(), strict=True) if label == k or not by_class]
        score = score_by_hand(after[i].tolist(), k, method, float(v[i]))
        # By counting: the share of those at least as large, the new one among them, must exceed 1 − level.
        return (1 + sum(s >= score - 1e-12 for s in mine)) > (len(mine) + 1) * (1 - level) + 1e-9

    found = classes_at(after, held_out(before, y, u)).prediction_set(level, method=method, by_class=by_class)
    assert found.tolist() == [[inside(i, k) for k in range(classes)] for i in range(50)]


def test_ties_are_inside():
    """Equal probabilities everywhere: all scores of LAC are the same, and every class belongs to the set."""
    probs = torch.full((30, 4), 0.25, dtype=torch.float64)
    guarantee = held_out(probs, torch.arange(30) % 4, uniform_like(probs, 0))
    assert bool(classes_at(probs, guarantee).prediction_set(0.5).all())
    single = probs.float()
    guarantee = held_out(single, torch.arange(30) % 4, uniform_like(single, 0))
    assert bool(classes_at(single, guarantee).prediction_set(0.5).all())


def test_a_set_grows_with_its_level():
    before, after = random_probs(200, 5, seed=1), random_probs(100, 5, seed=2)
    guarantee = held_out(before, drawn_classes(before, 3), uniform_like(before, 4))
    for method in METHODS:
        sets = [classes_at(after, guarantee).prediction_set(level, method=method) for level in LEVELS]
        for small, large in itertools.pairwise(sets):
            assert bool((large | ~small).all())
            assert int(large.sum()) > int(small.sum())


@pytest.mark.parametrize("method", METHODS)
def test_too_few_held_out_examples_give_every_class(method):
    probs = random_probs(18, 3)
    guarantee = held_out(probs, drawn_classes(probs, 1), uniform_like(probs, 0))
    assert bool(classes_at(probs, guarantee).prediction_set(0.95, method=method).all())
    assert not bool(classes_at(probs, guarantee).prediction_set(0.9, method=method).all())


@pytest.mark.filterwarnings("ignore:.* classes are in every set")
def test_a_class_that_was_seldom_held_out_is_in_every_set():
    probs = random_probs(100, 3)
    y = torch.cat([torch.zeros(60), torch.ones(40)]).long()
    found = classes_at(probs, held_out(probs, y, uniform_like(probs, 0))).prediction_set(0.9, by_class=True)
    assert bool(found[:, 2].all())
    assert not bool(found[:, 0].all())


def test_too_few_held_out_examples_give_the_whole_line():
    mean = torch.randn(5, 2, generator=seeded())
    residuals = torch.rand(18, 2, generator=seeded())
    found = made("regression", mean, torch.ones(5, 2), {"residuals": residuals})
    low, high = found.prediction_set(0.95)
    assert bool((low == -math.inf).all())
    assert bool((high == math.inf).all())
    assert all(bool(torch.isfinite(end).all()) for end in found.prediction_set(0.9))


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3), (6, 2, 2)])
def test_intervals_of_every_shape(shape):
    mean = torch.randn(shape, generator=seeded(), dtype=torch.float64)
    variance = torch.rand(shape, generator=seeded(1), dtype=torch.float64) + 0.1
    outputs = mean[0].numel()
    residuals = torch.rand(40, outputs, generator=seeded(2), dtype=torch.float64)
    found = made("regression", mean, variance, {"residuals": residuals})
    low, high = found.prediction_set(0.9)
    reach = torch.tensor([sorted(residuals[:, k].tolist())[math.ceil(41 * 0.9) - 1] for k in range(outputs)])
    expected = reach.double().view(mean[0].shape) * variance.sqrt()
    assert_close(low, mean - expected, rtol=1e-6, atol=1e-6)
    assert_close(high, mean + expected, rtol=1e-6, atol=1e-6)
    assert low.shape == high.shape == shape


def test_intervals_of_means_and_log_variances():
    outputs = torch.randn(7, 4, generator=seeded(), dtype=torch.float64)
    variance = torch.rand(7, 4, generator=seeded(1), dtype=torch.float64)
    residuals = torch.rand(40, 2, generator=seeded(2), dtype=torch.float64)
    found = made("heteroscedastic", outputs, variance, {"residuals": residuals})
    low, high = found.prediction_set(0.8)
    stddev = (variance[:, :2] + (outputs[:, 2:] + variance[:, 2:] / 2).exp()).sqrt()
    reach = residuals.sort(dim=0).values[math.ceil(41 * 0.8) - 1]
    assert_close(low, outputs[:, :2] - reach * stddev)
    assert_close(high, outputs[:, :2] + reach * stddev)


@pytest.mark.parametrize("outputs", [1, 3])
def test_sets_of_binary_outputs_are_output_by_output(outputs):
    logits = torch.randn(80, outputs, generator=seeded(), dtype=torch.float64)
    y = torch.bernoulli(logits.sigmoid(), generator=seeded(1)).long()
    probs = torch.stack([1 - logits.sigmoid(), logits.sigmoid()], dim=-1)
    true = 1 - probs.gather(2, y[..., None]).squeeze(2)
    found = made("binary", logits, torch.zeros_like(logits), {"classes.lac": true, "labels": y}).prediction_set(0.8)
    assert found.shape == (80, outputs, 2)
    for k in range(outputs):
        limit = sorted(true[:, k].tolist())[math.ceil(81 * 0.8) - 1]
        assert torch.equal(found[:, k], 1 - probs[:, k] <= limit)


# --- coverage ---------------------------------------------------------------------------------------------------------


def within_binomial(hits: float, count: int, level: float) -> bool:
    return abs(hits / count - level) < 4 * math.sqrt(level * (1 - level) / count)


@pytest.mark.parametrize(("n", "level"), [(9, 0.9), (19, 0.5), (99, 0.95), (50, 0.8)])
def test_coverage_is_exact_over_exchangeable_scores(n, level):
    """Without ties it is ⌈(n + 1) level⌉/(n + 1), neither less nor more."""
    replicas = 20_000
    scores = torch.randn(n + 1, replicas, generator=seeded(n), dtype=torch.float64)
    # Dependent but exchangeable: a common shift in every replica.
    scores += 3 * torch.randn(1, replicas, generator=seeded(1), dtype=torch.float64)
    exact = math.ceil((n + 1) * level - 1e-9) / (n + 1)
    inside = scores[-1] <= threshold(scores[:-1], level)
    assert within_binomial(float(inside.sum()), replicas, exact)


@pytest.mark.parametrize("n", [19, 99])
def test_p_values_are_uniform_over_exchangeable_scores(n):
    replicas = 4_000
    scores = torch.randn(replicas, n + 1, generator=seeded(n))
    found = torch.cat([p_values(row[:-1].sort().values, row[-1:]) for row in scores])
    for alpha in (0.05, 0.1, 0.5):
        assert within_binomial(float((found <= alpha + 1e-12).sum()), replicas, math.floor((n + 1) * alpha) / (n + 1))


def test_p_values_with_ties_err_on_the_safe_side():
    replicas = 4_000
    scores = torch.randint(4, (replicas, 40), generator=seeded())
    found = torch.cat([p_values(row[:-1].double().sort().values, row[-1:].double()) for row in scores])
    for alpha in (0.05, 0.25, 0.5):
        assert float((found <= alpha).double().mean()) < alpha + 4 * math.sqrt(alpha * (1 - alpha) / replicas)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("by_class", [False, True])
def test_sets_cover_at_their_level_even_with_wrong_probabilities(method, by_class):
    """The labels are drawn from other probabilities than the sets are made of."""
    replicas, n, fresh, level = 150, 60, 40, 0.8
    hits = torch.zeros(3)
    counts = torch.zeros(3)
    for replica in range(replicas):
        true = random_probs(n + fresh, 3, seed=replica, sharpness=1.0)
        y = drawn_classes(true, seed=1000 + replica)
        wrong = (3 * true.log() + torch.tensor([0.0, 0.5, -0.5]).double()).softmax(dim=1)
        guarantee = held_out(wrong[:n], y[:n], uniform_like(wrong[:n], 2000 + replica))
        sets = classes_at(wrong[n:], guarantee).prediction_set(level, method=method, by_class=by_class, seed=replica)
        covered = sets.gather(1, y[n:, None]).squeeze(1)
        for k in range(3):
            hits[k] += int(covered[y[n:] == k].sum())
            counts[k] += int((y[n:] == k).sum())
    # Replicas are independent, the examples within one share a threshold: its spread is that of a beta variable.
    spread = math.sqrt(level * (1 - level) / replicas * (1 / (n / 3 if by_class else n) + 1 / fresh))
    if by_class:
        for share in (hits / counts).tolist():
            assert level - 4 * spread * math.sqrt(3) < share < level + 3 / n + 4 * spread * math.sqrt(3)
    else:
        assert level - 4 * spread < float(hits.sum() / counts.sum()) < level + 1 / n + 4 * spread


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 0.0, 1.0, -0.1, 1.5, math.nan])
def test_levels_that_are_no_probabilities_are_refused(level):
    probs = random_probs(30, 3)
    guarantee = held_out(probs, drawn_classes(probs, 1), uniform_like(probs, 0))
    with pytest.raises(SettingError, match="between 0 and 1"):
        classes_at(probs, guarantee).prediction_set(level)
    numbers = made("regression", probs, probs, {"residuals": probs})
    with pytest.raises(SettingError, match="between 0 and 1"):
        numbers.prediction_set(level)


def test_unknown_methods_are_refused():
    probs = random_probs(30, 3)
    guarantee = held_out(probs, drawn_classes(probs, 1), uniform_like(probs, 0))
    with pytest.raises(SettingError, match=r"'lac'.*'topk'"):
        classes_at(probs, guarantee).prediction_set(method="topk")


def test_without_held_out_scores_the_remedy_is_told():
    probs = random_probs(30, 3)
    with pytest.raises(CalibrationError, match=r"calibrate.*20 examples"):
        classes_at(probs, None).prediction_set()
    with pytest.raises(CalibrationError, match=r"calibrate.*20 examples"):
        made("regression", probs, probs).prediction_set()


def test_with_no_scores_in_the_guarantee_the_remedy_is_told():
    with pytest.raises(CalibrationError, match=r"calibrate.*20 examples"):
        classes_at(random_probs(30, 3), {}).prediction_set()


def test_by_class_needs_one_label_per_example():
    logits = torch.randn(30, 3, generator=seeded(), dtype=torch.float64)
    y = torch.ones(30, 3).long()
    found = made("binary", logits, torch.zeros_like(logits), {"classes.lac": logits.sigmoid(), "labels": y})
    with pytest.raises(SettingError, match="one label per example"):
        found.prediction_set(by_class=True)


def test_by_class_serves_a_single_binary_output():
    logits = torch.randn(80, 1, generator=seeded(), dtype=torch.float64)
    y = torch.bernoulli(logits.sigmoid(), generator=seeded(1)).long()
    scores = torch.where(y > 0, 1 - logits.sigmoid(), logits.sigmoid())
    found = made("binary", logits, torch.zeros_like(logits), {"classes.lac": scores, "labels": y})
    assert found.prediction_set(0.8, by_class=True).shape == (80, 1, 2)
