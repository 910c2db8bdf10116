"""Exact variances of the linearised network, f(x; μ) + J (θ − μ), under a Gaussian posterior: diag or all of J Σ Jᵀ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam.errors import MemoryBudgetError
from bayesadam.gaussian.structure import Directions
from bayesadam.predict import contract
from bayesadam.predict.arriving import Arriving, Share
from bayesadam.predict.call import Call, batch_size, examples, in_tf32, output_tensor
from bayesadam.predict.captured import replayed
from bayesadam.predict.generic import Task, VarianceOf, batched_grad, generic_moments, projected_moments
from bayesadam.predict.layers import ConvolutionUse, Layout, MatrixUse, ProductUse, RotatedUse, SumUse, Use
from bayesadam.predict.plan import Plan, agree, edges_of, fitted, kind_of, plan_for, recorded
from bayesadam.readers import Rotation

# A GPU has the memory, and small pieces of work would not fill it.
DEFAULT_BUDGET = (8 if torch.cuda.is_available() else 1) << 30
_OUTPUTS_AT_ONCE = 64
# Activations of all examples that keep a GPU busy.
_BUSY = 1 << 24


class Along(Protocol):
    """Directions u in which the outputs are asked for, out of the outputs themselves: variances are those of u · f."""

    @property
    def count(self) -> int:
        """d, how many."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What two of them have in common if they are the same work on other tensors."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that they are made of."""

    def over(self, tensors: Sequence[Tensor]) -> Along:
        """The same with other tensors in place of `tensors`."""

    def signs(self, outputs: Tensor, start: int) -> Tensor:
        """The random numbers that the directions of the examples from `start` on take; of `outputs`, (b, c), the shape counts."""

    def __call__(self, outputs: Tensor, start: int, signs: Tensor) -> tuple[Tensor, Tensor]:
        """(b, c), those of the examples from `start` on → u, (d, b, c), and the outputs' numbers among them, (b, ·)."""


@dataclass(frozen=True, eq=False)
class Moments:
    """f(x; μ), (b, ...), and for each variance of the weights its variances, (k, b, ...), and covariances, (k, b, c, c).

    Where directions were asked for, theirs, (k, b, d) and (k, b, d, d), and the numbers of the outputs among them. `replayed`
    says whether they came out of a captured graph.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    numbers: Tensor | None = None
    replayed: bool = False


def moments(
    call: Call,
    params: Mapping[str, Tensor],
    variances: Sequence[VarianceOf],
    inputs: Any,
    covariance: bool = False,
    budget: int = DEFAULT_BUDGET,
    bases: Mapping[str, Rotation] | None = None,
    directions: Sequence[Directions | None] = (),
    along: Along | None = None,
    plan: Plan | None = None,
    captured: bool = False,
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
        along: the directions in which outputs are asked for; None for each output by itself.
        plan: that of `plan_for` on these inputs, where it is at hand.
        captured: whether work that comes again with the same shapes on CUDA may be captured and replayed.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    task = Task(call, leaves, variances, covariance, budget, bases or {}, captured)
    work = _projected if any(each is not None for each in directions) else _in_chunks
    return work(task, plan or plan_for(call, leaves, inputs), inputs, along, directions)


def _projected(
    task: Task, plan: Plan, inputs: Any, along: Along | None, directions: Sequence[Directions | None]
) -> Moments:
    """By the Jacobian's rows, where Σ is narrower along directions over all weights."""
    task = replace(task, params={name: tensor.detach() for name, tensor in task.params.items()})
    with torch.no_grad():
        mean = task.call.flat(task.params, inputs)
        if along is None:
            return _shaped(plan, mean, *projected_moments(task, directions, inputs, plan.outputs))
        u, numbers = along(mean, 0, along.signs(mean, 0))
        found = projected_moments(_along(task), directions, (inputs, u.transpose(0, 1)), len(u))
        return replace(_shaped(plan, mean, *found, whole=False), numbers=numbers)


def _in_chunks(
    task: Task, plan: Plan, inputs: Any, along: Along | None, directions: Sequence[Directions | None]
) -> Moments:
    """Layer by layer, some examples at a time."""
    size, covariance = batch_size(inputs), task.covariance
    like = next(iter(task.params.values()))
    outputs = plan.outputs if along is None else along.count
    per_chunk, at_once = _chunking(plan, outputs, size, like, covariance, task.budget)
    whole = _replayed(task, plan, inputs, at_once, along) if per_chunk >= size else None
    if whole is None and not plan.checked:
        return _in_chunks(task, plan_for(task.call, task.params, inputs, checked=True), inputs, along, directions)
    parts = (
        [whole]
        if whole
        else [
            _chunk(task, plan, examples(inputs, start, start + per_chunk), at_once, along, start)
            for start in range(0, size, per_chunk)
        ]
    )
    means, variance, blocks, each = ([part[i] for part in parts] for i in range(4))
    joined = torch.cat(variance, dim=1), torch.cat(blocks, dim=1) if covariance else None
    shaped = replace(_shaped(plan, torch.cat(means), *joined, whole=along is None), replayed=whole is not None)
    return shaped if along is None else replace(shaped, numbers=torch.cat(each))


