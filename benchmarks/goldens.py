"""The numbers that a change of the code must not lose, beside those that were frozen before it.

    python -m benchmarks.goldens [--freeze] [NAME ...]

Every golden is a function that returns numbers by name. They are compared with `goldens.json`, which has for each its
frozen value, by how much it may get worse, and whether more of it is worse (1), less (−1) or either (0); null shows a
speed, a ratio measured in this run, and never fails. Ends with code 1 where a number got worse. `--freeze` writes the
values anew; say in the commit why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, load_digits, make_friedman1
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import bayesadam as ba
from bayesadam import scores
from benchmarks.common.training import drawn, fit

FILE = Path(__file__).with_name("goldens.json")
ROOT = Path(__file__).parent.parent


Numbers = dict[str, float]


def share(hits: Any) -> float:
    return float(torch.as_tensor(hits).double().mean())


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images (n, 8, 8) and classes, in a fixed order."""
    table = load_digits()
    order = np.random.RandomState(0).permutation(len(table.target))
    return torch.tensor(table.images[order] / 16).float(), torch.tensor(table.target[order])


def trained(
    model: nn.Module, x: Tensor, y: Tensor, *, seed: int = 0, steps: int = 1000, lr: float = 1e-2, start: Any = None
) -> ba.Posterior:
    """Of a classifier, or a regression where targets are real, under AdamW, from the seed's weights or others."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    model.load_state_dict(start or model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    kind, loss = ("regression", F.mse_loss) if y.is_floating_point() else ("classification", F.cross_entropy)
    rows = drawn(len(x), 32, steps, torch.Generator().manual_seed(seed))
    fit(model, optimizer, rows, lambda some: loss(model(x[some]), y[some]))
    return ba.Posterior.from_optimizer(model, optimizer, n_data=len(x), batch_size=32, likelihood=kind)


def perceptron(outputs: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, outputs))


@cache
def digits_posterior(seed: int = 0) -> ba.Posterior:
    x, y = digits()
    return trained(perceptron(), x[:900], y[:900], seed=seed)


def classes() -> Numbers:
    """Digits: calibrated probabilities, novelty, p-values and sets, over five networks."""
    (x, y), rows = digits(), list[Numbers]()
    for seed in range(5):
        posterior, labels = digits_posterior(seed), y[1300:, None]
        net = ba.calibrate(posterior, (x[900:1300], y[900:1300]))
        white = torch.rand(497, 8, 8, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            p, turned, noise = net(x[1300:]), net(x[1300:].mT), net(white)
            network = posterior.model(x[1300:])
        nll, far = (-answer.probs.gather(1, labels).log().mean() for answer in (p, turned))
        rows.append(
            {
                "nll over the network's": float(nll / F.cross_entropy(network, y[1300:])),
                "nll of turned digits": float(far),
                "auroc of turned digits": scores.auroc(p.novelty, turned.novelty),
                "auroc of noise": scores.auroc(p.novelty, noise.novelty),
                "false alarms at .05": share(p.p_value <= 0.05),
                "sets at .9": share(p.set(0.9).gather(1, labels)),
            }
        )
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def tables() -> Numbers:
    """Estimators on two tables: negative log-likelihood and coverage of 90 % intervals, over three splits."""
    numbers: Numbers = {}
    sets = {"diabetes": load_diabetes(return_X_y=True), "friedman": make_friedman1(600, noise=1.0, random_state=0)}
    for name, (x, y) in sets.items():
        nll, covered = [], []
        for split in range(3):
            order = np.random.RandomState(split).permutation(len(x))
            train, test = order[: 4 * len(x) // 5], order[4 * len(x) // 5 :]
            model = ba.sklearn.BadamRegressor(random_state=split).fit(x[train], y[train])
            nll.append(-ba.sklearn.log_likelihood(model, x[test], y[test]))
            _, low, high = model.predict(x[test], return_interval=0.9)
            covered.append(share((low <= y[test]) & (y[test] <= high)))
        numbers |= {f"{name}, nll": statistics.fmean(nll), f"{name}, coverage": statistics.fmean(covered)}
    return numbers


def gap() -> Numbers:
    """The toy regression: the band outside over that inside, of Adam's diagonal and of its input side by evidence."""
    x = torch.linspace(0, 0.5, 200)[:, None]
    angle = 2 * torch.pi * (x + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))
    y = x + 0.3 * angle.sin() + 0.3 * (2 * angle).sin()
    held_out = x[::4] + 0.0007, y[::4]
    away = torch.cat([torch.linspace(-0.5, -0.01, 50), torch.linspace(0.51, 1.2, 70)])[:, None]
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    q, numbers = trained(model, x, y, steps=4000, lr=2e-3), {}
    for name, read in {"diagonal, growth": q, "inputs, growth": q.with_inputs(x)}.items():
        tuned = read.tune(held_out, method="evidence")
        inside, outside = (tuned.predict(at).f_variance.sqrt().mean() for at in (x, away))
        numbers[name] = float(outside / inside)
    return numbers


