"""Posteriors over several processes: the same draws and densities as over one, and each its part alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks import found_by_ranks
from weights.distributed_worker import Checks

# Every test looks at what two processes did together.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By the number of processes; one loads what two have saved."""
    folder, script = tmp_path_factory.mktemp("distributed"), Path(__file__).parent / "distributed_worker.py"
    return {world: found_by_ranks(script, world, folder) for world in (2, 1)}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", [name for name in vars(Checks) if name.startswith("check_")])
def test_the_checks_hold_in_every_process(results, name, world):
    for result in results[world]:
        assert "error" not in result[name], result[name]["error"]
