"""A deployed posterior: the same answers as `predict`, wherever it runs."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typer.testing import CliRunner

import bayesadam as ba
from bayesadam.cli import app
from bayesadam.errors import BayesAdamError, CalibrationError, SettingError
from bayesadam.likelihoods import likelihood as likelihood_of
from cases import quick_of
from floats import assert_close
from processes import PATIENCE

Inputs = Any


def images(n: int, seed: int = 0) -> Tensor:
    return torch.rand(n, 1, 12, 12, generator=torch.Generator().manual_seed(seed))


def lenet() -> nn.Module:
    conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(conv, nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


class Pair(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(5, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.head(torch.relu(self.one(one) + self.other(other)))


class Encoder(nn.Module):
    """Attention over tokens, with padding, as a mapping; logits in an attribute of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.block(self.tokens(input_ids), src_key_padding_mask=attention_mask == 0)
        weights = attention_mask[..., None].to(hidden)
        return {"logits": self.head((hidden * weights).sum(dim=1) / weights.sum(dim=1))}


def pairs(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=generator), torch.randn(n, 6, generator=generator)


def texts(n: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 7, (n, 1), generator=generator)
    mask = (torch.arange(6) < lengths).long()
    return {"input_ids": torch.randint(20, (n, 6), generator=generator), "attention_mask": mask}


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Inputs]]] = {
    "lenet": (lenet, images),
    "pair": (Pair, pairs),
    "encoder": (Encoder, texts),
}


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    if isinstance(inputs, dict):
        found = model(**inputs)
    else:
        found = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return found["logits"] if isinstance(found, dict) else found


def calibrated(name: str, likelihood: str = "classification", **options: Any) -> ba.Posterior:
    make, inputs_of = NETWORKS[name]
    torch.manual_seed(0)
    model, x = make(), inputs_of(60)
    y = torch.randint(3, (60,)) if likelihood == "classification" else torch.randint(2, (60, 3)).float()
    optimizer, record = torch.optim.Adam(model.parameters(), lr=0.01), likelihood_of(likelihood)
    for _ in range(5):
        optimizer.zero_grad()
        record.loss(call(model, x)[None], y[None]).sum().backward()
        optimizer.step()
    found = ba.Posterior.from_optimizer(model, optimizer, n_data=60, batch_size=60, likelihood=likelihood)
    return ba.calibrate(found, [(x, y)], **options)


def assert_same(answer: Any, p: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """An answer, or its dict, against a prediction."""
    told = answer._asdict() if isinstance(answer, tuple) else answer
    how: Any = {"rtol": rtol, "atol": atol}
    assert_close(told["novelty"], p.novelty, **how)
    # Of tokens there is nothing to compare.
    assert told.get("in_range") is None or bool(told["in_range"].all())
    assert_close(told["p_value"].double(), p.novelty_pvalue, rtol=1e-6, atol=1e-6)
    if "mean" in told and told["mean"] is not None:
        assert_close(told["mean"], p.predicted_mean, **how)
        assert_close(told["stddev"], p.stddev, **how)
        low, high = p.prediction_set(0.95)
        assert_close(told["lower"], low, **how)
        assert_close(told["upper"], high, **how)
        assert torch.equal(told["answered"], p.answered)
    else:
        assert_close(told["probs"], p.probs, **how)
        assert torch.equal(told["prediction_set"], p.prediction_set(0.95))


@pytest.mark.parametrize("name", NETWORKS)
def test_it_answers_as_predict_does(name):
    posterior = calibrated(name)
    served, x = ba.deploy(posterior), NETWORKS[name][1](7, 1)
    before = {key: tensor.clone() for key, tensor in posterior.model.state_dict().items()}
    with torch.no_grad():
        assert_same(served(x), posterior.predict(x))
        alone = served(**x) if isinstance(x, dict) else served(*x) if isinstance(x, tuple) else served(x)
        assert_close(alone.probs, served(x).probs)
    assert all(torch.equal(before[key], tensor) for key, tensor in posterior.model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in posterior.model.modules())


NUMBERS = ["regression", "heteroscedastic", "poisson"]


def of_numbers(likelihood: str) -> tuple[ba.Posterior, tuple[Tensor, Tensor], dict[str, Any]]:
    """Trained on other examples than these, and how it is calibrated."""
    torch.manual_seed(0)
    record = likelihood_of(likelihood)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2 * record.outputs_per_target))
    x = torch.randn(200, 3)
    counts = likelihood == "poisson"
    y = torch.poisson((x[:, :2] / 2).exp()) if counts else x[:, :2] + 0.1 * torch.randn(200, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        record.loss(model(x[:100])[None], y[None, :100]).sum().backward()
        optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=100, batch_size=100, likelihood=likelihood)
    return posterior, (x[100:], y[100:]), {"predictive": "forward", "risk": 0.3, "tolerance": 3.0 if counts else 0.5}


