"""Draws of the outputs: exactly what the drawn weights give, and with the moments they should have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bayesadam as ba
from bayesadam.predict import linearised, linearised_draws, sampled
from cases import mlp, seeded
from floats import assert_close
from predict.cases_networks import (
    NETWORKS,
    Lambda,
    Network,
    Then,
    jacobian,
    normal,
    parameters_of,
    posterior_over,
    spread_inputs,
)

# torch says so where an operation has no batching rule of its own; the numbers are the same.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

KINDS: dict[str, Callable[..., Any]] = {"sampled": sampled, "linearised": linearised_draws}
every_kind = pytest.mark.parametrize("kind", KINDS)


def narrow(model: nn.Module) -> ba.Posterior:
    """Narrow enough to be sampled."""
    return posterior_over(model, n_data=1e5, prior_precision=1e4)


@pytest.mark.parametrize("network", NETWORKS[::2], ids=lambda network: network.name)
def test_draws_are_those_of_the_weights(network: Network):
    """At the drawn weights, and of the linearised network its Jacobian times their steps."""
    model, inputs = network.make()
    posterior, generator = narrow(model), seeded()
    found = {kind: draw(posterior, inputs, 2, generator=seeded()) for kind, draw in KINDS.items()}
    output, caller = spread_inputs(model, inputs), Lambda(lambda self, x: spread_inputs(self.model, x), model=model)
    j = jacobian(parameters_of(posterior), output)
    for i in range(2):
        theta = posterior.sample(generator=generator)
        with torch.no_grad():
            expected = functional_call(caller, {f"model.{name}": value for name, value in theta.items()}, (inputs,))
        assert_close(found["sampled"].draws[i], expected, rtol=1e-8, atol=1e-10)
        # Forward mode sees through `torch.no_grad`, which is for reverse mode.
        if network.name != "a-branch-without-gradient":
            step = torch.cat([(theta[name] - mu).flatten() for name, mu in posterior.mean.items()])
            assert_close(
                found["linearised"].draws[i], (output + (j @ step).view_as(output)).detach(), rtol=1e-8, atol=1e-10
            )


def test_mean_and_variance_are_those_of_the_draws():
    posterior, x = narrow(Then(mlp(3, 4, 4), lambda z: z.view(-1, 2, 2)).double()), normal(5, 3)()
    found = sampled(posterior, x, 7, generator=seeded())
    assert found.draws.shape == (7, 5, 2, 2)
    assert_close(found.mean, found.draws.mean(dim=0))
    assert_close(found.variance, found.draws.var(dim=0))
    # The mean of the linearised network is known, so that no degree of freedom is spent on it.
    found = linearised_draws(posterior, x, 7, generator=seeded())
    assert_close(found.mean, linearised(posterior, x).mean)
    assert_close(found.variance, (found.draws - found.mean).square().mean(dim=0))


@every_kind
def test_a_draw_is_one_function_for_all_inputs_with_gradients(kind: str):
    posterior, x = posterior_over(mlp(3, 6, 2).double()), normal(6, 3)()
    function = lambda z: KINDS[kind](posterior, z, 2, generator=seeded(7)).draws[0]  # noqa: E731
    assert_close(function(x[2:4]), function(x)[2:4])
    assert torch.autograd.gradcheck(function, (x[:2].requires_grad_(),))


@every_kind
def test_draws_are_reproducible(kind: str):
    posterior, x = narrow(mlp(3, 4, 2)), torch.randn(4, 3)

    def draws(generator: torch.Generator | None) -> Tensor:
        return KINDS[kind](posterior, x, 3, generator=generator).draws

    generator = seeded(1)
    first, second = draws(generator), draws(generator)
    assert torch.equal(first, draws(seeded(1)))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    unseeded = draws(None)
    assert not torch.equal(unseeded, draws(None))
    torch.manual_seed(5)
    assert torch.equal(unseeded, draws(None))
