"""Which layer explains which parameter: recorded in a forward pass, and checked against autograd on a few examples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from bayesadam.errors import BayesAdamError, MatchError
from bayesadam.gaussian.structure import Named
from bayesadam.predict import layers
from bayesadam.predict.call import Call, Forward, at_positions, batch_size, examples, repeated
from bayesadam.predict.layers import Layout, MatrixUse, SumUse, Use, batch_first, batch_second

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LINEAR = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_KNOWN = (
    *_LINEAR, *_CONVOLUTIONS, *_BATCH_NORMS,
    nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.MultiheadAttention,
)  # fmt: skip
_FREE: tuple[Layout, ...] = (batch_first, batch_second)
_FIRST: tuple[Layout, ...] = (batch_first,)
_PLANS_KEPT = 16
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError)


# --- recording ------------------------------------------------------------------------------------------------------


def recorded(call: Call, leaves: Named, inputs: Any, shared: tuple[str, ...] = ()) -> tuple[list[Use], Tensor]:
    """The uses of the parameters in one forward pass, and its output; those `shared` by all examples have a copy each.

    Hooks alone, removed in a `finally`. A layer whose class was changed, or a parameter used in another way, is not
    noticed here: `make_plan` checks every parameter against autograd before it trusts the list.
    """
    size, names = batch_size(inputs), {id(leaf): name for name, leaf in leaves.items()}
    owners = {name: call.model.get_submodule(name.rpartition(".")[0]) for name in shared}
    tables = {name: size for name, owner in owners.items() if isinstance(owner, nn.Embedding)}
    copies = {name: _copies(leaves[name], size) for name in shared if name not in tables}
    uses: list[Use] = []
    with _recording(call.model, names, tables, uses):
        output = call({**leaves, **copies}, inputs)
    for name, copy in copies.items():
        uses.append(SumUse(name=name, edge=get_gradient_edge(copy), shape=copy.shape, layouts=_FIRST))
    return uses, output


def _copies(leaf: Tensor, size: int) -> Tensor:
    """(size, *shape), or with the first dimension widened where it is 1."""
    wide = leaf if leaf.dim() > 1 and leaf.shape[0] == 1 else leaf.unsqueeze(0)
    return wide.expand(size, *wide.shape[1:]).clone()


@contextmanager
def _recording(
    model: nn.Module, names: Mapping[int, str], tables: Mapping[str, int], uses: list[Use]
) -> Iterator[None]:
    """Fill `uses` as the model runs; embeddings whose tables are shared by all examples are repeated for each."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(module, nn.MultiheadAttention):
            noted, replaced = _attention(module, args, kwargs, output)
        else:
            given = args[0] if args else next(iter(kwargs.values()))
            if isinstance(module, nn.Embedding) and (size := tables.get(names.get(id(module.weight), ""))):
                given, output = _for_each(given, size, 0), _for_each(output, size, 1)
            noted, replaced = _noted(module, given, output), None
        for kind, parameter, z, fields in noted:
            # What the model runs without gradients has none.
            if parameter is not None and id(parameter) in names and z.requires_grad:
                uses.append(kind(name=names[id(parameter)], edge=get_gradient_edge(z), shape=z.shape, **fields))
        if replaced is not None:
            return replaced
        # What follows may work in place; D is wanted at the layer's own output.
        return output.clone() if isinstance(output, Tensor) else None

    with ExitStack() as hooks:
        for module in model.modules():
            if type(module) in _KNOWN or _is_transposed_linear(module):
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _for_each(tensor: Tensor, size: int, features: int) -> Tensor:
    """(positions, ...) or (1, positions, ...) as (size, positions, ...), with so many dimensions of features."""
    whole = tensor if tensor.dim() > 1 + features else tensor.unsqueeze(0)
    return whole.expand(size, *whole.shape[1:])


def _is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is the linear layer of transformers' GPT-2, which need not be installed."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


# The kind of a use, its parameter, the layer's output and the use's other fields.
_Note = tuple[type[Use], Tensor | None, Tensor, dict[str, Any]]


