"""Drift: false alarms of `ba.Monitor` and its delay until the alarm, beside windows of Kolmogorov–Smirnov and ADWIN.

    BAYESADAM_DATA=... python benchmarks/monitor.py [--quick] [--data mnist] [--picture FILE] [--out out/bench]

A LeNet is trained on eight classes, 20,000 images. All other images of these classes, of both splits, are the pool; the
network has never seen them. A stream is drawn from the pool at random and without replacement, so that its order is
exchangeable, exactly and given the pool. Its 2,000 held-out images are drawn likewise, and calibrate the posterior.

- no drift: 1,000 streams of 10,000 images. "fresh": the reference is 2,000 scores of other images of the pool, drawn
  for each stream, by one posterior. Reference and stream are then exchangeable, and the bound is a theorem. "held-out":
  the reference is the posterior's own, each of 20 posteriors on 50 streams. Its scores leave each image out of its own
  leverage, but share a temperature and medians, so that the bound is nearly but not exactly implied.
- delay: 750 to 1,250 images of the pool, then others: 4,000 shifted ones (`doubt_shifts.py`, six kinds at four
  strengths), 8,000 of which a share is of the two classes left out, or 4,000 whose noise grows from 0 to .3 little by
  little. The delay is the number of images from the change to the alarm, its median over 50 streams (ten of slow
  drift); where fewer than half had an alarm after the change there is none.
- rivals have the same reference and streams. Kolmogorov–Smirnov: every so many scores are compared with the reference,
  at the level α over the number of windows in 10,000 scores: it must know where the stream ends. ADWIN of river sees
  the p-values of scores, those of the reference first; at its default δ, and at the largest δ that had at most 1 %
  false alarms on 200 other streams without drift.
- cost: seconds of one core for a score.

The bets were chosen on made-up scores (normal ones whose mean or spread changes), but for one thing: those on 2 (1 − q)
were added after a first run of this benchmark, which was slow on gentle shifts.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kstwobign
from torch import Tensor, nn

import bayesadam as ba
from doubt_data import LEFT_OUT, NoData, load
from doubt_shifts import IMAGES, gaussian_noise, shifted
from harness import arguments, one_core, setting, write_results
from networks import lenet

Array = NDArray[np.float64]
# The number of the alarm's score, 1 for the first; None without.
Detector = Callable[[Array, Array], int | None]
ALARM, BATCH, SEEDS = 0.01, 128, itertools.count()
DEFAULT, DELTAS = 0.002, (0.9, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 5e-4, 1e-4, 1e-5, 1e-6)


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    train: int = 20000
    epochs: int = 4
    held_out: int = 2000
    stream: int = 10000
    streams: int = 1000
    posteriors: int = 20
    tuning: int = 200
    before: tuple[int, int] = (750, 1250)
    after: int = 4000
    mixed: int = 8000
    runs: int = 50
    slow: int = 10


QUICK = Sizes(300, 1, 100, 300, 6, 2, 4, (50, 60), 150, 200, 3, 2)


# --- scores ---------------------------------------------------------------------------------------------------------


class Scores:
    """The network, its pool, and novelties of images."""

    def __init__(self, data: str, sizes: Sizes, *, made_up: bool) -> None:
        parts = [load(data, split, made_up=made_up) for split in ("train", "test")]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        outside = (y[:, None] == torch.tensor(LEFT_OUT[data][0])).any(dim=1)
        classes = y[~outside].unique()
        self.draw, self.sizes = np.random.default_rng(0), sizes
        order = torch.from_numpy(self.draw.permutation(int((~outside).sum())))
        known, labels = x[~outside][order], torch.searchsorted(classes, y[~outside][order])
        self.outside, self.pool, self.labels = x[outside], known[sizes.train :], labels[sizes.train :]
        torch.manual_seed(0)
        self.model = lenet(len(classes))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        for _ in range(sizes.epochs):
            for rows in torch.randperm(sizes.train).split(BATCH):
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(known[rows]), labels[rows]).backward()
                self.optimizer.step()

    def calibrated(self) -> tuple[ba.Posterior, Array, NDArray[np.int64]]:
        """A posterior with held-out images of its own, the novelties of the pool, and what of that is left."""
        chosen = self.draw.permutation(len(self.pool))
        held_out, left = np.split(chosen, [self.sizes.held_out])
        posterior = ba.Posterior.from_optimizer(self.model, self.optimizer, self.sizes.train, batch_size=BATCH)
        data = self.pool[held_out], self.labels[held_out]
        posterior = ba.calibrate(posterior, data, likelihood="classification")
        return posterior, novelty(posterior, self.pool), left


def novelty(posterior: ba.Posterior, x: Tensor) -> Array:
    """Of images, by the deployed network."""
    served = ba.deploy(posterior)
    with torch.no_grad():
        found: Array = torch.cat([served(part).novelty for part in x.split(1000)]).double().numpy()
    return found


# --- detectors ------------------------------------------------------------------------------------------------------


def ours(reference: Array, stream: Array) -> int | None:
    """`ba.Monitor`."""
    monitor = ba.Monitor(reference=reference, alarm=ALARM, seed=next(SEEDS))
    monitor.update(stream)
    return monitor.alarmed_at


def windows(size: int, horizon: int) -> Detector:
    """Kolmogorov–Smirnov's test of one window after another, at α over their number."""
    limit = kstwobign.isf(ALARM / (horizon / size))

    def detect(reference: Array, stream: Array) -> int | None:
        ordered, n = np.sort(reference), len(reference)
        scaled = limit * math.sqrt((n + size) / (n * size))
        for end in range(size, len(stream) + 1, size):
            window = np.sort(stream[end - size : end])
            both = np.concatenate([ordered, window])
            shares = (np.searchsorted(each, both, side="right") / len(each) for each in (ordered, window))
            if np.abs(np.subtract(*shares)).max() > scaled:
                return end
        return None

    return detect


