"""A training step of GPT-2's size with SOAP, over one with AdamW: `python benchmarks/soap.py --large`."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesadam.optim.soap import SOAP

# Steps between two refreshes of the bases, everywhere.
PERIOD = 10
RATE = 1e-4


@dataclass(frozen=True)
class Size:
    """A decoder of GPT-2's kind and its batches; the numbers are GPT-2 small's."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_257
    length: int = 1024
    batch: int = 8


QUICK = Size(layers=2, width=48, heads=4, vocabulary=300, length=16, batch=2)


class Layer(nn.Module):
    """x + causal attention of it, then + two linear layers of it, with layer norm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        parts = self.project(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.join(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class Decoder(nn.Module):
    """Tokens to the logits of the next; the last layer's weights are the embedding's."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.layers = nn.Sequential(*(Layer(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, length) to (batch, length, vocabulary)."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.layers(x)), self.tokens.weight)


# --- optimisers -----------------------------------------------------------------------------------------------------

Make = Callable[[Any], torch.optim.Optimizer]


def candidates(authors: Path | None) -> dict[str, Make]:
    """What can be imported here, each with its refreshes every ten steps and sides of up to 10,000."""
    makes: dict[str, Make] = {
        "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=RATE, fused=True),
        "ours": lambda p: SOAP(p, lr=RATE),
        "ours, half_products=False": lambda p: SOAP(p, lr=RATE, half_products=False),
    }
    if authors is not None:
        spec = importlib.util.spec_from_file_location("authors_soap", authors)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        makes["its authors'"] = lambda p: module.SOAP(p, lr=RATE, precondition_frequency=PERIOD)
    for label, name, settings in (
        ("heavyball's", "heavyball", {"precondition_frequency": PERIOD, "max_precond_dim": 10_000}),
        ("pytorch_optimizer's", "pytorch_optimizer", {"precondition_frequency": PERIOD}),
    ):
        try:
            peer = importlib.import_module(name).SOAP
        except ImportError as error:
            print(f"{label} SOAP is left out: {error}")
            continue
        makes[label] = lambda p, peer=peer, settings=settings: peer(p, lr=RATE, **settings)
    return makes


# --- times ----------------------------------------------------------------------------------------------------------


@contextmanager
def timed(device: str, milliseconds: list[Callable[[], float]]) -> Iterator[None]:
    """Append a function that returns the milliseconds inside, once the device is done."""
    if device.startswith("cuda"):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        yield
        ended.record()
        milliseconds.append(lambda: began.elapsed_time(ended))
    else:
        start = time.perf_counter()
        yield
        taken = 1e3 * (time.perf_counter() - start)
        milliseconds.append(lambda: taken)


def measured(make: Make, size: Size, device: str, periods: int) -> dict[str, float]:
    """Milliseconds of the whole step and of the optimiser's, over whole periods, after the first."""
    torch.manual_seed(0)
    model = Decoder(size).to(device)
    optimizer = make(model.parameters())
    ids = torch.randint(size.vocabulary, (size.batch, size.length + 1), device=device)
    whole: list[Callable[[], float]] = []
    alone: list[Callable[[], float]] = []

    def step() -> Tensor:
        with timed(device, whole):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
                logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            with timed(device, alone):
                optimizer.step()
        return loss.detach()

    began = time.perf_counter()
    step()
    _wait(device)
    first = time.perf_counter() - began
    # The second step is the first that counts: with these the timed ones begin after a refresh.
    for _ in range(PERIOD):
        step()
    _wait(device)
    del whole[:], alone[:]
    losses = [step() for _ in range(periods * PERIOD)]
    _wait(device)
    found: dict[str, float] = {"first step, s": first, "last loss": float(losses[-1])}
    for part, clocks in (("whole step", whole), ("optimiser alone", alone)):
        steps = [clock() for clock in clocks]
        means = [statistics.fmean(steps[i : i + PERIOD]) for i in range(0, len(steps), PERIOD)]
        found |= {
            f"{part}, ms": statistics.median(means),
            f"{part}, median of steps, ms": statistics.median(steps),
            f"{part}, slowest, ms": statistics.median(max(steps[i : i + PERIOD]) for i in range(0, len(steps), PERIOD)),
        }
    if isinstance(optimizer, SOAP):
        found["largest entry of QᵀQ − I"] = largest_error(optimizer)
    if device.startswith("cuda"):
        found["most memory, GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def largest_error(optimizer: SOAP) -> float:
    """How far the bases are from orthonormal."""
    bases = [q for state in optimizer.state.values() for key, q in state.items() if key.endswith("_basis")]
    return max(float((q.double().mT @ q.double() - torch.eye(len(q), device=q.device)).abs().max()) for q in bases)


def large(size: Size, device: str, periods: int, authors: Path | None) -> dict[str, Any]:
    """The table of all candidates, printed line by line."""
    found: dict[str, Any] = {}
    weights = sum(p.numel() for p in Decoder(size).parameters())
    print(f"{weights:,} weights, batches of {size.batch} x {size.length}, {device}, torch {torch.__version__}")
    print(f"{'':28s}{'whole step':>12s}{'of AdamW':>10s}{'optimiser':>12s}{'slowest':>10s}{'first':>9s}")
    for label, make in candidates(authors).items():
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            row = found[label] = measured(make, size, device, periods)
        except Exception as error:
            if "ours" in label or "AdamW" in label:
                raise
            print(f"{label:28s}fails: {type(error).__name__}: {error}"[:160])
            continue
        base = found["AdamW, fused"]["whole step, ms"]
        row["whole step / AdamW's"] = row["whole step, ms"] / base
        print(
            f"{label:28s}{row['whole step, ms']:9.2f} ms{row['whole step, ms'] / base:10.3f}"
            f"{row['optimiser alone, ms']:9.2f} ms{row['whole step, slowest, ms']:7.1f} ms{row['first step, s']:7.1f} s",
            flush=True,
        )
    return found
