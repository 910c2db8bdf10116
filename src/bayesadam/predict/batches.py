"""What a batch is: tensors or arrays, alone, in tuples or in mappings, with a row for each example; or the examples.

Examples that are no rows, such as graphs, crystals or texts, make a *ragged* batch: a list of them, or a `Batch` of
PyTorch Geometric. `forward(model, batch)` is given some of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._alone import alone_with
from bayesadam.errors import MatchError

# Names under which a batch holds its targets.
_LABELS = ("labels", "label", "label_ids", "targets", "target", "y")

# --- batches and loaders --------------------------------------------------------------------------------------------


def is_ragged(inputs: Any) -> bool:
    """Whether it is a batch of examples that are no rows; a list of tensors is what a model is called with.

    >>> is_ragged(["a text", "longer"]), is_ragged([{"x": torch.zeros(2, 3)}]), is_ragged([torch.zeros(2, 3)])
    (True, True, False)
    """
    if not isinstance(inputs, list):
        return not isinstance(inputs, Tensor) and hasattr(inputs, "to_data_list")
    return bool(inputs) and not any(isinstance(one, list | float | int | np.generic) or _is_data(one) for one in inputs)


def is_loader(data: Any) -> TypeGuard[Iterable[Any]]:
    """Whether it gives batches and is not one: an iterable, but no tensor, array, tuple, mapping or ragged batch.

    A list is one where all its entries are batches: so `[examples]` is, for examples that could be batches themselves.

    >>> is_loader([(torch.zeros(2, 3), torch.zeros(2))]), is_loader([torch.zeros(2, 3), torch.zeros(2)])
    (True, False)
    """
    if isinstance(data, list):
        return bool(data) and all(map(_is_batch, data))
    return isinstance(data, Iterable) and not (
        isinstance(data, tuple | Mapping | str) or _is_data(data) or is_ragged(data)
    )


def _is_batch(entry: Any) -> bool:
    """Whether an entry of a list is a batch by itself, and none of the arguments or examples of one."""
    return is_ragged(entry) or (
        isinstance(entry, tuple | list | Mapping) and any(map(_is_data, pytree.tree_leaves(entry)))
    )


def batches_of(data: Any, model: nn.Module) -> Iterator[tuple[Any, Tensor]]:
    """Inputs and targets of a loader, or of a single batch, a tuple or a mapping; arrays become tensors."""
    if not isinstance(data, Iterable):
        raise MatchError(f"batches must be a loader of (inputs, targets), got {type(data).__name__}")
    for batch in data if is_loader(data) else [data]:
        inputs, y = _split(batch)
        if y is None:
            keys = f" with keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else ""
            what = f"{type(batch).__name__}{keys}"
            raise MatchError(f"a batch must be (inputs, targets), or a mapping with one of {_LABELS}, got {what}")
        y = _tensor(y) if _is_array(y) else y
        if not isinstance(y, Tensor) or y.dim() == 0:
            raise MatchError(
                f"the targets of a batch must be a tensor with a row for each example, got {type(y).__name__}: "
                "collate the examples first; a single one is (x[None], y[None])"
            )
        yield for_model(inputs, model), y


def inputs_of(data: Any, model: nn.Module) -> Iterator[Any]:
    """The inputs of a loader's batches without targets, or a batch by itself, none of which is a target."""
    batch = None
    for batch in (_split(b)[0] for b in data) if is_loader(data) else [data]:
        yield to_device(for_model(batch, model), numbers_of(model).device)
    if batch is None:
        raise MatchError("there are no inputs: the loader gave no batch (a generator that was used up?)")


def _split(batch: Any) -> tuple[Any, Any]:
    """Inputs, and targets: those under a label's name or else the last; None where there are none."""
    if is_ragged(batch):
        return batch, getattr(batch, "y", None)
    if isinstance(batch, Mapping):
        key = next((key for key in _LABELS if key in batch), None)
        return {k: v for k, v in batch.items() if k != key}, None if key is None else batch[key]
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) < 2:
        return batch[0] if batch else batch, None
    names = getattr(batch, "_fields", ())
    last = next((names.index(key) for key in _LABELS if key in names), len(batch) - 1)
    others = (*batch[:last], *batch[last + 1 :])
    return others[0] if len(others) == 1 else others, batch[last]


# --- inputs ---------------------------------------------------------------------------------------------------------


