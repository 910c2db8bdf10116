"""Which layer explains which parameter: compared with autograd in the very pass that is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from bayesadam.errors import BayesAdamError, MatchError
from bayesadam.predict.batches import batch_size, chosen_examples, examples, is_ragged
from bayesadam.predict.network import Call, mixes_examples, require_rows, widened
from bayesadam.predict.recording import recorded
from bayesadam.predict.uses import Addend, Use, batch_first, joined

_PLANS_KEPT = 256


# --- one pass -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass of some examples, and what explains its gradients.

    Attributes:
        output, flat: (b, ...) and (b, c), with the graph.
        uses: every use of a parameter by a known layer, in order.
        explained: those that agree with autograd, in the layout in which they do.
        odd: parameters that the uses do not explain, whose gradients go through autograd, example by example.
        ds: D at each explained use for the unit vectors of all outputs, (c, ...), where they were asked for.
    """

    output: Tensor
    flat: Tensor
    uses: Sequence[Use]
    explained: Sequence[Use] = ()
    odd: tuple[str, ...] = ()
    ds: Sequence[Tensor | None] | None = None

    @property
    def finite(self) -> Tensor:
        """The examples whose outputs are numbers, (b,); where some are not, nothing is explained."""
        return self.flat.detach().isfinite().all(dim=1)


def examined(call: Call, inputs: Any, shared: tuple[str, ...] = (), at_once: int = 0) -> Pass:
    """Run the model, and keep those uses that agree with autograd.

    With random r and s, Σ_b s_b ∂(r · f_b)/∂w is computed twice: by autograd, and from the layers' own factors example
    by example, in each way in which the examples may lie in a layer's tensors. They differ as soon as a weight is used
    elsewhere too, examples are mixed up, or a layer is not what it seems. It is one backward pass more where there are
    at most `at_once` outputs, of which `ds` are then kept, and else two.

    Parameters of `shared` whose copies the model does not take, or not rightly, are left as they are.
    """
    while shared:
        try:
            run = _examined(call, inputs, shared, at_once)
        except Exception:  # Whatever a model raises that is given tensors of other shapes.
            break
        if not set(run.odd) & set(shared):
            return run
        shared = tuple(name for name in shared if name not in run.odd)
    return _examined(call, inputs, (), at_once)


def _examined(call: Call, inputs: Any, shared: tuple[str, ...], at_once: int) -> Pass:
    size = batch_size(inputs)
    with torch.enable_grad():
        uses, output = recorded(call, inputs, shared)
        _check_output(output, size)
        flat, generator = output.reshape(size, -1), torch.Generator().manual_seed(0)
        if not bool(flat.isfinite().all()):
            return Pass(output, flat, uses)
        r = torch.randn(flat.shape[1], generator=generator).to(flat)
        r = r if len(r) > 1 else torch.ones_like(r)
        # Signs alternate, so that a wrong layout is far off and not hidden behind the average.
        s = ((torch.rand(size, generator=generator) + 0.5) * (-1.0) ** torch.arange(size)).to(flat)
        outlets = list(dict.fromkeys(outlet for use in uses for outlet in use.outlets))
        ends = [edge for edge, _ in outlets]
        grads = vector_jacobian(flat, [*call.leaves.values(), *ends], s[:, None] * r)
    edges, ds = [*ends, *(use.edge for use in uses)], None
    if flat.shape[1] <= at_once:
        ds = pulled_back(flat, edges, 0, flat.shape[1])
        along = [d if d is None else d[0] if len(d) == 1 else torch.tensordot(r.to(d), d, dims=1) for d in ds]
    else:
        along = list(vector_jacobian(flat, edges, r.expand_as(flat)))
    reached = {i: d for i, d in enumerate(along[len(ends) :]) if d is not None}
    if not reached and all(grad is None for grad in grads):
        raise _independent("does forward(model, inputs) call the model that it is given, not another of that name")
    weighted = grads[len(call.leaves) :]
    apart = {
        outlet for outlet, d, of_s in zip(outlets, along, weighted, strict=False) if _is_apart(outlet[1], d, of_s, s)
    }
    explained: dict[int, Use] = {}
    odd = []
    with torch.autocast(flat.device.type, enabled=False), torch.no_grad():
        for name, grad in zip(call.leaves, grads, strict=False):
            numbers = [i for i in reached if uses[i].name == name]
            if any(uses[i].outlets for i in numbers):
                # Autograd knows of none of these uses: a gradient is that of others.
                right = grad is None and all(apart.issuperset(uses[i].outlets) for i in numbers)
                explained |= {i: uses[i] for i in numbers if right}
                odd += [] if right else [name]
            elif grad is not None:
                matches = _agreeing([(uses[i], reached[i]) for i in numbers], widened(dense(grad)), s)
                explained |= zip(numbers, matches or (), strict=False)
                odd += [name] if matches is None else []
    order = sorted(explained)
    ds = ds and [ds[len(ends) + i] for i in order]
    return Pass(output, flat, uses, [explained[i] for i in order], tuple(odd), ds)