def exact() -> Numbers:
    """The largest relative error of linearised variances against a Jacobian in float64, over kinds of layers."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x)[0][:, -1])

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(dim=1))

    image, words = torch.rand(6, 2, 8, 8).double(), torch.randn(6, 5, 4).double()
    convolution = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    cases = {"perceptron": (perceptron(3), torch.rand(6, 8, 8).double()), "convolution": (convolution, image)}
    cases |= {"recurrent": (Recurrent(), words), "attention": (Attending(), words)}
    numbers = {}
    for name, (model, x) in cases.items():
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.4)
        mean = {n: p.detach().clone() for n, p in model.double().eval().named_parameters()}
        variance = {n: torch.rand_like(p) + 0.1 for n, p in mean.items()}
        q = ba.Posterior.from_moments(model, mean, variance, 10, likelihood="regression")
        rows = jacrev(lambda p, x=x, model=model: functional_call(model, p, (x,)))(mean)
        truth = sum((rows[n].square() * v).flatten(2).sum(dim=2) for n, v in variance.items())
        numbers[name] = float(((q.predict(x).f_variance - truth).abs() / truth).max())
    return numbers


def pruning() -> Numbers:
    """Digits: accuracy at nine tenths of the weights pruned, by the ratio and by magnitude."""
    (x, y), numbers = (part[1300:] for part in digits()), {}
    for by in ("snr", "magnitude"):
        small = (ba.prune(digits_posterior(seed), 0.9, ranking=by).model for seed in range(5))
        numbers[by] = statistics.fmean(share(model(x).argmax(1) == y) for model in small)
    return numbers


def merging() -> Numbers:
    """Digits: the accuracy of a merge of two fine-tunes, each of half of the classes."""
    (x, y), base = (part[:900] for part in digits()), digits_posterior(7).model.state_dict()
    halves = [trained(perceptron(), x[half], y[half], steps=600, start=base) for half in (y < 5, y >= 5)]
    first, second = (half.mean for half in halves)
    merges = {"average": {name: (mu + second[name]) / 2 for name, mu in first.items()}}
    merges["fisher"] = dict(ba.merge(halves, method="fisher"))
    x, y = (part[1300:] for part in digits())
    return {by: share(functional_call(halves[0].model, w, (x,)).argmax(1) == y) for by, w in merges.items()}


def auditing() -> Numbers:
    """Digits: how well an audit finds a twentieth of labels that were changed."""
    x, y = digits()
    source = torch.Generator().manual_seed(1)
    flipped = torch.rand(900, generator=source) < 0.05
    labels = torch.where(flipped, (y[:900] + 1 + torch.randint(9, (900,), generator=source)) % 10, y[:900])
    q = trained(perceptron(), x[:900], labels, steps=400)
    suspicion = ba.audit(q, (x[:900], labels)).suspicion
    return {"auroc": scores.auroc(suspicion[~flipped], suspicion[flipped])}


def bandits() -> Numbers:
    """Digits and a wheel as bandits, 400 rounds, three runs: reward over the optimum's."""
    from experiments import classification_problem, simulate

    (x, y), numbers = digits(), {}
    problems = {"digits": classification_problem(x.flatten(1).numpy(), y.numpy()), "wheel": "wheel:0.5"}
    for name, problem in problems.items():
        for agent in ("hybrid", "linear"):
            numbers[f"{name}, {agent}"] = share(simulate(problem, agent, runs=3, rounds=400, seed=3).reward_ratio)
    return numbers


