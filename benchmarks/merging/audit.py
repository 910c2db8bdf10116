"""Audit: labels that were flipped are found, beside the loss and cleanlab's scores.

    python -m benchmarks.merging.audit [--quick] [--data mnist fashion-mnist] [--networks mlp lenet]
        [--lengths few long] [--seeds 1000 1001 1002 1003 1004] [--images N] [--device cuda] [--out out/bench]

Stopped, it resumes: each cell is a file in out/bench/audit, so that several processes may take a seed each, and one
with all seeds may come after them.

A tenth of the labels is another class, drawn evenly. 784-400-400-10 and LeNet, Adam at 0.001 in batches of 128, no
weight decay, a cosine to 0; "few" epochs (4) and "long" (30, LeNet 60); "fitted" is the share of flipped labels that
the network answers. AUROC and average precision of telling flipped labels from the others. Rows in one training: the
loss; cleanlab's two scores of the network's probabilities by their published equations, self-confidence p_y and the
normalised margin (p_y − max p_k + 1)/2; ours, diagonal from Adam's state and Kronecker from a recorder. Rows that need
more: cleanlab's scores by cross-validation, three more trainings of two thirds each; the loss averaged over all epochs.
The settings were chosen on seeds 0 to 2 of up to 20,000 MNIST images.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import scores
from bayesadam.auditing import audit
from benchmarks.common.harness import (
    Cell,
    Target,
    arguments,
    at_least,
    number,
    read_cell,
    setting,
    write_cell,
    write_results,
)
from benchmarks.common.inputs import NoData, Pixels, folder, load
from benchmarks.common.training import network_of

EPOCHS = {"few": {"mlp": 4, "lenet": 4}, "long": {"mlp": 30, "lenet": 60}}
BATCH, CHUNK, RATE, KEEP, FOLDS, FLIPPED = 128, 500, 1e-3, 50, 3, 0.1
OURS = ("ours, diagonal", "ours, Kronecker")
PRIOR = 1.0


# --- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trained:
    """A network, what trained it, and the loss of every example averaged over the ends of all epochs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    recorder: ba.Recorder
    average_loss: Tensor


def train(network: str, data: Pixels, *, seed: int, epochs: int) -> Trained:
    """Adam on all images, which stay on the device; smaller last batches are left out."""
    torch.manual_seed(seed)
    x, y = data
    model = network_of(network, 10).to(x.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    batch = min(BATCH, len(x))
    steps = len(x) // batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    with ba.Recorder(optimizer, keep=KEEP) as recorder:
        for _ in range(epochs):
            for rows in torch.randperm(len(x), device=x.device)[: steps * batch].split(batch):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                schedule.step()
            total += F.cross_entropy(logits_of(model, x), y, reduction="none")
    optimizer.zero_grad()
    model.eval()
    return Trained(model, optimizer, recorder, total / epochs)


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(10 * CHUNK)]).double()


def images(name: str, split: str, *, quick: bool) -> tuple[Pixels, str]:
    """A split of a data set, and which it is: the test pair where the training pair is not there."""
    made_up = quick and folder() is None
    try:
        return load(name, split, made_up=made_up), "made up" if made_up else split
    except NoData:
        if split == "test":
            raise
        return load(name, "test", made_up=made_up), "test"


# --- flipped labels -------------------------------------------------------------------------------------------------


