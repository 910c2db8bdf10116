"""Which state belongs to which weights: right where it is told, refused where two answers are possible."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError, StateError
from bayesadam.readers import (
    identify_reader,
    match_checkpoint,
    read_checkpoint,
    read_curvature,
    read_optimizer,
)
from cases import mlp, train
from floats import assert_close

# --- models ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A language model in miniature: the last layer's weights are the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(rows))))


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 3, 3),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Conv2d(3, 3, 3),
            nn.BatchNorm2d(3),
            nn.Flatten(),
            nn.Linear(12, 1),
        )


class Encoder(nn.Module):
    """Two transformer layers of equal shapes, and a buffer of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x + self.positions))


INPUTS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "mlp": (lambda: mlp(3, 5, 5, 5, 1), lambda g: torch.randn(8, 3, generator=g)),
    "convolutional": (Convolutional, lambda g: torch.randn(8, 1, 6, 6, generator=g)),
    "encoder": (Encoder, lambda g: torch.randn(4, 5, 8, generator=g)),
    "tied": (Tied, lambda g: torch.randint(0, 6, (8,), generator=g)),
}
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "adafactor": torch.optim.Adafactor,
}


def run(model: nn.Module, optimizer: Optimizer, draw: Callable[[torch.Generator], Tensor], steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(draw(generator)) - 1).square().mean().backward()
        optimizer.step()


def made(name: str) -> tuple[nn.Module, Callable[[torch.Generator], Tensor]]:
    torch.manual_seed(0)
    build, draw = INPUTS[name]
    return build(), draw


def save(path: Path, model: nn.Module | dict[str, Tensor], optimizer: Optimizer) -> Path:
    weights = model if isinstance(model, dict) else model.state_dict()
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, path)
    return path


def same(found: ba.readers.Curvature, model: nn.Module, optimizer: Optimizer) -> None:
    expected = read_optimizer(model, optimizer)
    assert found.second_moment.keys() == expected.second_moment.keys()
    for name, v in expected.second_moment.items():
        assert_close(found.second_moment[name], v, atol=1e-30)
    assert found.steps == expected.steps
    assert found.weight_decay == expected.weight_decay


# --- what is told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", INPUTS)
def test_a_file_alone_gives_what_the_live_optimiser_does(model: str, optimizer: str, tmp_path: Path) -> None:
    net, draw = made(model)
    live = OPTIMIZERS[optimizer](net.parameters())
    run(net, live, draw)
    read = read_checkpoint(save(tmp_path / "c.pt", net, live))
    same(read_curvature(read), net, live)
    same(read_curvature(read, made(model)[0]), net, live)


@pytest.mark.parametrize("model", INPUTS)
def test_from_checkpoint_is_from_optimizer(model: str, tmp_path: Path) -> None:
    net, draw = made(model)
    live = torch.optim.AdamW(net.parameters(), weight_decay=0.1)
    run(net, live, draw)
    torch.manual_seed(1)
    fresh = INPUTS[model][0]()
    found = ba.Posterior.from_checkpoint(save(tmp_path / "c.pt", net, live), fresh, n_data=100)
    expected = ba.Posterior.from_optimizer(net, live, n_data=100)
    assert found.prior_precision == expected.prior_precision
    for name in expected.mode:
        assert torch.equal(found.mean[name], expected.mean[name])
        assert torch.equal(found.variance[name], expected.variance[name])
    # Buffers, too: the model computes what the trained one does.
    x = draw(torch.Generator().manual_seed(3))
    assert torch.equal(fresh.eval()(x), net.eval()(x))


def test_names_in_the_groups_are_used(tmp_path: Path) -> None:
    # Every shape is the same and the groups are shuffled: names alone can tell.
    net, draw = made("encoder")
    named = list(net.named_parameters())[::-1]
    live = torch.optim.AdamW([{"params": named[::2]}, {"params": named[1::2], "weight_decay": 0.0}])
    run(net, live, draw)
    weights = OrderedDict((f"module.{name}", tensor) for name, tensor in net.state_dict().items())
    same(read_curvature(read_checkpoint(save(tmp_path / "c.pt", weights, live))), net, live)


def test_tied_weights_count_once_among_others_of_their_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    net[2].weight = net[0].weight
    live = torch.optim.Adam(net.parameters())
    train(net, live)
    found = read_curvature(read_checkpoint(save(tmp_path / "c.pt", net, live)))
    same(found, net, live)
    assert list(found.second_moment) == ["0.weight", "1.weight", "3.weight"]
    assert not found.omitted


def test_views_of_one_flat_buffer_are_not_tied(tmp_path: Path) -> None:
    net = mlp(3, 3, 3)
    flat = torch.randn(sum(p.numel() for p in net.parameters()))
    start = 0
    for parameter in net.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    live = torch.optim.Adam(net.parameters())
    train(net, live)
    same(read_curvature(read_checkpoint(save(tmp_path / "c.pt", net, live))), net, live)


