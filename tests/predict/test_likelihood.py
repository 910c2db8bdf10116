"""The likelihood of a prediction: given, or the posterior's own, and never both at odds."""

from __future__ import annotations

import pytest
import torch

import bayesadam as ba
from bayesadam.errors import SettingError
from cases import mlp
from floats import assert_close
from predict.cases_networks import posterior_over

X = torch.linspace(-1, 1, 12).view(4, 3)
CALLS = ["predict", "novelty", "epistemic"]


def both() -> list[ba.Posterior | ba.Mixture]:
    torch.manual_seed(0)
    posterior = posterior_over(mlp(3, 4, 2))
    return [posterior, ba.Mixture([posterior, posterior.replace(prior_precision=7.0)])]


@pytest.mark.parametrize("call", CALLS)
def test_none_given_anywhere_says_what_to_write(call: str) -> None:
    for q in both():
        with pytest.raises(SettingError, match=r"(?=.*likelihood=.classification)(?=.*from_optimizer)"):
            getattr(q, call)(X)


@pytest.mark.parametrize("call", CALLS)
def test_the_posteriors_own_is_used_and_a_contradiction_names_both(call: str) -> None:
    for q in both():
        own = q.replace(likelihood="classification")
        found, expected = getattr(own, call)(X), getattr(q, call)(X, likelihood="classification")
        if call == "predict":
            assert_close(found.probs, expected.probs)
            assert_close(own.predict(X, likelihood="classification").probs, expected.probs)
        with pytest.raises(SettingError, match=r"(?=.*'regression')(?=.*'classification')"):
            getattr(own, call)(X, likelihood="regression")


def test_method_is_another_name_of_predictive() -> None:
    posterior = both()[0]
    with pytest.warns(DeprecationWarning, match="predictive='linearised-sampled'"):
        found = posterior.predict(X, likelihood="regression", method="linearised-sampled", n_samples=3)
    assert found.draws.shape == (3, 4, 2)
