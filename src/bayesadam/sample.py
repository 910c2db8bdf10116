"""A draw of the weights from a saved optimiser state, written to a file: no model, no data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bayesadam._files import replacing
from bayesadam.checkpoint import match_checkpoint, read_checkpoint
from bayesadam.checkpoint.names import memory_of
from bayesadam.checkpoint.safetensors_file import save_safetensors
from bayesadam.curvature import StateReader
from bayesadam.curvature.match import Entry
from bayesadam.curvature.read import check_entries, read_entry
from bayesadam.errors import FileError, ImproperError, SettingError
from bayesadam.structures.noise import draw, fresh_seed, stream_seed
from bayesadam.structures.settings import Form, Precision, Settings, prior_by_name

# Second moments looked at together when they are checked.
_PIECE = 2**19


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
    optimizer_path: str | os.PathLike[str] | None = None,
    optimizer: str | StateReader | None = None,
    param_names: Sequence[str] | None = None,
    groups_in_order: bool = False,
    weights_key: str | None = None,
    optimizer_key: str | None = None,
) -> None:
    """Draw weights from the posterior of a checkpoint and write them, tensor by tensor, to a safetensors file.

    The numbers are those of `Posterior.from_checkpoint(...).sample(generator=torch.Generator().manual_seed(seed))`.
    What has no state, buffers and frozen weights, is written as it is; a tied tensor has one draw under all its names. A file
    does not say which row of an embedding stands for padding: here it is drawn as any other.

    Args:
        path: what the trainer saved, see `read_checkpoint`.
        out: the file to write, with the ending `.safetensors`.
        n_data: N, the number of training examples; None takes what the trainer wrote down, if it did.
        seed: of the draw.
        prior_precision: δ; None takes N × the weight decay of each parameter's group.
        power: p of the curvature v̂ᵖ.
        batch_size: examples behind one gradient; needed for power=1.
        form: `"map"` or `"likelihood"`.
        optimizer_path: the optimiser's state, where it has a file of its own.
        optimizer: the optimiser that wrote it; None tells it by its keys.
        param_names: the parameter names in the optimiser's order.
        groups_in_order: your word that each of several groups was filled in the model's order.
        weights_key: which weights, where the file holds several.
        optimizer_key: which optimiser's state, where the file holds several.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise FileError(f"{out}: weights are written as safetensors, give the path that ending")
    checkpoint = read_checkpoint(
        path, optimizer_path=optimizer_path, weights_key=weights_key, optimizer_key=optimizer_key
    )
    known = checkpoint.recorded.n_data if n_data is None else n_data
    if known is None:
        raise SettingError(f"{path} does not say how many training examples there were: pass n_data=")
    settings = Settings(known, {}, power, batch_size, form)
    match = match_checkpoint(checkpoint, optimizer=optimizer, param_names=param_names, groups_in_order=groups_in_order)
    check_entries(match, _PIECE)
    prior = _prior(match.entries, settings.n_data, prior_precision)
    drawn = fresh_seed(torch.Generator().manual_seed(seed))
    owners = {memory_of(checkpoint.weights[entry.name]): entry for entry in match.entries}

    def load(name: str) -> Tensor:
        weight = checkpoint.weights[name]
        entry = owners.get(memory_of(weight))
        return weight if entry is None else _drawn(entry, settings, prior[entry.name], drawn)

    with replacing(out) as temporary:
        save_safetensors(checkpoint.weights, load, temporary)


def _prior(entries: Sequence[Entry], n_data: float, given: float | None) -> dict[str, Precision]:
    """δ by parameter name, checked as `Posterior` does."""
    implied = {entry.name: n_data * float(entry.group.get("weight_decay", 0.0) or 0.0) for entry in entries}
    return prior_by_name(implied if given is None else given, {entry.name: entry.parameter.shape for entry in entries})


@torch.no_grad()
def _drawn(entry: Entry, settings: Settings, delta: Precision, seed: int) -> Tensor:
    _, v = read_entry(entry)
    flat = torch.as_tensor(delta) == 0
    if bool(flat.any()) and bool(((v == 0) & flat).any()):
        raise ImproperError(
            f"{entry.name!r} has weights with neither curvature nor prior, of which no draw can be made: pass a positive "
            "number as prior_precision="
        )
    return draw(
        entry.parameter.detach().to(v.dtype),
        v,
        weight=settings.weight,
        delta=delta,
        power=settings.power,
        shrink=settings.form == "likelihood",
        seed=stream_seed(seed, entry.name),
        n=None,
        dtype=entry.parameter.dtype,
    )
