"""What learns, for a stack of runs at once: scores of every arm, and training on what was seen."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesadam.bandits.buffer import Buffer
from bayesadam.bandits.settings import (
    AgentSettings,
    BadamSettings,
    BootstrapSettings,
    GaussianSettings,
    GreedySettings,
    NetworkSettings,
    VariationalSettings,
)
from bayesadam.engine.gradients import Slope, sampled_outputs
from bayesadam.engine.network import Network, flatten, forward, initial, unflatten
from bayesadam.engine.rules import Adam, Dropout, Gaussian, Rule
from bayesadam.engine.rules.adam import second_moment
from bayesadam.engine.stack import Schedule, Stack
from bayesadam.engine.streams import Streams
from bayesadam.gaussian.noise import stream_seed
from bayesadam.gaussian.settings import PrecisionRule


class Learner(ABC):
    """Scores the arms of contexts, one independent draw per row, and learns from a buffer; one seed per run."""

    # Whether what it observes changes its scores before the next training.
    learns_at_once: ClassVar[bool] = False
    settings: AgentSettings

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        self.settings, self.buffer, self.n_arms = settings, buffer, n_arms
        self.device = buffer.contexts.device
        self.seeds = tuple(seeds)
        # What makes up the learner besides its networks, by name.
        self._memory: dict[str, Tensor] = {}
        self._streams: dict[str, Streams] = {}
        self._explore = self._stream("explore", seeds)
        # What the scores of a choice are drawn from.
        self._choice = self._explore

    def _stream(self, purpose: str, seeds: Sequence[int]) -> Streams:
        """A new source of random numbers, part of the state."""
        self._streams[purpose] = Streams(seeds, purpose, self.device)
        return self._streams[purpose]

    def scores(self, contexts: Tensor) -> Tensor:
        """(runs, k, features) → (runs, k, arms); the arm to choose is the largest."""
        return self.explored(self.drawn(contexts))

    def drawn(self, contexts: Tensor) -> Tensor:
        """One draw of the scores for every row, (runs, k, arms), before any arm is drawn at random."""
        return self._scores(contexts, self._choice)

    def explored(self, scores: Tensor) -> Tensor:
        """The scores, with random numbers in their place in a share ε of the rows."""
        if not self.settings.epsilon:
            return scores
        draws = self._explore.uniform(scores.shape[1], 1 + self.n_arms)
        return torch.where(draws[..., :1] < self.settings.epsilon, draws[..., 1:], scores)

    @abstractmethod
    def _scores(self, contexts: Tensor, streams: Streams) -> Tensor:
        """One independent draw for every row, (runs, k, arms), out of these streams."""

    def _many_scores(self, contexts: Tensor, draws: int, streams: Streams) -> Tensor:
        """So many independent draws for every row, (runs, k, draws, arms)."""
        found = self._scores(contexts.repeat_interleave(draws, dim=1), streams)
        return found.view(*contexts.shape[:2], draws, self.n_arms)

    def _outcomes(self, contexts: Tensor) -> Tensor | None:
        """Where a row has finitely many scores, all alike probable: all of them, (runs, k, outcomes, arms)."""
        return None

    def choice_probabilities(
        self, contexts: Tensor, allowed: Tensor, *, draws: int, streams: Streams, drawn: Tensor | None = None
    ) -> Tensor:
        """π(a | x) = ε/|A| + (1 − ε) P(a) with P(a) = P(a has the largest score in A), (runs, k, arms), float64.

        P is exact for agents with finitely many scores. For the others it is the share of M = `draws` draws from `streams`,
        unbiased with a standard error of √(P(1 − P)/M). Nothing of the learner changes.

        `drawn` are the scores that a choice was made by, one draw more. That draw is any of the M + 1 alike, so that given
        all of them the share, (count + 1)/(M + 1) for the arm that it chose, is the very probability of the choice; an arm
        that none of them prefers could not be chosen. As an estimate of P given the choice, the share is too large by
        (1 − P)/(M + 1) with a standard error of √(M P(1 − P))/(M + 1), and P E[1/share | chosen] = 1 − (1 − P)^(M+1): weights
        of inverse shares are unbiased but for arms with P of the order 1/M or less.

        Args:
            contexts: (runs, k, features).
            allowed: A, a mask that broadcasts to (runs, k, arms); some arm of every row must be in it.
        """
        runs, k, _ = contexts.shape
        allowed = allowed.expand(runs, k, self.n_arms)
        size = max(1, _ROWS_AT_ONCE // draws)
        parts = [slice(first, first + size) for first in range(0, k, size)]
        best = [
            self._best(contexts[:, i], allowed[:, i], draws, streams, None if drawn is None else drawn[:, i])
            for i in parts
        ]
        epsilon = self.settings.epsilon
        return epsilon * _alike(allowed) + (1 - epsilon) * torch.cat(best, dim=1)

    def _best(self, contexts: Tensor, allowed: Tensor, draws: int, streams: Streams, drawn: Tensor | None) -> Tensor:
        """P(a has the largest score in A), (runs, k, arms)."""
        scores = self._outcomes(contexts)
        if scores is None:
            scores = self._many_scores(contexts, draws, streams)
            scores = scores if drawn is None else torch.cat([scores, drawn.unsqueeze(2)], dim=2)
        best = among(scores, allowed.unsqueeze(2)).argmax(dim=3)
        counts = torch.zeros(allowed.shape, dtype=torch.float64, device=self.device)
        counts.scatter_add_(2, best, counts.new_ones(()).expand(best.shape))
        return counts / scores.shape[2]

    def observe(self, places: slice) -> None:  # noqa: B027
        """Take note of what came into the buffer at these places."""

    def train(self) -> None:  # noqa: B027
        """Learn from the buffer."""

    def tensors(self) -> dict[str, Tensor]:
        """The memory that makes up what was learnt, by name."""
        return self._memory

    def state(self) -> dict[str, Tensor]:
        """A copy of the whole state, on the CPU."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.tensors().items()}
        return state | {f"stream.{name}": stream.state() for name, stream in self._streams.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what was learnt, but no random numbers, from the `tensors` of a learner with the same settings."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name] if name in tensors else tensors[_FORMER_NAMES[name]])

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume where `state` was taken, with the same settings and seeds."""
        self.load(state)
        for name, stream in self._streams.items():
            stream.restore(state[f"stream.{name}"])


# Scores that are in memory at once when probabilities are counted.
_ROWS_AT_ONCE = 1 << 14


def among(scores: Tensor, allowed: Tensor) -> Tensor:
    """The scores of the arms that are allowed, −∞ for the others."""
    return scores.masked_fill(~allowed, -torch.inf)


def _alike(allowed: Tensor) -> Tensor:
    return allowed.double() / allowed.sum(dim=2, keepdim=True)


# The names that files of format 1 may have in place of the engine's.
_FORMER_NAMES = {
    "n_data": "n",
    "exp_avg": "first",
    "exp_avg_sq": "second",
    "rho.exp_avg": "rho.first",
    "rho.exp_avg_sq": "rho.second",
    "second_moment": "curvature",
    "hessian": "curvature",
    "initial_hessian": "first_curvature",
}


class Uniform(Learner):
    """Every arm alike."""

    def _scores(self, contexts: Tensor, streams: Streams) -> Tensor:
        return streams.uniform(contexts.shape[1], self.n_arms)

    def _best(self, contexts: Tensor, allowed: Tensor, draws: int, streams: Streams, drawn: Tensor | None) -> Tensor:
        return _alike(allowed)


# The first rewards' noise has this weight against what is observed, and each observation forgets this share of the others.
_NOISE_START, _NOISE_MEMORY = 100.0, 0.9995


class NetworkLearner(Learner):
    """A network per run, trained by one of the engine's rules on the squared error of the chosen arm.

    A training is `train_steps` mini-batches from the whole buffer, newer examples more often where it forgets. What acts is
    the average of the weights where the settings ask for one; scores are outputs at draws from the Gaussian that the rule ends with, or at the weights themselves.

    The rewards' noise is estimated as the mean squared error, in units of the targets, of predictions made before their
    rewards were learnt from: unlike the training error it does not fall when the network learns by heart.
    """

    settings: NetworkSettings

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        own, features = self.settings, buffer.contexts.shape[2]
        dropout = own.dropout if isinstance(own, GreedySettings) else 0.0
        self.network = Network(features, own.hidden, n_arms, own.activation, dropout)
        self.owners = self._owners()
        self.stack = Stack(
            self.network,
            self._rule(),
            self.owners,
            self._batch,
            n_data=self._n_data(),
            weights=initial_weights(self.network, self.owners, own.init_range, self.device),
            device=self.device,
            average=own.average,
            clip=own.clip,
            predraw=True,
            steps_per_graph=own.train_steps,
        )
        self.params = self.stack.params
        self._batches = self._stream("batches", self.owners)
        self._choice = self._stream("posterior", seeds)
        self._streams["training"] = self.stack.streams
        self._moments: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        networks = len(self.owners)
        self._shift = torch.zeros(networks, 1, device=self.device)
        self._scale = torch.ones(networks, 1, device=self.device)
        self._errors = torch.full((networks, 2), _NOISE_START, device=self.device)
        self._memory |= {"shift": self._shift, "scale": self._scale, "errors": self._errors}

    @abstractmethod
    def _rule(self) -> Rule:
        """How the networks learn."""

    @abstractmethod
    def _estimates_noise(self) -> bool:
        """Whether a training needs the variance of the rewards' noise."""

    def _owners(self) -> tuple[int, ...]:
        """The networks' seeds."""
        return self.seeds

    def _importance(self, rows: Tensor) -> Tensor | None:
        """The weights of the examples of a mini-batch, (networks, b); None for ones."""
        return None

    def gaussian(self) -> Gaussian | None:
        """Mean and variance of the weights, (networks, weights), where the agent has a Gaussian over them."""
        return self.stack.gaussian()

    def _scores(self, contexts: Tensor, streams: Streams) -> Tensor:
        moments = self._named_moments()
        if moments is None:
            return forward(self.network, self.params, contexts)
        return sampled_outputs(self.network, *moments, contexts, streams)

    def _outcomes(self, contexts: Tensor) -> Tensor | None:
        if self._named_moments() is not None:
            return None
        return forward(self.network, self.params, contexts).unsqueeze(2)

    def _named_moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """The Gaussian's mean and variance by name, kept until the next training."""
        if self._moments is None:
            found = self.gaussian()
            if found is not None:
                self._moments = unflatten(self.network, found.mean), unflatten(self.network, found.variance)
        return self._moments

    def observe(self, places: slice) -> None:
        """Compare the new rewards with what the network, which has not seen them, predicts."""
        if not (self._estimates_noise() and self.stack.done):
            return
        contexts, arms, rewards = map(self._by_network, self.buffer.seen(places))
        found = forward(self.network, self.params, contexts).gather(2, arms.unsqueeze(2)).squeeze(2)
        errors = found.sub_((rewards - self._shift) / self._scale).square_().sum(dim=1)
        count = places.stop - places.start
        memory = min(_NOISE_MEMORY, self.buffer.faded(1)) ** count
        self._errors.mul_(memory).add_(torch.stack([errors, torch.full_like(errors, count)], dim=1))

    def noise_variance(self) -> Tensor:
        """Of the rewards, as they are learnt, (networks, 1)."""
        return self._errors[:, :1] / self._errors[:, 1:]

    def _by_network(self, of_runs: Tensor) -> Tensor:
        members = len(self.owners) // self.buffer.runs
        return of_runs.repeat_interleave(members, dim=0) if members > 1 else of_runs

    def train(self) -> None:
        """t_s mini-batches."""
        self._prepare()
        self.stack.prepare(self._rows().transpose(0, 1), self._schedule())
        self.stack.run(self.settings.train_steps)
        self._moments = None

    def _schedule(self) -> Schedule:
        """Learning rates over the mini-batches of all trainings."""
        lr, decay = self.settings.lr, self.settings.lr_decay
        return lambda done: lr / (1 + decay * done)

    def _rows(self) -> Tensor:
        """The places of a training's examples, (networks, steps, b)."""
        return self.buffer.drawn(self._batches, self.settings.train_steps, self.settings.batch_size)

    def _prepare(self) -> None:
        """What a training's steps read: N, and the rewards' scale."""
        self.stack.n_data.fill_(self._n_data())
        if self.settings.standardise:
            shift, scale = self.buffer.moments()
            self._shift.copy_(self._by_network(shift))
            self._scale.copy_(self._by_network(scale))

    def _n_data(self) -> float:
        own = self.settings
        return own.n_data(self.buffer.effective_count) if isinstance(own, GaussianSettings) else 1.0

    def _batch(self, rows: Tensor) -> tuple[Tensor, Slope]:
        """Contexts, and the gradient by f of (1/b) Σ_i w_i (f_{arm_i}(x_i) − target_i)²."""
        contexts, arms, targets = self.buffer.at(rows)
        if self.settings.standardise:
            targets = targets.sub_(self._shift).div_(self._scale)
        importance, arms = self._importance(rows), arms.unsqueeze(2)

        def slope(outputs: Tensor) -> Tensor:
            errors = outputs.gather(2, arms).squeeze(2).sub_(targets).mul_(2 / rows.shape[1])
            if importance is not None:
                errors.mul_(importance)
            return torch.zeros_like(outputs).scatter_(2, arms, errors.unsqueeze(2))

        return contexts, slope

    def tensors(self) -> dict[str, Tensor]:
        """Weights, the rule's memory, the counts, and what the noise is estimated from."""
        # A training writes the scale and the deviations before it reads them.
        learnt = {name: tensor for name, tensor in self.stack.tensors().items() if name not in ("scale", "std")}
        return learnt | self._memory | {"steps": torch.tensor(self.stack.done)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The count of steps and what follows from the weights too."""
        super().load(tensors)
        self.stack.done, self._moments = int(tensors["steps"]), None


class Greedy(NetworkLearner):
    """A network per run, trained by Adam with an L2 penalty and dropout; scores are its outputs."""

    settings: GreedySettings

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        self._l2 = torch.full((len(self.owners), 1), self.settings.l2, device=self.device)
        self.stack.penalty = self._l2 if self.settings.l2 else None

    def _rule(self) -> Rule:
        return (Dropout if self.settings.dropout else Adam)(betas=self.settings.betas)

    def _estimates_noise(self) -> bool:
        return self.settings.l2_by_noise

    def _prepare(self) -> None:
        super()._prepare()
        if self.settings.l2_by_noise:
            torch.mul(self.noise_variance(), self.settings.l2, out=self._l2)


class Badam(Greedy):
    """The Gaussian that Adam's state already holds: precision N c + δ with c = v̂ᵖ, around θ or N c/(N c + δ) θ."""

    settings: BadamSettings

    def gaussian(self) -> Gaussian:
        """Read off Adam's second moment."""
        settings, mean = self.settings, self.stack.mean
        moment = second_moment(self.stack.state, settings.betas[1])
        shrink = settings.form == "likelihood"
        rule = PrecisionRule(self._n_data(), 1 / settings.prior_variance, settings.power, shrink)
        return Gaussian(rule.mean(mean, moment), rule.precision(moment).reciprocal_())


class MCDropout(Greedy):
    """Units are dropped in training and when choosing alike, with one mask per row."""

    def _scores(self, contexts: Tensor, streams: Streams) -> Tensor:
        rule = self.stack.rule
        masks = rule.masks(rule.noise(streams, self.network, contexts.shape[1]), self.network)
        return forward(self.network, self.params, contexts, masks=masks)

    def _outcomes(self, contexts: Tensor) -> None:
        return None


class Variational(NetworkLearner):
    """Any rule that learns a Gaussian over the weights; the arguments but the rule are those of `Learner`."""

    settings: VariationalSettings

    def __init__(self, kind: type[Rule], *more: Any) -> None:
        self._kind = kind
        super().__init__(*more)
        self.stack.scale.fill_(0.5 / (self.settings.noise_variance or 1))

    def _rule(self) -> Rule:
        own = self.settings
        # The engine's IVON has names of its own: betas are `averages`, and no initial Hessian means that of `initial_std`.
        given = {"averages": own.betas, "prior_precision": 1 / own.prior_variance, "initial_hessian": None}
        return self._kind.with_settings(**vars(own), **given)

    def _estimates_noise(self) -> bool:
        return self.settings.noise_variance is None

    def _prepare(self) -> None:
        super()._prepare()
        if self.settings.noise_variance is None:
            torch.div(0.5, self.noise_variance(), out=self.stack.scale)


class Bootstrap(Greedy):
    """An ensemble per run: every member weighs an observation 0 or 2, each with probability ½; one acts in each round."""

    settings: BootstrapSettings

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        room = buffer.contexts.shape[1]
        self._counts = torch.zeros(len(self.owners), room, dtype=torch.uint8, device=self.device)
        self._memory["counts"] = self._counts
        self._bootstrap = self._stream("bootstrap", self.owners)

    def _owners(self) -> tuple[int, ...]:
        members = range(self.settings.members)
        return tuple(stream_seed(seed, "member", number) for seed in self.seeds for number in members)

    def observe(self, places: slice) -> None:
        """Draw the members' weights of the new observations."""
        super().observe(places)
        self._counts[:, places] = 2 * self._bootstrap.rows(2, places.stop - places.start).to(torch.uint8)

    def _importance(self, rows: Tensor) -> Tensor:
        return self._counts.gather(1, rows).float()

    def _scores(self, contexts: Tensor, streams: Streams) -> Tensor:
        chosen = streams.rows(self.settings.members, contexts.shape[1])
        every = self._outcomes(contexts)
        return every.gather(2, chosen[:, :, None, None].expand(-1, -1, 1, self.n_arms)).squeeze(2)

    def _outcomes(self, contexts: Tensor) -> Tensor:
        runs, k, _ = contexts.shape
        every = forward(self.network, self.params, self._by_network(contexts))
        return every.view(runs, self.settings.members, k, self.n_arms).transpose(1, 2)


def initial_weights(network: Network, seeds: Sequence[int], span: float | None, device: torch.device) -> Tensor:
    """Flat weights (n, weights): U[−span, span] with biases of 0, or torch's own U(±1/√fan-in) for None."""
    params = initial(network, seeds)
    if span is not None:
        for name, tensor in params.items():
            tensor.mul_(span * math.sqrt(tensor.shape[-1]) if name.endswith("weight") else 0.0)
    return flatten(params).to(device)
