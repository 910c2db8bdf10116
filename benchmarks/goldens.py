"""The numbers that a change of the code must not lose, beside those that were frozen before it.

    python -m benchmarks.goldens [--freeze] [NAME ...]

Every golden is a function that returns numbers by name, each with the direction that is worse. Those that a computer
of another kind would give alike are compared with `goldens.json`, within their tolerance; speeds are ratios measured in
this run, shown beside the frozen ones and never a failure. Ends with code 1 where a number got worse. `--freeze` writes
the file anew; say in the commit why.
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
from typing import Any, NamedTuple

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


class Number(NamedTuple):
    """A golden's value, by how much it may get worse, and whether more of it is worse (+1), less (−1) or either (0)."""

    value: float
    slack: float
    worse: int = 1


def speed(value: float) -> Number:
    """A ratio measured in this run, which is shown alone."""
    return Number(value, float("inf"))


Golden = Callable[[], Mapping[str, Number]]


# --- data and networks ----------------------------------------------------------------------------------------------


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


# --- what is predicted ----------------------------------------------------------------------------------------------


def classes() -> dict[str, Number]:
    """Digits: calibrated probabilities, novelty, p-values and sets, over five networks."""
    x, y = digits()
    numbers: dict[str, list[float]] = {}
    for seed in range(5):
        posterior, labels = digits_posterior(seed), y[1300:, None]
        net = ba.calibrate(posterior, (x[900:1300], y[900:1300]))
        white = torch.rand(497, 8, 8, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            p, turned, noise = net(x[1300:]), net(x[1300:].mT), net(white)
            network = posterior.model(x[1300:])
        nll, far = (-answer.probs.gather(1, labels).log().mean() for answer in (p, turned))
        values = {
            "nll over the network's": float(nll / F.cross_entropy(network, y[1300:])),
            "nll of turned digits": float(far),
            "auroc of turned digits": scores.auroc(p.novelty, turned.novelty),
            "auroc of noise": scores.auroc(p.novelty, noise.novelty),
            "false alarms at .05": float((p.p_value <= 0.05).double().mean()),
            "sets at .9": float(p.set(0.9).gather(1, labels).double().mean()),
        }
        for name, value in values.items():
            numbers.setdefault(name, []).append(value)
    slack = {"false alarms at .05": (0.02, 0), "sets at .9": (0.02, 0)}
    slack |= {"auroc of turned digits": (0.005, -1), "auroc of noise": (0.005, -1)}
    means = {name: statistics.fmean(values) for name, values in numbers.items()}
    return {name: Number(mean, *slack.get(name, (0.02 * mean, 1))) for name, mean in means.items()}


def tables() -> dict[str, Number]:
    """Estimators on two tables: negative log-likelihood and coverage of 90 % intervals, over three splits."""
    numbers: dict[str, Number] = {}
    sets = {"diabetes": load_diabetes(return_X_y=True), "friedman": make_friedman1(600, noise=1.0, random_state=0)}
    for name, (x, y) in sets.items():
        nll, covered = [], []
        for split in range(3):
            order = np.random.RandomState(split).permutation(len(x))
            train, test = order[: 4 * len(x) // 5], order[4 * len(x) // 5 :]
            model = ba.sklearn.BadamRegressor(random_state=split).fit(x[train], y[train])
            nll.append(-ba.sklearn.log_likelihood(model, x[test], y[test]))
            _, low, high = model.predict(x[test], return_interval=0.9)
            covered.append(float(((low <= y[test]) & (y[test] <= high)).mean()))
        numbers |= {f"{name}, nll": Number(statistics.fmean(nll), 0.02)}
        numbers |= {f"{name}, coverage": Number(statistics.fmean(covered), 0.03, 0)}
    return numbers


def gap() -> dict[str, Number]:
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
        numbers[name] = Number(float(outside / inside), 0.05, -1)
    return numbers


def exact() -> dict[str, Number]:
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
        numbers[name] = Number(float(((q.predict(x).f_variance - truth).abs() / truth).max()), 1e-9)
    return numbers


# --- what weights are used for --------------------------------------------------------------------------------------


def pruning() -> dict[str, Number]:
    """Digits: accuracy at nine tenths of the weights pruned, by the ratio and by magnitude."""
    x, y = digits()
    numbers = {}
    for by in ("snr", "magnitude"):
        small = [ba.prune(digits_posterior(seed), 0.9, ranking=by).model(x[1300:]).argmax(1) for seed in range(5)]
        numbers[by] = Number(statistics.fmean(float((c == y[1300:]).double().mean()) for c in small), 0.01, -1)
    return numbers


def merging() -> dict[str, Number]:
    """Digits: the accuracy of a merge of two fine-tunes, each of half of the classes."""
    (x, y), base = (part[:900] for part in digits()), digits_posterior(7).model.state_dict()
    halves = [trained(perceptron(), x[half], y[half], steps=600, start=base) for half in (y < 5, y >= 5)]
    first, second = (half.mean for half in halves)
    merges = {"average": {name: (mu + second[name]) / 2 for name, mu in first.items()}}
    merges["fisher"] = dict(ba.merge(halves, method="fisher"))
    (x, y), numbers = (part[1300:] for part in digits()), {}
    for method, weights in merges.items():
        right = functional_call(halves[0].model, weights, (x,)).argmax(1) == y
        numbers[method] = Number(float(right.double().mean()), 0.01, -1)
    return numbers


def auditing() -> dict[str, Number]:
    """Digits: how well an audit finds a twentieth of labels that were changed."""
    x, y = digits()
    source = torch.Generator().manual_seed(1)
    flipped = torch.rand(900, generator=source) < 0.05
    labels = torch.where(flipped, (y[:900] + 1 + torch.randint(9, (900,), generator=source)) % 10, y[:900])
    q = trained(perceptron(), x[:900], labels, steps=400)
    suspicion = ba.audit(q, (x[:900], labels)).suspicion
    return {"auroc": Number(scores.auroc(suspicion[~flipped], suspicion[flipped]), 0.005, -1)}


def bandits() -> dict[str, Number]:
    """Digits and a wheel as bandits, 400 rounds, three runs: reward over the optimum's."""
    from experiments import classification_problem, simulate

    (x, y), numbers = digits(), {}
    problems = {"digits": classification_problem(x.flatten(1).numpy(), y.numpy()), "wheel": "wheel:0.5"}
    for name, problem in problems.items():
        for agent in ("hybrid", "linear"):
            ratio = simulate(problem, agent, runs=3, rounds=400, seed=3).reward_ratio
            numbers[f"{name}, {agent}"] = Number(float(ratio.mean()), 0.02, -1)
    return numbers


def monitoring() -> dict[str, Number]:
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
    false = statistics.fmean(end < 200 for end in alarms)
    return {"false alarms": Number(false, 0.05), "delay": Number(statistics.fmean(delays), 3)}


# --- files and speeds -----------------------------------------------------------------------------------------------


def files() -> dict[str, Number]:
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
    return {"loaded": Number(loaded, 0, -1)}


def seconds(work: Callable[[], object], least: float = 0.2) -> float:
    """The median over calls that take so long together."""
    work()
    taken: list[float] = []
    while sum(taken) < least or len(taken) < 3:
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def speeds() -> dict[str, Number]:
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
        "calibrated, batch 1": speed(seconds(lambda: net(x[:1])) / one),
        "calibrated, batch 64": speed(seconds(lambda: net(x[:64])) / many),
        "linearised, batch 64": speed(seconds(lambda: q.predict(x[:64], covariance=True)) / many),
        "calibrate, 400": speed(seconds(lambda: ba.calibrate(q, (x[900:1300], y[900:1300]))) / held_out),
        "decide, µs": speed(1e6 * seconds(lambda: agent.decide(at))),
    }


_ALL = (classes, tables, gap, exact, pruning, merging, auditing, bandits, monitoring, files, speeds)
GOLDENS: Mapping[str, Golden] = {golden.__name__: golden for golden in _ALL}


def lost(now: Number, before: float) -> bool:
    """Whether a number got worse than the frozen one, beyond its slack."""
    away = now.value - before
    return (abs(away) if now.worse == 0 else now.worse * away) > now.slack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(GOLDENS)}; all by default")
    parser.add_argument("--freeze", action="store_true", help="write the numbers of this run as the frozen ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    frozen = json.loads(FILE.read_text()) if FILE.is_file() else {}
    failed = False
    for name in options.names or GOLDENS:
        began, numbers = time.perf_counter(), GOLDENS[name]()
        print(f"{name} ({time.perf_counter() - began:.0f} s)", flush=True)
        for what, number in numbers.items():
            before = frozen.get(name, {}).get(what)
            worse = before is not None and lost(number, before) and not options.freeze
            failed |= worse
            shown = "new" if before is None else f"was {before:.6g}"
            print(f"  {what:28s}{number.value:12.6g}   {shown}{'   WORSE' if worse else ''}", flush=True)
        if options.freeze:
            frozen[name] = {what: number.value for what, number in numbers.items()}
    if options.freeze:
        FILE.write_text(json.dumps(frozen, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
