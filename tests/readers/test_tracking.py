"""A second moment that `track` keeps in any optimiser's state: against a float64 recursion, saved and resumed."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from bayesadam.readers import read_optimizer, read_state_dict
from bayesadam.readers.tracking import TENSORS
from cases import Lion
from floats import assert_close
from formats.same import same
from readers.references import gradients_of, squares, weighted_mean


def muon(parameters: Any) -> list[Optimizer]:
    matrices = [p for p in parameters if p.dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=0.01)]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], list[Optimizer]]] = {
    "sgd": lambda p: [torch.optim.SGD(p, lr=0.05)],
    "momentum": lambda p: [torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1)],
    "lion": lambda p: [Lion(p)],
    "muon": muon,
    "adam": lambda p: [torch.optim.Adam(p, lr=0.01, weight_decay=0.1)],
}
WAYS: dict[str, dict[str, Any]] = {"diagonal": {}, "factored": {"what": "factored"}}
PAIRS = [
    ("sgd", "diagonal"),
    ("momentum", "factored"),
    ("lion", "factored"),
    ("muon", "diagonal"),
    ("adam", "factored"),
]


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 20), nn.Tanh(), nn.Linear(20, 3)]
    return nn.Sequential(*layers).to(dtype)


def batch(number: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(16, 2, 8, generator=generator).to(dtype)
    return x, torch.randint(3, (16,), generator=generator)


def train(model: nn.Module, optimizers: list[Optimizer], steps: range) -> list[dict[str, Tensor]]:
    """The gradients of every step."""
    data = [batch(number, next(model.parameters()).dtype) for number in steps]
    losses = [lambda model, x=x, y=y: nn.functional.cross_entropy(model(x), y) for x, y in data]
    return gradients_of(model, optimizers, losses)


def average(gradients: list[Tensor], decay: float) -> Tensor:
    """Adam's, in float64, its bias corrected."""
    return weighted_mean(squares(gradients), decay)


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_it_is_the_average_of_squared_gradients_and_changes_nothing(name, way):
    model, alone = network(), network()
    optimizers = OPTIMIZERS[name](list(model.parameters()))
    ba.track(optimizers, every=3, decay=0.9, **WAYS[way])
    gradients = train(model, optimizers, range(31))[::3]
    train(alone, OPTIMIZERS[name](list(alone.parameters())), range(31))
    assert all(torch.equal(p, q) for p, q in zip(alone.parameters(), model.parameters(), strict=True))
    curvature = read_optimizer(model, optimizers)
    assert not curvature.omitted
    for parameter, found in curvature.second_moment.items():
        each = [g[parameter] for g in gradients]
        v = average(each, 0.9)
        # Muon trains the matrices, AdamW the rest. An optimiser's own second moment is of every gradient.
        own = name == "adam" or (name == "muon" and model.get_parameter(parameter).dim() != 2)
        assert (curvature.reader[parameter] == "tracked") != own
        assert curvature.steps[parameter] == (31 if own else 11)
        if own:
            continue
        if v.dim() == 1 or way == "diagonal":
            assert_close(found.double(), v, rtol=1e-5, atol=1e-12)
        else:
            matrix = v.flatten(1)
            product = matrix.sum(1)[:, None] * matrix.sum(0) / matrix.sum()
            assert_close(found.double().flatten(1), product, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    [("sgd", "diagonal", torch.bfloat16), ("muon", "diagonal", torch.float32), ("muon", "factored", torch.bfloat16)],
)
def test_saved_and_resumed_it_goes_on_to_the_bit(name, way, dtype):
    whole, first, second = (network(dtype) for _ in range(3))
    optimizers = [OPTIMIZERS[name](list(model.parameters())) for model in (whole, first, second)]
    for each in optimizers:
        ba.track(each, every=2, **WAYS[way])
    train(whole, optimizers[0], range(9))
    train(first, optimizers[1], range(5))
    file = io.BytesIO()
    torch.save([first.state_dict(), [o.state_dict() for o in optimizers[1]]], file)
    file.seek(0)
    weights, states = torch.load(file, weights_only=True)
    second.load_state_dict(weights)
    for optimizer, state in zip(optimizers[2], states, strict=True):
        optimizer.load_state_dict(state)
    train(second, optimizers[2], range(5, 9))
    assert same(*([optimizer.state_dict() for optimizer in each] for each in (optimizers[0], optimizers[2])))


