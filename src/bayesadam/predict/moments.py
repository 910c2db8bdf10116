"""Exact moments of the linearised network, f(x; μ) + J (θ − μ), under Gaussians over its weights: U J Σ Jᵀ Uᵀ.

U is the identity for all outputs, ten rows of it for ten outputs, and any row for a linear combination: see `Rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.func import jacrev, vmap
from torch.utils import _pytree as pytree

from bayesadam._alone import alone_with
from bayesadam._checks import count
from bayesadam.errors import MatchError, MemoryBudgetError
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.inputs import InputSide
from bayesadam.gaussian.structure import Named
from bayesadam.likelihoods import Likelihood
from bayesadam.predict.call import Call, batch_size, examples, has_graph, in_tf32, is_batched, output_tensor
from bayesadam.predict.layers import (
    ConvolutionUse,
    Layout,
    MatrixUse,
    ProductUse,
    SumUse,
    Use,
    contracted,
    gram,
    squared,
)
from bayesadam.predict.plan import Plan, agree, dense, fitted, plan_for, recorded
from bayesadam.readers.rotated import Rotation

# A parameter's name → its variances S.
VarianceOf = Callable[[str], Tensor]
# A GPU has the memory, and small pieces of work would not fill it.
DEFAULT_BUDGET = (8 if torch.cuda.is_available() else 1) << 30
_OUTPUTS_AT_ONCE = 64
# Variances in the weights' own coordinates.
_PLAIN = Diagonal({})
# Activations of all examples that keep a GPU busy.
_BUSY = 1 << 24


@dataclass(frozen=True)
class Top:
    """The k largest outputs of every position."""

    k: int = 10

    def __post_init__(self) -> None:
        count("Top(k)", self.k, "outputs")


# --- rows over the outputs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Basis:
    """Rows u over the c outputs of b examples: unit vectors by index, (b, k), then others, `dense` (m, b, c)."""

    indices: Tensor
    dense: Tensor

    def __len__(self) -> int:
        return self.indices.shape[1] + len(self.dense)

    def part(self, start: int, stop: int) -> Basis:
        """Rows `start` to `stop`."""
        k = self.indices.shape[1]
        return Basis(self.indices[:, start:stop], self.dense[max(0, start - k) : max(0, stop - k)])

    def vectors(self) -> Tensor:
        """All rows written out, (d, b, c)."""
        b, k = self.indices.shape
        units = self.dense.new_zeros(b, k, self.dense.shape[2]).scatter_(2, self.indices.unsqueeze(-1), 1.0)
        return torch.cat([units.transpose(0, 1), self.dense])

    def times(self, matrix: Tensor) -> Tensor:
        """u M, (d, b, h), of M (c, h): unit vectors pick its rows."""
        same = self.indices.stride(0) == 0
        picked = matrix[self.indices[:1].T].expand(-1, len(self.indices), -1) if same else matrix[self.indices.T]
        return torch.cat([picked, self.dense.to(matrix) @ matrix]) if len(self.dense) else picked

    def weighted(self, t: Tensor, covariance: bool) -> Tensor:
        """Σ_c u²_dc t_c, (b, d), of t (b, c), or Σ_c u_dc u_ec t_c, (b, d, d)."""
        if covariance:
            return squared(self.vectors().to(t) * t.sqrt(), True)
        return torch.cat([t.gather(1, self.indices), (self.dense.to(t).square() * t).sum(dim=2).T], dim=1)


@dataclass(frozen=True)
class Rows:
    """Rows u of a matrix over an example's outputs: the moments are those of u · f.

    In this order: the outputs chosen, or combinations of them; probes u = A r, A Aᵀ the Hessian H of −log p and r
    random signs, so that E (u · f)² = tr(H Cov f).

    There are k of the first kind, the largest outputs where `top`. In H logits are over the temperature; `shape` is of
    an example's outputs where probes go over all positions.
    """

    record: Likelihood[Any]
    k: int = 0
    top: bool = False
    probes: int = 0
    temperature: float = 1.0
    shape: torch.Size | None = None
    noise_variance: Tensor | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        """d, how many rows."""
        return self.k + self.probes

    def choosing(self, chosen: Top | Tensor, size: int, outputs: int) -> tuple[Rows, dict[str, Tensor]]:
        """With some of the outputs of `size` examples, which have `outputs` each, and the tensors that say which."""
        per, most = self.record.outputs_per_target, outputs // self.record.outputs_per_target
        if isinstance(chosen, Top):
            return replace(self, k=min(chosen.k, most) * per, top=True), {}
        is_combination = chosen.is_floating_point()
        rows = chosen.expand(size, *chosen.shape) if chosen.dim() == 1 + is_combination else chosen
        if len(rows) != size:
            raise MatchError(f"outputs are asked for of {len(rows)} examples, and the batch has {size}")
        if is_combination:
            if rows.shape[-1] != outputs:
                raise MatchError(f"the combinations are of {rows.shape[-1]} outputs, and the network has {outputs}")
            return replace(self, k=rows.shape[1]), {"combinations": rows}
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < most:
            raise MatchError(f"outputs have indices 0 to {most - 1}, got {int(rows.min())} to {int(rows.max())}")
        return replace(self, k=rows.shape[-1] * per), {"indices": rows.long()}

    def __call__(self, outputs: Tensor, given: Mapping[str, Tensor]) -> Basis:
        """The rows at outputs (b, c), in float32 or wider, with the batch's own tensors."""
        b, c = outputs.shape
        indices, dense = torch.zeros(b, 0, dtype=torch.int64, device=outputs.device), []
        if "combinations" in given:
            dense.append(given["combinations"].to(outputs).transpose(0, 1))
        elif self.k:
            per = self.record.outputs_per_target
            if self.top:
                indices = self.record.locations(outputs).topk(self.k // per, dim=1).indices
            else:
                indices = given["indices"].to(outputs.device)
            # A target of several outputs is chosen with all of them.
            indices = torch.cat([indices + i * (c // per) for i in range(per)], dim=1) if per > 1 else indices
        if self.probes:
            at = outputs.reshape(b, *([c] if self.shape is None else self.shape)) / self.temperature
            signs = given["signs"].to(outputs).transpose(0, 1).reshape(self.probes, *at.shape)
            u = self.record.hessian_root_times(at, signs, self.noise_variance) / self.temperature
            if "positions" in given:
                u = u * given["positions"].to(u.device).reshape(*u.shape[1:-1], 1)
            dense.append(u.flatten(2))
        return Basis(indices, torch.cat(dense) if dense else outputs.new_empty(0, b, c))


# --- moments ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Moments:
    """f(x; μ), (b, ...), and for each of k Σ the variances, (k, b, ...), and covariances, (k, b, c, c).

    Of d rows over the outputs these are (k, b, d) and (k, b, d, d); `indices`, (b, ·), are those of the outputs chosen.
    `joint`, (k, b c, b c), has the covariances between examples too.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    indices: Tensor
    joint: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Task:
    """What is computed, whatever the inputs; the fields are the arguments of `moments`."""

    call: Call
    params: Named
    variances: Sequence[VarianceOf]
    rows: Rows | None
    covariance: bool
    budget: int
    structure: Diagonal

    def basis(self, outputs: Tensor, given: Mapping[str, Tensor]) -> Basis:
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.rows is not None:
            return self.rows(wide, given)
        b, c = wide.shape
        return Basis(torch.arange(c, device=wide.device).expand(b, c), wide.new_empty(0, b, c))


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
    joint: bool = False,
    budget: int = DEFAULT_BUDGET,
    structure: Diagonal = _PLAIN,
    plan: Plan | None = None,
) -> Moments:
    """Mean and U J Σ Jᵀ Uᵀ for several Σ of one mean, in one pass over the inputs, in parts that fit the budget.

    Per layer the contraction is in closed form, the layer's factors are dropped at once, and no (batch, outputs,
    parameters) tensor exists. Which layers can be handled so is determined by comparing with autograd on the first
    examples; other parameters take the generic path, by autograd example by example, with the same numbers. So do all
    of them where gradients with respect to the inputs are wanted.

    Args:
        params: μ, in the types of the model's parameters.
        variances: for each Σ a function from a parameter's name to its variances S.
        rows: U, with its tensors for this batch in `given`; None for the identity.
        covariance: the whole (d, d) blocks too.
        joint: the covariances between examples too, of all outputs, by the rows of the Jacobian.
        structure: says in which coordinates the variances are.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    task = _Task(call, leaves, variances, rows, covariance, budget, structure)
    plan = plan_for(call, params, inputs) if plan is None else plan
    given, size, between = given or {}, batch_size(inputs), None
    if joint or has_graph(inputs):
        with torch.set_grad_enabled(has_graph(inputs)):
            mean = call.flat({name: leaf.detach() for name, leaf in leaves.items()}, inputs)
        basis = task.basis(mean.detach(), given)
        if joint:
            between, variance, block = _between(task, inputs, basis)
        else:
            why = "a gradient with respect to inputs needs the gradients of every output"
            variance, block = _by_autograd(task, tuple(leaves), inputs, basis, why)
        found = [(mean, variance, block, basis.indices)]
    else:
        at_a_time, at_once = _chunking(task, plan, size)
        found = []
        for start in range(0, size, at_a_time):
            stop = start + at_a_time
            own_given = {name: tensor[start:stop] for name, tensor in given.items()}
            found.append(_chunk(task, plan, at_once, examples(inputs, start, stop), own_given))
    mean, variance, block, indices = (
        torch.cat(parts, dim=d) for parts, d in zip(zip(*found, strict=True), (0, 1, 1, 0), strict=True)
    )
    shape = (size, *plan.shape)
    if rows is None:
        variance = variance.reshape(-1, *shape)
    mean = mean.reshape(shape).to(variance.dtype)
    return Moments(mean, variance, block if covariance or joint else None, indices, between)


def _chunking(task: _Task, plan: Plan, size: int) -> tuple[int, int]:
    """Examples and rows at a time: four copies of the activations, and two for each row; one row on a busy GPU."""
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


def _chunk(task: _Task, plan: Plan, at_once: int, inputs: Any, given: Named) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variances, blocks, which are empty where not asked for, and indices of some examples, layer by layer."""
    with torch.enable_grad():
        uses, output = recorded(task.call, task.params, inputs, plan.repeated)
        flat = output.reshape(batch_size(inputs), -1)
    plan = fitted(plan, uses, flat, task.params)
    uses, plan = _rotated(uses, plan, task.structure)
    mean = flat.detach()
    # A forward pass may be one of 16 bits; sums are not.
    with torch.autocast(mean.device.type, enabled=False):
        basis = task.basis(mean, given)
        variance, blocks = _by_layers(task, plan, uses, output, basis, at_once)
    if plan.generic:
        names = plan.generic
        why = f"{len(names)} parameters that no known layer explains (first {names[0]!r}) need their gradients"
        more = _by_autograd(task, names, inputs, basis, why)
        variance, blocks = variance + more[0], blocks + more[1]
    return mean, variance, blocks, basis.indices if task.rows is not None else basis.indices[:, :0]


# --- layer by layer -------------------------------------------------------------------------------------------------


def _by_layers(
    task: _Task, plan: Plan, uses: Sequence[Use], output: Tensor, basis: Basis, at_once: int
) -> tuple[Tensor, Tensor]:
    """Variances (k, b, d) and blocks (k, b, d, d) of u · f, the sum of every explained parameter's share."""
    covariance, size, flat = task.covariance, len(output), output.reshape(len(output), -1)
    variance = basis.dense.new_zeros(len(task.variances), size, len(basis))
    blocks = variance.new_zeros(*variance.shape, len(basis) if covariance else 0)

    def scales(use: MatrixUse, bias: Use | None) -> list[Tensor]:
        """t = a² Sᵀ + s, (b, out), for each Σ: the variance of z = a Wᵀ + b at one position."""
        found = []
        for s in task.variances:
            own = use.of(s(use.name))
            t = use.input.detach().to(own.dtype).square() @ own.mT
            found.append(t if bias is None else t + s(bias.name))
        return found

    layouts, source, weight = list(plan.layouts), flat, None
    head = _head(uses, plan.layouts, output)
    if head is not None:
        # ∂f/∂a = W: the last layer is not back-propagated through, and D is not held there.
        source, weight = head.input, head.of(task.params[head.name].detach()).to(head.input.dtype)
        bias = next((use for use in uses if use.at == head.at and use is not head), None)
        for total, t in zip(blocks if covariance else variance, scales(head, bias), strict=True):
            total += basis.weighted(t, covariance)
        layouts = [None if use.at == head.at else layout for use, layout in zip(uses, layouts, strict=True)]
    # Uses of one parameter belong together, since their gradients add before they are squared.
    groups: dict[tuple[str, int | None], list[int]] = {}
    for i, use in enumerate(uses):
        if layouts[i] is not None:
            groups.setdefault((use.name, None if use.rows is None else use.rows.start), []).append(i)
    # A layer of one position is done with its bias.
    known: dict[str, list[Tensor]] = {}
    alone = {uses[group[0]].name: group[0] for group in groups.values() if len(group) == 1}
    biases = {uses[i].at: uses[i] for i in alone.values() if isinstance(uses[i], SumUse) and uses[i].rotation is None}
    for name, i in alone.items():
        use, layout = uses[i], layouts[i]
        if isinstance(use, MatrixUse) and layout is not None and use.has_one_position(layout, size):
            bias = biases.get(use.at)
            known[name] = scales(use, bias)
            if bias is not None:
                del groups[bias.name, None]
    active = [i for group in groups.values() for i in group]
    for first in range(0, len(basis) if active else 0, at_once):
        part = basis.part(first, first + at_once)
        cotangents = part.vectors().to(flat.dtype) if weight is None else part.times(weight)
        total = blocks if covariance else variance[:, :, first : first + len(part)]
        with in_tf32(flat):
            # Examples are independent, so that D of their sum separates them.
            ds = dict(zip(active, batched_grad(source, [uses[i].edge for i in active], cotangents), strict=True))
            with torch.no_grad():
                for (name, _), group in groups.items():
                    pulled = [(uses[i], d, lay) for i in group if (d := ds[i]) is not None and (lay := layouts[i])]
                    if pulled and name in known:
                        total += torch.stack([squared(pulled[0][1] * t.sqrt(), covariance) for t in known[name]])
                    elif pulled:
                        total += contracted(pulled, size, [s(name) for s in task.variances], covariance)
    return blocks.diagonal(dim1=2, dim2=3).clone() if covariance else variance, blocks


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
            biases = [u for u, _ in own if isinstance(u, SumUse) and u.rotation is None]
            plain = all(lay is not None for _, lay in own) and len(own) == 1 + len(biases)
            return use if plain and not elsewhere else None
    return None


def _rotated(uses: Sequence[Use], plan: Plan, structure: Diagonal) -> tuple[list[Use], Plan]:
    """Uses in the coordinates of the structure; parameters used in ways that have no such form go the generic way.

    A bias that is a column of its matrix is done with it: all uses of the two must be at the same outputs.
    """
    if structure.independent:
        return list(uses), plan
    turns: dict[str, Rotation | InputSide] = {**structure.bases, **structure.inputs}
    places: dict[str, list[Any]] = {}
    for use, layout in zip(uses, plan.layouts, strict=True):
        if layout is not None:
            places.setdefault(use.name, []).append(use.at)

    def can_be(use: Use) -> bool:
        known = isinstance(use, MatrixUse | SumUse) or (isinstance(use, ConvolutionUse) and use.module.groups == 1)
        side = structure.inputs.get(use.name)
        if side is None:
            return known and use.rows is None
        together = side.bias is None or places.get(side.bias) == places.get(use.name)
        return known and isinstance(use, ProductUse) and together

    odd = {use.name for use in uses if use.name in turns and not can_be(use)}
    joined = {side.bias: name for name, side in structure.inputs.items() if side.bias is not None}
    odd |= {bias for bias, name in joined.items() if name in odd or name not in places}
    odd |= {joined[name] for name in odd & joined.keys()}
    explained = {use.name for use, layout in zip(uses, plan.layouts, strict=True) if layout is not None}
    turned = [use if use.name in odd else replace(use, rotation=turns.get(use.name)) for use in uses]
    done = odd | joined.keys()
    layouts = tuple(None if use.name in done else layout for use, layout in zip(uses, plan.layouts, strict=True))
    added = tuple(sorted((odd & explained) - set(plan.generic)))
    return turned, replace(plan, layouts=layouts, generic=plan.generic + added)


def batched_grad(
    flat: Tensor, tensors: Sequence[Tensor] | Sequence[GradientEdge], basis: Tensor
) -> Sequence[Tensor | None]:
    """Vector-Jacobian products for every row of a basis, (rows, *shape) for each tensor; None without a path."""
    options: Any = {"retain_graph": True, "allow_unused": True}
    try:
        if len(basis) > 1:
            return torch.autograd.grad(flat, tensors, basis, **options, is_grads_batched=True)
    except RuntimeError:
        # Some operation cannot be batched: one row after the other.
        pass
    each = zip(*(torch.autograd.grad(flat, tensors, row, **options) for row in basis), strict=True)
    return [None if rows[0] is None else torch.stack([dense(row) for row in rows]) for rows in each]


# --- by autograd, example by example --------------------------------------------------------------------------------


def _by_autograd(task: _Task, names: Sequence[str], inputs: Any, basis: Basis, why: str) -> tuple[Tensor, Tensor]:
    """The share of some parameters by their Jacobians, of as many examples at a time as the budget holds."""
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
    with torch.set_grad_enabled(has_graph(inputs)):
        for start in range(0, batch_size(inputs), chunk):
            parts = _white_rows(task, call, mine, others, examples(batch, start, start + chunk))
            squares = ([rows.square().sum(dim=-1) for rows in part] for part in parts)
            variance.append(torch.stack([reduce(torch.add, each) for each in squares]))
            if task.covariance:
                grams = ([gram(rows) for rows in part] for part in parts)
                blocks.append(torch.stack([reduce(torch.add, each) for each in grams]))
    total = torch.cat(variance, dim=1)
    return total, torch.cat(blocks, dim=1) if blocks else total.new_zeros(*total.shape, 0)


def _between(task: _Task, inputs: Any, basis: Basis) -> tuple[Tensor, Tensor, Tensor]:
    """J Σ Jᵀ of all outputs of all examples, (k, b c, b c), its diagonal, (k, b, c), and blocks, (k, b, c, c)."""
    b, c = len(basis.indices), len(basis)
    params, graph = {name: tensor.detach() for name, tensor in task.params.items()}, has_graph(inputs)
    # Rows, white rows, and what made them.
    cost = {name: 3 * b * c * tensor.numel() * tensor.element_size() for name, tensor in params.items()}
    groups: list[list[str]] = [[]]
    for name in params:
        apart = not graph and task.structure.by_parameter
        if apart and groups[-1] and sum(cost[other] for other in groups[-1]) + cost[name] > task.budget:
            groups.append([])
        groups[-1].append(name)
    needed = max(sum(cost[name] for name in group) for group in groups)
    if needed > task.budget:
        raise MemoryBudgetError(
            f"the covariance between {b} examples of {c} outputs needs about {needed:,} bytes at once, and the memory "
            f"budget is {task.budget:,}: raise memory_budget, take fewer examples, or use "
            "predictive='linearised-sampled', which estimates it from draws"
        )
    total: Any = 0
    with torch.set_grad_enabled(graph):
        for group in groups:
            mine = {name: params[name] for name in group}
            others = {name: tensor for name, tensor in params.items() if name not in mine}
            rows = _white_rows(task, task.call, mine, others, inputs)
            total = total + torch.stack([gram(torch.cat(part, dim=2).flatten(0, 1)[None])[0] for part in rows])
        blocks = total.view(len(total), b, c, b, c).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        return total, blocks.diagonal(dim1=2, dim2=3), blocks


def white_rows(gaussian: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """f(x; μ), (b, c), and rows φ, (b, c, ·), with φ φᵀ = J Σ Jᵀ; both with gradients where the inputs have them."""
    call, params = Call(gaussian.model), parameters_at_mean(gaussian)
    own = [gaussian.coordinate_variance.__getitem__], None, False, DEFAULT_BUDGET, gaussian.structure
    with torch.set_grad_enabled(has_graph(inputs)):
        rows = _white_rows(_Task(call, params, *own), call, params, {}, inputs)
        return call.flat(params, inputs), torch.cat(rows[0], dim=2)


def _white_rows(task: _Task, call: Call, mine: Any, others: Any, inputs: Any) -> list[list[Tensor]]:
    """For each Σ parts (b, c, ·) of rows φ with φ φᵀ = J Σ Jᵀ, of some parameters."""
    found = jacobians(call, mine, others, inputs)
    wide = {name: j.to(torch.promote_types(j.dtype, torch.float32)) for name, j in found.items()}
    turned = task.structure.into(wide)
    return [
        [(row * s(name).sqrt().to(row)).unsqueeze(-1).flatten(2) for name, row in turned.items()]
        for s in task.variances
    ]


def _along(call: Call) -> Call:
    """The call of u · f, (b, d), for inputs, the indices of unit vectors and other rows u, (b, m, c)."""

    def forward(model: nn.Module, given: Any) -> Tensor:
        inputs, indices, u = given
        outputs = output_tensor(replace(call, model=model).run(inputs))
        flat = outputs.reshape(len(outputs), -1)
        return torch.cat([flat.gather(1, indices), torch.einsum("bmc,bc->bm", u.to(flat), flat)], dim=1)

    return Call(call.model, forward)


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
        found: dict[str, Tensor] = vmap(jacrev(single), in_dims=(None, *[0] * len(varying)))(mine, *varying)
        # torch's vmap of a vmap gets some operations wrong (PReLU).
        last = one_jacobian(call, mine, others, examples(inputs, size - 1, size))
        if all(agree(found[name][-1], truth) for name, truth in last.items()):
            return found
    except RuntimeError:
        pass
    loop = [one_jacobian(call, mine, others, examples(inputs, i, i + 1)) for i in range(size)]
    return {name: torch.stack([row[name] for row in loop]) for name in mine}


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
