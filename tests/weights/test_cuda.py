"""What only a CUDA device can show: the fused draw, and moving between devices."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

import bayesadam as ba
from bayesadam.weights import draws as noise
from cases import mlp, train
from floats import assert_close

pytestmark = pytest.mark.cuda


def build(size: int, dtype: torch.dtype = torch.float32, **settings: object) -> ba.Posterior:
    torch.manual_seed(0)
    model = torch.nn.Linear(size, 3, bias=False, device="cuda", dtype=dtype)
    # float16 rounds Adam's usual eps to zero.
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    train(model, optimizer, steps=5)
    q = ba.Posterior.from_optimizer(model, optimizer, 400, prior_precision=2.0, batch_size=8)
    return q.replace(**settings)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def standard(q: ba.Posterior, draws: int) -> torch.Tensor:
    values = q.sample(draws, generator=seeded())["weight"].to(q.mean["weight"])
    return ((values - q.mean["weight"]) / q.stddev["weight"]).double()


@pytest.mark.parametrize("size", [1, 33, 1365, 1366, 100_003])
@pytest.mark.parametrize(("form", "power"), [("map", 0.5), ("likelihood", 0.5), ("map", 1.0)])
def test_the_kernels_moments(size, form, power):
    z = standard(build(size, form=form, power=power), max(2, 2_000_000 // (3 * size)))
    count = z.numel()
    assert torch.isfinite(z).all()
    assert abs(z.mean()) < 5 / math.sqrt(count)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / count)
    quantiles = torch.tensor([0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999], dtype=torch.float64)
    expected = Normal(0.0, 1.0).icdf(quantiles.float()).double()
    assert (z.flatten()[:1_000_000].cpu().quantile(quantiles) - expected).abs().max() < 0.03


def test_rows_and_columns_are_uncorrelated():
    z = standard(build(20), 4000)
    assert (torch.corrcoef(z.flatten(1).T).cpu() - torch.eye(60)).abs().max() < 5.5 / math.sqrt(4000)
    assert (torch.corrcoef(z[:50].flatten(1)).cpu() - torch.eye(50)).abs().max() < 5.5 / math.sqrt(60)


def test_a_draw_does_not_depend_on_how_many_are_taken_nor_on_the_kernels_block():
    q = build(5000)
    many, few = (q.sample(n, generator=seeded())["weight"] for n in (7, 2))
    assert torch.equal(many[:2], few)
    assert torch.equal(q.sample(generator=seeded())["weight"], few[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
def test_draws_have_the_parameters_type_and_a_prior_by_weight(dtype):
    q = build(50, dtype)
    q = q.replace(prior_precision={"weight": torch.rand(3, 50).to(q.mean["weight"]) + 1})
    assert q.sample()["weight"].dtype == dtype
    assert (standard(q, 5000).var(dim=0) - 1).abs().max() < 6 * math.sqrt(2 / 5000)


def test_the_path_without_triton_has_the_same_moments(monkeypatch):
    monkeypatch.setattr(noise, "_filler", lambda theta, rule: noise._fill_row_by_row)
    test_the_kernels_moments(1366, "likelihood", 0.5)


def test_the_draw_needs_no_memory_beside_itself():
    q = build(1_000_000)
    q.sample()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    draw = q.sample()
    # The allocator gives memory in blocks of 2 MiB.
    assert torch.cuda.max_memory_allocated() - before <= draw["weight"].numel() * 4 + 2**21


def recorded(structure: str, device: str) -> ba.Posterior:
    torch.manual_seed(0)
    model = mlp(3, 6, 2).double().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    recorder = ba.Recorder(optimizer, keep=20)
    train(model, optimizer, steps=200)
    return ba.Posterior.from_recorder(model, recorder, 50, structure=structure, prior_precision=0.7, batch_size=8)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
def test_structures_are_what_they_are_on_the_cpu(kind, tmp_path):
    on_cpu, on_cuda = (recorded(kind, device) for device in ("cpu", "cuda"))
    theta = {name: mean + 0.1 for name, mean in on_cpu.mean.items()}
    assert_close(on_cuda.variance, on_cpu.variance, rtol=1e-7)
    assert_close(on_cuda.log_prob({name: value.cuda() for name, value in theta.items()}), on_cpu.log_prob(theta))
    draws = on_cuda.sample(20_000, generator=seeded())
    for name, variance in on_cuda.variance.items():
        assert draws[name].is_cuda
        centred = draws[name] - on_cuda.mean[name]
        error = (centred.pow(4).mean(dim=0) - variance.square()).sqrt() / math.sqrt(len(centred))
        assert ((centred.square().mean(dim=0) - variance).abs() < 6 * error).all()
    on_cuda.save(tmp_path / "p.safetensors")
    again = type(on_cuda).load(tmp_path / "p.safetensors", mlp(3, 6, 2).double())
    assert_close(again.variance, on_cpu.variance, rtol=1e-7)
    assert again.mean["0.weight"].device.type == "cpu"
    there = type(on_cuda).load(tmp_path / "p.safetensors", mlp(3, 6, 2).double().cuda())
    assert there.mean["0.weight"].is_cuda


def test_sampled_restores_the_very_same_bits():
    q = build(30)
    before, pointer = q.model.weight.detach().clone(), q.model.weight.data_ptr()
    with q.sampled():
        assert not torch.equal(q.model.weight, before)
    assert (q.model.weight.data_ptr(), bool(torch.equal(q.model.weight, before))) == (pointer, True)
    with q.to("cpu").sampled() as model:
        assert model.weight.is_cuda
