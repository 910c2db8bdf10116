"""A posterior with a LoraPrior is one on B A: B → B c, A → A/c changes nothing that it says."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian

from packages import lazy

peft = lazy("peft")

import bayesadam as ba  # noqa: E402
from bayesadam.lora import pairs_in  # noqa: E402
from cases import fit  # noqa: E402
from floats import approx, assert_close  # noqa: E402

WORDS, WIDTH, CLASSES, RANK, BATCH = 7, 6, 3, 3, 10
CLOSE = {"rtol": 1e-5, "atol": 0.0}
ADAPTERS = ["embed", "inner", "outer"]


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
    fit(model, optimizer, [(x[rows], y[rows])], nn.functional.cross_entropy)


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
    model: nn.Module, structure: str = "diagonal", recorded: bool = False, form: str = "map", **options: object
) -> ba.Posterior:
    """The posterior of an optimiser that has seen gradients at these weights, and has moved none of them."""
    optimizer = torch.optim.Adam(trainable(model), lr=0.0)
    recorder = ba.Recorder(optimizer, keep=30, every=1) if recorded else None
    for number in range(36):
        step(model, optimizer, number)
    settings = {"prior_precision": ba.LoraPrior(), "power": 1, "batch_size": BATCH, "likelihood": "classification"}
    settings |= {"structure": structure, **options}
    if recorder is not None:
        return ba.Posterior.from_recorder(model, recorder, 60, **settings)
    return ba.Posterior.from_optimizer(model, optimizer, 60, **settings).replace(form=form)


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
ONE_A_RANK = [torch.tensor(c, dtype=torch.float64) for c in ([3.7, 0.2, 1.0], [0.1, 5.0, 2.0], [1.0, -4.0, 0.5])]
KINDS = [
    pytest.param({"structure": "diagonal"}, ONE_EACH, id="diagonal"),
    pytest.param({"structure": "diagonal", "form": "likelihood"}, ONE_A_RANK, id="likelihood form, one c a rank"),
    pytest.param({"structure": "kronecker", "recorded": True}, ONE_EACH, id="kronecker of a recorder"),
]


def assert_same_predictions(found: ba.Posterior, expected: ba.Posterior) -> None:
    x, _ = data(20, seed=5)
    a, b = (each.predict(x, covariance=True) for each in (found, expected))
    for name in ("f_mean", "f_variance", "covariance", "probs"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert ours is not None
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()), msg=name)
    assert_close(a.f_variance, b.f_variance, **CLOSE)


@pytest.mark.parametrize(("options", "c"), KINDS)
def test_predictions_and_draws_are_those_of_the_product(adapted, options, c):
    """q'(θ') = q(θ)/|dθ'/dθ| for θ' the same network as θ."""
    before = read(adapted, **options)
    move(adapted, c)
    after = read(adapted, **options)
    assert_same_predictions(after, before)
    theta = before.sample(8, generator=torch.Generator().manual_seed(0))
    sizes = [(b.shape[0], a.shape[1]) for b, a in factors(adapted)]
    volume = sum((up - down) * float(each.abs().log().sum()) for (up, down), each in zip(sizes, c, strict=True))
    assert_close(after.log_prob(moved(theta, c)), before.log_prob(theta) - volume, **CLOSE)


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


def test_rotated_factors_get_the_mean(adapted):
    whole, found = read(adapted).prior_precision, read(adapted, "kronecker", recorded=True).prior_precision
    for pair in pairs_in(whole):
        for name in (pair.up, pair.down):
            assert found[name] == approx(float(whole[name].mean()))


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


def test_an_adapter_that_starts_is_refused(adapted):
    with torch.no_grad():
        factors(adapted)[1][0].zero_()
    with pytest.raises(ba.errors.SettingError, match=r"inner.*is 0, as B is before training"):
        read(adapted)


def test_a_rank_without_a_product_has_a_finite_variance(adapted):
    """One of B's columns 0, one rank 0 in both factors; the symmetry holds all the same."""
    with torch.no_grad():
        (_, _), (up, _), (both, down) = factors(adapted)
        up[:, 1] = 0
        both[:, 2], down[2] = 0, 0
    before = read(adapted)
    assert all(bool(variance.isfinite().all()) for variance in before.variance.values())
    move(adapted, ONE_A_RANK)
    assert_same_predictions(read(adapted), before)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda model: read(model, power=0.5), r"needs power=1, got .*Pass power=1 and batch_size"),
        (lambda model: read(model).replace(power=2.0), "needs power=1"),
        (lambda _: ba.LoraPrior(0.0), "precision must be a positive"),
        (lambda _: ba.LoraPrior(scaling=math.nan), "scaling must be a positive"),
    ],
)
def test_other_powers_and_precisions_are_refused(adapted, use, message):
    with pytest.raises(ba.errors.SettingError, match=message):
        use(adapted)


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


def test_a_file_keeps_it(adapted, tmp_path):
    posterior = read(adapted)
    posterior.save(tmp_path / "adapter.safetensors")
    again = ba.Posterior.load(tmp_path / "adapter.safetensors", adapted)
    assert again.settings.covariant
    assert_same_predictions(again, posterior)
