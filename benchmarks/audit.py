"""Audit: labels that were flipped are found, what leaving an example out does is ranked, suspects are put on a page.

    python benchmarks/audit.py [--quick] [--only labels refits page] [--data mnist fashion-mnist] [--networks mlp lenet]
        [--lengths few long] [--seeds 1000 1001 1002 1003 1004] [--images N] [--rate cosine] [--device cuda] [--out
        out/bench]

Stopped, it resumes: each cell is a file in out/bench/audit, so that several processes may take a seed each, and one
with all seeds may come after them. The images lie below $BAYESADAM_DATA as gzipped IDX files; where the training pair
of a set is not there its test pair stands for it, and the results say so. With --quick images are made up where that is
not set.

labels: a tenth of the labels is another class, drawn evenly. 784-400-400-10 and LeNet, Adam at 0.001 in batches of 128,
no weight decay, a cosine to 0 (--rate constant: none); "few" epochs (4) and "long" (30, LeNet 60); "fitted" is the
share of flipped labels that the network answers. AUROC and average precision of telling flipped labels from the others.
Rows in one training: the loss; cleanlab's two scores of the network's probabilities by their published equations,
self-confidence p_y and the normalised margin (p_y − max p_k + 1)/2; ours, diagonal from Adam's state and Kronecker from
a recorder, and beside it what it could have been, the z-scores −d/√Var[d] and −m/√Var[d], m = f_y − log Σ_{k≠y} exp
f_k, and influence. Rows that need more: cleanlab's scores by cross-validation, three more trainings of two thirds each;
the loss averaged over all epochs.

refits: 196-30-10, of tanh and of ReLU units, on 1,000 images of 14 × 14, a tenth of their labels flipped, trained with
all of them and 200 times without one, from the same weights and by the same batches, 100 epochs at a prior precision of
1. With kinks in the loss, and the longer the more, what leaving one out does is partly chance: ReLU is the harder case.
Spearman's correlation of |Δf|, the change of the example's own logits, with our influence, the loss and |e|; "size" is
the median of ours over the true one.

page: LeNet on the MNIST training set, 10 epochs; the twenty most suspect labels of the test set,
out/bench/audit/mnist-test.html.

The settings were chosen on seeds 0 to 2 of up to 20,000 MNIST images.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

import bayesadam as ba
from audit_refits import batches, posteriors, refits, spearman
from bayesadam import scores
from bayesadam.auditing import Audit, audit
from doubt_data import NoData, Pixels, folder, load
from doubt_networks import network_of
from harness import (
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

PARTS = ("labels", "refits", "page")
EPOCHS = {"few": {"mlp": 4, "lenet": 4}, "long": {"mlp": 30, "lenet": 60}}
BATCH, CHUNK, RATE, KEEP, FOLDS, FLIPPED = 128, 500, 1e-3, 50, 3, 0.1
OURS = ("ours, diagonal", "ours, Kronecker")
PRIOR = 1.0
UNITS: Mapping[str, type[nn.Module]] = {"tanh": nn.Tanh, "ReLU": nn.ReLU}


@dataclass(frozen=True)
class Sizes:
    """How much work: images (None: all), epochs over those above, and the refits' images, number and epochs."""

    images: int | None = None
    epochs: int | None = None
    refit_images: int = 1000
    refit_count: int = 200
    refit_epochs: int = 100


QUICK = Sizes(images=400, epochs=1, refit_images=100, refit_count=6, refit_epochs=3)


