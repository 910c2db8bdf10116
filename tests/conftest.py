"""Random numbers of every test are its own, whatever ran before it in the same process."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_collection_finish() -> None:
    """Trainers collect garbage: what was imported is no part of it, and takes long to look through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded_by_test() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
