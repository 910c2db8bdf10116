"""A network and its smaller copy, walked through in step: each layer meets what those before it, changed, now give."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from queue import SimpleQueue
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from bayesadam._progress import Bar
from bayesadam._warnings import warn
from bayesadam.compress.solving import Moments
from bayesadam.errors import MatchError
from bayesadam.predict.batches import batch_size, examples, inputs_of, is_batched, is_ragged, parts
from bayesadam.predict.matrices import Matrix, matrices_of
from bayesadam.predict.network import Call, Forward, evaluating, widened
from bayesadam.predict.recording import attention, linear
from bayesadam.predict.tap import first_input, watched
from bayesadam.predict.uses import patches

# Examples that go through the network together, and positions of a layer that are looked at.
_AT_ONCE, _POSITIONS = 128, 1 << 16
# A layer has too few inputs where they are so few for each weight of an output, and a network where they are so few.
_FEW, _FEWEST = 0.1, 20
# More examples are not looked at: each batch of them waits in the middle of two passes.
_MOST = 4096
# A matrix, its dense weights and its moments → its new weights.
Visit = Callable[[Matrix, Tensor, Moments], Tensor]


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a matrix in a forward pass: its inputs and its outputs, (..., outputs), position by position."""

    matrix: Matrix
    module: nn.Module
    input: Tensor
    output: Tensor

    @classmethod
    def of(cls, matrix: Matrix, module: nn.Module, a: Tensor, z: Tensor) -> Use:
        """A convolution may have been given one example without a batch, and has its channels before its pixels."""
        a, z = a.detach(), z.detach()
        if not isinstance(module, _ConvNd):
            return cls(matrix, module, a, z)
        alone = a.dim() == len(module.kernel_size) + 1
        a, z = (x.unsqueeze(0) if alone else x for x in (a, z))
        return cls(matrix, module, a, z.movedim(1, -1))

    @property
    def positions(self) -> int:
        """How often the matrix is multiplied."""
        return self.output.numel() // self.output.shape[-1]

    def inputs(self, rows: Tensor) -> Tensor:
        """(groups, rows, inputs) at some positions, with a constant 1 where W has a bias."""
        a, out = self.input, self.output.shape[1:-1]
        if isinstance(self.module, _ConvNd):
            # (n, channels, *kernel, *out) → (rows, channels, *kernel).
            moved = patches(self.module, a, out).movedim(tuple(range(-len(out), 0)), tuple(range(1, len(out) + 1)))
            a = moved[torch.unravel_index(rows, (len(a), *out))].flatten(1)
        else:
            a = a.reshape(-1, a.shape[-1])[rows]
        a = widened(a).reshape(len(a), self.matrix.groups, self.matrix.size[2]).transpose(0, 1)
        return a if self.matrix.bias is None else F.pad(a, (0, 1), value=1.0)

    def outputs(self, rows: Tensor) -> Tensor:
        """(groups, rows, outputs) at some positions."""
        z = widened(self.output.reshape(-1, self.output.shape[-1])[rows])
        return z.reshape(len(z), *self.matrix.size[:2]).transpose(0, 1)


class _Closed(BaseException):
    """Ends a pass that nobody waits for; no `except Exception` of a model's stops it."""


class _Pass(threading.Thread):
    """A forward pass that stops at every use of a matrix until it is told to go on; `at` is None at its end.

    Only one of all passes runs at a time: this is a generator that yields from inside the hooks of a model.
    """

    def __init__(self, call: Call, batch: Any) -> None:
        super().__init__(daemon=True)
        self.call, self.batch = call, batch
        self.at: Use | None = None
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._stopped: SimpleQueue[BaseException | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        """The pass."""
        error = None
        try:
            self._wait()
            with torch.no_grad():
                self.call.run(self.batch)
        except _Closed:
            return
        except BaseException as raised:
            error = raised
        self.at = None
        self._stopped.put(error)

    def stop(self, at: Use) -> None:
        """Wait there; called from inside the pass."""
        self.at = at
        self._stopped.put(None)
        self._wait()

    def advance(self) -> None:
        """Go on to the next use, or to the end."""
        self._go.put(True)
        if (error := self._stopped.get()) is not None:
            raise error

    def close(self) -> None:
        """Leave it where it is."""
        self._go.put(False)
        self.join()

    def _wait(self) -> None:
        if not self._go.get():
            raise _Closed


@contextmanager
def _whole_products() -> Iterator[None]:
    """Products of float32 in float32, where a GPU may use TF32: without its last digits A' is not positive definite."""
    matmul: Any = torch.backends.cuda.matmul
    key, whole = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, key)
    setattr(matmul, key, whole)
    try:
        yield
    finally:
        setattr(matmul, key, before)


