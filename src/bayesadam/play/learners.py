"""Anytime learners: each holds one small network, takes steps one by one, and can be asked for its bands at any time.

They are the methods of `bayesadam.methods`, taken apart into steps so that a click can end a training, or go on from what
was learnt: same networks, same losses, same draws. A regression's noise is known here, the slider's, and not estimated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.engine.network import Network, flatten, forward, initial, unflatten
from bayesadam.engine.streams import Streams
from bayesadam.methods.base import Stack, dropout_masks
from bayesadam.optim import Vadam
from bayesadam.play.ask import Ask
from bayesadam.play.bands import (
    LENGTHSCALES,
    N_DRAWS,
    Bands,
    Kernel,
    badam_posterior,
    bands_of_draws,
    best_signal,
    gaussian_draws,
    gp_bands,
    linearised_bands,
    reach_of,
)
from bayesadam.play.gradient import error_gradient
from bayesadam.posterior import Posterior

# The learning rate falls geometrically from the first to the second over a learner's steps; a change of the data sets it
# back to this share of the way, where what was learnt is kept and can still move.
_RATES = (1e-2, 1e-3)
_WARM = 0.4
_WEIGHT_DECAY = 1e-4
_INITIAL_STD = 0.02
_LARGEST_BATCH = 32


class Learner(ABC):
    """One method on one page.

    Attributes:
        method: its name in `bayesadam.methods`.
        taken: steps since the last request that changed something for it.
        left: steps still to take.
    """

    method: str
    taken: int = 0
    left: int = 0

    @abstractmethod
    def turn_to(self, ask: Ask) -> None:
        """Take up a request: start afresh, go on, or do nothing, as what it depends on has changed."""

    @abstractmethod
    def step(self) -> None:
        """One step of training."""

    @abstractmethod
    def bands(self, grid: Tensor) -> Bands:
        """What it says of f now."""


class GaussianProcess(Learner):
    """The exact reference; a step tries one lengthscale, and they are tried again for other points or another noise."""

    method = "gp"

    def __init__(self) -> None:
        self._key: object = None

    def turn_to(self, ask: Ask) -> None:
        """Look for the kernel of greatest marginal likelihood when points or noise have changed."""
        key = (ask.points, ask.noise)
        if key != self._key:
            x, y = columns(ask)
            self._x, self._y, self._noise, self._key = x.squeeze(1), y.squeeze(1), ask.noise, key
            self._tried: list[Kernel] = []
            self.left, self.taken = len(LENGTHSCALES), 0

    def step(self) -> None:
        """The next lengthscale, with its best signal."""
        self._tried.append(best_signal(self._x, self._y, self._noise, LENGTHSCALES[len(self._tried)]))
        self.left -= 1
        self.taken += 1

    @property
    def kernel(self) -> Kernel:
        """The best so far."""
        return max(self._tried, key=lambda kernel: kernel.evidence)

    def bands(self, grid: Tensor) -> Bands:
        """The exact posterior of f."""
        return gp_bands(self._x, self._y, grid, self._noise, self.kernel)


class _NetworkLearner(Learner):
    """What the learners with a network share: when to start afresh, when to go on, and the falling rate."""

    budget: int
    ask: Ask

    def __init__(self) -> None:
        self._shape: object = None
        self._key: object = None

    def turn_to(self, ask: Ask) -> None:
        shape, key = (ask.width, ask.units), self.key(ask)
        fresh = ask.afresh or shape != self._shape or not _alike(self.ask.points, ask.points)
        changed = fresh or key != self._key
        self.ask, self._shape, self._key = ask, shape, key
        self.x, self.y = columns(ask)
        self._order = np.random.default_rng(0)
        if fresh:
            self.network = Network(1, (ask.width, ask.width), 1, ask.units)
            self.start(flatten(initial(self.network, [0])))
            self.left = self.budget
        if changed:
            # Never less than what a training that was cut short still had to go.
            self.left = max(self.left, round((1 - _WARM) * self.budget))
            self.taken = 0

    def step(self) -> None:
        done = 1 - self.left / self.budget
        self.descend(_RATES[0] * (_RATES[1] / _RATES[0]) ** done)
        self.left -= 1
        self.taken += 1

    def gradient(self, weights: Tensor, masks: list[Tensor] | None = None) -> Tensor:
        """Of the mean squared error of a mini-batch, (1, weights)."""
        x, y = self.x.numpy(), self.y.numpy()
        if self.batch < len(x):
            chosen = self._order.integers(len(x), size=self.batch)
            x, y = x[chosen], y[chosen]
        held = None if masks is None else [mask[0].numpy() for mask in masks]
        return torch.from_numpy(error_gradient(self.network, weights.detach().numpy()[0], x, y, held))[None]

    @property
    def batch(self) -> int:
        """Points a step: all of them, up to what a step can do quickly."""
        return min(_LARGEST_BATCH, len(self.x))

    @abstractmethod
    def key(self, ask: Ask) -> object:
        """What training depends on beside the network's shape."""

    @abstractmethod
    def start(self, flat: Tensor) -> None:
        """Begin at these weights, (1, weights)."""

    @abstractmethod
    def descend(self, rate: float) -> None:
        """One step at this rate."""