# --- several groups -------------------------------------------------------------------------------------------------


def grouped(net: nn.Module, *, order: Callable[[list[str]], list[str]] = list) -> Optimizer:
    """Decay and no decay, each group in some order of names."""
    named = dict(net.named_parameters())
    decayed = order([name for name, p in named.items() if p.dim() > 1])
    others = order([name for name, p in named.items() if p.dim() == 1])
    return torch.optim.AdamW(
        [{"params": [named[n] for n in decayed]}, {"params": [named[n] for n in others], "weight_decay": 0.0}]
    )


def test_groups_of_equal_shapes_are_told_by_the_rule_they_follow_or_vouched_for(tmp_path: Path) -> None:
    net, draw = made("encoder")
    live = grouped(net)
    run(net, live, draw)
    read = read_checkpoint(save(tmp_path / "c.pt", net, live))
    for model in (None, net):
        same(read_curvature(read, model), net, live)
        same(read_curvature(read, model, groups_in_order=True), net, live)
    names = [n for dim in (True, False) for n, p in net.named_parameters() if (p.dim() > 1) == dim]
    same(read_curvature(read, param_names=names), net, live)
    same(read_curvature(read, net, param_names=[f"module.{name}" for name in names]), net, live)


def test_groups_sorted_by_name_are_not_taken_for_the_models_order(tmp_path: Path) -> None:
    # As minGPT fills them; the order of "10" and "2" is then another than the model's, and every shape agrees.
    net = mlp(3, *[3] * 12)
    live = grouped(net, order=sorted)
    train(net, live)
    read = read_checkpoint(save(tmp_path / "c.pt", net, live))
    with pytest.raises(MatchError, match="2 groups without names"):
        read_curvature(read)
    with pytest.raises(MatchError, match="2 groups without names"):
        ba.Posterior.from_checkpoint(tmp_path / "c.pt", net, n_data=10)
    named = sorted(n for n, p in net.named_parameters() if p.dim() > 1)
    named += sorted(n for n, p in net.named_parameters() if p.dim() == 1)
    same(read_curvature(read, param_names=named), net, live)


def test_groups_in_order_that_could_interleave_are_refused(tmp_path: Path) -> None:
    net = mlp(3, 3, 3, 3)
    one, two = [net[0].weight, net[4].weight], [net[2].weight, net[0].bias, net[2].bias, net[4].bias]
    live = torch.optim.Adam([{"params": one}, {"params": two}])
    train(net, live)
    read = read_checkpoint(save(tmp_path / "c.pt", net, live))
    with pytest.raises(MatchError, match=r"may belong to '0\.weight' or to '2\.weight'"):
        read_curvature(read, groups_in_order=True)


# --- frozen, unused, unknown ----------------------------------------------------------------------------------------


def test_frozen_in_the_group_keeps_its_place(tmp_path: Path) -> None:
    net = mlp(3, 3, 3, 3)
    net[0].requires_grad_(False)
    live = torch.optim.Adam(net.parameters())
    train(net, live)
    read = read_checkpoint(save(tmp_path / "c.pt", net, live))
    found = read_curvature(read)
    same(found, net, live)
    assert found.omitted == {"0.weight": "never received a gradient", "0.bias": "never received a gradient"}


def test_frozen_and_in_no_group_is_told_by_shapes_or_refused(tmp_path: Path) -> None:
    net = mlp(3, 4, 2)
    net[0].requires_grad_(False)
    live = torch.optim.Adam(p for p in net.parameters() if p.requires_grad)
    train(net, live)
    found = read_curvature(read_checkpoint(save(tmp_path / "c.pt", net, live)))
    same(found, net, live)
    assert found.omitted == {"0.weight": "not in the optimiser", "0.bias": "not in the optimiser"}

    net = mlp(3, 3, 3, 3)
    net[0].requires_grad_(False)
    live = torch.optim.Adam(p for p in net.parameters() if p.requires_grad)
    train(net, live)
    read = read_checkpoint(save(tmp_path / "c.pt", net, live))
    with pytest.raises(MatchError, match=r"may belong to '0\.weight' or to '2\.weight'.*param_names="):
        read_curvature(read)
    # A model of which nothing is frozen knows no better; one frozen as in training does.
    with pytest.raises(MatchError, match="may belong to"):
        read_curvature(read, mlp(3, 3, 3, 3))
    same(read_curvature(read, net), net, live)
    same(read_curvature(read, param_names=["2.weight", "2.bias", "4.weight", "4.bias"]), net, live)


