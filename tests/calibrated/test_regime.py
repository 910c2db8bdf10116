"""Data of another regime, each input within its range: it says so, and the input side widens error bars."""

from __future__ import annotations

import math
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import BayesAdamWarning
from bayesadam.likelihoods.conformal import chance_of_novel

OTHER = r"these are other data than the held-out ones: \d+ of 200 inputs have p_value <= 0\.01"


def factors(n: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Four series that a common factor moves, and a number that depends on the first; what they share may break."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, generator=source) + spread * torch.randn(n, 4, generator=source)
    x = x / math.sqrt(1 + spread**2)
    apart = (x[:, :1] - x[:, 3:]).square()
    return x, (2 * x[:, :1]).sin() + 2 * apart + 0.1 * torch.randn(n, 1, generator=source)


@cache
def trained() -> ba.Posterior:
    torch.manual_seed(0)
    x, y = factors(400, 0.15, 1)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        rows = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model.eval(), optimizer, len(x), "regression", batch_size=64)


def test_a_batch_of_another_regime_is_told_once():
    net, (same, _), (other, _) = (
        ba.calibrate(trained(), factors(300, 0.15, 2)),
        factors(200, 0.15, 3),
        factors(200, 1.0, 3),
    )
    net(same)
    with pytest.warns(BayesAdamWarning, match=OTHER):
        answer = net(other)
    assert answer.in_range is not None
    assert bool(answer.in_range.all())
    net(other)


def test_a_program_is_saved_and_few_inputs_are_asked_without_a_word():
    net, (other, _) = ba.calibrate(trained(), factors(300, 0.15, 2)), factors(200, 1.0, 3)
    net(other[:19])
    net(torch.cat([other[:8], factors(200, 0.15, 3)[0]]))
    torch.export.export(net, (other,))
    with pytest.warns(BayesAdamWarning, match=OTHER):
        net(other)


def test_error_bars_of_the_input_side_widen_where_those_of_the_diagonal_stay():
    q, held_out = trained(), factors(300, 0.15, 2)
    same, other = factors(200, 0.15, 3)[0], factors(200, 1.0, 3)[0]

    def growth(posterior: ba.Posterior) -> float:
        tuned = posterior.tune(held_out)
        return float(tuned.predict(other).stddev.mean() / tuned.predict(same).stddev.mean())

    assert growth(q) < 1.2
    assert growth(q.with_inputs(factors(400, 0.15, 1)[0])) > 1.5


@pytest.mark.parametrize(("n", "rank"), [(300, 3), (20, 1)])
def test_how_many_are_novel_by_chance(n: int, rank: int):
    """Against draws of uniform scores, and never above one in a million where it says so."""
    m, runs = 25, 20_000
    scores = torch.rand(runs, n + m, generator=torch.Generator().manual_seed(0))
    least = scores[:, :n].topk(rank, dim=1).values[:, -1:]
    counts = (scores[:, n:] > least).sum(dim=1)
    for count in (0, 1, 2, 4):
        share = float((counts >= count).float().mean())
        chance = chance_of_novel(count, m, rank, n)
        assert abs(share - chance) < 4 * math.sqrt(max(chance * (1 - chance), 1e-4) / runs)
    assert chance_of_novel(0, m, rank, n) == pytest.approx(1.0)


def test_data_like_the_held_out_never_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            net = ba.calibrate(trained(), factors(40, 0.15, 10 + seed))
            for batch in range(10):
                net(factors(100, 0.15, 100 + 10 * seed + batch)[0])
