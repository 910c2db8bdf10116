"""What is read of a file is what was live when it was written, to the bit; and what a hostile file has."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bayesadam as ba
from bayesadam.readers import Checkpoint, read_checkpoint, read_curvature, read_optimizer


class Evil:
    """Pickled as a call that makes a folder, as a hostile file would be."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def same_moments(path: Path, pair: Any, kind: str | None = None, **options: Any) -> Checkpoint:
    """Without the model: second moments and weights; the format is called `kind`."""
    read = read_checkpoint(path, **options)
    expected, found = read_optimizer(*pair), read_curvature(read)
    assert kind in (None, read.format)
    assert list(found.second_moment) == list(expected.second_moment)
    assert all(torch.equal(found.second_moment[name], v) for name, v in expected.second_moment.items())
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
    assert list(found.mean) == list(expected.mean)
    for name, mean in expected.mean.items():
        assert torch.equal(found.mean[name], mean)
        assert torch.equal(found.variance[name], expected.variance[name])
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in pair[0].state_dict().items())
