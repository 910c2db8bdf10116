"""On a GPU a network becomes smaller as on a processor."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.compress.rounding import round_to
from bayesadam.compress.solving import Moments
from bayesadam.compress.walking import Walk
from bayesadam.predict.matrices import Matrix
from compress.cases_compress import posterior_of
from floats import assert_close

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_is_that_of_a_processor(bits: int) -> None:
    x, w = torch.randn(200, 40), torch.randn(24, 40)
    a = x.T @ x / len(x)
    errors = []
    for device in ("cpu", "cuda"):
        off = round_to(w.to(device), a.to(device), bits, group=16).weight().cpu() - w
        errors.append(float((off @ a * off).sum()))
    # A tie may fall to the other side.
    assert_close(errors[1], errors[0], rtol=0.02)


def test_conditioning_is_that_of_a_processor() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    inputs = torch.randn(60, 3, 6, 6)
    models = []
    for device in ("cpu", "cuda"):
        dense = posterior_of(copy.deepcopy(model).to(device))
        masks = {name: (torch.arange(p.numel()) % 3 > 0).view(p.shape).to(device) for name, p in dense.mode.items()}
        models.append(ba.compress.condition(dense, masks, inputs.to(device)).model)
        tiny = ba.quantise(dense, 4, inputs=inputs.to(device)).model
        assert next(tiny.parameters()).device.type == device
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert_close(other.detach().cpu(), one.detach(), rtol=0.05)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_second_moments_have_all_digits(precision: Literal["highest", "high"]) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        layer, x = nn.Linear(64, 8).cuda(), torch.randn(400, 64, device="cuda")
        seen: list[Tensor] = []

        def see(matrix: Matrix, w: Tensor, moments: Moments) -> Tensor:
            seen.append(moments.a)
            return w

        Walk.of(layer, x, ["weight"]).through(copy.deepcopy(layer), see, "testing")
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    wide = torch.cat([x, x.new_ones(400, 1)], dim=1).double()
    assert_close(seen[0][0].cpu().double(), (wide.mT @ wide / 400).cpu(), rtol=0, atol=1e-6)
