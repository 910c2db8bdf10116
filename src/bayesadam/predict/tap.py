"""Looking into a forward pass: the inputs of the layers that multiply them by a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._warnings import warn
from bayesadam.errors import MatchError
from bayesadam.predict.batches import batch_size, examples, has_graph, parts, plain
from bayesadam.predict.matrices import Matrix
from bayesadam.predict.network import Call, Forward, Gaussian, evaluating, mixes_examples, require_rows, widened

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


@contextmanager
def tapped(
    model: nn.Module,
    layers: Sequence[Matrix],
    size: int,
    mask: Tensor | None = None,
    layout: list[tuple[Hashable, ...]] | None = None,
    words: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """The pooled input of every layer that a forward pass inside runs, (size, width) by the layer's module.

    A layer that runs several times has the mean of its inputs; one that does not run, or whose input all examples
    share, has none; nor has an embedding of positions, unless all are known to be of `words`. How the examples may lie
    in each is added to `layout`.
    """
    pooled: dict[str, Tensor] = {}
    runs: dict[str, int] = {}
    by_module = {model.get_submodule(layer.module): layer for layer in layers}

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        a, layer = first_input(args, kwargs), by_module[module]
        if isinstance(a, Tensor) and layer.has_rows(a, size) and (words or not (layer.tokens and _counts_up(a))):
            mean, name = layer.pooled(module, a, size, mask), layer.module
            runs[name] = runs.get(name, 0) + 1
            before = pooled.get(name, mean)
            pooled[name] = before + (mean - before) / runs[name]
            if layout is not None:
                layout.append(layer.layout(a, size))

    with watched(by_module, see):
        yield pooled


# f, pooled inputs by module, and the layout of every input.
Observed = tuple[Tensor, dict[str, Tensor], tuple[Hashable, ...]]
# In how many batches the rows of a layout were the examples in their order; infinite where once they were not.
Layouts = dict[tuple[Hashable, ...], float]
# So many prove it: one may be in order by chance, as a batch that was sorted.
_PROOF = 2


def by_example(
    run: Callable[[Any], Observed], inputs: Any, layouts: Layouts, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """f and the pooled inputs of a batch, which are those of its examples alone.

    Of each new layout, two batches have two examples run alone. Where the rows of a layer are not theirs, as of a
    sequence as long as the batch, of packed sequences, or of positions folded before the examples, every example is run
    alone. `dtype` is the model's.
    """
    f, pooled, layout = run(inputs)
    size = batch_size(inputs)
    rough = dtype.itemsize < 4 or torch.is_autocast_enabled(f.device.type)
    require_rows(f, size)
    if size > 1 and layouts.get(layout, 0) < _PROOF:
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
    every = [run(example)[1] for example in parts(inputs, 1)]
    names = set.intersection(set(pooled), *(set(seen) for seen in every))
    return f, {name: torch.cat([seen[name] for seen in every]) for name in pooled if name in names}


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
    some, rows, all_rows = (x.detach().double().reshape(len(x), -1).nan_to_num() for x in (some, rows, all_rows))
    if some.shape[1] != rows.shape[1]:
        return True
    distance = (some - rows).norm(dim=1).max()
    return float(distance) <= tolerance * float(all_rows.norm()) / math.sqrt(len(all_rows))


def _counts_up(tokens: Tensor) -> bool:
    """Whether these are the indices of positions, the same for all examples."""
    tokens = tokens.reshape(len(tokens), -1)
    return torch.equal(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))


def observed(
    posterior: Gaussian,
    layers: Sequence[Matrix],
    inputs: Any,
    forward: Forward | None = None,
    layouts: Layouts | None = None,
    words: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """f(x; μ), (batch, ...), in float32 or wider, and the pooled input of each layer, (batch, width) by its module.

    `layouts` are those of batches before; `words` is as in `tapped`.
    """
    inputs = plain(inputs, graph=True)

    def run(batch: Any) -> Observed:
        mask = batch.get("attention_mask") if isinstance(batch, dict) else None
        layout: list[tuple[Hashable, ...]] = []
        with tapped(posterior.model, layers, batch_size(batch), mask, layout, words or batch is not inputs) as pooled:
            return widened(call(call.mean, batch)), pooled, tuple(layout)

    with evaluating(posterior.model, differentiable=False), torch.set_grad_enabled(has_graph(inputs)):
        call = Call.of(posterior, forward)
        dtype = next(iter(call.mean.values())).dtype
        return by_example(run, inputs, {} if layouts is None else layouts, dtype) if layers else run(inputs)[:2]
