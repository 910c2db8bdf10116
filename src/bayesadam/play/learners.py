"""Anytime learners: each takes steps one by one and can be asked for its bands at any time.

A request can end a training or resume it from what was learnt. The networks, rules and draws are the engine's; the noise of
an observation is known here, the slider's, and not estimated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, forward, member
from bayesadam.engine.rules import Adam, BayesByBackprop, Dropout, Rule, Vadam, optimizer_state_dict
from bayesadam.engine.stack import Stack
from bayesadam.engine.streams import Streams
from bayesadam.play.bands import (
    LENGTHSCALES,
    Bands,
    Kernel,
    best_signal,
    curvature_of,
    gp_bands,
    kronecker_posterior,
    linearised_bands,
    posterior_at,
    reach_of,
)
from bayesadam.play.request import Request
from bayesadam.posterior import Posterior

# The learning rate falls geometrically from the first to the second over a learner's steps. A change of the data sets it
# back to this share of the way, where what was learnt is not lost and can still move.
_RATES = (1e-2, 1e-3)
_WARM = 0.4
_WEIGHT_DECAY = 1e-4
_LARGEST_BATCH = 32
# Steps whose rows are drawn at once, and functions behind a sampled band.
_BLOCK = 32
_DRAWS = 64


class Learner(ABC):
    """One method on one page: `taken` steps since the last request that changed something for it, and those `left`."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.taken = self.left = 0

    @abstractmethod
    def accept(self, request: Request) -> None:
        """Take up a request: restart, resume, or do nothing, as what the training depends on has changed."""

    def step(self) -> None:
        """One step of training."""
        self.advance()
        self.left -= 1
        self.taken += 1

    @abstractmethod
    def advance(self) -> None:
        """The work of one step."""

    @abstractmethod
    def bands(self, grid: Tensor) -> Bands:
        """Mean and standard deviation of f now."""


class GaussianProcess(Learner):
    """The exact reference; a step tries one lengthscale, and they are tried again for other points or another noise."""

    _key: object = None

    def accept(self, request: Request) -> None:
        """Look for the kernel of greatest marginal likelihood when points or noise have changed."""
        key = (request.points, request.noise)
        if key != self._key:
            x, y = columns(request)
            self._x, self._y, self._noise, self._key = x.squeeze(1), y.squeeze(1), request.noise, key
            self._tried: list[Kernel] = []
            self.left, self.taken = len(LENGTHSCALES), 0

    def advance(self) -> None:
        """The next lengthscale, with its best signal."""
        self._tried.append(best_signal(self._x, self._y, self._noise, LENGTHSCALES[len(self._tried)]))

    @property
    def kernel(self) -> Kernel:
        """The best so far."""
        return max(self._tried, key=lambda kernel: kernel.evidence)

    def bands(self, grid: Tensor) -> Bands:
        """The exact posterior of f."""
        return gp_bands(self._x, self._y, grid, self._noise, self.kernel)


class RuleLearner(Learner):
    """Networks under one of the engine's rules; the band is that of functions drawn from what the rule has learnt.

    δ becomes the rule's prior precision, N the stack's, σ the scale 1/(2σ²) of the squared error's gradient and the
    dropout rate the network's, each where the rule has a use for it: no other slider trains anything.
    """

    stack: Stack
    request: Request
    _key: object = None

    def accept(self, request: Request) -> None:
        """Restart for another shape or other data, resume for other values of what the rule depends on."""
        kind = self.panel.rule
        dropout = request.dropout if issubclass(kind, Dropout) else 0.0
        network = Network(1, (request.width, request.width), 1, request.units, dropout=dropout)
        rule = kind.with_settings(weight_decay=_WEIGHT_DECAY, prior_precision=request.prior_precision)
        key = request.points, network, rule, (request.n_data, request.noise) if rule.needs_noise else None
        restart = (
            self._key is None
            or request.restart
            or network.shapes() != self.stack.network.shapes()
            or network.activation != self.stack.network.activation
            or not _alike(self.request.points, request.points)
        )
        changed = restart or key != self._key
        self.request, self._key = request, key
        if not changed:
            return
        self.x, self.y = columns(request)
        seeds = range(self.panel.networks)
        self._rows, self._prepared = Streams(seeds, "rows"), 0
        if restart:
            self.stack = Stack(network, rule, seeds, self._batch, n_data=request.n_data)
            self.left = self.panel.budget
        self.stack.network, self.stack.rule = network, rule
        self.stack.n_data.fill_(request.n_data)
        self.stack.scale.fill_(1 / (2 * request.noise**2))
        # Never less than what a training that was cut short still had to go.
        self.left = max(self.left, round((1 - _WARM) * self.panel.budget))
        self.taken = 0

    def advance(self) -> None:
        """One step of the rule."""
        if not self._prepared:
            n, size = len(self.x), self.batch_size
            rows = self._rows.rows(n, _BLOCK, size) if size < n else torch.arange(n).expand(len(self._rows), _BLOCK, n)
            done, left, budget = self.stack.done, self.left, self.panel.budget
            falling = _RATES[1] / _RATES[0]
            self.stack.prepare(
                rows.transpose(0, 1), lambda at: _RATES[0] * falling ** (1 - (left - (at - done)) / budget)
            )
            self._prepared = _BLOCK
        self.stack.run(1)
        self._prepared -= 1

    @property
    def batch_size(self) -> int:
        """Points per step: all of them, up to what a step can do quickly."""
        return min(_LARGEST_BATCH, len(self.x))

    def bands(self, grid: Tensor) -> Bands:
        """Moments over functions, always of the same random numbers."""
        params, masks = self.stack.functions(0, _DRAWS, Streams([0], "play-draws"))
        with torch.no_grad():
            draws = forward(self.stack.network, params, grid[:, None], masks=masks).squeeze(2)
        return Bands(draws.mean(dim=0), draws.std(dim=0))

    def _batch(self, rows: Tensor) -> tuple[Tensor, Slope]:
        """Inputs, and the slope 2 (f − y)/n of each network's mean squared error."""
        y = self.y[rows]
        return self.x[rows], lambda f: (f - y).mul_(2 / rows.shape[1])


