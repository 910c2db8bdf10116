"""Groups by rule: recognised where sizes and every shape leave one answer, refused where two rules differ."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from bayesadam.errors import MatchError
from bayesadam.readers import explain, read_checkpoint, read_curvature, read_optimizer
from bayesadam.readers.match import AmbiguousError, Slot, fillings, pair
from cases import mlp
from floats import approx, assert_close

# --- models ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})


class Gpt(nn.Module):
    """nanoGPT in miniature, with more layers than there are digits."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            OrderedDict(
                wte=nn.Embedding(11, 4),
                wpe=nn.Embedding(5, 4),
                h=nn.ModuleList(Block(4) for _ in range(11)),
                ln_f=nn.LayerNorm(4),
            )
        )
        self.lm_head = nn.Linear(4, 11, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight


class Bert(nn.Module):
    """Names as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"word": nn.Embedding(9, 4), "LayerNorm": nn.LayerNorm(4)})
        self.layers = nn.ModuleList(
            nn.ModuleDict({"dense": nn.Linear(4, 6), "out": nn.Linear(6, 4), "LayerNorm": nn.LayerNorm(4)})
            for _ in range(2)
        )
        self.classifier = nn.Linear(4, 2)


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.patch_embed = nn.Conv2d(3, 4, 2)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "qkv": nn.Linear(4, 12), "fc": nn.Linear(12, 4)}) for _ in range(2)
        )
        self.head = nn.Linear(4, 3)


class Detector(nn.Module):
    """A backbone with norms, and a head that is registered before it."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Linear(6, 6)
        self.class_embed = nn.Linear(6, 3)
        self.backbone = nn.ModuleDict(
            OrderedDict(
                (f"layer{number}", nn.Sequential(nn.Conv2d(2, 2, 3, bias=False), nn.BatchNorm2d(2)))
                for number in range(1, 5)
            )
        )


class Yolo(nn.Sequential):
    """Convolutions without biases, norms, and a last convolution with a bias."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for wide, narrow in ((3, 4), (4, 4), (4, 6)):
            layers += [nn.Conv2d(wide, narrow, 3, bias=False), nn.BatchNorm2d(narrow)]
        super().__init__(*layers, nn.Conv2d(6, 5, 1))


class Split(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


# --- the groups of trainers -----------------------------------------------------------------------------------------


def by(test: Callable[[str, Tensor], bool]) -> Callable[[nn.Module], list[list[str]]]:
    """Two groups, as every trainer makes them: those that pass, then the others."""

    def groups(net: nn.Module) -> list[list[str]]:
        named = list(net.named_parameters())
        return [[n for n, p in named if test(n, p)], [n for n, p in named if not test(n, p)]]

    return groups


def yolo(net: nn.Module) -> list[list[str]]:
    """As `smart_optimizer` of yolov5 and `build_optimizer` of ultralytics."""
    weights, norms, biases = [], [], []
    for module_name, module in net.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}"
            if name == "bias":
                biases.append(full)
            elif isinstance(module, nn.BatchNorm2d):
                norms.append(full)
            else:
                weights.append(full)
    return [biases, weights, norms]


def mingpt(net: nn.Module) -> list[list[str]]:
    fixed = {n for n, p in net.named_parameters() if p.dim() < 2 or "wte" in n or "wpe" in n}
    return [sorted({n for n, _ in net.named_parameters()} - fixed), sorted(fixed)]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], list[list[str]]], str]] = {
    "nanogpt": (Gpt, by(lambda n, p: p.dim() >= 2), "weights of ≥ 2 dimensions, then the rest"),
    "mingpt": (Gpt, mingpt, "all but biases, norms and embeddings, then those; each sorted by name"),
    "timm": (Vit, by(lambda n, p: p.ndim <= 1 or n.endswith(".bias")), "the rest, then weights of ≥ 2 dimensions"),
    "timm's models": (
        Vit,
        by(lambda n, p: p.ndim <= 1 or n.endswith(".bias") or n in ("cls_token", "pos_embed")),
        "biases, what has ≤ 1 dimension, tokens and positions, then the rest",
    ),
    "hugging face": (
        Bert,
        by(lambda n, p: not any(word in n for word in ("bias", "LayerNorm.weight"))),
        "weights of ≥ 2 dimensions, then the rest",
    ),
    "biases": (Bert, by(lambda n, p: n.endswith("bias")), "biases, then the rest"),
    "the whole backbone": (Detector, by(lambda n, p: "backbone" not in n), "the rest, then the backbone"),
    "yolo": (Yolo, yolo, "biases, then the other weights, then norms' weights"),
    "head last": (Split, by(lambda n, p: not n.startswith("head")), "the rest, then the head"),
    "head first": (Split, by(lambda n, p: n.startswith("head")), "the head, then the rest"),
}


def trained(net: nn.Module, groups: Sequence[Sequence[str]], decays: Sequence[float] | None = None) -> AdamW:
    """Two steps on gradients that are all different; a group decays where most of it are matrices."""
    named = dict(net.named_parameters())
    matrices = [[named[n].dim() > 1 for n in group] for group in groups]
    decays = decays or [0.1 * (2 * sum(large) > len(large)) for large in matrices]
    listed = [
        {"params": [named[n] for n in group], "weight_decay": decay}
        for group, decay in zip(groups, decays, strict=True)
        if group
    ]
    live = AdamW(listed)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for name in (name for group in groups for name in group):
            named[name].grad = torch.randn(named[name].shape, generator=generator)
        live.step()
    return live


def saved(path: Path, net: nn.Module, live: AdamW) -> Path:
    torch.save({"model": net.state_dict(), "optimizer": live.state_dict()}, path / "c.pt")
    return path / "c.pt"


def same(found: Any, net: nn.Module, live: AdamW) -> None:
    expected = read_optimizer(net, live)
    assert found.second_moment.keys() == expected.second_moment.keys()
    for name, v in expected.second_moment.items():
        assert torch.equal(found.second_moment[name], v)
    assert found.weight_decay == expected.weight_decay


@pytest.mark.parametrize("case", CASES)
def test_the_groups_of_trainers_are_recognised(case: str, tmp_path: Path) -> None:
    make, groups, words = CASES[case]
    net = make()
    live = trained(net, groups(net))
    read = read_checkpoint(saved(tmp_path, net, live))
    same(read_curvature(read), net, live)
    assert f"Matched by groups: {words}." in explain(read)
    same(read_curvature(read, make()), net, live)


# --- refused --------------------------------------------------------------------------------------------------------


def test_two_rules_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    # Parts of equal shapes: the body may have come first, or the head.
    net = nn.Sequential(OrderedDict(body=mlp(3, 3, 3), head=mlp(3, 3, 3)))
    live = trained(net, by(lambda n, p: n.startswith("head"))(net))
    read = read_checkpoint(saved(tmp_path, net, live))
    message = (
        r"key 0 may belong to '.*' \(groups: the head, then the rest\) or to '.*' \(groups: the rest, then the head\)"
    )
    for model in (None, net):
        with pytest.raises(MatchError, match=message + ".*2 groups without names.*param_names="):
            read_curvature(read, model)
    names = [name for group in by(lambda n, p: n.startswith("head"))(net) for name in group]
    same(read_curvature(read, param_names=names), net, live)


@pytest.mark.parametrize("decays", [(0.0, 0.0), (0.1, 0.1), (0.0, 0.1)])
def test_groups_that_were_not_made_for_their_decay_are_refused(decays: tuple[float, float], tmp_path: Path) -> None:
    net = mlp(3, *[3] * 12)
    live = trained(net, by(lambda n, p: p.dim() > 1)(net), decays)
    with pytest.raises(MatchError, match="2 groups without names"):
        read_curvature(read_checkpoint(saved(tmp_path, net, live)))


def test_what_is_left_out_of_the_groups_is_no_rule(tmp_path: Path) -> None:
    net = Gpt()
    groups = by(lambda n, p: p.dim() >= 2)(net)
    live = trained(net, [groups[0][:-1], groups[1]])
    with pytest.raises(MatchError, match="2 groups without names"):
        read_curvature(read_checkpoint(saved(tmp_path, net, live)))


@pytest.mark.parametrize("seed", range(20))
def test_shuffled_groups_are_never_read_wrongly(seed: int, tmp_path: Path) -> None:
    """Where shapes are many, a list in no order is told by them or refused; it is not taken for a rule's."""
    generator = torch.Generator().manual_seed(seed)
    net = [Yolo, Vit, Gpt, Bert][seed % 4]()
    groups = by(lambda n, p: p.dim() >= 2)(net)
    shuffled = [[group[i] for i in torch.randperm(len(group), generator=generator)] for group in groups]
    live = trained(net, shuffled)
    try:
        found = read_curvature(read_checkpoint(saved(tmp_path, net, live)))
    except MatchError:
        return
    same(found, net, live)


def test_a_state_that_shows_no_shape_follows_no_rule() -> None:
    shapes = {"a.weight": torch.Size([2, 2]), "a.bias": torch.Size([2])}
    slots = [Slot(0, 0, None, True), Slot(1, 1, None, True)]
    with pytest.raises(AmbiguousError):
        pair(slots, shapes, ordered=True, in_order=False)


def test_every_rule_says_what_it_does() -> None:
    for sizes in ([1, 1], [1, 1, 1]):
        words = [words for words, _, _ in fillings(dict.fromkeys("abcd", torch.Size([2])), sizes)]
        assert len(set(words)) == len(words) > 2


# --- fastai ---------------------------------------------------------------------------------------------------------


def fastai_state(net: nn.Module, *, hypers: list[dict[str, float]], decayed: Callable[[str], bool]) -> dict[str, Any]:
    """Two steps of fastai's Adam as its documentation has them, and what its optimiser saves."""
    generator = torch.Generator().manual_seed(0)
    states: list[dict[str, Any]] = []
    for name, parameter in net.named_parameters():
        state: dict[str, Any] = {} if decayed(name) else {"do_wd": False}
        average, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
        for _ in range(2):
            gradient = torch.randn(parameter.shape, generator=generator)
            average = 0.9 * average + 0.1 * gradient
            square = 0.99 * square + 0.01 * gradient**2
        states.append({**state, "grad_avg": average.detach(), "sqr_avg": square.detach(), "step": 2})
    return {"state": states, "hypers": hypers}


HYPERS = {"mom": 0.9, "sqr_mom": 0.99, "lr": 1e-3, "eps": 1e-5, "wd": 0.01}


def test_fastai(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))
    hypers = [{**HYPERS, "lr": rate} for rate in (1e-4, 1e-3)]
    state = fastai_state(net, hypers=hypers, decayed=lambda name: not name.endswith("bias"))
    torch.save({"model": net.state_dict(), "opt": state}, tmp_path / "c.pth")
    read = read_checkpoint(tmp_path / "c.pth")
    found = read_curvature(read)
    for (name, _), held in zip(net.named_parameters(), state["state"], strict=True):
        assert_close(found.second_moment[name], held["sqr_avg"] / (1 - 0.99**2))
        assert found.weight_decay[name] == approx(0.0 if name.endswith("bias") else 0.01)
    assert found.steps == dict.fromkeys(found.second_moment, 2)


def test_fastai_groups_that_differ_in_more_than_the_rate_are_not_read(tmp_path: Path) -> None:
    net = mlp(3, 4, 1)
    state = fastai_state(net, hypers=[HYPERS, {**HYPERS, "wd": 0.5}], decayed=lambda name: True)
    torch.save({"model": net.state_dict(), "opt": state}, tmp_path / "c.pth")
    with pytest.raises(OSError, match="no optimiser state"):
        read_checkpoint(tmp_path / "c.pth")
