"""`bayesadam demo`: AdamW trains a small network, and its state gives the error bars, without and with the inputs."""

import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from bayesadam import Posterior
from bayesadam._files import replacing

_DATA, _RANGE = (0.0, 0.5), (-0.3, 0.9)


def curve(x: Tensor) -> Tensor:
    """The paper's toy function."""
    return x + 0.3 * torch.sin(2 * math.pi * x) + 0.3 * torch.sin(4 * math.pi * x)


def train(x: Tensor, y: Tensor, generator: torch.Generator, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """1-50-50-1 with ReLU, trained as anyone would."""
    model = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = torch.randint(len(x), (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return model, optimizer


def bands(seed: int = 0, steps: int = 2000) -> dict[str, Any]:
    """The data, and by structure the mean and the standard deviation of y over the range."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.empty(200, 1).uniform_(*_DATA, generator=generator)
    y = curve(x + 0.02 * torch.randn(x.shape, generator=generator))
    held_out, rest = (x[:50], y[:50]), (x[50:], y[50:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, optimizer = train(*rest, generator, steps)
    posterior = Posterior.from_optimizer(model, optimizer, n_data=len(rest[0]), likelihood="regression")
    grid, drawn = torch.linspace(*_RANGE, 241)[:, None], {}
    for title, gaussian in (
        ("AdamW's state alone", posterior),
        ("the same with the input side: posterior.with_inputs(x)", posterior.with_inputs(rest[0])),
    ):
        p = gaussian.tune(held_out, method="evidence").predict(grid)
        drawn[title] = p.mean.flatten().numpy(), p.stddev.flatten().numpy()
    return {"x": rest[0], "y": rest[1], "grid": grid, "drawn": drawn}


def picture(drawing: dict[str, Any]) -> Figure:
    """A panel for each structure: data, truth, mean, and bands of one and two standard deviations."""
    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    x = drawing["grid"].flatten().numpy()
    for axes, (title, (mean, std)) in zip(figure.subplots(1, 2, sharey=True), drawing["drawn"].items(), strict=True):
        for width in (2, 1):
            axes.fill_between(x, mean - width * std, mean + width * std, color="#0072B2", alpha=0.18, linewidth=0)
        axes.plot(x, curve(drawing["grid"]).flatten(), "--", color="#222222", linewidth=1, label="truth")
        axes.plot(x, mean, color="#0072B2", label="mean, ±1 and ±2 standard deviations")
        axes.plot(drawing["x"], drawing["y"], ".", color="#222222", markersize=3, label="training data")
        axes.set(title=title, xlabel="x", xlim=_RANGE, ylim=(-2, 3))
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    return figure


def run(file: Path, seed: int = 0) -> str:
    """Train, draw, write the picture; returns how much wider the bands are outside the data."""
    drawing = bands(seed)
    with replacing(file) as temporary:
        picture(drawing).savefig(temporary, format="png")
    x = drawing["grid"].flatten()
    outside = (x < _DATA[0]) | (x > _DATA[1])
    ratios = {title: std[outside].mean() / std[~outside].mean() for title, (_, std) in drawing["drawn"].items()}
    return "\n".join(f"{title}: the band is {r:.1f} times as wide outside the data" for title, r in ratios.items())
