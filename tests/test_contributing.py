"""Every recipe of CONTRIBUTING.md, followed: its code is taken from there, registered as it says, and used.

In most tests the new line enters the registry by monkeypatch, so that nothing stays. One test writes the files and the
lines into a copy of the package: they are all that an extension needs.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.bandits import Agent, agent_settings, make_agent, replay, reward_problem, simulate
from bayesadam.bandits.agents import REGISTRY
from bayesadam.engine import RULES, Network, Stack
from bayesadam.engine.network import forward, unflatten
from bayesadam.engine.stack import constant
from bayesadam.engine.streams import Streams
from bayesadam.errors import FileError, SettingError
from bayesadam.likelihoods import LIKELIHOODS
from bayesadam.paper import methods
from bayesadam.readers import registry as readers
from bayesadam.readers.formats import registry as formats
from bayesadam.weights.store import STRUCTURES
from cases import mlp
from floats import approx, assert_close
from processes import run_python

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
TITLES = (
    "optimiser reader",
    "likelihood",
    "covariance structure",
    "checkpoint format",
    "training rule",
    "bandit agent",
)


class Recipe(NamedTuple):
    """The blocks of code under one heading: a file, where the recipe has one, and a line in a registry."""

    file: str
    code: str
    registry: str
    name: str
    line: str

    @classmethod
    def of(cls, title: str) -> Recipe:
        text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
        section = re.split(r"^##+ ", text.split(f"### A {title}\n".replace("A o", "An o"))[1], flags=re.MULTILINE)[0]
        blocks = re.findall(r"^```python\n# (\S+?)(?:, in (\w+))?\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        *files, (registry, name, line) = blocks
        assert len(files) <= 1
        assert name
        assert line.count("\n") == 1
        file, _, code = files[0] if files else ("", "", "")
        return cls(file, code, registry, name, line.strip())

    def entered(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The entry that the line adds to the registry: a record, or a dictionary of a name and a record."""
        own = importlib.import_module(_dotted(self.registry))
        assert hasattr(own, self.name)
        names = vars(own) | vars(self.module(own, monkeypatch))
        if self.line.startswith('"'):
            return eval(f"{{{self.line}}}", names)
        return eval(f"({self.line})", names)[0]

    def module(self, registry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """The new file as a module; what goes into the registry's own file has the names of that."""
        found = ModuleType(_dotted(self.file or self.registry))
        if self.file in ("", self.registry):
            vars(found).update(vars(registry))
        else:
            monkeypatch.setitem(sys.modules, found.__name__, found)
        exec(compile(self.code, self.file, "exec"), vars(found))
        return found

    def write(self, source: Path) -> None:
        """Follow the recipe in a copy of the sources: the file, its import, the line."""
        registry, names = source.parent / self.registry, re.findall(r"\b[A-Z]\w+\b", self.line)
        text = registry.read_text(encoding="utf-8")
        node = next(
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign | ast.AnnAssign) and _is(node, self.name)
        )
        assert node.value is not None
        # The end of the tuple or of the dictionary, before its bracket.
        display = next(each for each in ast.walk(node.value) if isinstance(each, ast.Tuple | ast.Dict))
        lines = text.splitlines(keepends=True)
        at = display.end_lineno - 1
        before, after = _cut(lines[at], display.end_col_offset - 1)
        comma = "" if before.rstrip().endswith(",") or not before.strip() else ","
        lines[at] = f"{before}{comma} {self.line}\n{after}"
        if self.file == self.registry:
            lines[node.lineno - 1] = f"{self.code}\n\n{lines[node.lineno - 1]}"
        elif self.file:
            lines[node.lineno - 1] = f"from {_dotted(self.file)} import {names[0]}\n{lines[node.lineno - 1]}"
            (source.parent / self.file).write_text(self.code, encoding="utf-8")
        registry.write_text("".join(lines), encoding="utf-8")