class EnsembleLearner(RuleLearner):
    """Several networks from different starts, trained side by side; the band is how far they disagree."""

    def bands(self, grid: Tensor) -> Bands:
        """Mean and standard deviation of their equal mixture."""
        with torch.no_grad():
            each = forward(self.stack.network, self.stack.params, grid[:, None]).squeeze(2)
        return Bands(each.mean(dim=0), each.std(dim=0, correction=0))


class BadamLearner(RuleLearner):
    """Plain Adam: its band is read off the optimiser's state, so that N, δ and σ move it and train nothing."""

    _read: tuple[Posterior, float] | None = None

    def advance(self) -> None:
        """One step of Adam."""
        self._read = None
        super().advance()

    @property
    def batch_size(self) -> int:
        """At most half the points: v̂ is the square of a batch's gradients, which must not vanish at the optimum."""
        return max(1, min(_LARGEST_BATCH, len(self.x) // 2))

    def read(self, model: nn.Module) -> tuple[Posterior, float]:
        """The trained network's posterior, out of Adam's state, and its mean_n Σ J_n²."""
        stack = self.stack
        assert isinstance(stack.rule, Adam)
        state = optimizer_state_dict(stack.network, stack.state, 0, stack.rule, lr=_RATES[0])
        found = Posterior.from_state_dict(model, state, self.request.n_data)
        return found, reach_of(found, self.x)

    def posterior(self) -> Posterior:
        """What was read, at the sliders' N, δ and σ."""
        stack, request = self.stack, self.request
        if self._read is None:
            self._read = self.read(stack.network.build(member(stack.params, 0)))
        read, reach = self._read
        return posterior_at(
            read, reach, n_data=request.n_data, prior_precision=request.prior_precision, noise=request.noise
        )

    def bands(self, grid: Tensor) -> Bands:
        """The network linearised round its weights."""
        return linearised_bands(self.posterior(), grid)


class KroneckerLearner(BadamLearner):
    """The same network, with the posterior of gradients that a recorder takes at its weights."""

    def read(self, model: nn.Module) -> tuple[Posterior, float]:
        """Its Kronecker-factored posterior, whose curvature is the Gauss-Newton matrix's own."""
        found = kronecker_posterior(model, self.x)
        return found, curvature_of(found)


@dataclass(frozen=True)
class Panel:
    """One plane of the page: its name in messages and its title, what trains and predicts there, in how many steps.

    The Gaussian process has no use for a rule; `networks` trained side by side are an ensemble.
    """

    method: str
    title: str
    learner: type[Learner] = RuleLearner
    rule: type[Rule] = Adam
    budget: int = 1200
    networks: int = 1

    def describe(self) -> dict[str, str | bool]:
        """What the page must know of it."""
        return {"method": self.method, "title": self.title, "exact": self.learner is GaussianProcess}


# In the order in which a page wants to hear from them.
PANELS = (
    Panel("badam", "Badam", BadamLearner),
    Panel("gp", "Gaussian process", GaussianProcess),
    Panel("mc-dropout", "MC dropout", rule=Dropout),
    Panel("bbb", "Bayes by Backprop", rule=BayesByBackprop, budget=2000),
    Panel("vadam", "Vadam", rule=Vadam, budget=2000),
    Panel("kronecker", "Kronecker", KroneckerLearner),
    Panel("ensemble", "Ensemble of 5", EnsembleLearner, networks=5),
)


def columns(request: Request) -> tuple[Tensor, Tensor]:
    """The points as inputs and targets, (n, 1) each."""
    both = torch.tensor(request.points, dtype=torch.float32).reshape(-1, 2)
    return both[:, :1], both[:, 1:]


def _alike(before: tuple[tuple[float, float], ...], after: tuple[tuple[float, float], ...]) -> bool:
    """Whether at least half of the points are common to both: what was learnt is then a start worth having."""
    return 2 * len(set(before) & set(after)) >= max(len(before), len(after))
