"""The skeletons of docs/developer, followed: the code of a page is registered as it says, and used.

The new line enters the registry by monkeypatch, so that nothing stays.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributions import Exponential

import bayesadam as ba
import likelihoods.test_likelihoods as suite
from bayesadam.errors import FileError, SettingError
from bayesadam.likelihoods import LIKELIHOODS
from bayesadam.readers import registry as readers
from bayesadam.readers.formats import registry as formats
from cases import mlp, train
from floats import assert_close

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "developer").glob("*.md"))
TESTED = ("format", "likelihood", "reader", "structure")


class Recipe(NamedTuple):
    """The blocks of code of a page: a file, where there is one, and a line in a registry, where that is shown."""

    file: str
    code: str
    registry: str
    name: str
    line: str

    @classmethod
    def of(cls, page: str) -> Recipe:
        text = (ROOT / "docs" / "developer" / f"{page}.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```py\n# (\S+?)(?:, in (\w+))?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        files = [(path, code) for path, registry, code in blocks if not registry]
        lines = [block for block in blocks if block[1]]
        assert blocks
        assert len(files) <= 1
        assert len(lines) <= 1
        return cls(*(files or [("", "")])[0], *(lines or [("", "", "")])[0])

    def entered(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The entry that the line adds to the registry."""
        registry = importlib.import_module(_dotted(self.registry))
        assert hasattr(registry, self.name)
        return eval(f"({self.line})", vars(registry) | vars(self.module(monkeypatch)))[0]

    def module(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """The new file as a module; what goes into a file that is there has the names of that."""
        module = ModuleType(_dotted(self.file or self.registry))
        if (ROOT / (self.file or self.registry)).is_file():
            vars(module).update(vars(importlib.import_module(module.__name__)))
        else:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(self.code, self.file, "exec", flags=annotations.compiler_flag), vars(module))
        return module


def _dotted(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_every_page_is_followed():
    assert {page.stem for page in PAGES} == set(TESTED)


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
    record = readers.register(Recipe.of("reader").entered(monkeypatch))
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


def test_a_likelihood(monkeypatch):
    record = Recipe.of("likelihood").entered(monkeypatch)
    monkeypatch.setitem(LIKELIHOODS, record.name, record)  # type: ignore[arg-type]
    monkeypatch.setitem(suite.EXAMPLES, record.name, (lambda f: Exponential((-f).exp()), suite.TARGETS))
    for check in (
        suite.test_the_loss_is_the_negative_log_likelihood_but_for_a_constant,
        suite.test_targets_of_a_data_set,
        suite.test_the_hessian_is_that_of_autograd,
        suite.test_the_mean_networks_distribution,
        suite.test_the_moments_and_the_density_are_averages_over_f,
        suite.test_networks_are_mixed,
        suite.test_novelty_grows_with_leverage,
    ):
        check(record)

    x = torch.linspace(-2, 2, 300)[:, None].double()
    y = Exponential((-1 - x.sin()).exp()).sample()
    model = mlp(1, 16, record.n_outputs(y)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    record.loss(model(x)[None], record.shaped(y, x)[None]).sum().backward()
    optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, 300, likelihood="waiting", prior_precision=1.0)
    low, high = ba.calibrate(posterior, (x, y))(x).interval(0.9)
    assert 0.8 < ((low <= y) & (y <= high)).double().mean() <= 1


def test_a_checkpoint_format(monkeypatch, tmp_path):
    monkeypatch.setattr(formats, "_registry", dict(formats._registry))
    added = formats.register_format(Recipe.of("format").entered(monkeypatch))
    assert ba.readers.registered_formats()[0] is added
    with pytest.raises(SettingError, match="choose another name"):
        formats.register_format(added)
    torch.manual_seed(0)
    model = mlp(3, 5, 2)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    train(model, optimizer, steps=7)
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


def test_a_structure(monkeypatch):
    build = Recipe.of("structure").module(monkeypatch).of_columns
    torch.manual_seed(0)
    gradients = {"weight": torch.randn(40, 3, 4, dtype=torch.float64), "bias": torch.randn(40, 3, dtype=torch.float64)}
    structure = build(gradients)
    left = structure.bases["weight"].left
    assert_close(left @ left.T, torch.eye(3, dtype=torch.float64))
    # In the coordinates the rows are uncorrelated, and the whole is as large as before.
    rotated = structure.into({"weight": gradients["weight"]})["weight"]
    between = torch.einsum("kij,klj->il", rotated, rotated)
    assert_close(between, between.diagonal().diag(), atol=1e-9)
    assert_close(structure.second_moment["weight"].sum(), gradients["weight"].square().mean(dim=0).sum())
    assert_close(structure.second_moment["bias"], gradients["bias"].square().mean(dim=0))
