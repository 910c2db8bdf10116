"""Exact variances of the linearised network, f(x; μ) + J (θ − μ), under a Gaussian posterior: diag or all of J Σ Jᵀ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesadam.curvature.rotated import Rotation
from bayesadam.errors import MemoryBudgetError
from bayesadam.predict import contract
from bayesadam.predict.call import Call, batch_size, examples
from bayesadam.predict.generic import Task, VarianceOf, batched_grad, generic_moments, projected_moments
from bayesadam.predict.layers import ConvolutionUse, Layout, MatrixUse, ProductUse, RotatedUse, SumUse, Use
from bayesadam.predict.plan import Plan, fitted, plan_for, recorded
from bayesadam.structures.structure import Directions

DEFAULT_BUDGET = 1 << 30
# What some uses of layers contribute: their numbers, and a function of D at each of them.
_Share = tuple[Sequence[int], Callable[[Mapping[int, Tensor]], Tensor]]
_OUTPUTS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Moments:
    """f(x; μ), (b, ...), and for each variance of the weights its variances, (k, b, ...), and covariances, (k, b, c, c)."""

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None


def moments(
    call: Call,
    params: Mapping[str, Tensor],
    variances: Sequence[VarianceOf],
    inputs: Any,
    covariance: bool = False,
    budget: int = DEFAULT_BUDGET,
    bases: Mapping[str, Rotation] | None = None,
    directions: Sequence[Directions | None] = (),
) -> Moments:
    """Mean and J S Jᵀ for each S of `variances`, in one pass over the inputs.

    Per layer the contraction is in closed form, the layer's factors are dropped at once, and no (batch, outputs,
    parameters) tensor exists. A layer that is not known, or not used as known, is found out by comparing with autograd on
    the first examples; its parameters take the generic path, with the same numbers.

    Args:
        params: μ, in the types of the model's parameters.
        variances: functions from a parameter's name to its variances S.
        covariance: the whole (c, c) blocks too.
        budget: bytes for activations and back-propagated outputs.
        bases: the coordinates that the variances are in, of the parameters whose own they are not.
        directions: for each variance, directions over all weights together that are narrower; they need the Jacobian's rows,
            a few examples at a time.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    task = Task(call, leaves, variances, covariance, budget, bases or {})
    plan = plan_for(call, leaves, inputs)
    size = batch_size(inputs)
    if any(each is not None for each in directions):
        plain = {name: tensor.detach() for name, tensor in params.items()}
        with torch.no_grad():
            found = projected_moments(replace(task, params=plain), directions, inputs, plan.outputs)
            return _shaped(plan, call.flat(plain, inputs), *found)
    per_chunk, at_once = _chunking(plan, size, next(iter(leaves.values())).element_size(), covariance, budget)
    means, parts, blocks = [], [], []
    for start in range(0, size, per_chunk):
        chunk = examples(inputs, start, start + per_chunk)
        own, mean, variance, block = _layerwise(task, plan, chunk, at_once)
        with torch.no_grad():
            generic = generic_moments(task, own, chunk)
        means.append(mean)
        parts.append(variance + generic[0])
        blocks.append(block + generic[1])
    return _shaped(plan, torch.cat(means), torch.cat(parts, dim=1), torch.cat(blocks, dim=1) if covariance else None)


def _shaped(plan: Plan, mean: Tensor, variance: Tensor, covariance: Tensor | None) -> Moments:
    shape = (len(mean), *plan.shape)
    return Moments(mean.reshape(shape).to(variance.dtype), variance.reshape(-1, *shape), covariance)


