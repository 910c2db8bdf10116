"""A language model that knows its own texts: calibrated next bytes, and telling documents of other texts.

    BAYESADAM_DATA=... python benchmarks/language.py [--quick] [--seeds 1000 1001 1002] [--rows ...] [--device cuda]
        [--out out/bench]

Stopped, it resumes: a network is a file in out/bench/language, and so is every row of it, so that several processes may
take a seed each, and one with all seeds, which adds the rows of several networks, may come after them.

GPTs of bytes, 6 blocks of width 384 (11 million weights), read documents of 256 bytes: 3,000 steps of AdamW at 6e-4 and
otherwise torch's own settings, 64 windows a step, 100 steps of warm-up, then a cosine to 0. They are trained on
`manual`, cut into blocks of 16 KiB: of every twenty one calibrates, one is the text like the training data, eighteen
train; of the second about 4 % of the bytes are found again in training blocks, in strings of 64. The others are
`manpages`, a manual of other software, and `dictionary`, `python`, `german` and `french`.

Rows: the network alone; at the temperature of the greatest likelihood of all calibration documents; the posterior of
AdamW's second moment with p = 1 and p = 1/2; the Kronecker one of the gradients of 50 training batches; and, of the
networks of all seeds, the ensemble and the mixtures. Ours are calibrated by `ba.calibrate` on the last bytes of 512
windows of 64 bytes. NLL and ECE are of the next byte, in nats, on the held-out blocks of `manual`. A document's doubt:
"epistemic" is ½ Σ tr(H Cov f) over its places (`posterior.epistemic`), of the calibrated posterior, "novelty"
`posterior.novelty`, relative to the calibration windows; beside them stand the mean NLL (the logarithm of the
perplexity), the mean entropy and the mean of 1 − max p under the row's own probabilities, and the sum over places of
what several networks disagree on, the entropy of their mean less the mean of their entropies. AUROC is of documents of
`manual` against those of another text. No setting was chosen on these networks or texts, but for the number of windows
to calibrate on: 64 were seen to be too few.
"""

from __future__ import annotations

import gzip
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import scores as measures
from harness import Cell, Row, arguments, number, read_cell, replaced, setting, write_cell, write_results
from merging_text import Language, autocast

INSIDE, OUTSIDE = "manual", ("manpages", "dictionary", "python", "german", "french")
BLOCK, OF_BLOCKS, CALIBRATES, TESTS = 16_384, 20, 9, 19
RATE, WARM_UP = 6e-4, 100
TEMPERATURES = torch.logspace(-0.6, 0.6, 121).tolist()
SIMPLE, OURS = ("perplexity", "entropy", "max softmax", "disagreement"), ("epistemic", "novelty")
BUDGET = {"cpu": 1 << 30, "cuda": 16 << 30}
AnyPosterior = ba.Posterior | ba.Mixture


@dataclass(frozen=True)
class Sizes:
    """Of the network, its training, and what it is tried on.

    Attributes:
        context: bytes of a window and of a document.
        batch: windows a step.
        keep: batches whose gradients make the Kronecker posterior.
        window: bytes before a place that `ba.calibrate` sees.
        places: how many of these.
        documents: of the text like the training data; of every other text half as many.
        draws: functions drawn for probabilities at all places, where that takes less than backward passes.
        probes: random directions for a document's doubt.
    """

    layers: int = 6
    width: int = 384
    context: int = 256
    steps: int = 3000
    batch: int = 64
    keep: int = 50
    window: int = 64
    places: int = 512
    documents: int = 384
    draws: int = 8
    probes: int = 4


QUICK = Sizes(
    layers=1, width=16, context=16, steps=20, batch=8, keep=5, window=8, places=10, documents=16, draws=2, probes=2
)


# --- texts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Texts:
    """Bytes, on one device.

    Attributes:
        train: the text that is trained on, held-out blocks with it.
        starts: where a window may begin that no held-out block is in.
        calibration: documents (n, context + 1) to calibrate with.
        documents: the same by text, to score.
    """

    train: Tensor
    starts: Tensor
    calibration: Tensor
    documents: Mapping[str, Tensor]

    @property
    def n_data(self) -> int:
        """N, the number of bytes to train on."""
        return len(self.starts)


