"""Draws from a checkpoint: those of the posterior read with the model, and little memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import bayesadam as ba
from bayesadam.__main__ import main
from bayesadam.cli import app
from bayesadam.errors import FileError, ImproperError, SettingError
from floats import assert_close
from processes import run_python


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, steps: int = 6) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def draw(path: Path, out: Path, n_data: float | None = None, *, seed: int = 0, **options: object) -> None:
    ba.GaussianWeights.open(path, n_data, **options).write_sample(out, seed=seed)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.01)
    trained(model, optimizer, torch.arange(11).repeat(4))
    path = tmp_path / "model.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": 400}, path)
    return path, model, optimizer


@pytest.mark.parametrize("form", ["map", "likelihood"])
@pytest.mark.parametrize("prior", [None, 3.0])
def test_the_draw_is_the_posteriors(saved, tmp_path, form, prior):
    path, model, optimizer = saved
    out = tmp_path / "draw.safetensors"
    draw(path, out, seed=5, form=form, prior_precision=prior)
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=400, form=form, prior_precision=prior)
    expected = posterior.sample(generator=torch.Generator().manual_seed(5))
    found = load_file(out)
    assert set(found) == set(model.state_dict())
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
        assert not torch.equal(values, model.state_dict()[name])
    assert torch.equal(found["head.weight"], found["embed.weight"])
    assert torch.equal(found["frozen"], model.frozen)
    assert torch.equal(found["norm.running_mean"], model.norm.running_mean)


def test_what_cannot_be_drawn_is_refused_and_nothing_written(saved, tmp_path):
    path, model, optimizer = saved
    out = tmp_path / "draw.safetensors"
    with pytest.raises(FileError, match="safetensors"):
        draw(path, tmp_path / "draw.pt")
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(plain, path)
    with pytest.raises(SettingError, match="pass n_data="):
        draw(path, out)
    for state in plain["optimizer"]["state"].values():
        state["exp_avg_sq"].zero_()
    torch.save(plain, path)
    with pytest.raises(ImproperError, match="prior_precision"):
        draw(path, out, 400, prior_precision=0.0)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "bad",
    [
        {"prior_precision": -1e6},
        {"prior_precision": float("nan")},
        {"prior_precision": float("inf")},
        {"prior_precision": "x"},
        {"prior_precision": torch.tensor(-1.0)},
        {"n_data": float("nan")},
        {"n_data": -5},
        {"n_data": "x"},
        {"power": 0.0},
        {"power": float("nan")},
        {"power": "x"},
        {"power": 1.0},
        {"batch_size": 0},
        {"form": "laplace"},
    ],
    ids=str,
)
def test_settings_are_refused_as_the_posterior_refuses_them(saved, tmp_path, bad):
    path, model, optimizer = saved
    with pytest.raises(SettingError) as expected:
        ba.Posterior.from_optimizer(model, optimizer, **{"n_data": 400, **bad})
    with pytest.raises(SettingError) as found:
        draw(path, tmp_path / "draw.safetensors", **bad)
    assert str(found.value) == str(expected.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_weight_decay_that_is_no_number_is_refused(saved, tmp_path):
    path, model, optimizer = saved
    optimizer.param_groups[0]["weight_decay"] = float("nan")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": 400}, path)
    with pytest.raises(SettingError, match="finite"):
        draw(path, tmp_path / "draw.safetensors")
    assert list(tmp_path.iterdir()) == [path]


def test_of_several_weights_those_asked_for_are_drawn(saved, tmp_path):
    path, model, optimizer = saved
    state, ema = model.state_dict(), {name: tensor + 1 for name, tensor in model.state_dict().items()}
    torch.save({"a": state, "b": ema, "x": optimizer.state_dict(), "y": optimizer.state_dict(), "n_data": 400}, path)
    out = tmp_path / "draw.safetensors"
    with pytest.raises(FileError, match="weights_key='a'"):
        draw(path, out)
    draws = {}
    for key in ("a", "b"):
        draw(path, out, weights_key=key, optimizer_key="x")
        draws[key] = load_file(out)["norm.weight"]
    assert_close(draws["a"] + 1, draws["b"], atol=1e-6)


MEASURED = """
import sys, threading, time
import torch
import bayesadam as ba
from bayesadam.inspecting import inspect

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

torch.set_num_threads(1)
path, small, task = sys.argv[1:4]
run = {
    "inspect": lambda p: inspect(p, n_data=1000),
    "prune": lambda p: ba.pruning.prune_checkpoint(p, p + ".pruned.safetensors", 0.5),
    "sample": lambda p: ba.GaussianWeights.open(p, 1000, prior_precision=1.0).write_sample(p + ".draw.safetensors"),
}[task]
# Once on a small file, for what the first use brings into memory.
run(small)
before, peak, stop = anonymous(), [0], threading.Event()

def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
run(path)
stop.set()
watcher.join()
print(peak[0] - before)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A small and a large checkpoint, for all tasks."""
    paths = []
    for width, layers in ((32, 2), (4096, 4)):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        paths.append(tmp_path_factory.mktemp("saved") / f"{width}.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, paths[-1])
    return paths


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(("task", "times"), [("inspect", 8.0), ("prune", 8.0), ("sample", 4.0)])
def test_memory_is_a_matter_of_the_largest_tensor(files, task, times):
    small, large = files
    done = run_python(MEASURED, large, small, task)
    assert done.returncode == 0, done.stderr
    largest = 4096 * 4096 * 4
    assert int(done.stdout) <= times * largest


def test_the_command_writes_the_draw_and_a_record(saved, tmp_path):
    path, _, _ = saved
    out, expected = tmp_path / "draw.safetensors", tmp_path / "expected.safetensors"
    done = CliRunner().invoke(app, ["sample", str(path), "--n-data", "400", "-o", str(out), "--seed", "5"])
    assert done.exit_code == 0, done.output
    draw(path, expected, 400, seed=5)
    assert out.read_bytes() == expected.read_bytes()
    assert json.loads((tmp_path / "draw.metrics.json").read_text())["settings"]["n_data"] == 400


def test_the_command_refuses_what_it_cannot_draw_in_one_line(saved, tmp_path, capsys):
    path, model, optimizer = saved
    out = tmp_path / "draw.safetensors"
    for option, value, told in (("--prior-precision", "inf", "prior precision"), ("--n-data", "nan", "n_data must")):
        assert main(["sample", str(path), option, value, "-o", str(out)]) == 2
        assert told in capsys.readouterr().err
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert main(["sample", str(path), "-o", str(out)]) == 2
    assert capsys.readouterr().err.endswith(": pass --n-data\n")
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_does_not_write_over_what_it_reads(tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, torch.randn(8, 3))
    weights, state = tmp_path / "w.safetensors", tmp_path / "o.pt"
    save_file(model.state_dict(), weights)
    torch.save(optimizer.state_dict(), state)
    before = weights.read_bytes()
    (tmp_path / "link.safetensors").symlink_to(weights)
    given = ["sample", str(weights), "--optimizer-file", str(state), "--n-data", "9", "-o"]
    for out in (weights, tmp_path / "link.safetensors", tmp_path / "x" / ".." / "w.safetensors"):
        (tmp_path / "x").mkdir(exist_ok=True)
        assert main([*given, str(out)]) == 2
        assert "write to another file" in capsys.readouterr().err
        assert weights.read_bytes() == before
    with pytest.raises(SystemExit) as stop:
        sys.exit(main([*given, str(tmp_path / "new.safetensors")]))
    assert stop.value.code == 0
