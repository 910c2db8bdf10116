"""Every structure of the registry: built from one match of the optimiser's state, and loaded as it was saved."""

import pytest
import torch
from torch import nn

from bayesadam import Posterior, Recorder
from bayesadam.errors import SettingError
from bayesadam.gaussian.files import STRUCTURES
from bayesadam.posterior import posterior as building
from bayesadam.readers import match as matching
from bayesadam.readers import read, recorder
from floats import assert_close


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Recorder]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    record = Recorder(optimizer, keep=6, every=1)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer, record


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_loaded_as_it_was_saved(name, tmp_path):
    model, optimizer, record = trained()
    posterior = Posterior.from_optimizer(model, optimizer, n_data=40, structure=name, recorder=record)
    assert posterior.structure.kind == name
    posterior.save(tmp_path / "p.safetensors")
    again = Posterior.load(tmp_path / "p.safetensors", model)
    assert (type(again.structure), again.structure.kind) == (type(posterior.structure), name)
    for key, variance in posterior.variance.items():
        assert_close(again.variance[key], variance)


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_the_protocol_says_of_a_structure_is_so(name):
    model, optimizer, record = trained()
    posterior = Posterior.from_optimizer(model, optimizer, n_data=40, structure=name, recorder=record)
    structure, settings = posterior.structure, posterior.settings
    assert (structure.directions(settings) is not None) == structure.has_directions
    same = all(torch.equal(v, posterior.variance[key]) for key, v in structure.coordinate_variance(settings).items())
    assert same == structure.independent


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_optimisers_state_is_matched_once(name, recorded, monkeypatch):
    model, optimizer, record = trained()
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return matching.match_optimizers(*arguments)

    for module in (building, read, recorder):
        monkeypatch.setattr(module, "match_optimizers", counted)
    options = {"structure": name, "recorder": record if recorded else None}
    if recorded or name == "diagonal":
        Posterior.from_optimizer(model, optimizer, 40, **options)
        assert len(calls) == 1
    else:
        with pytest.raises(SettingError, match=r"SOAP|recorded gradients"):
            Posterior.from_optimizer(model, optimizer, 40, **options)
        assert len(calls) <= 1
