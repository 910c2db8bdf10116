"""Exact moments of the linearised network, f(x; μ) + J (θ − μ), under Gaussians over its weights: U J Σ Jᵀ Uᵀ.

U is the identity for all outputs, ten rows of it for ten outputs, and any row for a linear combination: see `Rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.func import jacrev, vmap
from torch.utils import _pytree as pytree

from bayesadam._alone import alone_with
from bayesadam.errors import MemoryBudgetError
from bayesadam.gaussian.structure import Directions, Named
from bayesadam.predict.call import Call, batch_size, examples, in_tf32, is_batched, output_tensor
from bayesadam.predict.layers import ConvolutionUse, Layout, MatrixUse, SumUse, Use, contracted, gram, squared
from bayesadam.predict.options import DEFAULT_BUDGET, Basis, Rows
from bayesadam.predict.plan import Plan, agree, dense, fitted, plan_for, recorded, weakly
from bayesadam.readers.rotated import Rotation

# A parameter's name → its variances S.
VarianceOf = Callable[[str], Tensor]
_OUTPUTS_AT_ONCE = 64
# Activations of all examples that keep a GPU busy.
_BUSY = 1 << 24


@dataclass(frozen=True, eq=False)
class Moments:
    """f(x; μ), (b, ...), and for each of k Σ the variances, (k, b, ...), and covariances, (k, b, c, c).

    Of d rows over the outputs these are (k, b, d) and (k, b, d, d); `indices`, (b, ·), are those of the outputs chosen.
    `replayed` says whether they came out of a captured CUDA graph.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    indices: Tensor
    replayed: bool = False


@dataclass(frozen=True, eq=False)
class _Task:
    """What is computed, whatever the inputs; the fields are the arguments of `moments`."""

    call: Call
    params: Named
    variances: Sequence[VarianceOf]
    rows: Rows | None
    covariance: bool
    budget: int
    bases: Mapping[str, Rotation]
    directions: Sequence[Directions | None]


def parameters_at_mean(gaussian: Any) -> dict[str, Tensor]:
    """μ of a posterior in the types and on the devices of its model's parameters."""
    with alone_with(gaussian.model):
        own = gaussian.parameters()
        return {name: mu.to(own[name]) for name, mu in gaussian.mean.items()}


