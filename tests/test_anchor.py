"""Anchors beside a dense minimiser of the proximal problem, in float64."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
import cases
from bayesadam import anchoring
from bayesadam.anchoring import anchor
from bayesadam.errors import ImproperError, MatchError, SettingError
from bayesadam.weights.settings import Settings
from cases import dense_moment, mlp
from floats import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:.*too few to know the curvature")
N, BATCH = 64, 8
KINDS = ("diagonal", "kronecker")


@pytest.fixture
def every_step(monkeypatch):
    """An implicit step after each one of the optimiser."""
    monkeypatch.setattr(anchoring, "_EVERY", 1)


def batches(seed: int, count: int = 20, inputs: int = 3, outputs: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    slope = torch.randn(inputs, outputs, generator=generator, dtype=torch.float64)
    for _ in range(count):
        x = torch.randn(BATCH, inputs, generator=generator, dtype=torch.float64)
        yield x, x @ slope


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, count: int = 20) -> None:
    shape = {"inputs": next(model.parameters()).shape[1], "outputs": list(model.parameters())[-1].shape[0]}
    cases.fit(model, optimizer, batches(seed, count, **shape))


def network(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(*(sizes or (3, 4, 2))).double()


def posterior(kind: str, model: nn.Module | None = None, seed: int = 0, **settings: Any) -> ba.Posterior:
    model = network() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    recorder = None if kind == "diagonal" else ba.Recorder(optimizer, keep=6)
    fit(model, optimizer, seed)
    options = {"power": 1.0, "batch_size": BATCH, "prior_precision": 0.5, **settings}
    if recorder is not None:
        return ba.Posterior.from_recorder(model, recorder, N, **options)
    return ba.Posterior.from_optimizer(model, optimizer, N, **options)


def flat(named: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in dict(named).values()])


def dense(q: ba.Posterior, prior: bool = True) -> Tensor:
    """P over all weights, row-major and in the order of the posterior: from the definition of each structure."""
    found = q.settings.weight * dense_moment(q.curvature, q.settings.power)
    if prior:
        deltas = {n: torch.full_like(t, 0.0) + q.prior_precision[n] for n, t in q.mode.items()}
        found = found + torch.diag(flat(deltas))
    return found


def proximal(theta: Tensor, metric: Tensor, mu: Tensor, precision: Tensor, weight: float) -> Tensor:
    """argmin ½ (x − θ')ᵀ D (x − θ') + (λ/2N) (x − μ)ᵀ P (x − μ), by the normal equations."""
    return torch.linalg.solve(torch.diag(metric) + weight * precision, metric * theta + weight * precision @ mu)


# How an optimiser is made, and the price that its state sets on every weight after t steps.
PRICES = {
    "adam": (torch.optim.Adam, {}, lambda s, t: (s["exp_avg_sq"] / (1 - 0.999**t)).sqrt() + 1e-8),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, lambda s, t: (s["max_exp_avg_sq"] / (1 - 0.999**t)).sqrt() + 1e-8),
    "rmsprop": (torch.optim.RMSprop, {}, lambda s, t: (s["square_avg"] / (1 - 0.99**t)).sqrt() + 1e-8),
    "adagrad": (torch.optim.Adagrad, {}, lambda s, t: s["sum"].sqrt() + 1e-10),
    "adamax": (torch.optim.Adamax, {}, lambda s, t: s["exp_inf"] + 1e-8),
    "sgd": (torch.optim.SGD, {}, lambda s, t: 1.0),
    "a rate in a tensor": (torch.optim.SGD, {"lr": torch.tensor(0.05)}, lambda s, t: 1.0),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, lambda s, t: 0.1),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}, lambda s, t: 0.2),
}


# A dense precision is exact where every weight has one price.
PULLS = [(name, kind) for kind in KINDS for name in PRICES if kind == "diagonal" or PRICES[name][0] is torch.optim.SGD]


@pytest.mark.parametrize(("name", "kind"), PULLS)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_pull_minimises_the_proximal_problem(name, kind, steps, monkeypatch):
    """One pull for all steps, as far as all of them: after the first where each has its own, or else at the end."""
    make, options, price = PRICES[name]
    monkeypatch.setattr(anchoring, "_EVERY", 1 if steps == 1 else anchoring._EVERY)
    before = posterior(kind)
    plain = copy.deepcopy(before.model)
    optimizer, other = (make(of.parameters(), **{"lr": 0.05, **options}) for of in (before.model, plain))
    with anchor(optimizer, before, strength=3.0, n_data=100) as held:
        fit(before.model, optimizer, seed=3, count=steps)
    fit(plain, other, seed=3, count=steps)
    prices = [torch.ones_like(p) * price(other.state[p], steps) for p in plain.parameters()]
    metric = torch.cat([each.flatten() for each in prices]) / (0.05 * steps)
    expected = proximal(flat(plain.named_parameters()), metric, flat(before.mean), dense(before), 3.0 / 100)
    exact = {"rtol": 1e-9, "atol": 1e-12} if kind == "diagonal" else {"rtol": 1e-6, "atol": 1e-9}
    assert_close(flat(before.model.named_parameters()), expected, **exact)
    # Once: a second remove finds nothing left to do.
    kept = flat(before.model.named_parameters()).clone()
    held.remove()
    assert torch.equal(flat(before.model.named_parameters()), kept)


def test_the_optimiser_and_the_recorder_see_the_data_alone(every_step):
    """Held so hard that θ never moves, its moments are those of gradients at μ, to the last digit."""
    before = posterior("diagonal")
    model = before.model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)
    recorder = ba.Recorder(optimizer, keep=5, every=1)
    with anchor(optimizer, before, strength=1e9):
        fit(model, optimizer, seed=5, count=5)
    alone = network()
    alone.load_state_dict(before.mode)
    expected = ba.Recorder.from_batches(alone, batches(5), F.mse_loss, keep=5).gradients(alone)
    for name, found in recorder.gradients(model).items():
        assert_close(found, expected[name], rtol=1e-5, atol=1e-8)
        v = optimizer.state[model.get_parameter(name)]["exp_avg_sq"]
        weights = torch.tensor([0.001 * 0.999 ** (4 - t) for t in range(5)], dtype=v.dtype)
        assert_close(v, torch.tensordot(weights, expected[name].square(), dims=1), rtol=1e-5, atol=1e-12)


def test_no_rate_or_no_gradient_leaves_a_weight_alone(every_step):
    before = posterior("diagonal")
    model = before.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    kept = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    with anchor(optimizer, before):
        fit(model, optimizer, seed=1, count=3)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in kept.items())
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.zero_grad()
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        optimizer.step()
    changed = {name for name, value in kept.items() if not torch.equal(model.state_dict()[name], value)}
    assert changed == {"0.weight"}


def test_a_skipped_step_of_a_fused_optimiser_pulls_nothing(every_step):
    before = posterior("diagonal")
    model = before.model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
    held = anchor(optimizer, before)
    fit(model, optimizer, seed=1, count=1)
    assert held._steps == [0]
    optimizer.found_inf = torch.zeros(())
    fit(model, optimizer, seed=1, count=1)
    assert held._steps == [1]
    held.remove()
    fit(model, optimizer, seed=1, count=1)
    assert held._steps == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_grew_is_held_in_its_old_rows(kind, every_step):
    before = posterior(kind)
    model = before.model
    old = model[2]
    model[2] = nn.Linear(4, 5).double()
    with torch.no_grad():
        model[2].weight[:2], model[2].bias[:2] = old.weight, old.bias
    fresh = model[2].weight.detach()[2:].clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with anchor(optimizer, before, strength=1e12) as held:
        fit(model, optimizer, seed=2)
    assert held.free == ()
    assert_close(model[2].weight[:2], before.mode["2.weight"], atol=1e-8)
    assert float((model[2].weight.detach()[2:] - fresh).abs().min()) > 1e-3


@pytest.mark.parametrize("shape", [(4, 1), (5, 2), (3, 2)])
def test_any_other_shape_is_refused(shape):
    before = posterior("diagonal")
    before.model[2] = nn.Linear(*shape).double()
    with pytest.raises(MatchError, match=r"'2\.(weight|bias)' has shape"):
        anchor(torch.optim.Adam(before.model.parameters()), before)


def test_settings_that_would_switch_it_off_are_refused():
    before = posterior("diagonal")
    optimizer = torch.optim.Adam(before.model.parameters())
    for wrong in ({"strength": 0.0}, {"strength": float("inf")}, {"n_data": 0}):
        with pytest.raises(SettingError, match=f"{next(iter(wrong))} must be a"):
            anchor(optimizer, before, **wrong)
    empty = ba.Posterior(before.mode, type(before.curvature)({n: 0 * t for n, t in before.mode.items()}),
                         Settings(N, dict.fromkeys(before.mode, 0.0)), model=before.model)  # fmt: skip
    with pytest.raises(ImproperError, match="precision is 0"):
        anchor(optimizer, empty)
    for unfit in (torch.optim.Rprop, torch.optim.LBFGS, torch.optim.Adadelta, torch.optim.Adafactor):
        with pytest.raises(MatchError, match="train with Adam"):
            anchor(unfit(before.model.parameters()), before)
    with pytest.raises(SettingError, match="before with_inputs"):
        anchor(optimizer, before.with_inputs(torch.randn(30, 3).double()))
    with pytest.raises(MatchError, match="posterior must be a Posterior, got dict"):
        anchor(optimizer, before.mode)
    assert not optimizer._optimizer_step_post_hooks


def test_a_weight_decay_beside_it_is_warned_of():
    before = posterior("diagonal")
    with pytest.warns(ba.errors.BayesAdamWarning, match=r"weight decay of 0\.01"):
        anchor(torch.optim.AdamW(before.model.parameters()), before).remove()


def test_parameters_without_a_past_are_free_and_listed():
    before = posterior("diagonal")
    model = before.model.append(nn.Linear(2, 2).double())
    with anchor(torch.optim.Adam([*model[0].parameters(), *model[3].parameters()]), before) as held:
        assert held.anchored == ("0.weight", "0.bias")
        assert held.free == ("3.weight", "3.bias")
    with pytest.raises(MatchError, match="trains none of the posterior's parameters"):
        anchor(torch.optim.Adam(model[3].parameters()), before)
    smaller = nn.Sequential(model[0])
    with anchor(torch.optim.Adam(smaller.parameters()), before, model=smaller) as held:
        assert (held.anchored, held.free) == (("0.weight", "0.bias"), ())
