"""What a command reads of a network: itself, its posterior, its inputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from bayesadam import Posterior
from bayesadam import _storage as storage
from bayesadam._files import damage_named
from bayesadam.cli.output import called
from bayesadam.compress.packing import is_packed
from bayesadam.errors import MissingFileError, SettingError
from bayesadam.readers.formats.torch_files import load_tree


def network(name: str) -> nn.Module:
    """What a function of the user gives, named module:function."""
    model = called(name)
    if not isinstance(model, nn.Module):
        raise SettingError(f"{name} gave {type(model).__name__}: it must give the model, with its weights")
    return model


def posterior(checkpoint: Path, model: str, reading: Mapping[str, Any]) -> Posterior:
    """A checkpoint's over such a network, with N = 1 and no prior: neither matters where weights are only ordered."""
    if is_packed(checkpoint):
        raise SettingError(f"{checkpoint} is quantised already: give the checkpoint that it was made from")
    return Posterior.from_checkpoint(checkpoint, network(model), n_data=1, prior_precision=0.0, **reading)


def batch(path: Path | None) -> Any:
    """Inputs in a file: an array, or several by the names of the model's keywords; nothing is unpickled."""
    if path is None:
        return None
    if not path.is_file():
        raise MissingFileError(f"no file at {path}")
    if path.suffix in (".npy", ".npz"):
        with damage_named(path, "numpy.save"):
            read = np.load(path, allow_pickle=False)
            inputs = read if path.suffix == ".npy" else dict(read)
    else:
        inputs = storage.map_tensors(path)[0] if path.suffix == ".safetensors" else load_tree(path)
    return next(iter(inputs.values())) if isinstance(inputs, Mapping) and len(inputs) == 1 else inputs
