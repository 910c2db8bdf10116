"""A posterior with a LoraPrior is one on B A: B → B c, A → A/c changes nothing that it says."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian

from packages import lazy

peft = lazy("peft")

import bayesadam as ba  # noqa: E402
from bayesadam.lora import pairs_in  # noqa: E402
from cases import soap  # noqa: E402
from floats import approx, assert_close  # noqa: E402

WORDS, WIDTH, CLASSES, RANK, BATCH = 7, 6, 3, 3, 10
CLOSE = {"rtol": 1e-5, "atol": 0.0}
ADAPTERS = ["embed", "inner", "outer"]
Numbers = float | Tensor


class Words(nn.Module):
    """The mean of embedded words, through a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(self.embed(x).mean(dim=1)).tanh()
        return self.head(self.outer(hidden).tanh())


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The class is that of the first word, one in four drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (count, 3), generator=generator)
    drawn = torch.randint(CLASSES, (count,), generator=generator)
    return x, torch.where(torch.rand(count, generator=generator) < 0.25, drawn, x[:, 0] % CLASSES)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x, y = data(60, seed=0)
    rows = torch.randint(len(x), (BATCH,), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.fixture(scope="module")
def once() -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=5, target_modules=ADAPTERS, modules_to_save=["head"])
    model = peft.get_peft_model(Words().double(), config).double()
    optimizer = torch.optim.AdamW(trainable(model), lr=3e-2)
    for number in range(60):
        step(model, optimizer, number)
    return model.eval()


@pytest.fixture
def adapted(once) -> nn.Module:
    return copy.deepcopy(once)


def read(
    model: nn.Module,
    structure: str = "diagonal",
    make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    recorded: bool = False,
    **options: object,
) -> ba.Posterior:
    """The posterior of an optimiser that has seen gradients at these weights, and has moved none of them."""
    optimizer = make(trainable(model), lr=0.0, weight_decay=0.0)
    recorder = ba.Recorder(optimizer, keep=30, every=1) if recorded else None
    for number in range(36):
        step(model, optimizer, number)
    settings = {"prior_precision": ba.LoraPrior(), "power": 1, "batch_size": BATCH, **options}
    return ba.Posterior.from_optimizer(model, optimizer, 60, structure=structure, recorder=recorder, **settings)


def factors(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """(B, A) of every adapter."""
    named = dict(model.named_parameters())
    return [(named[pair.up], named[pair.down]) for pair in pairs_in(named)]


def moved(theta: dict[str, Tensor], c: list[Tensor]) -> dict[str, Tensor]:
    """B → B c, A → A/c of weights by name, one c (a number a rank) an adapter; draws have a leading dimension."""
    found = dict(theta)
    for pair, each in zip(pairs_in(theta), c, strict=True):
        found[pair.up], found[pair.down] = theta[pair.up] * each, theta[pair.down] / each[:, None]
    return found


def move(model: nn.Module, c: list[Tensor]) -> None:
    with torch.no_grad():
        for name, value in moved(dict(model.named_parameters()), c).items():
            dict(model.named_parameters())[name].copy_(value)


def by_adapter(*numbers: float) -> list[Tensor]:
    return [torch.full((RANK,), c, dtype=torch.float64) for c in numbers]


ONE_EACH = by_adapter(3.7, 0.2, 11.0)
# Exact in floating point: what SOAP takes for a basis where a gradient is flat is a matter of rounding.
POWERS_OF_TWO = by_adapter(4.0, 0.25, 8.0)
ONE_A_RANK = [torch.tensor(c, dtype=torch.float64) for c in ([3.7, 0.2, 1.0], [0.1, 5.0, 2.0], [1.0, -4.0, 0.5])]
KINDS = [
    pytest.param({"structure": "diagonal"}, ONE_EACH, id="diagonal"),
    pytest.param({"structure": "diagonal"}, ONE_A_RANK, id="diagonal, one c a rank"),
    pytest.param({"structure": "diagonal", "form": "likelihood"}, ONE_A_RANK, id="likelihood form"),
    pytest.param({"structure": "kronecker", "make": soap}, POWERS_OF_TWO, id="kronecker of SOAP"),
    pytest.param({"structure": "kronecker", "recorded": True}, ONE_EACH, id="kronecker of a recorder"),
    pytest.param({"structure": "low-rank", "recorded": True}, ONE_A_RANK, id="low-rank"),
    pytest.param({"structure": "low-rank+diagonal", "recorded": True}, ONE_A_RANK, id="low-rank+diagonal"),
]


def assert_same_predictions(found: ba.Posterior, expected: ba.Posterior, c: list[Tensor] = ONE_EACH) -> None:
    """Leverage, and so novelty, is that of the product where an adapter has one c: its ranks are summed over."""
    x, _ = data(20, seed=5)
    a, b = (each.predict(x, likelihood="classification", covariance=True) for each in (found, expected))
    for name in ("mean", "variance", "covariance", "probs"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert ours is not None
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()), msg=name)
    assert_close(a.variance, b.variance, **CLOSE)
    if c is not ONE_A_RANK:
        assert_close(a.novelty, b.novelty, **CLOSE)


