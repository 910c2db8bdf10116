"""Draws of the network's outputs: at drawn weights, or of the linearised network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from bayesadam._checks import count
from bayesadam.likelihoods.moments import Moments
from bayesadam.predict.batches import batch_size, examples, has_graph, plain
from bayesadam.predict.moments import DEFAULT_BUDGET, one_jacobian
from bayesadam.predict.network import Call, Forward, Gaussian, evaluating, means, widened
from bayesadam.predict.plan import plan_for
from bayesadam.weights.named import Named


def sampled(
    posterior: Gaussian,
    inputs: Any,
    n: int,
    *,
    forward: Forward | None = None,
    generator: torch.Generator | None = None,
    budget: int = DEFAULT_BUDGET,
) -> Moments:
    """f(x; θ) of n draws of θ, (n, batch, ...), each for the whole batch, and their mean and variance.

    The variance is the unbiased one, with n − 1; of one draw none is known: 0/0.
    """
    with evaluating(posterior.model):
        call, params, parts, at_once = _prepared(posterior, inputs, n, forward, budget, copies=4)
        thetas = _thetas(posterior, params, n, generator)
        with torch.set_grad_enabled(has_graph(parts)):
            drawn = widened(_over(thetas, lambda theta: torch.cat([call(theta, part) for part in parts]), at_once))
    return Moments(drawn.mean(dim=0), drawn.var(dim=0) if n > 1 else torch.full_like(drawn[0], torch.nan), draws=drawn)


def linearised_draws(
    posterior: Gaussian,
    inputs: Any,
    n: int,
    *,
    forward: Forward | None = None,
    generator: torch.Generator | None = None,
    budget: int = DEFAULT_BUDGET,
) -> Moments:
    """f(x; μ) + J (θ − μ) of n draws of θ, (n, batch, ...), each for the whole batch, by forward-mode products.

    The mean, f(x; μ), is known, so that the variance is the mean square around it.
    """
    with evaluating(posterior.model):
        call, params, parts, at_once = _prepared(posterior, inputs, n, forward, budget, copies=8)
        thetas = _thetas(posterior, params, n, generator)

        def product(theta: Named, part: Any) -> Tensor:
            tangent = {name: theta[name] - mu for name, mu in params.items()}
            step: Tensor = jvp(lambda p: call(p, part), (params,), (tangent,))[1]
            return step

        with torch.set_grad_enabled(has_graph(parts)):
            mean = widened(torch.cat([call(params, part) for part in parts]))
            try:
                product(params, examples(parts[0], 0, 1))
            except (RuntimeError, NotImplementedError):
                # Some operation has no forward mode.
                away = _by_rows(call, params, parts, list(thetas)).view(n, *mean.shape)
            else:
                away = _over(thetas, lambda theta: torch.cat([product(theta, part) for part in parts]), at_once)
    return Moments(mean, away.square().mean(dim=0).to(mean), draws=mean + away.to(mean))


def _prepared(
    posterior: Gaussian, inputs: Any, n: int, forward: Forward | None, budget: int, *, copies: int
) -> tuple[Call, dict[str, Tensor], list[Any], int]:
    """The network, μ, the batch in parts that a pass with so many copies of the activations may take, draws at once."""
    count("n", n, "draws")
    posterior.require_proper()
    call, params, inputs = Call(posterior.model, forward), means(posterior), plain(inputs, graph=True)
    leaves = {name: mu.detach().requires_grad_() for name, mu in params.items()}
    size, element = batch_size(inputs), next(iter(params.values())).element_size()
    example = element * copies * plan_for(call, leaves, plain(inputs)).widest
    at_a_time = max(1, min(size, budget // (2 * example)))
    whole = at_a_time == size
    parts = [inputs] if whole else [examples(inputs, i, i + at_a_time) for i in range(0, size, at_a_time)]
    one = example * at_a_time + 2 * element * sum(mu.numel() for mu in params.values())
    return call, params, parts, max(1, min(n, budget // one))


def _thetas(posterior: Gaussian, params: Named, n: int, generator: torch.Generator | None) -> Iterator[Named]:
    for _ in range(n):
        theta = posterior.sample(generator=generator)
        yield {name: theta[name].to(mu.device) for name, mu in params.items()}


def _over(thetas: Iterator[Named], outputs: Callable[[Named], Tensor], at_once: int) -> Tensor:
    """`outputs` at every draw, vectorised over as many as fit; one at a time where the model cannot be."""
    drawn: list[Tensor] = []
    while some := list(islice(thetas, at_once)):
        if at_once > 1:
            try:
                drawn.append(vmap(outputs)({name: torch.stack([theta[name] for theta in some]) for name in some[0]}))
                continue
            except RuntimeError:
                at_once = 1
        drawn += [outputs(theta).unsqueeze(0) for theta in some]
    return torch.cat(drawn)


def _by_rows(call: Call, params: dict[str, Tensor], parts: Sequence[Any], thetas: Sequence[Named]) -> Tensor:
    """J (θ − μ), (n, b · c), example by example, one gradient for each output."""
    steps = {name: torch.stack([(theta[name] - mu).flatten() for theta in thetas]) for name, mu in params.items()}
    rows = []
    for part in parts:
        for i in range(batch_size(part)):
            gradients = one_jacobian(call, params, tuple(params), examples(part, i, i + 1))
            rows.append(reduce(torch.add, [steps[name] @ g.reshape(len(g), -1).T for name, g in gradients.items()]))
    return torch.cat(rows, dim=1)