def flipped(data: Pixels, count: int | None, seed: int, device: str) -> tuple[Pixels, Tensor]:
    """Some images with a tenth of their labels changed, and which."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(data[0]), generator=generator)[:count]
    x, y = data[0][rows], data[1][rows]
    wrong = torch.rand(len(y), generator=generator) < FLIPPED
    other = (y + torch.randint(1, 10, y.shape, generator=generator)) % 10
    return (x.to(device), torch.where(wrong, other, y).to(device)), wrong


def self_confidence(probs: Tensor, y: Tensor) -> Tensor:
    """1 − p_y."""
    return 1 - probs.gather(1, y[:, None])[:, 0]


def normalised_margin(probs: Tensor, y: Tensor) -> Tensor:
    """1 − (p_y − max_{k≠y} p_k + 1)/2."""
    own = y[:, None]
    return 1 - (probs.gather(1, own)[:, 0] - probs.scatter(1, own, -1.0).amax(dim=1) + 1) / 2


def cross_validated(network: str, data: Pixels, *, seed: int, epochs: int) -> Tensor:
    """The probabilities of every image by a network that was trained on the other folds."""
    x, y = data
    fold = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device) % FOLDS
    probs = torch.zeros(len(x), 10, dtype=torch.float64, device=x.device)
    for held_out in range(FOLDS):
        rest = fold != held_out
        found = train(network, (x[rest], y[rest]), seed=seed + 1 + held_out, epochs=epochs)
        probs[~rest] = logits_of(found.model, x[~rest]).softmax(dim=1)
    return probs


def detection(score: Tensor, wrong: Tensor) -> dict[str, float]:
    """AUROC and average precision of finding the flipped labels."""
    score = score.double().cpu()
    ap = float(average_precision_score(wrong.numpy(), score.numpy()))
    return {"auroc": scores.auroc(score[~wrong], score[wrong]), "ap": ap}


def labels_cell(name: str, network: str, length: str, seed: int, options: Any) -> Cell:
    data, split = images(name, "train", quick=options.quick)
    (x, y), wrong = flipped(data, options.images, seed, options.device)
    how = {"epochs": 1 if options.quick else EPOCHS[length][network]}
    began = time.perf_counter()
    trained = train(network, (x, y), seed=seed, **how)
    seconds = {"training": time.perf_counter() - began}
    logits = logits_of(trained.model, x)
    probs = logits.softmax(dim=1)
    rows = {
        "loss": F.cross_entropy(logits, y, reduction="none"),
        "cleanlab self-confidence, in sample": self_confidence(probs, y),
        "cleanlab normalised margin, in sample": normalised_margin(probs, y),
        "loss averaged over the epochs": trained.average_loss,
    }
    given: Any = {"batch_size": min(BATCH, len(x)), "power": 1.0, "prior_precision": PRIOR}
    for title, richer in zip(OURS, ({}, {"structure": "kronecker", "recorder": trained.recorder}), strict=True):
        posterior = ba.Posterior.from_optimizer(trained.model, trained.optimizer, len(x), **given, **richer)
        began = time.perf_counter()
        found = audit(posterior, list(zip(x.split(CHUNK), y.split(CHUNK), strict=True)), likelihood="classification")
        seconds[title] = time.perf_counter() - began
        rows[title] = found.suspicion
    began = time.perf_counter()
    crossed = cross_validated(network, (x, y), seed=seed, **how)
    seconds["cross-validation"] = time.perf_counter() - began
    rows["cleanlab self-confidence, 3-fold"] = self_confidence(crossed, y)
    rows["cleanlab normalised margin, 3-fold"] = normalised_margin(crossed, y)
    answered = (logits.argmax(dim=1) == y).cpu()
    return {
        "split": split,
        "n": len(x),
        "fitted": float(answered[wrong].double().mean()),
        "accuracy": float(answered[~wrong].double().mean()),
        "seconds": seconds,
        "rows": {title: detection(score, wrong) for title, score in rows.items()},
    }


# --- tables ---------------------------------------------------------------------------------------------------------


def labels_table(cells: Mapping[str, Sequence[Cell]]) -> str:
    """Markdown: AUROC / AP, the mean over seeds and its standard error."""
    titles = list(dict.fromkeys(title for group in cells.values() for cell in group for title in cell["rows"]))
    fitted = (number([cell["fitted"] for cell in group], 2) for group in cells.values())
    lines = ["| | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    lines.append("| share of flipped labels fitted | " + " | ".join(fitted) + " |")
    for title in titles:
        found = (
            " / ".join(number([cell["rows"][title][score] for cell in group]) for score in ("auroc", "ap"))
            for group in cells.values()
        )
        lines.append(f"| {title} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def labels_targets(cells: Mapping[str, Sequence[Cell]]) -> list[Target]:
    """Memorised are the groups in which more than half of the flipped labels are answered."""
    targets = []
    for group, found in cells.items():
        memorised = statistics.fmean(cell["fitted"] for cell in found) > 0.5
        for ours in OURS:
            own = statistics.fmean(cell["rows"][ours]["auroc"] for cell in found)
            if memorised:
                targets += at_least(f"{group}, {ours}: AUROC", 0.955, own)
            else:
                loss = statistics.fmean(cell["rows"]["loss"]["auroc"] for cell in found)
                targets += at_least(f"{group}, {ours}: AUROC less the loss's", -0.002, own - loss)
    return targets


def main() -> None:
    parser = arguments(__doc__, quick="a few made-up images, one epoch", device=True)
    parser.add_argument("--data", nargs="+", choices=("mnist", "fashion-mnist"), default=("mnist", "fashion-mnist"))
    parser.add_argument("--networks", nargs="+", choices=("mlp", "lenet"), default=("mlp", "lenet"))
    parser.add_argument("--lengths", nargs="+", choices=tuple(EPOCHS), default=tuple(EPOCHS))
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="1000 to 1004 where not given")
    parser.add_argument("--images", type=int, default=None, help="images for the labels; all where not given")
    options = parser.parse_args()
    seeds = options.seeds or ([1000] if options.quick else list(range(1000, 1005)))
    options.images = 400 if options.quick else options.images
    groups: dict[str, list[Cell]] = {}
    for name, network, length in product(options.data, options.networks, options.lengths):
        for seed in seeds:
            about = {"data": name, "network": network, "length": length, "seed": seed, "images": options.images}
            path = options.out / "audit" / f"{name}-{network}-{length}-{seed}.json"
            cell = read_cell(path, about)
            if cell is None:
                cell = {**labels_cell(name, network, length, seed, options), "settings": about}
                write_cell(path, cell)
                print(f"{path.stem}: done", flush=True)
            groups.setdefault(f"{name}, {network}, {length}", []).append(cell)
    print(labels_table(groups))
    targets = labels_targets(groups)
    results = {"setting": setting() | {"device": options.device}, "seeds": seeds, "labels": groups}
    write_results(options.out, "audit", results | {"targets": [vars(target) for target in targets]})
    print(f"{sum(target.met for target in targets)} of {len(targets)} targets met")


if __name__ == "__main__":
    main()