# --- the symmetry ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "c"), KINDS)
def test_predictions_are_those_of_the_product(adapted, options, c):
    before = read(adapted, **options)
    move(adapted, c)
    assert_same_predictions(read(adapted, **options), before, c)


@pytest.mark.parametrize(("options", "c"), KINDS)
def test_the_distribution_of_draws_is_that_of_the_product(adapted, options, c):
    """q'(θ') = q(θ)/|dθ'/dθ| for θ' the same network as θ."""
    before = read(adapted, **options)
    move(adapted, c)
    after = read(adapted, **options)
    theta = before.sample(8, generator=torch.Generator().manual_seed(0))
    sizes = [(b.shape[0], a.shape[1]) for b, a in factors(adapted)]
    volume = sum((up - down) * float(each.abs().log().sum()) for (up, down), each in zip(sizes, c, strict=True))
    assert_close(after.log_prob(moved(theta, c)), before.log_prob(theta) - volume, **CLOSE)


def test_draws_of_the_product_are_the_same_ones(adapted):
    before = read(adapted)
    move(adapted, ONE_EACH)
    draws = [each.sample(4, generator=torch.Generator().manual_seed(0)) for each in (read(adapted), before)]
    for pair in pairs_in(before.mode):
        found, expected = (draw[pair.up] @ draw[pair.down] for draw in draws)
        assert_close(found, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.filterwarnings("ignore::bayesadam.errors.BayesAdamWarning")
@pytest.mark.parametrize(("options", "c"), KINDS)
@pytest.mark.slow
def test_calibration_keeps_the_symmetry(adapted, options, c):
    calibration_keeps_it(adapted, options, c, "evidence")


# Tries many settings.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bayesadam.errors.BayesAdamWarning")
@pytest.mark.parametrize(("options", "c"), KINDS)
def test_calibration_by_validation_keeps_the_symmetry(adapted, options, c):
    calibration_keeps_it(adapted, options, c, "validation")


def calibration_keeps_it(adapted: nn.Module, options: dict[str, Any], c: list[Tensor], method: str) -> None:
    before = read(adapted, **options)
    move(adapted, c)
    chosen = {"likelihood": "classification", "method": method}
    tuned = [ba.calibrate(p, data(30, seed=1), **chosen) for p in (read(adapted, **options), before)]
    assert_same_predictions(*tuned, c)
    assert tuned[0].settings.scale == approx(tuned[1].settings.scale, rel=1e-4)
    assert_same_predictions(*(each.replace(averaged=True, temperature=1.0) for each in tuned), c)


@pytest.mark.filterwarnings("ignore::bayesadam.errors.BayesAdamWarning")
def test_calibration_under_a_sampling_predictive_keeps_it_too(adapted):
    options = {"likelihood": "classification", "predictive": "sampled", "n_samples": 5}
    before = read(adapted)
    move(adapted, ONE_EACH)
    tuned = [
        ba.calibrate(p, data(40, seed=1), generator=torch.Generator().manual_seed(0), **options)
        for p in (read(adapted), before)
    ]
    assert_same_predictions(*tuned)
    assert all(each.settings.covariant for each in tuned)


def test_one_number_for_both_factors_does_not_have_the_symmetry(adapted):
    x, _ = data(20, seed=5)
    found = []
    for c in (by_adapter(1.0, 1.0, 1.0), ONE_EACH):
        move(adapted, c)
        found.append(read(adapted, prior_precision=1.0).predict(x, likelihood="classification").variance)
    assert ((found[0] / found[1]).log().abs() > 0.05).any()


# --- the numbers ----------------------------------------------------------------------------------------------------


def test_the_prior_is_the_diagonal_of_the_penalty(adapted):
    """δ/2 ‖s B A‖² differentiated twice; δ itself for the head."""
    delta, s = 2.5, 5 / RANK
    prior = read(adapted, prior_precision=ba.LoraPrior(delta)).prior_precision
    for pair in pairs_in(prior):
        theta = {name: dict(adapted.named_parameters())[name].detach() for name in (pair.up, pair.down)}

        def penalty(up: Tensor, down: Tensor) -> Tensor:
            return 0.5 * delta * (s * up @ down).square().sum()

        for number, name in enumerate(theta):
            size = theta[name].numel()
            expected = hessian(penalty, argnums=number)(*theta.values()).reshape(size, size).diagonal()
            assert_close(prior[name].flatten(), expected)
    assert {delta} == {value for name, value in prior.items() if "modules_to_save" in name}


@pytest.mark.parametrize("options", [{"make": soap}, {"recorded": True}], ids=["SOAP", "recorder"])
def test_rotated_factors_get_the_mean(adapted, options):
    whole, found = read(adapted).prior_precision, read(adapted, "kronecker", **options).prior_precision
    for pair in pairs_in(whole):
        for name in (pair.up, pair.down):
            assert found[name] == approx(float(whole[name].mean()))


@pytest.mark.filterwarnings("ignore::bayesadam.errors.BayesAdamWarning")
@pytest.mark.parametrize("method", ["validation", "evidence"])
def test_calibration_multiplies_it_by_one_number(adapted, method):
    posterior = read(adapted)
    chosen = {"likelihood": "classification", "method": method}
    tuned = ba.calibrate(posterior, data(80, seed=1), **chosen)
    ratios = [torch.as_tensor(tuned.prior_precision[name] / delta) for name, delta in posterior.prior_precision.items()]
    assert max(map(float, (r.max() for r in ratios))) == approx(min(map(float, (r.min() for r in ratios))))
    again = ba.calibrate(tuned, data(80, seed=1), **chosen)
    name = "base_model.model.head.modules_to_save.default.bias"
    assert again.prior_precision[name] == approx(tuned.prior_precision[name], rel=1e-3)


def test_a_convolution_has_factors_too():
    torch.manual_seed(0)
    model = peft.get_peft_model(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten()), peft.LoraConfig(r=2, target_modules=["0"], lora_alpha=2)
    )
    optimizer = torch.optim.Adam(trainable(model), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 2, 6, 6)).square().mean().backward()
        optimizer.step()
    prior = ba.Posterior.from_optimizer(
        model, optimizer, 5, prior_precision=ba.LoraPrior(), power=1, batch_size=5
    ).prior_precision
    ((up, down),) = factors(model)
    (pair,) = pairs_in(prior)
    for j in range(2):
        assert_close(prior[pair.up][:, j].unique(), down[j].square().sum()[None].detach(), rtol=1e-5)
        assert_close(prior[pair.down][j].unique(), up[:, j].square().sum()[None].detach(), rtol=1e-5)