def read_text(name: str, device: str) -> Tensor:
    path = Path(os.environ.get("BAYESADAM_DATA", "")) / "text" / f"{name}.txt.gz"
    if not path.is_file():
        sys.exit(
            f"{path} is missing, no source delivered it: set BAYESADAM_DATA to the folder that has text/{name}.txt.gz"
        )
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=torch.uint8).to(device)


def evenly(total: int, count: int, device: torch.device) -> Tensor:
    """`count` of the numbers below `total`, at even distances, (count,)."""
    return torch.arange(count, device=device) * total // count


def documents_of(text: Tensor, length: int, count: int) -> Tensor:
    """Documents (count, length) that lie evenly over a text, or over each row of several."""
    rows = text.reshape(-1, text.shape[-1])
    whole = rows[:, : rows.shape[1] // length * length].reshape(-1, length)
    return whole[evenly(len(whole), min(count, len(whole)), text.device)].long()


def texts_of(sizes: Sizes, device: str) -> Texts:
    """The blocks of the text that is trained on, and documents of the others."""
    text, length = read_text(INSIDE, device), sizes.context + 1
    blocks = text[: len(text) // BLOCK * BLOCK].view(-1, BLOCK)
    role = torch.arange(len(text), device=device) // BLOCK % OF_BLOCKS
    held = (role == CALIBRATES) | (role == TESTS)
    before = F.pad(held.cumsum(0), (1, 0))
    starts = (before[length:] == before[:-length]).nonzero().flatten()
    inside, calibration = (
        documents_of(blocks[part::OF_BLOCKS], length, count)
        for part, count in ((TESTS, sizes.documents), (CALIBRATES, max(sizes.documents, sizes.places)))
    )
    others = {name: documents_of(read_text(name, device), length, sizes.documents // 2) for name in OUTSIDE}
    return Texts(text, starts, calibration, {INSIDE: inside, **others})


def window_batch(texts: Texts, sizes: Sizes, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the training blocks: bytes (batch, context), and the next of each."""
    picked = torch.randint(len(texts.starts), (sizes.batch, 1), generator=draw, device=draw.device)
    rows = texts.train[texts.starts[picked] + torch.arange(sizes.context + 1, device=draw.device)].long()
    return rows[:, :-1], rows[:, 1:]


# --- networks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trained:
    """A network and what trained it."""

    model: Language
    optimizer: torch.optim.Optimizer


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean over all places."""
    return F.cross_entropy(outputs.float().flatten(0, 1), y.flatten())


def made(sizes: Sizes, device: str) -> Trained:
    """A network before its training."""
    model = Language(sizes.layers, sizes.width, sizes.context).to(device)
    return Trained(model, torch.optim.AdamW(model.parameters(), lr=RATE, fused=device == "cuda"))


def train(texts: Texts, sizes: Sizes, seed: int, device: str) -> Trained:
    """Steps of plain AdamW, in bfloat16 on CUDA."""
    torch.manual_seed(seed)
    one = made(sizes, device)
    draw = torch.Generator(device=device).manual_seed(seed)
    warm_up = min(WARM_UP, sizes.steps // 10)
    for step in range(sizes.steps):
        rate = min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / sizes.steps))
        for group in one.optimizer.param_groups:
            group["lr"] = RATE * rate
        x, y = window_batch(texts, sizes, draw)
        one.optimizer.zero_grad()
        with autocast(device):
            outputs = one.model(x)
        cross_entropy(outputs, y).backward()
        one.optimizer.step()
    one.optimizer.zero_grad()
    one.model.eval()
    return one


def trained(path: Path, texts: Texts, sizes: Sizes, seed: int, device: str) -> Trained:
    """The network of a seed, out of its file where there is one."""
    if path.is_file():
        one = made(sizes, device)
        saved = torch.load(path, map_location=device, weights_only=True)
        one.model.load_state_dict(saved["model"])
        one.optimizer.load_state_dict(saved["optimizer"])
        one.model.eval()
        return one
    began = time.perf_counter()
    one = train(texts, sizes, seed, device)
    held = {"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}
    replaced(path, lambda unfinished: torch.save(held, unfinished))
    weights = sum(parameter.numel() for parameter in one.model.parameters())
    print(f"seed {seed}: {weights:,} weights trained in {time.perf_counter() - began:.0f} s", flush=True)
    return one


# --- what a row says of documents -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scores:
    """Probabilities of the next byte, (batch, length, 256), and a document's doubt by name, (batch,)."""

    probs: Tensor
    doubt: Mapping[str, Tensor]


Scorer = Callable[[Tensor], Scores]


def scores(posterior: AnyPosterior, x: Tensor, sizes: Sizes, budget: int) -> Scores:
    """Of a calibrated posterior, at all places of documents (batch, length)."""

    def options() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        return {"likelihood": "classification", "memory_budget": budget, "generator": generator}

    def probabilities(one: ba.Posterior) -> Tensor:
        # Without a draw where the held-out text preferred the mean network.
        if not one.averaged:
            return at_temperature([one.model], one.temperature, x).probs
        return one.predict(x, positions="all", n_samples=sizes.draws, **options()).probs

    doubt = {"epistemic": posterior.epistemic(x, probes=sizes.probes, **options()).value}
    doubt["novelty"] = posterior.novelty(x, likelihood="classification")
    members = posterior.members if isinstance(posterior, ba.Mixture) else (posterior,)
    return pooled([probabilities(one) for one in members], doubt)


def pooled(each: Sequence[Tensor], doubt: Mapping[str, Tensor]) -> Scores:
    """The mean of several networks' probabilities, and what these disagree on: Σ_t (H[mean] − mean H)."""
    probs = torch.stack(list(each)).mean(dim=0)
    if len(each) == 1:
        return Scores(probs, doubt)
    own = torch.stack([entropies(one) for one in each]).mean(dim=0)
    return Scores(probs, {**doubt, "disagreement": (entropies(probs) - own).sum(dim=1)})


def entropies(probs: Tensor) -> Tensor:
    """In nats, of every place."""
    return torch.special.entr(probs).sum(dim=-1)


@torch.no_grad()
def at_temperature(models: Sequence[nn.Module], temperature: float, x: Tensor) -> Scores:
    return pooled([(model(x) / temperature).softmax(dim=-1) for model in models], {})


def best_temperature(models: Sequence[nn.Module], documents: Tensor, chunk: int) -> float:
    """T of the least NLL of documents, under the mean of the networks' probabilities."""
    totals = [0.0] * len(TEMPERATURES)
    with torch.no_grad():
        for part in documents.split(chunk):
            logits, y = torch.stack([model(part[:, :-1]) for model in models]), part[:, 1:, None]
            for index, t in enumerate(TEMPERATURES):
                totals[index] -= float((logits / t).softmax(dim=-1).mean(dim=0).gather(-1, y).log().sum())
    return TEMPERATURES[min(range(len(totals)), key=totals.__getitem__)]


# --- posteriors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """What a row is given."""

    networks: Sequence[Trained]
    texts: Texts
    sizes: Sizes
    device: str

    @property
    def models(self) -> list[nn.Module]:
        """The networks alone."""
        return [one.model for one in self.networks]

    @property
    def gradient_bytes(self) -> int:
        """B, the bytes behind one gradient."""
        return self.sizes.batch * self.sizes.context

    @property
    def chunk(self) -> int:
        """Documents at a time."""
        return 32 if self.device.startswith("cuda") else 8

    @property
    def budget(self) -> int:
        """Bytes that predictions may take."""
        return BUDGET["cuda" if self.device.startswith("cuda") else "cpu"]


def diagonal(case: Case, one: Trained, *, power: float) -> ba.Posterior:
    return ba.Posterior.from_optimizer(
        one.model, one.optimizer, case.texts.n_data, power=power, batch_size=case.gradient_bytes
    )


def kronecker(case: Case, one: Trained) -> ba.Posterior:
    draw = torch.Generator(device=case.device).manual_seed(0)
    batches = [window_batch(case.texts, case.sizes, draw) for _ in range(case.sizes.keep)]
    recorder = ba.Recorder.from_batches(one.model, batches, cross_entropy, keep=case.sizes.keep)
    return ba.Posterior.from_recorder(one.model, recorder, case.texts.n_data, batch_size=case.gradient_bytes)


def last_place(model: nn.Module, x: Tensor) -> Tensor:
    """(batch, length) to the logits after the last byte, (batch, 256)."""
    return model(x)[:, -1]  # type: ignore[no-any-return]


def calibrated(posterior: AnyPosterior, case: Case) -> AnyPosterior:
    """By the bytes after windows of the calibration documents."""
    sizes, documents = case.sizes, case.texts.calibration
    rows = documents[evenly(len(documents), sizes.places, documents.device)]
    parts = rows.split(case.chunk)
    batches = [(part[:, : sizes.window], part[:, sizes.window]) for part in parts]
    return ba.calibrate(posterior, batches, likelihood="classification", forward=last_place, memory_budget=case.budget)


# --- rows -----------------------------------------------------------------------------------------------------------

Told = tuple[Scorer, str]


def of_networks(case: Case, *, tempered: bool) -> Told:
    """Their own probabilities."""
    t = best_temperature(case.models, case.texts.calibration, case.chunk) if tempered else 1.0
    return partial(at_temperature, case.models, t), f"temperature {t:.3g}"


def ours(case: Case, *, posterior_of: Callable[[Case, Trained], ba.Posterior]) -> Told:
    """Of one network its posterior, of several the mixture of theirs."""
    each = [posterior_of(case, one) for one in case.networks]
    posterior = calibrated(each[0] if len(each) == 1 else ba.Mixture(each), case)
    report = posterior.calibration
    return partial(scores, posterior, sizes=case.sizes, budget=case.budget), report.preferred if report else ""


ROWS: Mapping[str, Row] = {
    "alone": Row("network alone", partial(of_networks, tempered=False)),
    "temperature": Row("temperature", partial(of_networks, tempered=True)),
    "diagonal": Row("diagonal, p = 1", partial(ours, posterior_of=partial(diagonal, power=1.0))),
    "root": Row("diagonal, p = 1/2", partial(ours, posterior_of=partial(diagonal, power=0.5))),
    "kronecker": Row("Kronecker", partial(ours, posterior_of=kronecker)),
    "ensemble": Row("ensemble", partial(of_networks, tempered=False), joint=True),
    "ensemble-temperature": Row("ensemble, temperature", partial(of_networks, tempered=True), joint=True),
    "mixture": Row("mixture of diagonals", partial(ours, posterior_of=partial(diagonal, power=1.0)), joint=True),
    "mixture-kronecker": Row("mixture of Kroneckers", partial(ours, posterior_of=kronecker), joint=True),
}


def measured(row: Row, case: Case) -> Cell:
    """NLL and ECE of the next byte, and the AUROC of every doubt against every other text."""
    began = time.perf_counter()
    scorer, told = row.fit(case)
    fitted = time.perf_counter()
    doubts: dict[str, dict[str, Tensor]] = {}
    nll, inside = {}, []
    for name, documents in case.texts.documents.items():
        parts: dict[str, list[Tensor]] = {}
        for part in documents.split(case.chunk):
            found, y = scorer(part[:, :-1]), part[:, 1:]
            right = found.probs.gather(-1, y[..., None]).clamp(min=torch.finfo(found.probs.dtype).tiny).squeeze(-1)
            own = {
                "perplexity": -right.log().mean(dim=1),
                "entropy": entropies(found.probs).mean(dim=1),
                "max softmax": 1 - found.probs.amax(dim=-1).mean(dim=1),
            }
            for key, values in {**found.doubt, **own}.items():
                parts.setdefault(key, []).append(values.double().cpu())
            if name == INSIDE:
                inside.append((found.probs.cpu(), y.cpu()))
        doubts[name] = {key: torch.cat(values) for key, values in parts.items()}
        nll[name] = float(doubts[name]["perplexity"].mean())
    probs, y = (torch.cat(each) for each in zip(*inside, strict=True))
    familiar = doubts.pop(INSIDE)
    return {
        "nll": nll,
        "ece": measures.ece(probs, y),
        "accuracy": measures.accuracy(probs, y),
        "auroc": {
            key: {name: measures.auroc(values, found[key]) for name, found in doubts.items()}
            for key, values in familiar.items()
        },
        "told": told,
        "fit_seconds": fitted - began,
        "score_seconds": time.perf_counter() - fitted,
    }


def run(names: Sequence[str], seeds: Sequence[int], sizes: Sizes, device: str, where: Path) -> dict[str, list[Cell]]:
    """The cells of every row: one a seed, or one of all seeds."""
    texts = texts_of(sizes, device)
    paths = {seed: where / f"{seed}.pt" for seed in seeds}
    networks: dict[int, Trained] = {}
    cells: dict[str, list[Cell]] = {}
    # Seed by seed, then what takes all of them.
    groups = [[seed] for seed in seeds] + ([list(seeds)] if len(seeds) > 1 else [])
    for group in groups:
        for name in [each for each in names if ROWS[each].joint == (len(group) > 1)]:
            label = "all" if len(group) > 1 else str(group[0])
            path, about = where / f"{label}-{name}.json", {**asdict(sizes), "seeds": group}
            cell = read_cell(path, about)
            if cell is None:
                for seed in group:
                    if seed not in networks:
                        networks[seed] = trained(paths[seed], texts, sizes, seed, device)
                case = Case([networks[seed] for seed in group], texts, sizes, device)
                cell = {"row": name, "settings": about, **measured(ROWS[name], case)}
                write_cell(path, cell)
                seconds = cell["fit_seconds"], cell["score_seconds"]
                print(
                    f"{label}, {name}: NLL {cell['nll'][INSIDE]:.4f}, {cell['told']}; {seconds[0]:.0f} s to fit,"
                    f" {seconds[1]:.0f} s to score",
                    flush=True,
                )
            cells.setdefault(name, []).append(cell)
    return cells


# --- tables ---------------------------------------------------------------------------------------------------------


def mean_auroc(cell: Cell, key: str) -> float:
    return statistics.fmean(cell["auroc"][key].values())


def markdown(cells: Mapping[str, Sequence[Cell]]) -> str:
    """Next bytes and mean AUROC; then text by text."""
    keys = (*OURS, *SIMPLE)
    first = ["NLL", "ECE", "accuracy", *(f"AUROC: {key}" for key in keys)]
    lines = [f"| | {' | '.join(first)} |", "|---" * (len(first) + 1) + "|"]
    for name, found in cells.items():
        values = [[c["nll"][INSIDE] for c in found], [c["ece"] for c in found], [c["accuracy"] for c in found]]
        values += [[mean_auroc(c, key) for c in found if key in c["auroc"]] for key in keys]
        lines.append(f"| {ROWS[name].title} | {' | '.join(map(number, values))} |")
    lines += ["", f"| | doubt | {' | '.join(OUTSIDE)} |", "|---" * (len(OUTSIDE) + 2) + "|"]
    for name, found in cells.items():
        for key in [each for each in keys if each in found[0]["auroc"]]:
            values = [[c["auroc"][key][text] for c in found] for text in OUTSIDE]
            lines.append(f"| {ROWS[name].title} | {key} | {' | '.join(map(number, values))} |")
    return "\n".join(lines)


def verdict(name: str, cells: Sequence[Cell]) -> str:
    """Ours beside the best of the simple ones, by the mean AUROC."""
    means = {key: statistics.fmean(mean_auroc(cell, key) for cell in cells) for key in cells[0]["auroc"]}
    best = max((key for key in SIMPLE if key in means), key=means.__getitem__)
    mine = ", ".join(f"{means[key]:.3f} of {key}" for key in OURS)
    return f"{ROWS[name].title}: mean AUROC {mine}, {means[best]:.3f} of {best}, the best of the simple ones"


def main() -> None:
    parser = arguments(__doc__, quick="two networks of 12,000 weights, 20 steps, 16 documents", device=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="1000 to 1002")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    seeds = options.seeds or [1000 + k for k in range(2 if options.quick else 3)]
    cells = run(options.rows, seeds, sizes, options.device, options.out / "language")
    write_results(options.out, "language", {**setting(), "quick": options.quick, "cells": cells})
    table = f"{markdown(cells)}\n\nMean ± standard error over {len(seeds)} seeds.\n"
    replaced(options.out / "language.md", lambda path: path.write_text(table, encoding="utf-8"))
    print(f"\n{table}")
    told = [verdict(name, found) for name, found in cells.items() if OURS[0] in found[0]["auroc"]]
    print("\n".join(told) or f"{len(cells)} rows, none of ours")


if __name__ == "__main__":
    main()
