"""What a writer leaves behind, and what it trains: small networks whose layers have equal shapes."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

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
        named: whether the file has the names that the live ones have.
        aliases: the other names of those that have several, in tied modules.
    """

    path: Path
    live: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    options: tuple[dict[str, Any], ...] = ()
    unsaid: str = ""
    optional: tuple[str, ...] = ()
    named: bool = True
    aliases: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of checkpoint.

    Attributes:
        name: of its row.
        write: (empty folder) → what was written there.
        needs: the modules to import, the first of which is the library that writes; none for torch alone.
        versions: what the library's version begins with, where that matters.
        note: said beside the library, such as that its layout is written by hand.
    """

    name: str
    write: Callable[[Path], Written]
    needs: tuple[str, ...] = ()
    versions: str = ""
    note: str = ""


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
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    moments = {
        id(parameter): second_moment(optimizer.state[parameter], group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if optimizer.state.get(parameter)
    }
    live: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    aliases: dict[str, list[str]] = {}
    for number, network in enumerate(networks):
        for name, parameter in network.named_parameters():
            if id(parameter) in moments:
                # Two networks may have the same names: only their ends are compared.
                key = name if name not in live else f"{number}:{name}"
                live[key] = moments[id(parameter)]
                weights[key] = parameter.detach().to(cast or parameter.dtype).clone()
                every = network.named_parameters(remove_duplicate=False)
                aliases[key] = [other for other, same in every if same is parameter and other != name]
    assert len(live) == len(moments)
    return Written(path, live, weights, aliases={key: names for key, names in aliases.items() if names}, **more)


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
    """A network with a backbone of convolutions and batch norms, and buffers therefore."""

    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Linear(3, 6)
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3)
        )
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.head(self.neck(self.backbone(x.reshape(-1, 1, 8, 8)).mean(dim=(2, 3))))


class Block(nn.Module):
    """A transformer's layer under nanoGPT's names."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(wide)
        self.attn = nn.Module()
        self.attn.c_attn = nn.Linear(wide, 3 * wide)
        self.attn.c_proj = nn.Linear(wide, wide)
        self.attn.register_buffer("bias", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5))
        self.ln_2 = nn.LayerNorm(wide)
        self.mlp = nn.Module()
        self.mlp.c_fc = nn.Linear(wide, 4 * wide)
        self.mlp.c_proj = nn.Linear(4 * wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream."""
        q, k, v = self.attn.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(mixed)
        return x + self.mlp.c_proj(nn.functional.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT in miniature: names, tied weights, the mask as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(11, 8), "wpe": nn.Embedding(5, 8)}
        self.transformer = nn.ModuleDict(
            {**parts, "h": nn.ModuleList([Block(8), Block(8)]), "ln_f": nn.LayerNorm(8, bias=False)}
        )
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, rows: Tensor) -> Tensor:
        """Logits."""
        parts = self.transformer
        x = parts.wte(rows) + parts.wpe(torch.arange(rows.shape[1]))
        for block in parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))


def as_of_a_script(*classes: type) -> None:
    """Pickle the classes as a training script's, which no reader can import."""
    module = sys.modules.setdefault("train_script", types.ModuleType("train_script"))
    for each in classes:
        each.__module__ = "train_script"
        setattr(module, each.__name__, each)


def trained(
    network: nn.Module, *optimizers: Optimizer, inputs: Callable[[], Tensor] | None = None, steps: int = STEPS
) -> None:
    """A few steps, in which every parameter gets a gradient of its own."""
    draw = inputs or (lambda: torch.randn(16, next(network.parameters()).shape[1]))
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = network(draw())
        (out - torch.randn_like(out)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def net(seed: int = 0, wide: int = 4, out: int = 2, **adam: Any) -> tuple[Net, Adam]:
    torch.manual_seed(seed)
    network = Net(wide, out)
    optimizer = Adam(network.parameters(), lr=1e-2, **adam)
    trained(network, optimizer)
    return network, optimizer


def images() -> Tensor:
    return torch.randn(4, 64)


def tokens() -> Tensor:
    return torch.randint(0, 11, (4, 5))


def kept(
    folder: Path,
    network: nn.Module,
    optimizer: Optimizer,
    file: str = "c.pt",
    *,
    model: str = "model",
    state: str = "optimizer",
    beside: dict[str, Any] | None = None,
    **more: Any,
) -> Written:
    """A dictionary of the two state dicts and what else a script writes; `more` is of `told`."""
    tree = {model: network.state_dict(), **(beside or {}), state: optimizer.state_dict()}
    torch.save(tree, folder / file)
    return told(folder / file, network, optimizer, **more)


def grouped(network: nn.Module, groups: Any, *, inputs: Callable[[], Tensor] | None = None, **adam: Any) -> AdamW:
    """AdamW over groups, trained."""
    optimizer = AdamW(groups, lr=1e-2, **adam)
    trained(network, optimizer, inputs=inputs)
    return optimizer


def seeded(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return make()


def by_decay(network: nn.Module, *, no_decay_first: bool, matrices: bool = False) -> list[dict[str, Any]]:
    """Weights that decay, and biases and norms that do not, each group in the model's order."""
    named = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
    plain = [p for name, p in named if p.dim() < 2 or (not matrices and name.endswith(".bias"))]
    decay = [p for _, p in named if not any(p is other for other in plain)]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return groups[::-1] if no_decay_first else groups
