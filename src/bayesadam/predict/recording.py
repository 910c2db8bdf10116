"""The uses of parameters by known layers, as one forward pass runs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call

from bayesadam.predict.batches import batch_size
from bayesadam.predict.matrices import is_transposed_linear
from bayesadam.predict.network import Call
from bayesadam.predict.recurrent import run_recurrent
from bayesadam.predict.tap import first_input, watched
from bayesadam.predict.uses import Addend, Layout, Lookup, Product, Use, batch_first, batch_second

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LINEAR = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
# Layers that multiply by a weight a channel, and those that do by one a feature.
_BY_CHANNEL = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.GroupNorm, nn.PReLU,
)  # fmt: skip
_BY_FEATURE = (nn.LayerNorm, nn.RMSNorm)
_RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)
_KNOWN = (
    *_LINEAR, *_CONVOLUTIONS, *_BY_CHANNEL, *_BY_FEATURE, *_RECURRENT, nn.Embedding, nn.MultiheadAttention,
)  # fmt: skip
_FREE: tuple[Layout, ...] = (batch_first, batch_second)
_FIRST: tuple[Layout, ...] = (batch_first,)
# The kind of a use, its parameter, the layer's output and the use's other fields.
_Note = tuple[type[Use], Tensor | None, Tensor, dict[str, Any]]


def recorded(
    call: Call, inputs: Any, shared: tuple[str, ...] = (), *, recurrent: bool = True
) -> tuple[list[Use], Tensor]:
    """The uses of the parameters in a forward pass at μ, and its output; those `shared` by all examples are copied.

    A layer whose class was changed, or a parameter used in another way, is not noticed here: `explained` compares
    with autograd before anything trusts the list.
    """
    size, leaves = batch_size(inputs), call.leaves
    names = {id(leaf): name for name, leaf in leaves.items()}
    # Tables are looked up for each example, other parameters copied.
    tables, copies = {}, {}
    for name in shared:
        if isinstance(call.model.get_submodule(name.rpartition(".")[0]), nn.Embedding):
            tables[name] = size
        else:
            leaf = leaves[name]
            row = leaf if leaf.dim() > 1 and leaf.shape[0] == 1 else leaf.unsqueeze(0)
            copies[name] = row.expand(size, *row.shape[1:]).clone()
    uses: list[Use] = []
    steps: dict[nn.Module, list[_Note]] = {}

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        replaced = None
        if isinstance(module, nn.MultiheadAttention):
            notes, replaced = _attention(module, args, kwargs, output)
        elif isinstance(module, _RECURRENT):
            notes, replaced = steps.pop(module, []), output
        else:
            a = first_input(args, kwargs)
            if isinstance(module, nn.Embedding) and names.get(id(module.weight)) in tables:
                a, output = _for_each(a, size, 0), _for_each(output, size, 1)
            notes = _noted(module, a, output)
        for kind, parameter, z, fields in notes:
            # A layer that the model runs under no_grad has no gradients.
            if parameter is not None and id(parameter) in names and z.requires_grad:
                uses.append(kind(name=names[id(parameter)], edge=get_gradient_edge(z), shape=z.shape, **fields))
        if replaced is not None:
            return replaced
        # What follows may work in place; D is wanted at the layer's own output.
        return output.clone() if isinstance(output, Tensor) else None

    known = (m for m in call.model.modules() if type(m) in _KNOWN or is_transposed_linear(m) or _is_norm(m))
    replaceable = [m for m in call.model.modules() if recurrent and type(m) in _RECURRENT and "forward" not in vars(m)]
    try:
        with watched(known, see), ExitStack() as undo:
            for module in replaceable:
                module.forward = partial(_recurrent, module, steps)
                undo.callback(delattr, module, "forward")
            output = call({**leaves, **copies}, inputs)
    except RuntimeError:
        if not replaceable:
            raise
        # The model takes gradients within its forward pass: with respect to weights, or to be differentiated again.
        return recorded(call, inputs, shared, recurrent=False)
    for name, copy in copies.items():
        uses.append(Addend(name=name, edge=get_gradient_edge(copy), shape=copy.shape, layouts=_FIRST))
    return uses, output


def _for_each(tensor: Tensor, size: int, features: int) -> Tensor:
    """(positions, ...) or (1, positions, ...) as (size, positions, ...), with so many dimensions of features."""
    whole = tensor if tensor.dim() > 1 + features else tensor.unsqueeze(0)
    return whole.expand(size, *whole.shape[1:])


def _noted(m: Any, a: Tensor, z: Tensor) -> list[_Note]:
    """The uses of the parameters of one layer with input a and output z."""
    free: dict[str, Any] = {"layouts": _FREE}
    first: dict[str, Any] = {"layouts": _FIRST, "channel": True}
    if isinstance(m, nn.Embedding):
        return [] if m.max_norm else [(Lookup, m.weight, z, {**free, "ids": a, "padding": m.padding_idx})]
    if isinstance(m, _CONVOLUTIONS):
        how = {"layouts": _FIRST, "input": a, "convolution": m}
        uses: list[_Note] = [(Product, m.weight, z, how), (Addend, m.bias, z, first)]
        return uses if a.dim() == len(m.kernel_size) + 2 else []
    if isinstance(m, _LINEAR) or is_transposed_linear(m):
        product = {**free, "input": a, "inputs_first": not isinstance(m, _LINEAR)}
        return [(Product, m.weight, z, product), (Addend, getattr(m, "bias", None), z, free)]
    how = first if isinstance(m, _BY_CHANNEL) and m.weight is not None and m.weight.numel() > 1 else free
    slope = partial(_slope, m, a.detach())
    return [(Addend, m.weight, z, {**how, "scale": slope}), (Addend, getattr(m, "bias", None), z, how)]


def _is_norm(m: nn.Module) -> bool:
    """Whether, by its name, it is a norm of somebody's own; autograd will tell."""
    named = {name: p.dim() for name, p in m.named_parameters()}
    return type(m).__name__.endswith(("RMSNorm", "LayerNorm")) and named in ({"weight": 1}, {"weight": 1, "bias": 1})


