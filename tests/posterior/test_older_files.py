"""Files that release 0.2 wrote are read as it read them: `release_0_2` has posteriors of each kind, and what it said
of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bayesadam as ba
from bayesadam._storage import under
from floats import assert_close

FOLDER = Path(__file__).parent / "release_0_2"
EXPECTED = load_file(FOLDER / "expected.safetensors")


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def agrees(found: ba.GaussianWeights | ba.Mixture, kind: str, rtol: float = 1e-5) -> None:
    assert_close(found.mean, under(f"{kind}.mean.", EXPECTED), rtol=rtol)
    assert_close(found.variance, under(f"{kind}.variance.", EXPECTED), rtol=rtol)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
def test_posteriors(kind: str) -> None:
    path = FOLDER / f"{kind}.safetensors"
    posterior = ba.Posterior.load(path, build())
    for found in (posterior, ba.GaussianWeights.open(path)):
        agrees(found, kind)
        assert found.structure.kind == kind
        assert found.n_data == 64
    # It is said once, by calibration, in the one that was calibrated.
    assert posterior.likelihood == ("classification" if kind == "diagonal" else None)
    assert (posterior.calibration is not None) == (kind == "diagonal")


def test_without_weights_and_compressed() -> None:
    model = build()
    agrees(ba.Posterior.load(FOLDER / "compressed.safetensors", model), "published", rtol=0.05)
    agrees(ba.Posterior.load(FOLDER / "published.safetensors", model), "published")
    opened = ba.GaussianWeights.open(FOLDER / "published.safetensors")
    assert not opened.has_weights
    assert_close(opened.variance, under("published.variance.", EXPECTED))


def test_mixtures() -> None:
    model = build()
    mixture = ba.Mixture.load(FOLDER / "mixture.safetensors", model)
    agrees(mixture, "mixture")
    assert mixture.weights == (0.25, 0.75)
    for name, mu in mixture.members[0].mean.items():
        assert torch.equal(model.get_parameter(name), mu)
