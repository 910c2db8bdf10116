"""Which state of a file belongs to which weights: right where it is told, refused with the choices where it is not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import Optimizer

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from bayesadam.readers import Rules, explain, read_checkpoint, read_curvature, read_optimizer
from cases import mlp
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


class Encoder(nn.Module):
    """Transformer layers of equal shapes, more than there are digits, and a buffer of positions."""

    def __init__(self, layers: int = 11) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(5, 8))
        self.embed = nn.Linear(3, 4)
        made = [nn.TransformerEncoderLayer(4, 2, dim_feedforward=6) for _ in range(layers)]
        self.layers = nn.ModuleList(made)
        self.out = nn.Linear(4, 1)


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for wide, narrow in ((3, 4), (4, 4), (4, 6)):
            layers += [nn.Conv2d(wide, narrow, 3, bias=False), nn.BatchNorm2d(narrow)]
        super().__init__(*layers, nn.Conv2d(6, 5, 1))


class Detector(nn.Module):
    """A backbone with norms, and parts that are registered before it and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Linear(6, 6)
        self.backbone = nn.Sequential(nn.Conv2d(2, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3))
        self.head = nn.Linear(6, 3)


class Pair(nn.Module):
    """Two linear layers of one shape under names in the order in which they are given."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(3, 5, 5, 5, 1),
    "convolutional": Convolutional,
    "encoder": lambda: Encoder(2),
    "tied": Tied,
}
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "mlp": torch.optim.Adafactor,
    "convolutional": lambda p: torch.optim.Adam(p, amsgrad=True),
    "encoder": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "tied": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
}


def stepped(optimizer: Optimizer, seed: int = 0) -> Optimizer:
    """Two steps on gradients that are all different."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


def save(path: Path, model: nn.Module | dict[str, Tensor], optimizer: Optimizer, **beside: Any) -> Path:
    weights = model if isinstance(model, dict) else model.state_dict()
    torch.save({"model": weights, "optimizer": optimizer.state_dict(), **beside}, path / "c.pt")
    return path / "c.pt"


def same(found: ba.readers.Curvature, model: nn.Module, optimizer: Optimizer) -> None:
    expected = read_optimizer(model, optimizer)
    assert found.second_moment.keys() == expected.second_moment.keys()
    for name, v in expected.second_moment.items():
        assert_close(found.second_moment[name], v, atol=1e-30)
    assert found.steps == expected.steps
    assert found.weight_decay == expected.weight_decay


# --- what is told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MODELS)
def test_a_file_alone_gives_what_the_live_optimiser_does(case: str, tmp_path: Path) -> None:
    net = MODELS[case]()
    live = stepped(OPTIMIZERS[case](net.parameters()))
    path = save(tmp_path, net, live)
    same(read_curvature(read_checkpoint(path)), net, live)
    fresh = MODELS[case]()
    same(read_curvature(read_checkpoint(path), fresh), net, live)
    found = ba.Posterior.from_checkpoint(path, fresh, n_data=100)
    expected = ba.Posterior.from_optimizer(net, live, n_data=100)
    assert_close(dict(found.variance), dict(expected.variance))
    # Buffers, too.
    for name, tensor in net.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)


def test_names_in_the_groups_are_used(tmp_path: Path) -> None:
    # Every shape occurs twice and the groups are shuffled: names alone can tell.
    net = Encoder(2)
    named = list(net.named_parameters())[::-1]
    live = stepped(torch.optim.AdamW([{"params": named[::2]}, {"params": named[1::2], "weight_decay": 0.0}]))
    weights = OrderedDict((f"module.{name}", tensor) for name, tensor in net.state_dict().items())
    same(read_curvature(read_checkpoint(save(tmp_path, weights, live))), net, live)


def test_views_of_one_flat_buffer_are_not_tied(tmp_path: Path) -> None:
    net = mlp(3, 3, 3)
    flat = torch.randn(sum(p.numel() for p in net.parameters()))
    start = 0
    for parameter in net.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    live = stepped(torch.optim.Adam(net.parameters()))
    same(read_curvature(read_checkpoint(save(tmp_path, net, live))), net, live)


# --- several groups -------------------------------------------------------------------------------------------------


def by(test: Callable[[str, Tensor], bool]) -> Callable[[nn.Module], list[list[str]]]:
    """Two groups, as trainers make them: those that pass, then the others."""

    def groups(net: nn.Module) -> list[list[str]]:
        named = list(net.named_parameters())
        return [[n for n, p in named if test(n, p)], [n for n, p in named if not test(n, p)]]

    return groups