# Mean, variances, blocks and numbers of some examples.
_Found = tuple[Tensor, Tensor, Tensor, Tensor]


def _chunk(task: Task, plan: Plan, inputs: Any, at_once: int, along: Along | None, start: int) -> _Found:
    size = batch_size(inputs)
    signs = None if along is None else along.signs(_like_outputs(task, plan, size), start)
    return _chunk_along(task, plan, inputs, at_once, along, start, signs)


def _like_outputs(task: Task, plan: Plan, size: int) -> Tensor:
    """(b, c) of one number, for its shape and kind."""
    return next(iter(task.params.values())).detach().new_zeros(()).expand(size, plan.outputs)


def _chunk_along(
    task: Task, plan: Plan, inputs: Any, at_once: int, along: Along | None, start: int, signs: Tensor | None
) -> _Found:
    """Of some examples, with random numbers that were drawn before."""
    passed = _forward(task, plan, inputs)
    plan, mean = passed.plan, passed.flat.detach()
    # A forward pass may be one of 16 bits; sums are not.
    with torch.autocast(mean.device.type, enabled=False):
        if along is None:
            variance, blocks = _every_output(task, passed, at_once)
            numbers = mean.new_zeros(len(mean), 0)
        else:
            assert signs is not None
            u, numbers = along(mean, start, signs)
            variance, blocks = _along_directions(task, passed, u, at_once)
    if along is not None:
        task, plan, inputs = _along(task), replace(plan, outputs=len(u)), (inputs, u.transpose(0, 1))
    with torch.no_grad():
        generic = generic_moments(task, plan, inputs)
    return mean, variance + generic[0], blocks + generic[1], numbers


def _replayed(task: Task, plan: Plan, inputs: Any, at_once: int, along: Along | None) -> _Found | None:
    """All examples out of a captured graph; None where there is none, or the first example is not what was found just now."""
    leaves, spec = pytree.tree_flatten(inputs)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    like, first = next(iter(task.params.values())), plan.first
    given = [*(leaves[i] for i in places), *(() if along is None else along.tensors)]
    if (
        not task.captured
        or first is None
        or plan.generic
        or plan.silent
        or not all(each.is_cuda for each in [like, *given])
    ):
        return None
    if along is not None:
        given.append(along.signs(_like_outputs(task, plan, batch_size(inputs)), 0))
    fixed = [*task.params.values(), *task.call.model.buffers()]
    fixed += [variance(name) for variance in task.variances for name in task.params]
    fixed += [side for base in task.bases.values() for side in (base.left, base.right) if side is not None]

    def work(tensors: Sequence[Tensor]) -> _Found:
        own = list(leaves)
        for i, tensor in zip(places, tensors, strict=False):
            own[i] = tensor
        asked = None if along is None else along.over(tensors[len(places) : -1])
        found = pytree.tree_unflatten(own, spec)
        return _chunk_along(task, plan, found, at_once, asked, 0, None if along is None else tensors[-1])

    def holds(found: Sequence[Tensor]) -> bool:
        return agree(found[0][:1], first.reshape(1, -1).to(found[0].dtype))

    shapes = tuple((each.shape, each.dtype) for each in given)
    settings = torch.is_autocast_enabled("cuda"), torch.get_float32_matmul_precision()
    asked = None if along is None else along.key
    key = (plan.uses, plan.layouts, shapes, settings, asked, at_once, task.covariance, len(task.variances))
    kind = kind_of(task.call, inputs)
    found = replayed(task.call.model, (kind, key), work, given=given, fixed=fixed, holds=holds)
    return None if found is None else (found[0], found[1], found[2], found[3])


def _along(task: Task) -> Task:
    """The same task of u · f, (b, d), for inputs and their u, (b, d, c)."""

    def forward(model: nn.Module, given: Any) -> Tensor:
        inputs, u = given
        outputs = output_tensor(replace(task.call, model=model).run(inputs))
        return torch.einsum("bdc,bc->bd", u.to(outputs), outputs.reshape(len(outputs), -1))

    return replace(task, call=Call(task.call.model, forward))


def _shaped(plan: Plan, mean: Tensor, variance: Tensor, covariance: Tensor | None, *, whole: bool = True) -> Moments:
    """The outputs in their own shape, and the variances with them where they are of the outputs as a whole."""
    shape = (len(mean), *plan.shape)
    own = variance.reshape(-1, *shape) if whole else variance
    return Moments(mean.reshape(shape).to(variance.dtype), own, covariance)


