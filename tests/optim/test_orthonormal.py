"""Products and orthogonal factors out of 16-bit factors, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bayesadam.optim import _orthonormal as orth
from floats import assert_close

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def graded(n: int, least: float, drift: float, seed: int) -> tuple[Tensor, Tensor]:
    """L with eigenvalues from 1 down to `least`, and its eigenvectors turned a little."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    values = torch.logspace(0, float(np.log10(least)), n, dtype=torch.float64)
    a = torch.randn(n, n, generator=generator, dtype=torch.float64) * drift / n**0.5
    return (q * values) @ q.T, torch.linalg.matrix_exp(a - a.T) @ q


@pytest.mark.parametrize("device", DEVICES)
def test_the_factor_is_that_of_a_qr_decomposition(device):
    """Sizes below, at and above a panel's, side by side, with columns whose own part is a thousandth of them."""
    cases = [(n, [graded(n, 1e-4, 0.05, seed) for seed in range(count)]) for n, count in ((7, 3), (128, 1), (200, 2))]
    stacks = [torch.stack([(s @ q).float() for s, q in pairs]).to(device) for _, pairs in cases]
    for stack, (found, fine) in zip(stacks, orth.orthonormal_columns(stacks), strict=True):
        assert fine.all()
        for matrix, q in zip(stack.cpu().double().numpy(), found.cpu().double().numpy(), strict=True):
            assert_close(q.T @ q, np.eye(len(q)), atol=3e-6)
            expected, r = np.linalg.qr(matrix)
            assert_close(q, expected * np.sign(np.diag(r)), atol=2e-3)
            lower = np.tril(q.T @ matrix, -1) / np.linalg.norm(matrix, axis=0)
            assert np.abs(lower).max() < 1e-5


def test_what_is_not_orthonormal_is_said_to_be():
    good, twice = normal(6, 6), normal(6, 6)
    twice[:, 3] = twice[:, 1]
    never = normal(6, 6)
    never[2, 2] = torch.nan
    ((found, fine),) = orth.orthonormal_columns([torch.stack([good, twice, never])])
    assert fine.tolist()[0] is True
    assert fine.tolist()[2] is False
    for q, is_fine in zip(found, fine.tolist(), strict=True):
        assert is_fine is bool(((q.T @ q - torch.eye(6)).abs() < 1e-3).all())


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("device", DEVICES)
def test_split_factors_have_nearly_all_digits(device, scale):
    a, b = normal(3, 50, 70).to(device) * scale, normal(3, 70, 20, seed=1).to(device)
    exact = a.double() @ b.double()
    assert float((orth.split_product(a, b) - exact).abs().max()) < 2e-6 * float(exact.abs().max())
    rounded, factor = orth.halved(a)
    single = orth.half_product(rounded, b.half()) * factor
    assert 1e-5 < float((single - exact).abs().max() / exact.abs().max()) < 2e-3


@pytest.mark.parametrize("rows", [5, 401, 900])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gram_matrices_by_blocks(device, dtype, rows):
    sums, x = normal(rows, rows), normal(rows, 30, seed=1).to(dtype)
    sums = sums + sums.T
    expected = 0.9 * sums.double() + 0.2 * x.double() @ x.double().T
    found = sums.to(device)
    orth.add_gram(found, x.to(device), beta=0.9, alpha=0.2)
    assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_halved_matrices_are_at_most_one_and_scaled_each_by_itself():
    matrices = normal(2, 4, 4) * torch.tensor([1e-20, 1e20])[:, None, None]
    matrices = torch.cat([matrices, torch.zeros(1, 4, 4)])
    rounded, scale = orth.halved(matrices)
    assert float(rounded[:2].abs().amax(dim=(1, 2)).min()) >= 0.5
    assert float(rounded.abs().max()) <= 1
    assert_close(rounded.float() * scale, matrices, rtol=1e-3)
