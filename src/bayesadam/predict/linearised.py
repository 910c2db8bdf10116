"""Exact variances of the linearised network, f(x; μ) + J (θ − μ), under a diagonal posterior: diag or all of J Σ Jᵀ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.utils import _pytree as pytree

from bayesadam.errors import BayesAdamError, MatchError
from bayesadam.predict import contract
from bayesadam.predict.call import Call, batch_size, examples, is_batched, repeated
from bayesadam.predict.layers import Layout, MatrixUse, SumUse, Use
from bayesadam.predict.recording import recording

DEFAULT_BUDGET = 1 << 30
Spread = Callable[[str], Tensor]
_OUTPUTS_AT_ONCE = 64
_PLANS_KEPT = 16


class MemoryBudgetError(BayesAdamError):
    """One example does not fit the memory budget."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How the parameters of a model are handled, found out on a few examples.

    Attributes:
        uses: the parameter and the kind of every use of a layer, in order.
        layouts: for every use, how the examples lie in its tensors; None leaves the use out.
        generic: parameters whose gradients go through autograd, example by example.
        silent: parameters that had no gradient on these examples, so that nothing is known of them.
        activations: entries of activations an example.
        outputs: C, the outputs of the network.
        shape: the shape of one example's output.
    """

    uses: tuple[tuple[str, type[Use]], ...]
    layouts: tuple[Layout | None, ...]
    generic: tuple[str, ...]
    silent: tuple[str, ...]
    activations: int
    outputs: int
    shape: torch.Size


@dataclass(frozen=True, eq=False)
class Moments:
    """f(x; μ), (b, c), with either the variances for each spread, (k, b, c), or one covariance, (b, c, c)."""

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    shape: torch.Size


def moments(
    call: Call,
    params: Mapping[str, Tensor],
    spreads: Sequence[Spread],
    inputs: Any,
    *,
    covariance: bool = False,
    budget: int = DEFAULT_BUDGET,
) -> Moments:
    """Mean and J S Jᵀ for each S of `spreads`, in one pass over the inputs.

    Per layer the contraction is in closed form, the layer's factors are dropped at once, and no (batch, outputs,
    parameters) tensor exists. A layer that is not known, or not used as known, is found out by comparing with autograd on
    the first examples; its parameters take the generic path, with the same numbers.

    Args:
        call: the model.
        params: μ, in the types of the model's parameters.
        spreads: functions from a parameter's name to its variances S.
        inputs: the batch.
        covariance: the whole (c, c) blocks, for a single spread.
        budget: bytes for activations and back-propagated outputs.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    plan = plan_for(call, leaves, inputs)
    size = batch_size(inputs)
    per_chunk, at_once = _chunking(plan, size, next(iter(leaves.values())).element_size(), covariance, budget)
    means, parts, blocks = [], [], []
    for start in range(0, size, per_chunk):
        chunk = examples(inputs, start, start + per_chunk)
        fitted, mean, variance, block = _layerwise(call, leaves, plan, spreads, chunk, at_once, covariance)
        with torch.no_grad():
            generic = _generic(call, leaves, fitted, spreads, chunk, covariance, budget)
        means.append(mean)
        parts.append(variance + generic[0])
        blocks.append(block + generic[1])
    variance = torch.cat(parts, dim=1)
    return Moments(torch.cat(means), variance, torch.cat(blocks) if covariance else None, plan.shape)


