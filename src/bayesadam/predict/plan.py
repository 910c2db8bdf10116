"""Which layer explains which parameter of a model, found out on a few examples and checked against autograd."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from bayesadam.errors import BayesAdamError, MatchError
from bayesadam.predict import contract
from bayesadam.predict.call import Call, Forward, batch_size, examples, explaining, repeated
from bayesadam.predict.captured import has_graph
from bayesadam.predict.layers import Layout, Output, SumUse, Use, batch_first
from bayesadam.predict.recording import recording

_PLANS_KEPT = 16


@dataclass(frozen=True, eq=False)
class Plan:
    """How the parameters of a model are handled, found out on a few examples.

    Attributes:
        uses: the parameter and the kind of every use of a layer, in order.
        layouts: for every use, how the examples lie in its tensors; None leaves the use out.
        generic: parameters whose gradients go through autograd, example by example.
        repeated: parameters that all examples share as they are, such as vectors of places: they are run with a copy for
            each example, so that the gradients of examples can be told apart.
        silent: parameters that had no gradient on these examples, so that nothing is known of them.
        activations: entries of activations per example.
        outputs: C, the outputs of the network.
        shape: the shape of one example's output.
        widest: entries per example of the largest of the activations.
        first: f(x; μ) of the first example, (1, ...), as it was found when the plan was looked up.
        checked: whether the model was looked at when the plan was looked up; if not, the result must agree with `first`.
    """

    uses: tuple[tuple[str, type[Use]], ...]
    layouts: tuple[Layout | None, ...]
    generic: tuple[str, ...]
    silent: tuple[str, ...]
    activations: int
    outputs: int
    shape: torch.Size
    repeated: tuple[str, ...] = ()
    widest: int = 0
    first: Tensor | None = None
    checked: bool = True


_plans: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()
# The last plan for each kind of inputs.
_latest: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def plan_for(call: Call, leaves: Mapping[str, Tensor], inputs: Any, *, checked: bool = False) -> Plan:
    """`make_plan`, remembered for a model as long as its modules, their settings, hooks and the kind of its inputs stay the same.

    So must what it computes, which may depend on more than that (a variable that its forward closes over, a list that it
    looks into): the first example is run at every call, and its operations, in order, and the outputs' shape belong to what
    is remembered. Another dimension that an operation goes along is not seen there. Where work on such inputs is captured,
    the model is not looked at, unless the plan must be `checked`: the replayed result is compared with the first example's.
    """
    flat, spec = pytree.tree_flatten(inputs)
    known, kind = _plans.setdefault(call.model, {}), kind_of(call, inputs)
    if not checked and has_graph(call.model, kind) and kind in _latest.get(call.model, {}):
        with torch.no_grad():
            alone = call(leaves, examples(inputs, 0, 1))
        return replace(_latest[call.model][kind], first=alone, checked=False)
    modules = tuple(
        (id(m), type(m), id(m.__dict__.get("forward")), len(m._forward_hooks), len(m._forward_pre_hooks), *_settings(m))
        for m in call.model.modules()
    )
    kinds = tuple((leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in flat)
    tensors = tuple((name, leaf.shape, leaf.dtype, leaf.device) for name, leaf in leaves.items())
    operations, first = _operations(call, leaves, inputs)
    key = (weakly(call.forward), call.at, modules, str(spec), kinds, tensors, operations)
    if key not in known:
        if len(known) >= _PLANS_KEPT:
            known.pop(next(iter(known)))
        known[key] = make_plan(call, leaves, inputs)
    latest = _latest.setdefault(call.model, {})
    if len(latest) >= _PLANS_KEPT:
        latest.pop(next(iter(latest)))
    latest[kind] = known[key]
    return replace(known[key], first=first)


def kind_of(call: Call, inputs: Any) -> tuple[Any, ...]:
    """How the model is called, and the shapes and types of what it is given."""
    flat, spec = pytree.tree_flatten(inputs)
    kinds = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in flat)
    return weakly(call.forward), call.at, str(spec), kinds


def weakly(forward: Forward | None) -> Any:
    """What stands for a forward without keeping it, for it may hold the model, which would then never be freed."""
    if forward is None:
        return None
    try:
        return WeakMethod(forward) if isinstance(forward, MethodType) else ref(forward)
    except TypeError:
        # It cannot be distinguished from others without a reference: it is equal to none, itself included.
        return object()


def _operations(call: Call, leaves: Mapping[str, Tensor], inputs: Any) -> tuple[tuple[Any, ...], Tensor | None]:
    """The first example's output shape and the graph behind it: the kinds of its nodes, down to the parameters; and the output.

    Where a node comes again its number stands for it.
    """
    try:
        with torch.enable_grad():
            output = call(leaves, examples(inputs, 0, 1))
    except BayesAdamError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError):
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


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Plain attributes, on which its forward may depend."""
    for name, value in vars(module).items():
        if isinstance(value, bool | int | float | str) and name != "training":
            yield name, value


