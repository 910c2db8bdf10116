"""Looking into a forward pass: the layers of a model that multiply their inputs by a matrix, and those inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils import _pytree as pytree

from bayesadam._warnings import warn
from bayesadam.errors import MatchError
from bayesadam.predict.batches import batch_size, examples, has_graph, plain
from bayesadam.predict.network import Call, Forward, Gaussian, evaluating, means, widened

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


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is the linear layer of transformers' GPT-2, (inputs, outputs), which need not be installed."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), Tensor)


@dataclass(frozen=True)
class Layer:
    """A layer z = W a at every position.

    Attributes:
        module: its name in the model.
        weight: the name of W.
        width: the length of a; an embedding's a is the one-hot vector of a token.
        groups: blocks of a that do not meet, those of a grouped convolution.
        inputs_first: whether the first dimension of W is that of the inputs, as in transposed convolutions, embeddings
            and transformers' Conv1D; else the second is.
        tokens: whether it is an embedding.
    """

    module: str
    weight: str
    width: int
    groups: int = 1
    inputs_first: bool = False
    tokens: bool = False

    def columns(self, v: Tensor) -> Tensor:
        """Σ v over all but the inputs, (width,), of v in the shape of W."""
        if self.inputs_first:
            return v.flatten(1).sum(dim=1)
        shape = self.groups, v.shape[0] // self.groups, self.width // self.groups, -1
        return v.reshape(shape).sum(dim=(1, 3)).flatten()

    def has_rows(self, a: Tensor, size: int) -> bool:
        """Whether an input has rows of its own for each of `size` examples; False where all share it.

        Raises:
            MatchError: there are more rows than examples, and nothing says whose they are.
        """
        if self.tokens or a.dim() < 2:
            return a.dim() > 1 and len(a) == size
        if len(a) % size == 0 or (a.dim() > 2 and a.shape[1] == size):
            return True
        if len(a) > size:
            raise MatchError(
                f"layer {self.module!r} has {len(a)} rows of inputs for {size} examples, and nothing says which rows "
                "are whose: novelty would be averaged over neighbours. Pad the examples of a batch to the same number "
                "of rows, (batch, rows, ...), or ask for one example at a time"
            )
        return False

    def layout(self, a: Tensor, size: int) -> tuple[Hashable, ...]:
        """All by which `pooled` tells how the examples lie in an input."""
        second = a.dim() > 2 and a.shape[1] == size
        return self.module, a.dim(), len(a) == size, second, 0 if second else len(a) // size

    def pooled(self, module: nn.Module, a: Tensor, size: int, mask: Tensor | None) -> Tensor:
        """The mean of a over positions, (size, width).

        `mask`, (size, positions), is 0 at padding.
        """
        if self.tokens:
            tokens = a.reshape(size, -1)
            weights = torch.ones_like(tokens, dtype=torch.float32) if mask is None else mask.float().expand_as(tokens)
            share = weights / weights.sum(dim=1, keepdim=True)
            return torch.zeros(size, self.width, device=a.device).scatter_add(1, tokens, share)
        a = widened(a)
        if a.dim() == 2 and a.shape[0] == size:
            return a
        if isinstance(module, _ConvNd):
            pixels = a.reshape(size, -1, self.width, a.shape[2:].numel())
            return pixels.mean(dim=(1, 3))
        sequence_first = isinstance(module, nn.MultiheadAttention) and not module.batch_first
        if sequence_first or (a.dim() > 2 and a.shape[0] != size and a.shape[1] == size):
            a = a.transpose(0, 1)
        a = a.reshape(size, -1, self.width)
        if mask is None or mask.shape != a.shape[:2]:
            return a.mean(dim=1)
        weights = mask.to(a)
        return torch.einsum("bp,bpd->bd", weights / weights.sum(dim=1, keepdim=True), a)


def layers_of(model: nn.Module, names: Collection[str]) -> tuple[Layer, ...]:
    """The layers whose matrix is among some named parameters."""
    layers = []
    for name, module in model.named_modules():
        key = "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"
        weight = f"{name}.{key}" if name else key
        if weight not in names:
            continue
        if isinstance(module, _ConvNd):
            transposed = isinstance(module, _ConvTransposeNd)
            layers.append(Layer(name, weight, module.in_channels, 1 if transposed else module.groups, transposed))
        # One with a forward of its own may be given something else than tokens, as BART's positions are.
        elif isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            layers.append(Layer(name, weight, module.num_embeddings, inputs_first=True, tokens=True))
        elif isinstance(module, nn.MultiheadAttention):
            layers.append(Layer(name, weight, module.embed_dim))
        # Attention projects its output without a call of the layer that holds the matrix.
        elif isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear):
            layers.append(Layer(name, weight, module.in_features))
        elif is_transposed_linear(module):
            layers.append(Layer(name, weight, module.get_parameter("weight").shape[0], inputs_first=True))
    return tuple(layers)


@contextmanager
def tapped(
    model: nn.Module,
    layers: Sequence[Layer],
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
    if len(f) != size:
        raise MatchError(
            f"the model returned {len(f)} rows for {size} examples: its output must have the batch first. Pass "
            "forward=lambda model, batch: ... that returns (batch, ...), and the inputs with the batch first"
        )
    if size > 1 and layouts.get(layout, 0) < _PROOF:
        ends, rows = (examples(inputs, 0, 1), examples(inputs, size - 1, size)), f.reshape(size, -1)
        alone = [_attempt(run, end) for end in ends]
        singles = [one for one in alone if one is not None and one[0].dim() == f.dim()]
        # Some models know of no batch of one: it loses a dimension, or has no variance.
        others = None if len(singles) == 2 else _attempt(run, examples(inputs, 1, size))
        pairs = [(one[0], rows[i : i + 1]) for one, i in zip(singles, (0, size - 1), strict=False) if len(singles) == 2]
        pairs += [] if others is None else [(others[0], rows[1:])]
        if any(len(part) != len(row) or not _same(part, row, rows, 0.3 if rough else 0.05) for part, row in pairs):
            raise MatchError(
                "each example's output must depend on that example alone, but the model gives something else when one "
                "is run alone. Does it mix examples (batch norm without running statistics), is something in it "
                "random, or has an input as many rows as the batch without being one row per example? Pass that one "
                "through forward=lambda model, batch: ..."
            )
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
    every = [run(examples(inputs, i, i + 1))[1] for i in range(size)]
    names = set.intersection(set(pooled), *(set(seen) for seen in every))
    return f, {name: torch.cat([seen[name] for seen in every]) for name in pooled if name in names}


def require_layers(layers: Sequence[Layer], pooled: Mapping[str, Tensor]) -> None:
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
    layers: Sequence[Layer],
    inputs: Any,
    forward: Forward | None = None,
    layouts: Layouts | None = None,
    words: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """f(x; μ), (batch, ...), in float32 or wider, and the pooled input of each layer, (batch, width) by its module.

    `layouts` are those of batches before; `words` is as in `tapped`.
    """
    inputs, call = plain(inputs, graph=True), Call(posterior.model, forward)

    def run(batch: Any) -> Observed:
        mask = batch.get("attention_mask") if isinstance(batch, dict) else None
        layout: list[tuple[Hashable, ...]] = []
        with tapped(posterior.model, layers, batch_size(batch), mask, layout, words or batch is not inputs) as pooled:
            return widened(call(mu, batch)), pooled, tuple(layout)

    with evaluating(posterior.model, differentiable=False), torch.set_grad_enabled(has_graph(inputs)):
        mu = means(posterior)
        dtype = next(iter(mu.values())).dtype
        return by_example(run, inputs, {} if layouts is None else layouts, dtype) if layers else run(inputs)[:2]
