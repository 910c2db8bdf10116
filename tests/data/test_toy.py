"""The toy data against an independent numpy computation."""

import math

import numpy as np
import pytest
import torch

from bayesadam.data import toy_function, toy_grid, toy_points
from bayesadam.errors import SettingError
from floats import approx, assert_close


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference(x: np.ndarray, noise: np.ndarray) -> np.ndarray:
    return x + 0.3 * np.sin(2 * np.pi * (x + noise)) + 0.3 * np.sin(4 * np.pi * (x + noise)) + noise


def test_the_function_is_the_papers():
    rng = np.random.default_rng(0)
    x, noise = rng.uniform(-0.5, 1.2, 100), rng.normal(0, 0.02, 100)
    got = toy_function(torch.from_numpy(x), torch.from_numpy(noise))
    assert_close(got.numpy(), reference(x, noise), atol=1e-14)


def test_points_are_uniform_with_the_stated_noise():
    data = toy_points(20_000, generator=generator())
    x, y = data.x.double().numpy(), data.y.double().numpy()
    assert data.x.dtype == data.y.dtype == torch.float32
    assert x.shape == y.shape == (20_000, 1)
    assert x.min() >= 0
    assert x.max() <= 0.5
    # Kolmogorov's distance from the uniform distribution; 1.95/√n is exceeded once in 1,000.
    places = np.sort(x.ravel()) / 0.5
    assert np.abs(places - (np.arange(20_000) + 0.5) / 20_000).max() < 1.95 / math.sqrt(20_000)
    # To first order y − f(x) = ε dy/dε, with dy/dε = 1 + 0.6π cos 2πx + 1.2π cos 4πx.
    slope = 1 + 0.6 * np.pi * np.cos(2 * np.pi * x) + 1.2 * np.pi * np.cos(4 * np.pi * x)
    steep = np.abs(slope) > 2.5
    noise = ((y - reference(x, np.zeros_like(x))) / slope)[steep]
    assert noise.std() == approx(0.02, rel=0.05)


def test_only_the_generator_decides():
    first, again, other = (toy_points(50, generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)
    assert not torch.equal(first.x, other.x)
    state = torch.random.get_rng_state()
    toy_points(50, generator=generator())
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_gap_stays_empty_and_lengths_decide_the_shares():
    x = toy_points(10_000, generator=generator(), intervals=((-1.0, 0.0), (2.0, 2.5))).x
    left = ((x >= -1) & (x <= 0)).float().mean()
    assert left + ((x >= 2) & (x <= 2.5)).float().mean() == 1
    assert float(left) == approx(2 / 3, abs=0.02)


def test_without_noise_points_lie_on_the_curve():
    data = toy_points(10, generator=generator(), noise_std=0.0)
    assert_close(data.y, toy_function(data.x))


def test_the_grid_spans_the_papers_test_range():
    grid = toy_grid(18)
    assert_close(grid.x.ravel(), np.linspace(-0.5, 1.2, 18), atol=1e-6)
    assert_close(grid.y.ravel(), reference(np.linspace(-0.5, 1.2, 18), np.zeros(18)), atol=1e-5)


def test_split_keeps_every_point_once():
    data = toy_points(10, generator=generator())
    first, rest = data.split(3)
    assert (len(first), len(rest)) == (3, 7)
    assert torch.equal(torch.cat([first.x, rest.x]), data.x)
    assert torch.equal(torch.cat([first.y, rest.y]), data.y)
    for n in (0, 10, 11):
        with pytest.raises(SettingError, match=f"first {n}"):
            data.split(n)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"n": 0}, "got 0"),
        ({"intervals": ((1.0, 0.0),)}, r"\(1.0, 0.0\)"),
        ({"intervals": ()}, "intervals"),
        ({"noise_std": -1.0}, "-1"),
    ],
)
def test_nonsense_is_refused_by_name(arguments, named):
    with pytest.raises(SettingError, match=named):
        toy_points(generator=generator(), **arguments)
