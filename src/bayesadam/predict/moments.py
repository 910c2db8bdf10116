"""Exact moments of the linearised network, f(x; μ) + J (θ − μ), under Gaussians over its weights: J Σ Jᵀ."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils import _pytree as pytree

from bayesadam.errors import SettingError
from bayesadam.likelihoods.moments import Moments
from bayesadam.predict.batches import (
    batch_size,
    chosen_examples,
    examples,
    has_graph,
    is_batched,
    is_ragged,
    parts,
    plain,
)
from bayesadam.predict.network import Call, Forward, Gaussian, evaluating, widened
from bayesadam.predict.plan import Pass, Plan, agree, batched_grad, check_alone, examined, plan_for, pulled_back
from bayesadam.predict.uses import Addend, Product, Pulled, columns_of, contracted, contracted_columns
from bayesadam.readers.rotated import Rotation
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.inputs import InputSide
from bayesadam.weights.named import Named

# Bytes of memory at once. A GPU has it, and small pieces of work would not fill it.
BUDGET = (8 if torch.cuda.is_available() else 1) << 30
_OUTPUTS_AT_ONCE = 64
# Among more, a weight that one example alone uses in another way would hide behind rounding.
_EXAMPLES_AT_ONCE = 4096
# Activations of all examples that keep a GPU busy; those that a CPU's caches take, and examples that are worth a pass.
_BUSY = 1 << 24
_CACHED, _LEAST = 1 << 23, 256


def linearised(
    posterior: Gaussian,
    inputs: Any,
    *,
    forward: Forward | None = None,
    covariance: bool = False,
    joint: bool = False,
) -> Moments:
    """f(x; μ) and the diagonal of J Σ Jᵀ, in float32 or wider, in parts that fit `BUDGET` bytes.

    Per layer the contraction is in closed form, the layer's factors are dropped at once, and no (batch, outputs,
    parameters) tensor exists. Parameters that no known layer explains take autograd, example by example, with the same
    numbers. So do all of them where the inputs require gradients, which the moments then have.

    Args:
        forward: `forward(model, inputs)` for models whose call is unusual, or a question about a part of the outputs.
        covariance: the (outputs, outputs) blocks of each example too.
        joint: those between all examples too, (batch · outputs, batch · outputs).
    """
    posterior.require_proper()
    inputs = plain(inputs, graph=True)
    with evaluating(posterior.model):
        variances = [posterior.coordinate_variance]
        task = _Task(Call.of(posterior, forward), variances, posterior.curvature, covariance or joint)
        mean, variance, blocks, between = _between(task, inputs) if joint else (*_moments(task, inputs), None)
    block, whole = (None if each is None else each[0] for each in (blocks, between))
    return Moments(mean, variance[0], block, joint=whole)


def moments_under(
    posterior: Gaussian,
    variances: Sequence[Named],
    inputs: Any,
    *,
    forward: Forward | None = None,
    covariance: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same for k other variances of the posterior's coordinates, by parameter name, in one pass over the inputs.

    Returns:
        f(x; μ), (b, ...), variances, (k, b, ...), and covariances, (k, b, c, c), where asked for.
    """
    inputs = plain(inputs, graph=True)
    with evaluating(posterior.model):
        return _moments(_Task(Call.of(posterior, forward), variances, posterior.curvature, covariance), inputs)