def _is_apart(batch: int, d: Tensor | None, weighted: Tensor | None, s: Tensor) -> bool:
    """Whether weights s of the examples weight their rows of D, in this dimension."""
    if d is None or weighted is None:
        return d is weighted
    try:
        rows, of_s = (batch_first(g.movedim(batch, 0), len(s), 0).flatten(1) for g in (d, weighted))
    except RuntimeError:
        return False
    # All entries of a row have a part in one number.
    mix = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(1)).to(rows)
    return agree((rows @ mix) * s.to(rows), of_s @ mix)


def pulled_back(flat: Tensor, edges: Sequence[GradientEdge], start: int, stop: int) -> Sequence[Tensor | None]:
    """D of the outputs `start` to `stop` at every edge, (outputs, ...); None without a path.

    Examples are independent, so that D of their sum separates them.
    """
    units = F.one_hot(torch.arange(start, stop, device=flat.device), flat.shape[1]).to(flat)
    return batched_grad(flat, edges, units[:, None].expand(-1, len(flat), -1))


def batched_grad(flat: Tensor, tensors: Sequence[Any], rows: Tensor) -> Sequence[Tensor | None]:
    """Vector-Jacobian products for every row, (rows, *shape) for each tensor or edge; None without a path."""
    try:
        if len(rows) > 1:
            return vector_jacobian(flat, tensors, rows, is_grads_batched=True)
    except RuntimeError:
        # Some operation cannot be batched: one row after the other.
        pass
    each = zip(*(vector_jacobian(flat, tensors, row) for row in rows), strict=True)
    return [None if grads[0] is None else _stacked([dense(grad) for grad in grads]) for grads in each]


def _stacked(grads: list[Tensor]) -> Tensor:
    return grads[0][None] if len(grads) == 1 else torch.stack(grads)


def vector_jacobian(flat: Tensor, tensors: Sequence[Any], row: Tensor, **options: bool) -> Sequence[Tensor | None]:
    """rowᵀ ∂flat/∂tensor for each tensor or edge; None without a path."""
    if not tensors:
        return ()
    grads: Sequence[Tensor | None] = torch.autograd.grad(
        flat, tensors, row, retain_graph=True, allow_unused=True, **options
    )
    return grads


def _agreeing(uses: Sequence[tuple[Use, Tensor]], truth: Tensor, s: Tensor) -> list[Use] | None:
    """Uses with D along r, in the layouts in which they come to the truth; None where there are none."""
    if uses and not joined([use for use, _ in uses]):
        return None
    # Under autocast D is of 16 bits where the weights are not.
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (s, *(d for _, d in uses)))
    # A GPU may take products of ten bits of mantissa.
    tolerance = min(4e-3, (10 if truth.is_cuda else 3) * eps**0.5)
    # Rounding alone may come to this much in half precision; a wrong layout is still farther off.
    error, best = 0.2 if eps > torch.finfo(torch.float32).eps else tolerance, None
    for attempt in range(max((len(use.layouts) for use, _ in uses), default=1)):
        tried = [replace(u, layouts=u.layouts[attempt:] or u.layouts[-1:]) if attempt else u for u, _ in uses]
        ours = torch.zeros_like(truth)
        try:
            for use, (_, d) in zip(tried, uses, strict=True):
                part = use.of(ours)
                part += use.total(d.to(ours.dtype), s.to(ours.dtype), part.shape)
        except (RuntimeError, IndexError, TypeError):
            continue
        if (found := disagreement(ours, truth)) <= error:
            error, best = found, tried
        elif best is None:
            # What cancels in theory, as gradients of the biases of attention's keys do, is nothing but rounding.
            rounding = sum(8 * eps * float(d.abs().sum()) for use, d in uses if isinstance(use, Addend))
            best = tried if float((ours - truth).norm()) <= rounding else None
        if error <= tolerance and best is not None:
            break
    return best


def agree(ours: Tensor, truth: Tensor) -> bool:
    """Equal but for rounding."""
    return disagreement(ours, truth) <= min(0.2, 10 * math.sqrt(torch.finfo(truth.dtype).eps))


