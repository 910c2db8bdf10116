"""How far a batch is from the running statistics that batch norm keeps in every checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from bayesadam.predict.call import Call, batch_size


def running_deviation(call: Call, params: Mapping[str, Tensor], inputs: Any) -> Tensor | None:
    """d(x) = exp mean_l log mean_c (m_lc(x) − μ_lc)²/σ²_lc, (batch,): None without running statistics.

    Over layers l and channels c of batch norm, m the mean of an example's activations over places, μ and σ² the running
    statistics. Curvature was measured on activations of d ≈ 1 in a layer of single places, less where m averages many;
    a linear layer's variance grows with the square of its inputs, and so does d.
    """
    layers = [m for m in call.model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    size, found = batch_size(inputs), []

    def take(layer: _BatchNorm, arguments: tuple[Tensor, ...]) -> None:
        x = arguments[0].detach()
        if x.shape[0] == size and layer.running_mean is not None and layer.running_var is not None:
            means = x.flatten(2).mean(dim=2) if x.dim() > 2 else x
            found.append(((means - layer.running_mean).square() / (layer.running_var + layer.eps)).mean(dim=1))

    handles = [layer.register_forward_pre_hook(take) for layer in layers]
    try:
        with torch.no_grad():
            if layers:
                call(params, inputs)
    finally:
        for handle in handles:
            handle.remove()
    tiny = torch.finfo(torch.float32).tiny
    return torch.stack([d.float().clamp(min=tiny).log() for d in found]).mean(dim=0).exp() if found else None
