"""What `inspect` says of a checkpoint is what the posterior of the live optimiser says, without the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam import inspect
from bayesadam.__main__ import main
from bayesadam.checkpoint import CheckpointOptions, read_checkpoint
from bayesadam.checkpoint.resolve import explain
from bayesadam.errors import SettingError
from bayesadam.experiments import inspection as command
from bayesadam.inspect import BINS, LOG_RANGE, inspect_checkpoint
from cases import mlp, train


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture
def trained_pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Its last input is always zero, so that a column of the first layer is dead."""
    torch.manual_seed(0)
    model = mlp(4, 20, 20, 1)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(8, 4, generator=generator)
        x[:, 3] = 0
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def path(trained_pair: Any, tmp_path: Path) -> Path:
    model, optimizer = trained_pair
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    return tmp_path / "c.pt"


# --- the numbers ----------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_live_posterior(trained_pair: Any, path: Path) -> None:
    posterior = ba.Posterior.from_optimizer(*trained_pair, n_data=500, prior_precision=0.0)
    found = inspect_checkpoint(path, n_data=500, snr=2.0)
    assert [row.name for row in found.parameters] == list(posterior.mode)
    for row in found.parameters:
        snr = posterior.snr()[row.name]
        expected = torch.quantile(snr.double(), torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
        measured = torch.tensor([row.snr_q05, row.snr_q50, row.snr_q95], dtype=torch.float64)
        torch.testing.assert_close(measured, expected, rtol=1e-5, atol=1e-7)
        assert row.below == int((snr < 2.0).sum())
        assert row.weights == snr.numel()
        assert row.shape == tuple(snr.shape)
        assert sum(row.histogram) == int((snr > 0).sum())
    assert found.parameters[0].dead == 20
    assert found.dead == 20
    assert found.weights == posterior.n_weights
    assert found.below == sum(int((snr < 2.0).sum()) for snr in posterior.snr().values())


def test_the_histogram_is_of_the_logarithm(trained_pair: Any, path: Path) -> None:
    snr = ba.Posterior.from_optimizer(*trained_pair, n_data=1, prior_precision=0.0).snr()["2.weight"].double()
    (row,) = [row for row in inspect_checkpoint(path).parameters if row.name == "2.weight"]
    width = (LOG_RANGE[1] - LOG_RANGE[0]) / BINS
    # Weights at or below the upper edge of each bin, but for those on an edge itself.
    counts = torch.tensor(row.histogram).cumsum(0)
    for number in (60, 80, 90, 100, 110):
        edge = LOG_RANGE[0] + width * (number + 1)
        assert abs(int(counts[number]) - int((snr.log10() < edge).sum())) <= 1


def test_without_n_only_the_order_is_told(path: Path) -> None:
    plain, scaled = inspect_checkpoint(path), inspect_checkpoint(path, n_data=400)
    assert (plain.n_data, plain.threshold, plain.below) == (None, None, None)
    assert "only the order" in str(plain)
    assert (scaled.n_data, scaled.threshold) == (400, 1.0)
    assert "only the order" not in str(scaled)
    for one, other in zip(plain.parameters, scaled.parameters, strict=True):
        assert other.snr_q50 == pytest.approx(20 * one.snr_q50, rel=1e-5)
    # A threshold that is asked for is counted at N = 1.
    assert inspect_checkpoint(path, snr=1e9).below == plain.weights


def test_n_is_taken_from_the_file_where_the_trainer_wrote_it_down(trained_pair: Any, tmp_path: Path) -> None:
    model, optimizer = trained_pair
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": 160}
    torch.save(tree, tmp_path / "c.pt")
    assert inspect_checkpoint(tmp_path / "c.pt").n_data == 160
    assert inspect_checkpoint(tmp_path / "c.pt", n_data=5).n_data == 5


def test_quantiles_of_large_tensors_come_from_a_sample(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = inspect_checkpoint(path, n_data=1)
    monkeypatch.setattr(inspect, "_SAMPLE", 200)
    sampled = inspect_checkpoint(path, n_data=1)
    assert sampled == inspect_checkpoint(path, n_data=1)
    assert sampled != inspect_checkpoint(path, n_data=1, seed=1)
    for one, other in zip(exact.parameters, sampled.parameters, strict=True):
        assert (one.weights, one.dead, one.below, one.histogram) == (
            other.weights,
            other.dead,
            other.below,
            other.histogram,
        )
        assert (one.snr_q50 == other.snr_q50) == (one.weights <= 200)
        assert other.snr_q50 == pytest.approx(one.snr_q50, rel=0.3)


def test_the_doctor_is_asked(path: Path) -> None:
    found = inspect_checkpoint(path, n_data=500)
    assert {"few-steps", "zero-curvature", "implied-prior"} <= set(found.diagnosis.codes())
    assert found.diagnosis.summary == "c.pt trained by adamw: 541 weights in 6 parameters have a second moment"


def test_damaged_values_are_reported_and_do_not_stop_it(trained_pair: Any, tmp_path: Path) -> None:
    model, optimizer = trained_pair
    optimizer.state[model[2].weight]["exp_avg_sq"][0, 0] = torch.nan
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    found = inspect_checkpoint(tmp_path / "c.pt", n_data=10)
    assert found.diagnosis.codes()[0] == "bad-values"
    assert found.parameters[2].snr_q50 != found.parameters[2].snr_q50
    assert sum(found.parameters[2].histogram) == 399


def test_settings_are_checked(path: Path) -> None:
    with pytest.raises(SettingError, match="n_data"):
        inspect_checkpoint(path, n_data=-1)
    with pytest.raises(SettingError, match="snr must be"):
        inspect_checkpoint(path, snr=-1.0)


def test_a_read_checkpoint_will_do(path: Path) -> None:
    assert inspect_checkpoint(read_checkpoint(path)) == inspect_checkpoint(path)


def test_it_prints_as_a_table(path: Path) -> None:
    lines = str(inspect_checkpoint(path, n_data=500)).splitlines()
    (heading,) = [line for line in lines if line.startswith("parameter")]
    assert heading.split()[-2:] == ["<", "1"]
    (row,) = [line for line in lines if line.startswith("0.weight")]
    assert row.split()[1:5] == ["20×4", "80", "25.0", "%"]
    (total,) = [line for line in lines if line.startswith("total")]
    assert total.split()[1] == "541"
    assert len({len(line) for line in (heading, row, total)}) == 1


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_a_picture_and_metrics(path: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert run("inspect", path, "--n-data", 500, "--out", out, "--seed", 3) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-2:] == [str(out / "inspect.png"), str(out / "metrics.json")]
    assert "0.weight" in captured.out
    assert "zero-curvature" in captured.out
    assert (out / "inspect.png").read_bytes().startswith(b"\x89PNG")
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(metrics) == {"command", "version", "seed", "device", "seconds", "settings", "results"}
    assert (metrics["command"], metrics["seed"], metrics["settings"]["n_data"]) == ("inspect", 3, 500)
    found = inspect_checkpoint(path, n_data=500)
    assert metrics["results"]["dead"] == 20
    assert metrics["results"]["parameters"]["2.bias"]["snr_q50"] == found.parameters[3].snr_q50


def test_quiet_prints_the_paths_alone(path: Path, tmp_path: Path, capsys: Any) -> None:
    assert run("inspect", path, "--out", tmp_path / "out", "--quiet") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [str(tmp_path / "out" / name) for name in ("inspect.png", "metrics.json")]
    assert captured.err == ""


def test_json_is_one_object_and_nothing_else(path: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert run("inspect", path, "--n-data", 500, "--out", out, "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found == json.loads((out / "metrics.json").read_text())["results"]
    assert (found["source"], found["optimizer"], found["n_data"], found["dead"]) == (str(path), "adamw", 500, 20)
    assert list(found["parameters"]) == [row.name for row in inspect_checkpoint(path).parameters]
    assert captured.err.splitlines()[-2:] == [str(out / "inspect.png"), str(out / "metrics.json")]


def test_json_has_no_word_for_what_is_not_finite(trained_pair: Any, tmp_path: Path, capsys: Any) -> None:
    model, optimizer = trained_pair
    optimizer.state[model[2].weight]["exp_avg_sq"][0, 0] = torch.nan
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    assert run("inspect", tmp_path / "c.pt", "--out", tmp_path / "out", "--json", "--quiet") == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["2.weight"]["snr_q50"] is None


def test_an_error_is_json_too_and_still_one_line_and_code_2(tmp_path: Path, capsys: Any) -> None:
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, optimizer, steps=2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    for file, message in (("c.pt", "the optimiser is SGD with momentum"), ("nowhere.pt", "no file at")):
        assert run("inspect", tmp_path / file, "--out", tmp_path / "out", "--json") == 2
        captured = capsys.readouterr()
        (line,) = captured.out.splitlines()
        found = json.loads(line)
        assert list(found) == ["error"]
        assert found["error"].startswith(message)
        # In the words of the command line.
        assert "optimizer=" not in found["error"]
        assert captured.err.splitlines()[-1] == f"bayesadam: {found['error']}"


def test_why_says_how_the_file_was_read(path: Path, tmp_path: Path, capsys: Any) -> None:
    why = inspect_checkpoint(path).why
    assert why == explain(read_checkpoint(path), CheckpointOptions())
    assert why
    assert run("inspect", path, "--out", tmp_path / "out", "--why") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(" ".join(" ".join(why).split()))
    assert "zero-curvature" in printed
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["results"]["why"] == list(why)
    assert run("inspect", path, "--out", tmp_path / "out") == 0
    assert why[0] not in " ".join(capsys.readouterr().out.split())


def test_two_files_and_the_optimiser_by_name(trained_pair: Any, tmp_path: Path) -> None:
    model, optimizer = trained_pair
    torch.save(model.state_dict(), tmp_path / "w.pt")
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    arguments = ("--optimizer-file", tmp_path / "o.pt", "--optimizer", "NAdam", "--out", tmp_path / "out", "-q")
    assert run("inspect", tmp_path / "w.pt", *arguments) == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["results"]["optimizer"] == "nadam"


def test_groups_in_order_is_the_users_word(tmp_path: Path, capsys: Any) -> None:
    model = mlp(3, 3, 3, 3)
    weights = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": [p for p in model.parameters() if p.dim() == 1]}])
    train(model, optimizer, steps=3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    assert run("inspect", tmp_path / "c.pt", "--out", tmp_path / "out") == 2
    assert "--groups-in-order" in capsys.readouterr().err
    assert run("inspect", tmp_path / "c.pt", "--out", tmp_path / "out", "--groups-in-order", "--quiet") == 0


def test_a_missing_file_is_one_line_and_code_2(tmp_path: Path, capsys: Any) -> None:
    assert run("inspect", tmp_path / "nowhere.pt", "--out", tmp_path / "out") == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("bayesadam: no file at")
    assert captured.out == ""
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_picture_of_many_parameters_shows_the_largest(tmp_path: Path) -> None:
    model = mlp(2, *[3] * 30, 1)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    found = inspect_checkpoint(tmp_path / "c.pt")
    figure = command.picture(found)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(found.parameters) == 62
    assert len(labels) == 40
    assert "the 40 largest" in figure.get_suptitle()
    assert labels == [row.name for row in found.parameters if row.name in set(labels)]
