"""What `track` keeps of shards: as of whole tensors, and resumed from torch.distributed.checkpoint to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bayesadam.readers import read_optimizer
from floats import assert_close
from ranks import found_by_ranks
from readers.tracking_worker import OPTIMIZERS, begun, checks, network, train

pytestmark = pytest.mark.slow
WORLD = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by_ranks(Path(__file__).parent / "tracking_worker.py", WORLD, tmp_path_factory.mktemp("tracked"))


@pytest.mark.parametrize("name", checks(Path()))
def test_the_checks_hold_in_every_process(results, name):
    for result in results:
        assert "error" not in result[name], result[name]["error"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_keep_what_whole_tensors_keep(results, name):
    model = network()
    optimizers = begun(name, model)
    train(model, optimizers, range(9))
    expected = read_optimizer(model, optimizers).second_moment
    for result in results:
        assert result[f"moments {name}"]["found"].keys() == expected.keys()
        for key, v in result[f"moments {name}"]["found"].items():
            assert_close(v, expected[key], rtol=1e-3, atol=1e-9)


def test_parts_of_rows_are_brought_together(results):
    v = torch.randn(7, 300, generator=torch.Generator().manual_seed(1)).square()
    for result in results:
        assert_close(result["columns"]["found"]["0.weight"], v, rtol=1e-4)
