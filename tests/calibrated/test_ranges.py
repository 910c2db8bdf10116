"""Inputs that left the range of the held-out ones: each mistake as a user makes it, and beside it what is none."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.calibrated.ranges import InputRange, compared, departure, inside, ranged, ranges_of
from bayesadam.errors import BayesAdamWarning, SettingError
from bayesadam.likelihoods.conformal import chance_of_novel
from calibrated.cases_calibrated import fitted
from floats import assert_close
from predict.cases_networks import Lambda


def images(n: int, seed: int = 0) -> Tensor:
    """Pixels from 0 to 1, most of them 0, as of digits; three channels of 4 × 4."""
    x = torch.rand(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return (2 * x - 1).clamp(min=0)


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))


normalised = lambda x: (x - 0.13) / 0.31  # noqa: E731
MISTAKES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "pixels of 0 to 255": (
        lambda x: x,
        lambda x: 255 * x,
        r"between 0 and 2\d\d, the held-out ones between 0 and 1: scale",
    ),
    "divided twice": (lambda x: x, lambda x: x / 255, "between 0 and 0.0039"),
    "not normalised": (normalised, lambda x: x, "between 0 and 0.999, the held-out ones between -0.419 and 2.81"),
    "normalised twice": (normalised, lambda x: normalised(normalised(x)), "normalise them as in training"),
    "normalised by ½ twice": (lambda x: 2 * x - 1, lambda x: 2 * (2 * x - 1) - 1, "between -3 and 0.995"),
    "not brought to ±1": (lambda x: 2 * x - 1, lambda x: x, "the held-out ones between -1 and 0.999"),
    "NaN": (lambda x: x, lambda x: x.where(x < 0.5, torch.nan), "NaN or infinities in 8 of 8"),
    "channels last": (
        lambda x: x,
        lambda x: x.permute(0, 2, 3, 1),
        r"shape \(4, 4, 3\), the held-out ones \(3, 4, 4\)",
    ),
    "bytes": (lambda x: x, lambda x: (255 * x).to(torch.uint8), "uint8, the held-out ones float32: convert"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("size", [1, 8])
def test_a_batch_that_left_the_range_is_told_with_the_remedy(name, size):
    usual, mistake, words = MISTAKES[name]
    ranges = ranges_of([usual(images(50)), usual(images(30, 1))])
    difference = departure(ranges, mistake(images(8, 2)[:size]))
    assert difference is not None
    assert size == 1 or re.search(words, difference), difference
    assert not compared(ranges, ranged(ranges, mistake(images(8, 2))), [one.bounds for one in ranges])[0].any()


@pytest.mark.parametrize(
    "usual",
    [
        lambda n, seed: images(n, seed),
        lambda n, seed: normalised(images(n, seed)) + 0.3 * torch.randn(n, 3, 4, 4),
        rows,
        lambda n, seed: rows(n, seed)[:, :1],
        lambda n, seed: rows(n, seed) > 0,
        lambda n, seed: (rows(n, seed) > 0).float(),
        lambda n, seed: (1000 * rows(n, seed)).long(),
        lambda n, seed: {"a": rows(n, seed), "b": (images(n, seed), rows(n, seed).half())},
    ],
)
def test_ordinary_batches_are_in_range(usual):
    ranges = ranges_of([usual(100, 0)])
    for seed in range(1, 40):
        assert departure(ranges, usual(1 + seed % 5, seed)) is None


def test_the_bounds_of_an_example_by_hand():
    # Least values 0 and 1, greatest 4 and 10: the widths are 4 and 9 of a range of 10.
    (known,) = ranges_of([torch.tensor([[0.0, 4.0, 0.5], [1.0, 10.0, 2.0]]).repeat(10, 11)])
    assert known == InputRange("", "float32", (33,), 0.0, 10.0, 1.0, 4.0, 4.0)
    low = torch.tensor([-7.4, -7.6, 0.0, 0.0, 3.4, 3.6, 0.0, 0.0, 2.0])
    high = torch.tensor([5.0, 5.0, 17.4, 17.6, 9.0, 9.0, 1.6, 1.4, 2.9])
    assert inside(known.bounds, low, high).tolist() == [True, False, True, False, True, False, True, False, False]
    # The numbers of a table's row may be alike.
    assert inside(replace(known, shape=(3,)).bounds, low, high).tolist()[-3:] == [True, False, True]


def test_what_varied_or_was_not_finite_is_not_compared():
    ranges = ranges_of(
        [{"x": rows(20), "z": torch.full((20, 2), torch.nan)}, {"x": rows(5)[:, :4], "z": rows(5)[:, :2]}]
    )
    assert [(each.name, each.shape, each.bounded) for each in ranges] == [("x", (None,), True), ("z", (2,), False)]
    assert departure(ranges, {"x": rows(3, 1)[:, :2], "z": 1e9 * rows(3)[:, :2]}) is None
    assert departure(ranges_of([rows(19)]), 100 * rows(3)) is None
    # A line that is drawn beyond the data is meant to be.
    ranges = ranges_of([torch.linspace(0, 1, 50)[:, None]])
    assert departure(ranges, torch.linspace(-3, 4, 50)[:, None]) is None
    assert departure(ranges, torch.linspace(0, 255, 50)[:, None]) is not None
    # A token never seen, a longer text and a mask without padding are nothing unusual.
    texts = ranges_of([{"input_ids": torch.randint(50, (30, 12)), "attention_mask": torch.ones(30, 12).tril()}])
    assert departure(texts, {"input_ids": torch.full((1, 30), 900), "attention_mask": torch.ones(1, 30)}) is None


def test_an_example_is_made_where_shapes_are_known(tmp_path):
    batch = {"tokens": torch.randint(20, (60, 7)), "size": rows(60)[:, :1]}
    model = Lambda(
        lambda self, tokens, size: self.head(torch.cat([self.table(tokens).mean(dim=1), size], dim=1)),
        table=nn.Embedding(20, 4),
        head=nn.Linear(5, 3),
    )
    net = ba.calibrate(model, (batch, torch.randint(3, (60,))), likelihood="classification")
    net.save(tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2").module()
    assert_close(program(batch)["probs"], net(batch).probs)
    object.__setattr__(net.fit, "ranges", ())
    with pytest.raises(SettingError, match="pass an example"):
        net.save(tmp_path / "other.pt2")


# --- another regime, each input within its range ----------------------------------------------------------------------


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
    return fitted("regression", *factors(400, 0.15, 1), width=32)


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