# --- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trained:
    """A network, what trained it, and the loss of every example averaged over the ends of all epochs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    recorder: ba.Recorder
    average_loss: Tensor


def train(network: str, data: Pixels, *, seed: int, epochs: int, cosine: bool) -> Trained:
    """Adam on all images, which stay on the device; smaller last batches are left out."""
    torch.manual_seed(seed)
    x, y = data
    model = network_of(network, 10).to(x.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    batch = min(BATCH, len(x))
    steps = len(x) // batch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    if cosine:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)  # type: ignore[assignment]
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


def cross_validated(network: str, data: Pixels, *, seed: int, epochs: int, cosine: bool) -> Tensor:
    """The probabilities of every image by a network that was trained on the other folds."""
    x, y = data
    fold = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device) % FOLDS
    probs = torch.zeros(len(x), 10, dtype=torch.float64, device=x.device)
    for held_out in range(FOLDS):
        rest = fold != held_out
        found = train(network, (x[rest], y[rest]), seed=seed + 1 + held_out, epochs=epochs, cosine=cosine)
        probs[~rest] = logits_of(found.model, x[~rest]).softmax(dim=1)
    return probs


def alternatives(found: Audit, logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What suspicion s = −d/Var[d]^¼ could have been: Var[d]^½ is (d/s)²."""
    own = y[:, None]
    others = logits.scatter(1, own, -torch.inf)
    difference = logits.gather(1, own)[:, 0] - others.amax(dim=1)
    margin = logits.gather(1, own)[:, 0] - others.logsumexp(dim=1)
    root = (difference / found.suspicion.double()).square()
    return {"−d/√Var": -difference / root, "−m/√Var": -margin / root, "influence": found.influence}


def detection(score: Tensor, wrong: Tensor) -> dict[str, float]:
    """AUROC and average precision of finding the flipped labels."""
    score = score.double().cpu()
    ap = float(average_precision_score(wrong.numpy(), score.numpy()))
    return {"auroc": scores.auroc(score[~wrong], score[wrong]), "ap": ap}


def labels_cell(name: str, network: str, length: str, seed: int, sizes: Sizes, options: Any) -> Cell:
    data, split = images(name, "train", quick=options.quick)
    (x, y), wrong = flipped(data, sizes.images, seed, options.device)
    how = {"epochs": sizes.epochs or EPOCHS[length][network], "cosine": options.rate == "cosine"}
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
        found = audit(posterior, batches((x, y), CHUNK), likelihood="classification")
        seconds[title] = time.perf_counter() - began
        rows[title] = found.suspicion
        own = alternatives(found, logits.cpu(), y.cpu())
        rows |= {f"{title}: {other}": score for other, score in own.items()}
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


# --- refits ---------------------------------------------------------------------------------------------------------


def refits_cell(units: str, seed: int, sizes: Sizes, options: Any) -> Cell:
    data, _ = images("mnist", "train", quick=options.quick)
    (x, y), _ = flipped(data, sizes.refit_images, seed, options.device)
    x = F.avg_pool2d(x, 2).flatten(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(196, 30), UNITS[units](), nn.Linear(30, 10)).to(x.device)
    began = time.perf_counter()
    found = refits(model, (x, y), count=sizes.refit_count, epochs=sizes.refit_epochs, prior_precision=PRIOR, seed=seed)
    seconds, rows = time.perf_counter() - began, found.left_out
    true = torch.linalg.vector_norm(found.change, dim=1).cpu()
    logits = logits_of(model, x[rows])
    error = logits.softmax(dim=1) - F.one_hot(y[rows], 10)
    guesses = {
        "loss": F.cross_entropy(logits, y[rows], reduction="none"),
        "|e|": torch.linalg.vector_norm(error, dim=1),
    }
    sizes_of = {}
    for title, posterior in posteriors(found, (x, y), PRIOR).items():
        influence = audit(posterior, (x[rows], y[rows]), likelihood="classification").influence
        guesses[f"ours, {title}"] = influence
        sizes_of[f"ours, {title}"] = float((influence / true).median())
    ranked = {title: spearman(guess.cpu(), true) for title, guess in guesses.items()}
    return {"spearman": ranked, "size": sizes_of, "seconds": seconds}


# --- the page -------------------------------------------------------------------------------------------------------


