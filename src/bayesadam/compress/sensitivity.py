"""How much a network's outputs depend on each unit, as a second moment of gradients sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bayesadam._warnings import warn
from bayesadam.errors import MatchError
from bayesadam.predict.batches import parts
from bayesadam.predict.matrices import Matrix
from bayesadam.predict.network import Call, evaluating, output_tensor, swapped, widened

# Examples whose gradients are summed: each sum is one draw of a square whose mean is that over examples.
_TOGETHER = 32


def sensitivities(call: Call, batches: Iterable[Any], matrices: Mapping[str, Matrix]) -> dict[str, Tensor]:
    """Σ_j E[G_ij²] of the rows of some matrices, (groups, outputs, 1), G = ∂(Σ ε f)/∂W, ε = ±1 at random.

    No labels are needed, and two networks get the same signs. Empty, with a warning, where gradients cannot be had.
    """
    live = {name: p.detach().requires_grad_() for name, p in call.model.named_parameters()}
    weights, draw = [live[matrix.weight] for matrix in matrices.values()], torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    with evaluating(call.model), torch.enable_grad(), swapped(call.model, live):
        for batch in batches:
            for part in parts(batch, _TOGETHER):
                try:
                    f = widened(output_tensor(call.run(part)))
                    signs = torch.randint(2, f.shape, generator=draw, device="cpu").to(f) * 2 - 1
                    gradients = torch.autograd.grad((f * signs).sum(), weights, allow_unused=True)
                except torch.OutOfMemoryError:
                    raise
                except (MatchError, RuntimeError, TypeError) as error:
                    warn(
                        f"units are ranked by the dense network alone, since its outputs have no gradients ({error}): "
                        "pass forward=lambda model, batch: ... that returns one tensor of torch operations"
                    )
                    return {}
                for (name, matrix), g in zip(matrices.items(), gradients, strict=True):
                    if g is not None:
                        found[name] = found.get(name, 0) + widened(matrix.into(g)).square().sum(dim=2, keepdim=True)
    return found