def test_a_frozen_factor_counts(adapted):
    """A trained B beside an A that was not has the prior that A gives it."""
    whole = read(adapted).prior_precision
    for _, down in factors(adapted):
        down.requires_grad_(False)
    found = read(adapted).prior_precision
    ups = [name for name in found if "lora_B" in name or "lora_embedding_B" in name]
    assert len(ups) == len(ADAPTERS)
    assert not any("lora_A" in name for name in found)
    assert all(torch.equal(found[name], whole[name]) for name in ups)


# --- what has no product --------------------------------------------------------------------------------------------


def test_an_adapter_that_starts_is_refused(adapted):
    with torch.no_grad():
        factors(adapted)[1][0].zero_()
    with pytest.raises(ba.errors.SettingError, match=r"inner.*is 0, as B is before training"):
        read(adapted)


@pytest.mark.parametrize("c", [ONE_EACH, ONE_A_RANK])
def test_a_rank_without_a_product_has_a_finite_variance(adapted, c):
    """One of B's columns 0, one rank 0 in both factors; the symmetry holds all the same."""
    with torch.no_grad():
        (_, _), (up, _), (both, down) = factors(adapted)
        up[:, 1] = 0
        both[:, 2], down[2] = 0, 0
    before = read(adapted)
    assert all(bool(variance.isfinite().all()) for variance in before.variance.values())
    move(adapted, c)
    assert_same_predictions(read(adapted), before, c)


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_other_powers_are_refused(adapted, power):
    with pytest.raises(ba.errors.SettingError, match=r"needs power=1, got .*Pass power=1 and batch_size"):
        read(adapted, power=power)
    with pytest.raises(ba.errors.SettingError, match="needs power=1"):
        read(adapted).replace(power=power)