def _chunking(plan: Plan, outputs: int, size: int, like: Tensor, covariance: bool, budget: int) -> tuple[int, int]:
    """Examples at a time and outputs at a time: about four copies of the activations, and two for each output; three for one.

    A GPU that one output of all examples keeps busy takes one at a time, for less memory.
    """
    most = max(1, _BUSY // (plan.activations * size)) if like.is_cuda else _OUTPUTS_AT_ONCE
    at_once = outputs if covariance else min(outputs, most)
    unit = plan.activations * like.element_size()
    while True:
        needed = unit * (4 + 2 * at_once if at_once > 1 else 3)
        if needed <= budget:
            return min(budget // needed, size), at_once
        if covariance or at_once == 1:
            cheaper = "variances alone (covariance=False)" if covariance else "predictive='linearised-sampled'"
            raise MemoryBudgetError(
                f"one example needs about {needed:,} bytes, the memory budget is {budget:,}: raise memory_budget, or use "
                f"{cheaper}, which needs less"
            )
        at_once = max(1, at_once // 2)


@dataclass(frozen=True, eq=False)
class _Pass:
    """A forward pass: the uses of the parameters in the coordinates of their variances, and the outputs, (b, ...) and (b, c)."""

    plan: Plan
    uses: Sequence[Use]
    output: Tensor
    flat: Tensor


def _forward(task: Task, plan: Plan, inputs: Any) -> _Pass:
    with torch.enable_grad():
        uses, output = recorded(task.call, task.params, inputs, plan.repeated)
        flat = output.reshape(batch_size(inputs), -1)
    plan = fitted(plan, uses, flat, task.params)
    uses, plan = _rotated(uses, plan, task.bases)
    return _Pass(plan, uses, output, flat)


def _totals(task: Task, flat: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Zeros for the variances, (k, b, c), and for the blocks, (k, b, c, c), which are empty where they are not asked for."""
    like = torch.promote_types(flat.dtype, torch.float32)
    of_each = len(task.variances), len(flat), outputs
    return flat.new_zeros(of_each, dtype=like), flat.new_zeros(*of_each, outputs if task.covariance else 0, dtype=like)


def _every_output(task: Task, passed: _Pass, at_once: int) -> tuple[Tensor, Tensor]:
    """Variances and blocks of each output, some at a time."""
    plan, uses, flat = passed.plan, passed.uses, passed.flat
    variances, covariance = task.variances, task.covariance
    variance, blocks = _totals(task, flat, plan.outputs)
    head, layouts = _head(uses, plan.layouts, passed.output), plan.layouts
    if head is not None:
        bias = next((use for use in uses if use.output is head.output and use is not head), None)
        scales = torch.stack([_affine_scale(head, bias, s) for s in variances])
        variance += scales
        if covariance:
            blocks.diagonal(dim1=2, dim2=3).add_(scales)
        layouts = tuple(None if use.output is head.output else lay for use, lay in zip(uses, layouts, strict=True))
    shares = _shares(uses, layouts, variances, len(flat), covariance)
    source, weight = (flat, None) if head is None else (head.input, task.params[head.name])
    for first in range(0, plan.outputs if shares else 0, at_once):
        basis = _cotangents(flat, head, weight, first, min(at_once, plan.outputs - first))
        (blocks if covariance else variance[:, :, first : first + len(basis)]).add_(
            _contribution(uses, shares, source, basis)
        )
    return blocks.diagonal(dim1=2, dim2=3).clone() if covariance else variance, blocks


def _along_directions(task: Task, passed: _Pass, u: Tensor, at_once: int) -> tuple[Tensor, Tensor]:
    """Variances and blocks of u · f, u (d, b, c)."""
    variance, blocks = _totals(task, passed.flat, len(u))
    shares = _shares(passed.uses, passed.plan.layouts, task.variances, len(passed.flat), task.covariance)
    for first in range(0, len(u) if shares else 0, at_once):
        basis = u[first : first + at_once].to(passed.flat)
        (blocks if task.covariance else variance[:, :, first : first + len(basis)]).add_(
            _contribution(passed.uses, shares, passed.flat, basis)
        )
    return blocks.diagonal(dim1=2, dim2=3).clone() if task.covariance else variance, blocks


def _contribution(uses: Sequence[Use], shares: Sequence[Share], source: Tensor, basis: Tensor) -> Tensor | float:
    """The sum of the shares for some cotangents of the source, (d, b, ·).

    D is ∂/∂(layer outputs) for all of them; examples are independent, so their sum separates them. A GPU rounds the factors of
    float32 products to TF32 here; the mean was found before. Of one cotangent, D is dropped as soon as it was contracted.
    """
    total: Tensor | float = 0.0
    with in_tf32() if basis.is_cuda else nullcontext():
        if len(basis) == 1:
            waiting = Arriving(uses, shares)
            waiting.pull(source, basis[0])
            return waiting.total
        active = sorted({index for indices, _ in shares for index in indices})
        by_use = dict(zip(active, batched_grad(source, edges_of([uses[i] for i in active]), basis), strict=True))
        with torch.no_grad():
            for indices, share in shares:
                mine = {i: d for i in indices if (d := by_use[i]) is not None}
                total = total + share(mine) if mine else total
    return total


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
    handed_on, made_by = output.grad_fn, use.output.edge and use.output.edge.node
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
) -> list[Share]:
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
    shares: list[Share] = []
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
