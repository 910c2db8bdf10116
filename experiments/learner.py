"""What every bandit agent is made of: settings, the observations of a stack of runs, and a learner that scores arms."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam._checks import is_count, is_number
from bayesadam.engine.streams import Streams
from bayesadam.errors import SettingError

# Scores that are in memory at once when probabilities are counted.
_ROWS_AT_ONCE = 1 << 14
# Odd numbers that mix the bits of an observation's number.
_HASH = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


Sampler = Callable[[int, Streams], Tensor]


class Check(NamedTuple):
    """A condition on the values of a setting; it stands in the field's type."""

    holds: Callable[[Any], bool]
    meaning: str


Count = Annotated[int, Check(is_count, "a positive whole number")]
CountOrZero = Annotated[int, Check(lambda v: is_count(v, 0), "a whole number, 0 or more")]
Positive = Annotated[float, Check(lambda v: is_number(v) and v > 0, "positive and finite")]
PositiveOrNone = Annotated[
    float | None, Check(lambda v: v is None or (is_number(v) and v > 0), "positive and finite, or None")
]
NotNegative = Annotated[float, Check(lambda v: is_number(v) and v >= 0, "finite and at least 0")]
Probability = Annotated[float, Check(lambda v: is_number(v) and 0 <= v <= 1, "between 0 and 1")]
Flag = Annotated[bool, Check(lambda v: isinstance(v, bool), "True or False")]


