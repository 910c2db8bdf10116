"""What a batch may look like: inputs alone, inputs with targets, one of them or a loader of many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._alone import alone_with
from bayesadam.errors import MatchError
from bayesadam.predict.call import plain, to_device

# As a model's own loss takes them, and as they belong to the outputs.
_OWN_LABELS = ("labels", "label", "label_ids")
_LABELS = (*_OWN_LABELS, "targets", "target", "y")


class Batch(NamedTuple):
    """Inputs, their targets, and whether these are a model's own labels, out of a mapping with its inputs."""

    inputs: Any
    targets: Tensor
    own: bool


def is_loader(inputs: Any) -> TypeGuard[Iterable[Any]]:
    """Whether it gives batches and is not one: an iterable, but no tensor, array, tuple or mapping, nor a list of tensors.

    >>> is_loader([(torch.zeros(2, 3), torch.zeros(2))]), is_loader([torch.zeros(2, 3), torch.zeros(2)])
    (True, False)
    """
    if isinstance(inputs, list):
        return bool(inputs) and all(
            isinstance(entry, tuple | list | Mapping) and _holds_data(entry) for entry in inputs
        )
    return isinstance(inputs, Iterable) and not (isinstance(inputs, Tensor | tuple | Mapping) or _is_array(inputs))


def batches_of(batches: Any, model: nn.Module | None = None) -> Iterator[Batch]:
    """What a loader of tuples or mappings gives, or a single one of these, as it was put there.

    Targets that are arrays become tensors; so do inputs where the `model` is known, as in `for_model`.
    """
    pair = isinstance(batches, tuple | list) and len(batches) == 2 and _is_one(batches[1])
    if pair or isinstance(batches, Mapping):
        batches = [batches]
    if not isinstance(batches, Iterable):
        raise MatchError(f"batches must be a loader of (inputs, targets), got {type(batches).__name__}")
    for batch in batches:
        inputs, y, own = _split(batch)
        if y is None:
            if isinstance(batch, Mapping):
                keys = sorted(map(str, batch))
                raise MatchError(f"no targets in a batch with keys {keys}: name them one of {_LABELS}")
            raise MatchError(f"a batch must be (inputs, targets) or a mapping with labels, got {type(batch).__name__}")
        if _is_array(y):
            y = _tensor(y)
        if not isinstance(y, Tensor):
            raise MatchError(
                f"the targets of a batch must be a tensor, got {type(y).__name__}: collate the examples first"
            )
        if y.dim() == 0:
            raise MatchError(
                "the targets of a batch have no dimension for its examples: a single example is (x[None], y[None])"
            )
        yield Batch(plain(inputs) if model is None else for_model(inputs, model), y, own)


def inputs_of(batch: Any, model: nn.Module) -> Any:
    """The inputs of a batch out of a loader, without the targets that `batches_of` would find in it, on the model's device."""
    inputs, _, _ = _split(batch)
    if not isinstance(inputs, Tensor | tuple | list | Mapping) and not _is_array(inputs):
        raise MatchError(
            f"a batch must be a tensor, an array, a tuple or a mapping, got {type(inputs).__name__}: pass a loader of these"
        )
    return to_device(for_model(inputs, model), _like(model).device)


def for_model(inputs: Any, model: nn.Module) -> Any:
    """A batch with arrays, numpy's and others', as tensors on the model's device, real numbers in its floating type."""
    inputs = plain(inputs)
    if not any(map(_is_array, pytree.tree_leaves(inputs))):
        return inputs
    like = _like(model)
    return pytree.tree_map(lambda leaf: _tensor(leaf, like) if _is_array(leaf) else leaf, inputs)


def _split(batch: Any) -> tuple[Any, Any, bool]:
    """Inputs, targets and whether they are the model's own labels; None for targets where there are none.

    They are what a mapping or a named tuple has under a label's name, else the last of two or more.
    """
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Mapping):
        key = next((key for key in _LABELS if key in batch), None)
        return {k: v for k, v in batch.items() if k != key}, None if key is None else batch[key], key in _OWN_LABELS
    if not isinstance(batch, tuple | list):
        return batch, None, False
    if len(batch) < 2:
        return batch[0] if batch else batch, None, False
    names = getattr(batch, "_fields", ())
    place = next((names.index(key) for key in _LABELS if key in names), len(batch) - 1)
    others = (*batch[:place], *batch[place + 1 :])
    return others[0] if len(others) == 1 else others, batch[place], False


def _holds_data(batch: Any) -> bool:
    return any(map(_is_one, pytree.tree_leaves(batch)))


def _is_one(targets: Any) -> bool:
    return isinstance(targets, Tensor) or _is_array(targets)


def _is_array(leaf: Any) -> bool:
    """Arrays, and what says it can be one, such as a table of pandas; not the numbers in them."""
    return hasattr(leaf, "__array__") and not isinstance(leaf, Tensor | np.generic | type)


def _tensor(array: Any, like: Tensor | None = None) -> Tensor:
    # A copy: torch takes neither read-only memory nor strides that run backwards.
    values = np.array(array, order="C")
    if values.dtype.kind not in "biuf":
        raise MatchError(f"an array of {values.dtype} holds no numbers: pass one of floats or integers")
    if (values.dtype.kind == "u" and values.dtype.itemsize > 1) or values.dtype.kind == "i":
        values = values.astype(np.int64)
    found = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    if like is None:
        return found
    return found.to(like.device, like.dtype if found.is_floating_point() else None)


def _like(model: nn.Module) -> Tensor:
    """An empty tensor of the model's floating type, where it is."""
    with alone_with(model):
        own = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        return torch.empty(0, dtype=own.dtype, device=own.device)
