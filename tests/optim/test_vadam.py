"""Vadam against its equations and a known posterior; and what Vadam and IVON promise alike, over both."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError, StateError
from bayesadam.gaussian.noise import stream_seed
from bayesadam.optim import IVON, Vadam, variational
from cases import mlp
from floats import assert_close

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
DEVICES = ["cpu", CUDA]
VADAM: dict[str, Any] = {"lr": 0.02, "n_data": 200, "prior_precision": 2.0, "initial_precision": 60.0, "generator": 0}
# A β₂ at which h moves within a few steps.
IVON_: dict[str, Any] = {"lr": 0.1, "n_data": 200, "betas": (0.9, 0.99), "generator": 0}
BOTH = [pytest.param((Vadam, VADAM), id="vadam"), pytest.param((IVON, IVON_), id="ivon")]
Kind = tuple[type[variational.PerturbedOptimizer], dict[str, Any]]


def build(kind: Kind, model: nn.Module, **changes: Any) -> Vadam | IVON:
    cls, settings = kind
    return cls(model.parameters(), **{**settings, **changes})


def network(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(3, 5, 2).to(device, dtype)


def loss_of(output: Tensor, x: Tensor) -> Tensor:
    return (output - x.sum(dim=1, keepdim=True).sin()).square().mean()


def batches(n: int, like: Tensor, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield torch.randn(8, 3, generator=generator, dtype=torch.float64).to(like)


def one_pass(model: nn.Module, optimizer: Vadam | IVON, x: Tensor) -> None:
    with optimizer.sampled_parameters():
        loss_of(model(x), x).backward()


def train(model: nn.Module, optimizer: Vadam | IVON, data: Any, samples: int = 1) -> None:
    for x in data:
        optimizer.zero_grad()
        for _ in range(samples):
            one_pass(model, optimizer, x)
        optimizer.step()


# --- the equations ------------------------------------------------------------------------------------------------


@dataclass
class InjectedNoise:
    """Stands in for the optimisers' noise, and lets a reference have the same."""

    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))
    drawn: list[Tensor] = field(default_factory=list)

    def __call__(self, shape: torch.Size, like: Tensor, seed: int) -> Tensor:
        self.drawn.append(torch.randn(shape, generator=self.generator, dtype=torch.float64))
        return self.drawn[-1].to(like, copy=True)


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> InjectedNoise:
    noise = InjectedNoise()
    monkeypatch.setattr(variational, "standard_normal", noise)
    return noise


Weights = dict[str, Tensor]


def gradients_at(model: nn.Module, weights: Weights, x: Tensor) -> Weights:
    return grad(lambda w: loss_of(functional_call(model, w, (x,)), x))(weights)


def vadam_reference(
    model: nn.Module, mu: Weights, data: list[Tensor], noise: Iterator[Tensor], samples: int, settings: dict[str, Any]
) -> dict[str, Weights]:
    """The equations of the docstring of `Vadam`, line by line, in float64; `settings` are functions of a parameter's
    name.
    """
    n, lam, b1, b2 = settings["n_data"], settings["prior_precision"], *settings["betas"]
    m = {k: torch.zeros_like(w) for k, w in mu.items()}
    v = {k: torch.full_like(w, (settings["initial_precision"](k) - lam(k)) / n) for k, w in mu.items()}
    for t, x in enumerate(data, start=1):
        passes = []
        for _ in range(samples):
            theta = {k: mu[k] + next(noise) / (n * v[k] + lam(k)).sqrt() for k in mu}
            passes.append(gradients_at(model, theta, x))
        for k in mu:
            g = sum(p[k] for p in passes) / samples
            h = sum(p[k] ** 2 for p in passes) / samples
            m[k] = b1 * m[k] + (1 - b1) * (g + lam(k) / n * mu[k])
            v[k] = b2 * v[k] + (1 - b2) * h
            m_hat, v_hat = m[k] / (1 - b1**t), v[k] / (1 - b2**t)
            mu[k] = mu[k] - settings["lr"](k) * m_hat / (v_hat.sqrt() + lam(k) / n)
    precision = {k: n * v[k] + lam(k) for k in mu}
    return {"mean": mu, "momentum": m, "second_moment": v, "precision": precision}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("samples", [1, 3])
