"""Work on CUDA that comes again with the same shapes, captured as a graph and replayed: thousands of launches become one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

Tensors = Sequence[Tensor]
Key = tuple[Hashable, Hashable]
# A graph keeps its memory, so that work is captured that has come twice before, and few graphs are kept of a model.
_SEEN = 2
_KEPT = 2
_REMEMBERED = 16


@dataclass(frozen=True, eq=False)
class _Graph:
    """Captured work.

    Attributes:
        graph: the launches.
        given: copies of the tensors that change, which are written before every replay.
        fixed: the tensors that are read where they lie, kept so that nothing else comes to lie there.
        found: what the work returned, written by every replay.
    """

    graph: torch.cuda.CUDAGraph
    given: Tensors
    fixed: Tensors
    found: Tensors

    def reads(self, fixed: Tensors) -> bool:
        """Whether these are the tensors that it reads."""
        return len(fixed) == len(self.fixed) and all(map(_same_memory, fixed, self.fixed))

    def replayed(self, given: Tensors) -> list[Tensor]:
        torch._foreach_copy_(list(self.given), list(given))
        self.graph.replay()
        return [each.clone() for each in self.found]


class _Known:
    """What is known of one model's work: how often it came, its graph, or None where it cannot be captured."""

    def __init__(self) -> None:
        self.works: OrderedDict[Key, int | _Graph | None] = OrderedDict()

    def put(self, key: Key, what: int | _Graph | None) -> None:
        self.works[key] = what
        self.works.move_to_end(key)
        graphs = [other for other, known in self.works.items() if isinstance(known, _Graph)]
        for other in graphs[:-_KEPT]:
            self.works[other] = _SEEN
        while len(self.works) > _REMEMBERED:
            self.works.popitem(last=False)


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def has_graph(model: nn.Module, kind: Hashable) -> bool:
    """Whether work on inputs of this kind is captured."""
    known = _known.get(model)
    return known is not None and any(key[0] == kind and isinstance(what, _Graph) for key, what in known.works.items())


def replayed(
    model: nn.Module,
    key: Key,
    work: Callable[[Tensors], Tensors],
    *,
    given: Tensors,
    fixed: Tensors,
    holds: Callable[[Tensors], bool],
) -> list[Tensor] | None:
    """`work(given)` out of a graph; None where it has not come often enough, or cannot be captured, and is to be done plainly.

    Args:
        key: the kind of its inputs, and what else the work depends on.
        given: its tensors that change from call to call.
        fixed: the tensors that it reads besides them.
        holds: whether a result can be true, compared with something that was computed just now: a graph does not know what
            the model's forward looks up elsewhere. One that does not hold is thrown away.
    """
    known = _known.setdefault(model, _Known())
    what = known.works.get(key, 0)
    if what is None:
        return None
    if isinstance(what, _Graph):
        if what.reads(fixed):
            found = what.replayed(given)
            if holds(found):
                known.put(key, what)
                return found
        known.put(key, 0)
        return None
    if what < _SEEN:
        known.put(key, what + 1)
        return None
    graph = _captured(work, given, fixed)
    first = None if graph is None else graph.replayed(given)
    does_hold = first is not None and holds(first)
    known.put(key, graph if does_hold else None)
    return first if does_hold else None


def _captured(work: Callable[[Tensors], Tensors], given: Tensors, fixed: Tensors) -> _Graph | None:
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
        _end_capture()
        return None
    return _Graph(graph, own, list(fixed), list(found))


def _end_capture() -> None:
    """After a capture that failed, torch's random numbers still believe that one is going on: another one ends that."""
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
