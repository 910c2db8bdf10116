"""Random networks of many families: predictions are right or refused with words, whatever the network."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from bayesadam.errors import BayesAdamError
from predict.cases_random import FAMILIES, STRUCTURES, error_of, mixed_precision

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:the posterior has .* gradients behind it"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated"),
]
# Matrices of one row and one column have no eigenbases.
_MAY_BE_REFUSED = "no parameter has eigenbases"


def outcome(seed: int) -> str:
    """Of the network, and the structure, that belong to a number."""
    family = FAMILIES[seed % len(FAMILIES)]
    structure = STRUCTURES[seed // len(FAMILIES) % len(STRUCTURES)]
    try:
        error = error_of(family, seed, structure)
    except BayesAdamError as refusal:
        if _MAY_BE_REFUSED in str(refusal):
            return "refused"
        raise
    tolerance = 2e-3 if family is mixed_precision else 1e-7
    assert error <= tolerance, f"{family.__name__}, seed {seed}, {structure}: an error of {error:.2g}"
    return "right"


# The first of every family, then those that were wrong, or an error of torch's, before.
@pytest.mark.parametrize("seed", [*range(len(FAMILIES)), 62, 64, 101, 207, 303])
def test_a_random_network_is_predicted_right(seed: int):
    assert outcome(seed) == "right"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_networks(part: int):
    counts: Counter[str] = Counter()
    for seed in range(100 * part, 100 * (part + 1)):
        torch.manual_seed(seed)
        counts[outcome(seed)] += 1
    assert counts["refused"] <= 3
