"""Looking into a forward pass: the layers of a model that multiply their inputs by a matrix, and those inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bayesadam.errors import MatchError
from bayesadam.predict.batches import batch_size, has_graph, plain
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
    model: nn.Module, layers: Sequence[Layer], size: int, mask: Tensor | None = None
) -> Iterator[dict[str, Tensor]]:
    """The pooled input of every layer that a forward pass inside runs, (size, width) by the layer's module.

    A layer that runs several times has the mean of its inputs; one that does not run, or whose input all examples
    share, has none; nor has an embedding of positions.
    """
    pooled: dict[str, Tensor] = {}
    runs: dict[str, int] = {}
    by_module = {model.get_submodule(layer.module): layer for layer in layers}

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        a, layer = first_input(args, kwargs), by_module[module]
        if isinstance(a, Tensor) and layer.has_rows(a, size) and not (layer.tokens and _counts_up(a)):
            mean, name = layer.pooled(module, a, size, mask), layer.module
            runs[name] = runs.get(name, 0) + 1
            before = pooled.get(name, mean)
            pooled[name] = before + (mean - before) / runs[name]

    with watched(by_module, see):
        yield pooled


def _counts_up(tokens: Tensor) -> bool:
    """Whether these are the indices of positions, the same for all examples."""
    tokens = tokens.reshape(len(tokens), -1)
    return torch.equal(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))


def observed(
    posterior: Gaussian, layers: Sequence[Layer], inputs: Any, forward: Forward | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """f(x; μ), (batch, ...), in float32 or wider, and the pooled input of each layer, (batch, width) by its module."""
    inputs, call = plain(inputs, graph=True), Call(posterior.model, forward)
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    taps = tapped(posterior.model, layers, batch_size(inputs), mask)
    with evaluating(posterior.model, differentiable=False), torch.set_grad_enabled(has_graph(inputs)), taps as pooled:
        return widened(call(means(posterior), inputs)), pooled
