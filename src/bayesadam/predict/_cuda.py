"""Work on CUDA that comes again with the same shapes, captured as a graph and replayed: one launch for thousands.

Imported only where tensors are on CUDA. Nothing depends on it: plain work gives the same numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# A graph keeps its memory: work is captured that has come twice before, and few graphs are kept of a model.
_SEEN = 2
_KEPT = 2
_REMEMBERED = 16


@dataclass(frozen=True, eq=False)
class _Graph:
    """Captured work: its launches, the tensors written before every replay, those read in place, and the result."""

    graph: torch.cuda.CUDAGraph
    given: Sequence[Tensor]
    fixed: Sequence[Tensor]
    found: Sequence[Tensor]


# How often a work came, its graph, or None where it cannot be captured.
_known: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, int | _Graph | None]] = WeakKeyDictionary()


def replayed(
    model: nn.Module,
    key: tuple[Hashable, ...],
    work: Callable[[Any], Sequence[Tensor]],
    batch: Any,
    *,
    fixed: Sequence[Tensor],
    holds: Callable[[Sequence[Tensor]], bool],
) -> Any:
    """`work(batch)` out of a CUDA graph; None where it has not come often enough, or cannot be captured.

    Args:
        key: what the work depends on besides its batch and the tensors `fixed`, which it reads where they are.
        holds: whether a result can be right, compared with something that was computed just now: a graph does not know
            what the model's forward looks up elsewhere. One that does not hold is discarded.
    """
    leaves, spec = pytree.tree_flatten(batch)
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(tensor.is_cuda for tensor in given):
        return None
    kinds = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    key = (*key, str(spec), kinds, torch.is_autocast_enabled("cuda"), torch.get_float32_matmul_precision())
    known = _known.setdefault(model, OrderedDict())
    what = known.get(key, 0)
    if what is None:
        return None
    if isinstance(what, int):
        if what < _SEEN:
            _put(known, key, what + 1)
            return None

        def of_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            own = iter(tensors)
            return work(pytree.tree_unflatten([next(own) if isinstance(x, Tensor) else x for x in leaves], spec))

        what = _captured(of_tensors, given, fixed)
    elif len(fixed) != len(what.fixed) or not all(map(_same_memory, fixed, what.fixed)):
        _put(known, key, 0)
        return None
    found = None
    if what is not None:
        torch._foreach_copy_(list(what.given), given)
        what.graph.replay()
        found = [each.clone() for each in what.found]
    if found is None or not holds(found):
        # A graph that held before may hold again; one that never did is not tried again.
        _put(known, key, 0 if isinstance(known.get(key), _Graph) else None)
        return None
    _put(known, key, what)
    return found


def _put(known: OrderedDict[Hashable, int | _Graph | None], key: Hashable, what: int | _Graph | None) -> None:
    known[key] = what
    known.move_to_end(key)
    for other in [k for k, v in known.items() if isinstance(v, _Graph)][:-_KEPT]:
        known[other] = _SEEN
    while len(known) > _REMEMBERED:
        known.popitem(last=False)


def _captured(
    work: Callable[[Sequence[Tensor]], Sequence[Tensor]], given: Sequence[Tensor], fixed: Sequence[Tensor]
) -> _Graph | None:
    """None where the work waits for the device, or does something else that a graph cannot hold."""
    own = [each.clone() for each in given]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    # Libraries make their workspaces, and kernels are compiled, outside the graph.
    with torch.cuda.stream(stream):
        work(own)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            found = work(own)
    except RuntimeError:
        # torch's random numbers still believe that a capture is going on: another one ends that.
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")
        return None
    return _Graph(graph, own, list(fixed), list(found))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