def _noted(m: Any, a: Tensor, z: Tensor) -> list[_Note]:
    """The uses of the parameters of one layer with input a and output z."""
    free, first = {"layouts": _FREE}, {"layouts": _FIRST, "channel": True}
    if isinstance(m, nn.Embedding):
        return [] if m.max_norm else [(layers.EmbeddingUse, m.weight, z, {**free, "ids": a, "padding": m.padding_idx})]
    if isinstance(m, _CONVOLUTIONS):
        own = {"layouts": _FIRST, "input": a, "module": m}
        uses: list[_Note] = [(layers.ConvolutionUse, m.weight, z, own), (SumUse, m.bias, z, first)]
        return uses if a.dim() == len(m.kernel_size) + 2 else []
    if isinstance(m, _LINEAR) or _is_transposed_linear(m):
        matrix = MatrixUse if isinstance(m, _LINEAR) else layers.TransposedMatrixUse
        return [(matrix, m.weight, z, {**free, "input": a}), (SumUse, m.bias, z, free)]
    x = a.detach()
    if isinstance(m, nn.LayerNorm):
        scale = partial(F.layer_norm, x, m.normalized_shape, eps=m.eps)
    elif isinstance(m, nn.RMSNorm):
        scale = partial(F.rms_norm, x, m.normalized_shape, None, m.eps)
    elif isinstance(m, nn.GroupNorm):
        scale = partial(F.group_norm, x, m.num_groups, eps=m.eps)
    elif m.running_mean is not None:
        scale = partial(F.batch_norm, x, m.running_mean, m.running_var, eps=m.eps)
    else:
        return []
    how = free if isinstance(m, nn.LayerNorm | nn.RMSNorm) else first
    return [(SumUse, m.weight, z, {**how, "scale": scale}), (SumUse, getattr(m, "bias", None), z, how)]


