"""A smaller network of the same function: units that do nothing are taken out of its layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._alone import in_eval_mode, unwrap
from bayesadam.errors import MatchError
from bayesadam.pruning.apply import copied, prune
from bayesadam.pruning.graph import Layer, Layout, Reader, Seen, Units, arguments, understand

# Of the largest output; sums are taken in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def shrink(model: nn.Module, masks: Mapping[str, Tensor] | None = None, *, example_input: Any) -> nn.Module:
    """A new model without the units that do nothing; in evaluation it computes the same, and the original is untouched.

    A unit of a linear or convolutional layer goes where no layer reads it, or where all its incoming weights are 0: its
    activation is then the constant a(b), and goes into the bias of the layers that read it,

        b' = b + Σ_units W[:, unit] a(b_unit),

    unless a convolution's zero padding would show. Repeated until nothing changes; each layer keeps at least one unit, and
    the model its inputs and outputs. The way from layer to layer is found by torch.fx through activations, dropout,
    batch norms, pooling and flattening. Units that pass through anything else (additions, layer norms, attention, groups,
    tied or hooked layers) stay.

    Args:
        masks: weights to set to 0 first; None where they are 0 already.
        example_input: a batch that the model takes (a tensor, a tuple of arguments, a mapping of keywords). The outputs on it
            must agree, or this raises.
    """
    small = copied(unwrap(model))
    if masks is not None:
        prune(small, masks)
    with torch.no_grad(), in_eval_mode(small):
        expected = _outputs(small, example_input)
        network = understand(small, example_input)
        seen = network.seen(example_input)
        # A sum, not `any`: every round goes over all layers.
        while sum(_take_out(units, seen) for units in network.units):
            seen = network.seen(example_input)
        _compare(expected, _outputs(small, example_input))
    return small


def _take_out(units: Units, seen: Mapping[str, Seen]) -> bool:
    """Take out the units that nothing reads and those that are constant; whether there were any."""
    width = units.width
    constant = (units.layer.weight.flatten(1) == 0).all(1)
    unread = torch.ones_like(constant)
    for reader in units.readers:
        unread &= (reader.by_unit(reader.layer.weight, width) == 0).all(3).all(1).all(0).to(unread.device)
        constant &= _foldable(reader, seen[reader.name], width).to(constant.device)
    gone = unread | constant
    if bool(gone.all()):
        gone[0] = False
    if not bool(gone.any()):
        return False
    remaining = (~gone).nonzero()[:, 0]
    folded = (gone & ~unread).nonzero()[:, 0]
    for reader in units.readers:
        if len(folded):
            _fold(reader, seen[reader.name], width, folded)
        _keep_inputs(reader, remaining, width)
    for norm, layout in units.norms:
        _keep_channels(norm, layout, remaining, width)
    _keep_outputs(units.layer, remaining)
    return True


def _foldable(reader: Reader, seen: Seen, width: int) -> Tensor:
    """Units whose constant the layer's bias can take over."""
    zero = seen.zero.view(reader.layout.outer, width, -1).all(2).all(0)
    shows = reader.padded or _pads_zeros(reader.layer)
    return zero if shows else torch.ones_like(zero)


def _pads_zeros(layer: Layer) -> bool:
    if isinstance(layer, nn.Linear) or layer.padding_mode != "zeros":
        return False
    if isinstance(layer.padding, str):
        return layer.padding == "same" and any(size > 1 for size in layer.kernel_size)
    return any(layer.padding)


def _fold(reader: Reader, seen: Seen, width: int, units: Tensor) -> None:
    """b + Σ W a over the constant units."""
    layer, weight = reader.layer, reader.by_unit(reader.layer.weight.detach(), width)
    units = units.to(weight.device)
    values = seen.first.view(1, reader.layout.outer, width, -1)[:, :, units]
    added = (weight[:, :, units].cpu().double() * values.cpu().double()).sum((1, 2, 3))
    if bool((added != 0).any()):
        bias = added if layer.bias is None else layer.bias.detach().cpu().double() + added
        layer.bias = _parameter(bias.to(weight), layer.weight if layer.bias is None else layer.bias)


def _keep_inputs(reader: Reader, remaining: Tensor, width: int) -> None:
    layer = reader.layer
    columns = reader.layout.positions(remaining.to(layer.weight.device), width)
    layer.weight = _parameter(layer.weight.detach()[:, columns], layer.weight)
    setattr(layer, "in_features" if isinstance(layer, nn.Linear) else "in_channels", len(columns))


def _keep_outputs(layer: Layer, remaining: Tensor) -> None:
    layer.weight = _parameter(layer.weight.detach()[remaining], layer.weight)
    if layer.bias is not None:
        layer.bias = _parameter(layer.bias.detach()[remaining], layer.bias)
    setattr(layer, "out_features" if isinstance(layer, nn.Linear) else "out_channels", len(remaining))


def _keep_channels(norm: nn.Module, layout: Layout, remaining: Tensor, width: int) -> None:
    channels = layout.positions(remaining, width)
    for key, parameter in norm._parameters.items():
        if parameter is not None:
            norm._parameters[key] = _parameter(parameter.detach()[channels.to(parameter.device)], parameter)
    for key, buffer in norm._buffers.items():
        if buffer is not None and buffer.dim():
            norm._buffers[key] = buffer[channels.to(buffer.device)].clone()
    norm.num_features = len(channels)  # type: ignore[assignment]


def _parameter(values: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(values.clone(), requires_grad=like.requires_grad)


def _outputs(model: nn.Module, example: Any) -> list[Tensor]:
    positional, named = arguments(example)
    return [leaf for leaf in pytree.tree_leaves(model(*positional, **named)) if isinstance(leaf, Tensor)]


def _compare(expected: list[Tensor], found: list[Tensor]) -> None:
    for wanted, got in zip(expected, found, strict=True):
        same = wanted.shape == got.shape
        if same and wanted.is_floating_point() and wanted.numel():
            largest = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
            bound = _TOLERANCE.get(wanted.dtype, 0.05) * largest + torch.finfo(wanted.dtype).eps
            same = torch.allclose(got, wanted, rtol=0.0, atol=bound, equal_nan=True)
        if not same:
            raise MatchError(
                "the smaller model does not compute what the original does on example_input, so it is not returned: is the "
                "model random in evaluation, or does its forward read the sizes of its layers? Please report it otherwise"
            )
