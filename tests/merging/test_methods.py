"""The equations of merging against dense algebra in float64."""

import pytest
import torch

from bayesadam.merging import methods
from bayesadam.readers import Rotation
from floats import assert_close

ALPHA = torch.tensor([1.0, 2.0, 0.5])


@pytest.mark.parametrize(("scale", "dtype", "rtol"), [(1.0, torch.float64, 1e-12), (1e-37, torch.float32, 1e-4)])
def test_fisher_is_the_weighted_mean_of_each_weight(scale, dtype, rtol):
    theta, v = torch.randn(3, 4, 5, dtype=dtype), scale * torch.rand(3, 4, 5, dtype=dtype)
    v[:, 0, 0] = 0
    v[1:, 1, 1] = 0
    scaled = ALPHA[:, None, None] * v
    found = methods.fisher(theta, scaled, ALPHA)
    expected = (scaled.double() * theta).sum(0) / scaled.double().sum(0)
    expected[0, 0] = ALPHA.double() @ theta[:, 0, 0].double() / ALPHA.sum()
    assert_close(found.double(), expected, rtol=rtol)
    assert bool((found <= theta.amax(0)).all() & (found >= theta.amin(0)).all())
    assert found[1, 1] == theta[0, 1, 1]


def test_a_damped_curvature_knows_no_scale_and_no_weight_of_little_more_than_others():
    v = 1e-37 * torch.rand(3, 50) ** 8
    v[1] = 0
    expected = 1 + v.double() / v.double().mean(dim=1, keepdim=True).clamp(min=1e-300)
    assert_close(methods.damped(v).double(), expected, rtol=1e-4)
    assert_close(methods.damped(v * torch.tensor([[1.0], [2.0], [1e9]])), methods.damped(v), rtol=1e-4)


def test_gradient_matching_is_the_solution_of_its_equation():
    theta, v = torch.randn(3, 6).double(), torch.rand(3, 6).double()
    base, known = torch.randn(6).double(), torch.rand(6).double()
    left = torch.diag(known + 0.3 + (v + 0.3).sum(0))
    right = sum(torch.diag(known + 0.3 + f + 0.3) @ (t - base) for f, t in zip(v, theta, strict=True))
    found = methods.gradient_matching(theta, v, base, known, delta=0.3)
    assert_close(found, base + torch.linalg.solve(left, right))


def rotated(shape, seed):
    """An operator in eigenbases, its diagonal, and the dense matrix over the flat weights."""
    draw = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=draw).double())[0] for n in shape)
    values = torch.rand(*shape, generator=draw).double() ** 6
    rotation = Rotation(left, right)
    basis = torch.kron(left, right)
    dense = basis @ torch.diag(values.flatten()) @ basis.T
    return (lambda x: rotation.out_of(rotation.into(x, 2) * values, 2)), rotation.diagonal(values), dense


@pytest.mark.parametrize("delta", [1e-3, 1.0])
def test_kronecker_is_the_solution_of_its_equation(delta, monkeypatch):
    monkeypatch.setattr(methods, "_TOLERANCE", 1e-10)
    shape = (4, 6)
    operators, diagonals, dense = zip(*(rotated(shape, seed) for seed in range(3)), strict=True)
    theta, start = torch.randn(3, *shape).double(), torch.randn(*shape).double()
    found = methods.kronecker(theta, operators, sum(diagonals), start, delta)
    right = sum(k @ (t - start).flatten() for k, t in zip(dense, theta, strict=True))
    whole = sum(dense) + delta * torch.eye(24).double()
    assert_close(found, start + torch.linalg.solve(whole, right).view(shape), rtol=1e-6, atol=1e-8)
    assert_close(sum(diagonals), sum(dense).diagonal().view(shape))


def test_kronecker_of_one_model_that_is_its_start_stays_there():
    operator, diagonal, _ = rotated((4, 6), 0)
    theta = torch.randn(4, 6).double()
    found = methods.kronecker(theta[None], [operator], diagonal, theta, 1.0)
    assert torch.equal(found, theta)