def page_cell(seed: int, sizes: Sizes, options: Any, path: Path) -> Cell:
    (x, y), _ = images("mnist", "train", quick=options.quick)
    (test_x, test_y), _ = images("mnist", "test", quick=options.quick)
    x, y = (part[: sizes.images].to(options.device) for part in (x, y))
    test_x, test_y = test_x[: sizes.images], test_y[: sizes.images]
    trained = train("lenet", (x, y), seed=seed, epochs=sizes.epochs or 10, cosine=True)
    posterior = ba.Posterior.from_recorder(
        trained.model, trained.recorder, len(x), batch_size=min(BATCH, len(x)), prior_precision=PRIOR
    )
    found = audit(posterior, batches((test_x, test_y), CHUNK), likelihood="classification")
    path.parent.mkdir(parents=True, exist_ok=True)
    found.report(path, inputs=test_x, n=20)
    return {
        "accuracy": float((found.predicted == found.labels).double().mean()),
        "suspects": [[one.index, one.label, one.predicted, one.suspicion] for one in found.suspects(20)],
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


def refits_table(cells: Sequence[Cell]) -> str:
    lines = ["| | Spearman | size |", "|---|---|---|"]
    for title in cells[0]["spearman"]:
        sizes = number([cell["size"][title] for cell in cells if title in cell["size"]], 1)
        lines.append(f"| {title} | {number([cell['spearman'][title] for cell in cells])} | {sizes} |")
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
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--data", nargs="+", choices=("mnist", "fashion-mnist"), default=("mnist", "fashion-mnist"))
    parser.add_argument("--networks", nargs="+", choices=("mlp", "lenet"), default=("mlp", "lenet"))
    parser.add_argument("--lengths", nargs="+", choices=tuple(EPOCHS), default=tuple(EPOCHS))
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="1000 to 1004 where not given")
    parser.add_argument("--images", type=int, default=None, help="images for the labels; all where not given")
    parser.add_argument("--rate", choices=("cosine", "constant"), default="cosine")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes(images=options.images)
    seeds = options.seeds or ([1000] if options.quick else list(range(1000, 1005)))
    out: Path = options.out / "audit"

    def cell(title: str, make: Callable[[], Cell], **about: Any) -> Cell:
        path = out / f"{title}.json"
        about |= {"images": sizes.images, "epochs": sizes.epochs, "rate": options.rate}
        found = read_cell(path, about)
        if found is None:
            found = {**make(), "settings": about}
            write_cell(path, found)
            print(f"{title}: done", flush=True)
        return found

    results: dict[str, Any] = {"setting": setting() | {"device": options.device}, "seeds": seeds}
    targets: list[Target] = []
    if "labels" in options.only:
        grid = [(d, n, e) for d in options.data for n in options.networks for e in options.lengths]
        labels = {
            f"{d}, {n}, {e}": [
                cell(
                    f"labels-{d}-{n}-{e}-{seed}",
                    lambda d=d, n=n, e=e, seed=seed: labels_cell(d, n, e, seed, sizes, options),  # type: ignore[misc]
                    data=d,
                    network=n,
                    length=e,
                    seed=seed,
                )
                for seed in seeds
            ]
            for d, n, e in grid
        }
        print(labels_table(labels))
        targets += labels_targets(labels)
        results["labels"] = labels
    if "refits" in options.only:
        again = {
            units: [
                cell(
                    f"refits-{units}-{seed}",
                    lambda units=units, seed=seed: refits_cell(units, seed, sizes, options),  # type: ignore[misc]
                    units=units,
                    seed=seed,
                )
                for seed in seeds
            ]
            for units in UNITS
        }
        for units, found in again.items():
            print(f"{units} units\n{refits_table(found)}")
            for ours in OURS:
                mean = statistics.fmean(each["spearman"][ours] for each in found)
                targets += at_least(f"refits, {units}, {ours}: Spearman", 0.9, mean)
        results["refits"] = again
    if "page" in options.only:
        path = out / "mnist-test.html"
        seed = seeds[0]
        results["page"] = cell("page", lambda: page_cell(seed, sizes, options, path), seed=seed)
        print(f"the test set's suspects, right on {results['page']['accuracy']:.2%}: {path}")
        print(" ".join(f"{i}({y}→{p})" for i, y, p, _ in results["page"]["suspects"]))
    results["targets"] = [vars(target) for target in targets]
    write_results(options.out, "audit", results)
    print(f"{sum(target.met for target in targets)} of {len(targets)} targets met")


if __name__ == "__main__":
    main()