class Unused(nn.Module):
    """Its second branch is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.first(x)))


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "adafactor"])
def test_unused_parameters_do_not_shift_the_others(optimizer: str, tmp_path: Path) -> None:
    net = Unused()
    live = OPTIMIZERS[optimizer](net.parameters())
    run(net, live, INPUTS["mlp"][1])
    found = read_curvature(read_checkpoint(save(tmp_path / "c.pt", net, live)))
    same(found, net, live)
    assert found.omitted == {"second.weight": "never received a gradient", "second.bias": "never received a gradient"}


class Buffered(nn.Module):
    """A buffer before, or behind, parameters of its own shape."""

    def __init__(self, *, alike: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("offset", torch.ones(3 if alike else 1))
        self.out = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.shift + self.offset)


def test_a_buffer_is_told_by_its_shape_or_refused(tmp_path: Path) -> None:
    net = Buffered(alike=False)
    live = torch.optim.Adam(net.parameters())
    run(net, live, INPUTS["mlp"][1])
    same(read_curvature(read_checkpoint(save(tmp_path / "c.pt", net, live))), net, live)

    net = Buffered(alike=True)
    live = torch.optim.Adam(net.parameters())
    run(net, live, INPUTS["mlp"][1])
    read = read_checkpoint(save(tmp_path / "c.pt", net, live))
    with pytest.raises(MatchError, match="may belong to 'shift' or to 'offset'"):
        read_curvature(read)
    same(read_curvature(read, Buffered(alike=True)), net, live)
    same(read_curvature(read, param_names=["shift", "out.weight", "out.bias"]), net, live)


# --- the order of the file ------------------------------------------------------------------------------------------


def test_sorted_weights_are_not_taken_for_the_models_order(tmp_path: Path) -> None:
    net = mlp(3, *[3] * 12)
    live = torch.optim.Adam(net.parameters())
    train(net, live)
    weights = dict(sorted(net.state_dict().items()))
    read = read_checkpoint(save(tmp_path / "c.pt", weights, live))
    assert not read.ordered
    with pytest.raises(MatchError, match="keeps no order"):
        read_curvature(read)
    same(read_curvature(read, net), net, live)


def test_safetensors_of_equal_shapes_are_refused_without_the_model(tmp_path: Path) -> None:
    net, draw = made("mlp")
    live = torch.optim.Adam(net.parameters())
    run(net, live, draw)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    torch.save(live.state_dict(), tmp_path / "o.pt")
    read = read_checkpoint(tmp_path / "w.safetensors", optimizer_path=tmp_path / "o.pt")
    with pytest.raises(MatchError, match=r"safetensors files do not.*param_names=.*or the model"):
        read_curvature(read)
    same(read_curvature(read, made("mlp")[0]), net, live)
    fresh = mlp(3, 5, 5, 5, 1)
    posterior = ba.Posterior.from_checkpoint(
        tmp_path / "w.safetensors", fresh, n_data=10, optimizer_path=tmp_path / "o.pt"
    )
    assert torch.equal(posterior.mean["4.weight"], net[4].weight)


class Reordered(nn.Module):
    """The same names, registered in the order they are given in."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_a_class_whose_parts_have_changed_places_is_refused(tmp_path: Path) -> None:
    net = Reordered("first", "second")
    live = torch.optim.Adam(net.parameters())
    run(net, live, INPUTS["mlp"][1])
    path = save(tmp_path / "c.pt", net, live)
    same(read_curvature(read_checkpoint(path)), net, live)
    changed = Reordered("second", "first")
    before = {name: tensor.clone() for name, tensor in changed.state_dict().items()}
    with pytest.raises(
        MatchError, match=r"would be that of 'first\.weight' by the file, of 'second\.weight' by the model"
    ):
        ba.Posterior.from_checkpoint(path, changed, n_data=10)
    for name, tensor in changed.state_dict().items():
        assert torch.equal(tensor, before[name])
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    found = ba.Posterior.from_checkpoint(path, changed, n_data=10, param_names=names)
    expected = ba.Posterior.from_optimizer(net, live, n_data=10)
    assert torch.equal(found.variance["first.weight"], expected.variance["first.weight"])


# --- another model's ------------------------------------------------------------------------------------------------


def test_another_models_state_is_refused(tmp_path: Path) -> None:
    net, other = mlp(3, 5, 1), mlp(3, 6, 1)
    live, smaller = torch.optim.Adam(other.parameters()), torch.optim.Adam(mlp(3, 2).parameters())
    train(other, live)
    with pytest.raises(MatchError, match=r"too few of shape \(6, 3\)"):
        read_curvature(read_checkpoint(save(tmp_path / "c.pt", net, live)))
    with pytest.raises(StateError, match="empty"):
        read_curvature(read_checkpoint(save(tmp_path / "c.pt", net, smaller)))
    larger = mlp(3, 6, 6, 1)
    live = torch.optim.Adam(larger.parameters())
    train(larger, live)
    with pytest.raises(MatchError, match="holds 6 parameters, the weights 4"):
        read_curvature(read_checkpoint(save(tmp_path / "c.pt", net, live)))


