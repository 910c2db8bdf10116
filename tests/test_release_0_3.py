"""What release 0.3 saved goes on as it was: `release_0_3` has its files; of posteriors see `weights`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import bayesadam as ba
from floats import assert_close

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
    contexts = np.array(kept["contexts"])
    if name == "hybrid":
        # What it has learnt; its rule of exploring is another.
        assert_close(
            agent._learner.predictive(contexts.astype(np.float32))[0], kept["agents"][name]["means"], atol=1e-5
        )
    else:
        assert [agent.act(context) for context in contexts] == kept["agents"][name]["arms"]
