"""Many small operations on CUDA as one launch: recorded for tensors of some sizes, replayed for others of these."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

# How often a size comes before it is recorded, and how many sizes, of tensors of so many bytes together, are.
_WARM, _MOST, _LARGEST = 2, 16, 1 << 25
# Tensors to a tuple of tensors, and of what is the same for all.
Function = Callable[[list[Tensor]], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class _Recording:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: tuple[Any, ...]

    @classmethod
    def of(cls, function: Function, tensors: list[Tensor]) -> _Recording:
        """Of a function that ran before."""
        inputs = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = function(inputs)
        return cls(graph, inputs, outputs)

    def replayed(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        """The outputs for other tensors, in memory of their own."""
        torch._foreach_copy_(self.inputs, tensors)
        self.graph.replay()
        return tuple(output.clone() if isinstance(output, Tensor) else output for output in self.outputs)


class Replayed:
    """Runs a function of tensors; on CUDA from the third time that tensors have the same sizes as one launch.

    The numbers are the same. The function waits for nothing and draws nothing at random. Where gradients are wanted, or
    tensors are large, it runs as it is. A copy has no recordings.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # How often tensors of these sizes came, then their recording.
        self._known: dict[Hashable, int | _Recording] = {}

    def __reduce__(self) -> tuple[type[Replayed], tuple[()]]:
        return Replayed, ()

    def __call__(
        self, function: Function, tensors: list[Tensor], fixed: list[Tensor], kind: Hashable
    ) -> tuple[Any, ...]:
        """What the function makes of tensors on one device; `fixed` are the others that it reads, `kind` all else."""
        device = tensors[0].device
        if device.type != "cuda" or any(tensor.requires_grad for tensor in tensors):
            return function(tensors)
        if torch.cuda.is_current_stream_capturing() or sum(tensor.nbytes for tensor in tensors) > _LARGEST:
            return function(tensors)
        sizes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        key = kind, torch.cuda.current_stream(device), *sizes, *(tensor.data_ptr() for tensor in fixed)
        with self._lock, torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            known = self._known.get(key, 0)
            if isinstance(known, int):
                if known < _WARM or len(self._known) > _MOST:
                    if key in self._known or len(self._known) <= _MOST:
                        self._known[key] = known + 1
                    return function(tensors)
                self._known[key] = known = _Recording.of(function, tensors)
            return known.replayed(tensors)