def yolo(net: nn.Module) -> list[list[str]]:
    """As YOLO: biases, other weights, the weights of norms."""
    named = [(name, p.dim()) for name, p in net.named_parameters()]
    biases, norms = [n for n, _ in named if n.endswith("bias")], [n for n, d in named if n.endswith("weight") and d < 2]
    return [biases, [n for n, _ in named if n not in biases and n not in norms], norms]


MATRICES = by(lambda name, p: p.dim() > 1)
GROUPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], list[list[str]]]]] = {
    "matrices first": (Encoder, MATRICES),
    "matrices last": (lambda: Encoder(2), by(lambda name, p: p.dim() < 2)),
    "biases": (Encoder, by(lambda name, p: name.endswith("bias"))),
    "all but the backbone": (Detector, by(lambda name, p: "backbone" not in name)),
    "three kinds": (Convolutional, yolo),
    "a group a parameter": (Detector, lambda net: [[name] for name, _ in net.named_parameters()]),
    "the last part first": (Detector, by(lambda name, p: name.startswith("head"))),
    "sorted, as minGPT": (lambda: Encoder(2), lambda net: [sorted(group) for group in MATRICES(net)]),
}


def in_groups(net: nn.Module, groups: list[list[str]]) -> Optimizer:
    named = dict(net.named_parameters())
    return stepped(torch.optim.AdamW([{"params": [named[n] for n in group], "lr": 1e-2} for group in groups]))


@pytest.mark.parametrize("case", GROUPS)
def test_groups_without_names_are_read_where_one_answer_fits(case: str, tmp_path: Path) -> None:
    make, groups = GROUPS[case]
    net = make()
    live = in_groups(net, groups(net))
    read = read_checkpoint(save(tmp_path, net, live))
    same(read_curvature(read), net, live)
    same(read_curvature(read, make()), net, live)
    assert any(line.startswith("Matched by ") for line in explain(read))


@pytest.mark.parametrize("seed", range(12))
def test_shuffled_groups_are_never_read_wrongly(seed: int, tmp_path: Path) -> None:
    """Where shapes are many, a list in no order is told by them or refused."""
    generator = torch.Generator().manual_seed(seed)
    net = [Convolutional, Encoder, Detector][seed % 3]()
    shuffled = [[group[i] for i in torch.randperm(len(group), generator=generator)] for group in MATRICES(net)]
    live = in_groups(net, shuffled)
    try:
        found = read_curvature(read_checkpoint(save(tmp_path, net, live)))
    except MatchError:
        return
    same(found, net, live)


def test_two_readings_that_differ_are_refused_and_the_option_that_is_named_works(tmp_path: Path) -> None:
    # "10" is before "2" by name, and every shape agrees with either order.
    net = mlp(3, *[3] * 12)
    live = in_groups(net, MATRICES(net))
    read = read_checkpoint(save(tmp_path, net, live))
    message = (
        r"key 1 may belong to '2.weight' \(groups: each in the model's order\) or to '10.weight' \(groups: each sorted "
        r"by name\): 2 groups without names.*param_names=.*groups_in_order=True"
    )
    for model in (None, net):
        with pytest.raises(MatchError, match=message):
            read_curvature(read, model)
        same(read_curvature(read, model, groups_in_order=True), net, live)
    names = [name for group in MATRICES(net) for name in group]
    same(read_curvature(read, param_names=names), net, live)
    same(read_curvature(read, net, param_names=[f"module.{name}" for name in names]), net, live)


def test_groups_in_order_are_not_recommended_where_they_tell_nothing(tmp_path: Path) -> None:
    net = mlp(3, 3, 3, 3)
    live = in_groups(net, [["0.weight", "4.weight"], ["2.weight", "0.bias", "2.bias", "4.bias"]])
    read = read_checkpoint(save(tmp_path, net, live))
    for options in ({}, {"groups_in_order": True}):
        with pytest.raises(MatchError, match=r"may belong to '0\.weight' or to '[24]\.weight'") as caught:
            read_curvature(read, **options)
        assert "groups_in_order" not in str(caught.value)
    # Nor for a class whose order is not the file's, where they are refused.
    net, changed = Pair("first", "second"), Pair("second", "first")
    read = read_checkpoint(
        save(tmp_path, net, in_groups(net, [["first.weight", "second.weight"], ["first.bias", "second.bias"]]))
    )
    for options in ({}, {"groups_in_order": True}):
        with pytest.raises(MatchError) as caught:
            read_curvature(read, changed, **options)
        assert "groups_in_order=True" not in str(caught.value)


