"""Draws of the network's outputs: at drawn weights, or of the linearised network."""

from __future__ import annotations

from functools import reduce
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from bayesadam.likelihoods.moments import Moments
from bayesadam.predict.batches import examples, has_graph, parts, plain
from bayesadam.predict.moments import one_jacobian
from bayesadam.predict.network import Call, Forward, Gaussian, evaluating, widened
from bayesadam.predict.plan import plan_for
from bayesadam.weights.named import Named

# torch has one level of forward mode for all threads.
_forward_mode = RLock()


def sampled(
    posterior: Gaussian,
    inputs: Any,
    n: int,
    *,
    forward: Forward | None = None,
    generator: torch.Generator | None = None,
) -> Moments:
    """f(x; θ) of n draws of θ, (n, batch, ...), each for the whole batch, and their mean and variance.

    The variance is the unbiased one, with n − 1.
    """
    inputs = plain(inputs, graph=True)
    with evaluating(posterior.model):
        call = _checked(posterior, inputs, forward)
        thetas = (posterior.sample(generator=generator) for _ in range(n))
        with torch.set_grad_enabled(has_graph(inputs)):
            drawn = torch.stack([widened(call(theta, inputs)) for theta in thetas])
    return Moments(drawn.mean(dim=0), drawn.var(dim=0), draws=drawn)


def linearised_draws(
    posterior: Gaussian,
    inputs: Any,
    n: int,
    *,
    forward: Forward | None = None,
    generator: torch.Generator | None = None,
) -> Moments:
    """f(x; μ) + J (θ − μ) of n draws of θ, (n, batch, ...), each for the whole batch, by forward-mode products.

    The mean, f(x; μ), is known, so that the variance is the mean square around it.
    """
    inputs = plain(inputs, graph=True)
    with evaluating(posterior.model):
        call = _checked(posterior, inputs, forward)
        thetas = (posterior.sample(generator=generator) for _ in range(n))
        steps = ({name: theta[name].to(mu.device) - mu for name, mu in call.mean.items()} for theta in thetas)

        def product(step: Named, batch: Any) -> Tensor:
            with _forward_mode:
                away: Tensor = jvp(lambda p: call(p, batch), (call.mean,), (step,))[1]
            return away

        with torch.set_grad_enabled(has_graph(inputs)):
            mean = widened(call(call.mean, inputs))
            try:
                product(call.mean, examples(inputs, 0, 1))
            except (RuntimeError, NotImplementedError):
                # Some operation has no forward mode.
                away = _by_rows(call, inputs, list(steps)).view(n, *mean.shape)
            else:
                away = torch.stack([product(step, inputs) for step in steps])
    return Moments(mean, away.square().mean(dim=0).to(mean), draws=mean + away.to(mean))


def _checked(posterior: Gaussian, inputs: Any, forward: Forward | None) -> Call:
    """The network, whose examples are independent of each other."""
    posterior.require_proper()
    call = Call.of(posterior, forward)
    plan_for(call, plain(inputs))
    return call


def _by_rows(call: Call, inputs: Any, steps: list[dict[str, Tensor]]) -> Tensor:
    """J (θ − μ), (n, b · c), example by example, one gradient for each output."""
    stacked = {name: torch.stack([step[name].flatten() for step in steps]) for name in call.mean}
    gradients = (one_jacobian(call, tuple(call.mean), example) for example in parts(inputs, 1))
    rows = ((stacked[name] @ g.reshape(len(g), -1).T for name, g in of_one.items()) for of_one in gradients)
    return torch.cat([reduce(torch.add, terms) for terms in rows], dim=1)
