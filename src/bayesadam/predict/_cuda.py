"""What makes predictions fast on CUDA: captured graphs, and one kernel that squares gradients without writing them.

Imported only where tensors are on CUDA. Nothing depends on it: plain work gives the same numbers but for rounding.
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

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

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


# --- the kernel -----------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _squares(  # type: ignore[no-untyped-def]
        x, y, s, parts, c_count, b_count, g_count, p_count, width, depth,
        x_c, x_b, x_g, x_p, x_x, y_b, y_g, y_p, y_y, s_g, s_x, s_y,
        BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_P: tl.constexpr,
    ):  # fmt: skip
        """One tile of (x, y) of one example and group: Σ over the tile for every c."""
        across = tl.cdiv(depth, BLOCK_Y)
        tiles = tl.cdiv(width, BLOCK_X) * across
        tile, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
        b, g = pair // g_count, pair % g_count
        rows = (tile // across) * BLOCK_X + tl.arange(0, BLOCK_X)
        columns = (tile % across) * BLOCK_Y + tl.arange(0, BLOCK_Y)
        inside = (rows < width)[:, None] & (columns < depth)[None, :]
        weights = tl.load(s + g * s_g + rows[:, None] * s_x + columns[None, :] * s_y, mask=inside, other=0.0)
        x_start = x + b.to(tl.int64) * x_b + g * x_g
        y_start = y + b.to(tl.int64) * y_b + g * y_g
        for c in range(c_count):
            total = tl.zeros((BLOCK_X, BLOCK_Y), dtype=tl.float32)
            for first in range(0, p_count, BLOCK_P):
                p = first + tl.arange(0, BLOCK_P)
                left = tl.load(
                    x_start + rows[:, None].to(tl.int64) * x_x + p[None, :] * x_p,
                    mask=(rows < width)[:, None] & (p < p_count)[None, :],
                    other=0.0,
                )
                right = tl.load(
                    y_start + p[:, None].to(tl.int64) * y_p + columns[None, :] * y_y,
                    mask=(p < p_count)[:, None] & (columns < depth)[None, :],
                    other=0.0,
                )
                total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="tf32")
            x_start += x_c
            tl.store(parts + ((tile * g_count + g) * c_count + c) * b_count + b, tl.sum(total * total * weights))


def product_variances(x: Tensor, y: Tensor, variances: Sequence[Tensor]) -> Tensor | None:
    """Σ_xy (Σ_p X_px Y_py)² S_xy, (k, b, c): X (c, b, g, p, x), Y (b, g, p, y), each S (g, x, y); None without triton.

    The gradients of single examples live in registers and are never written. Products are of numbers rounded to TF32.
    """
    if triton is None or any(s.dtype != torch.float32 for s in variances):
        return None
    c, b, g, p, width = x.shape
    depth, found = y.shape[-1], []
    block_x, block_y = (min(128, max(16, triton.next_power_of_2(n))) for n in (width, depth))
    tiles = triton.cdiv(width, block_x) * triton.cdiv(depth, block_y)
    for s in variances:
        parts = x.new_empty(tiles, g, c, b, dtype=torch.float32)
        _squares[(tiles * b * g,)](
            x, y, s, parts, c, b, g, p, width, depth, *x.stride(), *y.stride(), *s.stride(),
            BLOCK_X=block_x, BLOCK_Y=block_y, BLOCK_P=32 if p > 16 else 16,
            num_warps=8 if block_x * block_y > 4096 else 4,
        )  # fmt: skip
        found.append(parts.sum(dim=(0, 1)).T)
    return torch.stack(found)