# --- frozen, unused, buffers ----------------------------------------------------------------------------------------


def test_frozen_parameters_keep_their_place_or_are_told_by_shapes(tmp_path: Path) -> None:
    net = mlp(3, 3, 3, 3)
    net[0].requires_grad_(False)
    live = stepped(torch.optim.Adam(net.parameters()))
    found = read_curvature(read_checkpoint(save(tmp_path, net, live)))
    same(found, net, live)
    assert found.omitted == {"0.weight": "never received a gradient", "0.bias": "never received a gradient"}

    live = stepped(torch.optim.Adam(p for p in net.parameters() if p.requires_grad))
    read = read_checkpoint(save(tmp_path, net, live))
    # A model of which nothing is frozen knows no better; one frozen as in training does.
    for model in (None, mlp(3, 3, 3, 3)):
        with pytest.raises(MatchError, match=r"may belong to '0\.weight' or to '2\.weight'.*param_names="):
            read_curvature(read, model)
    same(read_curvature(read, net), net, live)
    same(read_curvature(read, param_names=["2.weight", "2.bias", "4.weight", "4.bias"]), net, live)

    net = mlp(3, 4, 2)
    net[0].requires_grad_(False)
    live = stepped(torch.optim.Adam(p for p in net.parameters() if p.requires_grad))
    found = read_curvature(read_checkpoint(save(tmp_path, net, live)))
    same(found, net, live)
    assert found.omitted == {"0.weight": "not in the optimiser", "0.bias": "not in the optimiser"}