def _slope(m: Any, x: Tensor) -> Tensor:
    """What a layer multiplies its weight by."""
    one = torch.ones_like(m.weight)
    zeros = {name: torch.zeros_like(p) for name, p in m.named_parameters()}
    with torch.no_grad():
        ends = [functional_call(m, {**zeros, "weight": w}, (x.to(one),)) for w in (one, 0 * one)]
    slope: Tensor = ends[0] - ends[1]
    return slope


# Of attention: the weight, the rows of it in use, the input, the bias and the rows of that → the projected input.
Project = Callable[[Tensor, slice | None, Tensor, Tensor | None, slice | None], Tensor]


def attention(
    m: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, project: Project
) -> Any:
    """Attention written out, each of its four projections by `project`; None of a kind that is not known."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    query = arguments["query"]
    if m.bias_k is not None or m.add_zero_attn or query.dim() != 3 or query.is_nested:
        return None
    apart = None if m._qkv_same_embed_dim else (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    projected: list[Tensor] = []
    for index, a in enumerate((query, arguments["key"], arguments["value"])):
        bias_rows = slice(index * m.embed_dim, (index + 1) * m.embed_dim)
        weight, rows = (m.in_proj_weight, bias_rows) if apart is None else (apart[index], None)
        z = project(weight, rows, a, m.in_proj_bias, bias_rows)
        projected.append(z if m.batch_first else z.transpose(0, 1))
    q, k, v = (z.reshape(*z.shape[:2], m.num_heads, -1).transpose(1, 2) for z in projected)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask, padding = arguments.get("attn_mask"), arguments.get("key_padding_mask")
    mask = mask.view(scores.shape) if mask is not None and mask.dim() == 3 else mask
    padding = None if padding is None else padding.view(len(scores), 1, 1, scores.shape[-1])
    for hidden in (mask, padding):
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf) if hidden.dtype == torch.bool else scores + hidden
    mixed = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
    mixed = mixed if m.batch_first else mixed.transpose(0, 1)
    return project(m.out_proj.weight, None, mixed, m.out_proj.bias, None).clone(), output[1]


def _attention(
    m: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> tuple[list[_Note], Any]:
    """The uses of its parameters by attention, and its result, which replaces the module's own."""
    free: dict[str, Any] = {"layouts": _FIRST if m.batch_first else (batch_second,)}
    notes: list[_Note] = []

    def project(weight: Tensor, rows: slice | None, a: Tensor, bias: Tensor | None, bias_rows: slice | None) -> Tensor:
        z = linear(weight, rows, a, bias, bias_rows)
        notes.append((Product, weight, z, {**free, "input": a, "rows": rows}))
        notes.append((Addend, bias, z, {**free, "rows": bias_rows}))
        return z

    return notes, attention(m, args, kwargs, output, project)


def linear(weight: Tensor, rows: slice | None, a: Tensor, bias: Tensor | None, bias_rows: slice | None) -> Tensor:
    """A projection of attention."""
    bias = bias if bias is None or bias_rows is None else bias[bias_rows]
    return F.linear(a, weight if rows is None else weight[rows], bias)


def _recurrent(m: Any, noted: dict[nn.Module, list[_Note]], x: Any, hx: Any = None) -> Any:
    """The result of a recurrent layer, with the uses of its parameters in `noted`."""
    # A weight that is made of other parameters leads to those.
    if not isinstance(x, Tensor) or x.dim() != 3 or not all(weight.is_leaf for weight in m._flat_weights):
        return type(m).forward(m, x, hx)
    result, arrivals, outputs = run_recurrent(m, x, hx)
    fields = {"layouts": _FIRST, "outlets": tuple((get_gradient_edge(y), at) for y, at in outputs if y.requires_grad)}
    noted[m] = [
        (Addend, weight, z, fields) if a is None else (Product, weight, z, {**fields, "input": a})
        for weight, z, a in arrivals
    ]
    return result
