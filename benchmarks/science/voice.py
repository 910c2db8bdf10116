"""A voice encoder from the package index, resemblyzer's LSTM, pruned without data.

    python -m benchmarks.science.voice [--quick] [--out out/bench]

A row is 100 (1 − cos) of the embeddings of synthetic voices before and after: harmonics of a gliding pitch under three
formants, as 40 mel bands. Of the package the file alone is read.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import arguments, setting, write_results
from benchmarks.science.potentials import FRACTIONS, RANKINGS, permuted

RATE, BANDS = 16_000, 40


class Encoder(nn.Module):
    """By the names that the file has."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(BANDS, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """Embeddings of length 1, (batch, 256), of mel bands (batch, frames, bands)."""
        return F.normalize(self.linear(self.lstm(mels)[1][0][-1]).relu(), dim=1)


def filters() -> Tensor:
    """Triangles of equal area on the mel scale, (bands, frequencies)."""
    edges = 700 * ((torch.linspace(0, 2595 * math.log10(1 + RATE / 1400), BANDS + 2) / 2595 * math.log(10)).exp() - 1)
    hertz = torch.linspace(0, RATE / 2, 201)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rise, fall = (hertz - low) / (middle - low), (high - hertz) / (high - middle)
    return torch.minimum(rise, fall).clamp(min=0) * 2 / (high - low)


def voices(n: int) -> Tensor:
    """Synthetic voices as mel bands, (n, 160, bands)."""
    g = torch.Generator().manual_seed(0)
    t, numbers = torch.arange(2 * RATE) / RATE, torch.arange(1, 30)[:, None]
    waves = []
    for _ in range(n):
        (pitch, rate), formants = torch.rand(2, generator=g), 300 + 2700 * torch.rand(3, generator=g)
        gliding = (80 + 180 * pitch) * (1 + 0.1 * torch.sin(2 * math.pi * (2 + 3 * rate) * t))
        loud = torch.exp(-0.5 * ((numbers * (80 + 180 * pitch) - formants) / 150) ** 2).sum(dim=1, keepdim=True)
        wave = (loud * torch.sin(numbers * 2 * math.pi * gliding.cumsum(0) / RATE)).sum(dim=0)
        wave = (wave + 0.02 * torch.randn(len(t), generator=g)) * (torch.sin(6 * math.pi * t) > -0.5)
        waves.append(wave / wave.abs().max() / 3)
    spectrum = torch.stft(torch.stack(waves), 400, 160, window=torch.hann_window(400), return_complex=True).abs()
    return (filters() @ spectrum.square()).mT[:, :160]


def main() -> None:
    options = arguments(__doc__, quick="half pruned, three voices").parse_args()
    spec, model = find_spec("resemblyzer"), Encoder()
    if spec is None or spec.origin is None:
        raise SystemExit("resemblyzer is not installed: make science-test installs it")
    path = Path(spec.origin).with_name("pretrained.pt")
    q = ba.Posterior.from_checkpoint(path, model, n_data=1, likelihood="regression")
    heard = voices(3 if options.quick else 24)
    vectors = [name for name, w in q.mode.items() if w.dim() < 2]
    rows: dict[str, Any] = {}
    with torch.no_grad():
        before = model(heard)
        for name in (*RANKINGS, "permuted"):
            posterior, ranking = (permuted(q), "snr") if name == "permuted" else (q, name)
            for fraction in (0.5,) if options.quick else FRACTIONS:
                after = ba.prune(posterior, fraction, ranking=ranking, exclude=vectors).model(heard)
                rows.setdefault(name, {})[fraction] = moved = 100 * float(1 - (after * before).sum(dim=1).mean())
                print(f"{name:12}{fraction:5}{moved:8.2f}", flush=True)
    write_results(options.out, "voice", {"settings": setting(), "rows": rows})


if __name__ == "__main__":
    main()