def test_a_model_of_another_shape_is_refused_and_left_alone(tmp_path: Path) -> None:
    net = mlp(3, 5, 1)
    live = torch.optim.Adam(net.parameters())
    train(net, live)
    path = save(tmp_path / "c.pt", net, live)
    for other in (mlp(3, 6, 1), mlp(3, 5, 5, 1), nn.Sequential(OrderedDict(body=nn.Linear(3, 5)))):
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(MatchError):
            ba.Posterior.from_checkpoint(path, other, n_data=10)
        for name, tensor in other.state_dict().items():
            assert torch.equal(tensor, before[name])
    with pytest.raises(SettingError, match="n_data"):
        ba.Posterior.from_checkpoint(path, mlp(3, 5, 1), n_data=0)


# --- which optimiser ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "entries", "expected"),
    [
        ({"betas": (0.9, 0.99), "step": 3, "grad_averaging": True}, {"exp_avg_sq"}, "lamb"),
        ({"betas": (0.9, 0.9, 0.99), "step": 3, "no_prox": False}, {"exp_avg_sq", "exp_avg_diff"}, "adan"),
        ({"alpha": 0.9, "decoupled_decay": False}, {"square_avg", "step"}, "rmsproptf"),
        ({"betas": (0.9, 0.99)}, {"exp_avg_var", "step"}, "adabelief"),
        ({"betas": (0.9, 0.99)}, {"exp_hessian_diag_sq", "step"}, "adahessian"),
        ({"betas": (0.9, 0.99)}, {"state1", "state2", "step"}, "adam8bit"),
        ({"betas": (0.9, 0.99), "weight_decay": 0.1}, {"exp_avg", "exp_avg_sq", "step"}, "adam or adamw"),
    ],
)
def test_optimisers_of_other_houses_are_told_by_their_keys(group: Any, entries: set[str], expected: str) -> None:
    state = {name: torch.tensor(3.0) if name == "step" else torch.ones(2) for name in entries}
    assert identify_reader({"state": {0: state}, "param_groups": [{**group, "params": [0]}]}).name == expected


def test_sgd_is_refused_unless_asked_for_by_name(tmp_path: Path) -> None:
    net = mlp(3, 5, 1)
    for momentum, message in (
        (0.9, "sgd, .*momentum_buffer.*optimizer='ogd'"),
        (0.0, "sgd, which keeps no second moment.*optimizer='ogd'"),
    ):
        live = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=momentum)
        train(net, live)
        read = read_checkpoint(save(tmp_path / "c.pt", net, live))
        with pytest.raises(StateError, match=message):
            match_checkpoint(read)
        found = read_curvature(read, optimizer="ogd").second_moment
        assert list(found) == [name for name, _ in net.named_parameters()]
        assert all(bool((v == 1).all()) for v in found.values())


# --- against every permutation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_not_refused_is_right(seed: int, tmp_path: Path) -> None:
    """Random models of few shapes with buffers, frozen parts, unused and tied ones; a wrong answer is never given."""
    random = torch.Generator().manual_seed(seed)

    def toss(share: float = 0.3) -> bool:
        return float(torch.rand((), generator=random)) < share

    net = nn.Module()
    for number in range(5):
        part = nn.Module()
        shape = (2, 3) if toss(0.5) else (4,)
        part.weight = nn.Parameter(torch.randn(shape, generator=random))
        if toss():
            part.register_buffer("table", torch.randn((2, 3) if toss(0.5) else (4,), generator=random))
        if number and toss(0.2):
            other = getattr(net, f"part{number - 1}").weight
            part.weight = other
        part.weight.requires_grad_(not toss(0.2))
        net.add_module(f"part{number}", part)
    listed = [p for p in net.parameters() if p.requires_grad or toss(0.5)]
    used = [p for p in listed if p.requires_grad and not toss(0.15)]
    if not used:
        pytest.skip("nothing was trained")
    live = torch.optim.Adam(listed)
    for _ in range(2):
        for parameter in used:
            parameter.grad = torch.randn(parameter.shape, generator=random)
        live.step()
    read = read_checkpoint(save(tmp_path / "c.pt", net, live))
    try:
        found = read_curvature(read)
    except MatchError:
        return
    expected = read_optimizer(net, live)
    assert found.second_moment.keys() == expected.second_moment.keys()
    for name, v in expected.second_moment.items():
        assert torch.equal(found.second_moment[name], v)