def moments(
    call: Call,
    params: Mapping[str, Tensor],
    variances: Sequence[VarianceOf],
    inputs: Any,
    *,
    rows: Rows | None = None,
    given: Mapping[str, Tensor] | None = None,
    covariance: bool = False,
    budget: int = DEFAULT_BUDGET,
    bases: Mapping[str, Rotation] | None = None,
    directions: Sequence[Directions | None] = (),
    plan: Plan | None = None,
    captured: bool = False,
) -> Moments:
    """Mean and U J Σ Jᵀ Uᵀ for several Σ of one mean, in one pass over the inputs, in parts that fit the budget.

    Per layer the contraction is in closed form, the layer's factors are dropped at once, and no (batch, outputs,
    parameters) tensor exists. Which layers can be handled so is determined by comparing with autograd on the first
    examples; other parameters take the generic path, by autograd example by example, with the same numbers.

    Args:
        params: μ, in the types of the model's parameters.
        variances: for each Σ a function from a parameter's name to its variances S.
        rows: U; None for the identity.
        given: the tensors of `rows` for this batch.
        covariance: the whole (d, d) blocks too.
        budget: bytes for activations and back-propagated outputs.
        bases: the coordinates in which the variances are, of the parameters whose own they are not.
        directions: for each Σ the directions over all weights together in which it is narrower than S, of low-rank
            structures: they need the rows of the Jacobian, a few examples at a time.
        plan: that of `plan_for` on these inputs, where it is at hand.
        captured: whether work that comes again with the same shapes on CUDA may be captured and replayed.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    own = directions or [None] * len(variances)
    task = _Task(call, leaves, variances, rows, covariance, budget, bases or {}, own)
    plan = plan_for(call, params, inputs) if plan is None else plan
    batch, size = (inputs, given or {}), batch_size(inputs)
    if any(each is not None for each in own):
        found, replayed = [_projected(task, batch)], False
    else:
        at_a_time, at_once = _chunking(task, plan, size)
        work = partial(_chunk, task, plan, at_once)
        whole = _replay(task, plan, at_once, work, batch) if captured and at_a_time >= size else None
        found, replayed = [whole] if whole else [], whole is not None
        for start in range(0, 0 if replayed else size, at_a_time):
            cut = slice(start, start + at_a_time)
            found.append(work((examples(inputs, cut.start, cut.stop), {name: t[cut] for name, t in batch[1].items()})))
    mean, variance, block, indices = (
        torch.cat(parts, dim=d) for parts, d in zip(zip(*found, strict=True), (0, 1, 1, 0), strict=True)
    )
    shape = (size, *plan.shape)
    if rows is None:
        variance = variance.reshape(-1, *shape)
    return Moments(mean.reshape(shape).to(variance.dtype), variance, block if covariance else None, indices, replayed)


# Mean, variances, blocks, which are empty where they are not asked for, and indices of some examples.
_Found = tuple[Tensor, Tensor, Tensor, Tensor]
_Batch = tuple[Any, Mapping[str, Tensor]]


def _chunking(task: _Task, plan: Plan, size: int) -> tuple[int, int]:
    """Examples at a time and rows at a time: about four copies of the activations, and two for each row.

    A GPU that one row of all examples keeps busy takes one at a time, for less memory.
    """
    rows = plan.outputs if task.rows is None else task.rows.count
    like = next(iter(task.params.values()))
    most = max(1, _BUSY // (plan.activations * size)) if like.is_cuda else _OUTPUTS_AT_ONCE
    at_once = max(1, rows if task.covariance else min(rows, most))
    while True:
        needed = plan.activations * like.element_size() * (4 + 2 * at_once if at_once > 1 else 3)
        if needed <= task.budget:
            return min(task.budget // needed, size), at_once
        if task.covariance or at_once == 1:
            cheaper = "variances alone (covariance=False)" if task.covariance else "predictive='linearised-sampled'"
            raise MemoryBudgetError(
                f"one example needs about {needed:,} bytes, the memory budget is {task.budget:,}: raise memory_budget, "
                f"or use {cheaper}, which needs less"
            )
        at_once = max(1, at_once // 2)


def _replay(task: _Task, plan: Plan, at_once: int, work: Callable[[_Batch], _Found], batch: _Batch) -> _Found | None:
    """All examples out of a captured graph; None without one, or where the first example contradicts it."""
    like, first = next(iter(task.params.values())), plan.first
    if not like.is_cuda or first is None or plan.generic or plan.silent:
        return None
    from bayesadam.predict import _cuda

    fixed = [*task.params.values(), *task.call.model.buffers()]
    fixed += [variance(name) for variance in task.variances for name in task.params]
    fixed += [side for base in task.bases.values() for side in (base.left, base.right) if side is not None]
    if task.rows is not None and task.rows.noise_variance is not None:
        fixed.append(task.rows.noise_variance)
    model, key = task.call.model, (weakly(task.call.forward), task.call.at, plan.uses, plan.layouts, task.rows, at_once)
    found: _Found | None = _cuda.replayed(
        model,
        (*key, task.covariance, len(task.variances)),
        work,
        batch,
        fixed=fixed,
        holds=lambda found: agree(found[0][:1], first.reshape(1, -1).to(found[0].dtype)),
    )
    return found


def _chunk(task: _Task, plan: Plan, at_once: int, batch: _Batch) -> _Found:
    """Of some examples, layer by layer."""
    inputs, given = batch
    with torch.enable_grad():
        uses, output = recorded(task.call, task.params, inputs, plan.repeated)
        flat = output.reshape(batch_size(inputs), -1)
    plan = fitted(plan, uses, flat, task.params)
    uses, plan = _rotated(uses, plan, task.bases)
    mean = flat.detach()
    # A forward pass may be one of 16 bits; sums are not.
    with torch.autocast(mean.device.type, enabled=False):
        basis = _basis(task, mean, given)
        variance, blocks = _by_layers(task, plan, uses, output, basis, at_once)
    if plan.generic:
        names = plan.generic
        why = f"{len(names)} parameters that no known layer explains (first {names[0]!r}) need their gradients"
        more = _by_autograd(task, names, inputs, basis, why)
        variance, blocks = variance + more[0], blocks + more[1]
    return mean, variance, blocks, basis.indices if task.rows is not None else basis.indices[:, :0]


def _basis(task: _Task, outputs: Tensor, given: Mapping[str, Tensor]) -> Basis:
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return Basis.every(wide) if task.rows is None else task.rows(wide, given)


def _projected(task: _Task, batch: _Batch) -> _Found:
    """By the Jacobian's rows, where Σ is narrower along directions over all weights."""
    inputs, given = batch
    with torch.no_grad():
        mean = task.call.flat(task.params, inputs)
    basis = _basis(task, mean, given)
    why = "a low-rank posterior needs the gradients of every output"
    return mean, *_by_autograd(task, tuple(task.params), inputs, basis, why), basis.indices


