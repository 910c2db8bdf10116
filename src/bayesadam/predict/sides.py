"""A = E[a aᵀ] of the inputs a of every layer, over a few hundred examples without labels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.predict.batches import batch_size, inputs_of, is_ragged, parts
from bayesadam.predict.network import Call, Forward, Gaussian, evaluating, widened
from bayesadam.predict.plan import Pass, examined, plan_for
from bayesadam.predict.uses import Addend, Product, Use
from bayesadam.weights.inputs import InputSide

# Numbers that the inputs of a layer at all positions may take at once.
_AT_ONCE = 1 << 24
# A convolution's patches hold each input about so many times.
_PATCH = 9
# Wider layers keep their diagonal: A and its eigenvectors go with the square of the width.
WIDEST = 8192
# Σ a aᵀ of a layer's inputs, each example's mean over positions, the name of its bias, and how W is kept.
_Side = tuple[Tensor, str | None, bool]


def input_sides(posterior: Gaussian, inputs: Any, *, forward: Forward | None = None) -> dict[str, InputSide]:
    """The input side of every matrix whose uses all are products with the same inputs, by the name of the weight.

    A position counts as much as any other of its example, and examples count alike. Left out are grouped convolutions,
    embeddings and what is tied to one, projections of different inputs that share a matrix, and layers that are not
    known or do not explain their weight.

    Args:
        inputs: a batch, or a loader, whose targets are left out.
        forward: `forward(model, inputs)` for models whose call is unusual.
    """
    call = Call.of(posterior, forward)
    sums: dict[str, _Side | None] = {}
    n = 0
    with evaluating(call.model):
        for batch in inputs_of(inputs, call.model):
            plan = plan_for(call, batch)
            # All rows of a graph that is alone are its own.
            step = 1 if is_ragged(batch) else max(1, _AT_ONCE // max(1, _PATCH * plan.widest))
            for part in parts(batch, step):
                run = examined(call, part, plan.shared)
                if not bool(run.finite.all()):
                    raise MatchError("the network's outputs for these inputs are not finite: look for NaN in them")
                sides = _sides(run, batch_size(part))
                if n and sides.keys() != sums.keys():
                    raise MatchError("the network runs other layers for some of these inputs: leave those out")
                sums = {name: _sum(sums[name], side) if n else side for name, side in sides.items()}
                n += batch_size(part)
    return {
        name: InputSide.of((total / n).to(call.mean[name]), call.mean[name].shape, bias, inputs_first=inputs_first)
        for name, side in sums.items()
        if side is not None
        for total, bias, inputs_first in [side]
    }


def _sum(a: _Side | None, b: _Side | None) -> _Side | None:
    return None if a is None or b is None or a[1:] != b[1:] else (a[0] + b[0], *a[1:])


def _sides(run: Pass, size: int) -> dict[str, _Side | None]:
    """By weight the inputs of its uses; None where it has no input side."""
    # A bias of more rows than the matrix, as attention has with keys of another width, is no column of it.
    biases = {(use.at, use.start): use.name for use in run.uses if isinstance(use, Addend) and use.scale is None}
    seen = Counter(use.name for use in run.uses if not isinstance(use, Addend))
    by_name = {name: [use for use in run.explained if use.name == name] for name in seen}
    return {
        name: _side(uses, {biases.get((use.at, use.start)) for use in uses}, size) if len(uses) == seen[name] else None
        for name, uses in by_name.items()
    }


def _side(uses: list[Use], biases: set[str | None], size: int) -> _Side | None:
    products = [use for use in uses if isinstance(use, Product) and use.is_matrix]
    # Rows of one matrix that project the same tensor are one use.
    alike = {id(use.input): use for use in products}
    if len(products) < len(uses) or len(biases) > 1 or (products[0].rows is not None and len(alike) > 1):
        return None
    (bias,) = biases
    a = torch.cat([use.inputs(size, constant=bias is not None).flatten(0, 1) for use in alike.values()], dim=1)
    # No row may have reached an expert.
    if a.shape[2] > WIDEST or not a.shape[1]:
        return None
    rows = widened(a.flatten(0, 1))
    return (rows.T @ rows).double() / a.shape[1], bias, products[0].inputs_first
