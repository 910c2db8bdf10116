"""Random numbers of every test are its own, whatever ran before it in the same process."""

import gc
import random

import numpy as np
import pytest
import torch

from packages import Lazy


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_itemcollected(item: pytest.Item) -> None:
    """A file's tests run in one process, with what it has made and imported; those with slow packages run together."""
    if item.get_closest_marker("xdist_group") is None:
        slow = any(isinstance(value, Lazy) for value in vars(getattr(item, "module", object)).values())
        item.add_marker(pytest.mark.xdist_group("packages" if slow else item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """Trainers collect garbage: what was imported is no part of it, and takes long to look through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded_by_test() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