def _attention(m: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any) -> tuple[list[_Note], Any]:
    """Attention written out, so that its four projections are seen, and its result, which replaces the module's own."""
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query = given["query"]
    if m.bias_k is not None or m.add_zero_attn or query.dim() != 3 or query.is_nested:
        return [], None
    how: Any = {"layouts": _FIRST if m.batch_first else (batch_second,)}
    own = None if m._qkv_same_embed_dim else (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    projected: list[Tensor] = []
    noted: list[_Note] = []
    for index, a in enumerate((query, given["key"], given["value"])):
        bias_rows = slice(index * m.embed_dim, (index + 1) * m.embed_dim)
        bias = None if m.in_proj_bias is None else m.in_proj_bias[bias_rows]
        weight, rows = (m.in_proj_weight, bias_rows) if own is None else (own[index], None)
        z = F.linear(a, weight if rows is None else weight[rows], bias)
        noted.append((MatrixUse, weight, z, {**how, "input": a, "rows": rows}))
        noted.append((SumUse, m.in_proj_bias, z, {**how, "rows": bias_rows}))
        projected.append(z if m.batch_first else z.transpose(0, 1))
    q, k, v = (z.reshape(*z.shape[:2], m.num_heads, -1).transpose(1, 2) for z in projected)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    mask = mask.view(scores.shape) if mask is not None and mask.dim() == 3 else mask
    padding = None if padding is None else padding.view(len(scores), 1, 1, scores.shape[-1])
    for each in (mask, padding):
        if each is not None:
            scores = scores.masked_fill(each, -math.inf) if each.dtype == torch.bool else scores + each
    mixed = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
    mixed = mixed if m.batch_first else mixed.transpose(0, 1)
    z = F.linear(mixed, m.out_proj.weight, m.out_proj.bias)
    noted += [(MatrixUse, m.out_proj.weight, z, {**how, "input": mixed}), (SumUse, m.out_proj.bias, z, how)]
    return noted, (z.clone(), output[1])


# --- planning -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plan:
    """How the parameters of a model are handled, determined on a few examples.

    Attributes:
        uses: the parameter and the kind of every use of a layer, in order.
        layouts: how the examples lie in the tensors of each use; None leaves it out.
        generic: parameters whose gradients go through autograd, example by example.
        silent: parameters that had no gradient on these examples, so that nothing is known of them.
        repeated: parameters that all examples share as they are, such as position vectors: they are run with a copy for
            each example, so that the gradients of examples can be separated.
        shape: of one example's output.
        activations, widest: entries per example of all activations, and of the largest of them.
        first: f(x; μ) of the first example, (1, ...).
    """

    uses: tuple[tuple[str, type[Use]], ...]
    layouts: tuple[Layout | None, ...]
    generic: tuple[str, ...]
    silent: tuple[str, ...]
    repeated: tuple[str, ...]
    shape: torch.Size
    activations: int
    widest: int
    first: Tensor | None = None

    @property
    def outputs(self) -> int:
        """The number of outputs of one example."""
        return self.shape.numel()


_plans: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def plan_for(call: Call, params: Named, inputs: Any) -> Plan:
    """`make_plan`, cached for a model as long as its modules, their settings, hooks and the kind of its inputs stay.

    What the model computes may depend on more than that (a variable that its forward closes over): the first example is
    run at every call, and the operations behind its output belong to the key. A changed dimension of one of them is not
    noticed.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    known = _plans.setdefault(call.model, {})
    modules = []
    for m in call.model.modules():
        hooks = len(m._forward_hooks), len(m._forward_pre_hooks)
        # Its forward may depend on plain attributes.
        plain = tuple((k, v) for k, v in vars(m).items() if isinstance(v, bool | int | float | str) and k != "training")
        modules.append((id(m), type(m), id(m.__dict__.get("forward")), hooks, plain))
    tensors = tuple((name, leaf.shape, leaf.dtype, leaf.device) for name, leaf in leaves.items())
    operations, first = _operations(call, leaves, inputs)
    key = (weakly(call.forward), call.at, tuple(modules), _kind(inputs), tensors, operations)
    if key not in known:
        if len(known) >= _PLANS_KEPT:
            known.pop(next(iter(known)))
        known[key] = make_plan(call, leaves, inputs)
    return replace(known[key], first=first)


def _kind(inputs: Any) -> tuple[Any, ...]:
    """What a batch is made of, without its size."""
    leaves, spec = pytree.tree_flatten(inputs)
    return str(spec), *((leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)


def weakly(forward: Forward | None) -> Any:
    """A key for a forward that does not keep it alive: it may hold the model, which would then never be freed."""
    if forward is None:
        return None
    try:
        return WeakMethod(forward) if isinstance(forward, MethodType) else ref(forward)
    except TypeError:
        # It has no weak reference: equal to none, itself included.
        return object()


def _operations(call: Call, leaves: Named, inputs: Any) -> tuple[tuple[Any, ...], Tensor | None]:
    """The first example's output shape, the kinds of the nodes of the graph behind it, and the output itself."""
    try:
        with torch.enable_grad():
            output = call(leaves, examples(inputs, 0, 1))
    except BayesAdamError:
        raise
    except _FAILURES:
        # Reported by `make_plan`.
        return (), None
    names = {id(leaf): name for name, leaf in leaves.items()}
    seen: dict[Any, int] = {}
    found: list[Any] = [output.shape[1:]]
    stack: list[Any] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            found.append(seen.get(node))
            continue
        seen[node] = len(seen)
        kind = node.name()
        found.append(names.get(id(node.variable)) if kind == "torch::autograd::AccumulateGrad" else kind)
        stack.extend(before for before, _ in node.next_functions)
    return tuple(found), output.detach()


def make_plan(call: Call, leaves: Named, inputs: Any, shared: tuple[str, ...] = ()) -> Plan:
    """Try each way in which the examples may lie in a layer's tensors, and keep what agrees with autograd.

    With random r and s, Σ_b s_b ∂(r_b · f_b)/∂w is computed twice: by autograd, and from the layer's own factors
    example by example. They differ as soon as a weight is used elsewhere too, examples are mixed up, or a layer is not
    what it seems. The parameters `shared` by all examples have a copy for each; what no layer explains is tried so.
    """
    size = batch_size(inputs)
    probe = repeated(inputs, 2) if size == 1 else examples(inputs, 0, min(size, 3))
    size = batch_size(probe)
    with torch.enable_grad():
        uses, output = recorded(call, leaves, probe, shared)
        _check_output(call, leaves, probe, output, size)
        flat = output.reshape(size, -1)
        generator = torch.Generator().manual_seed(0)
        r = torch.randn(flat.shape, generator=generator).to(flat)
        # Signs alternate, so that a wrong layout is far off and not hidden behind the average.
        s = ((torch.rand(size, generator=generator) + 0.5) * (-1.0) ** torch.arange(size)).to(flat)
        weighted = (s[:, None] * r * flat).sum()
        truths = torch.autograd.grad(weighted, list(leaves.values()), retain_graph=True, allow_unused=True)
        ds = torch.autograd.grad((r * flat).sum(), [use.edge for use in uses], allow_unused=True) if uses else ()
    layouts: list[Layout | None] = [None] * len(uses)
    generic, silent = [], []
    for name, truth in zip(leaves, truths, strict=True):
        if truth is None or not dense(truth).any():
            silent.append(name)
            continue
        mine = [i for i, use in enumerate(uses) if use.name == name and ds[i] is not None]
        chosen = _agreeing_layouts([uses[i] for i in mine], [ds[i] for i in mine], dense(truth), s, size)
        if chosen is None:
            generic.append(name)
        for i, layout in zip(mine, chosen or [], strict=False):
            layouts[i] = layout
    if not shared:
        more = tuple(name for name in generic if _can_be_repeated(call, leaves, probe, name, output.detach()))
        if more:
            return make_plan(call, leaves, inputs, more)
    seen = [shape.numel() for shape in {use.at: use.shape for use in uses}.values()]
    activations, widest = max(sum(seen), flat.numel()) // size, max([*seen, flat.numel()]) // size
    kinds = tuple((use.name, type(use)) for use in uses)
    found = kinds, tuple(layouts), tuple(generic), tuple(silent)
    return Plan(*found, shared, output.shape[1:], activations, widest)


def fitted(plan: Plan, uses: Sequence[Use], flat: Tensor, leaves: Named) -> Plan:
    """The plan for one chunk: weights that were silent, or all where other layers are used, go the generic way."""
    same = tuple((use.name, type(use)) for use in uses) == plan.uses
    unknown = plan.silent if same else tuple(leaves)
    live: tuple[str, ...] = ()
    if unknown and flat.requires_grad:
        r = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).to(flat)
        mine = [leaves[name] for name in unknown]
        grads = torch.autograd.grad((r * flat).sum(), mine, retain_graph=True, allow_unused=True)
        live = tuple(name for name, g in zip(unknown, grads, strict=True) if g is not None and bool(dense(g).any()))
    if same:
        return replace(plan, generic=plan.generic + live)
    return replace(plan, layouts=(None,) * len(uses), generic=live)