def white_rows(posterior: Gaussian, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """f(x; μ), (b, c), and rows φ, (b, c, ·), with φ φᵀ = J Σ Jᵀ; both with gradients where the inputs have them."""
    task = _Task(Call.of(posterior, None), [posterior.coordinate_variance], posterior.curvature)
    with evaluating(posterior.model), torch.set_grad_enabled(has_graph(inputs)):
        return task.call.flat(task.call.mean, inputs), _white_rows(task, tuple(task.call.mean), inputs)[0]


# --- a batch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Task:
    """What is computed, whatever the inputs."""

    call: Call
    variances: Sequence[Named]
    structure: Diagonal
    covariance: bool = False


def _moments(task: _Task, inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mean (b, ...), variances (k, b, ...) and blocks (k, b, c, c), None where not asked for."""
    plan, size = plan_for(task.call, inputs), batch_size(inputs)
    if has_graph(inputs):
        mean = task.call(task.call.mean, inputs)
        why = "a gradient with respect to inputs needs the gradients of every output"
        done = [(mean, *_by_autograd(task, tuple(task.call.mean), inputs, mean[0].numel(), why))]
    else:
        step, at_once = _chunking(task, plan, size)
        done = [_chunk(task, plan, at_once, part) for part in parts(inputs, step)]
    mean, variance = torch.cat([part[0] for part in done]), torch.cat([part[1] for part in done], dim=1)
    blocks = torch.cat([part[2] for part in done], dim=1) if task.covariance else None
    return mean.to(variance.dtype), variance.reshape(-1, *mean.shape), blocks


def _chunking(task: _Task, plan: Plan, size: int) -> tuple[int, int]:
    """Examples and outputs at a time: four copies of the activations, and two for each output; one on a busy GPU."""
    like = next(iter(task.call.mean.values()))
    most = max(1, _BUSY // (plan.activations * size)) if like.is_cuda else _OUTPUTS_AT_ONCE
    at_once = plan.shape.numel() if task.covariance else min(plan.shape.numel(), most)
    while True:
        needed = plan.activations * like.element_size() * (4 + 2 * at_once if at_once > 1 else 3)
        if needed <= BUDGET:
            most = min(BUDGET // needed, size, _EXAMPLES_AT_ONCE)
            most = most if like.is_cuda else min(most, max(_LEAST, _CACHED // plan.activations))
            # In parts of about the same size.
            return math.ceil(size / math.ceil(size / most)), sys.maxsize if task.covariance else at_once
        if task.covariance or at_once == 1:
            cheaper = "variances alone (covariance=False)" if task.covariance else "draws of the weights"
            raise SettingError(
                f"one example needs about {needed:,} bytes, the memory budget is {BUDGET:,}: use {cheaper}, which "
                "needs less"
            )
        at_once //= 2


def _chunk(task: _Task, plan: Plan, at_once: int, inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variances (k, b, c) and blocks, which are empty where not asked for, of some examples, layer by layer."""
    run = examined(task.call, inputs, plan.shared, at_once)
    if not set(run.odd) <= set(plan.odd):
        check_alone(task.call, inputs, run.output)
    mean, finite, c = run.output.detach(), run.finite, run.flat.shape[1]
    variance = widened(run.flat.detach()).new_zeros(len(task.variances), len(mean), c)
    blocks = variance.new_zeros(*variance.shape, c if task.covariance else 0)
    if not bool(finite.all()):
        # Those that are no numbers leave the others alone.
        rows = finite.nonzero().flatten()
        variance, blocks = variance.fill_(torch.nan), blocks.fill_(torch.nan)
        if len(rows):
            _, variance[:, rows], blocks[:, rows] = _chunk(task, plan, at_once, chosen_examples(inputs, rows))
        return mean, variance, blocks
    run = _rotated(run, task.structure)
    # A forward pass may be one of 16 bits; sums are not.
    with torch.autocast(mean.device.type, enabled=False), torch.no_grad():
        _add_layers(task, run, at_once, variance, blocks)
    if task.covariance:
        variance = blocks.diagonal(dim1=2, dim2=3).clone()
    if run.odd:
        why = f"{len(run.odd)} parameters that no known layer explains (first {run.odd[0]!r}) need their gradients"
        more = _by_autograd(task, run.odd, inputs, c, why)
        variance, blocks = variance + more[0], blocks + more[1]
    return mean, variance, blocks


# --- layer by layer -------------------------------------------------------------------------------------------------


def _add_layers(task: _Task, run: Pass, at_once: int, variance: Tensor, blocks: Tensor) -> None:
    """Add every explained parameter's share to variances (k, b, c), or to blocks (k, b, c, c) where asked for."""
    size, c = run.flat.shape
    edges = [use.edge for use in run.explained]
    for start in range(0, c if edges else 0, at_once):
        stop = min(start + at_once, c)
        ds = run.ds or pulled_back(run.flat, edges, start, stop)
        # Uses of one parameter belong together, since their gradients add before they are squared.
        groups: dict[tuple[str, int | None], list[Pulled]] = {}
        for use, d in zip(run.explained, ds, strict=True):
            if d is not None:
                part = use.start if use.rotation is None else None
                groups.setdefault((use.name, part), []).append((use, d))
        matrices: dict[Any, list[list[Pulled]]] = {}
        for key, pulled in groups.items():
            matrices.setdefault(columns_of(pulled) or key, []).append(pulled)
        for columns in matrices.values():
            if len(columns) > 1:
                share = contracted_columns([pulled[0] for pulled in columns], size, task.variances, task.covariance)
            else:
                name = columns[0][0][0].name
                share = contracted(columns[0], size, [s[name] for s in task.variances], task.covariance)
            (blocks if task.covariance else variance[:, :, start:stop]).add_(share)


def _rotated(run: Pass, structure: Diagonal) -> Pass:
    """Uses in the coordinates of the structure; parameters used in ways that have no such form are odd.

    A bias that is a column of its matrix is done with it: all uses of the two must be at the same outputs.
    """
    if structure.independent:
        return run
    turns: dict[str, Rotation | InputSide] = {**structure.bases, **structure.inputs}
    places: dict[str, list[Any]] = {}
    odd = set(run.odd)
    for use in run.explained:
        places.setdefault(use.name, []).append(use.at)
        product, whole = isinstance(use, Product) and use.is_matrix, use.rows is None
        if (base := structure.bases.get(use.name)) is not None:
            # Rows are mixed by the left basis alone.
            has_form = (product and (whole or base.left is not None)) or (isinstance(use, Addend) and whole)
        else:
            has_form = use.name not in structure.inputs or (product and whole)
        odd |= set() if has_form else {use.name}
    columns = {side.bias: name for name, side in structure.inputs.items() if side.bias is not None}
    for bias, name in columns.items():
        if {name, bias} & odd or places.get(name) != places.get(bias):
            odd |= {name, bias}
    keep = [i for i, use in enumerate(run.explained) if use.name not in odd | columns.keys()]
    explained = [replace(use, rotation=turns.get(use.name)) for use in map(run.explained.__getitem__, keep)]
    return replace(run, explained=explained, odd=tuple(sorted(odd)), ds=run.ds and [run.ds[i] for i in keep])


# --- by autograd, example by example --------------------------------------------------------------------------------


def _by_autograd(task: _Task, names: Sequence[str], inputs: Any, outputs: int, why: str) -> tuple[Tensor, Tensor]:
    """The share of some parameters by their Jacobians, of as many examples at a time as the budget holds."""
    needed = outputs * sum(task.call.mean[name].numel() * task.call.mean[name].element_size() for name in names)
    if needed > BUDGET:
        raise SettingError(
            f"{why}, {needed:,} bytes per example, and the memory budget is {BUDGET:,}: draw weights, which needs less"
        )
    step, variance, blocks = max(1, BUDGET // max(1, 4 * needed)), [], []
    with torch.set_grad_enabled(has_graph(inputs)):
        for part in parts(inputs, step):
            white = _white_rows(task, names, part)
            variance.append(white.square().sum(dim=-1))
            blocks.append(white @ white.mT if task.covariance else white[..., :0])
    return torch.cat(variance, dim=1), torch.cat(blocks, dim=1)


def _between(task: _Task, inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variances, blocks and J Σ Jᵀ of all outputs of all examples, (k, b c, b c)."""
    graph = has_graph(inputs)
    plan_for(task.call, inputs)
    with torch.set_grad_enabled(graph):
        mean = task.call(task.call.mean, inputs)
    b, c = len(mean), mean[0].numel()
    # Rows, white rows, and what made them.
    cost = {name: 3 * b * c * leaf.numel() * leaf.element_size() for name, leaf in task.call.mean.items()}
    apart = not graph and task.structure.by_parameter and sum(cost.values()) > BUDGET
    groups = [(name,) for name in cost] if apart else [tuple(cost)]
    needed = max(sum(cost[name] for name in group) for group in groups)
    if needed > BUDGET:
        raise SettingError(
            f"the covariance between {b} examples of {c} outputs needs about {needed:,} bytes at once, and the memory "
            f"budget is {BUDGET:,}: take fewer examples, or draw weights, which estimates it"
        )
    with torch.set_grad_enabled(graph):
        white = (_white_rows(task, group, inputs).flatten(1, 2) for group in groups)
        total = reduce(torch.add, (rows @ rows.mT for rows in white))
        blocks = total.view(len(total), b, c, b, c).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        variance = blocks.diagonal(dim1=2, dim2=3).reshape(-1, *mean.shape)
    return mean.to(total.dtype), variance, blocks, total


def _white_rows(task: _Task, names: Sequence[str], inputs: Any) -> Tensor:
    """For each Σ rows φ, (k, b, c, ·), with φ φᵀ = J Σ Jᵀ, of some parameters."""
    rows = {name: widened(j) for name, j in jacobians(task.call, names, inputs).items()}
    turned = task.structure.into(rows)
    roots = [{name: s[name].sqrt() for name in turned} for s in task.variances]
    white = [[(row * root[n].to(row)).unsqueeze(-1).flatten(2) for n, row in turned.items()] for root in roots]
    return torch.stack([torch.cat(parts, dim=2) for parts in white])


def jacobians(call: Call, names: Sequence[str], inputs: Any) -> dict[str, Tensor]:
    """∂f/∂w of some parameters, (b, c, *shape): vectorised where the model allows it, else example by example."""
    size = batch_size(inputs)
    leaves, spec = pytree.tree_flatten(inputs)
    batched = [is_batched(leaf, size) and not is_ragged(inputs) for leaf in leaves]

    def single(chosen: dict[str, Tensor], *varying: Tensor) -> Tensor:
        rows = iter(varying)
        example = [next(rows).unsqueeze(0) if b else leaf for b, leaf in zip(batched, leaves, strict=True)]
        return call.flat({**call.mean, **chosen}, pytree.tree_unflatten(example, spec))[0]

    chosen, varying = {name: call.mean[name] for name in names}, [x for x, b in zip(leaves, batched, strict=True) if b]
    try:
        rows: dict[str, Tensor] = vmap(jacrev(single), in_dims=(None, *[0] * len(varying)))(chosen, *varying)
        # torch's vmap of a vmap gets some operations wrong (PReLU).
        last = one_jacobian(call, names, examples(inputs, size - 1, size))
        if all(agree(rows[name][-1], truth) for name, truth in last.items()):
            return rows
    except (RuntimeError, ValueError):
        # A model that vmap does not take, or examples that are no rows.
        pass
    loop = [one_jacobian(call, names, example) for example in parts(inputs, 1)]
    return {name: torch.stack([row[name] for row in loop]) for name in names}


def one_jacobian(call: Call, names: Sequence[str], example: Any) -> dict[str, Tensor]:
    """∂f/∂w of one example, (c, *shape), by plain reverse passes."""
    leaves = {name: call.leaves[name] for name in names}
    with torch.enable_grad():
        flat = call.flat({**call.mean, **leaves}, example)
    rows = torch.eye(flat.shape[1], dtype=flat.dtype, device=flat.device).unsqueeze(1)
    # This example may not reach any of them.
    grads = batched_grad(flat, list(leaves.values()), rows) if flat.requires_grad else [None] * len(leaves)
    return {
        name: leaf.new_zeros(flat.shape[1], *leaf.shape) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
