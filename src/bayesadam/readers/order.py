r"""What a state without names tells of its order: the second moments of a bias go with those of its own weight.

For a layer z = W a + b an example's gradients are δ aᵀ and δ, so that E[δ_i²] is in the mean of row i of W's second
moment as it is in entry i of b's. With ρ the rank correlation of the two over i, layers A and B of equal shapes were
confused where ρ(A, A) + ρ(B, B) is far below ρ(A, B) + ρ(B, A). It was never more than .3 below for networks in their
order, and .3 to 2.2 below in most of those with the weights of two layers exchanged. That both weight and bias of A
were exchanged with those of B, it cannot tell.
"""

import itertools
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from bayesadam._shards import is_sharded
from bayesadam._warnings import warn
from bayesadam.readers.match import IN_GROUPS, NAMES, ONE_GROUP, STATED, Match

# How far below is far; fewer units tell nothing.
_FAR, _FEWEST = 0.5, 8


def warn_of_order(match: Match, moments: Mapping[str, Tensor]) -> None:
    """Warn where second moments contradict the order by which they were matched, or where nothing could confirm it.

    One list of all the parameters of a model is in the model's order as a rule, and is let be.
    """
    if not match.why.startswith((ONE_GROUP, IN_GROUPS)):
        return
    layers = [name.removesuffix("bias") for name in moments if name.endswith("bias")]
    layers = [name for name in layers if f"{name}weight" in moments and moments[f"{name}bias"].numel() >= _FEWEST]
    kinds = {name: (moments[f"{name}weight"].shape, moments[f"{name}bias"].shape) for name in layers}
    pairs = [(a, b) for a, b in itertools.combinations(layers, 2) if kinds[a] == kinds[b]]
    pairs = [pair for pair in pairs if not any(is_sharded(moments[f"{name}weight"]) for name in pair)]
    agreement = {
        (a, b): _agreement(moments[f"{a}weight"], moments[f"{b}bias"])
        for pair in pairs
        for a, b in itertools.product(pair, repeat=2)
    }
    for a, b in pairs:
        if agreement[a, a] + agreement[b, b] < agreement[a, b] + agreement[b, a] - _FAR:
            warn(
                f"the optimiser's state has no names, and may be in another order than {match.why}: the second moments "
                f"of '{a}bias' go with those of '{b}weight', not '{a}weight', and the other way round. {NAMES}"
            )
            return
    shapes = Counter(tuple(entry.parameter.shape) for entry in match.entries)
    alike = sum(count for count in shapes.values() if count > 1)
    if alike and not pairs and match.why.startswith(IN_GROUPS) and not match.why.endswith(STATED):
        warn(
            f"the optimiser's state has no names: which of it belongs to which of {alike} parameters that share their "
            f"shapes is known by their order alone ({match.why}), and nothing in it confirms that. {NAMES}"
        )


def _agreement(weight: Tensor, bias: Tensor) -> float:
    """ρ of a weight's rows, or columns where these fit better, and a bias."""
    sides = [d for d in range(min(weight.dim(), 2)) if weight.shape[d] == len(bias)]
    rows = [weight.double().movedim(d, 0).flatten(1).mean(1) if weight.dim() > 1 else weight for d in sides]
    return max((float(torch.dot(_ranks(row), _ranks(bias))) for row in rows), default=0.0)


def _ranks(values: Tensor) -> Tensor:
    """Ranks with mean 0 and norm 1."""
    ranks = values.argsort(stable=True).argsort().double()
    centred: Tensor = ranks - ranks.mean()
    return centred.div_(centred.norm())
