"""One forward pass of a posterior's mean network: its outputs, and the pooled inputs of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesadam.leverage.layers import Layer, layer_inputs
from bayesadam.predict.call import Call, Forward, batch_size, evaluating, plain
from bayesadam.predict.moments import parameters_at_mean


def observed(
    gaussian: Any, layers: Sequence[Layer], inputs: Any, forward: Forward | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """f(x; μ), (batch, ...), in float32 or wider, and the pooled input of each layer, (batch, width) by its module."""
    inputs, call = plain(inputs), Call(gaussian.model, forward)
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    params = parameters_at_mean(gaussian)
    taps = layer_inputs(gaussian.model, layers, batch_size(inputs), mask)
    with evaluating(gaussian.model), torch.no_grad(), taps as seen:
        outputs = call(params, inputs)
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32)), seen