# --- layer by layer -------------------------------------------------------------------------------------------------


def _by_layers(
    task: _Task, plan: Plan, uses: Sequence[Use], output: Tensor, basis: Basis, at_once: int
) -> tuple[Tensor, Tensor]:
    """Variances (k, b, d) and blocks (k, b, d, d) of u · f, the sum of every explained parameter's share."""
    covariance, size, flat = task.covariance, len(output), output.reshape(len(output), -1)
    variance = basis.dense.new_zeros(len(task.variances), size, len(basis))
    blocks = variance.new_zeros(*variance.shape, len(basis) if covariance else 0)
    layouts = dict(enumerate(plan.layouts))
    head, weight = _head(uses, plan.layouts, output), None
    if head is not None:
        # ∂f/∂a = W: the last layer is not back-propagated through, and D is not held there.
        weight = head.of(task.params[head.name].detach()).to(head.input.dtype)
        bias = next((use for use in uses if use.at == head.at and use is not head), None)
        scales = [_affine_scale(head, bias, s) for s in task.variances]
        (blocks if covariance else variance).add_(torch.stack([basis.weighted(t, covariance) for t in scales]))
        layouts = {i: None if use.at == head.at else layouts[i] for i, use in enumerate(uses)}
    # Uses of one parameter belong together, since their gradients add before they are squared.
    groups: dict[tuple[str, int | None], list[int]] = {}
    for i, use in enumerate(uses):
        if layouts[i] is not None:
            groups.setdefault((use.name, None if use.rows is None else use.rows.start), []).append(i)
    # The variance t of z = a Wᵀ + b of one position is found once for all rows.
    alone = {group[0]: key for key, group in groups.items() if len(group) == 1}
    biases = {uses[i].at: i for i in alone if _is_bias(uses[i])}
    known: dict[int, list[Tensor]] = {}
    for i in alone:
        use, layout = uses[i], layouts[i]
        if isinstance(use, MatrixUse) and layout is not None and use.has_one_position(layout, size):
            j = biases.get(use.at)
            known[i] = [_affine_scale(use, None if j is None else uses[j], s) for s in task.variances]
            if j is not None:
                del groups[alone[j]]
    active = [i for group in groups.values() for i in group]
    for first in range(0, len(basis) if active else 0, at_once):
        part = basis.part(first, first + at_once)
        source = flat if head is None else head.input
        cotangents = part.vectors().to(flat.dtype) if weight is None else part.times(weight)
        total = blocks if covariance else variance[:, :, first : first + len(part)]
        with in_tf32(flat):
            # Examples are independent, so that D of their sum separates them.
            ds = dict(zip(active, batched_grad(source, [uses[i].edge for i in active], cotangents), strict=True))
            with torch.no_grad():
                for (name, _), group in groups.items():
                    own = [(uses[i], d, layout) for i in group if (d := ds[i]) is not None and (layout := layouts[i])]
                    if own and group[0] in known:
                        total += torch.stack([squared(own[0][1] * t.sqrt(), covariance) for t in known[group[0]]])
                    elif own:
                        total += contracted(own, size, [s(name) for s in task.variances], covariance)
    return blocks.diagonal(dim1=2, dim2=3).clone() if covariance else variance, blocks


def _is_bias(use: Use) -> bool:
    return isinstance(use, SumUse) and use.rotation is None


def _affine_scale(use: MatrixUse, bias: Use | None, variance: VarianceOf) -> Tensor:
    """t = a² Sᵀ + s, (b, out): the variance of z = a Wᵀ + b."""
    own = use.of(variance(use.name))
    t = use.input.detach().to(own.dtype).square() @ own.mT
    return t if bias is None else t + bias.of(variance(bias.name))