def for_model(inputs: Any, model: nn.Module, *, graph: bool = False) -> Any:
    """A batch with arrays, numpy's and others', as tensors on the model's device, real numbers in its floating type."""
    inputs = plain(inputs, graph=graph)
    if not any(map(_is_array, pytree.tree_leaves(inputs))):
        return inputs
    like = numbers_of(model)
    return pytree.tree_map(lambda leaf: _tensor(leaf, like) if _is_array(leaf) else leaf, inputs)


def plain(inputs: Any, *, graph: bool = False) -> Any:
    """A batch that can be cut and joined: mappings as dicts, no inference tensors, no graph unless asked for."""
    graph = graph and torch.is_grad_enabled()

    def differentiable(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with torch.inference_mode(False):
            return leaf.clone() if leaf.is_inference() else leaf if graph else leaf.detach()

    return pytree.tree_map(differentiable, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def has_graph(inputs: Any) -> bool:
    """Whether gradients with respect to the inputs are wanted: they require them, and gradients are recorded."""
    leaves = pytree.tree_leaves(inputs) if torch.is_grad_enabled() else ()
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def batch_size(inputs: Any) -> int:
    """The number of examples: the length of the first tensor, or of a ragged batch."""
    if is_ragged(inputs):
        return len(inputs) if isinstance(inputs, list) else int(inputs.num_graphs)
    leaves = [inputs] if isinstance(inputs, Tensor) else pytree.tree_leaves(inputs)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if first is None:
        raise MatchError(
            f"no tensor with a batch dimension in the inputs ({type(inputs).__name__}): pass a tensor (torch.as_tensor "
            "of an array), or a list of examples of several rows each, such as graphs (list(...) of a generator)"
        )
    if not first.shape[0]:
        raise MatchError("the batch is empty: it has no examples")
    return first.shape[0]


def is_batched(leaf: Any, size: int) -> TypeGuard[Tensor]:
    """Whether a leaf of the inputs has one entry per example."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size


def examples(inputs: Any, start: int, stop: int) -> Any:
    """Examples `start` to `stop` of a batch."""
    return chosen_examples(inputs, slice(start, stop))


def parts(inputs: Any, step: int) -> Iterator[Any]:
    """A batch in parts of up to so many examples."""
    return (examples(inputs, start, start + step) for start in range(0, batch_size(inputs), step))


def chosen_examples(inputs: Any, rows: Tensor | slice) -> Any:
    """Some examples of a batch, by index."""
    size = batch_size(inputs)
    if is_ragged(inputs):
        some = [inputs[i] for i in (range(size)[rows] if isinstance(rows, slice) else rows.tolist())]
        return some if isinstance(inputs, list) else inputs.from_data_list(some)

    def cut(leaf: Any) -> Any:
        if not is_batched(leaf, size):
            return leaf
        return leaf[rows.to(leaf.device) if isinstance(rows, Tensor) else rows]

    return pytree.tree_map(cut, inputs)


def joined(batches: Sequence[Any]) -> Any:
    """Several batches as one."""
    if not is_ragged(first := batches[0]):
        return pytree.tree_map(lambda *t: torch.cat(t) if isinstance(t[0], Tensor) else t[0], *batches)
    every = [one for batch in batches for one in (batch if isinstance(batch, list) else batch.to_data_list())]
    return every if isinstance(first, list) else first.from_data_list(every)


def owners(inputs: Any) -> dict[int, Tensor]:
    """The graph of each row that a layer of a graph network is given, by the number of rows: nodes, edges or graphs.

    Empty of what is no `Batch` of PyTorch Geometric, and where two of these numbers are the same.
    """
    if isinstance(inputs, list) or not is_ragged(inputs) or (node := getattr(inputs, "batch", None)) is None:
        return {}
    edges = getattr(inputs, "edge_index", None)
    rows = [torch.arange(batch_size(inputs), device=node.device), node, *([] if edges is None else [node[edges[0]]])]
    by_number = {len(owner): owner for owner in rows}
    return by_number if len(by_number) == len(rows) else {}


def to_device(inputs: Any, device: torch.device) -> Any:
    """The batch on another device; of a list of objects, `forward` moves what is in them."""
    if not isinstance(inputs, list) and is_ragged(inputs):
        return copy.copy(inputs).to(device)
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)


# --- what a batch is made of ----------------------------------------------------------------------------------------


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or _is_array(leaf)


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
    tensor = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    if like is None:
        return tensor
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)


def numbers_of(model: nn.Module) -> Tensor:
    """An empty tensor of the model's floating type, on its device."""
    with alone_with(model):
        first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        return torch.empty(0, dtype=first.dtype, device=first.device)