def _check_output(call: Call, leaves: Named, probe: Any, output: Tensor, size: int) -> None:
    """The batch comes first, the output depends on the weights, and an example gives the same alone as among others."""
    if output.shape[0] != size:
        raise BayesAdamError(
            f"the model returned {output.shape[0]} rows for {size} examples: its output must have the batch first. "
            "Pass forward=lambda model, batch: ... that returns (batch, ...)"
        )
    if not output.requires_grad:
        raise BayesAdamError(
            "the model's output does not depend on the posterior's parameters in a way that can be differentiated: is "
            "there a torch.no_grad(), a detach() or an argmax in its forward?"
        )
    if output.numel() == 0:
        raise MatchError(f"the model returned no outputs: its output has shape {tuple(output.shape)}")
    failure: Exception | None = None
    try:
        with torch.no_grad():
            alone, again = (call(leaves, examples(probe, size - 1, size)) for _ in range(2))
        among = output[-1:].detach()
        # Outputs that are not finite are reported elsewhere.
        finite = torch.isfinite(among)
        if alone.shape == among.shape and agree(alone[finite], among[finite]):
            return
        if again.shape == alone.shape and not torch.equal(again, alone):
            raise BayesAdamError(
                "the model gives something else each time it is run on the same example, in evaluation mode: something "
                "in it is random, such as functional.dropout without training=self.training. Use nn.Dropout instead"
            )
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, BayesAdamError):
            raise
        failure = error
    raise BayesAdamError(
        "each example's output must depend on that example alone, but the model gives something else when one is run "
        "alone. Does it mix examples (batch norm without running statistics), or has an input as many rows as the "
        "batch without being one row per example? Pass that one through forward=lambda model, batch: ... Or is there "
        f"no batch dimension? A single example is x[None]{'' if failure is None else f' ({failure})'}"
    ) from failure


