"""A monitor's p-values, martingale and bound, and what it keeps."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import bayesadam as ba
from bayesadam.errors import CalibrationError, FileError, MatchError, SettingError
from cases import fit, quick_of
from floats import approx, assert_close

Array = NDArray[np.float64]
SHARES, EXPONENTS, SHIFT, PATIENCE = (0.03, 0.2, 0.9), (0.05, 0.3, 0.7), 1e-4, 100


def normal(n: int, seed: int, shift: float = 0.0) -> Array:
    return np.random.default_rng(seed).normal(shift, size=n)


def brute_force(reference: Array, scores: Array, seed: int) -> Array:
    """p by counting, score by score, in gaps between single reference scores, with the uniform numbers of a monitor."""
    draw = np.random.default_rng(seed)
    held_out = sorted(zip(np.sort(reference), draw.random(len(reference)), strict=True))
    numbers = draw.random((len(scores), 2))

    def gap(score: float, order: float) -> int:
        return sum(pair < (score, order) for pair in held_out)

    found: list[float] = []
    gaps: list[int] = []
    for score, (order, u) in zip(scores, numbers, strict=True):
        own, n = gap(score, order), len(held_out)
        greater = (n - own) + sum(other > own for other in gaps)
        equal = 1 + sum(other == own for other in gaps)
        found.append((greater + u * equal) / (n + 1 + len(gaps)))
        gaps.append(own)
    return np.array(found)


def recursion(p: Array) -> Array:
    """log M, step by step."""
    bets = [(side, share, kappa) for side in range(3) for kappa in (*EXPONENTS, None) for share in SHARES]
    capital = [0.5 / len(bets)] * len(bets)
    rest = [0.5 * math.log(PATIENCE) / math.log(PATIENCE + t) for t in range(len(p) + 1)]
    logs = []
    for each, (before, after) in zip(p, pairwise(rest), strict=True):
        for k, (side, share, kappa) in enumerate(bets):
            q = (each, 1 - each, abs(2 * each - 1))[side]
            density = 2 * (1 - q)
            if kappa is not None:
                density = kappa * (q + SHIFT) ** (kappa - 1) / ((1 + SHIFT) ** kappa - SHIFT**kappa)
            capital[k] = (capital[k] + (before - after) / len(bets)) * (1 - share + share * density)
        logs.append(math.log(sum(capital) + after))
    return np.array(logs)


@pytest.mark.parametrize("n", [1, 2, 31, 60])
@pytest.mark.parametrize("discrete", [False, True])
def test_p_values_are_those_of_counting(n, discrete):
    reference, scores = normal(n, 1), normal(200, 2, shift=0.5)
    if discrete:
        reference, scores = reference.round(), scores.round()
    monitor = ba.Monitor(reference=reference, seed=3)
    monitor.update(scores)
    assert_close(monitor.p_values, brute_force(reference, scores, 3), rtol=1e-12)


def test_groups_of_gaps_keep_the_p_value_to_three_per_cent():
    """Beside the rank among all scores, where a large reference has groups."""
    reference, scores = normal(4000, 1), normal(500, 2)
    monitor = ba.Monitor(reference=reference)
    monitor.update(scores)
    seen = np.concatenate([reference, scores])
    ranks = [(seen[: 4000 + t] > score).sum() for t, score in enumerate(scores)]
    exact = (np.array(ranks) + 0.5) / (4001 + np.arange(500))
    nearer = np.minimum(exact, 1 - exact)
    assert (np.abs(monitor.p_values - exact) < 0.07 * nearer + 3 / 4001).all()
    assert len(monitor._gaps) < 400
    assert monitor._gaps.sum() == 4001


@pytest.mark.parametrize("n", quick_of([1, 50, 400], 50))
@pytest.mark.parametrize("kinds", [0, 4])
def test_p_values_are_uniform_and_independent(n, kinds):
    """Over 200 pairs of a reference and a stream: means of p, and of neighbours' products, as uniform numbers have."""
    found = []
    for seed in range(200):
        draw = np.random.default_rng(seed)
        scores = draw.integers(kinds, size=n + 200) if kinds else draw.normal(size=n + 200)
        monitor = ba.Monitor(reference=scores[:n], seed=1000 + seed)
        monitor.update(scores[n:])
        found.append(monitor.p_values)
    p = np.array(found)
    for sample, variance in (
        (p, 1 / 12),
        (p**2, 4 / 45),
        ((p < 0.02) - 0.02 + 0.5, 0.02 * 0.98),
        (12 * (p[:, 1:] - 0.5) * (p[:, :-1] - 0.5) + 0.5, 1.0),
        (12 * (p[:, 20:] - 0.5) * (p[:, :-20] - 0.5) + 0.5, 1.0),
    ):
        mean = 1 / 3 if variance == 4 / 45 else 0.5
        assert abs(sample.mean() - mean) < 4 * math.sqrt(variance / sample.size)
        # Of one stream alike: were all p of a stream moved by its reference, means of streams would differ by more.
        assert 0.7 < sample.mean(axis=1).var() * sample.shape[1] / variance < 1.4


