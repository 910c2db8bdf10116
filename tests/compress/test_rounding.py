"""Rounding to grids, beside all codes of a small row, GPTQ and plain rounding written anew."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bayesadam.compress.rounding import Grid, grid_of, round_to, stacked
from bayesadam.errors import SettingError
from floats import assert_close


def layer(inputs: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights, and the second moments of correlated inputs with a small λ."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator) * torch.arange(1, inputs + 1) ** -0.7
    x = (torch.randn(4 * inputs, inputs, generator=generator) @ mix).relu().double()
    a = x.T @ x / len(x)
    return torch.randn(outputs, inputs, generator=generator), a + 0.01 * a.diagonal().mean() * torch.eye(inputs)


def errors(q: Tensor, w: Tensor, a: Tensor) -> Tensor:
    """(q − w) A (q − w)ᵀ of each row."""
    off = (q - w).double()
    return ((off @ a) * off).sum(1)


def plain(w: Tensor, bits: int) -> Tensor:
    """The scale of the largest weight, for each row."""
    return w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)


def nearest(w: Tensor, scale: Tensor, bits: int) -> Tensor:
    return (w / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale


def gptq(w: Tensor, a: Tensor, bits: int) -> Tensor:
    """Columns in order, by the upper Cholesky factor of A⁻¹."""
    u = torch.linalg.cholesky(torch.linalg.inv(a), upper=True)
    w, scale, q = w.double(), plain(w, bits).double(), torch.zeros_like(w)
    for j in range(w.shape[1]):
        rounded = nearest(w[:, j : j + 1], scale, bits)
        q[:, j : j + 1] = rounded
        w = w - (w[:, j : j + 1] - rounded) / u[j, j] * u[j]
    return q


def test_beside_every_code_of_a_small_row() -> None:
    w, a = layer(5, 20)
    codes = torch.tensor(list(itertools.product(range(4), repeat=5))).double()
    best = torch.full((20,), torch.inf, dtype=torch.float64)
    for zero in (1.5, 2.0):
        v = codes - zero
        scale = (v @ a @ w.double().T) / ((v @ a) * v).sum(1, keepdim=True).clamp(min=1e-12)
        least = torch.stack([errors(s[:, None] * v, row, a) for s, row in zip(scale.T, w, strict=True)])
        best = torch.minimum(best, least.amin(1))
    found = errors(round_to(w, a, 2).weight(), w, a)
    assert (found >= best * 0.999).all()
    assert float((found / best).median()) < 1.02
    assert float(found.sum() / best.sum()) < 1.15


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_worse_than_gptq_and_plain_rounding(bits: int, symmetric: bool, seed: int) -> None:
    w, a = layer(150, 12, seed)
    found = errors(round_to(w, a, bits, symmetric=symmetric).weight(), w, a)
    own = grid_of(w, bits, a.diagonal(), symmetric=symmetric).weight()
    assert (found <= errors(own, w, a)).all()
    for other in (nearest(w, plain(w, bits), bits), gptq(w, a, bits)):
        assert found.sum() < errors(other, w, a).sum()


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_sweep_increases_no_rows_error(symmetric: bool, group: int | None) -> None:
    w, a = layer(150, 12)
    keys = {"symmetric": symmetric, "group": group}
    found = [errors(round_to(w, a, 3, sweeps=n, **keys).weight(), w, a) for n in range(5)]  # type: ignore[arg-type]
    assert all((later <= before * (1 + 1e-4)).all() for before, later in itertools.pairwise(found))
    assert found[-1].sum() < 0.99 * found[0].sum()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_removed_weights_stay_exactly_zero(bits: int, symmetric: bool, whole: bool) -> None:
    w, a = layer(60, 9)
    mask = torch.rand(w.shape) < 0.3
    mask[3] = False
    given = w if whole else w * mask
    q = round_to(given, a, bits, mask=mask, symmetric=symmetric, group=16).weight()
    assert (q[~mask] == 0).all()
    assert (q[mask] != 0).any()
    # Where they are, the others make up for them.
    if whole:
        assert errors(q, w, a).sum() < 0.8 * errors(grid_of(w * mask, bits, a.diagonal()).weight(), w, a).sum()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_without_correlations_it_is_rounding_at_the_best_scale(bits: int) -> None:
    w, eye = layer(40, 6)[0], torch.eye(40, dtype=torch.float64)
    found = errors(round_to(w, eye, bits).weight(), w, eye)
    best = torch.full((6,), torch.inf, dtype=torch.float64)
    for zero in (2 ** (bits - 1), (2**bits - 1) / 2 if bits < 4 else 2 ** (bits - 1)):
        for share in torch.linspace(-1.2, 1.2, 2001):
            scale = plain(w, bits) * share
            q = ((w / scale + zero).round().clamp(0, 2**bits - 1) - zero) * scale
            best = torch.minimum(best, errors(q, w, eye))
    assert (found <= best * 1.06).all()
    assert found.sum() <= best.sum() * 1.02


def test_the_bias_follows_and_is_not_rounded() -> None:
    w, a = layer(31, 5)
    grid = round_to(w, a, 3, bias=True)
    assert grid.bias is not None
    q = torch.cat([grid.weight(), grid.bias[:, None]], 1)
    # At the minimum over the bias the error does not depend on it.
    assert_close((q - w).double() @ a[:, -1], torch.zeros(5), atol=1e-5)
    worse = torch.cat([grid.weight(), w[:, -1:]], 1)
    assert errors(q, w, a).sum() < errors(worse, w, a).sum()
    assert round_to(w[:, :-1], a[:-1, :-1], 3).bias is None


def test_a_grid_is_what_it_stores() -> None:
    w, a = layer(50, 7)
    grid = round_to(w, a, 3, symmetric=False, group=16)
    assert (grid.codes.dtype, grid.scale.dtype, grid.zero.dtype) == (torch.uint8, torch.float16, torch.float16)
    assert grid.scale.shape == grid.zero.shape == (7, 4)
    assert int(grid.codes.max()) <= 7
    for row, column in ((0, 0), (3, 15), (6, 49)):
        scale, zero = grid.scale[row, column // 16].float(), grid.zero[row, column // 16].float()
        assert grid.weight()[row, column] == scale * (grid.codes[row, column].float() - zero)
    both = stacked([grid, grid])
    assert both.weight().equal(torch.cat([grid.weight()] * 2))
    assert round_to(w, a, 4).zero.shape == (7, 1)


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_degenerate_layers(bits: int, symmetric: bool) -> None:
    def rounded(w: Tensor, a: Tensor, **keys: int) -> Tensor:
        q: Grid = round_to(w, a, bits, symmetric=symmetric, **keys)  # type: ignore[arg-type]
        assert q.weight().isfinite().all()
        return q.weight()

    assert (rounded(torch.zeros(3, 4), torch.eye(4)) == 0).all()
    assert_close(rounded(torch.tensor([[0.7], [-0.2]]), torch.eye(1)), torch.tensor([[0.7], [-0.2]]), rtol=2e-3)
    constant = torch.full((2, 6), 0.3)
    assert_close(rounded(constant, torch.eye(6)), constant, rtol=2e-2)
    # Inputs that are always the same, always 0, or fewer than there are columns.
    w, a = layer(12, 4)
    x = torch.randn(3, 12, dtype=torch.float64)
    x[:, 2] = 0
    rounded(w, x.T @ x)
    rounded(w, torch.ones(12, 12))
    rounded(w, torch.zeros(12, 12), group=5)
    rounded(torch.full((2, 12), 1e6), a)


def test_bits_that_no_file_holds() -> None:
    with pytest.raises(SettingError, match=r"bits must be one of \(2, 3, 4, 8\), got 5"):
        round_to(torch.zeros(2, 2), torch.eye(2), 5)
