"""What only a CUDA device can show: the fused draw, capturable and fused optimiser states, moving between devices."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

import bayesadam as ba
from bayesadam.gaussian import noise
from cases import mlp, train
from floats import assert_close

pytestmark = pytest.mark.cuda
FLAGS = [
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"capturable": True},
    {"fused": True, "capturable": True},
]


def build(size: int, dtype: torch.dtype = torch.float32, **settings: object) -> ba.Posterior:
    torch.manual_seed(0)
    model = torch.nn.Linear(size, 3, bias=False, device="cuda", dtype=dtype)
    # float16 rounds Adam's usual eps to zero.
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    train(model, optimizer, steps=5)
    form = settings.pop("form", "map")
    q = ba.Posterior.from_optimizer(model, optimizer, 400, **{"prior_precision": 2.0, **settings})
    return q.replace(form=form)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [1, 33, 1365, 1366, 100_003])
@pytest.mark.parametrize("form", ["map", "likelihood"])
@pytest.mark.parametrize("power", [0.5, 1.0, 0.3])
def test_the_kernels_moments(size, form, power):
    posterior = build(size, form=form, power=power, batch_size=8)
    draws = max(2, 2_000_000 // (3 * size))
    standard = (posterior.sample(draws, generator=seeded())["weight"] - posterior.mean["weight"]) / posterior.stddev[
        "weight"
    ]
    standard = standard.double()
    count = standard.numel()
    assert torch.isfinite(standard).all()
    assert abs(standard.mean()) < 5 / math.sqrt(count)
    assert abs(standard.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((standard**4).mean() - 3) < 5 * math.sqrt(96 / count)
    quantiles = torch.tensor([0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999], dtype=torch.float64)
    expected = Normal(0.0, 1.0).icdf(quantiles.float()).double()
    assert (standard.flatten()[:1_000_000].cpu().quantile(quantiles) - expected).abs().max() < 0.03


def test_rows_and_columns_are_uncorrelated():
    standard = (lambda p: (p.sample(4000, generator=seeded())["weight"] - p.mean["weight"]) / p.stddev["weight"])(
        build(20)
    )
    correlation = torch.corrcoef(standard.flatten(1).double().T).cpu() - torch.eye(60)
    assert correlation.abs().max() < 5.5 / math.sqrt(4000)
    rows = torch.corrcoef(standard[:50].flatten(1).double()).cpu() - torch.eye(50)
    assert rows.abs().max() < 5.5 / math.sqrt(60)


def test_a_draw_does_not_depend_on_how_many_are_taken_nor_on_the_kernels_block():
    posterior = build(5000)
    many, few = (posterior.sample(n, generator=seeded())["weight"] for n in (7, 2))
    assert torch.equal(many[:2], few)
    assert torch.equal(posterior.sample(generator=seeded())["weight"], few[0])


def test_prior_precision_by_weight():
    posterior = build(100)
    delta = torch.rand(3, 100, device="cuda") + 1
    by_weight = posterior.replace(prior_precision={"weight": delta})
    standard = (by_weight.sample(20_000, generator=seeded())["weight"] - by_weight.mean["weight"]) / by_weight.stddev[
        "weight"
    ]
    assert (standard.var(dim=0) - 1).abs().max() < 6 * math.sqrt(2 / 20_000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_draws_have_the_parameters_type(dtype):
    posterior = build(50, dtype)
    draws = posterior.sample(5000, generator=seeded())["weight"]
    assert draws.dtype == dtype
    standard = (draws.to(posterior.mean["weight"]) - posterior.mean["weight"]) / posterior.stddev["weight"]
    assert (standard.var(dim=0) - 1).abs().max() < 6 * math.sqrt(2 / 5000)


def test_the_path_without_triton_has_the_same_moments(monkeypatch):
    monkeypatch.setattr(noise, "_filler", lambda theta, rule: noise._fill_row_by_row)
    test_the_kernels_moments(1366, "likelihood", 0.5)


def test_the_draw_needs_no_memory_beside_itself():
    posterior = build(1_000_000)
    posterior.sample()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    draw = posterior.sample()
    assert torch.cuda.max_memory_allocated() - before < 1.01 * draw["weight"].numel() * 4


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_every_kind_of_state_gives_the_same_posterior(cls, flags):
    torch.manual_seed(0)
    reference_model, model = mlp(3, 6, 2), mlp(3, 6, 2).cuda()
    model.load_state_dict(reference_model.state_dict())
    reference, optimizer = cls(reference_model.parameters()), cls(model.parameters(), **flags)
    train(reference_model, reference)
    train(model, optimizer)
    expected = ba.Posterior.from_optimizer(reference_model, reference, 10, prior_precision=1.0)
    got = ba.Posterior.from_optimizer(model, optimizer, 10, prior_precision=1.0)
    for name, variance in expected.variance.items():
        assert_close(got.variance[name].cpu(), variance, rtol=1e-4, atol=1e-7)


def test_sampled_restores_and_posteriors_move(tmp_path):
    posterior = build(30)
    before = posterior.model.weight.detach().clone()
    pointer = posterior.model.weight.data_ptr()
    with posterior.sampled():
        assert not torch.equal(posterior.model.weight, before)
    assert posterior.model.weight.data_ptr() == pointer
    assert torch.equal(posterior.model.weight, before)
    with posterior.to("cpu").sampled() as model:
        assert model.weight.is_cuda
    posterior.save(tmp_path / "p.safetensors")
    on_cpu = ba.Posterior.load(tmp_path / "p.safetensors", torch.nn.Linear(30, 3, bias=False))
    assert_close(on_cpu.variance["weight"], posterior.variance["weight"].cpu())
    assert on_cpu.mean["weight"].device.type == "cpu"
    assert ba.Posterior.load(tmp_path / "p.safetensors", posterior.model).mean["weight"].is_cuda


def recorded(structure: str, device: str) -> ba.Posterior:
    torch.manual_seed(0)
    model = mlp(3, 6, 2).double().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    recorder = ba.Recorder(optimizer, keep=12, every=2)
    train(model, optimizer)
    how = {"structure": structure, "prior_precision": 0.7, "power": 0.5, "batch_size": 8}
    return ba.Posterior.from_recorder(model, recorder, 50, **how)


def on_both(structure: str) -> tuple[ba.Posterior | ba.Mixture, ba.Posterior | ba.Mixture]:
    """The same posterior of networks trained on the CPU and on CUDA, in float64."""
    if structure == "mixture":
        kinds = ("diagonal", "kronecker")
        return tuple(ba.Mixture([recorded(kind, device) for kind in kinds]) for device in ("cpu", "cuda"))
    return recorded(structure, "cpu"), recorded(structure, "cuda")


STRUCTURES = ["kronecker", "mixture"]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_are_what_they_are_on_the_cpu(structure, tmp_path):
    on_cpu, on_cuda = on_both(structure)
    for name, variance in on_cpu.variance.items():
        assert on_cuda.variance[name].is_cuda
        assert_close(on_cuda.variance[name].cpu(), variance, rtol=1e-8)
    theta = {name: mean + 0.1 for name, mean in on_cpu.mean.items()}
    assert_close(on_cuda.log_prob({name: value.cuda() for name, value in theta.items()}).cpu(), on_cpu.log_prob(theta))
    on_cuda.save(tmp_path / "p.safetensors")
    again = type(on_cuda).load(tmp_path / "p.safetensors", mlp(3, 6, 2).double())
    for name, variance in on_cpu.variance.items():
        assert_close(again.variance[name], variance, rtol=1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structured_draws_have_the_marginal_variances(structure):
    posterior = on_both(structure)[1]
    draws = posterior.sample(20_000, generator=seeded())
    for name, variance in posterior.variance.items():
        assert draws[name].is_cuda
        # A mixture's tails are heavier than a Gaussian's: its fourth moment is measured.
        centred = draws[name] - posterior.mean[name]
        error = (centred.pow(4).mean(dim=0) - variance.square()).sqrt() / math.sqrt(len(centred))
        assert ((centred.square().mean(dim=0) - variance).abs() < 6 * error).all()
