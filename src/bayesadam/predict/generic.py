"""Gradients by autograd, example by example, at a higher price: of parameters that no layer explains, and of all of them
where Σ is narrower along a few directions over all weights together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import jacrev, vmap
from torch.utils import _pytree as pytree

from bayesadam.errors import MemoryBudgetError
from bayesadam.gaussian.structure import Directions, Named
from bayesadam.predict import contract
from bayesadam.predict.call import Call, batch_size, examples, is_batched
from bayesadam.predict.plan import Plan, agree, dense
from bayesadam.readers import Rotation

VarianceOf = Callable[[str], Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """What is asked of the linearised network, whatever the inputs; the fields are the arguments of `linearised.moments`."""

    call: Call
    params: Named
    variances: Sequence[VarianceOf]
    covariance: bool
    budget: int
    bases: Mapping[str, Rotation]
    captured: bool = False


def generic_moments(task: Task, plan: Plan, inputs: Any) -> tuple[Tensor | float, Tensor | float]:
    """The share of parameters that no layer explains: their gradients example by example, a few at a time."""
    if not plan.generic:
        return 0.0, 0.0
    mine = {name: task.params[name].detach() for name in plan.generic}
    others = {name: tensor.detach() for name, tensor in task.params.items() if name not in mine}
    why = f"{len(mine)} parameters that no known layer explains (first {plan.generic[0]!r}) need their gradients"
    variance, blocks = [], []
    for wide in _jacobians_in_chunks(task, mine, others, inputs, plan.outputs, why):
        for name in wide.keys() & task.bases.keys():
            wide[name] = task.bases[name].to(None, wide[name].dtype).into(wide[name], mine[name].dim())
        rows = {name: j.unsqueeze(-1).flatten(2) for name, j in wide.items()}
        each = ([row.square() @ s(name).flatten().to(row) for name, row in rows.items()] for s in task.variances)
        variance.append(torch.stack([reduce(torch.add, shares) for shares in each]))
        if task.covariance:
            grams = ([contract.gram(r * s(n).flatten().sqrt().to(r)) for n, r in rows.items()] for s in task.variances)
            blocks.append(torch.stack([reduce(torch.add, shares) for shares in grams]))
    return torch.cat(variance, dim=1), torch.cat(blocks, dim=1) if task.covariance else 0.0


def projected_moments(
    task: Task, directions: Sequence[Directions | None], inputs: Any, outputs: int
) -> tuple[Tensor, Tensor | None]:
    """Variances (k, b, c) for each Σ = S^½ (I − Q diag(1 − κ) Qᵀ) S^½, and the blocks (k, b, c, c) where they are asked for.

    With H = J S^½ and A = H Q it is  (H − A Qᵀ)(H − A Qᵀ)ᵀ + A diag(κ) Aᵀ,  two squares: where the data have determined
    nearly all of H the difference of H Hᵀ and A Aᵀ would be lost in rounding.
    """
    variance, blocks = [], []
    why = "a low-rank posterior needs the gradients of every output"
    for wide in _jacobians_in_chunks(task, dict(task.params), {}, inputs, outputs, why):
        parts = [_parts(wide, s, each) for s, each in zip(task.variances, directions, strict=True)]
        squares = ([rows.square().sum(dim=-1) for rows in part] for part in parts)
        variance.append(torch.stack([reduce(torch.add, each) for each in squares]))
        if task.covariance:
            grams = ([contract.gram(rows) for rows in part] for part in parts)
            blocks.append(torch.stack([reduce(torch.add, each) for each in grams]))
    return torch.cat(variance, dim=1), torch.cat(blocks, dim=1) if task.covariance else None


def _parts(rows: Named, variance: VarianceOf, directions: Directions | None) -> list[Tensor]:
    """(b, c, ·) whose squares add up to the variances: H − A Qᵀ parameter by parameter, and A κ^½."""
    white = {name: row * variance(name).sqrt().to(row) for name, row in rows.items()}
    if directions is None:
        return [row.unsqueeze(-1).flatten(2) for row in white.values()]
    inside = directions.coordinates(white)
    outside = directions.scaled(white, torch.zeros_like(directions.variance))
    return [*(row.unsqueeze(-1).flatten(2) for row in outside.values()), inside * directions.variance.sqrt().to(inside)]


def _jacobians_in_chunks(
    task: Task, mine: dict[str, Tensor], others: dict[str, Tensor], inputs: Any, outputs: int, why: str
) -> Iterator[dict[str, Tensor]]:
    """`jacobians` in float32 or wider, of as many examples at a time as the budget holds."""
    needed = outputs * sum(tensor.numel() * tensor.element_size() for tensor in mine.values())
    budget = task.budget
    if needed > budget:
        raise MemoryBudgetError(
            f"{why}, {needed:,} bytes per example, and the memory budget is {budget:,}: raise memory_budget, or use "
            "predictive='linearised-sampled', which needs less"
        )
    chunk = max(1, budget // (4 * needed))
    for start in range(0, batch_size(inputs), chunk):
        found = jacobians(task.call, mine, others, examples(inputs, start, start + chunk))
        yield {name: j.to(torch.promote_types(j.dtype, torch.float32)) for name, j in found.items()}


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


def batched_grad(
    flat: Tensor, tensors: Sequence[Tensor] | Sequence[GradientEdge], basis: Tensor
) -> Sequence[Tensor | None]:
    """Vector-Jacobian products for every row of a basis, (rows, *shape) for each tensor; None where there is no path."""

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
        # Some operation cannot be batched: one output after the other.
        each = [one(row) for row in basis]
        reached[:] = [index for index, grad in enumerate(each[0]) if grad is not None]
        rows = tuple(torch.stack([dense(found[i]) for found in each]) for i in reached)  # type: ignore[arg-type]
    by_index = dict(zip(reached, rows, strict=True))
    return [by_index.get(index) for index in range(len(tensors))]
