"""Draws of the network's outputs: at drawn weights, or of the linearised network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from bayesadam._checks import count
from bayesadam.gaussian.structure import Named
from bayesadam.likelihoods.moments import Moments
from bayesadam.predict.batches import batch_size, examples, has_graph, plain
from bayesadam.predict.moments import DEFAULT_BUDGET, one_jacobian
from bayesadam.predict.network import Call, Forward, Gaussian, evaluating, in_tf32, means, widened
from bayesadam.predict.plan import plan_for

# The outputs at θ, of some examples.
_Outputs = Callable[[Named, Any], Tensor]
# Copies of the widest activation that a forward pass holds, and one with its derivative.
_FORWARD, _WITH_TANGENTS = 4, 8


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
        run = _Draws(posterior, inputs, n, forward, generator, budget)
        with torch.set_grad_enabled(has_graph(run.inputs)):
            drawn = widened(run.over(run.call, _FORWARD))
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
        run = _Draws(posterior, inputs, n, forward, generator, budget)
        with torch.set_grad_enabled(has_graph(run.inputs)):
            centre = widened(torch.cat([run.call(run.params, part) for part in run.parts(_FORWARD)]))
            try:
                run.product(run.params, examples(run.inputs, 0, 1))
            except (RuntimeError, NotImplementedError):
                # Some operation has no forward mode.
                away = run.by_rows(centre)
            else:
                away = run.over(run.product, _WITH_TANGENTS)
    return Moments(centre, away.square().mean(dim=0).to(centre), draws=centre + away.to(centre))


class _Draws:
    """n draws of the weights of a network, and a batch."""

    def __init__(
        self,
        posterior: Gaussian,
        inputs: Any,
        n: int,
        forward: Forward | None,
        generator: torch.Generator | None,
        budget: int,
    ) -> None:
        count("n", n, "draws")
        posterior.require_proper()
        self.call, self.params, self.inputs = (
            Call(posterior.model, forward),
            means(posterior),
            plain(inputs, graph=True),
        )
        self.posterior, self.n, self.generator, self.budget = posterior, n, generator, budget
        leaves = {name: mu.detach().requires_grad_() for name, mu in self.params.items()}
        self.widest = plan_for(self.call, leaves, plain(inputs)).widest
        self.element = next(iter(self.params.values())).element_size()

    def draw(self) -> dict[str, Tensor]:
        """The next θ."""
        theta = self.posterior.sample(generator=self.generator)
        return {name: value.to(self.params[name].device) for name, value in theta.items()}

    def parts(self, copies: int) -> Iterator[Any]:
        """The batch in parts that a forward pass with so many copies of the activations may take."""
        size = batch_size(self.inputs)
        at_a_time = max(1, min(size, self.budget // max(1, 2 * copies * self.widest * self.element)))
        for start in range(0, size, at_a_time):
            yield self.inputs if at_a_time >= size else examples(self.inputs, start, start + at_a_time)

    def over(self, outputs: _Outputs, copies: int) -> Tensor:
        """`outputs` at every draw, vectorised over as many as fit; one at a time where the model cannot be."""
        parts, weights = list(self.parts(copies)), sum(mu.numel() for mu in self.params.values())
        one = self.element * (copies * self.widest * batch_size(parts[0]) + 2 * weights)
        at_once, drawn = max(1, min(self.n, self.budget // one)), []
        vectorised = at_once > 1
        for start in range(0, self.n, at_once):
            thetas = [self.draw() for _ in range(start, min(start + at_once, self.n))]
            if vectorised:
                try:
                    stacked = {name: torch.stack([theta[name] for theta in thetas]) for name in self.params}
                    drawn.append(vmap(lambda theta: torch.cat([outputs(theta, part) for part in parts]))(stacked))
                    continue
                except RuntimeError:
                    vectorised = False
            drawn += [torch.cat([outputs(theta, part) for part in parts]).unsqueeze(0) for theta in thetas]
        return torch.cat(drawn)

    def product(self, theta: Named, part: Any) -> Tensor:
        """J (θ − μ) of some examples."""
        tangent = {name: theta[name] - mu for name, mu in self.params.items()}
        with in_tf32(next(iter(self.params.values()))):
            step: Tensor = jvp(lambda p: self.call(p, part), (self.params,), (tangent,))[1]
        return step

    def by_rows(self, centre: Tensor) -> Tensor:
        """J (θ − μ) example by example, one gradient for each output."""
        thetas = [self.draw() for _ in range(self.n)]
        steps = {name: torch.stack([theta[name] - mu for theta in thetas]) for name, mu in self.params.items()}
        rows = []
        for i in range(batch_size(self.inputs)):
            gradients = one_jacobian(self.call, self.params, tuple(self.params), examples(self.inputs, i, i + 1))
            shares = [steps[name].reshape(self.n, -1) @ g.reshape(len(g), -1).T for name, g in gradients.items()]
            rows.append(torch.stack(shares).sum(dim=0))
        return torch.stack(rows, dim=1).reshape(self.n, *centre.shape)