def adwin(kind: Any, delta: float) -> Detector:
    """river's ADWIN on p-values; alarms during the reference do not count."""

    def detect(reference: Array, stream: Array) -> int | None:
        ordered = np.sort(reference)
        first = np.random.default_rng(0).permutation(reference)
        p = 1 - np.searchsorted(ordered, np.concatenate([first, stream])) / (len(ordered) + 1)
        found = kind(delta=delta)
        for number, value in enumerate(p.tolist(), start=1 - len(first)):
            found.update(value)
            if number > 0 and found.drift_detected:
                return number
        return None

    return detect


def rivals(streams: Iterable[tuple[Array, Array]], horizon: int) -> dict[str, Detector]:
    """All detectors, ADWIN's second δ by the false alarms on these streams."""
    found: dict[str, Detector] = {"ours": ours}
    found |= {f"KS, windows of {size}": windows(size, horizon) for size in (100, 500)}
    try:
        kind = importlib.import_module("river.drift").ADWIN
    except ImportError as error:
        print(f"ADWIN is left out: river cannot be imported ({error})")
        return found
    listed = list(streams)
    for delta in DELTAS:
        detector = adwin(kind, delta)
        share = np.mean([detector(*each) is not None for each in listed])
        print(f"ADWIN at δ = {delta:g}: {share:.1%} of the streams of tuning have a false alarm", flush=True)
        if share <= ALARM:
            break
    return found | {"ADWIN, default": adwin(kind, DEFAULT), f"ADWIN, δ = {delta:g}": detector}


# --- false alarms and delays ----------------------------------------------------------------------------------------


def quiet(scores: Array, sizes: Sizes, draw: np.random.Generator, n: int) -> Iterable[tuple[Array, Array]]:
    """Streams without drift, each with a fresh reference."""
    for _ in range(n):
        order = draw.permutation(len(scores))[: sizes.held_out + sizes.stream]
        yield scores[order[: sizes.held_out]], scores[order[sizes.held_out :]]