_plans: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def plan_for(call: Call, leaves: Mapping[str, Tensor], inputs: Any) -> Plan:
    """`make_plan`, remembered for a model as long as its modules, their settings, hooks and the kind of its inputs stay the same."""
    flat, spec = pytree.tree_flatten(inputs)
    modules = tuple(
        (id(m), type(m), id(m.__dict__.get("forward")), len(m._forward_hooks), len(m._forward_pre_hooks), *_settings(m))
        for m in call.model.modules()
    )
    kinds = tuple((leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in flat)
    tensors = tuple((name, leaf.shape, leaf.dtype, leaf.device) for name, leaf in leaves.items())
    # Weakly, for a forward may hold the model, which would then never be freed.
    key = (call.forward and ref(call.forward), modules, str(spec), kinds, tensors)
    known = _plans.setdefault(call.model, {})
    if key not in known:
        if len(known) >= _PLANS_KEPT:
            known.pop(next(iter(known)))
        known[key] = make_plan(call, leaves, inputs)
    return known[key]


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Plain attributes, on which its forward may depend."""
    for name, value in vars(module).items():
        if isinstance(value, bool | int | float | str) and name != "training":
            yield name, value


def make_plan(call: Call, leaves: Mapping[str, Tensor], inputs: Any) -> Plan:
    """Try each way in which the examples may lie in a layer's tensors, and keep what agrees with autograd.

    With random r and s, Σ_b s_b ∂(r_b · f_b)/∂w is computed twice: by autograd, and from the layer's own factors example
    by example. They differ as soon as a weight is used elsewhere too, examples are mixed up, or a layer is not what it
    seems.
    """
    size = batch_size(inputs)
    probe = repeated(inputs, 2) if size == 1 else examples(inputs, 0, min(size, 3))
    size = batch_size(probe)
    with torch.enable_grad():
        uses, output = recorded(call, leaves, probe)
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
        names = list(leaves)
        generator = torch.Generator().manual_seed(0)
        r = torch.randn(flat.shape, generator=generator).to(flat)
        # Signs alternate, so that a wrong layout is far off and not hidden behind the average.
        s = ((torch.rand(size, generator=generator) + 0.5) * (-1.0) ** torch.arange(size)).to(flat)
        truths = torch.autograd.grad(
            (s[:, None] * r * flat).sum(), [leaves[n] for n in names], retain_graph=True, allow_unused=True
        )
        ds = torch.autograd.grad((r * flat).sum(), [use.output for use in uses], allow_unused=True) if uses else ()
    layouts: list[Layout | None] = [None] * len(uses)
    generic, silent = [], []
    for name, truth in zip(names, truths, strict=True):
        if truth is None or not truth.any():
            silent.append(name)
            continue
        mine = [i for i, use in enumerate(uses) if use.name == name and ds[i] is not None]
        chosen = _agreeing_layouts([uses[i] for i in mine], [ds[i] for i in mine], truth, s, size)
        if chosen is None:
            generic.append(name)
        for i, layout in zip(mine, chosen or [], strict=False):
            layouts[i] = layout
    seen = {id(use.output): use.output.numel() for use in uses}
    activations = max(sum(seen.values()), flat.numel()) // size
    return Plan(
        _kinds(uses), tuple(layouts), tuple(generic), tuple(silent), activations, flat.shape[1], output.shape[1:]
    )


def _kinds(uses: Sequence[Use]) -> tuple[tuple[str, type[Use]], ...]:
    return tuple((use.name, type(use)) for use in uses)


def _check_alone(call: Call, leaves: Mapping[str, Tensor], probe: Any, output: Tensor) -> None:
    """An example must give the same alone as among others: work is cut along the batch."""
    size = len(output)
    told = (
        "each example's output must depend on that example alone, but the model gives something else when one is run "
        "alone. Does it mix examples (batch norm without running statistics), or has an input as many rows as the batch "
        "without being one row an example? Pass that one through forward=lambda model, batch: ..."
    )
    try:
        with torch.no_grad():
            alone = call(leaves, examples(probe, size - 1, size))
    except (RuntimeError, ValueError, IndexError) as error:
        raise BayesAdamError(f"{told} ({error})") from error
    among = output[-1:].detach()
    # Outputs that are not finite are told of elsewhere.
    finite = torch.isfinite(among)
    if alone.shape != among.shape or not _agree(alone[finite], among[finite]):
        raise BayesAdamError(told)


def _agree(ours: Tensor, truth: Tensor) -> bool:
    """Equal but for rounding."""
    tolerance: float = min(0.2, 10 * torch.finfo(truth.dtype).eps ** 0.5)
    return _disagreement(ours, truth) <= tolerance


def _disagreement(ours: Tensor, truth: Tensor) -> float:
    wide = torch.promote_types(truth.dtype, torch.float32)
    scale = float(truth.to(wide).norm())
    found = float((ours.to(wide) - truth.to(wide)).norm())
    return found / scale if scale else found


def _agreeing_layouts(
    uses: Sequence[Use], ds: Sequence[Tensor], truth: Tensor, s: Tensor, size: int
) -> list[Layout] | None:
    wide = torch.promote_types(truth.dtype, torch.float32)
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
        if found <= min(4e-3, 10 * torch.finfo(truth.dtype).eps ** 0.5):
            return layout
        if torch.finfo(truth.dtype).bits == 16 and found < best[0]:
            # Rounding alone may come to this much; a wrong layout is still farther off.
            best = (found, layout)
    return best[1]


def _fitted(plan: Plan, uses: Sequence[Use], flat: Tensor, leaves: Mapping[str, Tensor]) -> Plan:
    """The plan for one chunk: weights that were silent before, or all where other layers are used, go the generic way."""
    same = _kinds(uses) == plan.uses
    unknown = plan.silent if same else tuple(leaves)
    live: tuple[str, ...] = ()
    if unknown and flat.requires_grad:
        r = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).to(flat)
        grads = torch.autograd.grad(
            (r * flat).sum(), [leaves[name] for name in unknown], retain_graph=True, allow_unused=True
        )
        live = tuple(name for name, g in zip(unknown, grads, strict=True) if g is not None and bool(g.any()))
    if same:
        return replace(plan, generic=plan.generic + live)
    return replace(plan, layouts=(None,) * len(uses), generic=live)


def recorded(call: Call, leaves: Mapping[str, Tensor], inputs: Any) -> tuple[list[Use], Tensor]:
    """The uses of the parameters in one forward pass, and its output."""
    with recording(call.model, {id(leaf): name for name, leaf in leaves.items()}) as uses:
        output = call(leaves, inputs)
    # What the model runs without gradients has none.
    return [use for use in uses if use.output.requires_grad], output


def _chunking(plan: Plan, size: int, element: int, covariance: bool, budget: int) -> tuple[int, int]:
    """Examples at a time and outputs at a time: about four copies of the activations, and two for each output."""
    at_once = plan.outputs if covariance else min(plan.outputs, _OUTPUTS_AT_ONCE)
    unit = plan.activations * element
    while True:
        per_chunk = budget // (unit * (4 + 2 * at_once))
        if per_chunk >= 1:
            return min(per_chunk, size), at_once
        if covariance or at_once == 1:
            needed = unit * (4 + 2 * at_once)
            cheaper = "variances alone (covariance=False)" if covariance else "method='linearised-sampled'"
            raise MemoryBudgetError(
                f"one example needs about {needed:,} bytes, the memory budget is {budget:,}: raise memory_budget, or use "
                f"{cheaper}, which needs less"
            )
        at_once = max(1, at_once // 2)


def _layerwise(
    call: Call,
    leaves: Mapping[str, Tensor],
    plan: Plan,
    spreads: Sequence[Spread],
    inputs: Any,
    at_once: int,
    covariance: bool,
) -> tuple[Plan, Tensor, Tensor, Tensor]:
    size = batch_size(inputs)
    with torch.enable_grad():
        uses, output = recorded(call, leaves, inputs)
        flat = output.reshape(size, -1)
    plan = _fitted(plan, uses, flat, leaves)
    like = torch.promote_types(flat.dtype, torch.float32)
    variance = torch.zeros(len(spreads), size, plan.outputs, dtype=like, device=flat.device)
    blocks = variance[0, :, :, None]
    if covariance:
        blocks = torch.zeros(size, plan.outputs, plan.outputs, dtype=like, device=flat.device)
    shares = _shares(uses, plan.layouts, spreads, size, covariance)
    active = sorted({index for share in shares for index in share.uses})
    for first, ds in _back_propagated(flat, [uses[i].output for i in active], at_once if active else 0):
        by_use = dict(zip(active, ds, strict=True))
        with torch.no_grad():
            for share in shares:
                mine = {i: by_use[i] for i in share.uses if by_use[i] is not None}
                if not mine:
                    continue
                part = share.of(mine)
                if covariance:
                    blocks += part
                else:
                    variance[:, :, first : first + part.shape[-1]] += part
    if covariance:
        variance[0] = blocks.diagonal(dim1=1, dim2=2)
    return plan, flat.detach(), variance, blocks


@dataclass(frozen=True, eq=False)
class _Share:
    """What some uses of layers contribute: a function of D at each of them, by the number of the use."""

    uses: tuple[int, ...]
    of: Callable[[Mapping[int, Tensor]], Tensor]


def _shares(
    uses: Sequence[Use], layouts: Sequence[Layout | None], spreads: Sequence[Spread], size: int, covariance: bool
) -> list[_Share]:
    """Uses of one parameter belong together, since their gradients add before they are squared."""
    groups: dict[tuple[str, int | None], list[int]] = {}
    for index, (use, layout) in enumerate(zip(uses, layouts, strict=True)):
        if layout is not None:
            groups.setdefault(use.key, []).append(index)
    alone = {indices[0] for indices in groups.values() if len(indices) == 1}
    biases = {id(uses[i].output): i for i in alone if isinstance(uses[i], SumUse)}
    shares: list[_Share] = []
    joined: set[int] = set()
    for index in alone:
        use, layout = uses[index], layouts[index]
        if isinstance(use, MatrixUse) and layout is not None and contract.one_position(use, layout, size):
            bias = biases.get(id(use.output))
            shares.append(_affine_share(use, index, None if bias is None else uses[bias], spreads, covariance))
            joined |= {index} if bias is None else {index, bias}
    for indices in groups.values():
        if indices[0] not in joined:
            shares.append(_general_share(uses, indices, layouts, spreads, size, covariance))
    return shares


def _affine_share(use: MatrixUse, index: int, bias: Use | None, spreads: Sequence[Spread], covariance: bool) -> _Share:
    scales = [
        contract.affine_scale(use, use.of(s(use.name)), None if bias is None else bias.of(s(bias.name)))
        for s in spreads
    ]

    def of(ds: Mapping[int, Tensor]) -> Tensor:
        d = ds[index].to(scales[0].dtype)
        if covariance:
            return contract.gram((d * scales[0].sqrt()).transpose(0, 1))
        squares = d.square()
        return torch.stack([(squares * t).sum(dim=-1).T for t in scales])

    return _Share((index,), of)


def _general_share(
    uses: Sequence[Use],
    indices: Sequence[int],
    layouts: Sequence[Layout | None],
    spreads: Sequence[Spread],
    size: int,
    covariance: bool,
) -> _Share:
    spread = [s(uses[indices[0]].name) for s in spreads]

    def of(ds: Mapping[int, Tensor]) -> Tensor:
        mine = [uses[i] for i in ds]
        ways = [layout for i in ds if (layout := layouts[i]) is not None]
        if covariance:
            return contract.covariance(mine, list(ds.values()), ways, size, spread[0])
        return contract.variances(mine, list(ds.values()), ways, size, spread)

    return _Share(tuple(indices), of)


def _back_propagated(flat: Tensor, outputs: list[Tensor], at_once: int) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """∂f_c/∂(layer outputs) for `at_once` outputs c at a time; examples are independent, so their sum separates them."""
    if not outputs:
        return
    size, total = flat.shape
    for first in range(0, total, at_once):
        count = min(at_once, total - first)
        basis = torch.zeros(count, size, total, dtype=flat.dtype, device=flat.device)
        basis[torch.arange(count), :, first + torch.arange(count)] = 1.0
        yield first, _batched_grad(flat, outputs, basis)


def _batched_grad(flat: Tensor, tensors: list[Tensor], basis: Tensor) -> Sequence[Tensor]:
    try:
        return torch.autograd.grad(flat, tensors, basis, retain_graph=True, allow_unused=True, is_grads_batched=True)
    except RuntimeError:
        # Some operation cannot be batched: one output after the other.
        rows = [torch.autograd.grad(flat, tensors, row, retain_graph=True, allow_unused=True) for row in basis]
        return [
            torch.stack([row[i] for row in rows]) if rows[0][i] is not None else None  # type: ignore[misc]
            for i in range(len(tensors))
        ]


def _generic(
    call: Call,
    leaves: Mapping[str, Tensor],
    plan: Plan,
    spreads: Sequence[Spread],
    inputs: Any,
    covariance: bool,
    budget: int,
) -> tuple[Tensor | float, Tensor | float]:
    """The share of parameters that no layer explains: their gradients example by example, a few at a time."""
    if not plan.generic:
        return 0.0, 0.0
    size = batch_size(inputs)
    mine = {name: leaves[name].detach() for name in plan.generic}
    others = {name: leaf.detach() for name, leaf in leaves.items() if name not in mine}
    entries = sum(tensor.numel() for tensor in mine.values()) * plan.outputs
    needed = entries * next(iter(mine.values())).element_size()
    if needed > budget:
        raise MemoryBudgetError(
            f"the gradients of {len(mine)} parameters that no known layer explains (first {plan.generic[0]!r}) need "
            f"{needed:,} bytes an example, the memory budget is {budget:,}: raise memory_budget, or use "
            "method='linearised-sampled', which needs less"
        )
    variance, blocks = [], []
    chunk = max(1, budget // (4 * needed))
    for start in range(0, size, chunk):
        jacobians = _jacobians(call, mine, others, examples(inputs, start, start + chunk))
        rows = {name: j.flatten(2).to(torch.promote_types(j.dtype, torch.float32)) for name, j in jacobians.items()}
        variance.append(
            torch.stack([sum_of([row.square() @ s(name).flatten() for name, row in rows.items()]) for s in spreads])
        )
        if covariance:
            scaled = [row * spreads[0](name).flatten().sqrt() for name, row in rows.items()]
            blocks.append(sum_of([contract.gram(row) for row in scaled]))
    joined = torch.cat(variance, dim=1)
    return joined, torch.cat(blocks) if covariance else joined[0, :, :, None]


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Their sum."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _jacobians(call: Call, mine: dict[str, Tensor], others: dict[str, Tensor], inputs: Any) -> dict[str, Tensor]:
    """∂f/∂w of some parameters, (b, c, *shape): vectorised where the model allows it, else example by example."""
    size = batch_size(inputs)

    leaves, spec = pytree.tree_flatten(inputs)
    batched = [is_batched(leaf, size) for leaf in leaves]

    def single(params: dict[str, Tensor], *varying: Tensor) -> Tensor:
        given = iter(varying)
        parts = [next(given).unsqueeze(0) if b else leaf for b, leaf in zip(batched, leaves, strict=True)]
        return call.flat({**others, **params}, pytree.tree_unflatten(parts, spec))[0]

    varying = [leaf for leaf, b in zip(leaves, batched, strict=True) if b]
    try:
        result: dict[str, Tensor] = vmap(jacrev(single), in_dims=(None, *[0] * len(varying)))(mine, *varying)
        if _confirmed(call, mine, others, inputs, result):
            return result
    except RuntimeError:
        pass
    loop = [one_jacobian(call, mine, others, examples(inputs, i, i + 1)) for i in range(size)]
    return {name: torch.stack([row[name] for row in loop]) for name in mine}


def _confirmed(
    call: Call, mine: dict[str, Tensor], others: dict[str, Tensor], inputs: Any, jacobians: Mapping[str, Tensor]
) -> bool:
    """Whether autograd agrees along one direction: torch's vmap of a vmap gets some operations wrong (PReLU)."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in mine.items()}
    with torch.enable_grad():
        flat = call.flat({**others, **leaves}, inputs)
        if not flat.requires_grad:
            return not any(bool(jacobian.any()) for jacobian in jacobians.values())
        r = torch.randn(flat.shape, generator=torch.Generator().manual_seed(1)).to(flat)
        truths = torch.autograd.grad((r * flat).sum(), list(leaves.values()), allow_unused=True)
    for (name, jacobian), truth in zip(((n, jacobians[n]) for n in mine), truths, strict=True):
        ours = torch.tensordot(r, jacobian, dims=2)
        if not _agree(ours, torch.zeros_like(leaves[name]) if truth is None else truth):
            return False
    return True


def one_jacobian(call: Call, mine: dict[str, Tensor], others: dict[str, Tensor], example: Any) -> dict[str, Tensor]:
    """∂f/∂w of one example, (c, *shape), by plain reverse passes."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in mine.items()}
    with torch.enable_grad():
        flat = call.flat({**others, **leaves}, example)
    basis = torch.eye(flat.shape[1], dtype=flat.dtype, device=flat.device).unsqueeze(1)
    # This example may not reach any of them.
    grads = _batched_grad(flat, list(leaves.values()), basis) if flat.requires_grad else [None] * len(leaves)
    return {
        name: torch.zeros(flat.shape[1], *leaf.shape, dtype=leaf.dtype, device=leaf.device) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
