"""Agents that play many runs at once: a network per run in one stack, or the library's own learners, one per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayesadam.bandits.linear import Linear
from bayesadam.bandits.network import Hybrid
from bayesadam.bandits.observations import Observations
from bayesadam.bandits.settings import (
    AgentSettings,
    Check,
    Count,
    Flag,
    LinearSettings,
    NotNegative,
    Positive,
    PositiveOrNone,
    Share,
    SomeWidths,
    Widths,
)
from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, flatten, forward, initial, unflatten
from bayesadam.engine.rules import Adam, Dropout
from bayesadam.engine.rules import Rule as EngineRule
from bayesadam.engine.stack import Stack
from bayesadam.engine.streams import Streams
from bayesadam.errors import SettingError
from experiments.rules import Gaussian, Rule, gaussian, sampled_outputs

# The first rewards' noise has this weight against observations, and each observation forgets this share of the others.
_NOISE_START, _NOISE_MEMORY = 100.0, 0.9995


def _are_betas(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(0 <= beta < 1 for beta in value)


Betas = Annotated[tuple[float, float], Check(_are_betas, "two numbers in [0, 1)")]
Form = Annotated[Literal["likelihood", "map"], Check(lambda v: v in ("likelihood", "map"), "'likelihood' or 'map'")]
Never = Annotated[float | None, Check(lambda v: v is None, "None: of the agents here, hybrid and linear forget")]


class Buffer:
    """Contexts (runs, rounds, features), of which the first `count` are seen, chosen arms and rewards (runs, rounds).

    `sums` are Σ r and Σ r² of every run, (runs, 2), float64.
    """

    def __init__(self, contexts: Tensor) -> None:
        self.runs, rounds, _ = contexts.shape
        self.contexts, self.count, device = contexts, 0, contexts.device
        self.arms = torch.zeros(self.runs, rounds, dtype=torch.int64, device=device)
        self.rewards = torch.zeros(self.runs, rounds, device=device)
        self.sums = torch.zeros(self.runs, 2, dtype=torch.float64, device=device)
        self._first_row = torch.arange(self.runs, device=device)[:, None] * rounds

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
        contexts = self.contexts.view(-1, self.contexts.shape[2]).index_select(0, index)
        arms, rewards = (of.view(-1).index_select(0, index).view(rows.shape) for of in (self.arms, self.rewards))
        return contexts.view(*rows.shape, -1), arms, rewards

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the rewards, (runs, 1), float64; the latter 1 where all are equal."""
        means = self.sums / max(self.count, 1)
        mean, square = means[:, :1], means[:, 1:]
        variance = square - mean.square()
        return mean, torch.where(variance > 1e-12 * square.clamp(min=1e-12), variance.clamp(min=0).sqrt(), 1.0)