def share_of_alarms(detectors: Mapping[str, Detector], streams: Iterable[tuple[Array, Array]]) -> dict[str, float]:
    """The share of streams in which each detector has an alarm."""
    hits: dict[str, list[bool]] = {name: [] for name in detectors}
    for each in streams:
        for name, detector in detectors.items():
            hits[name].append(detector(*each) is not None)
    return {name: float(np.mean(found)) for name, found in hits.items()}


def changes(source: Scores, posterior: ba.Posterior, left: NDArray[np.int64]) -> dict[str, list[Array]]:
    """By situation, what follows the change: a list of scores for every stream."""
    sizes, draw = source.sizes, source.draw
    images = source.pool[torch.from_numpy(draw.choice(left, sizes.after, replace=False))]
    found = {}
    for kind, copies in shifted(images).items():
        for strength, x in zip(IMAGES[kind][1], copies, strict=True):
            scores = novelty(posterior, x)
            found[f"{kind} {strength:g}"] = [draw.permutation(scores) for _ in range(sizes.runs)]
    known, new = novelty(posterior, source.pool)[left], draw.permutation(novelty(posterior, source.outside))
    for share in (0.01, 0.05, 0.2):
        found[f"new classes, {share:.0%}"] = [
            np.where(
                draw.random(sizes.mixed) < share, draw.choice(new, sizes.mixed), draw.permutation(known)[: sizes.mixed]
            )
            for _ in range(sizes.runs)
        ]
    growing = torch.linspace(0, 0.3, sizes.after)[:, None, None, None]
    found["slow drift: noise 0 to .3"] = []
    for run in range(sizes.slow):
        x = images[torch.from_numpy(draw.permutation(sizes.after))]
        noisy = gaussian_noise(x, growing, torch.Generator().manual_seed(run))  # type: ignore[arg-type]
        found["slow drift: noise 0 to .3"].append(novelty(posterior, noisy))
    return found


def delays(detectors: Mapping[str, Detector], source: Scores) -> dict[str, dict[str, Any]]:
    """The median delay of each detector after each change, and the share of streams with an alarm after it."""
    posterior, pool, left = source.calibrated()
    assert posterior.calibration is not None
    reference = posterior.calibration.guarantee["novelty"].double().numpy()
    found: dict[str, dict[str, Any]] = {}
    for title, ends in changes(source, posterior, left).items():
        found[title] = {}
        waits: dict[str, list[float]] = {name: [] for name in detectors}
        for after in ends:
            before = pool[source.draw.choice(left, int(source.draw.integers(*source.sizes.before)), replace=False)]
            for name, detector in detectors.items():
                at = detector(reference, np.concatenate([before, after]))
                # One that was false is not counted.
                if at is None or at > len(before):
                    waits[name].append(math.inf if at is None else at - len(before))
        for name, each in waits.items():
            median = float(np.median(each)) if each else math.inf
            caught = float(np.mean(np.isfinite(each))) if each else 0.0
            found[title][name] = {"delay": median if median < math.inf else None, "caught": round(caught, 3)}
        shown = ", ".join(f"{name} {one['delay'] or '–'}" for name, one in found[title].items())
        print(f"{title}: {shown}", flush=True)
    return found


# --- cost and report ------------------------------------------------------------------------------------------------