def _can_be_repeated(call: Call, leaves: Named, probe: Any, name: str, output: Tensor) -> bool:
    """Whether the model runs with a copy of the parameter for each example, to the same end."""
    try:
        with torch.enable_grad():
            _, found = recorded(call, leaves, probe, (name,))
    except (*_FAILURES, BayesAdamError):
        return False
    return found.shape == output.shape and agree(found.detach(), output)


def agree(ours: Tensor, truth: Tensor) -> bool:
    """Equal but for rounding."""
    return disagreement(ours, truth) <= min(0.2, 10 * math.sqrt(torch.finfo(truth.dtype).eps))


def disagreement(ours: Tensor, truth: Tensor) -> float:
    """|ours − truth| over |truth|, in float32 or wider."""
    wide = torch.promote_types(truth.dtype, torch.float32)
    ours, truth = ours.detach().to(wide), truth.detach().to(wide)
    return float((ours - truth).norm()) / (float(truth.norm()) or 1.0)


def dense(gradient: Tensor) -> Tensor:
    """A gradient with every entry: that of an embedding may come as the rows it looked up."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _agreeing_layouts(
    uses: Sequence[Use], ds: Sequence[Tensor], truth: Tensor, s: Tensor, size: int
) -> list[Layout] | None:
    wide = torch.promote_types(truth.dtype, torch.float32)
    # Under autocast D is of 16 bits where the weights are not.
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (truth, *ds))
    best: tuple[float, list[Layout] | None] = (0.2, None)
    for attempt in range(max((len(use.layouts) for use in uses), default=0)):
        layouts = [use.layouts[min(attempt, len(use.layouts) - 1)] for use in uses]
        ours = torch.zeros_like(truth, dtype=wide)
        try:
            with torch.autocast(truth.device.type, enabled=False):
                for use, d, layout in zip(uses, ds, layouts, strict=True):
                    part = use.of(ours)
                    grads = use.gradients(d[None].to(wide), layout, size, part.shape)[0]
                    part += torch.tensordot(s.to(wide), grads, dims=1)
        except (RuntimeError, IndexError):
            continue
        found = disagreement(ours, truth)
        if found <= min(4e-3, 10 * eps**0.5):
            return layouts
        if eps > torch.finfo(torch.float32).eps and found < best[0]:
            # Rounding alone may come to this much; a wrong layout is still farther off.
            best = (found, layouts)
    return best[1]


# --- positions ----------------------------------------------------------------------------------------------------

_calls: WeakKeyDictionary[nn.Module, dict[Any, tuple[str, torch.Size]]] = WeakKeyDictionary()
# Of a model, such as lengths of texts.
_MOST_KINDS = 1000


def at_one_position(call: Call, params: Named, inputs: Any) -> tuple[Call, torch.Size]:
    """The call that takes (inputs, position), and the shape of an example's outputs at all positions; cached.

    The last layer runs at that position alone where cutting its input gives, on one example, what cutting outputs does.
    """
    known, key = _calls.setdefault(call.model, {}), (weakly(call.forward), _kind(inputs))
    if key in known:
        return replace(call, at=known[key][0]), known[key][1]
    seen: dict[str, Any] = {}
    one = examples(inputs, 0, 1)
    with torch.no_grad(), ExitStack() as hooks:
        for name, m in call.model.named_modules():
            if type(m) is nn.Linear and name:
                note = m.register_forward_hook(lambda m, a, z, name=name: seen.update({name: z}))
                hooks.callback(note.remove)
        whole = call(params, one)
    shape, at = whole.shape[1:], ""
    position = torch.full((1,), shape[:-1].numel() // 2, device=whole.device)
    for name, z in seen.items():
        if len(shape) < 2 or z.data_ptr() != whole.data_ptr() or z.shape != whole.shape:
            continue
        try:
            with torch.no_grad():
                cut = replace(call, at=name)(params, (one, position))
        except (*_FAILURES, MatchError):
            continue
        if cut.shape == (1, shape[-1]) and agree(cut, at_positions(whole, position)):
            at = name
    if len(known) >= _MOST_KINDS:
        known.clear()
    known[key] = at, shape
    return replace(call, at=at), shape