def test_vadam_follows_its_equations(injected, samples, device):
    """Two groups with different λ, ρ₀ and α, ten steps, in float64."""
    model = network(torch.float64, device)
    start = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    groups = [
        {"params": model[0].parameters(), "prior_precision": 3.0, "initial_precision": 40.0},
        {"params": model[2].parameters(), "lr": 0.05},
    ]
    optimizer = Vadam(groups, **{**VADAM, "betas": (0.8, 0.95)})
    data = list(batches(10, torch.empty((), dtype=torch.float64, device=device)))
    train(model, optimizer, data, samples)
    settings = {
        "n_data": 200,
        "betas": (0.8, 0.95),
        "lr": lambda name: 0.02 if name.startswith("0.") else 0.05,
        "prior_precision": lambda name: 3.0 if name.startswith("0.") else 2.0,
        "initial_precision": lambda name: 40.0 if name.startswith("0.") else 60.0,
    }
    twin = network(torch.float64)
    expected = vadam_reference(twin, start, [x.cpu() for x in data], iter(injected.drawn), samples, settings)
    assert_follows(model, optimizer, expected, "second_moment")


def assert_follows(
    model: nn.Module, optimizer: Vadam | IVON, expected: dict[str, Weights], curvature: str, rtol: float = 1e-9
) -> None:
    posterior = optimizer.posterior(model)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        found = {
            "mean": parameter.detach(),
            "momentum": state["momentum"],
            curvature: state[curvature],
            "precision": posterior.variance[name].reciprocal(),
        }
        for what, value in found.items():
            assert_close(value.cpu(), expected[what][name], rtol=rtol, atol=1e-12)
        assert torch.equal(posterior.mean[name], parameter.detach())


@dataclass
class Regression:
    """y = w·x + noise with a known σ, and its exact posterior.

    The noise is ±σ, so that r² = σ² for every example: a likelihood that does not fit the data would change E[g²],
    which Vadam takes for the curvature, and not the exact posterior.
    """

    n_data: int
    sigma: float = 0.5
    prior: float = 4.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        mixing = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, -0.4], [0.0, 0.0, 2.0]], dtype=torch.float64)
        self.x = torch.randn(self.n_data, 3, generator=generator, dtype=torch.float64) @ mixing
        noise = torch.randn(self.n_data, generator=generator, dtype=torch.float64).sign() * self.sigma
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + noise
        precision = self.x.T @ self.x / self.sigma**2 + self.prior * torch.eye(3, dtype=torch.float64)
        self.mean = torch.linalg.solve(precision, self.x.T @ self.y / self.sigma**2)
        self.precision = precision.diagonal()

    def run(
        self,
        optimizer_of: Callable[[nn.Module], Vadam | IVON],
        *,
        batch: int,
        steps: int,
        decay: float = 1.0,
        runs: int = 16,
        start: Tensor | None = None,
    ) -> ba.Posterior:
        """The posterior after training, of several runs at once.

        The runs are the rows of one parameter: they share nothing but the optimiser's settings, since noise and update
        are a weight's own. Each goes through the data in an order of its own; `decay` is what is left of lr at the end.
        """
        start = torch.zeros(3, dtype=torch.float64) if start is None else start
        model = nn.Module()
        model.weight = nn.Parameter(start.repeat(runs, 1))
        optimizer = optimizer_of(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay ** (1 / steps))
        generator = torch.Generator().manual_seed(1)
        per_epoch = self.n_data // batch
        x, y = self.x.expand(runs, -1, -1), self.y.expand(runs, -1)
        for step in range(steps):
            if per_epoch > 1:
                if step % per_epoch == 0:
                    order = torch.rand(runs, self.n_data, generator=generator).argsort(dim=1).view(runs, -1, batch)
                x, y = self.x[order[:, step % per_epoch]], self.y[order[:, step % per_epoch]]
            with optimizer.sampled_parameters():
                residual = (x @ model.weight[:, :, None])[..., 0] - y
                # The sum over runs, each of which has its own mean over the mini-batch.
                (residual.square().mean(dim=1).sum() / (2 * self.sigma**2)).backward()
            optimizer.step()
            schedule.step()
        return optimizer.posterior(model)

    def compare(self, posterior: ba.Posterior) -> tuple[Tensor, Tensor]:
        """(error of the mean in units of the exact spread, precision over the exact one), by run and weight."""
        error = (posterior.mean["weight"] - self.mean) * self.precision.sqrt()
        return error, 1 / posterior.variance["weight"] / self.precision