def _head(uses: Sequence[Use], layouts: Sequence[Layout | None], output: Tensor) -> MatrixUse | None:
    """The linear layer z = a Wᵀ + b whose output is the network's, if its weights are used nowhere else."""
    handed_on = output.grad_fn
    if handed_on is None or handed_on.name() != "CloneBackward0":
        return None
    made_by = handed_on.next_functions[0][0]
    for use, layout in zip(uses, layouts, strict=True):
        if (
            isinstance(use, MatrixUse)
            and layout is not None
            and use.has_one_position(layout, len(output))
            and use.input.requires_grad
            # The output is this layer's, as the recording handed it on, and its input was left as it was.
            and use.edge.node is made_by
            and any(before is use.input.grad_fn for before, _ in made_by.next_functions)
        ):
            own = [(u, lay) for u, lay in zip(uses, layouts, strict=True) if u.at == use.at]
            names = {u.name for u, _ in own}
            elsewhere = any(u.name in names and u.at != use.at for u in uses)
            plain = all(lay is not None and (u is use or _is_bias(u)) for u, lay in own)
            return use if plain and not elsewhere else None
    return None


def _rotated(uses: Sequence[Use], plan: Plan, bases: Mapping[str, Rotation]) -> tuple[list[Use], Plan]:
    """Uses in the coordinates of the bases; parameters used in ways that have no such form go the generic way."""
    if not bases:
        return list(uses), plan

    def can_be(use: Use) -> bool:
        known = isinstance(use, MatrixUse | SumUse) or (isinstance(use, ConvolutionUse) and use.module.groups == 1)
        return known and use.rows is None

    odd = {use.name for use in uses if use.name in bases and not can_be(use)}
    explained = {use.name for use, layout in zip(uses, plan.layouts, strict=True) if layout is not None}
    turned = [use if use.name in odd else replace(use, rotation=bases.get(use.name)) for use in uses]
    layouts = tuple(None if use.name in odd else layout for use, layout in zip(uses, plan.layouts, strict=True))
    added = tuple(sorted((odd & explained) - set(plan.generic)))
    return turned, replace(plan, layouts=layouts, generic=plan.generic + added)


def batched_grad(
    flat: Tensor, tensors: Sequence[Tensor] | Sequence[GradientEdge], basis: Tensor
) -> Sequence[Tensor | None]:
    """Vector-Jacobian products for every row of a basis, (rows, *shape) for each tensor; None without a path."""

    def one(row: Tensor) -> Sequence[Tensor | None]:
        return torch.autograd.grad(flat, tensors, row, retain_graph=True, allow_unused=True)

    if len(basis) == 1:
        return [None if grad is None else dense(grad).unsqueeze(0) for grad in one(basis[0])]
    reached: list[int] = []

    def present(row: Tensor) -> tuple[Tensor, ...]:
        found = one(row)
        reached[:] = [index for index, grad in enumerate(found) if grad is not None]
        return tuple(grad for grad in found if grad is not None)

    try:
        rows = vmap(present)(basis)
    except RuntimeError:
        # Some operation cannot be batched: one row after the other.
        each = [one(row) for row in basis]
        reached[:] = [index for index, grad in enumerate(each[0]) if grad is not None]
        rows = tuple(torch.stack([dense(found[i]) for found in each]) for i in reached)  # type: ignore[arg-type]
    by_index = dict(zip(reached, rows, strict=True))
    return [by_index.get(index) for index in range(len(tensors))]


# --- by autograd, example by example --------------------------------------------------------------------------------


