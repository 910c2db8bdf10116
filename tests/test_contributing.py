"""Every recipe of CONTRIBUTING.md, followed: its code is taken from there, registered as it says, and used.

The new line enters the registry by monkeypatch, so that nothing stays.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import bayesadam as ba
from bayesadam.errors import FileError, SettingError
from bayesadam.likelihoods import LIKELIHOODS
from bayesadam.readers import registry as readers
from bayesadam.readers.formats import registry as formats
from cases import mlp
from floats import assert_close

ROOT = Path(__file__).parents[1]
TITLES = ("optimiser reader", "likelihood", "checkpoint format")


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


def _dotted(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


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

    # p(y) by the trapezoidal rule: an exponential variable whose log-mean is Gaussian.
    mean, sd = p.mean, p.variance.sqrt()
    z = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    rate = (-(mean + sd * z)).exp()
    density = rate * (-rate * y[rest]).exp() * (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    assert_close(p.log_prob(y[rest]).flatten(), torch.trapezoid(density, z, dim=1).log(), rtol=1e-6)
    draws = p.sample(10_000, generator=torch.Generator().manual_seed(0))
    assert_close(draws.mean(dim=0), p.predicted_mean, rtol=0.1)
    assert_close(draws.var(dim=0), p.total_variance, rtol=0.4)

    best = -torch.distributions.Exponential((-1 - x[rest].sin()).exp()).log_prob(y[rest]).mean()
    assert ba.scores.nll(p, y[rest]) < float(best) + 0.15
    assert 0.8 < ba.scores.coverage(p, y[rest], level=0.9) <= 1


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
