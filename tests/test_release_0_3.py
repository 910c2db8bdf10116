"""What release 0.3 saved goes on as it was: `release_0_3` has its files; of posteriors see `weights`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import bayesadam as ba

FOLDER = Path(__file__).parent / "release_0_3"


def test_a_monitor_goes_on():
    monitor = ba.Monitor.load(FOLDER / "monitor.safetensors")
    assert not monitor.alarmed
    assert any(monitor.update(torch.full((1,), 50.0)) for _ in range(100))


@pytest.mark.parametrize("name", ba.bandits.AGENTS)
def test_agents_go_on(name):
    kept = json.loads((FOLDER / "agents.json").read_text())
    agent = ba.bandits.Agent.load(FOLDER / f"agent-{name}.safetensors")
    assert list(agent.pending) == kept["agents"][name]["pending"]
    # What the hybrid agent has learnt; its rule of exploring is another. The linear one is fitted anew.
    means = agent._learner.predictive(np.array(kept["contexts"], np.float32))[0]
    assert name == "linear" or np.allclose(means, kept["agents"][name]["means"], atol=1e-5)
    assert np.isfinite(means).all()
    # The shape of the head on the contexts is 1 + n/2 of each arm.
    assert 2 * (agent._learner.belief.linear.shape - 1).sum() == agent._seen.count > 0
