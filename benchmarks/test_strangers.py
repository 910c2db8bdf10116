"""The problems of `strangers.py` keep their halves and their rounds."""

import numpy as np
import pytest

from bayesadam.bandits import Rounds
from strangers import ranks, scores
from strangers_problems import PROBLEMS, half, stranger


def test_the_halves_are_halves():
    assert len(PROBLEMS) >= 30
    assert abs(2 * sum(half(name) == "choosing" for name in PROBLEMS) - len(PROBLEMS)) <= 1


@pytest.mark.parametrize("name", ["iris", "switching", "sales", "heavy-tailed"])
def test_a_shorter_run_is_the_beginning_of_a_longer_one(name):
    short, long = (stranger(name).run(3, rounds) for rounds in (40, 400))
    for part in ("contexts", "rewards", "expected"):
        np.testing.assert_allclose(getattr(short, part), getattr(long, part)[:40], rtol=1e-5, atol=1e-6)


def test_scores_do_not_change_with_the_unit_of_rewards():
    expected = np.array([[0.0, 1.0], [3.0, 2.0]])
    arms = np.array([1, 1])
    for pays in (expected, 1000 * expected - 7):
        assert scores(Rounds(pays, pays, pays), arms, 2) == pytest.approx(0.5)


def test_equal_scores_share_a_rank():
    assert ranks({"a": 0.5, "b": 0.7, "c": 0.5}) == {"a": 2.5, "b": 1.0, "c": 2.5}