@pytest.mark.parametrize("way", WAYS)
def test_a_saved_state_is_read(way, tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ba.track(optimizer, every=1, **WAYS[way])
    train(model, [optimizer], range(30))
    live = read_optimizer(model, optimizer).second_moment
    saved = read_state_dict(
        model, optimizer.state_dict(), optimizer="sgd" if way == "diagonal" else "tracked"
    ).second_moment
    path = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    from_file = ba.Posterior.from_checkpoint(path, network(), n_data=100, batch_size=16)
    assert from_file.origin.steps == (30, 30)
    for name, v in live.items():
        assert torch.equal(saved[name], v)
        assert_close(from_file.curvature.second_moment[name], v)


@pytest.mark.parametrize(("kind", "unscaled"), [(torch.optim.SGD, True), (torch.optim.AdamW, False)])
def test_a_fused_optimiser_that_unscales_itself(kind, unscaled):
    """GradScaler leaves scale and overflow to it; not where gradients were unscaled before, to be clipped."""
    model = network()
    optimizer = kind(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ba.track(optimizer, every=1, decay=0.9)
    gradients = []
    for number in range(5):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * (torch.inf if number == 2 else 1.0)).backward()
        scale = scaler.get_scale()
        if unscaled:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scale = 1.0
        if number != 2:
            gradients.append(model[3].weight.grad.double() / scale)
        scaler.step(optimizer)
        scaler.update()
    found = read_optimizer(model, optimizer, reader="tracked")
    assert found.steps["3.weight"] == 4
    assert_close(found.second_moment["3.weight"].double(), average(gradients, 0.9), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("way", ["diagonal", "factored"])
def test_foreach_and_fused_and_compiled_steps_keep_the_same_bits(way):
    """A first step's gradients are the same whatever takes it."""
    kept = []
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}, {"compiled": True}):
        model, compiled = network(), options.pop("compiled", False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)
        ba.track(optimizer, every=1, **WAYS[way])
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        x, y = batch(0)
        nn.functional.cross_entropy(model(x), y).backward()
        step()
        kept.append([state[name] for state in optimizer.state.values() for name in TENSORS if name in state])
    for other in kept[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept[0], other, strict=True))


def test_another_what_begins_anew():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ba.track(optimizer, every=1):
        train(model, [optimizer], range(5))
    ba.track(optimizer, what="factored", every=1)
    train(model, [optimizer], range(5, 7))
    assert read_optimizer(model, optimizer).steps["3.weight"] == 2
    assert "tracked_moment" not in optimizer.state[model[3].weight]


def test_unless_told_each_of_the_first_hundred_gradients_is_taken_and_then_each_tenth():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ba.track(optimizer, decay=0.9)
    gradients = train(model, [optimizer], range(121))
    curvature = read_optimizer(model, optimizer)
    assert curvature.steps["3.weight"] == 103
    v = average([g["3.weight"] for g in [*gradients[:101], gradients[110], gradients[120]]], 0.9)
    assert_close(curvature.second_moment["3.weight"].double(), v, rtol=1e-5, atol=1e-12)


def test_a_group_that_is_added_later():
    model = network()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.01)
    ba.track(optimizer, every=2)
    train(model, [optimizer], range(3))
    optimizer.add_param_group({"params": list(model[5].parameters())})
    train(model, [optimizer], range(3, 6))
    steps = read_optimizer(model, optimizer).steps
    assert (steps["3.weight"], steps["5.weight"]) == (3, 2)


def test_it_says_what_stands_behind_it(tmp_path):
    model = network()
    optimizers = muon(list(model.parameters()))
    train(model, optimizers, range(2))
    tracker = ba.track(optimizers, every=3, batch_size=16)
    train(model, optimizers, range(2, 12))
    tracker.remove()
    posterior = ba.Posterior.from_optimizer(model, optimizers, 100, power=1.0)
    assert posterior.settings.batch_size == 16
    assert ba.Posterior.from_optimizer(model, optimizers, 100, batch_size=8).settings.batch_size == 8
    words = "2 parameters, by 4 gradients, at least one in 3 steps: 64 examples"
    assert posterior.origin.tracked == words
    assert words in str(posterior)
    (finding,) = (each for each in ba.doctor(model, optimizers).findings if each.code == "tracked")
    assert words in finding.message
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = ba.Posterior.load(tmp_path / "posterior.safetensors", model)
    assert loaded.origin == posterior.origin
    path = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizers[0].state_dict()}, path)
    assert ba.Posterior.from_checkpoint(path, model, 100).settings.batch_size == 16
    assert ba.GaussianWeights.open(path, 100).settings.batch_size == 16


def test_what_is_wrong_is_said():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match="what must be one of"):
        ba.track(optimizer, what="full")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="decay"):
        ba.track(optimizer, decay=1.0)
    with pytest.raises(SettingError, match="every"):
        ba.track(optimizer, every=0)
    with pytest.raises(MatchError, match="torch optimiser"):
        ba.track(model)  # type: ignore[arg-type]
    train(model, [optimizer], range(2))
    with pytest.raises(MatchError, match=r"ba\.track"):
        read_optimizer(model, optimizer)
    tracker = ba.track(optimizer, every=1)
    with pytest.raises(SettingError, match="tracked already"):
        ba.track(optimizer)
    tracker.remove()
    train(model, [optimizer], range(2))
    assert not any(name in state for state in optimizer.state.values() for name in TENSORS)
    ba.track(optimizer, every=1)


def test_sharded_parameters_are_refused(monkeypatch):
    monkeypatch.setattr("bayesadam.readers.tracking.is_sharded", lambda tensor: True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ba.track(optimizer)
    with pytest.raises(SettingError, match="sharded parameters are not tracked"):
        train(model, [optimizer], range(1))