def _by_autograd(task: _Task, names: Sequence[str], inputs: Any, basis: Basis, why: str) -> tuple[Tensor, Tensor]:
    """The share of some parameters by their Jacobians, of as many examples at a time as the budget holds.

    With Σ = S^½ (I − Q diag(1 − κ) Qᵀ) S^½, H = J S^½ and A = H Q it is (H − A Qᵀ)(H − A Qᵀ)ᵀ + A diag(κ) Aᵀ, two
    squares: where the data have determined nearly all of H, the difference of H Hᵀ and A Aᵀ would be lost in rounding.
    """
    mine = {name: task.params[name].detach() for name in names}
    others = {name: tensor.detach() for name, tensor in task.params.items() if name not in mine}
    call, batch = task.call, inputs
    if task.rows is not None:
        call, batch = _along(task.call), (inputs, basis.indices, basis.dense.transpose(0, 1))
    needed = len(basis) * sum(tensor.numel() * tensor.element_size() for tensor in mine.values())
    if needed > task.budget:
        raise MemoryBudgetError(
            f"{why}, {needed:,} bytes per example, and the memory budget is {task.budget:,}: raise memory_budget, or "
            "use predictive='linearised-sampled', which needs less"
        )
    chunk, variance, blocks = max(1, task.budget // max(1, 4 * needed)), [], []
    with torch.no_grad():
        for start in range(0, batch_size(inputs), chunk):
            found = jacobians(call, mine, others, examples(batch, start, start + chunk))
            wide = {name: j.to(torch.promote_types(j.dtype, torch.float32)) for name, j in found.items()}
            for name in wide.keys() & task.bases.keys():
                wide[name] = task.bases[name].to(None, wide[name].dtype).into(wide[name], mine[name].dim())
            pairs = zip(task.variances, task.directions, strict=True)
            parts = [_white_parts(wide, s, directions) for s, directions in pairs]
            squares = ([rows.square().sum(dim=-1) for rows in part] for part in parts)
            variance.append(torch.stack([reduce(torch.add, each) for each in squares]))
            if task.covariance:
                grams = ([gram(rows) for rows in part] for part in parts)
                blocks.append(torch.stack([reduce(torch.add, each) for each in grams]))
    total = torch.cat(variance, dim=1)
    return total, torch.cat(blocks, dim=1) if blocks else total.new_zeros(*total.shape, 0)


def _along(call: Call) -> Call:
    """The call of u · f, (b, d), for inputs, the indices of unit vectors and other rows u, (b, m, c)."""

    def forward(model: nn.Module, given: Any) -> Tensor:
        inputs, indices, u = given
        outputs = output_tensor(replace(call, model=model).run(inputs))
        flat = outputs.reshape(len(outputs), -1)
        return torch.cat([flat.gather(1, indices), torch.einsum("bmc,bc->bm", u.to(flat), flat)], dim=1)

    return Call(call.model, forward)


def _white_parts(rows: Named, variance: VarianceOf, directions: Directions | None) -> list[Tensor]:
    """(b, c, ·) whose squares add up to the variances: H − A Qᵀ parameter by parameter, and A κ^½."""
    white = {name: row * variance(name).sqrt().to(row) for name, row in rows.items()}
    if directions is None:
        return [row.unsqueeze(-1).flatten(2) for row in white.values()]
    inside = directions.coordinates(white)
    outside = directions.scaled(white, torch.zeros_like(directions.variance))
    return [*(row.unsqueeze(-1).flatten(2) for row in outside.values()), inside * directions.variance.sqrt().to(inside)]


def jacobians(call: Call, mine: dict[str, Tensor], others: dict[str, Tensor], inputs: Any) -> dict[str, Tensor]:
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


def _confirmed(call: Call, mine: Named, others: Named, inputs: Any, found: Named) -> bool:
    """Whether autograd agrees along one direction: torch's vmap of a vmap gets some operations wrong (PReLU)."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in mine.items()}
    with torch.enable_grad():
        flat = call.flat({**others, **leaves}, inputs)
        if not flat.requires_grad:
            return not any(bool(jacobian.any()) for jacobian in found.values())
        r = torch.randn(flat.shape, generator=torch.Generator().manual_seed(1)).to(flat)
        truths = torch.autograd.grad((r * flat).sum(), list(leaves.values()), allow_unused=True)
    return all(
        agree(torch.tensordot(r, found[name], dims=2), torch.zeros_like(leaf) if truth is None else dense(truth))
        for (name, leaf), truth in zip(leaves.items(), truths, strict=True)
    )


def one_jacobian(call: Call, mine: dict[str, Tensor], others: dict[str, Tensor], example: Any) -> dict[str, Tensor]:
    """∂f/∂w of one example, (c, *shape), by plain reverse passes."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in mine.items()}
    with torch.enable_grad():
        flat = call.flat({**others, **leaves}, example)
    basis = torch.eye(flat.shape[1], dtype=flat.dtype, device=flat.device).unsqueeze(1)
    # This example may not reach any of them.
    grads = batched_grad(flat, list(leaves.values()), basis) if flat.requires_grad else [None] * len(leaves)
    return {
        name: torch.zeros(flat.shape[1], *leaf.shape, dtype=leaf.dtype, device=leaf.device) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
