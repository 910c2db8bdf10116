"""Agents that play many runs at once: a network per run in one stack, or the library's own learners, one per run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from bayesadam.bandits import settings as kinds
from bayesadam.bandits.network import Hybrid
from bayesadam.bandits.observations import Observations
from bayesadam.bandits.settings import AgentSettings, Check
from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, flatten, forward, initial, unflatten
from bayesadam.engine.streams import Streams
from bayesadam.errors import SettingError
from experiments.rules import Rule, sampled_outputs
from experiments.stacks import Stack

# The first rewards' noise has this weight against observations, and each observation forgets this share of the others.
_NOISE_START, _NOISE_MEMORY = 100.0, 0.9995


def _are_betas(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(0 <= beta < 1 for beta in value)


Betas = Annotated[tuple[float, float], Check(_are_betas, "two numbers in [0, 1)")]
Form = Annotated[Literal["likelihood", "map"], Check(lambda v: v in ("likelihood", "map"), "'likelihood' or 'map'")]


class Buffer:
    """Contexts (runs, rounds, features), of which the first `count` are seen, chosen arms and rewards (runs, rounds).

    `sums` are Σ r and Σ r² of every run, (runs, 2), float64.
    """

    def __init__(self, contexts: Tensor) -> None:
        runs, rounds, self.n_features = contexts.shape
        self.contexts, self.count, device = contexts, 0, contexts.device
        self.arms = torch.zeros(runs, rounds, dtype=torch.int64, device=device)
        self.rewards = torch.zeros(runs, rounds, device=device)
        self.sums = torch.zeros(runs, 2, dtype=torch.float64, device=device)
        self._first_row = torch.arange(runs, device=device)[:, None] * rounds

    def add(self, arms: Tensor, rewards: Tensor) -> slice:
        """The next observations of every run, (runs, k) each; returns their rows."""
        rows = slice(self.count, self.count + arms.shape[1])
        self.arms[:, rows], self.rewards[:, rows], self.count = arms, rewards, rows.stop
        wide = rewards.double()
        self.sums.add_(torch.stack([wide, wide.square()], dim=2).sum(dim=1))
        return rows

    def seen(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts (runs, k, features), arms and rewards (runs, k) at the same rows of every run."""
        return self.contexts[:, rows], self.arms[:, rows], self.rewards[:, rows]

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of contexts (runs, b, features), arms and rewards (runs, b) at rows (runs, b)."""
        index = (rows + self._first_row).flatten()
        contexts = self.contexts.view(-1, self.n_features).index_select(0, index)
        arms, rewards = (of.view(-1).index_select(0, index).view(rows.shape) for of in (self.arms, self.rewards))
        return contexts.view(*rows.shape, -1), arms, rewards

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the rewards, (runs, 1), float64; the latter 1 where all are equal."""
        mean, square = torch.split(self.sums / max(self.count, 1), 1, dim=1)
        variance = square - mean.square()
        return mean, torch.where(variance > 1e-12 * square.clamp(min=1e-12), variance.clamp(min=0).sqrt(), 1.0)


class Uniform:
    """Chooses every arm with the same probability. Every learner has its members, and one seed per run."""

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        self.n_arms, self._explore = n_arms, Streams(seeds, "explore", buffer.contexts.device)

    def choose(self, contexts: Tensor) -> Tensor:
        """The arms (runs, k) for contexts (runs, k, features), with an independent draw for each."""
        return self._explore.uniform(contexts.shape[1], self.n_arms).argmax(dim=2)

    def observe(self, rows: slice) -> None:
        """Take note of new rows of the buffer."""

    def train(self) -> None:
        """Learn from the buffer."""