@pytest.mark.filterwarnings("ignore:these look like the training data")
@pytest.mark.parametrize("likelihood", NUMBERS)
def test_numbers(likelihood, tmp_path):
    posterior, (x, y), options = of_numbers(likelihood)
    if likelihood == "regression":
        with pytest.raises(CalibrationError, match="predictive='forward'"):
            ba.deploy(ba.calibrate(posterior, (x, y)))
    found = ba.calibrate(posterior, (x, y), **options)
    with torch.no_grad():
        assert_same(ba.deploy(found)(x[:9]), found.predict(x[:9]), rtol=1e-4)
    again = ba.Posterior.load(_saved(found, tmp_path), posterior.model)
    assert_close(again.predict(x).stddev, found.predict(x).stddev)


@pytest.mark.filterwarnings("ignore:these look like the training data")
@pytest.mark.parametrize("likelihood", quick_of(NUMBERS, "heteroscedastic"))
def test_numbers_from_a_file(likelihood, tmp_path):
    posterior, (x, y), options = of_numbers(likelihood)
    found = ba.calibrate(posterior, (x, y), **options)
    ba.deploy(found).save(tmp_path / "served.pt2", x[:4])
    assert_same(torch.export.load(tmp_path / "served.pt2").module()(x[:3]), found.predict(x[:3]), rtol=1e-4)


def _saved(posterior: ba.Posterior, folder: Path) -> Path:
    posterior.save(folder / "posterior.safetensors")
    return folder / "posterior.safetensors"


@pytest.mark.parametrize("name", quick_of(["lenet", "pair"], "pair"))
def test_it_says_which_examples_are_in_range(name, tmp_path):
    served, good = ba.deploy(calibrated(name)), NETWORKS[name][1](2, 1)
    mixed = pytree.tree_map(lambda leaf: torch.cat([leaf, 100 * leaf]), good)
    served.save(tmp_path / "served.pt2")
    with torch.no_grad():
        assert served(mixed).in_range.tolist() == [True, True, False, False]
    program = torch.export.load(tmp_path / "served.pt2").module()
    assert program(mixed)["in_range"].tolist() == [True, True, False, False]


def test_binary():
    posterior = calibrated("pair", "binary")
    served, x = ba.deploy(posterior), pairs(7, 1)
    with torch.no_grad():
        assert_same(served(x), posterior.predict(x))