def _dotted(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _cut(line: str, column: int) -> tuple[str, str]:
    """A line before and after a column, which ast counts in bytes."""
    raw = line.encode()
    return raw[:column].decode(), raw[column:].decode()


# --- the files and lines are enough ---------------------------------------------------------------------------------

SEEN = """
import bayesadam
from bayesadam.bandits import AGENTS
from bayesadam.engine import RULES
from bayesadam.weights.store import STRUCTURES
from bayesadam.likelihoods import LIKELIHOODS
from bayesadam.paper.methods import METHODS
from bayesadam.readers import registered, registered_formats

names = {each.name for each in (*registered(), *registered_formats())}
print(bayesadam.__file__)
print(sorted({"padam", "tinytrain"} & names), [list(each)[-1] for each in (LIKELIHOODS, STRUCTURES, RULES, AGENTS)])
print("adagrad" in METHODS)
"""


def test_the_page_has_these_recipes_with_code():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert text.count("\n```python\n") == 2 * len(TITLES) - 1
    for title in TITLES:
        recipe = Recipe.of(title)
        assert (ROOT / recipe.registry).is_file()
        ast.parse(recipe.code)
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w/.]+\.\w+)`", text):
        if "NAME" not in path:
            assert (ROOT / path).is_file(), path


@pytest.mark.slow
def test_one_file_and_one_line_are_all_that_an_extension_needs(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for title in TITLES:
        Recipe.of(title).write(tmp_path / "src")
    done = run_python(SEEN, env={"PYTHONPATH": str(tmp_path / "src")})
    assert done.returncode == 0, done.stderr
    where, found, method = done.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert found == "['padam', 'tinytrain'] ['waiting', 'one-sided', 'adagrad', 'averages']"
    assert method == "True"


# --- an optimiser reader --------------------------------------------------------------------------------------------


class Padam(torch.optim.Optimizer):
    """Adam without momentum, with a power of v: θ ← θ − α g/v̂^q, and weight decay added to the gradient."""

    __module__, __qualname__ = "padam.optim", "Padam"

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.95, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay, "partial": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "second": torch.zeros_like(p)}
                state["step"] += 1
                g = p.grad + group["weight_decay"] * p
                state["second"].mul_(group["beta"]).addcmul_(g, g, value=1 - group["beta"])
                root = (state["second"] / (1 - group["beta"] ** state["step"])) ** group["partial"]
                p.sub_(g / (root + 1e-8), alpha=group["lr"])


def test_an_optimiser_reader(monkeypatch, tmp_path):
    monkeypatch.setattr(readers, "_registry", dict(readers._registry))
    record = readers.register(Recipe.of("optimiser reader").entered(monkeypatch))
    torch.manual_seed(0)
    model = mlp(3, 4, 2)
    optimizer = Padam(model.parameters())
    v: dict[str, Tensor] = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(6, 3)).square().mean().backward()
        for name, p in model.named_parameters():
            v[name] = 0.95 * v[name] + 0.05 * (p.grad.double() + 0.1 * p.detach().double()).square()
        optimizer.step()
    expected = {name: each / (1 - 0.95**12) for name, each in v.items()}

    assert ba.readers.reader_of(optimizer) is record
    assert_close(ba.readers.read_optimizer(model, optimizer).second_moment, expected)
    posterior = ba.Posterior.from_optimizer(model, optimizer, 100)
    # δ = N × weight decay.
    assert_close(posterior.variance, {name: 1 / (100 * each.sqrt() + 10.0) for name, each in expected.items()})

    # A file is identified by its entries.
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    read = ba.readers.read_checkpoint(tmp_path / "c.pt")
    assert ba.readers.identify_reader(read.optimizer).name == "padam"
    again = ba.Posterior.from_checkpoint(tmp_path / "c.pt", model, 100)
    assert_close(again.variance, posterior.variance)
    with pytest.raises(SettingError, match="replace=True"):
        readers.register(record)


# --- a likelihood ---------------------------------------------------------------------------------------------------


def test_a_likelihood(monkeypatch):
    record = Recipe.of("likelihood").entered(monkeypatch)
    monkeypatch.setitem(LIKELIHOODS, record.name, record)  # type: ignore[arg-type]
    name = record.name
    x = torch.linspace(-2, 2, 300)[:, None].double()
    torch.manual_seed(0)
    y = torch.distributions.Exponential((-1 - x.sin()).exp()).sample()

    # The loss and its Hessian, which is 1 in expectation over y.
    f = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    times = torch.rand(2, 5, 3, dtype=torch.float64)
    given = torch.distributions.Exponential((-f).exp())
    loss = record.loss(f, times)
    assert_close(loss, -given.log_prob(times).mean(dim=(1, 2)))
    mean_loss = record.loss(f, f.detach().exp()).sum() * 15
    (slope,) = torch.autograd.grad(mean_loss, f, create_graph=True)
    assert_close(torch.autograd.grad(slope.sum(), f)[0], record.hessian_diagonal(f.detach()))

    model = mlp(1, 16, record.n_outputs(y)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rest, train = torch.randperm(300).split([120, 180])
    for _ in range(200):
        optimizer.zero_grad()
        record.loss(model(x[train])[None], record.shaped(y[train], x)[None]).sum().backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 180, prior_precision=1.0)
    found = ba.calibrate(posterior, (x[rest], y[rest]), likelihood=name)
    p = found.predict(x[rest], likelihood=name)

    # p(y) by scipy: an exponential variable whose log-mean is Gaussian.
    for number in (0, 1, 2):
        at, mean, sd = float(y[rest][number]), float(p.mean[number]), float(p.variance[number].sqrt())

        def density(f: float, at: float = at, mean: float = mean, sd: float = sd) -> float:
            return float(stats.expon.pdf(at, scale=math.exp(f)) * stats.norm.pdf(f, mean, sd))

        mass, _ = integrate.quad(density, mean - 9 * sd, mean + 9 * sd, points=[mean])
        assert_close(p.log_prob(y[rest])[number], math.log(mass), rtol=1e-6)
    draws = p.sample(40_000, generator=torch.Generator().manual_seed(0))
    assert_close(draws.mean(dim=0), p.predicted_mean, rtol=0.05)
    assert_close(draws.var(dim=0), p.total_variance, rtol=0.2)

    best = -torch.distributions.Exponential((-1 - x[rest].sin()).exp()).log_prob(y[rest]).mean()
    assert ba.scores.nll(p, y[rest]) < float(best) + 0.15
    assert 0.8 < ba.scores.coverage(p, y[rest], level=0.9) <= 1
    assert len(ba.audit(found, (x, y)).suspects(5)) == 5
    assert ba.Mixture([found, found]).predict(x, likelihood=name).entropy().isfinite().all()


# --- a covariance structure -----------------------------------------------------------------------------------------


def test_a_covariance_structure(monkeypatch, tmp_path):
    spec = Recipe.of("covariance structure").entered(monkeypatch)
    monkeypatch.setitem(STRUCTURES, spec.name, spec)
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    record = ba.Recorder(optimizer, keep=8, every=1)
    gradients = []
    for _ in range(8):
        optimizer.zero_grad()
        (model(torch.randn(5, 3).double()) - 1).square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    with pytest.raises(SettingError, match="recorded gradients"):
        ba.Posterior.from_optimizer(model, optimizer, 40, structure="one-sided")
    posterior = ba.Posterior.from_optimizer(model, optimizer, 40, structure="one-sided", recorder=record)

    # The dense covariance, weights in the order of W.flatten(), then the bias; δ = N × weight decay = 4.
    stack = torch.stack([each["weight"] for each in gradients])
    basis = torch.linalg.eigh(sum(g @ g.T for g in stack)).eigenvectors.contiguous()
    turn = torch.kron(basis, torch.eye(3).double())
    squares = (basis.T @ stack).square().mean(dim=0)
    bias = torch.stack([each["bias"] for each in gradients]).square().mean(dim=0)
    dense = torch.block_diag(
        turn @ torch.diag(1 / (40 * squares.flatten().sqrt() + 4)) @ turn.T, torch.diag(1 / (40 * bias.sqrt() + 4))
    )
    mean = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    reference = torch.distributions.MultivariateNormal(mean, dense)

    def flat(named: Any) -> Tensor:
        return torch.cat([named["weight"].flatten(-2), named["bias"]], dim=-1)

    for found in (posterior, posterior.to(dtype=torch.float64)):
        assert found.structure.kind == "one-sided"
        assert_close(flat(found.variance), dense.diagonal())
    drawn = posterior.sample(20_000, generator=torch.Generator().manual_seed(0))
    assert_close(flat(drawn).mean(dim=0), mean, atol=5 * float(dense.diagonal().max().sqrt()) / 20_000**0.5)
    assert_close(flat(drawn).T.cov(), dense, rtol=0.05)
    assert_close(posterior.log_prob(drawn)[:5], reference.log_prob(flat(drawn)[:5]))
    assert_close(posterior.entropy(), reference.entropy())

    posterior.save(tmp_path / "p.safetensors")
    for again in (
        ba.Posterior.load(tmp_path / "p.safetensors", model),
        ba.GaussianWeights.open(tmp_path / "p.safetensors"),
    ):
        assert type(again.structure) is type(posterior.structure)
        assert_close(again.log_prob(drawn)[:5], posterior.log_prob(drawn)[:5])
        assert [again.part(name).structure.kind for name in again.mode] == ["one-sided"] * 2

    # A linear network: Var[f] = J Σ Jᵀ.
    x = torch.randn(4, 3).double()
    jacobian = torch.cat([torch.kron(torch.eye(2).double(), x[:1]), torch.eye(2).double()], dim=1)
    p = posterior.predict(x, likelihood="regression", covariance=True)
    assert_close(p.covariance[0], jacobian @ dense @ jacobian.T)


# --- a checkpoint format --------------------------------------------------------------------------------------------


def test_a_checkpoint_format(monkeypatch, tmp_path):
    monkeypatch.setattr(formats, "_registry", dict(formats._registry))
    added = formats.register_format(Recipe.of("checkpoint format").entered(monkeypatch))
    assert ba.readers.registered_formats()[0] is added
    with pytest.raises(SettingError, match="replace=True"):
        formats.register_format(added)
    torch.manual_seed(0)
    model = mlp(3, 5, 2)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for _ in range(7):
        optimizer.zero_grad()
        model(torch.randn(6, 3)).square().mean().backward()
        optimizer.step()
    tree = {
        "tinytrain": 7,
        "weights": {name: p.tolist() for name, p in model.named_parameters()},
        "squares": {name: optimizer.state[p]["exp_avg_sq"].tolist() for name, p in model.named_parameters()},
        "beta2": 0.999,
        "decay": 0.1,
        "examples": 40,
    }
    path = tmp_path / "run.tiny"
    path.write_text(json.dumps(tree))

    read = ba.readers.read_checkpoint(path)
    assert (read.format, read.recorded.step, read.recorded.n_data) == ("tinytrain", 7, 40)
    assert_close(dict(read.weights), dict(model.state_dict()))
    live = ba.Posterior.from_optimizer(model, optimizer, 40)
    fresh = mlp(3, 5, 2)
    found = ba.Posterior.from_checkpoint(path, fresh)
    assert_close(found.mean, live.mean)
    assert_close(found.variance, live.variance)
    assert_close(dict(ba.GaussianWeights.open(path).variance), live.variance)
    with pytest.raises(FileError, match="cannot be written"):
        ba.readers.write_pruned(read, {}, tmp_path / "out.tiny")

    path.write_text(json.dumps(tree)[:-50])
    with pytest.raises(FileError, match=r"run\.tiny is damaged"):
        ba.readers.read_checkpoint(path)
    path.write_text(json.dumps({"tinytrain": 7, "weights": {"w": [1.0]}}))
    with pytest.raises(FileError, match="damaged: 'squares'"):
        ba.readers.read_checkpoint(path)
    path.write_text(json.dumps({"another": 7}))
    with pytest.raises(FileError, match="no known format"):
        ba.readers.read_checkpoint(path)


# --- a training rule ------------------------------------------------------------------------------------------------


def test_a_training_rule(monkeypatch):
    ((name, rule),) = Recipe.of("training rule").entered(monkeypatch).items()
    monkeypatch.setitem(RULES, name, rule)  # type: ignore[arg-type]
    network, seeds, steps, n_data = Network(2, (4,), 1), (0, 1), 6, 50
    torch.manual_seed(0)
    x, y = torch.randn(n_data, 2), torch.randn(n_data, 1)

    # Two networks as a stack, against the equations in float64.
    stack = Stack(network, rule(), seeds, lambda rows: (x[rows], lambda f: 2 * (f - y[rows]) / 10), n_data=n_data)
    theta, total = stack.weights.double().clone(), torch.zeros_like(stack.weights, dtype=torch.float64)
    rows = torch.randint(n_data, (steps, len(seeds), 10))
    stack.prepare(rows, constant(0.05))
    stack.run(steps)
    for batch in rows:
        theta.requires_grad_()
        f = forward(network, unflatten(network, theta), x[batch].double())
        loss = (f - y[batch].double()).square().mean(dim=(1, 2)).sum()
        (g,) = torch.autograd.grad(loss, theta)
        total += g.square()
        theta = theta.detach() - 0.05 * g / (total.sqrt() + 1e-8)
    found = stack.gaussian()
    assert found is not None
    assert_close(found.mean, theta, rtol=1e-4)
    assert_close(found.variance, 1 / (n_data * (total / steps).sqrt() + 1), rtol=1e-4)

    # As a method, which the import of `methods` makes of every rule.
    monkeypatch.setitem(methods.METHODS, name, partial(methods.fit_rule, name))  # type: ignore[arg-type]
    x = torch.linspace(-1, 1, 200)[:, None]
    y = x.square() + 0.1 * torch.randn(x.shape)
    fitted = methods.fit(name, x, y, likelihood="regression", hidden=(16,), epochs=100, seeds=(0, 1))
    assert len(fitted.posteriors) == 2
    for posterior, p in zip(fitted.posteriors, fitted.predict(x), strict=True):
        assert all(bool((v > 0).all() and (v <= 1).all()) for v in posterior.variance.values())
        # The parabola's own standard deviation is 0.3.
        assert float((posterior.model(x) - x.square()).detach().square().mean().sqrt()) < 0.1
        assert p.log_prob(y).isfinite().all()


# --- a bandit agent -------------------------------------------------------------------------------------------------


def test_a_bandit_agent(monkeypatch, tmp_path):
    ((name, entry),) = Recipe.of("bandit agent").entered(monkeypatch).items()
    monkeypatch.setitem(REGISTRY, name, entry)  # type: ignore[arg-type]
    assert (agent_settings(name).noise_variance, agent_settings(name, "paper").noise_variance) == (0.1, 1.0)
    with pytest.raises(SettingError, match="noise_variance must be positive and finite, got -1"):
        agent_settings(name, noise_variance=-1)

    # Arm 2 pays most; a bandit without contexts finds it.
    source = np.random.default_rng(0)
    pays = np.array([0.0, 0.3, 1.0]) + 0.3 * source.normal(size=(400, 3))
    found = simulate(reward_problem(source.normal(size=(400, 2)), pays), name, runs=3)
    late = (found.reward[:, -1] - found.reward[:, 199]) / 200
    assert late.min() > 0.9
    assert simulate(reward_problem(source.normal(size=(400, 2)), pays), "uniform").reward[:, -1].max() < 250

    agent = make_agent(name, 2, 3, noise_variance=1.0, initial_pulls=0, forget=50.0)
    agent.log(tmp_path / "log.jsonl")
    arms, rewards = source.integers(3, size=200), source.normal(size=200)
    for arm, reward in zip(arms, rewards, strict=True):
        agent.update([0.0, 1.0], int(arm), reward=float(reward))
    # The closed form, with weights 2^(−age/50), in its own draws.
    weights = 2.0 ** (-np.arange(199, -1, -1) / 50)
    precision = np.array([1 + weights[arms == arm].sum() for arm in range(3)])
    mean = np.array([(weights * rewards)[arms == arm].sum() for arm in range(3)]) / precision
    draws = agent._actor._draws(torch.zeros(1, 1, 2), 50_000, Streams([0], "test"))[0, 0]
    assert_close(draws.mean(dim=0), mean, atol=5 / math.sqrt(50_000 * precision.min()))
    assert_close(draws.var(dim=0), 1 / precision, rtol=0.05)

    decision = agent.decide([0.0, 1.0], draws=20_000)
    share = float((draws.argmax(dim=1) == decision.arm).float().mean())
    assert decision.probability == approx(share, abs=0.03)
    agent.save(tmp_path / "agent")
    for again in (Agent.load(tmp_path / "agent"), replay(tmp_path / "log.jsonl")):
        assert (again.settings, again.pending) == (agent.settings, (decision.id,))
        for key, tensor in agent._actor.tensors().items():
            assert_close(again._actor.tensors()[key], tensor)