class EachRun(Uniform):
    """The library's learner for each run, trained where that is due."""

    def __init__(self, settings: Any, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        self.buffer, self._arms = buffer, list(range(n_arms))
        self.learners = [Hybrid(settings, buffer.n_features, n_arms, seed) for seed in seeds]
        self.observed = [Observations(buffer.n_features, settings.forget) for _ in seeds]

    def choose(self, contexts: Tensor) -> Tensor:
        pairs = zip(self.learners, contexts.cpu().numpy(), strict=True)
        return torch.tensor([learner.chosen(x, self._arms)[0] for learner, x in pairs], device=contexts.device)

    def observe(self, rows: slice) -> None:
        parts = (part.cpu().numpy() for part in self.buffer.seen(rows))
        for learner, seen, *new in zip(self.learners, self.observed, *parts, strict=True):
            learner.observe(seen, seen.add(*new))

    def train(self) -> None:
        for learner, seen in zip(self.learners, self.observed, strict=True):
            if learner.due(seen):
                learner.belief = learner.train(seen, learner.belief)


@dataclass(frozen=True)
class NetworkSettings(AgentSettings):
    """A network per run, trained by a rule.

    Weights start in U[−`init_range`, `init_range`], biases at 0; None for torch's U(±1/√fan-in) of both. `lr_decay` is
    κ of the inverse decay lr/(1 + κ t) over mini-batches t, `train_steps` t_s, those of a training; `average` the β of
    a moving average of the weights that acts in their place, 0 for none; `clip` the norm at which the gradient of each
    run is clipped. With `standardise` rewards are learnt in units of their mean and standard deviation so far.
    """

    hidden: kinds.Widths = (100, 100)
    activation: str = "relu"
    init_range: kinds.PositiveOrNone = None
    lr: kinds.Positive = 1e-3
    lr_decay: kinds.NotNegative = 0.0
    betas: Betas = (0.9, 0.999)
    average: kinds.Share = 0.0
    clip: kinds.PositiveOrNone = 5.0
    batch_size: kinds.Count = 512
    train_steps: kinds.Count = 50
    standardise: kinds.Flag = False

    def n_data(self, rounds: int) -> float:
        """N after so many rounds, for rules that have one."""
        return 1.0


@dataclass(frozen=True)
class GreedySettings(NetworkSettings):
    """Adam, with a penalty (λ/2)|θ|² and dropout; `l2_by_noise` multiplies λ by the estimated variance of the noise."""

    l2: kinds.NotNegative = 0.0
    l2_by_noise: kinds.Flag = False
    dropout: kinds.Share = 0.0


@dataclass(frozen=True)
class GaussianSettings(NetworkSettings):
    """A Gaussian over the weights: N is the number of rounds times `n_per_round`, which is the batch size for None."""

    n_per_round: kinds.PositiveOrNone = None
    prior_variance: kinds.Positive = 0.1

    def n_data(self, rounds: int) -> float:
        return float(max(rounds, 1) * (self.n_per_round or self.batch_size))


@dataclass(frozen=True)
class BadamSettings(GreedySettings, GaussianSettings):
    """The Gaussian that Adam's state holds, of either form."""

    form: Form = "likelihood"


@dataclass(frozen=True)
class VariationalSettings(GaussianSettings):
    """A rule that learns a Gaussian by perturbing the weights, all from one deviation: Bayes by Backprop, Vadam."""

    noise_variance: kinds.Positive = 0.5
    initial_std: kinds.Positive = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        widest = math.sqrt(self.prior_variance)
        if self.initial_std > widest:
            raise SettingError(f"initial_std={self.initial_std!r} is wider than the prior: take at most {widest:g}")


# How the networks of an agent learn, by its settings and their shape, on a device.
MakeRule = Callable[[Any, Network, torch.device], Rule]


def by(kind: type[Rule]) -> MakeRule:
    """A rule with those of the settings that it has; units are dropped where the settings say so."""

    def make(settings: Any, network: Network, device: torch.device) -> Rule:
        prior = {"prior_precision": 1 / settings.prior_variance} if hasattr(settings, "prior_variance") else {}
        return kind.with_settings(**vars(settings), **prior)

    return make


class NetworkLearner(Uniform):
    """A network per run, trained by a rule on the squared error of the chosen arm.

    Scores are outputs at draws from the Gaussian that the rule ends with, one for each row; where it ends with a point,
    the outputs, under dropout with `drops`. For `l2_by_noise` the rewards' noise is the mean squared error, in units of
    the targets, of predictions made before their rewards were learnt: unlike the training error it does not fall when
    the network memorises.
    """

    def __init__(
        self, rule: MakeRule, settings: Any, buffer: Buffer, n_arms: int, seeds: Sequence[int], *, drops: bool = False
    ) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        device, dropout, l2 = buffer.contexts.device, getattr(settings, "dropout", 0.0), getattr(settings, "l2", 0)
        self.settings, self.buffer, self._drops = settings, buffer, drops
        self.network = Network(buffer.n_features, settings.hidden, n_arms, settings.activation, dropout)
        how: Any = {"device": device, "average": settings.average, "clip": settings.clip or math.inf}
        how |= {"weights": initial_weights(self.network, seeds, settings.init_range, device)}
        made, n_data = rule(settings, self.network, device), settings.n_data(buffer.count)
        self.stack = Stack(self.network, made, seeds, self._batch, n_data=n_data, **how)
        self._batches, self._posterior = Streams(seeds, "batches", device), Streams(seeds, "posterior", device)
        # The Gaussian, kept until the next training.
        self._moments: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self._shift = torch.zeros(len(seeds), 1, device=device)
        self._scale = torch.ones_like(self._shift)
        self._errors = torch.full((len(seeds), 2), _NOISE_START, device=device)
        self.stack.penalties = torch.full_like(self._shift, l2) if l2 else None
        self.stack.scale.fill_(0.5 / getattr(settings, "noise_variance", 0.5))

    def choose(self, contexts: Tensor) -> Tensor:
        """The arms of the highest scores, (runs, k); a share ε of them at random."""
        scores = self.scores(contexts)
        if self.settings.epsilon:
            draws = self._explore.uniform(scores.shape[1], 1 + self.n_arms)
            scores = torch.where(draws[..., :1] < self.settings.epsilon, draws[..., 1:], scores)
        return scores.argmax(dim=2)

    def scores(self, contexts: Tensor) -> Tensor:
        """One draw of the scores for every row, (runs, k, arms)."""
        rule, masks = self.stack.rule, None
        if self._moments is None and (belief := self.stack.gaussian()) is not None:
            self._moments = unflatten(self.network, belief.mean), unflatten(self.network, belief.variance)
        if self._moments is None:
            if self._drops:
                masks = rule.masks(rule.noise(self._posterior, self.network, contexts.shape[1]), self.network)
            return forward(self.network, self.stack.params, contexts, masks=masks)
        widths = [*self.network.hidden, self.n_arms]
        noise = torch.split(self._posterior.normal(contexts.shape[1], sum(widths)), widths, dim=2)
        return sampled_outputs(self.network, *self._moments, contexts, noise)

    def observe(self, rows: slice) -> None:
        """Compare the new rewards with the predictions of the network, which has not seen them."""
        if not (getattr(self.settings, "l2_by_noise", False) and self.stack.done):
            return
        contexts, arms, rewards = self.buffer.seen(rows)
        predicted = forward(self.network, self.stack.params, contexts).gather(2, arms.unsqueeze(2)).squeeze(2)
        errors = predicted.sub_((rewards - self._shift) / self._scale).square_().sum(dim=1)
        count = rows.stop - rows.start
        self._errors.mul_(_NOISE_MEMORY**count).add_(torch.stack([errors, torch.full_like(errors, count)], dim=1))

    def train(self) -> None:
        """t_s mini-batches, with the learning rate lr/(1 + κ t) over the mini-batches t of all trainings."""
        settings = self.settings
        # N, the rewards' scale and the penalty, which a training's steps read.
        self.stack.n_data.fill_(settings.n_data(self.buffer.count))
        if settings.standardise:
            self._shift, self._scale = (moment.float() for moment in self.buffer.moments())
        if getattr(settings, "l2_by_noise", False):
            self.stack.penalties = self._errors[:, :1] / self._errors[:, 1:] * settings.l2
        rows = self._batches.rows(self.buffer.count, settings.train_steps, settings.batch_size)
        self.stack.train(rows.transpose(0, 1), lambda done: settings.lr / (1 + settings.lr_decay * done))
        self._moments = None

    def _batch(self, rows: Tensor) -> tuple[Tensor, Slope]:
        """Contexts, and the gradient by f of (1/b) Σ_i (f_{arm_i}(x_i) − target_i)²."""
        contexts, arms, targets = self.buffer.at(rows)
        if self.settings.standardise:
            targets = targets.sub_(self._shift).div_(self._scale)
        arms = arms.unsqueeze(2)

        def slope(outputs: Tensor) -> Tensor:
            errors = outputs.gather(2, arms).squeeze(2).sub_(targets).mul_(2 / rows.shape[1])
            return torch.zeros_like(outputs).scatter_(2, arms, errors.unsqueeze(2))

        return contexts, slope


def initial_weights(network: Network, seeds: Sequence[int], span: float | None, device: torch.device) -> Tensor:
    """Flat weights (n, weights): U[−span, span] with biases of 0, or torch's own U(±1/√fan-in) for None."""
    params = initial(network, seeds)
    if span is not None:
        for name, tensor in params.items():
            tensor.mul_(span * math.sqrt(tensor.shape[-1]) if name.endswith("weight") else 0.0)
    return flatten(params).to(device)