def monitoring() -> Numbers:
    """False alarms over forty streams like the held-out data, and the delay after every input is turned."""
    x, y = digits()
    net = ba.calibrate(digits_posterior(), (x[900:1300], y[900:1300]))
    with torch.no_grad():
        calm, turned = net(x[1300:]), net(x[1300:].mT)
    alarms, delays = [], []
    for seed in range(40):
        source = torch.Generator().manual_seed(seed)
        for stream, ended in ((calm.novelty, alarms), (turned.novelty, delays)):
            monitor, order = ba.Monitor(net, alarm=0.05), torch.randperm(497, generator=source)[:200].tolist()
            ended.append(next((n for n, i in enumerate(order) if monitor.update(stream[i : i + 1])), 200))
    return {"false alarms": statistics.fmean(end < 200 for end in alarms), "delay": statistics.fmean(delays)}


def files() -> Numbers:
    """How many posteriors and agents that older releases saved still load."""
    loaded = 0
    for path in sorted(ROOT.glob("tests/**/release_*/*.safetensors")):
        if path.stem in ("expected", "prior"):
            continue
        is_agent = path.stem.startswith("agent-") or path.parent.parent.name == "bandits"
        load = ba.bandits.Agent.load if is_agent else ba.GaussianWeights.open
        try:
            load(path)
        except ba.errors.BayesAdamError as error:
            # Their own classes read these, with a model.
            if not any(kind in str(error) for kind in ("mixture", "monitor")):
                continue
        loaded += 1
    return {"loaded": loaded}


def seconds(work: Callable[[], object], least: float = 0.2) -> float:
    """The median over calls that take so long together."""
    work()
    taken: list[float] = []
    while sum(taken) < least or len(taken) < 3:
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def speeds() -> Numbers:
    """Over a forward pass of the same batch: predict calibrated and linearised, calibrate; a decision in µs."""
    x, y = digits()
    q = digits_posterior()
    net = torch.no_grad()(ba.calibrate(q, (x[900:1300], y[900:1300])))
    with torch.no_grad():
        one, many, held_out = (seconds(lambda n=n: q.model(x[:n])) for n in (1, 64, 400))
    agent = ba.bandits.make_agent(n_features=64, n_arms=10)
    for context, label in zip(x[:60].flatten(1).numpy(), y[:60].tolist(), strict=True):
        decision = agent.decide(context)
        agent.reward(decision.id, float(decision.arm == label))
    at = x[70].flatten().numpy()
    return {
        "calibrated, batch 1": seconds(lambda: net(x[:1])) / one,
        "calibrated, batch 64": seconds(lambda: net(x[:64])) / many,
        "linearised, batch 64": seconds(lambda: q.predict(x[:64], covariance=True)) / many,
        "calibrate, 400": seconds(lambda: ba.calibrate(q, (x[900:1300], y[900:1300]))) / held_out,
        "decide, µs": 1e6 * seconds(lambda: agent.decide(at)),
    }


_ALL = (classes, tables, gap, exact, pruning, merging, auditing, bandits, monitoring, files, speeds)
GOLDENS: Mapping[str, Callable[[], Numbers]] = {golden.__name__: golden for golden in _ALL}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(GOLDENS)}; all by default")
    parser.add_argument("--freeze", action="store_true", help="write the numbers of this run as the frozen ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    frozen, failed = json.loads(FILE.read_text(encoding="utf-8")), False
    for name in options.names or GOLDENS:
        began, numbers = time.perf_counter(), GOLDENS[name]()
        print(f"{name} ({time.perf_counter() - began:.0f} s)", flush=True)
        for what, value in numbers.items():
            before, slack, sign = frozen.setdefault(name, {}).setdefault(what, [value, None, 0])
            away = abs(value - before) if sign == 0 else sign * (value - before)
            worse = slack is not None and away > slack and not options.freeze
            failed |= worse
            print(f"  {what:28s}{value:12.6g}   was {before:.6g}{'   WORSE' if worse else ''}", flush=True)
            frozen[name][what][0] = value
    if options.freeze:
        FILE.write_text(json.dumps(frozen, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
