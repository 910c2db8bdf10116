"""What release 0.3 saved is read as it read it: `release_0_3` has its files, and what it said of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bayesadam as ba
from bayesadam._storage import under
from floats import assert_close

FOLDER = Path(__file__).parent / "release_0_3"
EXPECTED = load_file(FOLDER / "expected.safetensors")
X = EXPECTED["x"]


def build(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def said(kind: str) -> dict[str, torch.Tensor]:
    return under(f"{kind}.", EXPECTED)


def test_weights_and_their_variance():
    model = build()
    model.load_state_dict(said("weights"))
    for name in ("diagonal", "published"):
        assert_close(ba.Posterior.load(FOLDER / f"{name}.safetensors", model).variance, said("variance"), rtol=1e-5)


def test_calibrated_classes():
    p = ba.Posterior.load(FOLDER / "classification.safetensors", build()).predict(X)
    found = {"probs": p.probs, "novelty": p.novelty, "p_value": p.novelty_pvalue}
    found |= {"answered": p.answered.float(), "set": p.prediction_set(0.9).float()}
    assert_close(found, said("classification"), rtol=1e-4, atol=1e-6)


def test_calibrated_numbers():
    p = ba.Posterior.load(FOLDER / "evidence.safetensors", build(1)).predict(X, shift=False)
    assert_close({"mean": p.mean, "variance": p.variance, "stddev": p.stddev}, said("evidence"), rtol=1e-4, atol=1e-6)
    p = ba.Posterior.load(FOLDER / "forward.safetensors", build(1)).predict(X)
    low, high = p.prediction_set(0.9)
    found = {"mean": p.mean, "stddev": p.stddev, "low": low, "high": high, "novelty": p.novelty}
    assert_close(found, said("forward"), rtol=1e-4, atol=1e-6)


def test_mixtures_and_tracked_checkpoints():
    mixture = ba.Mixture.load(FOLDER / "mixture.safetensors", build())
    assert mixture.weights == (0.25, 0.75)
    assert_close(mixture.members[0].variance, said("variance"), rtol=1e-5)
    tracked = ba.Posterior.from_checkpoint(FOLDER / "tracked.pt", build(), n_data=200, batch_size=32)
    assert_close(tracked.variance, said("tracked"), rtol=1e-5)


def test_a_monitor_goes_on():
    monitor = ba.Monitor.load(FOLDER / "monitor.safetensors")
    assert not monitor.alarmed
    assert any(monitor.update(torch.full((1,), 50.0)) for _ in range(100))


@pytest.mark.parametrize("name", ba.bandits.AGENTS)
def test_agents_go_on(name):
    kept = json.loads((FOLDER / "agents.json").read_text())
    agent = ba.bandits.Agent.load(FOLDER / f"agent-{name}.safetensors")
    assert list(agent.pending) == kept["agents"][name]["pending"]
    assert [agent.act(context) for context in np.array(kept["contexts"])] == kept["agents"][name]["arms"]
