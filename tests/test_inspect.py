"""What `inspect` says of a checkpoint is what the posterior of the live optimiser says, without the model."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam import inspect
from bayesadam.errors import FileError
from bayesadam.inspecting import Inspection, diagnose_checkpoint
from bayesadam.readers import read_checkpoint
from cases import mlp, train
from floats import approx, assert_close


@pytest.fixture
def trained_pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Its last input is always zero, so that a column of the first layer is dead."""
    torch.manual_seed(0)
    model = mlp(4, 20, 20, 1)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    train(model, optimizer, dead=3)
    return model, optimizer


@pytest.fixture
def path(trained_pair: Any, tmp_path: Path) -> Path:
    model, optimizer = trained_pair
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    return tmp_path / "c.pt"


LEVELS = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)


def agrees(found: Inspection, expected: Mapping[str, torch.Tensor]) -> None:
    assert [row.name for row in found.parameters] == list(expected)
    for row in found.parameters:
        values = expected[row.name].double()
        quantiles = torch.tensor(row.quantiles, dtype=torch.float64)
        assert_close(quantiles, torch.quantile(values, LEVELS), rtol=1e-5, atol=1e-9)
        assert (row.shape, row.weights) == (tuple(values.shape), values.numel())
        assert row.below == (int((values < 1.0).sum()) if found.has_weights else None)


def test_the_numbers_are_those_of_the_live_posterior(trained_pair: Any, path: Path) -> None:
    posterior = ba.Posterior.from_optimizer(*trained_pair, n_data=500, prior_precision=0.0)
    found = inspect(path, n_data=500)
    agrees(found, posterior.snr())
    assert found.parameters[0].dead == found.dead == 20
    assert found.weights == posterior.n_weights
    assert found.below == sum(int((snr < 1.0).sum()) for snr in posterior.snr().values())


def test_without_n_only_the_order_is_told(trained_pair: Any, path: Path) -> None:
    plain, scaled = inspect(path), inspect(path, n_data=400)
    assert (plain.n_data, plain.below, scaled.n_data) == (None, None, 400)
    assert ["only the order" in str(each) for each in (plain, scaled)] == [True, False]
    for one, other in zip(plain.parameters, scaled.parameters, strict=True):
        assert other.quantiles[1] == approx(20 * one.quantiles[1], rel=1e-5)
    # A trainer may have written it down.
    model, optimizer = trained_pair
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": 160}, path)
    assert (inspect(path).n_data, inspect(path, n_data=5).n_data) == (160, 5)


def test_the_doctor_is_asked_and_a_read_checkpoint_will_do(path: Path) -> None:
    found = inspect(path, n_data=500)
    assert {"few-steps", "zero-curvature", "implied-prior"} <= set(found.diagnosis.codes())
    assert found.diagnosis.summary == "c.pt trained by adamw: 541 weights in 6 parameters have a second moment"
    assert inspect(read_checkpoint(path), n_data=500) == found


def test_rows_and_columns_without_gradients_are_named_and_the_groups(trained_pair: Any, tmp_path: Path) -> None:
    model, optimizer = trained_pair
    state = optimizer.state_dict()
    # Of 20 units five never had a gradient, and two had one long ago.
    state["state"][2]["exp_avg_sq"][[3, 4, 5, 9, 11]] = 0
    state["state"][2]["exp_avg_sq"][[0, 19]] *= 1e-12
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "c.pt")
    found = inspect(tmp_path / "c.pt")
    rows = {row.name: (row.untrained, row.stopped) for row in found.parameters}
    assert rows["0.weight"] == (((), (3,)), ((), ()))
    assert rows["2.weight"] == (((3, 4, 5, 9, 11), ()), ((0, 19), ()))
    assert rows["4.weight"] == (((), ()), ((), ()))
    assert rows["0.bias"] == ((), ())
    lines = str(found).splitlines()
    assert "no gradient ever reached (counted from 0): rows 3 to 5, 9, 11 of the 20 of 2.weight" in lines
    assert "group 0: 6 parameters, lr 0.001, betas (0.9, 0.999), weight_decay 0.1" in lines
    assert json.loads(json.dumps(found.to_dict()))["parameters"]["2.weight"]["stopped"] == [[0, 19], []]