def costs(*, quick: bool) -> dict[str, float]:
    """Microseconds of one core for a score."""
    draw, many = np.random.default_rng(0), 2 if quick else 100
    reference, found = draw.normal(size=5000), {}
    slices = np.arange(1000)
    for title, size, names in (
        ("one stream, one score at a time", 1, None),
        ("one stream, batches of 100", 100, None),
        ("one stream, batches of 10,000", 10000, None),
        ("1,000 slices, batches of 1,000", 1000, slices),
    ):
        monitor = ba.Monitor(reference=reference, slices=len(slices) if names is not None else 0)
        rounds = max(many * 100 // size, many // 10) + 1
        batches = draw.normal(size=(rounds, size))
        began = time.process_time()
        for batch in batches:
            monitor.update(batch, slices=names)
        found[title] = round(1e6 * (time.process_time() - began) / batches.size, 2)
        print(f"{title}: {found[title]} µs a score", flush=True)
    return found


def table(results: Mapping[str, Any]) -> str:
    """Markdown, the strengths of a shift in one cell, gentle first; "–" where fewer than half had an alarm."""
    names = list(results["false alarms"]["fresh reference"])
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for title, shares in results["false alarms"].items():
        lines.append(f"| false alarms, {title} | " + " | ".join(f"{100 * shares[name]:.1f} %" for name in names) + " |")
    together = {kind: [f"{kind} {strength:g}" for strength in IMAGES[kind][1]] for kind in IMAGES}
    single = {title: [title] for title in results["delay"] if not title.startswith(tuple(IMAGES))}
    for title, rows in (together | single).items():
        cells = []
        for name in names:
            waits = [results["delay"][row][name]["delay"] for row in rows]
            cells.append(" / ".join("–" if wait is None else f"{wait:,.0f}" for wait in waits))
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(source: Scores, path: Path) -> None:
    """A stream of which a twentieth is of new classes from the middle on."""
    import matplotlib as mpl

    mpl.use("Agg")
    posterior, pool, left = source.calibrated()
    half = source.sizes.stream // 2
    known, new = pool[left[: 2 * half]], novelty(posterior, source.outside)
    mixed = np.where(source.draw.random(half) < 0.05, source.draw.choice(new, half), known[half:])
    monitor = ba.Monitor(posterior, alarm=ALARM)
    for batch in np.array_split(np.concatenate([known[:half], mixed]), 100):
        monitor.update(batch)
    ax = monitor.plot()
    ax.axvline(half, color="#767676", linewidth=1, linestyle=":")
    ax.text(0.98 * half, 0.6, "5 % new classes →", transform=ax.get_xaxis_transform(), ha="right", color="#767676")
    ax.figure.savefig(path, dpi=150)
    print(monitor)


def main() -> None:
    """Run it."""
    parser = arguments(__doc__, quick="made-up images, few and short streams")
    parser.add_argument("--data", default="mnist", choices=("mnist", "fashion-mnist"))
    parser.add_argument("--picture", type=Path, help="draw one stream into this file, and no more")
    options = parser.parse_args()
    one_core()
    sizes = QUICK if options.quick else Sizes()
    try:
        source = Scores(options.data, sizes, made_up=options.quick)
    except NoData as error:
        sys.exit(str(error))
    print(f"{len(source.pool):,} images in the pool", flush=True)
    if options.picture:
        picture(source, options.picture)
        return
    _, pool, left = source.calibrated()
    detectors = rivals(quiet(pool[left], sizes, source.draw, sizes.tuning), sizes.stream)
    alarms = {"fresh reference": share_of_alarms(detectors, quiet(pool[left], sizes, source.draw, sizes.streams))}
    print(alarms, flush=True)

    def as_used() -> Iterable[tuple[Array, Array]]:
        for _ in range(sizes.posteriors):
            posterior, pool, left = source.calibrated()
            assert posterior.calibration is not None
            reference = posterior.calibration.guarantee["novelty"].double().numpy()
            for _ in range(sizes.streams // sizes.posteriors):
                yield reference, pool[source.draw.choice(left, sizes.stream, replace=False)]

    alarms["held-out reference"] = share_of_alarms(detectors, as_used())
    print(alarms, flush=True)
    results = {
        "settings": {**setting(), "data": options.data, "alarm": ALARM, **vars(sizes)},
        "false alarms": alarms,
        "delay": delays(detectors, source),
        "microseconds": costs(quick=options.quick),
    }
    write_results(options.out, "monitor", results)
    text = table(results)
    (options.out / "monitor.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    print(f"false alarms of ours at {ALARM:.0%}: {alarms['fresh reference']['ours']:.2%}")


if __name__ == "__main__":
    main()