def test_what_is_not_finite_is_the_largest():
    monitor = ba.Monitor(reference=[*normal(99, 0), math.nan])
    monitor.update([math.nan, -math.inf, math.inf, 1e300])
    equal = monitor.p_values[:3]
    assert (equal < 4 / 101).all()
    assert monitor.p_values[3] > 3 / 104
    for value in (math.nan, math.inf):
        assert ba.Monitor(reference=normal(300, 0)).update([value] * 100)


@pytest.mark.parametrize("shift", [0.0, 0.4, -1.0])
def test_the_martingale_is_that_of_a_recursion(shift):
    monitor = ba.Monitor(reference=normal(300, 1))
    logs = []
    for batch in np.split(normal(400, 2, shift), [1, 2, 80, 81, 300]):
        monitor.update(batch)
        logs.append(monitor.log_martingale)
    whole = ba.Monitor(reference=normal(300, 1))
    whole.update(normal(400, 2, shift))
    expected = recursion(whole.p_values)
    assert_close(np.array(logs), expected[[0, 1, 79, 80, 299, 399]], rtol=1e-9, atol=1e-10)
    reached = expected >= math.log(100)
    assert whole.alarmed_at == monitor.alarmed_at == (int(reached.argmax()) + 1 if reached.any() else None)
    assert whole.alarmed == (shift != 0)


@pytest.mark.slow
def test_false_alarms_are_bounded():
    """No drift, 300 streams: at α = .2 more than 82 alarms had a probability of less than .001."""
    alarms = 0
    for seed in range(300):
        scores = np.random.default_rng(seed).gumbel(size=1100).round(1)
        alarms += ba.Monitor(reference=scores[:100], alarm=0.2, seed=seed).update(scores[100:])
    assert 0 < alarms <= 82


@pytest.mark.parametrize(
    ("change", "before", "most", "direction"),
    [
        (lambda x: x + 1, 0, 60, "stranger"),
        (lambda x: x + 1, 3000, 120, "stranger"),
        (lambda x: x - 1, 3000, 120, "more familiar"),
        (lambda x: np.where(np.arange(len(x)) % 20 == 7, 6.0, x), 3000, 400, "stranger"),
        (lambda x: 0.5 * x, 3000, 400, "more alike"),
    ],
)
def test_drift_is_found(change, before, most, direction):
    monitor = ba.Monitor(reference=normal(2000, 0))
    assert not monitor.update(normal(before, 1))
    assert monitor.update(change(normal(1000, 2)))
    assert before < monitor.alarmed_at <= before + most
    assert monitor.direction == direction
    assert str(monitor).endswith(direction)
    assert monitor.update(normal(10, 3))
    monitor.reset()
    assert (monitor.n, monitor.alarmed_at, monitor.log_martingale) == (0, None, 0.0)
    assert not monitor.update(normal(500, 4))


def test_the_direction_is_that_of_the_alarm(tmp_path):
    monitor = ba.Monitor(reference=normal(500, 0))
    assert monitor.update(normal(100, 1) + 3)
    monitor.update(normal(2000, 2) - 3)
    monitor.save(tmp_path / "monitor.safetensors")
    assert ba.Monitor.load(tmp_path / "monitor.safetensors").direction == "stranger"


def test_capital_and_memory_are_bounded():
    monitor = ba.Monitor(reference=normal(20000, 0))
    sizes = []
    for _ in range(3):
        monitor.update(np.full(3000, 9.0))
        arrays = [value for value in vars(monitor).values() if isinstance(value, np.ndarray)]
        sizes.append(sum(value.nbytes for value in arrays if value is not monitor._history))
        assert len(monitor._history) <= 1024
    assert sizes[0] == sizes[1] == sizes[2]
    assert 200 < monitor.log_martingale < 700
    assert (np.diff(monitor._history[:, 0]) == monitor._stride).all()


def served() -> tuple[ba.Calibrated, torch.Tensor]:
    torch.manual_seed(0)
    x, model = torch.randn(400, 4), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    y, optimizer = (x[:, 0] > 0).long(), torch.optim.Adam(model.parameters(), lr=1e-2)
    fit(model, optimizer, 100 * [(x[:100], y[:100])], nn.functional.cross_entropy)
    return ba.calibrate(model, (x[100:300], y[100:300]), likelihood="classification"), x[300:]


@pytest.mark.filterwarnings("ignore::bayesadam.errors.BayesAdamWarning")
def test_the_stream_of_a_network():
    net, x = served()
    monitor = ba.Monitor(net)
    with torch.no_grad():
        familiar, far = net(x), net(5 * x)
    assert not monitor.update(familiar)
    assert monitor.update(far)
    again = ba.Monitor(reference=net.novelties)
    again.update(torch.cat([familiar.novelty, far.novelty]))
    assert again.log_martingale == approx(monitor.log_martingale)