class BadamLearner(_NetworkLearner):
    """Plain Adam; N, δ and σ are not its business, and changing them trains nothing."""

    method = "badam"
    budget = 1200

    def key(self, ask: Ask) -> object:
        """The points alone."""
        return ask.points

    def start(self, flat: Tensor) -> None:
        """torch's Adam with the paper's small L2 penalty."""
        self._flat = flat.requires_grad_()
        self._adam = torch.optim.Adam([self._flat], weight_decay=_WEIGHT_DECAY, fused=True)
        self._read: tuple[Posterior, float] | None = None

    @property
    def batch(self) -> int:
        """At most half the points: v̂ is the square of a batch's gradients, which must not vanish at the optimum."""
        return max(1, min(_LARGEST_BATCH, len(self.x) // 2))

    def descend(self, rate: float) -> None:
        """Adam's own step."""
        self._read = None
        self._adam.param_groups[0]["lr"] = rate
        self._flat.grad = self.gradient(self._flat)
        self._adam.step()

    def posterior(self) -> Posterior:
        """Read off Adam's state, at the sliders' N, δ and σ."""
        if self._read is None:
            stack = Stack(self.network, unflatten(self.network, self._flat.detach()), self._adam)
            module = self.network.build({name: tensor[0] for name, tensor in stack.params.items()})
            read = Posterior.from_state_dict(module, stack.state_dict(0), self.ask.n_data)
            self._read = read, reach_of(read, self.x)
        read, reach = self._read
        ask = self.ask
        return badam_posterior(read, reach, n_data=ask.n_data, prior_precision=ask.prior_precision, noise=ask.noise)

    def bands(self, grid: Tensor) -> Bands:
        """The network linearised round its weights."""
        return linearised_bands(self.posterior(), grid)


class DropoutLearner(_NetworkLearner):
    """MC dropout: units switched off in training and in prediction alike."""

    method = "mc-dropout"
    budget = 1200

    def key(self, ask: Ask) -> object:
        """The points and the rate."""
        return ask.points, ask.dropout

    def start(self, flat: Tensor) -> None:
        """Adam, and a stream of masks."""
        self._flat = flat.requires_grad_()
        self._adam = torch.optim.Adam([self._flat], weight_decay=_WEIGHT_DECAY, fused=True)
        self._streams = Streams([0], "dropout")

    def descend(self, rate: float) -> None:
        """A mask for every point."""
        self._adam.param_groups[0]["lr"] = rate
        self._flat.grad = self.gradient(self._flat, dropout_masks(self._streams, self._dropped(), self.batch))
        self._adam.step()

    def bands(self, grid: Tensor) -> Bands:
        """A mask a draw, the same at every input, so that each draw is a function."""
        masks = [mask[0] for mask in dropout_masks(Streams([0], "dropout-prediction"), self._dropped(), N_DRAWS, 1)]
        params = unflatten(self.network, self._flat.detach().expand(N_DRAWS, -1))
        with torch.no_grad():
            return bands_of_draws(forward(self.network, params, grid[:, None], masks=masks).squeeze(2))

    def _dropped(self) -> Network:
        return Network(1, self.network.hidden, 1, self.network.activation, dropout=self.ask.dropout)


class BayesByBackprop(_NetworkLearner):
    """q = N(μ, softplus(ρ)²), trained on mean NLL + KL(q‖p)/N."""

    method = "bbb"
    budget = 2000

    def key(self, ask: Ask) -> object:
        """The points, N, δ and σ: all of them are in its loss."""
        return ask.points, ask.n_data, ask.prior_precision, ask.noise

    def start(self, flat: Tensor) -> None:
        """Narrow at first."""
        self._mean = flat.requires_grad_()
        self._rho = torch.full_like(flat.detach(), math.log(math.expm1(_INITIAL_STD)), requires_grad=True)
        self._adam = torch.optim.Adam([self._mean, self._rho], fused=True)
        self._streams = Streams([0], "bbb")

    def descend(self, rate: float) -> None:
        """One draw θ = μ + σε a step: ∂μ = g + δμ/N, ∂σ = gε + (δσ − 1/σ)/N, g the gradient of the mean NLL at θ."""
        ask, mean = self.ask, self._mean.detach()
        std = F.softplus(self._rho.detach())
        noise = self._streams.normal(std.shape[1])
        gradient = self.gradient(torch.addcmul(mean, std, noise)) / (2 * ask.noise**2)
        self._mean.grad = gradient + mean * (ask.prior_precision / ask.n_data)
        into_std = gradient * noise + (ask.prior_precision * std - std.reciprocal()) / ask.n_data
        self._rho.grad = into_std * torch.sigmoid(self._rho.detach())
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()

    def bands(self, grid: Tensor) -> Bands:
        """Functions of weights drawn from q."""
        std = F.softplus(self._rho.detach())
        return bands_of_draws(gaussian_draws(self.network, self._mean.detach(), std, grid))


class VadamLearner(_NetworkLearner):
    """Vadam: Adam's update at weights drawn from N(μ, 1/(N s + δ)), s its second moment."""

    method = "vadam"
    budget = 2000

    def key(self, ask: Ask) -> object:
        """The points, N, δ and σ: all of them are in its steps."""
        return ask.points, ask.n_data, ask.prior_precision, ask.noise

    def start(self, flat: Tensor) -> None:
        """The library's optimiser, over the flat weights."""
        self._flat = flat.requires_grad_()
        self._vadam = Vadam(
            [self._flat],
            lr=_RATES[0],
            n_data=self.ask.n_data,
            prior_precision=self.ask.prior_precision,
            initial_precision=1e4,
            generator=0,
        )

    def descend(self, rate: float) -> None:
        """One draw of the weights a step; N and δ are the sliders' of now."""
        self._vadam.param_groups[0].update(lr=rate, n_data=self.ask.n_data, prior_precision=self.ask.prior_precision)
        self._vadam.zero_grad()
        with self._vadam.sampled_parameters():
            self._flat.grad = self.gradient(self._flat) / (2 * self.ask.noise**2)
        self._vadam.step()

    def bands(self, grid: Tensor) -> Bands:
        """Functions of weights drawn from q."""
        precision = self.ask.n_data * self._vadam.state[self._flat]["second_moment"] + self.ask.prior_precision
        return bands_of_draws(gaussian_draws(self.network, self._flat.detach(), precision.rsqrt(), grid))


def all_learners() -> tuple[Learner, ...]:
    """One of each, in the order in which a page wants to hear from them."""
    return BadamLearner(), GaussianProcess(), DropoutLearner(), BayesByBackprop(), VadamLearner()


def columns(ask: Ask) -> tuple[Tensor, Tensor]:
    """The points as inputs and targets, (n, 1) each."""
    both = torch.tensor(ask.points, dtype=torch.float32).reshape(-1, 2)
    return both[:, :1], both[:, 1:]


def _alike(before: tuple[tuple[float, float], ...], after: tuple[tuple[float, float], ...]) -> bool:
    """Whether at least half of the points are common to both: what was learnt is then a start worth having."""
    return 2 * len(set(before) & set(after)) >= max(len(before), len(after))
