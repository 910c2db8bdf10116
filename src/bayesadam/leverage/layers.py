"""The layers of a model that multiply their inputs by a matrix, and those inputs, averaged over positions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bayesadam._alone import named_modules
from bayesadam.predict.call import Call, Forward, batch_size, evaluating, has_graph, plain


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
        """Whether an input has a row, or some, for each example."""
        return a.dim() > 1 and (len(a) == size if self.tokens else a.numel() % (size * self.width) == 0)

    def pooled(self, module: nn.Module, a: Tensor, size: int, mask: Tensor | None) -> Tensor:
        """The mean of a over positions, (size, width).

        `mask`, (size, positions), is 0 at padding.
        """
        if self.tokens:
            tokens = a.reshape(size, -1)
            weights = torch.ones_like(tokens, dtype=torch.float32) if mask is None else mask.float().expand_as(tokens)
            share = weights / weights.sum(dim=1, keepdim=True)
            return torch.zeros(size, self.width, device=a.device).scatter_add(1, tokens, share)
        a = a if a.dtype == torch.float32 else a.to(torch.promote_types(a.dtype, torch.float32))
        if a.dim() == 2 and a.shape[0] == size:
            return a
        if isinstance(module, _ConvNd):
            return a.reshape(size, self.width, -1).mean(dim=2)
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            a = a.transpose(0, 1)
        a = a.reshape(size, -1, self.width)
        if mask is None or mask.shape != a.shape[:2]:
            return a.mean(dim=1)
        weights = mask.to(a)
        return torch.einsum("bp,bpd->bd", weights / weights.sum(dim=1, keepdim=True), a)


def layers_of(model: nn.Module, names: Collection[str]) -> tuple[Layer, ...]:
    """The layers whose matrix is among some named parameters."""
    found = []
    for name, module in model.named_modules():
        key = "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"
        weight = f"{name}.{key}" if name else key
        if weight not in names:
            continue
        if isinstance(module, _ConvNd):
            transposed = isinstance(module, _ConvTransposeNd)
            found.append(Layer(name, weight, module.in_channels, 1 if transposed else module.groups, transposed))
        # One with a forward of its own may be given something else than tokens, as BART's positions are.
        elif isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            found.append(Layer(name, weight, module.num_embeddings, inputs_first=True, tokens=True))
        elif isinstance(module, nn.MultiheadAttention):
            found.append(Layer(name, weight, module.embed_dim))
        # Attention projects its output without a call of the layer that holds the matrix.
        elif isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear):
            found.append(Layer(name, weight, module.in_features))
        elif type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor):
            found.append(Layer(name, weight, module.weight.shape[0], inputs_first=True))
    return tuple(found)


@contextmanager
def layer_inputs(
    model: nn.Module, layers: Sequence[Layer], size: int, mask: Tensor | None = None, *, chosen: bool = False
) -> Iterator[dict[str, Tensor]]:
    """The pooled input of every layer that a forward pass inside runs, (size, width) by the layer's module.

    A layer that runs several times has the mean of its inputs. Embeddings of positions have none, which is looked for
    unless the layers were `chosen` before. Each layer's own `forward` is put aside meanwhile: hooks take longer.
    """
    found: dict[str, Tensor] = {}
    runs: dict[str, int] = {}
    modules = {name[:-1]: module for name, module in named_modules(model)}
    held = [(modules[layer.module], modules[layer.module].__dict__.get("forward")) for layer in layers]

    def watched(layer: Layer, module: nn.Module) -> Any:
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            a = args[0] if args else next(iter(kwargs.values()))
            if layer.has_rows(a, size) and (chosen or not layer.tokens or not _counts_up(a)):
                pooled = layer.pooled(module, a, size, mask)
                run, before = runs.get(layer.module, 0) + 1, found.get(layer.module)
                runs[layer.module] = run
                found[layer.module] = pooled if before is None else before + (pooled - before) / run
            return forward(*args, **kwargs)

        return call

    try:
        for layer, (module, _) in zip(layers, held, strict=True):
            module.__dict__["forward"] = watched(layer, module)
        yield found
    finally:
        for module, before in held:
            module.__dict__.pop("forward", None)
            if before is not None:
                module.__dict__["forward"] = before


def _counts_up(tokens: Tensor) -> bool:
    """Whether these are the indices of positions, the same for all examples."""
    tokens = tokens.reshape(len(tokens), -1)
    return torch.equal(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))


def observed(
    gaussian: Any, layers: Sequence[Layer], inputs: Any, forward: Forward | None = None, *, chosen: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """f(x; μ), (batch, ...), in float32 or wider, and the pooled input of each layer, (batch, width) by its module."""
    inputs, call = plain(inputs, graph=True), Call(gaussian.model, forward)
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    taps = layer_inputs(gaussian.model, layers, batch_size(inputs), mask, chosen=chosen)
    recorded = torch.enable_grad() if has_graph(inputs) else torch.no_grad()
    with evaluating(gaussian.model, differentiable=False), recorded, taps as seen:
        outputs = call(gaussian.mean, inputs)
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32)), seen
