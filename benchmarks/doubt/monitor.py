"""Drift: false alarms of `ba.Monitor` and its delay until the alarm, beside windows of Kolmogorov–Smirnov and ADWIN.

    BAYESADAM_DATA=... python -m benchmarks.doubt.monitor [--quick] [--data mnist] [--out out/bench]

A LeNet is trained on eight classes, 20,000 images. All other images of these classes, of both splits, are the pool; a
stream is drawn from it at random and without replacement, so that its order is exchangeable. Its 2,000 held-out images
are drawn likewise, and calibrate the network.

- no drift: 1,000 streams of 10,000 images, for each a reference of 2,000 scores of other images of the pool: they are
  exchangeable, and the bound is a theorem. "As used" is `ba.Monitor(net)` of 20 calibrated networks, on 50 streams.
- delay: 750 to 1,250 images of the pool, then others: 4,000 shifted ones (six kinds at four strengths), 8,000 of which
  1, 5 or 20 % are of the two classes left out, or noise that grows from 0 to .3. Fifty streams each; the median wait
  where at least half had an alarm.

The rivals see the same scores. Kolmogorov–Smirnov: the test of one window of 100 or 500 after another, at α over their
number. ADWIN: river's, on p-values, with its default δ, and with the largest of a list whose streams of tuning have a
false alarm in 1 % at most.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kstwobign
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import arguments, one_core, replaced, setting, write_results
from benchmarks.common.inputs import LEFT_OUT, NoData, load
from benchmarks.common.networks import lenet, train_classifier
from benchmarks.common.shifts import IMAGES, gaussian_noise, shifted

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
    calibrations: int = 20
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
        outside = torch.isin(y, torch.tensor(LEFT_OUT[data][0]))
        classes = y[~outside].unique()
        self.draw, self.sizes = np.random.default_rng(0), sizes
        order = torch.from_numpy(self.draw.permutation(int((~outside).sum())))
        known, labels = x[~outside][order], torch.searchsorted(classes, y[~outside][order])
        self.outside, self.pool, self.labels = x[outside], known[sizes.train :], labels[sizes.train :]
        torch.manual_seed(0)
        self.model = lenet(len(classes))
        train_classifier(self.model, known[: sizes.train], labels[: sizes.train], sizes.epochs, BATCH)

    def calibrated(self) -> tuple[nn.Module, Array]:
        """A network with held-out images of its own, and the novelties of the rest of the pool."""
        held_out, left = np.split(self.draw.permutation(len(self.pool)), [self.sizes.held_out])
        data = self.pool[held_out], self.labels[held_out]
        net = ba.calibrate(self.model, data, likelihood="classification")
        return net, novelty(net, self.pool[left])


@torch.no_grad()
def novelty(net: nn.Module, x: Tensor) -> Array:
    found: Array = torch.cat([net(part).novelty for part in x.split(1000)]).double().numpy()
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
            shares = (np.searchsorted(part, both, side="right") / len(part) for part in (ordered, window))
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
        detector = kind(delta=delta)
        for number, value in enumerate(p.tolist(), start=1 - len(first)):
            detector.update(value)
            if number > 0 and detector.drift_detected:
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
        if np.mean([detector(*stream) is not None for stream in listed]) <= ALARM:
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
    for stream in streams:
        for name, detector in detectors.items():
            hits[name].append(detector(*stream) is not None)
    return {name: float(np.mean(alarms)) for name, alarms in hits.items()}


def share_as_used(source: Scores) -> float:
    """The share of streams without drift in which the monitor of a calibrated network has an alarm."""
    sizes, alarms = source.sizes, []
    for _ in range(sizes.calibrations):
        net, scores = source.calibrated()
        for _ in range(sizes.streams // sizes.calibrations):
            monitor = ba.Monitor(net, alarm=ALARM, seed=next(SEEDS))
            alarms.append(monitor.update(source.draw.choice(scores, sizes.stream, replace=False)))
    return float(np.mean(alarms))


def changes(source: Scores, net: nn.Module, known: Array) -> dict[str, list[Array]]:
    """By situation, what follows the change: a list of scores for every stream."""
    sizes, draw = source.sizes, source.draw
    images = source.pool[torch.from_numpy(draw.choice(len(source.pool), sizes.after, replace=False))]
    found = {}
    for kind, copies in shifted(images).items():
        for strength, x in zip(IMAGES[kind][1], copies, strict=True):
            scores = novelty(net, x)
            found[f"{kind} {strength:g}"] = [draw.permutation(scores) for _ in range(sizes.runs)]
    new = draw.permutation(novelty(net, source.outside))
    for share in (0.01, 0.05, 0.2):
        found[f"new classes, {share:.0%}"] = [
            np.where(draw.random(sizes.mixed) < share, draw.choice(new, sizes.mixed), draw.choice(known, sizes.mixed))
            for _ in range(sizes.runs)
        ]
    growing: Any = torch.linspace(0, 0.3, sizes.after)[:, None, None, None]
    found["slow drift: noise 0 to .3"] = [
        novelty(net, gaussian_noise(images[order], growing, torch.Generator().manual_seed(run)))
        for run in range(sizes.slow)
        for order in (torch.from_numpy(draw.permutation(sizes.after)),)
    ]
    return found


def delays(detectors: Mapping[str, Detector], source: Scores) -> dict[str, dict[str, float | None]]:
    """The median delay of each detector after each change; None where fewer than half had an alarm after it."""
    net, scores = source.calibrated()
    reference, known = np.split(scores, [source.sizes.held_out])
    found: dict[str, dict[str, float | None]] = {}
    for title, ends in changes(source, net, known).items():
        waits: dict[str, list[float]] = {name: [] for name in detectors}
        for after in ends:
            before = source.draw.choice(known, int(source.draw.integers(*source.sizes.before)), replace=False)
            for name, detector in detectors.items():
                at = detector(reference, np.concatenate([before, after]))
                # One that was false is not counted.
                if at is None or at > len(before):
                    waits[name].append(math.inf if at is None else at - len(before))
        medians = {name: float(np.median(wait)) if wait else math.inf for name, wait in waits.items()}
        found[title] = {name: median if median < math.inf else None for name, median in medians.items()}
        print(f"{title}: " + ", ".join(f"{name} {wait or '–'}" for name, wait in found[title].items()), flush=True)
    return found


# --- cost and report ------------------------------------------------------------------------------------------------


def costs(*, quick: bool) -> dict[str, float]:
    """Microseconds of one core for a score."""
    draw, found = np.random.default_rng(0), {}
    reference = draw.normal(size=5000)
    for size in (1, 100, 10000):
        monitor = ba.Monitor(reference=reference, alarm=ALARM)
        batches = draw.normal(size=(max(200 if quick else 10000 // size, 10), size))
        began = time.process_time()
        for batch in batches:
            monitor.update(batch)
        found[f"batches of {size}"] = round(1e6 * (time.process_time() - began) / batches.size, 2)
    return found


def table(results: Mapping[str, Any]) -> str:
    """Markdown, the strengths of a shift in one cell, gentle first; "–" where fewer than half had an alarm."""
    names = [name for name in results["false alarms"] if name != "ours, as used"]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines.append("| false alarms | " + " | ".join(f"{results['false alarms'][name]:.1%}" for name in names) + " |")
    together = {kind: [f"{kind} {strength:g}" for strength in strengths] for kind, (_, strengths) in IMAGES.items()}
    together |= {title: [title] for title in results["delay"] if not title.startswith(tuple(IMAGES))}
    for title, rows in together.items():
        waits = {name: [results["delay"][row][name] for row in rows] for name in names}
        cells = [" / ".join("–" if wait is None else f"{wait:,.0f}" for wait in waits[name]) for name in names]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run it."""
    parser = arguments(__doc__, quick="made-up images, few and short streams")
    parser.add_argument("--data", default="mnist", choices=("mnist", "fashion-mnist"))
    options = parser.parse_args()
    one_core()
    sizes = QUICK if options.quick else Sizes()
    try:
        source = Scores(options.data, sizes, made_up=options.quick)
    except NoData as error:
        sys.exit(str(error))
    _, scores = source.calibrated()
    detectors = rivals(quiet(scores, sizes, source.draw, sizes.tuning), sizes.stream)
    alarms = share_of_alarms(detectors, quiet(scores, sizes, source.draw, sizes.streams))
    alarms["ours, as used"] = share_as_used(source)
    print(alarms, flush=True)
    results = {
        "settings": {**setting(), "data": options.data, "alarm": ALARM, **vars(sizes)},
        "false alarms": alarms,
        "delay": delays(detectors, source),
        "microseconds": costs(quick=options.quick),
    }
    text = table(results)
    replaced(options.out / "monitor.md", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    print(text)
    write_results(options.out, "monitor", results)
    print(f"false alarms of ours at {ALARM:.0%}: {alarms['ours']:.2%}, as used {alarms['ours, as used']:.2%}")


if __name__ == "__main__":
    main()