def test_a_saved_monitor_goes_on_to_the_bit(tmp_path):
    monitor = ba.Monitor(reference=normal(700, 0).round(1))
    monitor.update(normal(150, 1, 0.1).round(1))
    monitor.save(tmp_path / "monitor.safetensors")
    loaded = ba.Monitor.load(tmp_path / "monitor.safetensors")
    assert str(loaded) == str(monitor)
    assert loaded.same_reference(ba.Monitor(reference=normal(700, 0).round(1), alarm=0.1))
    assert not loaded.same_reference(ba.Monitor(reference=normal(700, 1).round(1)))
    assert (loaded.n, loaded.alarmed_at) == (150, monitor.alarmed_at)
    for each in (monitor, loaded):
        each.update(normal(150, 2, 0.1).round(1))
        each.reset()
        each.update(normal(150, 3, 0.1).round(1))
    assert (loaded.p_values == monitor.p_values).all()
    assert (loaded._history == monitor._history).all()
    assert loaded.log_martingale == monitor.log_martingale


def test_a_monitor_of_release_0_3_goes_on():
    monitor = ba.Monitor.load(Path(__file__).parent / "release_0_3" / "monitor.safetensors")
    assert not monitor.alarmed
    assert any(monitor.update(torch.full((1,), 50.0)) for _ in range(100))


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "monitor.safetensors"
    ba.Monitor(reference=[1.0]).save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(FileError, match="truncated or not a saved monitor"):
        ba.Monitor.load(path)
    served()[0].save(path)
    with pytest.raises(FileError, match=r"not a saved monitor.*Monitor\.save"):
        ba.Monitor.load(path)


def test_its_picture_and_its_words():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monitor = ba.Monitor(reference=normal(500, 0))
    monitor.update(np.concatenate([normal(300, 1), normal(300, 2, 1.5)]))
    ax = monitor.plot()
    x, y = ax.lines[0].get_data()
    assert (x[0], y[0], x[-1]) == (0, 0, 600)
    assert_close(y[-1] * math.log(10), np.float64(monitor.log_martingale))
    assert_close(ax.lines[1].get_ydata()[0], 2.0)
    assert ax.get_title(loc="left") == f"alarm at score {monitor.alarmed_at:,}"
    first, second = str(monitor).splitlines()
    assert first == "Monitor: at most 1 % false alarms, 500 held-out scores"
    assert second.endswith(f"alarm at score {monitor.alarmed_at}: they are stranger")
    monitor.reset()
    assert monitor.plot().lines[0].get_ydata()[-1] == 0
    assert str(monitor).endswith("no alarm")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, SettingError, "either a calibrated network or reference="),
        ({"net": 5, "reference": [1.0]}, SettingError, "either a calibrated network or reference="),
        ({"reference": [1.0], "alarm": 1.0}, SettingError, "alarm must lie between 0 and 1"),
        ({"reference": []}, SettingError, "reference holds no score"),
        ({"net": [1.0, 2.0]}, MatchError, "net must be a Calibrated"),
        ({"net": 5}, CalibrationError, "at least 20"),
    ],
)
@pytest.mark.filterwarnings("ignore::bayesadam.errors.BayesAdamWarning")
def test_references_that_cannot_be_are_refused(settings, error, message):
    if settings.get("net") == 5:
        few = (torch.zeros(5, 1), torch.zeros(5).long())
        settings = settings | {"net": ba.calibrate(nn.Linear(1, 2), few, likelihood="classification")}
    with pytest.raises(error, match=message):
        ba.Monitor(**settings)


def test_scores_that_cannot_be_are_refused():
    monitor = ba.Monitor(reference=[1.0, 2.0])
    with pytest.raises(MatchError, match=r"scores must be one number an input, \(n,\), got shape \(2, 1\)"):
        monitor.update(torch.zeros(2, 1))
    with pytest.raises(MatchError, match="scores are None"):
        monitor.update(None)
    assert monitor.n == 0


def test_streams_of_few_distinct_inputs_raise_no_alarm():
    """Held-out inputs are left out of their own leverage, and the next of their kind must be as novel as they are."""
    torch.manual_seed(0)
    model, alarms = nn.Linear(3, 2), 0
    for _ in range(20):
        x, y = torch.randint(2, (1200, 3)).float(), torch.randint(2, (1200,))
        net = ba.calibrate(model, (x[:200], y[:200]), likelihood="classification")
        monitor = ba.Monitor(net, alarm=0.01)
        for rows in (x[200:201], x[201:800], x[800:]):
            monitor.update(net(rows))
        alarms += monitor.alarmed
    assert alarms <= 1
