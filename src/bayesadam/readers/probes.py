"""A few of the weights that saved second moments belong to, by which others are refused."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bayesadam.readers.read import working_dtype

# Beside the second moments, where a saved posterior stands for an optimiser's state.
PROBE_KEY = "saved_posterior_probe"
_PROBES = 16
# Weights rounded to 8 bits are within a hundredth of what they were, those of another training are as far as their own size.
_TOLERANCE = 0.1


def probe(theta: Tensor) -> Tensor:
    """At most 16 evenly spaced weights.

    >>> probe(torch.arange(64.0).reshape(8, 8)).tolist()[:4]
    [0.0, 4.0, 8.0, 12.0]
    """
    flat = theta.detach().flatten()
    return flat[:: max(len(flat) // _PROBES, 1)][:_PROBES].to(working_dtype(theta.dtype), copy=True)


def same_weights(known: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> bool:
    """Whether probes by name differ by no more than a tenth of the known ones, in the mean square."""
    theirs, ours = (torch.cat([named[name].double().cpu() for name in known]) for named in (known, found))
    return bool((ours - theirs).norm() <= _TOLERANCE * theirs.norm())