@dataclass(frozen=True)
class AgentSettings:
    """The settings of every agent.

    Attributes:
        train_every: t_f, the rounds between two trainings.
        initial_pulls: how often every arm is pulled, in turn, before the agent chooses.
        epsilon: the share of rounds with an arm drawn at random.
        forget: the half-life of what was learnt, in observations of any arm, for rewards that drift.
    """

    train_every: Count = 20
    initial_pulls: CountOrZero = 3
    epsilon: Probability = 0.0
    forget: PositiveOrNone = None

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            for check in getattr(hint, "__metadata__", ()):
                if not check.holds(getattr(self, name)):
                    raise SettingError(f"{name} must be {check.meaning}, got {getattr(self, name)!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The settings that this class has."""
        return tuple(field.name for field in fields(cls))

    def plain(self) -> dict[str, Any]:
        """The values by name, as JSON has them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> AgentSettings:
        """The inverse of `plain`; settings that the class does not have are ignored."""
        values: dict[str, Any] = {name: given[name] for name in cls.names()}
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values)


class Entry(NamedTuple):
    """An agent: its learner, the class of its settings, and the values that differ from those that all agents share."""

    learner: Callable[[Any, Buffer, int, Sequence[int]], Learner]
    settings: type[AgentSettings] = AgentSettings
    tuned: Mapping[str, Any] = MappingProxyType({})
    paper: Mapping[str, Any] = MappingProxyType({})


class Buffer:
    """Contexts (runs, room, features), chosen arms and rewards (runs, room) of a stack of runs.

    The contexts are the caller's own: observation i is row i, so nothing is copied. The first `count` rows are seen.
    With a half-life h, an observation that i others have followed weighs w = 2^(−i/h), whatever their arms; otherwise
    1. `sums` are Σ w r and Σ w r² of every run, (runs, 2), float64.

    A buffer that was thinned holds some of its `total` observations, in their order, and their `numbers`, (room,).
    """

    def __init__(self, contexts: Tensor, half_life: float | None = None) -> None:
        runs, room, _ = contexts.shape
        self.half_life = math.inf if half_life is None else half_life
        self.contexts, self.runs, self.count, self.total = contexts, runs, 0, 0
        self.arms = torch.zeros(runs, room, dtype=torch.int64, device=contexts.device)
        self.rewards = torch.zeros(runs, room, device=contexts.device)
        self.sums = torch.zeros(runs, 2, dtype=torch.float64, device=contexts.device)
        self.numbers = torch.arange(room, device=contexts.device)
        # One of 2^level observations is kept when it is thinned; the last time so many rows were.
        self._level = self.settled = 0
        self._first_row = torch.arange(runs, device=contexts.device)[:, None] * room

    def add(self, arms: Tensor, rewards: Tensor) -> slice:
        """The next observations of every run, (runs, k) each; returns their rows."""
        rows = slice(self.count, self.count + arms.shape[1])
        self.arms[:, rows] = arms
        self.rewards[:, rows] = rewards
        self.count, self.total = rows.stop, self.total + arms.shape[1]
        wide = rewards.double()
        powers = torch.stack([wide, wide.square()], dim=2)
        if not math.isinf(self.half_life):
            self.sums.mul_(self.faded(arms.shape[1]))
            powers.mul_(self.weights(rows).unsqueeze(1))
        self.sums.add_(powers.sum(dim=1))
        return rows

    def faded(self, count: int) -> float:
        """2^(−k/h), by which a weight is multiplied when k more observations come."""
        return float(2 ** (-count / self.half_life))

    def weights(self, rows: slice | Tensor) -> Tensor:
        """2^(−age/h) of observations, with the newest one's age 0, float64."""
        return torch.exp2((self.numbers[rows] - (self.total - 1)).double() / self.half_life)

    @property
    def effective_count(self) -> float:
        """The sum of all weights, Σ_{i<n} 2^(−i/h) = (1 − 2^(−n/h))/(1 − 2^(−1/h))."""
        if math.isinf(self.half_life):
            return self.total
        return math.expm1(-math.log(2) * self.total / self.half_life) / math.expm1(-math.log(2) / self.half_life)

    def drawn(self, streams: Streams, *shape: int) -> Tensor:
        """Rows for mini-batches, (seeds, *shape), with replacement and with probabilities ∝ 2^(−age/h).

        The age is drawn by inverting its distribution function P(age < i) = (1 − 2^(−i/h))/(1 − 2^(−n/h)).
        """
        if math.isinf(self.half_life):
            return streams.rows(self.count, *shape)
        rate = math.log(2) / self.half_life
        ages = torch.log1p(streams.uniform(*shape).double() * math.expm1(-rate * self.count)) / -rate
        return self.count - 1 - ages.long().clamp_(max=self.count - 1)

    def seen(self, rows: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts (runs, k, features), arms and rewards (runs, k) at the same rows of every run."""
        return self.contexts[:, rows], self.arms[:, rows], self.rewards[:, rows]

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of contexts (n, b, features), arms and rewards (n, b) at rows (n, b), n a multiple of the runs."""
        n, b = rows.shape
        index = (rows + self._first_row.repeat_interleave(n // self.runs, dim=0)).flatten()
        contexts = self.contexts.view(-1, self.contexts.shape[2]).index_select(0, index)
        arms, rewards = (of.view(-1).index_select(0, index).view(n, b) for of in (self.arms, self.rewards))
        return contexts.view(n, b, -1), arms, rewards

    def moments(self) -> tuple[Tensor, Tensor]:
        """Weighted mean and standard deviation of the rewards, (runs, 1), float64; the latter 1 where all are equal."""
        means = self.sums / max(self.effective_count, 1)
        mean, square = means[:, :1], means[:, 1:]
        variance = square - mean.square()
        return mean, torch.where(variance > 1e-12 * square.clamp(min=1e-12), variance.clamp(min=0).sqrt(), 1.0)

    def state(self) -> dict[str, Tensor]:
        """All but the contexts."""
        found = {"arms": self.arms[:, : self.count], "rewards": self.rewards[:, : self.count], "sums": self.sums}
        if self.total > self.count:
            thinned = torch.tensor([self.total, self._level, self.settled])
            found |= {"numbers": self.numbers[: self.count], "thinned": thinned}
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume where `state` was taken, with the same contexts."""
        self.count = self.total = state["arms"].shape[1]
        self.arms[:, : self.count].copy_(state["arms"])
        self.rewards[:, : self.count].copy_(state["rewards"])
        self.sums.copy_(state["sums"])
        if "thinned" in state:
            self.total, self._level, self.settled = state["thinned"].tolist()
            self._renumber(state["numbers"])

    def _renumber(self, numbers: Tensor) -> None:
        """The numbers of the rows held, and of those to come."""
        self.numbers = torch.cat([numbers, torch.arange(self.total, self.total + len(self.numbers) - len(numbers))])

    def kept(self, most: int) -> Tensor:
        """The rows, at most so many, that `thin` keeps: with a half-life the newest, otherwise a random sample.

        An observation is in it if a hash of its number, uniform in [0, 1), is below 2^−level, whatever comes later.
        """
        if not math.isinf(self.half_life):
            return torch.arange(max(0, self.count - most), self.count)
        mixed = self.numbers[: self.count].numpy().astype(np.uint64)
        for factor in _HASH:
            mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(factor)
        uniform = (mixed >> np.uint64(11)) * 2.0**-53
        while (found := np.flatnonzero(uniform < 2.0**-self._level)).size > most:
            self._level += 1
        return torch.from_numpy(found)

    def thin(self, rows: Tensor) -> None:
        """Hold these rows only."""
        moved = rows != torch.arange(len(rows))
        first = int(moved.int().argmax()) if moved.any() else len(rows)
        for tensor in (self.contexts, self.arms, self.rewards):
            tensor[:, first : len(rows)] = tensor[:, rows[first:]]
        self.count = self.settled = len(rows)
        self._renumber(self.numbers[rows])

    def until(self, count: int) -> Buffer:
        """The first rows, in the same memory; what is added to this one later does not change it."""
        found = copy.copy(self)
        found.count, found.total, found.sums = count, self.total - (self.count - count), self.sums.clone()
        return found

    def widened(self, room: int) -> Buffer:
        """The same observations in a buffer with more room."""
        contexts = self.contexts.new_zeros(self.runs, room, self.contexts.shape[2])
        contexts[:, : self.count] = self.contexts[:, : self.count]
        wide = Buffer(contexts, self.half_life)
        wide.restore(self.state())
        return wide


def _parts(k: int, draws: int) -> Iterator[slice]:
    """Rows whose draws are in memory at once."""
    size = max(1, _ROWS_AT_ONCE // draws)
    return (slice(first, first + size) for first in range(0, k, size))


def with_constant(x: Tensor) -> Tensor:
    """The features with a constant 1 appended, float64; on a CPU by numpy, whose calls cost less."""
    if x.device.type != "cpu":
        return F.pad(x.double(), (0, 1), value=1.0)
    found = np.ones((*x.shape[:-1], x.shape[-1] + 1))
    found[..., :-1] = x.numpy()
    return torch.from_numpy(found)


class Learner(ABC):
    """Scores the arms of contexts, one independent draw per row, and learns from a buffer; one seed per run."""

    # Whether an observation changes the scores before the next training.
    learns_at_once: ClassVar[bool] = False
    settings: AgentSettings

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        self.settings, self.buffer, self.n_arms = settings, buffer, n_arms
        self.device, self.seeds = buffer.contexts.device, tuple(seeds)
        # The state besides that of the networks, and the sources of random numbers, by name.
        self._memory: dict[str, Tensor] = {}
        self._streams: dict[str, Streams] = {}
        self._choice = self._explore = self._stream("explore", seeds)

    def _stream(self, purpose: str, seeds: Sequence[int]) -> Streams:
        """A new source of random numbers, part of the state."""
        self._streams[purpose] = Streams(seeds, purpose, self.device)
        return self._streams[purpose]

    def scores(self, contexts: Tensor) -> Tensor:
        """(runs, k, features) → (runs, k, arms); the arm to choose is the largest."""
        return self.explored(self.drawn(contexts))

    def drawn(self, contexts: Tensor) -> Tensor:
        """One draw of the scores for every row, (runs, k, arms), before any arm is drawn at random."""
        return self.sampler(contexts)(1, self._choice).squeeze(2)

    def sampler(self, contexts: Tensor) -> Sampler:
        """n ↦ n independent draws of the scores for every row, (runs, k, n, arms), from given streams."""
        return partial(self._draws, contexts)

    def explored(self, scores: Tensor) -> Tensor:
        """The scores, replaced by random numbers in a share ε of the rows."""
        if not self.settings.epsilon:
            return scores
        draws = self._explore.uniform(scores.shape[1], 1 + self.n_arms)
        return torch.where(draws[..., :1] < self.settings.epsilon, draws[..., 1:], scores)

    @abstractmethod
    def _draws(self, contexts: Tensor, n: int, streams: Streams) -> Tensor:
        """n independent draws of the scores for every row, (runs, k, n, arms), from these streams."""

    def _outcomes(self, contexts: Tensor) -> Tensor | None:
        """All scores a row can have, equally probable, (runs, k, outcomes, arms), where they are finitely many."""
        return None

    def choice_probabilities(
        self, contexts: Tensor, allowed: Tensor, *, draws: int, streams: Streams, drawn: Tensor | None = None
    ) -> Tensor:
        """π(a | x) = ε/|A| + (1 − ε) P(a) with P(a) = P(a has the largest score in A), (runs, k, arms), float64.

        P is exact for agents with finitely many scores. For the others it is the share of M = `draws` draws from
        `streams`, unbiased with a standard error of √(P(1 − P)/M). `allowed` is A, a mask.

        `drawn` are the scores of a choice, one draw more. All M + 1 draws are exchangeable, so given all of them the
        share, (count + 1)/(M + 1) for the chosen arm, is the probability of the choice. As an estimate of P given the
        choice, it is too large by (1 − P)/(M + 1) with a standard error of √(M P(1 − P))/(M + 1), and
        P E[1/share | chosen] = 1 − (1 − P)^(M+1): inverse shares are unbiased but for arms with P of the order 1/M.
        """
        runs, k, _ = contexts.shape
        allowed = allowed.expand(runs, k, self.n_arms)
        random = allowed.double() / allowed.sum(dim=-1, keepdim=True)
        if isinstance(self, Uniform):
            return random
        best = torch.zeros_like(random)
        for part in _parts(k, draws):
            scores = self._outcomes(contexts[:, part])
            if scores is None:
                scores = self.sampler(contexts[:, part])(draws, streams)
                scores = scores if drawn is None else torch.cat([scores, drawn[:, part].unsqueeze(2)], dim=2)
            chosen = scores.masked_fill(~allowed[:, part].unsqueeze(2), -torch.inf).argmax(dim=3)
            best[:, part].scatter_add_(2, chosen, best.new_ones(()).expand(chosen.shape)).div_(scores.shape[2])
        return self.settings.epsilon * random + (1 - self.settings.epsilon) * best

    def decided(
        self, contexts: Tensor, allowed: Sequence[int], *, draws: int, streams: Streams
    ) -> tuple[list[int], npt.NDArray[np.float64]]:
        """The arms chosen for contexts of one run, k of them, and `choice_probabilities` of those allowed, (k, arms).

        These are counted by numpy, whose calls cost less than torch's.
        """
        many, epsilon, chosen, shares = len(allowed), self.settings.epsilon, list[int](), []
        on_offer = slice(None) if many == self.n_arms else allowed
        for part in _parts(contexts.shape[1], draws):
            x = contexts[:, part]
            sample = self.sampler(x)
            drawn = sample(1, self._choice)
            own = drawn.numpy()[0, :, 0, :][:, on_offer].argmax(axis=1)
            explored = self.explored(drawn.squeeze(2)).numpy()[0][:, on_offer].argmax(axis=1) if epsilon else own
            chosen += explored.tolist()
            scores = self._outcomes(x)
            best = (sample(draws, streams) if scores is None else scores).numpy()[0][:, :, on_offer].argmax(axis=2)
            first, at = many * np.arange(len(best)), best.shape[1]
            counts = np.bincount((best + first[:, None]).ravel(), minlength=many * len(best))
            if scores is None:
                counts[first + own] += 1
                at += 1
            shares.append(counts.reshape(-1, many) / at)
        found = np.full((len(chosen), many), 1 / many) if isinstance(self, Uniform) else np.concatenate(shares)
        return [allowed[at] for at in chosen], epsilon / many + (1 - epsilon) * found if epsilon else found

    def observe(self, rows: slice) -> None:  # noqa: B027
        """Take note of new rows of the buffer."""

    def use(self, buffer: Buffer) -> None:
        """Go on with a buffer that has the same rows, or more, and other room."""
        self.buffer = buffer

    def thin(self, rows: Tensor) -> None:  # noqa: B027
        """Take note that the buffer is about to hold these rows only."""

    @property
    def due(self) -> bool:
        """Whether `train` would do something."""
        return True

    def train(self) -> None:  # noqa: B027
        """Learn from the buffer."""

    def tensors(self) -> dict[str, Tensor]:
        """What was learnt, by name."""
        return self._memory

    def state(self) -> dict[str, Tensor]:
        """A copy of the whole state, on the CPU."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.tensors().items()}
        return state | {f"stream.{name}": stream.state() for name, stream in self._streams.items()}

    def parts(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views of a tensor of the state, each of which keeps its leading part when arms are added."""
        return (tensor,)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what was learnt, but no random numbers, from the `tensors` of a learner with the same settings."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume where `state` was taken, with the same settings and seeds."""
        self.load(state)
        for name, stream in self._streams.items():
            stream.restore(state[f"stream.{name}"])


class Uniform(Learner):
    """Chooses every arm with the same probability."""

    def _draws(self, contexts: Tensor, n: int, streams: Streams) -> Tensor:
        return streams.uniform(contexts.shape[1], n, self.n_arms)


UNIFORM = Entry(Uniform)