class Learner:
    """Chooses arms for contexts, with an independent draw for each, and learns from a buffer; one seed per run."""

    def __init__(self, settings: Any, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        self.settings, self.buffer, self.n_arms, self.seeds = settings, buffer, n_arms, tuple(seeds)
        self.device = buffer.contexts.device
        self._explore = Streams(seeds, "explore", self.device)

    def choose(self, contexts: Tensor) -> Tensor:
        """The arms (runs, k) for contexts (runs, k, features); a share ε of them at random."""
        scores = self.scores(contexts)
        if self.settings.epsilon:
            draws = self._explore.uniform(scores.shape[1], 1 + self.n_arms)
            scores = torch.where(draws[..., :1] < self.settings.epsilon, draws[..., 1:], scores)
        return scores.argmax(dim=2)

    def scores(self, contexts: Tensor) -> Tensor:
        """One draw of the scores for every row, (runs, k, arms)."""
        raise NotImplementedError

    def observe(self, rows: slice) -> None:
        """Take note of new rows of the buffer."""

    def train(self) -> None:
        """Learn from the buffer."""


@dataclass(frozen=True)
class UniformSettings(AgentSettings):
    """None of its own."""

    forget: Never = None


class Uniform(Learner):
    """Chooses every arm with the same probability."""

    def scores(self, contexts: Tensor) -> Tensor:
        """Uniform numbers."""
        return self._explore.uniform(contexts.shape[1], self.n_arms)


class EachRun(Learner):
    """The learner of a library's agent for each run."""

    def __init__(
        self, kind: type[Hybrid] | type[Linear], settings: Any, buffer: Buffer, n_arms: int, seeds: Sequence[int]
    ) -> None:
        self.settings, self.buffer, self._arms = settings, buffer, list(range(n_arms))
        n_features = buffer.contexts.shape[2]
        self.learners = [kind(settings, n_features, n_arms, seed) for seed in seeds]
        self.observed = [Observations(n_features, settings.forget) for _ in seeds]

    def choose(self, contexts: Tensor) -> Tensor:
        """As an agent acts."""
        pairs = zip(self.learners, contexts.cpu().numpy(), strict=True)
        return torch.tensor([learner.chosen(x, self._arms)[0] for learner, x in pairs], device=contexts.device)

    def observe(self, rows: slice) -> None:
        """As an agent learns."""
        parts = (of.cpu().numpy() for of in self.buffer.seen(rows))
        for learner, seen, *new in zip(self.learners, self.observed, *parts, strict=True):
            learner.observe(seen, seen.add(*new))

    def train(self) -> None:
        """Those learners for which a training is due."""
        for learner, seen in zip(self.learners, self.observed, strict=True):
            if isinstance(learner, Hybrid) and learner.due(seen):
                learner.belief = learner.train(seen, learner.belief)


@dataclass(frozen=True)
class NetworkSettings(AgentSettings):
    """A network per run, trained by a rule.

    Attributes:
        activation: `"relu"`, `"tanh"`, `"sigmoid"`, `"silu"`, `"gelu"` or `"elu"`.
        init_range: weights start in U[−r, r], biases at 0; None for torch's U(±1/√fan-in) of both.
        lr_decay: κ of the inverse decay lr/(1 + κ t) over mini-batches t; 0 for a constant rate.
        average: β of the moving average of the weights that acts in their place; 0 for none.
        clip: the norm at which the gradient of each run is clipped; None for no clipping.
        train_steps: t_s, the mini-batches of a training.
        standardise: whether rewards are learnt in units of their mean and standard deviation so far.
    """

    forget: Never = None
    hidden: Widths = (100, 100)
    activation: str = "relu"
    init_range: PositiveOrNone = None
    lr: Positive = 1e-3
    lr_decay: NotNegative = 0.0
    betas: Betas = (0.9, 0.999)
    average: Share = 0.0
    clip: PositiveOrNone = 5.0
    batch_size: Count = 512
    train_steps: Count = 50
    standardise: Flag = False


class NetworkLearner(Learner):
    """A network per run, trained by a rule on the squared error of the chosen arm.

    Scores are outputs at draws from the Gaussian that the rule ends with.
    """

    def __init__(self, settings: Any, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        n_inputs, dropout = buffer.contexts.shape[2], getattr(settings, "dropout", 0.0)
        self.network = Network(n_inputs, settings.hidden, n_arms, settings.activation, dropout)
        self.stack = Stack(
            self.network,
            self._rule(),
            self.seeds,
            self._batch,
            n_data=self._n_data(),
            weights=initial_weights(self.network, self.seeds, settings.init_range, self.device),
            device=self.device,
            average=settings.average,
            clip=settings.clip,
            predraw=True,
        )
        self.params = self.stack.params
        self._batches = Streams(seeds, "batches", self.device)
        self._posterior = Streams(seeds, "posterior", self.device)
        # The Gaussian, kept until the next training.
        self._moments: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self._shift = torch.zeros(len(self.seeds), 1, device=self.device)
        self._scale = torch.ones_like(self._shift)

    def _rule(self) -> EngineRule:
        """How the networks learn."""
        raise NotImplementedError

    def _n_data(self) -> float:
        return 1.0

    def gaussian(self) -> Gaussian:
        """Mean and variance of the weights, (runs, weights)."""
        moments = gaussian(self.stack)
        assert moments is not None
        return moments

    def scores(self, contexts: Tensor) -> Tensor:
        """Outputs, with weights of their own for every row."""
        if self._moments is None:
            mean, variance = self.gaussian()
            self._moments = unflatten(self.network, mean), unflatten(self.network, variance)
        return sampled_outputs(self.network, *self._moments, contexts, self._posterior)

    def train(self) -> None:
        """t_s mini-batches, with the learning rate lr/(1 + κ t) over the mini-batches t of all trainings."""
        self._prepare()
        lr, decay, steps = self.settings.lr, self.settings.lr_decay, self.settings.train_steps
        rows = self._batches.rows(self.buffer.count, steps, self.settings.batch_size)
        self.stack.prepare(rows.transpose(0, 1), lambda done: lr / (1 + decay * done))
        self.stack.run(steps)
        self._moments = None

    def _prepare(self) -> None:
        """Write N and the rewards' scale, which a training's steps read."""
        self.stack.n_data.fill_(self._n_data())
        if self.settings.standardise:
            shift, scale = self.buffer.moments()
            self._shift.copy_(shift)
            self._scale.copy_(scale)

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


@dataclass(frozen=True)
class GreedySettings(NetworkSettings):
    """Adam, with a penalty and dropout as regularisers.

    Attributes:
        l2: λ of the penalty (λ/2)|θ|².
        l2_by_noise: whether λ is multiplied by the estimated variance of the rewards' noise.
        dropout: the rate at which hidden units are dropped in training.
    """

    l2: NotNegative = 0.0
    l2_by_noise: Flag = False
    dropout: Share = 0.0


class AdamLearner(NetworkLearner):
    """Networks trained by Adam with an L2 penalty and dropout.

    The rewards' noise is the mean squared error, in units of the targets, of predictions made before their rewards were
    learnt: unlike the training error it does not fall when the network memorises.
    """

    def __init__(self, settings: Any, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        self._errors = torch.full((len(self.seeds), 2), _NOISE_START, device=self.device)
        self._l2 = torch.full((len(self.seeds), 1), settings.l2, device=self.device)
        self.stack.penalty = self._l2 if settings.l2 else None

    def _rule(self) -> EngineRule:
        return (Dropout if self.settings.dropout else Adam)(betas=self.settings.betas)

    def _prepare(self) -> None:
        super()._prepare()
        if self.settings.l2_by_noise:
            torch.mul(self._errors[:, :1] / self._errors[:, 1:], self.settings.l2, out=self._l2)

    def observe(self, rows: slice) -> None:
        """Compare the new rewards with the predictions of the network, which has not seen them."""
        if not (self.settings.l2_by_noise and self.stack.done):
            return
        contexts, arms, rewards = self.buffer.seen(rows)
        predicted = forward(self.network, self.params, contexts).gather(2, arms.unsqueeze(2)).squeeze(2)
        errors = predicted.sub_((rewards - self._shift) / self._scale).square_().sum(dim=1)
        count = rows.stop - rows.start
        new = torch.stack([errors, torch.full_like(errors, count)], dim=1)
        self._errors.mul_(_NOISE_MEMORY**count).add_(new)


class Greedy(AdamLearner):
    """Scores are the outputs of the network."""

    def scores(self, contexts: Tensor) -> Tensor:
        """Outputs."""
        return forward(self.network, self.params, contexts)


class MCDropout(AdamLearner):
    """Units are dropped in training and when choosing alike, with one mask per row."""

    def scores(self, contexts: Tensor) -> Tensor:
        """Outputs under dropout."""
        rule = self.stack.rule
        masks = rule.masks(rule.noise(self._posterior, self.network, contexts.shape[1]), self.network)
        return forward(self.network, self.params, contexts, masks=masks)


@dataclass(frozen=True)
class GaussianSettings(NetworkSettings):
    """A Gaussian over the weights.

    Attributes:
        n_per_round: N is the number of rounds times this; None for the batch size.
        prior_variance: of the weights, 1/δ.
    """

    n_per_round: PositiveOrNone = None
    prior_variance: Positive = 0.1

    def n_data(self, rounds: int) -> float:
        """N after so many rounds."""
        return max(rounds, 1) * (self.n_per_round or self.batch_size)


@dataclass(frozen=True)
class BadamSettings(GreedySettings, GaussianSettings):
    """The Gaussian that Adam's state holds.

    Attributes:
        form: of the posterior, `"likelihood"` or `"map"`.
        power: p of the curvature c = v̂ᵖ.
    """

    form: Form = "likelihood"
    power: Positive = 0.5


class Badam(AdamLearner):
    """The Gaussian that Adam's state already holds: precision N c + δ with c = v̂ᵖ, around θ or N c/(N c + δ) θ."""

    def _n_data(self) -> float:
        return float(self.settings.n_data(self.buffer.count))

    def gaussian(self) -> Gaussian:
        """Computed from Adam's second moment."""
        own, mode = self.settings, self.stack.mean
        state, steps = self.stack.state, self.stack.state["step"][0].double()
        # 0 before the first step.
        v = state["exp_avg_sq"] / (1 - own.betas[1] ** steps).clamp(min=torch.finfo(torch.float32).tiny).float()
        data = v.pow(own.power) * float(self.stack.n_data)
        precision = data + 1 / own.prior_variance
        return Gaussian(data / precision * mode if own.form == "likelihood" else mode, precision.reciprocal())


@dataclass(frozen=True)
class VariationalSettings(GaussianSettings):
    """A rule that learns a Gaussian by perturbing the weights: Bayes by Backprop, Vadam, IVON.

    Attributes:
        noise_variance: of a reward.
        initial_std: the standard deviation that every weight starts from.
    """

    noise_variance: Positive = 0.5
    initial_std: Positive = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        widest = math.sqrt(self.prior_variance)
        if self.initial_std > widest:
            raise SettingError(f"initial_std={self.initial_std!r} is wider than the prior: take at most {widest:g}")


class Variational(NetworkLearner):
    """Any rule that learns a Gaussian over the weights."""

    def __init__(
        self, kind: type[Rule], settings: VariationalSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]
    ) -> None:
        self._kind = kind
        super().__init__(settings, buffer, n_arms, seeds)
        self.stack.scale.fill_(0.5 / settings.noise_variance)

    def _n_data(self) -> float:
        return float(self.settings.n_data(self.buffer.count))

    def _rule(self) -> Rule:
        own = self.settings
        # IVON calls betas `averages`, and takes its initial Hessian from `initial_std` where it is None.
        changes = {"averages": own.betas, "prior_precision": 1 / own.prior_variance, "initial_hessian": None}
        return self._kind.with_settings(**{**vars(own), **changes})


@dataclass(frozen=True)
class NeuralLinearSettings(LinearSettings, GreedySettings):
    """Linear regression on the last hidden layer; `window` observations per arm are refitted after every training."""

    forget: Never = None
    window: Count = 1000
    hidden: SomeWidths = (100, 100)


class NeuralLinear(AdamLearner):
    """Linear Thompson sampling on the last hidden layer of a network that is trained as the greedy agent's.

    Training changes the features of all observations, so the statistics are recomputed after each: from the newest
    `window` observations of every arm, which bounds the cost, weighted so that they count as all of its observations.
    """

    def __init__(self, settings: Any, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        self._linear = [Linear(settings, settings.hidden[-1], n_arms, seed) for seed in seeds]

    def _features(self, contexts: Tensor) -> Any:
        inputs: tuple[list[Tensor], list[Tensor]] = ([], [])
        forward(self.network, self.params, contexts, seen=inputs)
        return inputs[0][-1].cpu().numpy()

    def scores(self, contexts: Tensor) -> Tensor:
        """Of one draw from the posterior for every row."""
        pairs = zip(self._linear, self._features(contexts), strict=True)
        drawn = [linear.sampler(x)(1, linear.streams[linear.choice])[:, 0] for linear, x in pairs]
        return torch.from_numpy(np.stack(drawn)).to(self.device)

    def observe(self, rows: slice) -> None:
        """Add the new observations to the statistics."""
        super().observe(rows)
        contexts, arms, rewards = self.buffer.seen(rows)
        self._add(self._features(contexts), arms, rewards, np.ones(arms.shape))

    def _add(self, features: Any, arms: Tensor, rewards: Tensor, weights: Any) -> None:
        moments = torch.cat(self.buffer.moments(), dim=1).tolist()
        parts = features, arms.cpu().numpy(), rewards.double().cpu().numpy(), weights
        for linear, x, chosen, paid, weight, units in zip(self._linear, *parts, moments, strict=True):
            rows = weight > 0
            linear.add(x[rows], chosen[rows], paid[rows], weight[rows], (units[0], units[1]))

    def train(self) -> None:
        """Train the network, then recompute the statistics at its new features."""
        super().train()
        counts, n = np.stack([linear.statistics.counts for linear in self._linear]), self.buffer.count
        for linear in self._linear:
            linear.statistics.fade(0.0)
        numbers = torch.arange(n, device=self.device)
        for arm in range(self.n_arms):
            own = torch.where(self.buffer.arms[:, :n] == arm, numbers, -1)
            newest = own.topk(min(self.settings.window, n), dim=1).values
            contexts, _, rewards = self.buffer.at(newest.clamp(min=0))
            held = (newest >= 0).cpu().numpy()
            weights = held * (counts[:, arm] / held.sum(axis=1).clip(min=1))[:, None]
            self._add(self._features(contexts), torch.full_like(newest, arm), rewards, weights)