@pytest.mark.parametrize("name", quick_of(NETWORKS, "encoder"))
def test_a_file_for_torch_alone(name, tmp_path):
    posterior, inputs_of = calibrated(name), NETWORKS[name][1]
    served, path = ba.deploy(posterior), tmp_path / "served.pt2"
    served.save(path, inputs_of(4))
    extra = {"bayesadam.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    for size in (1, 9):
        assert_same(program(inputs_of(size, 1)), posterior.predict(inputs_of(size, 1)))
    about = json.loads(extra["bayesadam.json"])
    assert about["likelihood"] == "classification"
    assert "60 held-out examples" in about["calibrated"]
    assert about["bayesadam"] == ba.__version__


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_file_for_onnxruntime(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    posterior, inputs_of = calibrated(name), NETWORKS[name][1]
    path = tmp_path / "served.onnx"
    ba.deploy(posterior).save(path, inputs_of(4))
    session = runtime.InferenceSession(path)
    assert json.loads(session.get_modelmeta().custom_metadata_map["bayesadam"])["likelihood"] == "classification"
    for size in (1, 9):
        x = inputs_of(size, 1)
        leaves = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]
        feeds = {given.name: leaf.numpy() for given, leaf in zip(session.get_inputs(), leaves, strict=True)}
        names = [each.name for each in session.get_outputs()]
        found = {key: torch.from_numpy(np.array(v)) for key, v in zip(names, session.run(None, feeds), strict=True)}
        assert_same(found, posterior.predict(x), atol=1e-5)


@pytest.mark.slow
def test_a_process_without_bayesadam_runs_it(tmp_path):
    posterior, path, x = calibrated("lenet"), tmp_path / "served.pt2", images(3, 1)
    ba.deploy(posterior).save(path, images(4))
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch\nsys.modules['bayesadam'] = None\n"
        f"program = torch.export.load({str(path)!r}).module()\n"
        f"torch.save(program(torch.load({str(tmp_path / 'x.pt')!r})), {str(tmp_path / 'answer.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
    assert_same(torch.load(tmp_path / "answer.pt"), posterior.predict(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_it_compiles_in_one_graph(name):
    posterior = calibrated(name)
    served, x = torch.compile(ba.deploy(posterior), fullgraph=True, backend="aot_eager"), NETWORKS[name][1](7, 1)
    with torch.no_grad():
        assert_same(served(x), posterior.predict(x))


@pytest.mark.parametrize("by", ["confidence", "novelty"])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_answers_what_predict_does(name, by):
    # The classes are chance, and most answers wrong.
    posterior, x = calibrated(name, risk=0.95, answer_by=by), NETWORKS[name][1](40, 1)
    served = ba.deploy(posterior)
    with torch.no_grad():
        assert torch.equal(served(x).answered, posterior.predict(x).answered)
    assert served.about["answers"] == str(posterior.calibration.abstention)


@pytest.mark.parametrize("by", quick_of(["confidence", "novelty"], "confidence"))
@pytest.mark.parametrize("name", quick_of(NETWORKS, "lenet"))
def test_a_file_answers_what_predict_does(name, by, tmp_path):
    posterior, x = calibrated(name, risk=0.95, answer_by=by), NETWORKS[name][1](40, 1)
    ba.deploy(posterior).save(tmp_path / "served.pt2", NETWORKS[name][1](4))
    found = torch.export.load(tmp_path / "served.pt2").module()(x)["answered"]
    assert torch.equal(found, posterior.predict(x).answered)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_models_alone(kind):
    posterior = calibrated("lenet")
    whole, served = ba.deploy(posterior), ba.deploy(posterior).to(kind)
    assert next(served.model.parameters()).dtype == kind
    assert all(buffer.dtype in (torch.float32, torch.int64) for buffer in served._buffers.values())
    with torch.no_grad():
        found, expected = served(images(5, 1).to(kind)), whole(images(5, 1))
    assert_close(found.probs, expected.probs, rtol=0.05, atol=0.02)
    assert_close(found.novelty, expected.novelty, rtol=0.05, atol=0.02)


def test_its_state_can_be_loaded():
    one, other = ba.deploy(calibrated("lenet")), ba.deploy(calibrated("lenet"))
    for parameter in other.model.parameters():
        parameter.zero_()
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert_close(other(images(3)).probs, one(images(3)).probs)


def test_a_forward_of_ones_own():
    make = lambda model, x: model(x)[..., :3]  # noqa: E731
    posterior = calibrated("lenet", forward=make)
    with torch.no_grad():
        found = ba.deploy(posterior, forward=make)(images(4, 1))
    assert_close(found.probs, posterior.predict(images(4, 1), forward=make).probs)


def test_what_cannot_be_deployed_says_what_to_do(tmp_path):
    posterior = calibrated("lenet")
    with pytest.raises(CalibrationError, match="calibrate"):
        ba.deploy(posterior.replace(temperature=2.0))
    with pytest.raises(CalibrationError, match="method='temperature'"):
        ba.deploy(calibrated("lenet", method="validation"))
    served = ba.deploy(posterior)
    with pytest.raises(SettingError, match="must end in one of"):
        served.save(tmp_path / "served.pth", images(4))
    with pytest.raises(SettingError, match="at least two"):
        served.save(tmp_path / "served.pt2", images(1))
    with pytest.raises(SettingError, match="level"):
        ba.deploy(posterior, level=1.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda served: pickle.loads(pickle.dumps(served))])
def test_a_copy_answers_for_itself(copied):
    served = ba.deploy(calibrated("lenet"))
    with torch.no_grad():
        before, again = served(images(3, 1)).probs, copied(served)
        for parameter in served.model.parameters():
            parameter.zero_()
        assert_close(again(images(3, 1)).probs, before)


def test_it_stays_in_evaluation_mode():
    served = ba.deploy(calibrated("encoder"))
    nn.Sequential(served).train()
    assert not any(module.training for module in served.modules())


def test_inputs_out_of_range_are_not_answered(tmp_path):
    posterior = calibrated("lenet", risk=0.9)
    x = torch.cat([images(3, 1), 255 * images(3, 2)])
    with torch.no_grad():
        found = ba.deploy(posterior)(x)
    with pytest.warns(ba.errors.InputRangeWarning):
        p = posterior.predict(x[3:])
    assert found.answered.tolist() == found.in_range.tolist() == [True] * 3 + [False] * 3
    assert not p.answered.any()
    assert posterior.predict(x[:3]).answered.all()


def test_real_numbers_are_taken_in_the_models_type():
    served = ba.deploy(calibrated("lenet"))
    with torch.no_grad():
        assert_close(served(images(3, 1).double()).probs, served(images(3, 1)).probs)
        assert served.half()(images(3, 1)).probs.dtype == torch.float32


def test_a_type_that_onnxruntime_does_not_run_is_refused(tmp_path):
    with pytest.raises(SettingError, match="bfloat16"):
        ba.deploy(calibrated("lenet")).bfloat16().save(tmp_path / "served.onnx", images(2))


@pytest.fixture
def application(tmp_path, monkeypatch):
    """A folder with a saved posterior and a module that makes its network."""
    posterior = calibrated("lenet")
    posterior.save(tmp_path / "posterior.safetensors")
    torch.save(posterior.model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "app_of_ours.py").write_text(
        "import torch\nfrom tests.test_deploy import images, lenet\n"
        "def fresh():\n    return lenet()\n"
        "def model():\n    made = lenet()\n    made.load_state_dict(torch.load('weights.pt'))\n    return made\n"
        "def example():\n    return images(3)\n"
        "def nothing():\n    return None\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    yield posterior
    sys.modules.pop("app_of_ours", None)


def test_the_command_writes_the_same_file(application, tmp_path):
    found = CliRunner().invoke(app, ["deploy", "posterior.safetensors", "app_of_ours:model", "-o", "net/served.pt2"])
    assert found.exit_code == 0, found.output
    program = torch.export.load("net/served.pt2").module()
    assert_same(program(images(5, 1)), application.predict(images(5, 1)))
    assert "likelihood: classification" in found.output
    by_example = ["deploy", "posterior.safetensors", "app_of_ours:model", "--example", "app_of_ours:example"]
    assert CliRunner().invoke(app, by_example).exit_code == 0
    assert Path("out/deploy/served.pt2").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("app_of_ours", "must be module:function"),
        ("app_of_ours:missing", "missing"),
        ("no_such_app:model", "no_such_app"),
        ("app_of_ours:nothing", "gave NoneType"),
        # Its batch norm has other running statistics.
        ("app_of_ours:fresh", "running statistics"),
    ],
)
def test_the_command_says_what_is_wrong(application, model, message):
    found = CliRunner().invoke(app, ["deploy", "posterior.safetensors", model, "-o", "served.pt2"])
    assert isinstance(found.exception, BayesAdamError)
    assert message in str(found.exception)
    assert not Path("served.pt2").exists()