def report(what: str, error: Tensor, ratio: Tensor) -> None:
    print(
        f"{what}: |mean − exact| at most {error.abs().max():.3f} spreads; precision over exact, mean of the runs ",
        end="",
    )
    print(
        [f"{r:.3f}" for r in ratio.mean(dim=0).tolist()],
        f"rms deviation {(ratio - 1).square().mean().sqrt():.3f}, range {ratio.min():.3f} to {ratio.max():.3f}",
    )


@pytest.mark.slow
def test_vadam_finds_the_exact_posterior_of_a_linear_regression():
    """With mini-batches of one example g² = x² r²/σ⁴, whose mean x²/σ² is the example's curvature: N v + λ is exact."""
    problem = Regression(200)
    posterior = problem.run(
        lambda model: Vadam(
            model.parameters(),
            lr=0.05,
            n_data=200,
            prior_precision=problem.prior,
            initial_precision=100.0,
            betas=(0.9, 0.998),
            generator=1,
        ),
        batch=1,
        steps=2_500,
        decay=1e-3,
    )
    error, ratio = problem.compare(posterior)
    report("Vadam", error, ratio)
    assert error.abs().max() < 0.25
    assert error.mean(dim=0).abs().max() < 0.05
    assert (ratio - 1).abs().max() < 0.15
    assert (ratio.mean(dim=0) - 1).abs().max() < 0.05


def test_vadam_divides_the_precision_by_the_batch_size_and_replace_gives_it_back():
    """A mean of M independent gradients has 1/M of their square, so N v is the M-th part of the curvature."""
    problem, batch = Regression(2_000), 4
    posterior = problem.run(
        lambda model: Vadam(
            model.parameters(),
            lr=1e-5,
            n_data=2_000,
            prior_precision=problem.prior,
            initial_precision=2_000.0,
            betas=(0.9, 0.995),
            generator=1,
        ),
        batch=batch,
        steps=1_200,
        start=problem.mean,
    )
    for batch_size, expected in ((1, 1 / batch), (batch, 1.0)):
        _, ratio = problem.compare(posterior.replace(batch_size=batch_size))
        print(
            f"Vadam, batches of {batch}: precision over exact with batch_size={batch_size}", ratio.mean(dim=0).tolist()
        )
        assert_close(ratio.mean(dim=0), torch.full_like(ratio[0], expected), rtol=0.1)


def test_vadam_before_its_first_step_draws_from_the_initial_precision():
    """v is not bias-corrected: it starts from what was asked for."""
    model = nn.Linear(400, 250, bias=False)
    optimizer = build((Vadam, VADAM), model)
    mean = model.weight.detach().clone()
    with optimizer.sampled_parameters():
        z = (model.weight.detach() - mean) * 60**0.5
        model(torch.zeros(1, 400)).sum().backward()
    assert abs(float(z.var()) - 1) < 0.02
    optimizer.step()
    # A gradient of zero leaves β₂ v₀, not β₂ v₀ / (1 − β₂).
    expected = 200 * 0.999 * (60 - 2) / 200 + 2
    assert_close(optimizer.posterior(model).variance["weight"], torch.full((250, 400), 1 / expected))


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_data": 0}, r"n_data must be a positive finite number \(the number of training examples\), got 0"),
        ({"n_data": float("nan")}, "n_data .* got nan"),
        ({"n_data": True}, "n_data .* got True"),
        ({"lr": -1e-3}, "lr must be finite and at least 0, got -0.001"),
        ({"lr": float("inf")}, "lr .* got inf"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers of at least 0 and below 1, got \(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, r"betas .* got \(-0.1, 0.9\)"),
        ({"betas": (0.9,)}, r"betas .* got \(0.9,\)"),
        ({"generator": "seed"}, "generator must be a torch.Generator, a seed or None, got 'seed'"),
        ({"generator": True}, "generator .* got True"),
    ],
)
@pytest.mark.parametrize("kind", BOTH)
def test_bad_settings_are_named(kind, changes, message):
    with pytest.raises(SettingError, match=message):
        build(kind, network(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prior_precision": 0.0}, "prior_precision must be a positive finite number .* got 0.0"),
        ({"initial_precision": float("inf")}, "initial_precision must be a positive finite number .* got inf"),
        (
            {"prior_precision": 3.0, "initial_precision": 1.0},
            "initial_precision=1.0 is below prior_precision=3.0: v would be negative",
        ),
    ],
)
def test_vadams_own_bad_settings_are_named(changes, message):
    with pytest.raises(SettingError, match=message):
        build((Vadam, VADAM), network(), **changes)


