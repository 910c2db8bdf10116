"""What a writer of a kind of checkpoint leaves behind; and writes every kind that `wild` reads, without bayesadam:
python -m benchmarks.checkpoints.write FOLDER [NAME ...].
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

EXPECTED, LEFT_OUT = "expected.pt", "left_out.json"
DISTRIBUTIONS = {"ignite": "pytorch-ignite", "muon": "muon-optimizer"}


@dataclass(frozen=True, eq=False)
class Written:
    """What a kind's writer left behind.

    Attributes:
        path: what is read.
        live: v̂ of every trained parameter, by its name in its own network.
        weights: the values of the same parameters.
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

    `needs` are the modules to import, the first of which is the library that writes; its version begins with `version`.
    """

    name: str
    write: Callable[[Path], Written]
    needs: tuple[str, ...]
    version: str = ""


KINDS: list[Kind] = []


def kind(title: str, *needs: str, version: str = "", **options: Any) -> Callable[[Any], Any]:
    """Decorates a writer of a kind; `options` are passed to it."""

    def register(write: Callable[..., Written]) -> Callable[..., Written]:
        KINDS.append(Kind(title, partial(write, **options), needs, version))
        return write

    return register


def second_moment(state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """v̂ out of the state of Adam or RMSprop, in double precision and without bayesadam."""
    stored = state["exp_avg_sq"] if "exp_avg_sq" in state else state["square_avg"]
    beta = group["betas"][1] if "betas" in group else group["alpha"]
    return stored.detach().double() / (1 - beta ** float(state["step"]))


def told(
    path: Path, networks: nn.Module | Sequence[nn.Module], optimizers: Optimizer | Sequence[Optimizer], **more: Any
) -> Written:
    """What was written, with v̂ and the values of all that the optimisers trained."""
    moments: dict[int, Tensor] = {}
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        for parameter, state in optimizer.state.items():
            group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
            moments[id(parameter)] = second_moment(state, group)
    live, weights, aliases = dict[str, Tensor](), dict[str, Tensor](), dict[str, list[str]]()
    for number, network in enumerate([networks] if isinstance(networks, nn.Module) else networks):
        for name, parameter in network.named_parameters():
            if id(parameter) in moments:
                # Two networks may have the same names: only their ends are compared.
                key = name if name not in live else f"{number}:{name}"
                live[key], weights[key] = moments[id(parameter)], parameter.detach().clone()
                every = network.named_parameters(remove_duplicate=False)
                aliases[key] = [other for other, same in every if same is parameter and other != name]
    assert len(live) == len(moments)
    return Written(path, live, weights, aliases=aliases, **more)


class Net(nn.Module):
    """Most of its layers have equal shapes, so that a wrong order is one that fits."""

    def __init__(self, wide: int = 4) -> None:
        super().__init__()
        first, *others = nn.Linear(wide, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        norms = nn.LayerNorm(6), nn.LayerNorm(6)
        self.body = nn.Sequential(first, nn.Tanh(), others[0], norms[0], nn.Tanh(), others[1], norms[1])
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.head(self.body(x))


def trained(network: nn.Module, optimizer: Any, steps: int = 3) -> None:
    """A few steps, in which every parameter gets a gradient of its own."""
    for _ in range(steps):
        for parameter in network.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def write_all(kinds: Sequence[Kind], folder: Path, only: Sequence[str]) -> None:
    """Write every kind that is not there yet; of what cannot be written the first environment's reason stays."""
    for number, one in enumerate(kinds):
        place = folder / f"{number:03d}"
        if (only and not any(part in one.name for part in only)) or (place / EXPECTED).is_file():
            continue
        content = place / f"content-{len(list(place.glob('content-*')))}"
        content.mkdir(parents=True)
        try:
            library = library_of(one)
            written = one.write(content)
        except Exception as error:
            if not isinstance(error, ImportError):
                traceback.print_exc()
            if not (place / LEFT_OUT).is_file():
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                (place / LEFT_OUT).write_text(json.dumps({"kind": one.name, "left_out": reason}), encoding="utf-8")
            continue
        # Parameters are told by their values.
        distinct = {(*w.shape, w.double().numpy().tobytes()) for w in written.weights.values()}
        assert len(distinct) == len(written.weights), f"{one.name} tells nothing: two parameters are equal"
        options = [{key: str(v) if isinstance(v, Path) else v for key, v in how.items()} for how in written.options]
        about = {"kind": one.name, "library": library, "options": options}
        saved = {**vars(written), "path": str(written.path), "optional": list(written.optional)}
        torch.save({**saved, **about}, place / EXPECTED)
        (place / LEFT_OUT).unlink(missing_ok=True)


def library_of(one: Kind) -> str:
    """Which one writes, and its version; an error where it, or what it needs, is absent or another version."""
    for module in one.needs:
        importlib.import_module(module)
    name = DISTRIBUTIONS.get(one.needs[0], one.needs[0])
    version = importlib.metadata.version(name)
    if not version.startswith(one.version):
        raise ImportError(f"{name} {version} is installed, {one.version}* is wanted")
    return f"{name.replace('_', '-')} {version}"


if __name__ == "__main__":
    # As a module it has the kinds, which are registered there and not in the command.
    write_all(importlib.import_module("benchmarks.checkpoints.libraries").KINDS, Path(sys.argv[1]), sys.argv[2:])