def _chunking(plan: Plan, size: int, element: int, covariance: bool, budget: int) -> tuple[int, int]:
    """Examples at a time and outputs at a time: about four copies of the activations, and two for each output."""
    at_once = plan.outputs if covariance else min(plan.outputs, _OUTPUTS_AT_ONCE)
    unit = plan.activations * element
    while True:
        needed = unit * (4 + 2 * at_once)
        if needed <= budget:
            return min(budget // needed, size), at_once
        if covariance or at_once == 1:
            cheaper = "variances alone (covariance=False)" if covariance else "predictive='linearised-sampled'"
            raise MemoryBudgetError(
                f"one example needs about {needed:,} bytes, the memory budget is {budget:,}: raise memory_budget, or use "
                f"{cheaper}, which needs less"
            )
        at_once = max(1, at_once // 2)


def _layerwise(task: Task, plan: Plan, inputs: Any, at_once: int) -> tuple[Plan, Tensor, Tensor, Tensor]:
    size, leaves, variances, covariance = batch_size(inputs), task.params, task.variances, task.covariance
    with torch.enable_grad():
        uses, output = recorded(task.call, leaves, inputs)
        flat = output.reshape(size, -1)
    plan = fitted(plan, uses, flat, leaves)
    uses, plan = _rotated(uses, plan, task.bases)
    like = torch.promote_types(flat.dtype, torch.float32)
    variance = flat.new_zeros(len(variances), size, plan.outputs, dtype=like)
    blocks = flat.new_zeros(len(variances), size, plan.outputs, plan.outputs if covariance else 0, dtype=like)
    head, layouts = _head(uses, plan.layouts, output), plan.layouts
    if head is not None:
        bias = next((use for use in uses if use.output is head.output and use is not head), None)
        scales = torch.stack([_affine_scale(head, bias, s) for s in variances])
        variance += scales
        if covariance:
            blocks.diagonal(dim1=2, dim2=3).add_(scales)
        layouts = tuple(None if use.output is head.output else lay for use, lay in zip(uses, layouts, strict=True))
    shares = _shares(uses, layouts, variances, size, covariance)
    active = sorted({index for indices, _ in shares for index in indices})
    source, weight = (flat, None) if head is None else (head.input, leaves[head.name])
    outputs = [uses[i].output for i in active]
    # ∂f_c/∂(layer outputs) for some outputs c at a time; examples are independent, so their sum separates them.
    for first in range(0, plan.outputs if active else 0, at_once):
        basis = _cotangents(flat, head, weight, first, min(at_once, plan.outputs - first))
        by_use = dict(zip(active, batched_grad(source, outputs, basis), strict=True))
        with torch.no_grad():
            for indices, share in shares:
                mine = {i: by_use[i] for i in indices if by_use[i] is not None}
                if not mine:
                    continue
                part = share(mine)
                if covariance:
                    blocks += part
                else:
                    variance[:, :, first : first + part.shape[-1]] += part
    if covariance:
        variance = blocks.diagonal(dim1=2, dim2=3).clone()
    return plan, flat.detach(), variance, blocks


def _rotated(uses: Sequence[Use], plan: Plan, bases: Mapping[str, Rotation]) -> tuple[list[Use], Plan]:
    """Uses in the coordinates of the bases; parameters used in ways that cannot be seen so go the generic way."""
    explained = {use.name for use, layout in zip(uses, plan.layouts, strict=True) if layout is not None}
    odd = {use.name for use in uses if use.name in bases and not _can_be_rotated(use)}
    turned = [_turned(use, bases[use.name]) if use.name in bases and use.name not in odd else use for use in uses]
    layouts = tuple(None if use.name in odd else layout for use, layout in zip(uses, plan.layouts, strict=True))
    added = tuple(sorted((odd & explained) - set(plan.generic)))
    return turned, replace(plan, layouts=layouts, generic=plan.generic + added)


def _turned(use: Use, rotation: Rotation) -> Use:
    if isinstance(use, SumUse):
        return replace(use, rotation=rotation)
    assert isinstance(use, ProductUse)
    return RotatedUse(use.name, use.output, use.layouts, None, use.input, use, rotation)


def _can_be_rotated(use: Use) -> bool:
    plain = isinstance(use, MatrixUse | SumUse) or (isinstance(use, ConvolutionUse) and use.module.groups == 1)
    return plain and use.rows is None


def _head(uses: Sequence[Use], layouts: Sequence[Layout | None], output: Tensor) -> MatrixUse | None:
    """The linear layer z = a Wᵀ + b whose output is the network's, if nothing else is and its weights are used nowhere else.

    Then ∂f/∂z is the identity and ∂f/∂a is W: neither has to be back-propagated, nor held for every output.
    """
    for use, layout in zip(uses, layouts, strict=True):
        if (
            isinstance(use, MatrixUse)
            and layout is not None
            and contract.one_position(use, layout, len(output))
            and use.input.requires_grad
            and _is_direct(use, output)
        ):
            names = {other.name for other in uses if other.output is use.output}
            known = all(lay is not None for other, lay in zip(uses, layouts, strict=True) if other.output is use.output)
            elsewhere = any(other.name in names and other.output is not use.output for other in uses)
            plain = all(other is use or _is_plain_sum(other) for other in uses if other.output is use.output)
            return use if known and plain and not elsewhere else None
    return None


def _is_plain_sum(use: Use) -> bool:
    return isinstance(use, SumUse) and use.rotation is None


def _is_direct(use: MatrixUse, output: Tensor) -> bool:
    """Whether the network's output is this layer's, as the recording handed it on, and its input was left as it was."""
    handed_on, made_by = output.grad_fn, use.output.grad_fn
    if handed_on is None or made_by is None or handed_on.name() != "CloneBackward0":
        return False
    same_input = any(before is use.input.grad_fn for before, _ in made_by.next_functions)
    return handed_on.next_functions[0][0] is made_by and same_input


def _affine_scale(use: MatrixUse, bias: Use | None, variance: VarianceOf) -> Tensor:
    """t = a² Sᵀ + s, (b, out): the variance of z = a Wᵀ + b, which D² or D…Dᵀ then carries to the outputs."""
    own = use.of(variance(use.name))
    t = use.input.detach().to(own.dtype).square() @ own.mT
    return t if bias is None else t + bias.of(variance(bias.name))


def _shares(
    uses: Sequence[Use], layouts: Sequence[Layout | None], variances: Sequence[VarianceOf], size: int, covariance: bool
) -> list[_Share]:
    """Uses of one parameter belong together, since their gradients add before they are squared."""
    groups: dict[tuple[str, int | None], list[int]] = {}
    for index, (use, layout) in enumerate(zip(uses, layouts, strict=True)):
        if layout is not None:
            groups.setdefault(use.key, []).append(index)

    def affine(scales: Sequence[Tensor], ds: Mapping[int, Tensor]) -> Tensor:
        (d,) = (d.to(scales[0].dtype) for d in ds.values())
        if covariance:
            return torch.stack([contract.gram((d * t.sqrt()).transpose(0, 1)) for t in scales])
        squares = d.square()
        return torch.stack([(squares * t).sum(dim=-1).T for t in scales])

    def general(variance: Sequence[Tensor], ds: Mapping[int, Tensor]) -> Tensor:
        ways = [layout for i in ds if (layout := layouts[i]) is not None]
        given = [uses[i] for i in ds], list(ds.values()), ways, size
        return (contract.covariances if covariance else contract.variances)(*given, variance)

    alone = {indices[0] for indices in groups.values() if len(indices) == 1}
    biases = {id(uses[i].output): i for i in alone if _is_plain_sum(uses[i])}
    shares: list[_Share] = []
    joined: set[int] = set()
    for index in alone:
        use, layout = uses[index], layouts[index]
        if isinstance(use, MatrixUse) and layout is not None and contract.one_position(use, layout, size):
            bias = biases.get(id(use.output))
            scales = [_affine_scale(use, None if bias is None else uses[bias], s) for s in variances]
            shares.append(((index,), partial(affine, scales)))
            joined |= {index} if bias is None else {index, bias}
    rest = [indices for indices in groups.values() if indices[0] not in joined]
    return shares + [(indices, partial(general, [s(uses[indices[0]].name) for s in variances])) for indices in rest]


def _cotangents(flat: Tensor, head: MatrixUse | None, weight: Tensor | None, first: int, count: int) -> Tensor:
    """Of `count` outputs, (count, b, ·): their own unit vectors, or ∂f/∂a = W, the same for every example."""
    if head is None or weight is None:
        basis = flat.new_zeros(count, *flat.shape)
        basis[torch.arange(count), :, first + torch.arange(count)] = 1.0
        return basis
    some = head.of(weight.detach())[first : first + count].to(head.input.dtype)
    return some.unsqueeze(1).expand(-1, len(flat), -1)