def test_vadam_may_start_from_the_prior():
    optimizer = build((Vadam, VADAM), model := network(), initial_precision=2.0)
    train(model, optimizer, batches(3, model[0].weight))
    assert all(bool((v <= 0.5).all()) for v in optimizer.posterior(model).variance.values())


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("key", "value"), [("n_data", 100), ("seed", 5)])
def test_what_is_the_optimisers_cannot_differ_between_groups(kind, key, value):
    model = network()
    cls, settings = kind
    with pytest.raises(SettingError, match=f"{key} is one for all parameter groups"):
        cls([{"params": model[0].parameters()}, {"params": model[2].parameters(), key: value}], **settings)


@pytest.mark.parametrize("kind", BOTH)
def test_a_bad_group_is_refused_and_not_added(kind):
    model = network()
    optimizer = kind[0](model[0].parameters(), **kind[1])
    with pytest.raises(SettingError, match=r"lr .* got -1"):
        optimizer.add_param_group({"params": model[2].parameters(), "lr": -1})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", BOTH)
def test_a_group_that_joins_later_is_perturbed_and_trained(kind):
    model = network()
    cls, settings = kind
    optimizer = cls(model[0].parameters(), **settings)
    data = list(batches(4, model[0].weight))
    train(model, optimizer, data[:2])
    before = model[2].weight.detach().clone()
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
    assert [group["passes"] for group in optimizer.param_groups] == [2, 2]
    train(model, optimizer, data[2:])
    assert float(optimizer.state[model[0].weight]["step"]) == 4
    assert float(optimizer.state[model[2].weight]["step"]) == 2
    assert not torch.equal(model[2].weight, before)


