r"""Whether data that should be held out are those that the network was trained on.

Training ends where the gradient of the training loss vanishes. The last layer's is a sum over examples, of the slope
r = ∂loss/∂f times the inputs a of that layer. Of n examples that training never saw the sum is at least as large as
chance makes it, whatever the network: with z_i the gradients along the d strongest of their directions, each scaled to
a mean square of 1,

.. math::
    s = \tfrac1n \bigl|\textstyle\sum_i z_i\bigr|^2 \sim \chi^2_d

where they are 0 on average, and larger where they are not. Far less than χ² allows is the mark of training data, given
whole, after training that has come to rest: a learning rate that fell, or many epochs over little data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesadam.engine.gradients import loss_and_slope

# d, and the random products rᵀA a of slopes and inputs among whose combinations they are looked for.
_DIRECTIONS, _SKETCH = 8, 64
# So small a probability is none of chance; 3000 samples of held-out data, of 26 kinds of networks, had none below .01.
UNLIKELY = 1e-3


def balance(record: Any, outputs: Tensor, targets: Tensor, inputs: Tensor) -> float:
    """P(χ²_d ≤ s): how likely examples that were not trained on are to balance as well as these do.

    `outputs` are (n, outputs), `inputs` those of the last layer, (n, width). 1 where slopes are not finite.
    """
    _, slope = loss_and_slope(lambda f: record.loss(f, targets[None]), outputs[None])
    r, a = slope[0], torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(x.shape[1], _SKETCH, generator=generator).to(x) for x in (r, a))
    gradients = ((r @ left).double() * (a @ right).double()).cpu()
    if not bool(gradients.isfinite().all()):
        return 1.0
    energy, directions = torch.linalg.eigh(gradients.T @ gradients)
    kept = (energy > 1e-9 * energy[-1]).nonzero().flatten()[-_DIRECTIONS:]
    if not len(kept):
        return 1.0
    s = ((gradients.sum(dim=0) @ directions[:, kept]).square() / energy[kept]).sum()
    return float(torch.special.gammainc(torch.tensor(len(kept) / 2, dtype=s.dtype), s / 2))
