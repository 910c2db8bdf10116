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
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, load_digits, make_friedman1
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import bayesadam as ba
from bayesadam import scores

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
    found = load_digits()
    order = np.random.RandomState(0).permutation(len(found.target))
    return torch.tensor(found.images[order] / 16).float(), torch.tensor(found.target[order])


def trained(model: nn.Module, x: Tensor, y: Tensor, *, seed: int = 0, steps: int = 1000, lr: float = 1e-2):
    """A classifier, or a regression where targets are real, under AdamW; the network and its optimiser."""
    source = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loss = F.mse_loss if y.is_floating_point() else F.cross_entropy
    for _ in range(steps):
        rows = torch.randint(len(x), (32,), generator=source)
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval(), optimizer


def perceptron(outputs: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, outputs))


@cache
def digits_posterior(seed: int = 0) -> ba.Posterior:
    x, y = digits()
    model, optimizer = trained(perceptron(), x[:900], y[:900], seed=seed)
    return ba.Posterior.from_optimizer(model, optimizer, n_data=900, batch_size=32, likelihood="classification")


# --- what is predicted ----------------------------------------------------------------------------------------------


def classes() -> dict[str, Number]:
    """Digits: calibrated probabilities, novelty, p-values and sets, over five networks."""
    x, y = digits()
    found: dict[str, list[float]] = {}
    for seed in range(5):
        posterior, labels = digits_posterior(seed), y[1300:, None]
        net = ba.calibrate(posterior, (x[900:1300], y[900:1300]))
        white = torch.rand(497, 8, 8, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            p, turned, noise = net(x[1300:]), net(x[1300:].mT), net(white)
            network = posterior.model(x[1300:])
        nll, far = (-each.probs.gather(1, labels).log().mean() for each in (p, turned))
        values = {
            "nll over the network's": float(nll / F.cross_entropy(network, y[1300:])),
            "nll of turned digits": float(far),
            "auroc of turned digits": scores.auroc(p.novelty, turned.novelty),
            "auroc of noise": scores.auroc(p.novelty, noise.novelty),
            "false alarms at .05": float((p.p_value <= 0.05).double().mean()),
            "sets at .9": float(p.set(0.9).gather(1, labels).double().mean()),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    slack = {"false alarms at .05": (0.02, 0), "sets at .9": (0.02, 0)}
    slack |= {"auroc of turned digits": (0.005, -1), "auroc of noise": (0.005, -1)}
    return {n: Number(statistics.fmean(v), *slack.get(n, (0.02 * statistics.fmean(v), 1))) for n, v in found.items()}


def tables() -> dict[str, Number]:
    """Estimators on two tables: negative log-likelihood and coverage of 90 % intervals, over three splits."""
    found: dict[str, Number] = {}
    for name, (x, y) in {
        "diabetes": load_diabetes(return_X_y=True),
        "friedman": make_friedman1(600, noise=1.0, random_state=0),
    }.items():
        nll, covered = [], []
        for split in range(3):
            order = np.random.RandomState(split).permutation(len(x))
            train, test = order[: 4 * len(x) // 5], order[4 * len(x) // 5 :]
            model = ba.sklearn.BadamRegressor(random_state=split).fit(x[train], y[train])
            nll.append(-ba.sklearn.log_likelihood(model, x[test], y[test]))
            _, low, high = model.predict(x[test], return_interval=0.9)
            covered.append(float(((low <= y[test]) & (y[test] <= high)).mean()))
        found[f"{name}, nll"] = Number(statistics.fmean(nll), 0.02)
        found[f"{name}, coverage"] = Number(statistics.fmean(covered), 0.03, 0)
    return found


def gap() -> dict[str, Number]:
    """The toy regression: the band outside over that inside, of Adam's diagonal and of its input side by evidence."""
    x = torch.linspace(0, 0.5, 200)[:, None]
    angle = 2 * torch.pi * (x + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))
    y = x + 0.3 * angle.sin() + 0.3 * (2 * angle).sin()
    held_out = x[::4] + 0.0007, y[::4]
    away = torch.cat([torch.linspace(-0.5, -0.01, 50), torch.linspace(0.51, 1.2, 70)])[:, None]
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    model, optimizer = trained(model, x, y, steps=4000, lr=2e-3)
    q = ba.Posterior.from_optimizer(model, optimizer, n_data=200, batch_size=32, likelihood="regression")
    found = {}
    for name, read in {"diagonal, growth": q, "inputs, growth": q.with_inputs(x)}.items():
        tuned = read.tune(held_out, method="evidence")
        inside, outside = (tuned.predict(at).f_variance.sqrt().mean() for at in (x, away))
        found[name] = Number(float(outside / inside), 0.05, -1)
    return found


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
    found = {}
    for name, (model, x) in cases.items():
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.4)
        model = model.double().eval()
        mean = {n: p.detach().clone() for n, p in model.named_parameters()}
        variance = {n: torch.rand_like(p) + 0.1 for n, p in mean.items()}
        q = ba.Posterior.from_moments(model, mean, variance, 10, likelihood="regression")
        rows = jacrev(lambda p, x=x, model=model: functional_call(model, p, (x,)))(mean)
        truth = sum((rows[n].square() * v).flatten(2).sum(dim=2) for n, v in variance.items())
        error = float(((q.predict(x).f_variance - truth).abs() / truth).max())
        found[name] = Number(error, 1e-9)
    return found


# --- what weights are used for --------------------------------------------------------------------------------------


def pruning() -> dict[str, Number]:
    """Digits: accuracy at nine tenths of the weights pruned, by the ratio and by magnitude."""
    x, y = digits()
    found: dict[str, list[float]] = {"snr": [], "magnitude": []}
    for seed in range(5):
        q = digits_posterior(seed)
        for ranking, values in found.items():
            small = ba.prune(q, 0.9, ranking=ranking).model
            values.append(float((small(x[1300:]).argmax(1) == y[1300:]).double().mean()))
    return {name: Number(statistics.fmean(values), 0.01, -1) for name, values in found.items()}


def merging() -> dict[str, Number]:
    """Digits: the accuracy of a merge of two fine-tunes, each of half of the classes."""
    x, y = digits()
    base = {n: p.detach().clone() for n, p in digits_posterior(7).model.named_parameters()}
    halves = []
    for half in (y < 5, y >= 5):
        model, rows = perceptron(), half[:900].nonzero().flatten()
        trained(model, x[:900], y[:900], steps=0)
        model.load_state_dict(base)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        source = torch.Generator().manual_seed(0)
        for _ in range(600):
            some = rows[torch.randint(len(rows), (32,), generator=source)]
            optimizer.zero_grad()
            F.cross_entropy(model(x[some]), y[some]).backward()
            optimizer.step()
        halves.append(ba.Posterior.from_optimizer(model, optimizer, n_data=len(rows), batch_size=32))
    first, second = (half.mean for half in halves)
    merges = {"average": {name: (mu + second[name]) / 2 for name, mu in first.items()}}
    merges["fisher"] = dict(ba.merge(halves, method="fisher"))
    found = {}
    for method, weights in merges.items():
        right = functional_call(halves[0].model, weights, (x[1300:],)).argmax(1) == y[1300:]
        found[method] = Number(float(right.double().mean()), 0.01, -1)
    return found


def auditing() -> dict[str, Number]:
    """Digits: how well an audit finds a twentieth of labels that were changed."""
    x, y = digits()
    source = torch.Generator().manual_seed(1)
    flipped = torch.rand(900, generator=source) < 0.05
    labels = torch.where(flipped, (y[:900] + 1 + torch.randint(9, (900,), generator=source)) % 10, y[:900])
    model, optimizer = trained(perceptron(), x[:900], labels, steps=400)
    q = ba.Posterior.from_optimizer(model, optimizer, n_data=900, batch_size=32, likelihood="classification")
    suspicion = ba.audit(q, (x[:900], labels)).suspicion
    return {"auroc": Number(scores.auroc(suspicion[~flipped], suspicion[flipped]), 0.005, -1)}


def bandits() -> dict[str, Number]:
    """Digits and a wheel as bandits, 400 rounds, three runs: reward over the optimum's."""
    from experiments import classification_problem, simulate

    x, y = digits()
    found = {}
    for name, problem in {
        "digits": classification_problem(x.flatten(1).numpy(), y.numpy()),
        "wheel": "wheel:0.5",
    }.items():
        for agent in ("hybrid", "linear"):
            ratio = simulate(problem, agent, runs=3, rounds=400, seed=3).reward_ratio
            found[f"{name}, {agent}"] = Number(float(ratio.mean()), 0.02, -1)
    return found


def monitoring() -> dict[str, Number]:
    """False alarms over forty streams like the held-out data, and the delay after every input is turned."""
    x, y = digits()
    net = ba.calibrate(digits_posterior(), (x[900:1300], y[900:1300]))
    with torch.no_grad():
        calm, turned = net(x[1300:]), net(x[1300:].mT)
    alarms, delays = 0, []
    for seed in range(40):
        source = torch.Generator().manual_seed(seed)
        monitor = ba.Monitor(net, alarm=0.05)
        alarms += any(
            monitor.update(calm.novelty[i : i + 1]) for i in torch.randperm(497, generator=source)[:200].tolist()
        )
        monitor = ba.Monitor(net, alarm=0.05)
        order = torch.randperm(497, generator=source)[:200].tolist()
        delays.append(next((n for n, i in enumerate(order) if monitor.update(turned.novelty[i : i + 1])), 200))
    return {"false alarms": Number(alarms / 40, 0.05), "delay": Number(statistics.fmean(delays), 3)}


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


GOLDENS: Mapping[str, Golden] = {
    each.__name__: each
    for each in (
        *(classes, tables, gap, exact),
        *(pruning, merging, auditing, bandits, monitoring),
        *(files, speeds),
    )
}


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
        began, found = time.perf_counter(), GOLDENS[name]()
        print(f"{name} ({time.perf_counter() - began:.0f} s)", flush=True)
        for what, number in found.items():
            before = frozen.get(name, {}).get(what)
            worse = before is not None and lost(number, before) and not options.freeze
            failed |= worse
            shown = "new" if before is None else f"was {before:.6g}"
            print(f"  {what:28s}{number.value:12.6g}   {shown}{'   WORSE' if worse else ''}", flush=True)
        if options.freeze:
            frozen[name] = {what: number.value for what, number in found.items()}
    if options.freeze:
        FILE.write_text(json.dumps(frozen, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
