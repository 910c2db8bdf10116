"""Looking into a forward pass: the inputs of the layers that multiply them by a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._warnings import warn
from bayesadam.errors import MatchError
from bayesadam.predict.batches import batch_size, examples, has_graph, is_ragged, owners, parts, plain
from bayesadam.predict.matrices import Matrix
from bayesadam.predict.network import Call, Forward, Gaussian, evaluating, mixes_examples, require_rows, widened

# By layer, shape of its input and number of examples; texts have many shapes.
_MOST_WAYS = 4096
Ways = dict[tuple[Matrix, torch.Size, int], tuple[Hashable, ...] | None]
# A module, its arguments, its keywords and its output → what stands in for the output; None leaves it.
See = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@contextmanager
def watched(modules: Iterable[nn.Module], see: See) -> Iterator[None]:
    """Within, `see` is called after every run of these modules."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(see, with_kwargs=True).remove)
        yield


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a layer was given first, by position or by name."""
    return args[0] if args else next(iter(kwargs.values()), None)


@dataclass(frozen=True, eq=False)
class Seen:
    """The inputs of layers in one forward pass, pooled by example.

    A layer that runs several times has the mean of its inputs; one that does not run, or whose input all examples
    share, has none; nor has an embedding of positions, unless all are known to be of `words`. In a ragged batch it is
    NaN for the examples that do not run it.

    Attributes:
        layers: those of which a ragged batch has inputs, if only NaN.
        size: the number of examples.
        mask: 0 at padding, (size, positions).
        owners: of a batch of graphs, see `batches.owners`.
        runs: of each layer, by its module, the pooled inputs of its runs, (size, width).
        layout: how the examples may lie in each.
        last: the last input, the type of its layer with the version of the input, and its mean over positions.
        ways: how the examples lie in an input of a layer, by the shape of the input; see `Matrix.layout`.
    """

    size: int
    mask: Tensor | None = None
    owners: Mapping[int, Tensor] = field(default_factory=dict)
    words: bool = True
    layers: Sequence[Matrix] = ()
    runs: dict[str, list[Tensor]] = field(default_factory=dict)
    layout: list[tuple[Hashable, ...]] = field(default_factory=list)
    last: list[Any] = field(default_factory=list)
    ways: Ways = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Any, layers: Sequence[Matrix], *, words: bool = True, ways: Ways | None = None) -> Seen:
        """Nothing yet, of a pass over these inputs; `ways` are those of passes before."""
        ways = {} if ways is None else ways
        if isinstance(inputs, Tensor):
            return cls(batch_size(inputs), words=words, ways=ways)
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        ragged = layers if is_ragged(inputs) else ()
        return cls(batch_size(inputs), mask, owners(inputs), words, ragged, ways=ways)

    def add(self, layer: Matrix, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """One run of a layer."""
        a = args[0] if args else first_input(args, kwargs)
        if self.owners:
            self._add_rows_of_graphs(layer, module, a)
        elif torch.compiler.is_compiling():
            self.runs.setdefault(layer.module, []).append(layer.pooled(module, a, self.size, self.mask))
        elif isinstance(a, Tensor) and (way := self._way(layer, a)) is not None:
            self.layout.append(way)
            # Queries, keys and values are of one input, unless it was changed in place.
            kind = None if a.is_inference() else (type(module), a._version)
            if kind is None or not self.last or self.last[0] is not a or self.last[1] != kind:
                self.last[:] = a, kind, layer.pooled(module, a, self.size, self.mask)
            self.runs.setdefault(layer.module, []).append(self.last[2])

    def _way(self, layer: Matrix, a: Tensor) -> tuple[Hashable, ...] | None:
        """How the examples lie in an input; None where it has no rows of theirs."""
        key = layer, a.shape, self.size
        if key not in self.ways:
            if len(self.ways) >= _MOST_WAYS:
                self.ways.clear()
            self.ways[key] = layer.layout(a, self.size) if layer.has_rows(a, self.size) else None
        way = self.ways[key]
        return None if way is None or (layer.tokens and self._is_position(a)) else way

    def _add_rows_of_graphs(self, layer: Matrix, module: nn.Module, a: Tensor) -> None:
        if layer.tokens or a.dim() < 2:
            return
        owner = self.owners.get(len(a))
        if owner is None:
            raise MatchError(f"layer {layer.module!r} has {len(a)} rows, not as many as nodes, edges or graphs")
        rows = F.pad(layer.pooled(module, a, len(a), None), (0, 1), value=1.0)
        sums = rows.new_zeros(self.size, rows.shape[1]).index_add(0, owner, rows)
        self.layout.append((layer.module, list(self.owners).index(len(a))))
        self.runs.setdefault(layer.module, []).append(sums[:, :-1] / sums[:, -1:])

    def _is_position(self, tokens: Tensor) -> bool:
        """Whether these may be the indices of positions, the same for all examples."""
        if self.words:
            return False
        tokens = tokens.reshape(len(tokens), -1)
        return torch.equal(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))

    def pooled(self, f: Tensor) -> dict[str, Tensor]:
        """The mean over runs, (size, width), by module; f is the output of the pass."""
        absent = {layer.module: f.new_full((self.size, layer.width), math.nan) for layer in self.layers}
        runs = {name: a[0] if len(a) == 1 else torch.stack(a).mean(dim=0) for name, a in self.runs.items()}
        return absent | runs if absent else runs


@contextmanager
def tapped(model: nn.Module, layers: Sequence[Matrix], seen: Seen) -> Iterator[Seen]:
    """Within, every run of these layers is added to `seen`."""
    by_module = {model.get_submodule(layer.module): layer for layer in layers}
    with watched(by_module, lambda module, args, kwargs, _: seen.add(by_module[module], module, args, kwargs)):
        yield seen


# f, pooled inputs by module, and the layout of every input.
Observed = tuple[Tensor, dict[str, Tensor], tuple[Hashable, ...]]
# In how many batches the rows of a layout were the examples in their order; infinite where once they were not.
Layouts = dict[tuple[Hashable, ...], float]
# So many prove it: one may be in order by chance, as a batch that was sorted.
_PROOF = 2
# Of so many rows and more, about so many tell how large a usual one is.
_USUAL = 64


def by_example(
    run: Callable[[Any], Observed], inputs: Any, layouts: Layouts, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """f and the pooled inputs of a batch, which are those of its examples alone.

    Of each new layout, two batches have two examples run alone. Where the rows of a layer are not theirs, as of a
    sequence as long as the batch, of packed sequences, or of positions folded before the examples, every example is run
    alone; those of a ragged batch are at once. `dtype` is the model's.
    """
    if is_ragged(inputs) and not owners(inputs):
        return _alone(run, inputs)
    try:
        f, pooled, layout = run(inputs)
    except MatchError:
        if is_ragged(inputs):
            return _alone(run, inputs)
        raise
    size = batch_size(inputs)
    require_rows(f, size)
    if size > 1 and layouts.get(layout, 0) < _PROOF:
        rough = dtype.itemsize < 4 or torch.is_autocast_enabled(f.device.type)
        ends, rows = (examples(inputs, 0, 1), examples(inputs, size - 1, size)), f.reshape(size, -1)
        singles = [one for end in ends if (one := _attempt(run, end)) is not None and one[0].dim() == f.dim()]
        pairs = [(one[0], rows[i][None]) for one, i in zip(singles, (0, -1), strict=False)]
        # Some models know of no batch of one: it loses a dimension, or has no variance.
        if len(singles) < 2:
            others = _attempt(run, examples(inputs, 1, size))
            pairs = [] if others is None else [(others[0], rows[1:])]
        if any(len(part) != len(row) or not _same(part, row, rows, 0.3 if rough else 0.05) for part, row in pairs):
            raise mixes_examples()
        if len(singles) < 2:
            return f, pooled
        odd = [
            name
            for name, a in pooled.items()
            for (_, seen, _), i in zip(singles, (0, -1), strict=True)
            if name not in seen or not _same(seen[name], a[i][None], a, 0.1 if rough else 1e-3)
        ]
        # Examples that are alike tell nothing.
        first, last = (pytree.tree_leaves(end) for end in ends)
        if odd or any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in zip(first, last, strict=True)):
            layouts[layout] = math.inf if odd else layouts.get(layout, 0) + 1
        if odd:
            warn(
                f"the rows of layer {odd[0]!r} are not the examples in their order: every example is run alone, which "
                "takes longer. Give the model tensors with the batch first, of examples padded to the same length"
            )
    if layouts.get(layout, 0) < math.inf:
        return f, pooled
    seen = _alone(run, inputs)[1]
    return f, {name: seen[name] for name in pooled if name in seen}


def _alone(run: Callable[[Any], Observed], inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """f and the pooled inputs of every example alone, of the layers that all of them run."""
    fs, every, _ = zip(*map(run, parts(inputs, 1)), strict=True)
    for f in fs:
        require_rows(f, 1)
    names = set.intersection(*map(set, every))
    return torch.cat(fs), {name: torch.cat([seen[name] for seen in every]) for name in every[0] if name in names}


def require_layers(layers: Sequence[Matrix], pooled: Mapping[str, Tensor]) -> None:
    """Refuse a batch for which some of the layers have no rows."""
    if missing := [layer.module for layer in layers if layer.module not in pooled]:
        raise MatchError(
            f"layer {missing[0]!r} has no row of inputs for every example here, as it had for familiar ones: does it "
            "run for some examples alone? Ask for those it runs for, or calibrate on examples like these"
        )


def _attempt(run: Callable[[Any], Observed], inputs: Any) -> Observed | None:
    try:
        with torch.no_grad():
            return run(inputs)
    except (RuntimeError, ValueError, TypeError, LookupError):
        return None


def _same(some: Tensor, rows: Tensor, all_rows: Tensor, tolerance: float) -> bool:
    """Equal but for rounding, in units of a usual row; of another number of outputs too, which says nothing."""
    all_rows = all_rows[:: 1 + len(all_rows) // _USUAL]
    some, rows, all_rows = (x.detach().double().reshape(len(x), -1).nan_to_num() for x in (some, rows, all_rows))
    if some.shape[1] != rows.shape[1]:
        return True
    distance = (some - rows).norm(dim=1).max()
    return float(distance) <= tolerance * float(all_rows.norm()) / math.sqrt(len(all_rows))


def observed(
    posterior: Gaussian,
    layers: Sequence[Matrix],
    inputs: Any,
    forward: Forward | None = None,
    layouts: Layouts | None = None,
    words: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """f(x; μ), (batch, ...), in float32 or wider, and the pooled input of each layer, (batch, width) by its module.

    `layouts` are those of batches before; `words` is as in `Seen`.
    """
    inputs = plain(inputs, graph=True)

    def run(batch: Any) -> Observed:
        with tapped(posterior.model, layers, Seen.of(batch, layers, words=words or batch is not inputs)) as seen:
            f = widened(call(call.mean, batch))
        return f, seen.pooled(f), tuple(seen.layout)

    with evaluating(posterior.model, differentiable=False), torch.set_grad_enabled(has_graph(inputs)):
        call = Call.of(posterior, forward)
        dtype = next(iter(call.mean.values())).dtype
        return by_example(run, inputs, {} if layouts is None else layouts, dtype) if layers else run(inputs)[:2]
