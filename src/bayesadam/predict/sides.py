"""A = E[a aᵀ] of the inputs a of every layer, over a few hundred examples without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.predict.batches import batch_size, examples, for_model, inputs_of, is_loader
from bayesadam.predict.network import Call, Forward, Gaussian, evaluating, means, widened
from bayesadam.predict.plan import examined, plan_for
from bayesadam.predict.uses import Addend, Layout, Product, Use
from bayesadam.weights.inputs import InputSide

# Numbers that the inputs of a layer at all positions may take at once.
_AT_ONCE = 1 << 24
# A convolution's patches hold each input about so many times.
_PATCH = 9
# Wider layers keep their diagonal: A and its eigenvectors go with the square of the width.
WIDEST = 8192


def input_sides(posterior: Gaussian, batches: Any, *, forward: Forward | None = None) -> dict[str, InputSide]:
    """The input side of every matrix whose uses all are products with the same inputs, by the name of the weight.

    A position counts as much as any other of its example, and examples count alike. Left out are grouped convolutions,
    embeddings and what is tied to one, projections of different inputs that share a matrix, and layers that are not
    known or do not explain their weight.

    Args:
        batches: a batch, or a loader, whose targets are left out.
        forward: `forward(model, inputs)` for models whose call is unusual.
    """
    call, params = Call(posterior.model, forward), means(posterior)
    leaves = {name: mu.requires_grad_() for name, mu in params.items()}
    sides: dict[str, _Side | None] = {}
    first: set[str] | None = None
    n = 0
    with evaluating(call.model):
        for batch in batches if is_loader(batches) else [batches]:
            # In a batch by itself nothing is a target.
            inputs = inputs_of(batch, call.model) if is_loader(batches) else for_model(batch, call.model)
            plan, size = plan_for(call, leaves, inputs), batch_size(inputs)
            step = max(1, _AT_ONCE // max(1, _PATCH * plan.widest))
            for start in range(0, size, step):
                some = examples(inputs, start, start + step)
                run = examined(call, leaves, some, plan.shared)
                if not bool(run.finite.all()):
                    raise MatchError("the network's outputs for these inputs are not finite: look for NaN in them")
                found = _sides(run.uses, run.layouts, batch_size(some))
                first = first or set(found)
                if first != set(found):
                    raise MatchError("the network runs other layers for some of these inputs: leave those out")
                for name, side in found.items():
                    sides[name] = side if n == 0 else _sum(sides[name], side)
                n += batch_size(some)
    if not n:
        raise MatchError("there are no inputs: the loader gave no batch (a generator that was used up?)")
    return {name: side.over(n, params[name]) for name, side in sides.items() if side is not None}


@dataclass(frozen=True, eq=False)
class _Side:
    """Σ a aᵀ of a layer's inputs, each example's mean over positions, the name of its bias, and how W is kept."""

    total: Tensor
    bias: str | None
    inputs_first: bool

    def over(self, n: int, weight: Tensor) -> InputSide:
        """A of n examples."""
        a = (self.total / n).to(weight)
        return InputSide.of(a.detach(), weight.shape, self.bias, inputs_first=self.inputs_first)


def _sum(a: _Side | None, b: _Side | None) -> _Side | None:
    if a is None or b is None or (a.bias, a.inputs_first) != (b.bias, b.inputs_first):
        return None
    return _Side(a.total + b.total, a.bias, a.inputs_first)


def _sides(uses: Sequence[Use], layouts: Sequence[Layout | None], size: int) -> dict[str, _Side | None]:
    """By weight the inputs of its uses; None where it has no input side."""
    biases = {use.at: use.name for use in uses if isinstance(use, Addend) and use.scale is None}
    by_name: dict[str, list[tuple[Use, Layout | None]]] = {}
    for use, layout in zip(uses, layouts, strict=True):
        if not isinstance(use, Addend):
            by_name.setdefault(use.name, []).append((use, layout))
    return {name: _side(pairs, [biases.get(use.at) for use, _ in pairs], size) for name, pairs in by_name.items()}


def _side(pairs: Sequence[tuple[Use, Layout | None]], biases: Sequence[str | None], size: int) -> _Side | None:
    # Rows of one matrix that project the same tensor are one use.
    alike: dict[int, tuple[Product, Layout]] = {}
    for use, layout in pairs:
        if not isinstance(use, Product) or layout is None:
            return None
        if use.convolution is not None and use.convolution.groups != 1:
            return None
        alike[id(use.input)] = use, layout
    first = next(iter(alike.values()))[0]
    if len(set(biases)) > 1 or (first.rows is not None and len(alike) > 1):
        return None
    bias = biases[0]
    a = torch.cat([u.inputs(lay, size, constant=bias is not None).flatten(0, 1) for u, lay in alike.values()], dim=1)
    if a.shape[2] > WIDEST:
        return None
    rows = widened(a.flatten(0, 1))
    return _Side((rows.T @ rows).double() / a.shape[1], bias, first.inputs_first)
