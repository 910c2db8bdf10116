"""Two language models fine-tuned from one base on two kinds of text, and merged."""

from __future__ import annotations

import argparse
import copy
import gzip
import math
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.merging import merge
from benchmarks.common.harness import Cell
from benchmarks.merging import rivals

BASE, EXPERTS = ("dictionary", "manpages"), ("manual", "python")
BYTES = 256
FACTORS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)


class Block(nn.Module):
    """x + causal attention of it, then + two linear layers of it, with layer norm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        parts = self.project(self.norm1(x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.join(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """A decoder of bytes, of the shape of GPT-2."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length) bytes to (batch, length, 256) logits."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))  # type: ignore[no-any-return]


def texts(device: str, names: Iterable[str] = (*BASE, *EXPERTS)) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """The bytes of every text: nine tenths to train, a twentieth to choose by, a twentieth to report on."""
    folder = Path(os.environ.get("BAYESADAM_DATA", "")) / "text"
    found = {}
    for name in names:
        path = folder / f"{name}.txt.gz"
        if not path.is_file():
            sys.exit(
                f"{path} is missing, no source delivered it: set BAYESADAM_DATA to the folder that has "
                f"text/{name}.txt.gz"
            )
        whole = torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=torch.uint8).to(device)
        held = len(whole) // 20
        found[name] = (whole[: -2 * held], whole[-2 * held : -held], whole[-held:])
    return found


def autocast(device: str) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


def train(
    model: Language, parts: list[Tensor], options: argparse.Namespace, *, steps: int, rate: float, seed: int
) -> ba.Posterior:
    """Steps of Adam on windows of the texts, as many of each, the rate rising for a twentieth and then falling to 0."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.999), fused=options.device == "cuda")
    draw = torch.Generator(device=options.device).manual_seed(seed)
    batch, context = (64 if options.width > 64 else 8), options.context
    span = torch.arange(context + 1, device=options.device)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, 20 * (step + 1) / steps) * (1 - step / steps)
        rows = []
        for part in parts:
            first = torch.randint(
                len(part) - context - 1, (batch // len(parts), 1), generator=draw, device=options.device
            )
            rows.append(part[first + span].long())
        x = torch.cat(rows)
        optimizer.zero_grad()
        with autocast(options.device):
            logits = model(x[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    n_data = sum(len(part) for part in parts) / context
    return ba.Posterior.from_optimizer(model, optimizer, n_data, prior_precision=1.0, power=1.0, batch_size=batch)


@torch.no_grad()
def nats(model: Language, text: Tensor, options: argparse.Namespace) -> float:
    """Mean negative log-likelihood of a byte, window by window."""
    count = min((len(text) - 1) // options.context, 4 if options.quick else 400)
    total = 0.0
    for start in range(0, count, 50):
        firsts = torch.arange(start, min(start + 50, count), device=text.device)[:, None] * options.context
        x = text[firsts + torch.arange(options.context + 1, device=text.device)].long()
        with autocast(options.device):
            logits = model(x[:, :-1])
        total += float(F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="sum"))
    return total / (count * options.context)


def text_cell(seed: int, options: argparse.Namespace) -> Cell:
    """Nats per byte and perplexity on held-out parts of both texts."""
    data = texts(options.device)
    torch.manual_seed(seed)
    model = Language(options.layers, options.width, options.context).to(options.device)
    known = train(model, [data[name][0] for name in BASE], options, steps=options.text_steps, rate=6e-4, seed=seed)
    tuned, posteriors = [], []
    for number, name in enumerate(EXPERTS):
        expert = copy.deepcopy(model)
        posteriors.append(
            train(expert, [data[name][0]], options, steps=options.text_steps // 2, rate=2e-4, seed=seed + number)
        )
        tuned.append(expert.state_dict())
    start, probe = model.state_dict(), copy.deepcopy(model)

    def scored(weights: Any, part: int) -> list[float]:
        probe.load_state_dict(weights)
        return [nats(probe, data[name][part], options) for name in EXPERTS]

    arithmetic = rivals.task_arithmetic(rivals.changes(start, tuned))
    candidates = {factor: rivals.added(start, arithmetic, factor) for factor in FACTORS}
    factor = min(candidates, key=lambda f: sum(scored(candidates[f], 1)))
    rows: dict[str, float] = {}
    for label, weights in {
        "base": start,
        **{f"{name} alone": each for name, each in zip(EXPERTS, tuned, strict=True)},
        "average": rivals.average(tuned),
        "task arithmetic": candidates[factor],
        "fisher": merge(posteriors),
        "gradient-matching": merge(posteriors, base=known),
    }.items():
        found = scored(weights, 2)
        for name, value in zip(EXPERTS, found, strict=True):
            rows[f"{label}: perplexity of a byte, {name}"] = math.exp(value)
        rows[f"{label}: nats per byte, mean"] = sum(found) / len(found)
    return {
        "rows": rows,
        "chosen": {"task arithmetic": factor},
        "parameters": sum(p.numel() for p in model.parameters()),
    }
