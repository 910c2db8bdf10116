"""What can be caught, and where warnings point."""

import pickle

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam import bandits, errors
from cases import fit, mlp, train, trained

ALSO = {
    "SettingError": ValueError,
    "MatchError": ValueError,
    "ImproperError": ValueError,
    "CalibrationError": ValueError,
    "FileError": OSError,
    "MissingFileError": FileNotFoundError,
    "MissingExtraError": ImportError,
}


def test_every_error_is_ours_and_python_s_and_survives_a_pickle():
    every = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, ba.BayesAdamError) and value is not ba.BayesAdamError
    }
    assert every.keys() == ALSO.keys()
    for name, kind in every.items():
        assert issubclass(kind, ALSO[name])
        again = pickle.loads(pickle.dumps(kind("N is -1: y")))
        assert (type(again), str(again), again.args) == (kind, "N is -1: y", ("N is -1: y",))
    assert pickle.loads(pickle.dumps(errors.MissingExtraError("this needs 'x'", name="x"))).name == "x"


def test_bad_values_are_value_errors(tmp_path):
    model, optimizer = trained()
    for bad in (
        lambda: ba.Posterior.from_optimizer(model, optimizer, n_data=-1),
        lambda: ba.Posterior.from_optimizer(mlp(2, 2, 2), optimizer, n_data=60),
        lambda: ba.Posterior.from_optimizer(model, torch.optim.Adam(model.parameters()), n_data=60),
        lambda: ba.Posterior.load(model, tmp_path / "p.safetensors"),
        lambda: bandits.make_agent(n_features=0, n_arms=2),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            bad()
        assert isinstance(caught.value, ba.BayesAdamError)


def test_an_infinite_variance_names_a_prior():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    fit(model, optimizer, [(torch.zeros(4, 2), 0.0)])
    with pytest.raises(errors.ImproperError, match=r"posterior\.replace\(prior_precision=1\.0\)"):
        ba.Posterior.from_optimizer(model, optimizer, n_data=60, prior_precision=0.0).sample()


def test_files_that_are_not_there_are_file_not_found_errors_and_damaged_ones_os_errors(tmp_path):
    model, optimizer = trained()
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=60)
    nowhere, damaged = tmp_path / "nowhere" / "at all.csv", tmp_path / "posterior.safetensors"
    for missing in (
        lambda: ba.Posterior.load(nowhere, model),
        lambda: ba.Mixture.load(nowhere, model),
        lambda: ba.Posterior.from_checkpoint(nowhere, model, 60),
        lambda: bandits.Agent.load(nowhere),
        lambda: posterior.save(nowhere),
    ):
        with pytest.raises(FileNotFoundError, match="nowhere") as caught:
            missing()
        assert isinstance(caught.value, errors.FileError)
    damaged.write_bytes(b"\0" * 40)
    with pytest.raises(OSError, match="truncated"):
        ba.Posterior.load(damaged, mlp(2, 2, 2))


def test_a_warning_points_at_the_user_s_line():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer, members = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(2):
        train(model, optimizer, steps=1)
        members.append(ba.Posterior.from_optimizer(model, optimizer, n_data=9, prior_precision=1.0))
    # Directly, and through a frame of torch's.
    for call in (ba.Mixture, torch.no_grad()(lambda members: ba.Mixture(members))):
        with pytest.warns(errors.BayesAdamWarning, match="running_mean") as caught:
            call(members)
        assert caught[0].filename == __file__
