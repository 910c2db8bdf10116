"""How alike two tasks are, by the weights that networks fine-tuned on them depend on."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch

from bayesadam.errors import MatchError
from bayesadam.merging.checks import check_alike
from bayesadam.merging.experts import Source, expert_of, reading_of
from bayesadam.merging.report import Sums
from bayesadam.merging.stacks import stacked, tied_names
from bayesadam.readers import CheckpointKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


def similarity(a: Source, b: Source, **options: Unpack[CheckpointKeywords]) -> float:
    """Σ √(F_a F_b) / √(Σ F_a Σ F_b), the overlap of two networks' curvatures F = v̂: 1 for the same, 0 for disjoint ones.

    1 − the squared Hellinger distance between the curvatures as distributions over the weights; neither N, B nor the
    loss's units change it. The networks must be of one architecture; a parameter that one of them did not train counts as
    without curvature there.

    F is a number for each weight. Of Kronecker factors it is the diagonal of V: directions across the weights of a layer
    are not compared, and two networks that depend on different ones may overlap all the same.

    >>> from bayesadam import Posterior
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> def one(*variance):
    ...     return Posterior.from_moments(model, {"weight": torch.zeros(1, 2)}, {"weight": torch.tensor([variance])}, 10)
    >>> similarity(one(1.0, 1.0), one(5.0, 5.0)), round(similarity(one(1.0, 1.0), one(1.0, 1e6)), 3)
    (1.0, 0.708)

    Args:
        a: a posterior, a path of what a trainer saved, or a pair of paths (weights, optimiser's state).
        b: the other.
        **options: how files are read, see `CheckpointOptions`.
    """
    reading = reading_of(options)
    experts = [expert_of(source, f"model {i}", reading) for i, source in enumerate((a, b), 1)]
    check_alike(experts, {})
    tied, counts = tied_names(experts), torch.ones(2)
    trained = [n for n in experts[0].outline if n not in tied and any(n in expert.moments for expert in experts)]
    parts = (Sums.of(curvature, counts) for n in trained for _, curvature in stacked(experts, n, (1.0, 1.0)))
    total = reduce(Sums.__add__, parts, Sums.none(2))
    if not bool((total.curvature > 0).all()):
        raise MatchError("one of the two networks has no curvature at all: v̂ is 0 throughout")
    return total.overlap(0, 1)
