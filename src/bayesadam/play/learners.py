"""What a page of `bayesadam play` shows: learners that take steps one by one and have bands at any time.

The networks, rules and draws are the engine's; the noise of an observation is the slider's, and not estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, forward, member
from bayesadam.engine.process import gaussian_process
from bayesadam.engine.rules import Adam, BayesByBackprop, Dropout, Rule, Vadam
from bayesadam.engine.stack import Stack
from bayesadam.engine.streams import Streams
from bayesadam.weights.posterior import Posterior

# Where the Gaussian process looks for its lengthscale and its signal's standard deviation, in units of the plane.
LENGTHSCALES = tuple(torch.logspace(math.log10(0.3), math.log10(3.0), 11, dtype=torch.float64).tolist())
SIGNALS = LENGTHSCALES
# The learning rate falls geometrically from the first to the second over a learner's steps. A change of the data sets
# it back to this share of the way, where what was learnt is not lost and can still move.
_RATES = (1e-2, 1e-3)
_WARM = 0.4
_WEIGHT_DECAY = 1e-4
_LARGEST_BATCH = 32
# Steps whose rows are drawn at once, and functions behind a sampled band.
_BLOCK = 32
_DRAWS = 64


@dataclass(frozen=True)
class Request:
    """One request of one page, which supersedes an older one: the points, and the sliders' values.

    `units` is the activation of the hidden layers; `restart` forgets what the networks learnt.
    """

    page: str
    points: tuple[tuple[float, float], ...]
    n_data: float
    prior_precision: float
    noise: float
    dropout: float
    width: int
    units: str = "tanh"
    restart: bool = False

    def columns(self) -> tuple[Tensor, Tensor]:
        """The points as inputs and targets, (n, 1) each."""
        both = torch.tensor(self.points, dtype=torch.float32).reshape(-1, 2)
        return both[:, :1], both[:, 1:]


@dataclass(frozen=True, eq=False)
class Bands:
    """Mean and standard deviation of f at every point of a grid, (g,) each; the noise is not in them."""

    mean: Tensor
    std: Tensor

    @property
    def finite(self) -> bool:
        """Whether every number can be drawn."""
        return bool((torch.isfinite(self.mean) & torch.isfinite(self.std)).all())


def curvature_of(read: Posterior) -> float:
    """Σ B^(2p−1) v̂ᵖ over all weights: the total curvature of an example, in the units it was read in."""
    settings = read.settings
    total = sum(float(c.sum(dtype=torch.float64)) for c in read.structure.curvatures(settings.power))
    return total * settings.weight / (settings.scale * settings.n_data)


class Learner:
    """One method on one page: `taken` steps since the last request that changed something for it, and those `left`."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.taken = self.left = 0

    def accept(self, request: Request) -> None:
        """Take up a request: restart, resume, or do nothing, as what the training depends on has changed."""
        raise NotImplementedError

    def step(self) -> None:
        """One step of training."""
        self.left -= 1
        self.taken += 1

    def bands(self, grid: Tensor) -> Bands:
        """Mean and standard deviation of f now."""
        raise NotImplementedError


class GaussianProcess(Learner):
    """The exact reference; a step tries one lengthscale, and they are tried again for other points or another noise."""

    _key: object = None

    def accept(self, request: Request) -> None:
        """Look for the kernel of greatest marginal likelihood when points or noise have changed."""
        key = (request.points, request.noise)
        if key != self._key:
            x, y = request.columns()
            self._x, self._y, self._noise, self._key = x, y.squeeze(1), request.noise, key
            self._tried: list[tuple[float, float, float]] = []
            self.left, self.taken = len(LENGTHSCALES), 0

    def _process(self, grid: Tensor, lengthscale: float, signal: float) -> tuple[Tensor, ...]:
        log_variances = 2 * math.log(signal), 2 * math.log(self._noise)
        theta = torch.tensor([math.log(lengthscale), *log_variances, 0.0], dtype=torch.float64)
        return gaussian_process(theta, self._x.double(), self._y.double(), grid.double())

    def step(self) -> None:
        """Try one lengthscale, with every signal."""
        at = LENGTHSCALES[self.taken]
        self._tried += [(float(self._process(self._x, at, signal)[0]), at, signal) for signal in SIGNALS]
        super().step()

    def bands(self, grid: Tensor) -> Bands:
        """The exact posterior of f, with the best kernel so far."""
        _, mean, variance = self._process(grid[:, None], *max(self._tried)[1:])
        return Bands(mean.float(), variance.sqrt().float())


