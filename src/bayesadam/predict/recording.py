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

from bayesadam.predict.batches import batch_size
from bayesadam.predict.matrices import is_transposed_linear
from bayesadam.predict.network import Call
from bayesadam.predict.tap import first_input, watched
from bayesadam.predict.uses import Addend, Layout, Lookup, Product, Use, batch_first, batch_second

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LINEAR = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_KNOWN = (
    *_LINEAR, *_CONVOLUTIONS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.MultiheadAttention, nn.RNN, nn.GRU, nn.LSTM,
)  # fmt: skip
_RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)
_FREE: tuple[Layout, ...] = (batch_first, batch_second)
_FIRST: tuple[Layout, ...] = (batch_first,)
# The kind of a use, its parameter, the layer's output and the use's other fields.
_Note = tuple[type[Use], Tensor | None, Tensor, dict[str, Any]]


def recorded(call: Call, inputs: Any, shared: tuple[str, ...] = ()) -> tuple[list[Use], Tensor]:
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

    known = (module for module in call.model.modules() if type(module) in _KNOWN or is_transposed_linear(module))
    with watched(known, see), ExitStack() as undo:
        for module in call.model.modules():
            if type(module) in _RECURRENT and "forward" not in vars(module):
                module.forward = partial(_recurrent, module, steps)
                undo.callback(delattr, module, "forward")
        output = call({**leaves, **copies}, inputs)
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
    x = a.detach()
    if isinstance(m, nn.LayerNorm | nn.RMSNorm):
        normalise: Any = F.layer_norm if isinstance(m, nn.LayerNorm) else F.rms_norm
        how, scale = free, partial(normalise, x, m.normalized_shape, eps=m.eps)
    elif isinstance(m, nn.GroupNorm):
        how, scale = first, partial(F.group_norm, x, m.num_groups, eps=m.eps)
    elif m.running_mean is not None:
        how, scale = first, partial(F.batch_norm, x, m.running_mean, m.running_var, eps=m.eps)
    else:
        return []
    return [(Addend, m.weight, z, {**how, "scale": scale}), (Addend, getattr(m, "bias", None), z, how)]


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
    """The result of a recurrent layer, step by step, with the uses of its parameters in `noted`."""
    if not isinstance(x, Tensor) or x.dim() != 3:
        return type(m).forward(m, x, hx)
    notes = noted[m] = []

    def project(a: Tensor, weight: str, bias: str) -> Tensor:
        z = F.linear(a, getattr(m, weight), getattr(m, bias, None))
        notes.append((Product, getattr(m, weight), z, {"layouts": _FIRST, "input": a}))
        notes.append((Addend, getattr(m, bias, None), z, {"layouts": _FIRST}))
        return z

    a = x if m.batch_first else x.transpose(0, 1)
    starts = hx if isinstance(hx, tuple) else (hx, None)
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(m.num_layers):
        ways = []
        for way in ("", "_reverse") if m.bidirectional else ("",):
            name = f"l{layer}{way}"
            widths = m.proj_size or m.hidden_size, m.hidden_size
            given = (None if s is None else s[len(ends)] for s in starts)
            h, c = (a.new_zeros(len(a), w) if s is None else s for w, s in zip(widths, given, strict=True))
            steps = project(a, f"weight_ih_{name}", f"bias_ih_{name}").unbind(dim=1)
            hs = []
            for step in reversed(steps) if way else steps:
                h, c = _stepped(m, step, project(h, f"weight_hh_{name}", f"bias_hh_{name}"), h, c)
                h = project(h, f"weight_hr_{name}", "") if m.proj_size else h
                hs.append(h)
            ways.append(torch.stack(hs[::-1] if way else hs, dim=1))
            ends.append((h, c))
        a = torch.cat(ways, dim=2)
    h, c = (torch.stack(last) for last in zip(*ends, strict=True))
    return a if m.batch_first else a.transpose(0, 1), (h, c) if isinstance(m, nn.LSTM) else h


def _stepped(m: Any, x: Tensor, z: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The next h and c of a recurrent layer, of the projections of its input and of h."""
    if isinstance(m, nn.LSTM):
        i, f, g, o = (x + z).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if isinstance(m, nn.GRU):
        (xr, xu, xn), (zr, zu, zn) = x.chunk(3, dim=1), z.chunk(3, dim=1)
        new = (xn + (xr + zr).sigmoid() * zn).tanh()
        return new + (xu + zu).sigmoid() * (h - new), c
    return (x + z).relu() if m.nonlinearity == "relu" else (x + z).tanh(), c