@pytest.mark.parametrize("kind", BOTH)
def test_a_schedule_moves_the_learning_rate(kind):
    model = network()
    optimizer = build(kind, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    data = list(batches(2, model[0].weight))
    train(model, optimizer, data[:1])
    schedule.step()
    before = model[0].weight.detach().clone()
    train(model, optimizer, data[1:])
    assert torch.equal(model[0].weight, before)


# --- the perturbation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", BOTH)
def test_the_perturbation_has_the_moments_of_the_posterior(kind, device):
    """z = (θ − μ)/σ over 4 × 100,000 weights of differing σ: each bound is five standard errors."""
    torch.manual_seed(0)
    model = nn.Linear(400, 250, bias=False).to(device)
    optimizer = build(kind, model)
    for scale in (1.0, 3.0):
        with optimizer.sampled_parameters():
            (model(torch.linspace(0, scale, 400, device=device)[None]).square().mean() * 100).backward()
        optimizer.step()
    posterior = optimizer.posterior(model)
    mean, sigma = posterior.mean["weight"], posterior.stddev["weight"]
    assert float(sigma.max() / sigma.min()) > 1.05
    draws = []
    for _ in range(4):
        with optimizer.sampled_parameters():
            draws.append(((model.weight.detach() - mean) / sigma).flatten().double().cpu())
    z = torch.stack(draws)
    n = z.numel()
    assert abs(float(z.mean())) < 5 / n**0.5
    assert abs(float(z.square().mean()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float(z.pow(3).mean())) < 5 * (15 / n) ** 0.5
    assert abs(float(z.pow(4).mean()) - 3) < 5 * (96 / n) ** 0.5
    # Large and small σ alike.
    wide = (sigma > sigma.median()).flatten().cpu()
    for part in (z[:, wide], z[:, ~wide]):
        assert abs(float(part.square().mean()) - 1) < 5 * (2 / part.numel()) ** 0.5
    # Draws are independent of each other, and neighbours of neighbours.
    for a, b in itertools.combinations(z, 2):
        assert abs(float((a * b).mean())) < 5 / a.numel() ** 0.5
    assert abs(float((z[:, 1:] * z[:, :-1]).mean())) < 5 / n**0.5


@pytest.mark.parametrize("kind", BOTH)
def test_equal_parameters_are_perturbed_independently(kind):
    model = nn.ModuleList([nn.Linear(100, 100, bias=False) for _ in range(2)])
    for layer in model:
        nn.init.zeros_(layer.weight)
    optimizer = build(kind, model)
    with optimizer.sampled_parameters():
        a, b = (layer.weight.detach().flatten() for layer in model)
        correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert abs(float(correlation)) < 0.05


@pytest.mark.parametrize("kind", BOTH)
def test_the_noise_goes_by_the_seed_alone(kind):
    def draw(generator: Any) -> Tensor:
        model = network()
        with build(kind, model, generator=generator).sampled_parameters():
            return model[0].weight.detach().clone()

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
    assert torch.equal(draw(torch.Generator().manual_seed(3)), draw(torch.Generator().manual_seed(3)))
    torch.manual_seed(3)
    first, second = draw(None), draw(None)
    # The network itself is built from torch.manual_seed(0), so both seeds were drawn from the same point.
    assert torch.equal(first, second)
    generator = torch.Generator().manual_seed(3)
    assert not torch.equal(draw(generator), draw(generator))


def test_a_parameters_noise_is_that_of_its_place():
    """The stream is part of what a seed means: changing it changes every run."""
    model = network()
    optimizer = build((IVON, IVON_), model, weight_decay=0.0, generator=11)
    mean = model[2].weight.detach().clone()
    with optimizer.sampled_parameters():
        pass
    with optimizer.sampled_parameters():
        found = model[2].weight.detach().clone()
    random = np.random.Generator(np.random.SFC64(stream_seed(11, "pass", 1, 2)))
    expected = mean + torch.from_numpy(random.standard_normal((2, 5), np.float32)) / 200**0.5
    assert_close(found, expected)


# --- the block ----------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    return {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}


def assert_untouched(model: nn.Module, before: dict[str, tuple[int, Tensor]]) -> None:
    for name, parameter in model.named_parameters():
        pointer, values = before[name]
        assert parameter.data_ptr() == pointer
        assert torch.equal(parameter.detach(), values)


@pytest.mark.parametrize("kind", BOTH)
def test_inside_the_weights_are_perturbed_and_outside_their_own(kind):
    model = network()
    optimizer = build(kind, model)
    before = snapshot(model)
    with optimizer.sampled_parameters():
        for name, parameter in model.named_parameters():
            assert parameter.data_ptr() != before[name][0]
            assert not bool((parameter == before[name][1]).any())
    assert_untouched(model, before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("kind", BOTH)
def test_weights_come_back_after_any_exception_and_the_pass_does_not_count(kind, error):
    model = network()
    optimizer = build(kind, model)
    before = snapshot(model)
    x = next(batches(1, model[0].weight))

    def interrupted() -> None:
        with optimizer.sampled_parameters():
            loss_of(model(x), x).backward()
            raise error

    with pytest.raises(error):
        interrupted()
    assert_untouched(model, before)
    with pytest.raises(StateError, match="there is no gradient"):
        optimizer.step()
    assert_untouched(model, before)
    train(model, optimizer, [x])
    assert float(optimizer.state[model[0].weight]["step"]) == 1


@pytest.mark.parametrize("kind", BOTH)
def test_weights_come_back_when_putting_the_draw_in_fails_half_way(kind, monkeypatch):
    model = network()
    optimizer = build(kind, model)
    before = snapshot(model)
    broken = {p: torch.zeros(7, 7, 7) if p is model[2].weight else torch.ones_like(p) for p in model.parameters()}
    monkeypatch.setattr(optimizer, "_draw", lambda: broken)
    with pytest.raises(RuntimeError, match="size"), optimizer.sampled_parameters():
        pytest.fail("noise of another shape must not get in")
    assert_untouched(model, before)
    monkeypatch.undo()
    train(model, optimizer, batches(1, model[0].weight))


@pytest.mark.parametrize("kind", BOTH)
def test_nothing_else_may_happen_inside(kind):
    model = network()
    optimizer = build(kind, model)
    before = snapshot(model)
    for what in (
        optimizer.step,
        lambda: optimizer.posterior(model),
        lambda: optimizer.sampled_parameters().__enter__(),
    ):
        with optimizer.sampled_parameters(), pytest.raises(StateError, match=r"\(\) was called inside a sampled_par"):
            what()
        assert_untouched(model, before)


# --- samples and steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_a_step_without_a_sampled_pass_is_refused(kind):
    model = network()
    optimizer = build(kind, model)
    x = next(batches(1, model[0].weight))
    loss_of(model(x), x).backward()
    with pytest.raises(StateError, match=r"inside `with optimizer.sampled_parameters\(\):`"):
        optimizer.step()
    train(model, optimizer, [x])
    with pytest.raises(StateError, match="there is no gradient"):
        optimizer.step()


@pytest.mark.parametrize("kind", BOTH)
def test_a_block_without_a_gradient_is_no_sample(kind):
    model, twin = network(), network()
    optimizer, other = build(kind, model), build(kind, twin)
    x = next(batches(1, model[0].weight))
    one_pass(model, optimizer, x)
    with optimizer.sampled_parameters(), torch.no_grad():
        model(x)
    optimizer.step()
    train(twin, other, [x])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("kind", BOTH)
def test_zero_grad_drops_the_samples_before_it_but_not_from_inside_a_block(kind):
    model = network()
    optimizer = build(kind, model)
    x = next(batches(1, model[0].weight))
    one_pass(model, optimizer, x)
    optimizer.zero_grad()
    with pytest.raises(StateError, match="there is no gradient"):
        optimizer.step()
    for _ in range(2):
        with optimizer.sampled_parameters():
            optimizer.zero_grad()
            loss_of(model(x), x).backward()
    optimizer.step()
    assert float(optimizer.state[model[0].weight]["step"]) == 1


@pytest.mark.parametrize("kind", BOTH)
def test_gradients_from_outside_a_block_have_no_part_in_the_step(kind):
    model, twin = network(), network()
    optimizer, other = build(kind, model), build(kind, twin)
    for x in batches(3, model[0].weight):
        # Neither a gradient at the mean nor the last step's, which nobody zeroed.
        (100 * loss_of(model(x), x)).backward()
        one_pass(model, optimizer, x)
        optimizer.step()
        train(twin, other, [x])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("kind", BOTH)
def test_gradients_may_be_clipped_after_each_block(kind):
    model, twin = network(), network()
    optimizer, other = build(kind, model), build(kind, twin)
    x = next(batches(1, model[0].weight))
    for network_, opt, clip_inside in ((model, optimizer, False), (twin, other, True)):
        for _ in range(2):
            with opt.sampled_parameters():
                (1_000 * loss_of(network_(x), x)).backward()
                if clip_inside:
                    nn.utils.clip_grad_norm_(network_.parameters(), 0.1)
            if not clip_inside:
                nn.utils.clip_grad_norm_(network_.parameters(), 0.1)
        opt.step()
    assert float(optimizer.state[model[0].weight]["momentum"].norm()) < 0.1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("kind", BOTH)
def test_gradients_are_left_as_they_were_and_their_memory_may_be_reused(kind):
    """Data-parallel training keeps a parameter's gradient in one place for good."""
    model, twin = network(), network()
    optimizer, other = build(kind, model), build(kind, twin)
    memory = {p: torch.zeros_like(p) for p in model.parameters()}

    def move(parameter: Tensor) -> None:
        parameter.grad = memory[parameter].copy_(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(move)
    data = list(batches(3, model[0].weight))
    train(model, optimizer, data, samples=2)
    train(twin, other, data, samples=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    for _ in range(2):
        one_pass(model, optimizer, data[0])
    before = {p: p.grad.clone() for p in memory}
    optimizer.step()
    assert all(torch.equal(p.grad, before[p]) for p in memory)


@pytest.mark.parametrize("kind", BOTH)
def test_a_gradient_scaler_works_and_may_skip_a_step(kind):
    model, twin = network(), network()
    optimizer, other = build(kind, model), build(kind, twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1_000)
    for number, x in enumerate(batches(4, model[0].weight)):
        optimizer.zero_grad()
        with optimizer.sampled_parameters():
            scaler.scale(loss_of(model(x), x) * (float("inf") if number == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if number == 1:
            with other.sampled_parameters():
                pass
        else:
            train(twin, other, [x])
    assert float(optimizer.state[model[0].weight]["step"]) == 3
    # The scale is a power of two, so that it comes out again to the bit.
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("kind", BOTH)
def test_a_closure_opens_the_block_itself(kind):
    model, twin = network(), network()
    optimizer, other = build(kind, model), build(kind, twin)
    x = next(batches(1, model[0].weight))

    def closure() -> Tensor:
        optimizer.zero_grad()
        with optimizer.sampled_parameters():
            loss = loss_of(model(x), x)
            loss.backward()
        return loss

    loss = optimizer.step(closure)
    train(twin, other, [x])
    assert float(loss.detach()) > 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


# --- parameters of every kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_frozen_parameters_are_neither_perturbed_nor_moved(kind):
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    optimizer = build(kind, model)
    with optimizer.sampled_parameters():
        assert torch.equal(model[0].weight, before)
    train(model, optimizer, batches(3, model[0].weight))
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state
    assert optimizer.posterior(model).omitted == {"0.weight": "frozen (requires_grad is False)"}


@pytest.mark.parametrize("kind", BOTH)
def test_parameters_without_a_gradient_stay_and_are_left_out_of_the_posterior(kind):
    model = network()
    model.unused = nn.Linear(2, 2)
    before = model.unused.weight.detach().clone()
    optimizer = build(kind, model)
    for x in batches(3, model[0].weight):
        with optimizer.sampled_parameters():
            loss_of(model[2](model[1](model[0](x))), x).backward()
        optimizer.step()
    assert torch.equal(model.unused.weight, before)
    assert float(optimizer.state[model.unused.weight]["step"]) == 0
    posterior = optimizer.posterior(model)
    assert posterior.omitted == {f"unused.{name}": "never received a gradient" for name in ("weight", "bias")}


@pytest.mark.parametrize("kind", BOTH)
def test_a_sample_without_a_gradient_for_a_parameter_counts_as_zero(kind):
    model, twin = network(), network()
    optimizer, other = build(kind, model), build(kind, twin)
    x = next(batches(1, model[0].weight))
    for number in range(2):
        for net, opt, factor in ((model, optimizer, None), (twin, other, 0.0)):
            with opt.sampled_parameters():
                hidden = net[1](net[0](x))
                if number == 1:
                    # The second sample has no gradient below the last layer, or one that is zero.
                    hidden = hidden.detach() if factor is None else hidden * factor + hidden.detach()
                loss_of(net[2](hidden), x).backward()
    optimizer.step()
    other.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("kind", BOTH)
def test_tied_weights_are_perturbed_once_and_stay_tied(kind):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    optimizer = build(kind, model)
    with optimizer.sampled_parameters():
        assert model[2].weight is model[0].weight
    train(model, optimizer, batches(3, model[0].weight))
    assert model[2].weight is model[0].weight
    assert list(optimizer.posterior(model).mean) == ["0.weight", "0.bias", "2.bias"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", BOTH)
def test_bfloat16_parameters_have_a_float32_state(kind, device):
    """Against the same steps in float32, to the few digits of bfloat16; long steps, since it rounds short ones away."""
    model, wide = network(torch.bfloat16, device), network(torch.bfloat16, device).float()
    optimizer, other = build(kind, model, lr=0.4), build(kind, wide, lr=0.4)
    starts = {p: p.detach().clone() for p in model.parameters()}
    for x in batches(5, model[0].weight):
        train(model, optimizer, [x])
        train(wide, other, [x.float()])
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        assert p.dtype == torch.bfloat16
        assert not torch.equal(p, starts[p])
        state = optimizer.state[p]
        assert {key: value.dtype for key, value in state.items()} == dict.fromkeys(state, torch.float32)
        assert_close(p.float(), q, rtol=0.05, atol=0.02)
    posterior = optimizer.posterior(model)
    assert all(v.dtype == torch.float32 for v in posterior.variance.values())
    assert all(theta.dtype == torch.bfloat16 for theta in posterior.sample().values())


@pytest.mark.parametrize("kind", BOTH)
def test_a_sparse_gradient_is_that_of_all_weights(kind):
    start, found = torch.randn(5, 3), []
    for sparse in (False, True):
        model = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=sparse)
        optimizer = build(kind, model)
        for _ in range(3):
            with optimizer.sampled_parameters():
                model(torch.tensor([1, 4, 1])).square().sum().backward()
            optimizer.step()
        found.append(model.weight.detach())
    assert torch.equal(*found)
    assert not torch.equal(found[0], start)


@pytest.mark.parametrize("kind", BOTH)
def test_complex_parameters_are_refused(kind):
    turning = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(SettingError, match=r"shape \(2,\) is complex"):  # noqa: SIM117
        with build(kind, turning).sampled_parameters():
            pytest.fail("complex weights must not get in")


# --- going on -----------------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key, state in a["state"].items():
        assert state.keys() == b["state"][key].keys()
        for name, value in state.items():
            assert value.dtype == b["state"][key][name].dtype
            assert torch.equal(value, b["state"][key][name])


@pytest.mark.parametrize("route", [through_a_file, copy.deepcopy])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", BOTH)
def test_twelve_steps_are_six_and_six_to_the_bit(kind, dtype, device, route):
    def fresh(**changes: Any) -> tuple[nn.Module, Vadam | IVON]:
        model = network(dtype, device)
        cls, settings = kind
        groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
        return model, cls(groups, **{**settings, **changes})

    whole, optimizer = fresh()
    data = list(batches(12, whole[0].weight))
    train(whole, optimizer, data, samples=2)
    half, before = fresh()
    train(half, before, data[:6], samples=2)
    # The fresh optimiser is set up otherwise, down to its seed: the state dict decides.
    resumed, after = fresh(generator=12345, betas=(0.5, 0.5))
    resumed.load_state_dict(route(half.state_dict()))
    after.load_state_dict(route(before.state_dict()))
    assert_same_state(after.state_dict(), before.state_dict())
    train(resumed, after, data[6:], samples=2)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
    assert_same_state(after.state_dict(), optimizer.state_dict())
    assert {float(state["step"]) for state in after.state.values()} == {12}
    assert {(group["passes"], group["seed"]) for group in after.param_groups} == {(24, 0)}


@pytest.mark.parametrize("kind", BOTH)
def test_a_copy_goes_on_by_itself(kind):
    model = network()
    optimizer = build(kind, model)
    data = list(batches(6, model[0].weight))
    train(model, optimizer, data[:3])
    one_pass(model, optimizer, data[3])
    twin, other = copy.deepcopy((model, optimizer))
    optimizer.zero_grad()
    assert_same_state(other.state_dict(), optimizer.state_dict())
    train(model, optimizer, data[3:])
    train(twin, other, data[3:])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("kind", BOTH)
def test_loading_drops_samples_without_a_step(kind):
    model = network()
    optimizer = build(kind, model)
    x = next(batches(1, model[0].weight))
    train(model, optimizer, [x])
    saved = copy.deepcopy(optimizer.state_dict())
    one_pass(model, optimizer, x)
    optimizer.load_state_dict(saved)
    with pytest.raises(StateError, match="there is no gradient"):
        optimizer.step()


@pytest.mark.parametrize("kind", BOTH)
def test_another_optimisers_state_is_refused(kind):
    model = network()
    optimizer = build(kind, model)
    other = build((IVON, IVON_) if kind[0] is Vadam else (Vadam, VADAM), network())
    for foreign in (torch.optim.Adam(network().parameters()), other):
        with pytest.raises(MatchError, match=f"not the state dict of a {kind[0].__name__}: a group has no '"):
            optimizer.load_state_dict(foreign.state_dict())
    train(model, optimizer, batches(1, model[0].weight))


# --- the posterior ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_the_posterior_is_a_copy_and_changes_nothing(kind):
    model = network()
    optimizer = build(kind, model)
    train(model, optimizer, batches(3, model[0].weight))
    before, weights = copy.deepcopy(optimizer.state_dict()), snapshot(model)
    posterior = optimizer.posterior(model)
    assert_same_state(optimizer.state_dict(), before)
    assert_untouched(model, weights)
    mean, variance = copy.deepcopy((posterior.mean, posterior.variance))
    train(model, optimizer, batches(3, model[0].weight))
    for name in mean:
        assert torch.equal(posterior.mean[name], mean[name])
        assert torch.equal(posterior.variance[name], variance[name])


@pytest.mark.parametrize("kind", BOTH)
def test_the_posterior_needs_a_step(kind):
    model = network()
    optimizer = build(kind, model)
    with pytest.raises(StateError, match="has not taken a step yet"):
        optimizer.posterior(model)
    with optimizer.sampled_parameters():
        pass
    with pytest.raises(StateError, match="has not taken a step yet"):
        optimizer.posterior(model)


@pytest.mark.parametrize("kind", BOTH)
def test_the_doctor_reads_it_with_the_classs_reader(kind):
    model = network()
    optimizer = build(kind, model)
    train(model, optimizer, batches(3, model[0].weight))
    diagnosis = ba.doctor(model, optimizer, reader=type(optimizer).reader)
    assert "optimizer" in diagnosis.codes()
    assert "unreadable" not in diagnosis.codes()


@pytest.mark.parametrize("kind", BOTH)
def test_a_saved_state_gives_the_same_posterior(kind):
    model = network()
    optimizer = build(kind, model)
    train(model, optimizer, batches(3, model[0].weight))
    live = optimizer.posterior(model)
    saved = ba.Posterior.from_state_dict(
        model,
        through_a_file(optimizer.state_dict()),
        200,
        optimizer=kind[0].reader,
        prior_precision=live.prior_precision,
        power=1.0,
        batch_size=1,
    )
    assert all(torch.equal(saved.variance[name], live.variance[name]) for name in live.variance)
