"""What can be caught, and where warnings point."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam import bandits, errors
from bayesadam._files import replacing
from bayesadam.gaussian.diagonal import Diagonal
from cases import mlp

ALSO = {
    "SettingError": ValueError,
    "MatchError": ValueError,
    "StateError": ValueError,
    "ImproperError": ValueError,
    "CalibrationError": ValueError,
    "DivergedError": ArithmeticError,
    "TrainingError": RuntimeError,
    "FileError": OSError,
    "MissingFileError": FileNotFoundError,
    "MissingExtraError": ImportError,
    "MemoryBudgetError": MemoryError,
}
EVERY = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, ba.BayesAdamError) and value is not ba.BayesAdamError
}


def trained(n_steps: int = 20) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = mlp(3, 8, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(60, 3)
    for _ in range(n_steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x.argmax(dim=1)).backward()
        optimizer.step()
    return model, optimizer, x


# --- errors ---------------------------------------------------------------------------------------------------------


def test_the_table_has_every_error():
    assert EVERY.keys() == ALSO.keys()


@pytest.mark.parametrize("name", ALSO)
def test_an_error_is_ours_and_python_s(name):
    also = ALSO[name]
    for base in (ba.BayesAdamError, *(also if isinstance(also, tuple) else (also,))):
        with pytest.raises(base, match="N is -1"):
            raise EVERY[name]("N is -1")


@pytest.mark.parametrize("name", ALSO)
def test_an_error_survives_a_pickle_with_its_message(name):
    error = EVERY[name]("no file at x: y")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args) == ("no file at x: y", ("no file at x: y",))


def test_a_missing_extra_keeps_its_package_in_a_pickle():
    assert pickle.loads(pickle.dumps(ba.errors.MissingExtraError("this needs 'x'", name="x"))).name == "x"


@pytest.mark.slow
def test_an_error_crosses_processes(tmp_path):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        failed = pool.submit(ba.pruning.load_masks, tmp_path / "nowhere").exception()
    assert type(failed) is ba.errors.MissingFileError
    assert str(failed) == f"no file at {tmp_path / 'nowhere'}"


def test_bad_values_are_value_errors():
    model, optimizer, _ = trained()
    for bad in (
        lambda: ba.Posterior.from_optimizer(model, optimizer, n_data=-1),
        lambda: ba.Posterior.from_optimizer(mlp(2, 2, 2), optimizer, n_data=60),
        lambda: ba.Posterior.from_optimizer(model, torch.optim.Adam(model.parameters()), n_data=60),
        lambda: bandits.problem("roulette"),
        lambda: bandits.classification_problem([[float("nan")], [1.0]], [0, 1]),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            bad()
        assert isinstance(caught.value, ba.BayesAdamError)


def test_arguments_out_of_order_are_told(tmp_path):
    model, optimizer, _ = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=60, prior_precision=1.0)
    for swapped, said in (
        (lambda: ba.Posterior.load(model, tmp_path / "p.safetensors"), "model must be a Module, got"),
        (lambda: ba.pruning.neuron_masks(model, 0.5, example_input=torch.ones(1, 2)), "posterior must be a Posterior"),
        (lambda: ba.audit([(torch.ones(1, 2), torch.ones(1))], posterior), "posterior must be a Posterior, got list"),
    ):
        with pytest.raises(ba.errors.MatchError, match=said):
            swapped()


def test_an_infinite_variance_names_a_prior():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(4, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ba.errors.ImproperError, match=r"posterior\.replace\(prior_precision=1\.0\)"):
        ba.Posterior.from_optimizer(model, optimizer, n_data=60, prior_precision=0.0).sample()


def test_files_that_are_not_there_are_file_not_found_errors(tmp_path):
    model, optimizer, _ = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=60)
    nowhere = tmp_path / "nowhere" / "at all.csv"
    for missing in (
        lambda: ba.Posterior.load(nowhere, model),
        lambda: ba.Mixture.load(nowhere, model),
        lambda: ba.Posterior.from_checkpoint(nowhere, model, 60),
        lambda: ba.inspect_checkpoint(nowhere),
        lambda: ba.pruning.load_masks(nowhere),
        lambda: bandits.Agent.load(nowhere),
        lambda: posterior.save(nowhere),
    ):
        with pytest.raises(FileNotFoundError, match="nowhere") as caught:
            missing()
        assert isinstance(caught.value, ba.errors.FileError)


def test_damaged_files_are_os_errors(tmp_path):
    path = tmp_path / "posterior.safetensors"
    path.write_bytes(b"\0" * 40)
    for damaged in (lambda: ba.Posterior.load(path, mlp(2, 2, 2)), lambda: ba.pruning.load_masks(path)):
        with pytest.raises(OSError, match="truncated"):
            damaged()


# --- none is taken for another --------------------------------------------------------------------------------------


def test_an_error_of_ours_inside_a_write_is_passed_on(tmp_path):
    with pytest.raises(ba.errors.MissingFileError, match=r"^its own words$"), replacing(tmp_path / "x"):
        raise ba.errors.MissingFileError("its own words")
    assert not list(tmp_path.iterdir())


def test_a_radius_out_of_range_is_not_called_a_text():
    with pytest.raises(ba.errors.SettingError, match="between 0 and 1, got 'wheel:2'"):
        bandits.problem("wheel:2")
    with pytest.raises(ba.errors.SettingError, match=r"must be a number between 0 and 1, got 'wheel:x'"):
        bandits.problem("wheel:x")


# --- warnings -------------------------------------------------------------------------------------------------------


def test_warnings_of_predict_and_calibrate_point_at_the_user_s_line(monkeypatch):
    model, optimizer, x = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=60, prior_precision=1.0)
    monkeypatch.setattr(Diagonal, "limits", lambda self, settings: "its γ is too large")
    options = {"likelihood": "classification", "method": "validation"}
    for call in (
        lambda: posterior.predict(x, likelihood="classification"),
        lambda: ba.calibrate(posterior, (x, x.argmax(dim=1)), **options),
        # Through a frame of torch's.
        torch.no_grad()(lambda: ba.calibrate(posterior, (x, x.argmax(dim=1)), **options)),
        lambda: ba.Mixture([posterior, posterior]).predict(x, likelihood="classification"),
    ):
        with pytest.warns(ba.errors.StructureWarning, match="its γ is too large") as caught:
            call()
        assert {warning.filename for warning in caught} == {__file__}


def test_a_warning_of_a_constructor_points_at_the_user_s_line():
    def member(model: nn.Module) -> ba.Posterior:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        model(torch.randn(9, 2)).sum().backward()
        optimizer.step()
        return ba.Posterior.from_optimizer(model, optimizer, n_data=9, prior_precision=1.0)

    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    members = [member(model), member(model)]
    with pytest.warns(ba.errors.BayesAdamWarning, match="running statistics") as caught:
        ba.Mixture(members)
    assert caught[0].filename == __file__
