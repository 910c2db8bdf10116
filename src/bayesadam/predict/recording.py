"""A forward pass that notes which layer used which parameter, on what input, to give what output."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesadam.predict.layers import (
    ConvolutionUse,
    EmbeddingUse,
    Layout,
    MatrixUse,
    Output,
    SumUse,
    TransposedConvolutionUse,
    TransposedMatrixUse,
    Use,
    batch_first,
    batch_second,
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_FREE: tuple[Layout, ...] = (batch_first, batch_second)
_FIRST: tuple[Layout, ...] = (batch_first,)


@contextmanager
def recording(model: nn.Module, names: dict[int, str], shared: Mapping[str, int] | None = None) -> Iterator[list[Use]]:
    """Fill a list with the uses of the parameters `names` (by identity of the tensor) as the model runs.

    What embeddings whose tables are `shared` look up once for all examples is repeated for so many of them.

    Hooks alone, removed in a `finally`. A layer whose class was changed, or a parameter used in another way, is not
    noticed here: `linearised` checks every parameter against autograd before it trusts the list.
    """
    uses: list[Use] = []
    handles = []
    try:
        for module in model.modules():
            noted = type(module) in _NOTES
            if noted or _is_transposed_linear(module):
                hook = _hook(_NOTES[type(module)] if noted else _transposed_linear, names, uses, shared or {})
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
        yield uses
    finally:
        for handle in handles:
            handle.remove()


Add = Callable[..., None]
Note = Callable[[Any, Tensor, Tensor, Add], None]


def _hook(note: Note | None, names: dict[int, str], uses: list[Use], shared: Mapping[str, int]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # With the tensors themselves, so that no other one comes to have their identity.
        places: dict[int, tuple[Tensor, Output]] = {}

        def add(kind: type[Use], parameter: Tensor | None, *, output: Tensor, **fields: Any) -> None:
            if parameter is not None and id(parameter) in names:
                _, place = places.setdefault(id(output), (output, Output.of(output)))
                uses.append(kind(name=names[id(parameter)], output=place, **fields))

        if isinstance(module, nn.MultiheadAttention):
            replaced = _attention(module, args, kwargs, output, add)
            if replaced is not None:
                return replaced
        elif note is not None:
            given = args[0] if args else next(iter(kwargs.values()))
            size = shared.get(names.get(id(module.weight), "")) if isinstance(module, nn.Embedding) else None
            if size is not None:
                given, output = _for_each(given, size, 0), _for_each(output, size, 1)
            note(module, given, output, add)
        # What follows may work in place; D is wanted at the layer's own output.
        return output.clone() if isinstance(output, Tensor) else None

    return hook


def _for_each(tensor: Tensor, size: int, features: int) -> Tensor:
    """(places, ...) or (1, places, ...) as (size, places, ...), with so many dimensions of features."""
    whole = tensor if tensor.dim() > 1 + features else tensor.unsqueeze(0)
    return whole.expand(size, *whole.shape[1:])


def _linear(m: nn.Linear, a: Tensor, z: Tensor, add: Add) -> None:
    add(MatrixUse, m.weight, output=z, layouts=_FREE, input=a)
    add(SumUse, m.bias, output=z, layouts=_FREE)


def _is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is the linear layer of transformers' GPT-2, which need not be installed."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _transposed_linear(m: Any, a: Tensor, z: Tensor, add: Add) -> None:
    add(TransposedMatrixUse, m.weight, output=z, layouts=_FREE, input=a)
    add(SumUse, m.bias, output=z, layouts=_FREE)


def _convolution(m: nn.Conv2d | nn.ConvTranspose2d, a: Tensor, z: Tensor, add: Add) -> None:
    if a.dim() == len(m.kernel_size) + 2:
        kind = TransposedConvolutionUse if isinstance(m, _TRANSPOSED) else ConvolutionUse
        add(kind, m.weight, output=z, layouts=_FIRST, input=a, module=m)
        add(SumUse, m.bias, output=z, layouts=_FIRST, channel=True)


def _embedding(m: nn.Embedding, ids: Tensor, z: Tensor, add: Add) -> None:
    if m.max_norm is None:
        add(EmbeddingUse, m.weight, output=z, layouts=_FREE, ids=ids, padding=m.padding_idx)


def _layer_norm(m: nn.LayerNorm, x: Tensor, z: Tensor, add: Add) -> None:
    add(
        SumUse,
        m.weight,
        output=z,
        layouts=_FREE,
        scale=partial(F.layer_norm, x.detach(), m.normalized_shape, eps=m.eps),
    )
    add(SumUse, m.bias, output=z, layouts=_FREE)


def _rms_norm(m: nn.RMSNorm, x: Tensor, z: Tensor, add: Add) -> None:
    normal = partial(F.rms_norm, x.detach(), m.normalized_shape, None, m.eps)
    add(SumUse, m.weight, output=z, layouts=_FREE, scale=normal)


def _group_norm(m: nn.GroupNorm, x: Tensor, z: Tensor, add: Add) -> None:
    normal = partial(F.group_norm, x.detach(), m.num_groups, eps=m.eps)
    add(SumUse, m.weight, output=z, layouts=_FIRST, channel=True, scale=normal)
    add(SumUse, m.bias, output=z, layouts=_FIRST, channel=True)


def _batch_norm(m: nn.BatchNorm2d, x: Tensor, z: Tensor, add: Add) -> None:
    if m.running_mean is not None and m.running_var is not None:
        normal = partial(F.batch_norm, x.detach(), m.running_mean, m.running_var, eps=m.eps)
        add(SumUse, m.weight, output=z, layouts=_FIRST, channel=True, scale=normal)
        add(SumUse, m.bias, output=z, layouts=_FIRST, channel=True)


def _attention(m: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any, add: Add) -> Any:
    """Attention written out, so that its four projections are seen; its result replaces the module's own."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    if m.bias_k is not None or m.add_zero_attn or query.dim() != 3 or query.is_nested:
        return None
    layouts = _FIRST if m.batch_first else (batch_second,)
    width = m.embed_dim
    own = None if m._qkv_same_embed_dim else (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    projected = []
    for index, a in enumerate((query, key, value)):
        bias_rows = slice(index * width, (index + 1) * width)
        bias = None if m.in_proj_bias is None else m.in_proj_bias[bias_rows]
        weight, rows = (m.in_proj_weight, bias_rows) if own is None else (own[index], None)
        z = F.linear(a, weight if rows is None else weight[rows], bias)
        add(MatrixUse, weight, output=z, layouts=layouts, input=a, rows=rows)
        add(SumUse, m.in_proj_bias, output=z, layouts=layouts, rows=bias_rows)
        projected.append(z if m.batch_first else z.transpose(0, 1))
    q, k, v = (z.reshape(*z.shape[:2], m.num_heads, -1).transpose(1, 2) for z in projected)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    for mask in _masks(given, scores.shape):
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    mixed = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
    mixed = mixed if m.batch_first else mixed.transpose(0, 1)
    z = F.linear(mixed, m.out_proj.weight, m.out_proj.bias)
    add(MatrixUse, m.out_proj.weight, output=z, layouts=layouts, input=mixed)
    add(SumUse, m.out_proj.bias, output=z, layouts=layouts)
    return z.clone(), output[1]


def _masks(given: dict[str, Any], shape: torch.Size) -> Iterator[Tensor]:
    if (mask := given.get("attn_mask")) is not None:
        yield mask.view(shape) if mask.dim() == 3 else mask
    if (padding := given.get("key_padding_mask")) is not None:
        yield padding.view(shape[0], 1, 1, shape[-1])


_NOTES: dict[type[nn.Module], Note | None] = {
    nn.Linear: _linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    nn.MultiheadAttention: None,
    **dict.fromkeys((*_CONVOLUTIONS, *_TRANSPOSED), _convolution),
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
}
