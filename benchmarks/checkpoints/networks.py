"""What a writer leaves behind, and what it trains: small networks whose layers have equal shapes."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

STEPS = 3


@dataclass(frozen=True, eq=False)
class Written:
    """What a kind's writer left behind.

    Attributes:
        path: what is read.
        live: v̂ of every trained parameter, by its name in its own network.
        weights: the values of the same parameters, as precise as they are in the file.
        options: one call of `read_checkpoint` each, for what no file says; together they read all that is live.
        unsaid: why to refuse is right; "" where it is not. What is read nevertheless must be right.
        optional: of the live ones, those that need not be read.
        aliases: the other names of those that have several, in tied modules.
    """

    path: Path
    live: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    options: tuple[dict[str, Any], ...] = ()
    unsaid: str = ""
    optional: tuple[str, ...] = ()
    aliases: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of checkpoint: the name of its row, and (empty folder) → what was written there.

    `needs` are the modules to import, the first of which is the library that writes, none for a layout that is written
    by hand; its version begins with `version`.
    """

    name: str
    write: Callable[[Path], Written]
    needs: tuple[str, ...] = ()
    version: str = ""


KINDS: list[Kind] = []


def kind(title: str, *needs: str, version: str = "", **options: Any) -> Callable[[Any], Any]:
    """Decorates a writer of a kind; `options` are passed to it."""

    def register(write: Callable[..., Written]) -> Callable[..., Written]:
        KINDS.append(Kind(title, partial(write, **options), needs, version))
        return write

    return register


# --- what is live ---------------------------------------------------------------------------------------------------


def second_moment(state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """v̂ out of the state of Adam or RMSprop, in double precision and without bayesadam."""
    stored = state["exp_avg_sq"] if "exp_avg_sq" in state else state["square_avg"]
    beta = group["betas"][1] if "betas" in group else group["alpha"]
    return stored.detach().double() / (1 - beta ** float(state["step"]))


def told(
    path: Path,
    networks: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    cast: torch.dtype | None = None,
    **more: Any,
) -> Written:
    """What was written, with v̂ and the values of all that the optimisers trained; `cast` is the file's type."""
    networks = [networks] if isinstance(networks, nn.Module) else networks
    moments: dict[int, Tensor] = {}
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        for parameter, state in optimizer.state.items():
            group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
            moments[id(parameter)] = second_moment(state, group)
    live, weights, aliases = dict[str, Tensor](), dict[str, Tensor](), dict[str, list[str]]()
    for number, network in enumerate(networks):
        for name, parameter in network.named_parameters():
            if id(parameter) in moments:
                # Two networks may have the same names: only their ends are compared.
                key = name if name not in live else f"{number}:{name}"
                live[key] = moments[id(parameter)]
                weights[key] = parameter.detach().to(cast or parameter.dtype).clone()
                every = network.named_parameters(remove_duplicate=False)
                if others := [other for other, same in every if same is parameter and other != name]:
                    aliases[key] = others
    assert len(live) == len(moments)
    return Written(path, live, weights, aliases=aliases, **more)


def kept(
    path: Path, network: nn.Module, optimizer: Optimizer, model: str = "model", state: str = "optimizer", **more: Any
) -> Written:
    """A dictionary of the two state dicts, and of what a script writes `beside` them; `more` is of `told`."""
    tree = {model: network.state_dict(), **more.pop("beside", {}), state: optimizer.state_dict()}
    torch.save(tree, path)
    return told(path, network, optimizer, **more)


# --- networks -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Most of its layers have equal shapes, so that a wrong order is one that fits."""

    def __init__(self, wide: int = 4, out: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(wide, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6)
        )
        self.head = nn.Linear(6, out)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.head(self.body(x))


class Detector(nn.Module):
    """A backbone of convolutions and batch norms, and buffers therefore, between two other parts."""

    def __init__(self) -> None:
        super().__init__()
        first, *others = nn.Conv2d(1, 3, 3, bias=False), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
        self.neck = nn.Linear(3, 6)
        self.backbone = nn.Sequential(first, nn.BatchNorm2d(3), others[0], nn.BatchNorm2d(3), others[1])
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))


def gpt() -> nn.ModuleDict:
    """nanoGPT in miniature: names, tied weights, the mask as a buffer."""

    def block() -> nn.ModuleDict:
        attention = nn.ModuleDict({"c_attn": nn.Linear(8, 24), "c_proj": nn.Linear(8, 8)})
        attention.register_buffer("bias", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5))
        mlp = nn.ModuleDict({"c_fc": nn.Linear(8, 32), "c_proj": nn.Linear(32, 8)})
        return nn.ModuleDict({"ln_1": nn.LayerNorm(8), "attn": attention, "ln_2": nn.LayerNorm(8), "mlp": mlp})

    parts = {"wte": nn.Embedding(11, 8), "wpe": nn.Embedding(5, 8), "h": nn.ModuleList([block(), block()])}
    transformer = nn.ModuleDict({**parts, "ln_f": nn.LayerNorm(8, bias=False)})
    network = nn.ModuleDict({"transformer": transformer, "lm_head": nn.Linear(8, 11, bias=False)})
    transformer["wte"].weight = network["lm_head"].weight
    return network


# As a training script's: no reader can import it.
sys.modules["train_script"] = types.ModuleType("train_script")
sys.modules["train_script"].Detector, Detector.__module__ = Detector, "train_script"  # type: ignore[attr-defined]


def trained(*networks: nn.Module, by: Any, steps: int = STEPS) -> None:
    """A few steps of an optimiser, in which every parameter gets a gradient of its own."""
    for _ in range(steps):
        for parameter in (p for network in networks for p in network.parameters() if p.requires_grad):
            parameter.grad = torch.randn_like(parameter)
        by.step()


def net(seed: int = 0, wide: int = 4, out: int = 2) -> tuple[Net, Adam]:
    torch.manual_seed(seed)
    network = Net(wide, out)
    optimizer = Adam(network.parameters(), lr=1e-2)
    trained(network, by=optimizer)
    return network, optimizer


def by_decay(network: nn.Module, *, no_decay_first: bool, matrices: bool = False) -> list[dict[str, Any]]:
    """Weights that decay, and biases and norms that do not, each group in the model's order."""
    named = list(network.named_parameters())
    plain = [p for name, p in named if p.dim() < 2 or (not matrices and name.endswith(".bias"))]
    decay = [p for _, p in named if not any(p is other for other in plain)]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return groups[::-1] if no_decay_first else groups
