"""Exact variances of the linearised network, f(x; μ) + J (θ − μ), under a diagonal posterior: diag or all of J Σ Jᵀ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils import _pytree as pytree

from bayesadam.errors import BayesAdamError
from bayesadam.predict import contract
from bayesadam.predict.call import Call, batch_size, examples, is_batched, repeated
from bayesadam.predict.layers import Layout, Use
from bayesadam.predict.recording import recording

DEFAULT_BUDGET = 1 << 30
Spread = Callable[[str], Tensor]
_OUTPUTS_AT_ONCE = 64


class MemoryBudgetError(BayesAdamError):
    """One example does not fit the memory budget."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How the parameters of a model are handled, found out on a few examples.

    Attributes:
        layouts: for every use of a layer, in order, how the examples lie in its tensors; None leaves the use out.
        generic: parameters whose gradients go through autograd, example by example.
        activations: entries of activations an example.
        outputs: C, the outputs of the network.
        shape: the shape of one example's output.
    """

    layouts: tuple[Layout | None, ...]
    generic: tuple[str, ...]
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
    plan = make_plan(call, leaves, inputs)
    size = batch_size(inputs)
    per_chunk, at_once = _chunking(plan, size, next(iter(leaves.values())).element_size(), covariance, budget)
    means, parts, blocks = [], [], []
    for start in range(0, size, per_chunk):
        chunk = examples(inputs, start, start + per_chunk)
        mean, variance, block = _layerwise(call, leaves, plan, spreads, chunk, at_once, covariance)
        generic = _generic(call, leaves, plan, spreads, chunk, covariance, budget)
        means.append(mean)
        parts.append(variance + generic[0])
        blocks.append(block + generic[1])
    variance = torch.cat(parts, dim=1)
    return Moments(torch.cat(means), variance, torch.cat(blocks) if covariance else None, plan.shape)


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
        flat = output.reshape(size, -1)
        generator = torch.Generator().manual_seed(0)
        r = torch.randn(flat.shape, generator=generator).to(flat)
        s = (torch.rand(size, generator=generator) + torch.arange(size)).to(flat)
        names = list(leaves)
        truths = torch.autograd.grad(
            (s[:, None] * r * flat).sum(), [leaves[n] for n in names], retain_graph=True, allow_unused=True
        )
        ds = torch.autograd.grad((r * flat).sum(), [use.output for use in uses], allow_unused=True) if uses else ()
    layouts: list[Layout | None] = [None] * len(uses)
    generic = []
    for name, truth in zip(names, truths, strict=True):
        if truth is None:
            continue
        mine = [i for i, use in enumerate(uses) if use.name == name and ds[i] is not None]
        chosen = _agreeing_layouts([uses[i] for i in mine], [ds[i] for i in mine], truth, s, size)
        if chosen is None:
            generic.append(name)
        for i, layout in zip(mine, chosen or [], strict=False):
            layouts[i] = layout
    seen = {id(use.output): use.output.numel() for use in uses}
    activations = max(sum(seen.values()), flat.numel()) // size
    return Plan(tuple(layouts), tuple(generic), activations, flat.shape[1], output.shape[1:])


def _agreeing_layouts(
    uses: Sequence[Use], ds: Sequence[Tensor], truth: Tensor, s: Tensor, size: int
) -> list[Layout] | None:
    wide = torch.promote_types(truth.dtype, torch.float32)
    tolerance = 10 * torch.finfo(truth.dtype).eps ** 0.5
    for attempt in range(max((len(use.layouts) for use in uses), default=0)):
        layout = [use.layouts[min(attempt, len(use.layouts) - 1)] for use in uses]
        ours = torch.zeros_like(truth, dtype=wide)
        try:
            for use, d, lay in zip(uses, ds, layout, strict=True):
                part = contract.total_gradient([use], [d[None]], [lay], size, s.to(wide), ours)
                use.of(ours).add_(part)
        except (RuntimeError, IndexError):
            continue
        if float((ours - truth).norm()) <= tolerance * float(truth.norm()):
            return layout
    return None


def recorded(call: Call, leaves: Mapping[str, Tensor], inputs: Any) -> tuple[list[Use], Tensor]:
    """The uses of the parameters in one forward pass, and its output."""
    with recording(call.model, {id(leaf): name for name, leaf in leaves.items()}) as uses:
        output = call(leaves, inputs)
    return uses, output


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
) -> tuple[Tensor, Tensor, Tensor]:
    size = batch_size(inputs)
    with torch.enable_grad():
        uses, output = recorded(call, leaves, inputs)
        flat = output.reshape(size, -1)
    groups: dict[tuple[str, int | None], list[int]] = {}
    for index, (use, layout) in enumerate(zip(uses, plan.layouts, strict=True)):
        if layout is not None:
            groups.setdefault(use.key, []).append(index)
    like = torch.promote_types(flat.dtype, torch.float32)
    variance = torch.zeros(len(spreads), size, plan.outputs, dtype=like, device=flat.device)
    blocks = (
        torch.zeros(size, plan.outputs, plan.outputs, dtype=like, device=flat.device)
        if covariance
        else variance[0, :, :, None]
    )
    active = sorted(index for indices in groups.values() for index in indices)
    for first, ds in _back_propagated(flat, [uses[i].output for i in active], at_once if active else 0):
        by_use = dict(zip(active, ds, strict=True))
        width = next(d.shape[0] for d in ds if d is not None)
        for indices in groups.values():
            mine = [i for i in indices if by_use[i] is not None]
            if not mine:
                continue
            arguments = (
                [uses[i] for i in mine],
                [by_use[i] for i in mine],
                [layout for i in mine if (layout := plan.layouts[i]) is not None],
                size,
            )
            spread = [s(uses[mine[0]].name) for s in spreads]
            with torch.no_grad():
                if covariance:
                    blocks += contract.covariance(*arguments, spread[0])
                else:
                    variance[:, :, first : first + width] += contract.variances(*arguments, spread)
    if covariance:
        variance[0] = blocks.diagonal(dim1=1, dim2=2)
    return flat.detach(), variance, blocks


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
        return result
    except RuntimeError:
        loop = [_one_jacobian(call, mine, others, examples(inputs, i, i + 1)) for i in range(size)]
        return {name: torch.stack([row[name] for row in loop]) for name in mine}


def _one_jacobian(call: Call, mine: dict[str, Tensor], others: dict[str, Tensor], example: Any) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in mine.items()}
    with torch.enable_grad():
        flat = call.flat({**others, **leaves}, example)
    basis = torch.eye(flat.shape[1], dtype=flat.dtype, device=flat.device).unsqueeze(1)
    grads = _batched_grad(flat, list(leaves.values()), basis)
    return {
        name: torch.zeros(flat.shape[1], *leaf.shape, dtype=leaf.dtype, device=leaf.device) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