def make_plan(call: Call, leaves: Mapping[str, Tensor], inputs: Any, shared: tuple[str, ...] = ()) -> Plan:
    """Try each way in which the examples may lie in a layer's tensors, and keep what agrees with autograd.

    With random r and s, Σ_b s_b ∂(r_b · f_b)/∂w is computed twice: by autograd, and from the layer's own factors example
    by example. They differ as soon as a weight is used elsewhere too, examples are mixed up, or a layer is not what it
    seems. The parameters `shared` by all examples have a copy for each; what no layer explains is tried so.
    """
    size = batch_size(inputs)
    probe = repeated(inputs, 2) if size == 1 else examples(inputs, 0, min(size, 3))
    size = batch_size(probe)
    with torch.enable_grad():
        with explaining(call, leaves, inputs):
            uses, output = recorded(call, leaves, probe, shared)
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
        _check_alone(call, leaves, probe, output)
        flat = output.reshape(size, -1)
        generator = torch.Generator().manual_seed(0)
        r = torch.randn(flat.shape, generator=generator).to(flat)
        # Signs alternate, so that a wrong layout is far off and not hidden behind the average.
        s = ((torch.rand(size, generator=generator) + 0.5) * (-1.0) ** torch.arange(size)).to(flat)
        weighted = (s[:, None] * r * flat).sum()
        truths = torch.autograd.grad(weighted, list(leaves.values()), retain_graph=True, allow_unused=True)
        ds = torch.autograd.grad((r * flat).sum(), edges_of(uses), allow_unused=True) if uses else ()
    layouts: list[Layout | None] = [None] * len(uses)
    generic, silent = [], []
    for name, truth in zip(leaves, truths, strict=True):
        truth = None if truth is None else dense(truth)
        if truth is None or not truth.any():
            silent.append(name)
            continue
        mine = [i for i, use in enumerate(uses) if use.name == name and ds[i] is not None]
        chosen = _agreeing_layouts([uses[i] for i in mine], [ds[i] for i in mine], truth, s, size)
        if chosen is None:
            generic.append(name)
        for i, layout in zip(mine, chosen or [], strict=False):
            layouts[i] = layout
    seen = {id(use.output): use.output.shape.numel() for use in uses}
    activations = max(sum(seen.values()), flat.numel()) // size
    more = tuple(name for name in generic if _can_be_repeated(call, leaves, probe, (*shared, name), output))
    if more and not shared:
        return make_plan(call, leaves, inputs, more)
    handled = _kinds(uses), tuple(layouts), tuple(generic), tuple(silent)
    widest = max([*seen.values(), flat.numel()]) // size
    return Plan(*handled, activations, flat.shape[1], output.shape[1:], shared, widest)


def _can_be_repeated(
    call: Call, leaves: Mapping[str, Tensor], probe: Any, shared: tuple[str, ...], output: Tensor
) -> bool:
    """Whether the model runs with a copy of the parameter for each example, to the same end."""
    try:
        with torch.enable_grad():
            _, found = recorded(call, leaves, probe, shared)
    except (RuntimeError, ValueError, IndexError, TypeError, BayesAdamError):
        return False
    return found.shape == output.shape and agree(found.detach(), output.detach())


def _kinds(uses: Sequence[Use]) -> tuple[tuple[str, type[Use]], ...]:
    return tuple((use.name, type(use)) for use in uses)


