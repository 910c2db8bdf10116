"""Adapters on real text: two tasks with few examples, a small decoder of bytes, and every posterior beside plain
temperature scaling.

A decoder of 10.7 million parameters learns the bytes of two English texts, once. Then, for every seed, LoRA (rank 8)
with plain AdamW, over-trained as fine-tunes are:

- classifier: which of six texts is a snippet of 64 bytes from? 200 snippets of each to train on, 50 to calibrate, 300
  to test.
- next byte: German, from 200 windows of 64 bytes; the byte after 63, as one of the 63 most frequent or any other, for
  300 windows to calibrate and 700 to test.

Windows do not overlap, and training, calibration and test come from different parts of the texts. Rows that are not
plain temperature scaling are what `calibrate` makes of a posterior: where the held-out data do not prefer it, its
probabilities are those of the best temperature, so `in use` counts the seeds where they do, and `itself` is the NLL of
the posterior at its own best temperature either way. laplace-torch has a row of the classifier where it can be
imported: it takes the adapter's parameters as any, prior by its marginal likelihood, no temperature.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bayesadam as ba
from harness import against, number, parallel, setting, write_results
from lora_tasks import Batch, Fit, Task, adam, batches, fit, scored, seeded
from merging_text import BASE, BYTES, Language, texts, train

CORPORA = ("dictionary", "manpages", "manual", "python", "german", "french")
LANGUAGE, CONTEXT, CLASSES, RANK, RATE = "german", 64, 64, 8, 2e-3
TARGETS = ["project", "up"]
MEASURES = ("nll", "ece", "accuracy", "brier")
NETWORK, TEMPERATURE = "network", "temperature"
SOAPS = "SOAP's network"


@dataclass(frozen=True)
class Size:
    """How large the model, its training and the data are; examples are those of a class, or windows."""

    layers: int = 6
    width: int = 384
    base_steps: int = 2500
    steps: int = 600
    batch: int = 32
    classifier: tuple[int, int, int] = (200, 50, 300)
    windows: tuple[int, int, int] = (200, 300, 700)
    keep: int = 50


QUICK = Size(2, 64, 20, 20, 8, (12, 6, 6), (12, 24, 24), 10)
Corpus = dict[str, tuple[Tensor, Tensor, Tensor]]


# --- the two tasks --------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """The mean over places of a language model's last layer, and a linear layer of it."""

    def __init__(self, language: Language, classes: int) -> None:
        super().__init__()
        self.body = language
        self.body.head = nn.Identity()
        self.head = nn.Linear(language.norm.normalized_shape[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length) bytes to (batch, classes) logits."""
        found: Tensor = self.head(self.body(x).mean(dim=1))
        return found


def windows(text: Tensor, count: int, seed: int) -> Tensor:
    """Windows of the text, (count, 64), none of which overlaps another."""
    places = torch.randperm(len(text) // CONTEXT, generator=seeded(seed))[:count, None] * CONTEXT
    return text[(places + torch.arange(CONTEXT)).to(text.device)].long()


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**inputs)
    return found


def classifier(base: Language, data: Corpus, size: Size, seed: int) -> Task:
    torch.manual_seed(seed)
    model = Classifier(copy.deepcopy(base), len(CORPORA)).to(next(base.parameters()).device)

    def labelled(part: int) -> Batch:
        found = [windows(data[name][part], size.classifier[part], seed) for name in CORPORA]
        y = torch.arange(len(found), device=found[0].device).repeat_interleave(len(found[0]))
        return {"x": torch.cat(found)}, y

    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, modules_to_save=["head"])
    return Task(get_peft_model(model, lora), *(labelled(part) for part in range(3)), forward=logits)


def next_byte(base: Language, data: Corpus, size: Size, seed: int) -> Task:
    torch.manual_seed(seed)
    text = data[LANGUAGE]
    ranked = torch.bincount(text[0].long(), minlength=BYTES).argsort(descending=True)
    common, others = ranked[: CLASSES - 1], ranked[CLASSES - 1 :]
    class_of = torch.full((BYTES,), CLASSES - 1, device=ranked.device)
    class_of[common] = torch.arange(CLASSES - 1, device=ranked.device)

    def last_place(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """The logits of the common bytes, and one whose probability is that of all others together."""
        found = logits(model, inputs)[:, -1]
        return torch.cat([found[:, common], found[:, others].logsumexp(dim=1, keepdim=True)], dim=1)

    def labelled(part: int) -> Batch:
        x = windows(text[part], size.windows[part], seed)
        return {"x": x[:, :-1]}, x[:, 1:] if part == 0 else class_of[x[:, -1]]

    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS))
    return Task(adapted, *(labelled(part) for part in range(3)), forward=last_place, trained_on=logits)


TASKS: dict[str, Callable[[Language, Corpus, Size, int], Task]] = {"classifier": classifier, "next byte": next_byte}


# --- the rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A task after training, with what its posteriors are made of."""

    task: Task
    size: Size
    fit: Fit

    def posterior(self, **options: Any) -> ba.Posterior:
        """N and B count what the loss averages over: snippets, or bytes."""
        y = self.task.train[1]
        batch = self.size.batch * (y.numel() // len(y))
        return ba.Posterior.from_optimizer(self.task.model, self.fit.optimizer, y.numel(), batch_size=batch, **options)

    def logits(self, batch: Batch) -> Tensor:
        """The network's outputs on all of a batch."""
        with torch.no_grad():
            return torch.cat([self.task.forward(self.task.model, inputs) for inputs, _ in batches(batch, 200)])


def soap(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP

    return SOAP(parameters, lr=lr, weight_decay=0.01, max_precondition_dim=512)


def posteriors(adamw: Trained, soaps: Trained) -> Iterator[tuple[str, ba.Posterior, str]]:
    """Name, posterior, and the row of its network."""
    on_product = {"power": 1, "prior_precision": ba.LoraPrior()}
    yield "diagonal, p = 1/2, B and A apart", adamw.posterior(power=0.5), NETWORK
    yield "diagonal, B and A apart", adamw.posterior(power=1, prior_precision=1.0), NETWORK
    yield "diagonal on B A", adamw.posterior(**on_product), NETWORK
    recorded = {"structure": "kronecker", "recorder": adamw.fit.recorder}
    yield "Kronecker on B A, recorder", adamw.posterior(**recorded, **on_product), NETWORK
    yield "Kronecker on B A, SOAP", soaps.posterior(structure="kronecker", **on_product), SOAPS


def best_temperature(logits: Tensor, y: Tensor) -> float:
    """T of the greatest likelihood, from 0.1 to 30."""
    candidates = torch.logspace(-1, 1.5, 500, device=logits.device)
    nll = torch.stack([nn.functional.cross_entropy(logits / t, y) for t in candidates])
    return float(candidates[nll.argmin()])


def predicted(posterior: ba.Posterior, batch: Batch, options: dict[str, Any]) -> list[ba.Predictive]:
    return [posterior.predict(inputs, **options) for inputs, _ in batches(batch, 100)]


def averaged(posterior: ba.Posterior, held_out: Batch, test: Batch, options: dict[str, Any]) -> Tensor:
    """Probabilities under the posterior at its best temperature, whether calibration put it in use or not."""
    own = posterior.replace(averaged=True, temperature=1.0)
    found, candidates = predicted(own, held_out, options), torch.logspace(math.log10(0.25), math.log10(5), 60).tolist()

    def probs(parts: list[ba.Predictive], temperature: float) -> Tensor:
        return torch.cat([replace(part, temperature=temperature).probs for part in parts])

    best = min(candidates, key=lambda t: scored(probs(found, t), held_out[1])["nll"])
    return probs(predicted(own, test, options), best)


def laplace_probs(trained: Trained, structure: str) -> Tensor:
    """laplace-torch over the adapter and the head, on the test data."""
    from laplace import Laplace
    from laplace.curvature import CurvlinopsEF
    from torch.utils.data import DataLoader, TensorDataset

    task = trained.task
    # It sets attributes on the model.
    peer = Laplace(copy.deepcopy(task.model), "classification", "all", structure, backend=CurvlinopsEF)
    peer.fit(DataLoader(TensorDataset(task.train[0]["x"], task.train[1]), batch_size=trained.size.batch))
    peer.optimize_prior_precision(method="marglik")
    parts = [peer(inputs["x"], link_approx="probit").detach() for inputs, _ in batches(task.test, 50)]
    return torch.cat(parts)


def measured(task: Task, size: Size, seed: int, *, budget: int) -> dict[str, Any]:
    """Every row of one task and seed: scores on test data, and what calibration said of it."""
    forward, rows, seconds = task.trained_on or task.forward, {}, {}
    tests, held_out = task.test, task.validation
    networks = {}
    for name, make in ((NETWORK, adam), (SOAPS, soap)):
        began = time.perf_counter()
        own = replace(task, model=copy.deepcopy(task.model))
        keep = size.keep if name == NETWORK else 0
        run = fit(own.model, own.train, forward, size.steps, RATE, make=make, batch=size.batch, seed=seed, keep=keep)
        trained = networks[name] = Trained(own, size, run)
        seconds[f"training, {name}"] = time.perf_counter() - began
        temperature = best_temperature(trained.logits(held_out), held_out[1])
        found = trained.logits(tests)
        rows[name] = scored(found.softmax(dim=1), tests[1])
        rows[f"{name}, {TEMPERATURE}"] = {**scored((found / temperature).softmax(dim=1), tests[1]), "T": temperature}
        if task.trained_on is None:
            rows[name]["training accuracy"] = scored(trained.logits(task.train).softmax(dim=1), task.train[1])[
                "accuracy"
            ]
    options: Any = {"likelihood": "classification", "forward": task.forward, "memory_budget": budget}
    for name, posterior, network in posteriors(networks[NETWORK], networks[SOAPS]):
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ba.errors.BayesAdamWarning)
            tuned = ba.calibrate(posterior, list(batches(held_out, 100)), **options)
            probs = torch.cat([found.probs for found in predicted(tuned, tests, options)])
            itself = averaged(tuned, held_out, tests, options)
        report = tuned.calibration
        assert report is not None
        rows[name] = {
            **scored(probs, tests[1]),
            **{f"itself, {measure}": value for measure, value in scored(itself, tests[1]).items()},
            "in use": float(report.averaged),
            **{f"held-out nll, {key}": value for key, value in report.nll.items()},
            "network": network,
        }
        seconds[name] = time.perf_counter() - began
    if task.trained_on is None and importlib.util.find_spec("laplace") is not None:
        for structure in ("diag", "kron"):
            began, name = time.perf_counter(), f"laplace-torch, {structure}"
            try:
                rows[name] = {**scored(laplace_probs(networks[NETWORK], structure), tests[1]), "network": NETWORK}
            except Exception as error:
                print(f"{name} is left out: {type(error).__name__}: {error}", flush=True)
            seconds[name] = time.perf_counter() - began
    weights = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    return {"rows": rows, "seconds": seconds, "weights": weights, "n_data": task.train[1].numel()}


# --- all of it ------------------------------------------------------------------------------------------------------


def table(cells: list[dict[str, Any]]) -> str:
    """Means over seeds, with their standard errors; the last column is NLL less that of the network's best
    temperature.
    """
    lines = [
        f"| | {' | '.join(MEASURES)} | in use | itself | NLL less temperature's |",
        "|---" * (len(MEASURES) + 4) + "|",
    ]
    for name in cells[0]["rows"]:
        there = [each["rows"] for each in cells if name in each["rows"]]
        own = [rows[name] for rows in there]
        shown = [number([row[measure] for row in own]) for measure in MEASURES]
        used = [row["in use"] for row in own if "in use" in row]
        shown.append(f"{sum(used):g}/{len(used)}" if used else "")
        shown.append(number([row["itself, nll"] for row in own]) if used else "")
        plain = [rows[f"{rows[name]['network']}, {TEMPERATURE}"]["nll"] for rows in there if "network" in rows[name]]
        shown.append(number([row["nll"] - nll for row, nll in zip(own, plain, strict=True)], 4) if plain else "")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Cell:
    """One task and seed, run from a base in a file."""

    task: str
    seed: int
    size: Size
    device: str
    base: Path

    def __call__(self) -> dict[str, Any]:
        """Its rows."""
        began, data = time.perf_counter(), texts(self.device, CORPORA)
        base = Language(self.size.layers, self.size.width, CONTEXT).to(self.device)
        base.load_state_dict(torch.load(self.base, map_location=self.device, weights_only=True))
        task = TASKS[self.task](base, data, self.size, self.seed)
        budget = (16 if self.device == "cuda" else 1) << 30
        # The other kernels of attention are not batched over outputs.
        with sdpa_kernel(SDPBackend.MATH):
            found = measured(task, self.size, self.seed, budget=budget)
        print(f"{self.task}, seed {self.seed}: {time.perf_counter() - began:.0f} s", flush=True)
        return {"task": self.task, "seed": self.seed, **found}


def run(options: argparse.Namespace) -> None:
    """Both tasks, seed by seed; the file of results is written after each."""
    size, device = QUICK if options.quick else Size(), options.device
    if importlib.util.find_spec("laplace") is None:
        print("laplace-torch is left out: laplace cannot be imported", flush=True)
    began, data = time.perf_counter(), texts(device, BASE)
    torch.manual_seed(0)
    base = Language(size.layers, size.width, CONTEXT).to(device)
    small = argparse.Namespace(device=device, width=size.width, context=CONTEXT, quick=options.quick)
    train(base, [data[name][0] for name in BASE], small, steps=size.base_steps, rate=6e-4, seed=0)
    parameters, seconds = sum(p.numel() for p in base.parameters()), time.perf_counter() - began
    print(f"the base, {parameters:,} parameters: {seconds:.0f} s", flush=True)
    results: dict[str, Any] = {"setting": {**setting(), "device": device, "size": vars(size)}, "parameters": parameters}
    results |= {"base seconds": seconds, **{name: [] for name in TASKS}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.pt"
        torch.save(base.state_dict(), path)
        seeds = range(1 if options.quick else options.seeds)
        calls = [Cell(name, seed, size, device, path) for seed in seeds for name in TASKS]
        for found in parallel(calls, jobs=options.jobs) if options.jobs > 1 else (call() for call in calls):
            results[found["task"]].append(found)
            write_results(options.out, "lora-text", results)
    for name in TASKS:
        print(f"\n{name}\n\n{table(results[name])}")
    print()
    for name in TASKS:
        nll = partial(_nll, results[name])
        on, apart, plain = nll("diagonal on B A"), nll("diagonal, B and A apart"), nll(f"{NETWORK}, {TEMPERATURE}")
        for what, theirs in (("B and A apart", apart), ("temperature scaling", plain)):
            word, gap, error = against(on, theirs, larger_is_better=False)
            print(f"{name}: a diagonal on B A {word} {what}, NLL {gap:+.4f} ± {error:.4f}")


def _nll(cells: list[dict[str, Any]], name: str) -> list[float]:
    return [each["rows"][name]["nll"] for each in cells]
