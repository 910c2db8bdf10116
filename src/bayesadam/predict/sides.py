"""A = E[a aᵀ] of the inputs a of every layer, over a few hundred examples without labels: forward passes alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.gaussian.inputs import InputSide
from bayesadam.gaussian.structure import Named
from bayesadam.predict.call import Call, batch_size, evaluating, examples
from bayesadam.predict.layers import ConvolutionUse, Layout, ProductUse, SumUse, TransposedMatrixUse, Use
from bayesadam.predict.plan import plan_for, recorded

# Numbers that the inputs of a layer at all positions may take at once.
_AT_ONCE = 1 << 24
# A convolution's patches hold each input about so many times.
_PATCH = 9
# Wider layers keep their diagonal: A and its eigenvectors go with the square of the width.
WIDEST = 8192


def input_sides(call: Call, params: Named, batches: Iterable[Any]) -> dict[str, InputSide]:
    """The input side of every matrix whose uses all are products with the same inputs, by the name of the weight.

    A position counts as much as any other of its example, and examples count alike. Left out are grouped convolutions,
    embeddings and what is tied to one, projections of different inputs that share a matrix, and layers that are not
    known; what the plan cannot explain is.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    sums: dict[str, Tensor] = {}
    about: dict[str, tuple[str | None, bool] | None] = {}
    n = 0
    with evaluating(call.model):
        for batch in batches:
            plan, size = plan_for(call, params, batch), batch_size(batch)
            step = max(1, _AT_ONCE // max(1, _PATCH * plan.widest))
            for first in range(0, size, step):
                some = examples(batch, first, first + step)
                with torch.enable_grad():
                    uses, _ = recorded(call, leaves, some, plan.repeated)
                if tuple((use.name, type(use)) for use in uses) != plan.uses:
                    raise MatchError("the network runs other layers for some of these inputs: leave those out")
                count = batch_size(some)
                for name, found in _products(uses, plan.layouts).items():
                    _add(name, found, count, sums, about)
                n += count
    if not n:
        raise MatchError("there are no inputs: the loader gave no batch (a generator that was used up?)")
    lost = next((name for name, total in sums.items() if not bool(total.isfinite().all())), None)
    if lost is not None:
        raise MatchError(f"the inputs of the layer of {lost!r} are not finite: look for NaN in what was given")
    return {
        name: InputSide.of((sums[name] / n).to(params[name]), params[name].shape, own[0], inputs_first=own[1])
        for name, own in about.items()
        if own is not None
    }


Found = list[tuple[ProductUse, Layout, str | None]]


def _products(uses: list[Use], layouts: tuple[Layout | None, ...]) -> dict[str, Found | None]:
    """By weight its uses as products, with the name of the bias added to each; None where it has no input side."""
    biases = {use.at: use for use in uses if isinstance(use, SumUse) and use.scale is None}
    found: dict[str, Found | None] = {}
    for use, layout in zip(uses, layouts, strict=True):
        if isinstance(use, SumUse):
            continue
        known = isinstance(use, ProductUse) and layout is not None
        known = known and not (isinstance(use, ConvolutionUse) and use.module.groups != 1)
        before = found.setdefault(use.name, [])
        if before is None or not known:
            found[use.name] = None
            continue
        assert isinstance(use, ProductUse)
        assert layout is not None
        bias = biases.get(use.at)
        before.append((use, layout, None if bias is None else bias.name))
    return found


def _add(
    name: str, found: Found | None, size: int, sums: dict[str, Tensor], about: dict[str, tuple[str | None, bool] | None]
) -> None:
    """Add Σ a aᵀ of a layer's inputs, each example's mean over positions."""
    if found is None or (name in about and about[name] is None):
        about[name] = None
        return
    # Rows of one matrix that project the same tensor are one use.
    alike = {id(use.input): (use, layout) for use, layout, _ in found}
    biases, sliced = {bias for *_, bias in found}, found[0][0].rows is not None
    own = next(iter(biases)), isinstance(found[0][0], TransposedMatrixUse)
    if len(biases) > 1 or (sliced and len(alike) > 1) or about.get(name, own) != own:
        about[name] = None
        return
    about[name] = own
    parts = [use.inputs(layout, size, constant=own[0] is not None).flatten(0, 1) for use, layout in alike.values()]
    a = torch.cat(parts, dim=1)
    if a.shape[2] > WIDEST:
        about[name] = None
        return
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    flat = a.flatten(0, 1)
    total = (flat.T @ flat).double() / a.shape[1]
    sums[name] = total if name not in sums else sums[name] + total