def _check_alone(call: Call, leaves: Mapping[str, Tensor], probe: Any, output: Tensor) -> None:
    """An example must give the same alone as among others: work is cut along the batch."""
    size = len(output)
    wrong = (
        "each example's output must depend on that example alone, but the model gives something else when one is run "
        "alone. Does it mix examples (batch norm without running statistics), or has an input as many rows as the batch "
        "without being one row per example? Pass that one through forward=lambda model, batch: ... Or is there no batch "
        "dimension? A single example is x[None]"
    )
    try:
        with torch.no_grad():
            alone = call(leaves, examples(probe, size - 1, size))
    except BayesAdamError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise BayesAdamError(f"{wrong} ({error})") from error
    among = output[-1:].detach()
    # Outputs that are not finite are reported elsewhere.
    finite = torch.isfinite(among)
    if alone.shape != among.shape or not agree(alone[finite], among[finite]):
        with torch.no_grad():
            again = call(leaves, examples(probe, size - 1, size))
        if again.shape == alone.shape and not torch.equal(again, alone):
            raise BayesAdamError(
                "the model gives something else each time it is run on the same example, in evaluation mode: something in "
                "it is random, such as functional.dropout without training=self.training. Use nn.Dropout, or pass that"
            )
        raise BayesAdamError(wrong)


def agree(ours: Tensor, truth: Tensor) -> bool:
    """Equal but for rounding."""
    return _disagreement(ours, truth) <= min(0.2, 10 * math.sqrt(torch.finfo(truth.dtype).eps))


def dense(gradient: Tensor) -> Tensor:
    """A gradient with every entry: that of an embedding may come as the rows it looked up."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _disagreement(ours: Tensor, truth: Tensor) -> float:
    wide = torch.promote_types(truth.dtype, torch.float32)
    ours, truth = ours.to(wide), truth.to(wide)
    return float((ours - truth).norm()) / (float(truth.norm()) or 1.0)


def _agreeing_layouts(
    uses: Sequence[Use], ds: Sequence[Tensor], truth: Tensor, s: Tensor, size: int
) -> list[Layout] | None:
    wide = torch.promote_types(truth.dtype, torch.float32)
    # Under autocast D is of 16 bits where the weights are not.
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (truth, *ds))
    best: tuple[float, list[Layout] | None] = (0.2, None)
    for attempt in range(max((len(use.layouts) for use in uses), default=0)):
        layout = [use.layouts[min(attempt, len(use.layouts) - 1)] for use in uses]
        ours = torch.zeros_like(truth, dtype=wide)
        try:
            for use, d, lay in zip(uses, ds, layout, strict=True):
                part = contract.total_gradient([use], [d[None]], [lay], size, s.to(wide), ours)
                use.of(ours).add_(part)
        except (RuntimeError, IndexError):
            continue
        found = _disagreement(ours, truth)
        if found <= min(4e-3, 10 * eps**0.5):
            return layout
        if eps > torch.finfo(torch.float32).eps and found < best[0]:
            # Rounding alone may come to this much; a wrong layout is still farther off.
            best = (found, layout)
    return best[1]


def fitted(plan: Plan, uses: Sequence[Use], flat: Tensor, leaves: Mapping[str, Tensor]) -> Plan:
    """The plan for one chunk: weights that were silent before, or all where other layers are used, go the generic way."""
    same = _kinds(uses) == plan.uses
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


def recorded(
    call: Call, leaves: Mapping[str, Tensor], inputs: Any, shared: tuple[str, ...] = ()
) -> tuple[list[Use], Tensor]:
    """The uses of the parameters in one forward pass, and its output; those `shared` by all examples have a copy for each."""
    size, names = batch_size(inputs), {id(leaf): name for name, leaf in leaves.items()}
    tables = {name for name in shared if isinstance(_owner(call.model, name), nn.Embedding)}
    copies = {name: _copies(leaves[name], size) for name in shared if name not in tables}
    with recording(call.model, names, dict.fromkeys(tables, size)) as uses:
        output = call({**leaves, **copies}, inputs)
    uses += [SumUse(name, Output.of(copy), (batch_first,)) for name, copy in copies.items()]
    # What the model runs without gradients has none.
    return [use for use in uses if use.output.edge is not None], output


def edges_of(uses: Sequence[Use]) -> list[GradientEdge]:
    """Where D arrives for each of them."""
    return [use.output.edge for use in uses if use.output.edge is not None]


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _copies(leaf: Tensor, size: int) -> Tensor:
    """(size, *shape), or with the first dimension widened where it is 1."""
    wide = leaf if leaf.dim() > 1 and leaf.shape[0] == 1 else leaf.unsqueeze(0)
    return wide.expand(size, *wide.shape[1:]).clone()