def test_a_model_without_adapters_is_refused():
    model = Words()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    posterior = ba.Posterior.from_optimizer(model, optimizer, 60, power=1, batch_size=BATCH)
    with pytest.raises(ba.errors.MatchError, match=r"no lora_A with its lora_B"):
        posterior.replace(prior_precision=ba.LoraPrior())


def test_layers_of_ones_own_need_a_scaling():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (0.5 * self.lora_B @ self.lora_A).T

    model = nn.Sequential(Own())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 5, power=1, batch_size=5)
    with pytest.raises(ba.errors.SettingError, match=r"s of '0' is not known: LoraPrior\(scaling=\.\.\.\)"):
        posterior.replace(prior_precision=ba.LoraPrior())
    found = posterior.replace(prior_precision=ba.LoraPrior(2.0, scaling=0.5)).prior_precision["0.lora_B"]
    expected = 2.0 * 0.25 * model[0].lora_A.square().sum(dim=1)
    assert_close(found, expected.detach().expand(4, 2))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, "much"])
def test_precision_and_scaling_are_positive(wrong):
    with pytest.raises(ba.errors.SettingError, match="precision must be a positive"):
        ba.LoraPrior(wrong)
    with pytest.raises(ba.errors.SettingError, match="scaling must be a positive"):
        ba.LoraPrior(scaling=wrong)


# --- along with the posterior ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_a_file_keeps_it(adapted, tmp_path, structure):
    posterior = read(adapted, structure, recorded=structure == "kronecker")
    posterior.save(tmp_path / "adapter.safetensors")
    again = ba.Posterior.load(tmp_path / "adapter.safetensors", adapted)
    assert again.settings.covariant
    assert_same_predictions(again, posterior)


def test_a_file_of_another_prior_says_nothing_of_it(adapted):
    _, header = read(adapted, prior_precision=1.0).packed()
    assert "covariant" not in header["settings"]


def test_it_goes_where_the_posterior_goes_and_leaves_with_another_prior(adapted):
    posterior = read(adapted)
    assert posterior.to(dtype=torch.float32).replace(scale=2.0).settings.covariant
    assert not posterior.replace(prior_precision=1.0).settings.covariant
    assert not posterior.replace(prior_precision=dict(posterior.prior_precision)).settings.covariant
    assert posterior.replace(prior_precision=1.0).replace(prior_precision=ba.LoraPrior()).settings.covariant
