"""A draw of the weights from a saved optimiser state, written to a file: no model, no data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesadam._files import replacing
from bayesadam._storage import write_tensors
from bayesadam.errors import FileError, ImproperError
from bayesadam.gaussian.formulas import PrecisionRule
from bayesadam.gaussian.noise import draw, fresh_seed, stream_seed
from bayesadam.gaussian.settings import Form, Precision, Settings, prior_or_decay
from bayesadam.readers import (
    CheckpointKeywords,
    CheckpointOptions,
    Entry,
    check_entries,
    identities,
    match_checkpoint,
    read_checkpoint,
    read_entry,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


def sample_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    n_data: float | None = None,
    *,
    seed: int = 0,
    prior_precision: float | None = None,
    power: float = 0.5,
    batch_size: int | None = None,
    form: Form = "map",
    **options: Unpack[CheckpointKeywords],
) -> None:
    """Draw weights from the posterior of a checkpoint and write them, tensor by tensor, to a safetensors file.

    The numbers are those of `Posterior.from_checkpoint(...).sample(generator=torch.Generator().manual_seed(seed))`.
    What has no state, buffers and frozen weights, is written as it is; a tied tensor has one draw under all its names. A file
    does not say which row of an embedding stands for padding: here it is drawn as any other.

    Args:
        path: what the trainer saved, see `read_checkpoint`.
        out: the file to write, with the ending `.safetensors`.
        n_data: N, the number of training examples; None takes what the trainer wrote down, if it did.
        prior_precision: δ; None takes N × the weight decay of each parameter's group.
        power: p of the curvature v̂ᵖ.
        batch_size: examples behind one gradient; needed for power=1.
        form: `"map"` or `"likelihood"`.
        **options: how the file is read, see `CheckpointOptions`.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise FileError(f"{out}: weights are written as safetensors: end the path in .safetensors")
    reading = CheckpointOptions(**options)
    checkpoint = read_checkpoint(path, reading)
    settings = Settings(checkpoint.n_data_or(n_data), {}, power, batch_size, form)
    match = match_checkpoint(checkpoint, options=reading)
    check_entries(match)
    decays = {entry.name: entry.weight_decay for entry in match.entries}
    shapes = {entry.name: entry.parameter.shape for entry in match.entries}
    prior = prior_or_decay(prior_precision, decays, settings.n_data, shapes)
    drawn = fresh_seed(torch.Generator().manual_seed(seed))
    identity = identities(checkpoint.weights)
    owners = {identity[entry.name]: entry for entry in match.entries}

    def load(name: str) -> Tensor:
        entry = owners.get(identity[name])
        return checkpoint.weights[name] if entry is None else _drawn(entry, settings, prior[entry.name], drawn)

    with replacing(out) as temporary:
        write_tensors(temporary, checkpoint.weights, load)


@torch.no_grad()
def _drawn(entry: Entry, settings: Settings, delta: Precision, seed: int) -> Tensor:
    _, v = read_entry(entry)
    flat = torch.as_tensor(delta) == 0
    if bool(flat.any()) and bool(((v == 0) & flat).any()):
        raise ImproperError(
            f"{entry.name!r} has weights with neither curvature nor prior, of which no draw can be made: pass a positive "
            "number as prior_precision="
        )
    theta, rule = entry.parameter.detach(), PrecisionRule.of(settings, delta)
    return draw(theta.to(v.dtype), v, rule, seed=stream_seed(seed, entry.name), n=None, dtype=theta.dtype)