class RuleLearner(Learner):
    """Networks under one of the engine's rules; the band is that of functions drawn from what the rule has learnt.

    N, δ, σ (as the scale 1/(2σ²) of the squared error's gradient) and the dropout rate are the sliders', where the rule
    has a use for them: no other slider trains anything.
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
            # Where at least half of the points are common to both, what was learnt is worth keeping.
            or 2 * len({*request.points} & {*self.request.points}) < max(len(request.points), len(self.request.points))
        )
        changed = restart or key != self._key
        self.request, self._key = request, key
        if not changed:
            return
        self.x, self.y = request.columns()
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

    def step(self) -> None:
        """One step of training; the rows of several are drawn at once."""
        if not self._prepared:
            n, size = len(self.x), self.batch_size
            rows = self._rows.rows(n, _BLOCK, size) if size < n else torch.arange(n).expand(len(self._rows), _BLOCK, n)
            done, left, budget = self.stack.done, self.left, self.panel.budget
            falling = _RATES[1] / _RATES[0]
            rate = lambda at: _RATES[0] * falling ** (1 - (left - (at - done)) / budget)  # noqa: E731
            self.stack.prepare(rows.transpose(0, 1), rate)
            self._prepared = _BLOCK
        self.stack.run(1)
        self._prepared -= 1
        super().step()

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

    def step(self) -> None:
        """One step of training, after which the state is read again."""
        self._read = None
        super().step()

    @property
    def batch_size(self) -> int:
        """At most half the points: v̂ is the square of a batch's gradients, which must not vanish at the optimum."""
        return max(1, min(_LARGEST_BATCH, len(self.x) // 2))

    def posterior(self) -> Posterior:
        """What was read, with precision s N c + δ, c = v̂ᵖ, at the sliders' N, δ and σ; nothing is trained.

        c has the units of the loss it was read from, and Adam's √v̂ shrinks as training goes on. s takes both out: the
        total curvature of an example, Σ s c, is the Gauss-Newton matrix's, mean_n Σ J_n²/σ².
        """
        asked = self.request
        if self._read is None:
            model = self.stack.network.build(member(self.stack.params, 0))
            found = Posterior.from_state_dict(model, self.stack.state_dict(0), asked.n_data)
            # mean_n Σ J_n² is Var[f] where Var[θ] = 1.
            ones = {name: torch.ones_like(theta) for name, theta in found.mode.items()}
            unit = Posterior.from_moments(model, found.mode, ones, 1.0).replace(noise_variance=1.0)
            reach = unit.predict(self.x, likelihood="regression").variance.mean()
            self._read = found, float(reach) / max(curvature_of(found), 1e-30)
        found, scale = self._read
        settings: Any = {"n_data": asked.n_data, "prior_precision": asked.prior_precision}
        return found.replace(**settings, scale=scale / asked.noise**2, noise_variance=asked.noise**2)

    def bands(self, grid: Tensor) -> Bands:
        """The network linearised round its weights."""
        found = self.posterior().predict(grid[:, None], likelihood="regression")
        return Bands(found.mean.detach().squeeze(1), found.variance.detach().clamp(min=0).sqrt().squeeze(1))


@dataclass(frozen=True)
class Panel:
    """One plane of the page: its name in messages and its title, what trains and predicts there, in how many steps."""

    method: str
    title: str
    learner: type[Learner] = RuleLearner
    rule: type[Rule] = Adam
    budget: int = 1200
    networks: int = 1


# In the order in which a page wants to hear from them.
PANELS = (
    Panel("badam", "Badam", BadamLearner),
    Panel("gp", "Gaussian process", GaussianProcess),
    Panel("mc-dropout", "MC dropout", rule=Dropout),
    Panel("bbb", "Bayes by Backprop", rule=BayesByBackprop, budget=2000),
    Panel("vadam", "Vadam", rule=Vadam, budget=2000),
    Panel("ensemble", "Ensemble of 5", EnsembleLearner, networks=5),
)
