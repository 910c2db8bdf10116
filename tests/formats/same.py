"""What is read of a file is what was live when it was written, to the bit; and what a hostile file has."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import bayesadam as ba
from bayesadam.readers import Checkpoint, read_checkpoint, read_curvature, read_optimizer


class Evil:
    """Pickled as a call that makes a folder, as a hostile file would be."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def same(one: Any, other: Any) -> bool:
    """Whether two values, through dictionaries and lists, are equal to the bit."""
    (ours, layout), (theirs, expected) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return layout == expected and all(map(_equal, ours, theirs))


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        numbers = [t.isnan().logical_not() for t in (one, other)]
        return one.dtype == other.dtype and torch.equal(*numbers) and torch.equal(one[numbers[0]], other[numbers[1]])
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def same_moments(path: Path, pair: Any, kind: str | None = None, **options: Any) -> Checkpoint:
    """Without the model: second moments and weights; the format is called `kind`."""
    read = read_checkpoint(path, **options)
    expected, found = read_optimizer(*pair), read_curvature(read)
    assert kind in (None, read.format)
    assert same(dict(found.second_moment), dict(expected.second_moment))
    assert (found.steps, found.weight_decay) == (expected.steps, expected.weight_decay)
    assert all(torch.equal(read.weights[name], w) for name, w in pair[0].state_dict().items())
    return read


def same_posterior(folder: Path, pair: Any, fresh: nn.Module, **options: Any) -> None:
    """The posterior over a fresh model, which gets the weights and the buffers."""
    expected = ba.Posterior.from_optimizer(*pair, n_data=100)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    found = ba.Posterior.from_checkpoint(folder, fresh, n_data=100, **options)
    assert same([dict(found.mean), dict(found.variance)], [dict(expected.mean), dict(expected.variance)])
    assert same(dict(fresh.state_dict()), dict(pair[0].state_dict()))