def disagreement(ours: Tensor, truth: Tensor) -> float:
    """|ours − truth| over |truth|, in float32 or wider."""
    ours, truth = widened(ours.detach()), widened(truth.detach())
    return float((ours - truth).norm()) / (float(truth.norm()) or 1.0)


def dense(gradient: Tensor) -> Tensor:
    """A gradient with every entry: that of an embedding may come as the rows it looked up."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


# --- what is remembered of a model ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plan:
    """What a few examples told of a model: it saves time and memory, and no number depends on it.

    Attributes:
        shape: of one example's output.
        shared: parameters that all examples share as they are, such as position vectors: they are run with a copy for
            each example, so that the gradients of examples can be separated.
        odd: parameters that no layer explains.
        activations, widest: entries per example of all activations, and of the largest of them.
    """

    shape: torch.Size
    shared: tuple[str, ...]
    odd: tuple[str, ...]
    activations: int
    widest: int


_plans: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def plan_for(call: Call, inputs: Any) -> Plan:
    """The plan of a model for a kind of inputs, remembered."""
    plans = _plans.setdefault(call.model, {})
    # The code alone of a forward, which may hold the model: it would never be freed.
    code = getattr(getattr(call.forward, "__func__", call.forward), "__code__", type(call.forward))
    # Of graphs, the first: others differ in size alone, and layers that it does not run are examined in their own pass.
    ragged = is_ragged(inputs)
    parts, spec = pytree.tree_flatten(inputs[0] if isinstance(inputs, list) and ragged else inputs)
    kind = (code, ragged, str(spec), *(_kind(part, whole=not ragged) for part in parts))
    if kind not in plans:
        if len(plans) >= _PLANS_KEPT:
            plans.pop(next(iter(plans)))
        plans[kind] = _planned(call, inputs)
    return plans[kind]


def _kind(part: Any, *, whole: bool) -> Any:
    """All of a part of the inputs that a plan may depend on: no object's name in memory, nor what it holds."""
    if isinstance(part, Tensor):
        return part.shape[1:] if whole else part.dim(), part.dtype
    return part if whole and isinstance(part, bool | int | float | str) else type(part)


def _planned(call: Call, inputs: Any) -> Plan:
    """Up to three examples are run; copies are tried for the parameters that no layer explains."""
    size = min(max(2, batch_size(inputs)), 3)
    probe = chosen_examples(inputs, torch.arange(size) % batch_size(inputs))
    run = examined(call, probe)
    check_alone(call, probe, run.output)

    def is_separable(name: str) -> bool:
        """Whether the model comes to the same with a copy of the parameter for each example, and explains it then."""
        again = examined(call, probe, (name,))
        same = name not in again.odd and again.output.shape == run.output.shape
        return same and agree(again.output, run.output)

    shared = tuple(filter(is_separable, run.odd))
    odd = tuple(name for name in run.odd if name not in shared)
    seen = [shape.numel() for shape in {use.at: use.shape for use in run.uses}.values()]
    activations, widest = max(sum(seen), run.output.numel()), max(*seen, run.output.numel(), 0)
    return Plan(run.output.shape[1:], shared, odd, activations // size, widest // size)


def _check_output(output: Tensor, size: int) -> None:
    """The batch comes first, and the output depends on the weights."""
    require_rows(output, size)
    if not output.requires_grad:
        raise _independent("is there a torch.no_grad(), a detach() or an argmax in its forward")
    if output.numel() == 0:
        raise MatchError(f"the model returned no outputs: its output has shape {tuple(output.shape)}")


def _independent(doubt: str) -> BayesAdamError:
    return BayesAdamError(
        "the model's output does not depend on the posterior's parameters in a way that can be differentiated: "
        f"{doubt}?"
    )


def check_alone(call: Call, inputs: Any, output: Tensor) -> None:
    """Refuse a model that gives another output for the last example of a batch when that is run alone."""
    size = batch_size(inputs)
    last, among, failure = examples(inputs, size - 1, size), output[-1:].detach(), None
    try:
        with torch.no_grad():
            alone, again = call(call.mean, last), call(call.mean, last)
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, BayesAdamError):
            raise
        failure = error
    else:
        # Outputs that are not finite are reported elsewhere.
        finite = torch.isfinite(among)
        if alone.shape == among.shape and agree(alone[finite], among[finite]):
            return
        if again.shape == alone.shape and not torch.equal(again, alone):
            raise BayesAdamError(
                "the model gives something else each time it is run on the same example, in evaluation mode: something "
                "in it is random, such as functional.dropout without training=self.training. Use nn.Dropout instead"
            )
    raise mixes_examples(failure) from failure