@contextmanager
def _stopping(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Passes stop at each use of these matrices, and then compute the output again, with the weights of then."""
    wanted = {m: [x for x in matrices if x.name in names] for m, matrices in matrices_of(model).items()}
    named = {id(parameter): name for name, parameter in model.named_parameters()}

    def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        here = threading.current_thread()
        if not isinstance(here, _Pass):
            return None

        def project(
            weight: Tensor, rows: slice | None, a: Tensor, bias: Tensor | None, bias_rows: slice | None
        ) -> Tensor:
            for matrix in wanted[module]:
                if (matrix.weight, matrix.rows) == (named[id(weight)], rows):
                    own = None if matrix.bias is None else bias
                    here.stop(Use.of(matrix, module, a, linear(weight, rows, a, own, bias_rows)))
            return linear(weight, rows, a, bias, bias_rows)

        if isinstance(module, nn.MultiheadAttention):
            return attention(module, args, kwargs, output, project)
        here.stop(Use.of(wanted[module][0], module, first_input(args, kwargs), output))
        return module.forward(*args, **kwargs)

    watching = watched([m for m, some in wanted.items() if some], see)
    with evaluating(model, differentiable=False), _whole_products(), watching:
        yield


@dataclass(frozen=True, eq=False)
class Walk:
    """A network, a few hundred inputs of it, and the matrices that they reach.

    Attributes:
        matrices: in the order of a pass.
        several: the moments of layers that a pass uses several times: they meet the inputs of the dense network.
    """

    call: Call
    batches: list[Any]
    matrices: Mapping[str, Matrix]
    several: Mapping[str, Moments]

    @classmethod
    def of(cls, model: nn.Module, inputs: Any, weights: Collection[str], forward: Forward | None = None) -> Walk:
        """Over the matrices among some weights."""
        matrices = {x.name: x for listed in matrices_of(model).values() for x in listed if x.weight in weights}
        cut = (part for batch in inputs_of(inputs, model) for part in parts(batch, _AT_ONCE))
        batches, n = list[Any](), 0
        while n < _MOST and (part := next(cut, None)) is not None:
            batches.append(part)
            n += batch_size(part)
        walk = cls(Call(model, forward), batches, matrices, {})
        passes: list[list[str]] = [[] for _ in batches]
        seen = Counter[str]()
        try:
            for index, use in walk._uses(matrices):
                passes[index].append(use.matrix.name)
                seen[use.matrix.name] += len(walk._rows(index, use))
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            raise MatchError(
                f"the network does not run on these inputs ({error}): give a batch as the network is called, without "
                "targets, or a loader of (inputs, targets), or pass forward=lambda model, batch: ... Mappings that are "
                "examples and no batches are given as [examples]"
            ) from error
        if n > 1 and _are_alike(batches):
            raise MatchError("all inputs are the same, which say nothing of the layers: give a few hundred others")
        if n < _FEWEST:
            warn(f"{n} inputs say little of any layer: give a few hundred")
        if unmet := [name for name in matrices if name not in seen]:
            named = ", ".join(unmet[:4])
            warn(f"no input reaches {named}: pruned it is not, and zeros of your own there are not made up for")
        enough = {name: math.ceil(_FEW * matrices[name].size[2]) for name in seen}
        if few := sorted((seen[name] / n, name) for name, n in enough.items() if seen[name] < n):
            worst = ", ".join(f"{name} ({seen[name]} positions, {enough[name]} would do)" for _, name in few[:4])
            warn(f"too few inputs for {worst}: give more examples")
        moments: dict[str, Moments] = {}
        for index, use in walk._uses({name for names in passes for name, n in Counter(names).items() if n > 1}):
            part, name = walk._moments(index, use, None), use.matrix.name
            moments[name] = moments[name] + part if name in moments else part
        return replace(walk, matrices={name: matrices[name] for name in _in_order(passes)}, several=moments)

    def through(self, small: nn.Module, visit: Visit, description: str) -> None:
        """Visit every matrix in the order of a pass, and write what is returned to the smaller network."""
        own, left = dict(small.named_parameters()), set(self.matrices)
        rank = {name: number for number, name in enumerate(self.matrices)}
        with (
            _stopping(self.call.model, self.matrices),
            _stopping(small, self.matrices),
            Bar(description, len(left)) as bar,
            ExitStack() as stack,
        ):
            pairs = [(_Pass(self.call, b), _Pass(replace(self.call, model=small), b)) for b in self.batches]
            steps = [each for pair in pairs for each in pair]
            for step in steps:
                stack.callback(step.close)
            for step in steps:
                step.advance()
            while left and (waiting := [each.at.matrix for _, each in pairs if each.at]):
                # No batch is still on its way to the first of them.
                now = min(waiting, key=lambda matrix: rank[matrix.name])
                here = [(i, *pair) for i, pair in enumerate(pairs) if _name(pair[1].at) == now.name]
                for _, dense, _ in here:
                    while dense.at and rank[dense.at.matrix.name] < rank[now.name]:
                        dense.advance()
                if now.name in left:
                    seen = (self._moments(i, each.at, dense.at) for i, dense, each in here if each.at)
                    moments = self.several[now.name] if now.name in self.several else reduce(add, seen)
                    now.write(visit(now, self._dense(now), moments), own)
                    left.discard(now.name)
                    bar.step()
                for _, dense, each in here:
                    each.advance()
                    if _name(dense.at) == now.name:
                        dense.advance()

    def _dense(self, matrix: Matrix) -> Tensor:
        return matrix.with_bias(dict(self.call.model.named_parameters()))

    def _uses(self, names: Collection[str]) -> Iterator[tuple[int, Use]]:
        """The uses of some matrices by the dense network, with the number of the batch."""
        if not names:
            return
        with _stopping(self.call.model, names):
            for index, batch in enumerate(self.batches):
                dense = _Pass(self.call, batch)
                try:
                    dense.advance()
                    while dense.at is not None:
                        yield index, dense.at
                        dense.advance()
                finally:
                    dense.close()

    def _rows(self, index: int, use: Use) -> Tensor:
        """Some positions of a batch, none of them padding, which are the same in both networks."""
        n, batch, shape = use.positions, self.batches[index], use.output.shape[:2]
        rows = torch.randperm(n, generator=torch.Generator().manual_seed(index), device="cpu")
        mask = batch.get("attention_mask") if isinstance(batch, dict) else None
        if isinstance(mask, Tensor) and mask.numel() == n:
            # Some layers have the sequence first.
            mask = mask.mT if shape == mask.shape[::-1] != mask.shape else mask
            rows = rows[mask.flatten().cpu()[rows] != 0]
        return rows[: max(1, _POSITIONS // len(self.batches))].to(use.output.device)

    def _moments(self, index: int, use: Use, dense: Use | None) -> Moments:
        """Of a batch.

        Where the dense network does not use the layer then, or at other positions, z is what its weights would give.
        """
        n, rows = use.positions, self._rows(index, use)
        x, name = use.inputs(rows), use.matrix.name
        fits = _name(dense) == name and dense is not None and dense.positions == n
        z = dense.outputs(rows) if fits and dense is not None else x @ self._dense(use.matrix).mT
        if not bool(x.isfinite().all() & z.isfinite().all()):
            raise MatchError(f"the inputs or outputs of {name!r} are not finite: look for NaN in the network's inputs")
        return Moments.of(x, z)


def _name(use: Use | None) -> str | None:
    return None if use is None else use.matrix.name


def _are_alike(batches: Sequence[Any]) -> bool:
    """Whether every tensor with a row for each example, of one at least, has the same finite numbers for all."""
    if any(map(is_ragged, batches)):
        return False
    first = pytree.tree_leaves(examples(batches[0], 0, 1))
    leaves = ((pytree.tree_leaves(batch), batch_size(batch)) for batch in batches)
    pairs = [(leaf, one) for each, n in leaves for leaf, one in zip(each, first, strict=False) if is_batched(leaf, n)]
    alike = (leaf.shape[1:] == one.shape[1:] and bool(((leaf == one) & one.isfinite()).all()) for leaf, one in pairs)
    return bool(pairs) and all(alike)


def _in_order(passes: Iterable[Iterable[str]]) -> list[str]:
    """The names in an order that goes with that of every pass, where they agree."""
    rank: dict[str, int] = {}
    for names in passes:
        last = -1
        for name in names:
            rank[name] = last = max(rank.get(name, 0), last + 1)
    return sorted(rank, key=rank.__getitem__)