def test_it_prints_as_a_table(path: Path) -> None:
    lines = str(inspect(path, n_data=500)).splitlines()
    (heading,) = [line for line in lines if line.startswith("parameter")]
    assert heading.split()[-2:] == ["<", "1"]
    (row,) = [line for line in lines if line.startswith("0.weight")]
    assert row.split()[1:5] == ["20×4", "80", "25.0", "%"]
    (total,) = [line for line in lines if line.startswith("total")]
    assert total.split()[1] == "541"
    assert len({len(line) for line in (heading, row, total)}) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"power": 1.0, "batch_size": 8, "form": "likelihood"},
        {"prior_precision": {f"{layer}.{kind}": 1.0 + layer for layer in (0, 2, 4) for kind in ("weight", "bias")}},
        {"prior_precision": lambda posterior: {n: 1 + t.abs() for n, t in posterior.mode.items()}},
    ],
    ids=["settings", "prior by name", "prior by weight"],
)
def test_of_a_saved_posterior_the_numbers_are_its_own(trained_pair: Any, tmp_path: Path, changes: Any) -> None:
    posterior = ba.Posterior.from_optimizer(*trained_pair, n_data=500)
    posterior = posterior.replace(**{name: v(posterior) if callable(v) else v for name, v in changes.items()})
    posterior.save(tmp_path / "p.safetensors")
    found = inspect(tmp_path / "p.safetensors")
    assert (found.n_data, found.has_weights, found.optimizer) == (500, True, "AdamW")
    agrees(found, posterior.snr())
    assert found.dead == 20
    if not callable(changes.get("prior_precision")):
        assert found == inspect(read_checkpoint(tmp_path / "p.safetensors"))
    assert {"few-steps", "zero-curvature"} <= set(found.diagnosis.codes())
    # The live one is inspected by the same function.
    live = inspect(posterior)
    agrees(live, posterior.snr())
    assert (live.source, live.format, live.dead, live.rule) == ("Sequential", "posterior", 20, found.rule)
    # Another N than the file's.
    agrees(inspect(tmp_path / "p.safetensors", n_data=50), posterior.replace(n_data=50).snr())
    ba.Mixture([posterior, posterior]).save(tmp_path / "m.safetensors")
    with pytest.raises(FileError, match="a mixture of posteriors"):
        inspect(tmp_path / "m.safetensors")


def test_without_weights_the_deviations_are_told(trained_pair: Any, path: Path, tmp_path: Path) -> None:
    posterior = ba.Posterior.from_optimizer(*trained_pair, n_data=500)
    posterior.save(tmp_path / "p.safetensors", weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ba.GaussianWeights.open(path, 500).export(tmp_path / "e.safetensors")
    for file in ("p.safetensors", "e.safetensors"):
        found = inspect(tmp_path / file)
        assert (found.has_weights, found.quantity, found.below) == (False, "σ", None)
        agrees(found, posterior.stddev)
        assert found.dead == 20
        assert "--optimizer-file" in found.rule
        written = found.to_dict()["parameters"]["2.weight"]
        assert found.to_dict()["quantity"] == "σ"
        assert written["quantiles"][1] == approx(float(posterior.stddev["2.weight"].median()), rel=0.01)


@pytest.mark.filterwarnings("ignore:the posterior has 4 gradients")
@pytest.mark.parametrize("weights", [True, False])
def test_of_a_kronecker_structure_the_marginals_are_told(weights: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(3, 4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    recorder = ba.Recorder(optimizer, keep=30, every=1)
    train(model, optimizer, steps=40)
    posterior = ba.Posterior.from_recorder(
        model, recorder, 200, structure="kronecker", prior_precision=2.0, batch_size=8
    )
    posterior.save(tmp_path / "p.safetensors", weights=weights)
    found = inspect(tmp_path / "p.safetensors")
    agrees(found, posterior.snr() if weights else posterior.stddev)
    assert "kronecker" in found.rule


def test_of_a_file_the_doctor_notes_batch_norm_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9))
    train(model, optimizer, steps=12)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    live = ba.doctor(model, optimizer)
    assert "batch-norm" in live.codes()
    assert diagnose_checkpoint(tmp_path / "c.pt").findings == live.findings
    assert inspect(tmp_path / "c.pt").diagnosis.findings == live.findings


def test_the_prior_of_a_saved_posterior_is_its_own(trained_pair: Any, tmp_path: Path) -> None:
    for delta, severity in ((0.0, "warning"), (2.0, "note")):
        posterior = ba.Posterior.from_optimizer(*trained_pair, n_data=500, prior_precision=delta)
        posterior.save(tmp_path / "p.safetensors")
        found = {each.code: each for each in diagnose_checkpoint(tmp_path / "p.safetensors").findings}
        assert found["zero-curvature"].severity == severity