class Buffered(nn.Module):
    """A buffer behind a parameter, of its shape or another."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("offset", torch.ones(length))
        self.out = nn.Linear(3, 3)


def test_a_buffer_is_told_by_its_shape_or_refused(tmp_path: Path) -> None:
    net = Buffered(1)
    live = stepped(torch.optim.Adam(net.parameters()))
    same(read_curvature(read_checkpoint(save(tmp_path, net, live))), net, live)
    net = Buffered(3)
    live = stepped(torch.optim.Adam(net.parameters()))
    read = read_checkpoint(save(tmp_path, net, live))
    with pytest.raises(MatchError, match="may belong to 'shift' or to 'offset'"):
        read_curvature(read)
    same(read_curvature(read, Buffered(3)), net, live)


@pytest.mark.parametrize("kind", ["buffer of e3nn", "torch's pruning", "trained"])
def test_a_mask_of_zeros_and_ones_is_no_weight(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(OrderedDict(a=nn.Linear(3, 3, bias=False), b=nn.Linear(3, 3, bias=False)))
    for layer in net:
        if kind == "torch's pruning":
            prune.random_unstructured(layer, "weight", 0.5)
        elif kind == "trained":
            layer.weight.requires_grad_(False)
            layer.mask = nn.Parameter(torch.ones(3, 3))
        else:
            layer.register_buffer("output_mask", torch.ones(3, 3))
    live = stepped(torch.optim.Adam([p for p in net.parameters() if p.requires_grad]))
    read = read_checkpoint(save(tmp_path, net, live))
    if kind == "trained":
        with pytest.raises(MatchError, match=r"'a\.weight' or to 'b\.weight'"):
            read_curvature(read)
    else:
        same(read_curvature(read), net, live)


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_not_refused_is_right(seed: int, tmp_path: Path) -> None:
    """Random models of few shapes with buffers, frozen parts, unused and tied ones; a wrong answer is never given."""
    random = torch.Generator().manual_seed(seed)

    def toss(share: float = 0.3) -> bool:
        return float(torch.rand((), generator=random)) < share

    net = nn.Module()
    for number in range(5):
        part = nn.Module()
        part.weight = nn.Parameter(torch.randn((2, 3) if toss(0.5) else (4,), generator=random))
        if toss():
            part.register_buffer("table", torch.randn((2, 3) if toss(0.5) else (4,), generator=random))
        if number and toss(0.2):
            part.weight = getattr(net, f"part{number - 1}").weight
        part.weight.requires_grad_(not toss(0.2))
        net.add_module(f"part{number}", part)
    listed = [p for p in net.parameters() if p.requires_grad or toss(0.5)]
    used = [p for p in listed if p.requires_grad and not toss(0.15)]
    if not used:
        pytest.skip("nothing was trained")
    live = torch.optim.Adam(listed)
    for parameter in used:
        parameter.grad = torch.randn(parameter.shape, generator=random)
    live.step()
    try:
        found = read_curvature(read_checkpoint(save(tmp_path, net, live)))
    except MatchError:
        return
    same(found, net, live)


# --- the order of the file ------------------------------------------------------------------------------------------


def test_without_an_order_the_model_is_asked_for(tmp_path: Path) -> None:
    net = mlp(3, 5, 5, 5, 1)
    live = stepped(torch.optim.Adam(net.parameters()))
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    torch.save(live.state_dict(), tmp_path / "o.pt")
    both = read_checkpoint(tmp_path / "w.safetensors", optimizer_path=tmp_path / "o.pt")
    # A plain dictionary keeps its order, unless it is the alphabet's.
    listed = read_checkpoint(save(tmp_path, dict(sorted(net.state_dict().items())), live))
    for read in (both, listed):
        assert not read.ordered
        with pytest.raises(MatchError, match=r"param_names=.*or pass the model, whose order it is"):
            read_curvature(read)
        same(read_curvature(read, mlp(3, 5, 5, 5, 1)), net, live)
    assert read_checkpoint(save(tmp_path, dict(Pair("b", "a").state_dict()), live)).ordered


def test_a_class_whose_parts_have_changed_places_is_refused(tmp_path: Path) -> None:
    net, changed = Pair("first", "second"), Pair("second", "first")
    live = stepped(torch.optim.Adam(net.parameters()))
    path = save(tmp_path, net, live)
    before = {name: tensor.clone() for name, tensor in changed.state_dict().items()}
    message = r"would be that of 'first\.weight' by the file, of 'second\.weight' by the model"
    with pytest.raises(MatchError, match=message):
        ba.Posterior.from_checkpoint(path, changed, n_data=10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in changed.state_dict().items())
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    found = ba.Posterior.from_checkpoint(path, changed, n_data=10, param_names=names)
    assert_close(dict(found.variance), dict(ba.Posterior.from_optimizer(net, live, n_data=10).variance))


# --- another model's ------------------------------------------------------------------------------------------------


def test_another_models_state_is_refused_with_the_choices(tmp_path: Path) -> None:
    net, other = mlp(3, 5, 1), mlp(3, 6, 1)
    live = stepped(torch.optim.Adam(other.parameters()))
    with pytest.raises(MatchError, match=r"too few of shape \(6, 3\)"):
        read_curvature(read_checkpoint(save(tmp_path, net, live)))
    with pytest.raises(MatchError, match=r"empty.*train first"):
        read_curvature(read_checkpoint(save(tmp_path, net, torch.optim.Adam(mlp(3, 2).parameters()))))
    many = stepped(torch.optim.Adam(mlp(3, 6, 6, 1).parameters()))
    with pytest.raises(MatchError, match=r"holds 6 parameters, the weights 4 tensors.*param_names="):
        read_curvature(read_checkpoint(save(tmp_path, net, many)))
    # With what else the file holds.
    path = save(tmp_path, net, many, scaler=mlp(2, 2).state_dict())
    with pytest.raises(MatchError, match=r"In .*c\.pt weights_key= may be model, scaler"):
        read_curvature(read_checkpoint(path))


def test_a_model_of_another_shape_is_refused_and_left_alone(tmp_path: Path) -> None:
    net = mlp(3, 5, 1)
    path = save(tmp_path, net, stepped(torch.optim.Adam(net.parameters())))
    for other in (mlp(3, 6, 1), mlp(3, 5, 5, 1), nn.Sequential(OrderedDict(body=nn.Linear(3, 5)))):
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(MatchError):
            ba.Posterior.from_checkpoint(path, other, n_data=10)
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


# --- a part of the model, and what a trainer does without writing it down --------------------------------------------


def wrapped(path: Path, *parts: str) -> tuple[nn.Module, Optimizer, Path]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": nn.Linear(3, 3), **{part: mlp(3, 3, 3) for part in parts}})
    optimizer = stepped(torch.optim.AdamW(model.parameters(), weight_decay=0.02))
    return model, optimizer, save(path, model, optimizer)


def test_the_network_inside_what_was_trained(tmp_path: Path) -> None:
    model, optimizer, path = wrapped(tmp_path, "net")
    inner = mlp(3, 3, 3)
    found = ba.Posterior.from_checkpoint(path, inner, n_data=32)
    whole = ba.Posterior.from_optimizer(model, optimizer, n_data=32)
    assert list(found.mode) == [name for name, _ in inner.named_parameters()]
    for name, theta in found.mode.items():
        assert torch.equal(theta, whole.mode[f"net.{name}"])
        assert torch.equal(found.variance[name], whole.variance[f"net.{name}"])
    with pytest.raises(MatchError, match="another model's"):
        ba.Posterior.from_checkpoint(path, mlp(3, 4), n_data=32)
    _, _, path = wrapped(tmp_path, "net", "other")
    with pytest.raises(MatchError, match=r"'net\.' and 'other\.'"):
        ba.Posterior.from_checkpoint(path, mlp(3, 3, 3), n_data=32)


@pytest.mark.parametrize("named", [False, True])
def test_a_class_that_lacks_some_of_what_was_trained_gets_its_own(named: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = mlp(3, 4, 1)
    net.scale, net.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    live = stepped(torch.optim.Adam(net.named_parameters() if named else net.parameters()))
    path, inner = save(tmp_path, net, live), mlp(3, 4, 1)
    with pytest.warns(
        ba.errors.BayesAdamWarning, match="holds 2 tensors that Sequential has not, scale, shift: left out"
    ):
        found = ba.Posterior.from_checkpoint(path, inner, n_data=32)
    whole = ba.Posterior.from_optimizer(net, live, n_data=32)
    assert list(found.mode) == [name for name, _ in inner.named_parameters()]
    for name, theta in found.mode.items():
        assert torch.equal(theta, whole.mode[name])
        assert torch.equal(found.variance[name], whole.variance[name])


def test_the_trainers_rule_orders_the_parameters(tmp_path: Path) -> None:
    model = mlp(3, 3, 3)
    true, other = (["2.weight", "0.weight"], ["0.bias", "2.bias"]), (["0.weight", "2.weight"], ["0.bias", "2.bias"])
    optimizer = in_groups(model, list(true))
    checkpoint = read_checkpoint(save(tmp_path, model, optimizer))
    same(read_curvature(replace(checkpoint, rules=Rules(orders=lambda _: [true[::-1], true])), model), model, optimizer)
    with pytest.raises(MatchError, match=r"'2.weight' \(the trainer's rule\) or to '0.weight'.*param_names"):
        read_curvature(replace(checkpoint, rules=Rules(orders=lambda _: [true, other])), model)
    # Names in the file may differ from the model's.
    weights = {f"old.{name}": tensor for name, tensor in checkpoint.weights.items()}
    rules = Rules(names=lambda _: {name: name.removeprefix("old.") for name in weights}, orders=lambda _: [true])
    moved = replace(checkpoint, weights=weights, places={name: (name,) for name in weights}, rules=rules)
    same(read_curvature(moved, model), model, optimizer)
    # A rule holds for a class whose parts have changed places, too.
    net, order = Pair("first", "second"), (["second.weight", "first.weight"], ["first.bias", "second.bias"])
    live = in_groups(net, list(order))
    read = replace(read_checkpoint(save(tmp_path, net, live)), rules=Rules(orders=lambda _: [order]))
    same(read_curvature(read, Pair("second", "first")), net, live)
    # What was trained but not saved.
    part = {name: tensor for name, tensor in checkpoint.weights.items() if name != "2.bias"}
    with pytest.raises(MatchError, match=r"does not hold \['2.bias'\]"):
        read_curvature(replace(checkpoint, weights=part, rules=Rules(partial=True)), model)


def test_n_comes_from_the_trainers_record_or_the_caller(tmp_path: Path) -> None:
    model = mlp(3, 5, 2)
    optimizer = stepped(torch.optim.Adam(model.parameters()))
    path = save(tmp_path, model, optimizer, n_data=123)
    assert ba.Posterior.from_checkpoint(path, model).n_data == 123
    assert ba.Posterior.from_checkpoint(path, model, 77).n_data == 77
    with pytest.raises(SettingError, match="pass n_data="):
        ba.Posterior.from_checkpoint(save(tmp_path, model, optimizer), model)
