"""The hybrid agent: exact linear heads on the contexts and on a network's last hidden layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from bayesadam._checks import is_count, is_number
from bayesadam.bandits.learner import (
    Buffer,
    Check,
    Count,
    CountOrZero,
    Entry,
    Positive,
    Probability,
    Sampler,
    with_constant,
)
from bayesadam.bandits.linear import LinearPosterior, Statistics, shared_precision
from bayesadam.bandits.networks import AdamLearner, GreedySettings, SomeWidths
from bayesadam.bandits.prior import Prior
from bayesadam.engine.streams import Streams
from bayesadam.errors import MatchError

# The prior, in units of the rewards' range R: functions have a standard deviation of the first times R, and the noise
# is inverse gamma with a shape of the second and a scale of the third times R²/(features + 1)³: trying everything is
# cheap in few dimensions only.
_FUNCTION, _SHAPE, _NOISE = 0.25, 1.0, 9.0
# The prior that arms share is learnt from them and from so many arms with the prior above, in so many steps a training.
_FIRST_ARMS, _SHARED_STEPS = 4.0, 2
# The range seen is widened by this factor where `reward_range` is not given: more may come.
_MORE = 2.0
# Each observation forgets this share of the others' errors when the network's noise is estimated.
_MEMORY = 0.9995
# The share of the hidden layer is drawn towards 0 as if by this many observations.
_CAUTION = 4.0
# The penalty falls to a half over this many observations.
_PENALISED = 500.0
# A learnt prior holds unless the noise is larger than in all but this share of the earlier problems.
_LEAST_PROBABLE = 0.01
_CHUNK = 4096


def _is_range(value: Any) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value))
    return value is None or (pair and value[0] < value[1])


Range = Annotated[tuple[float, float] | None, Check(_is_range, "a tuple (low, high) with low below high, or None")]
Factor = Annotated[float, Check(lambda v: is_number(v) and v > 1, "finite and above 1")]
Several = Annotated[int, Check(lambda v: is_count(v, 2), "a whole number, 2 or more")]
Always = Annotated[bool, Check(lambda v: v is True, "True for this agent")]


@dataclass(frozen=True)
class HybridSettings(GreedySettings):
    """Two exact linear heads, on the contexts and on the last hidden layer of a greedy network.

    Attributes:
        reward_range: (low, high), where it is known; None for twice the range seen so far.
        exploration: α, the share of the posterior's standard deviation that acts in the end; it begins at 1.
        settling: n₀: α² of an arm falls as n₀/(n₀ + n) does over its own n observations.
        growth: the next training comes when the number of observations has grown by this factor.
        hold_out: one of so many observations is held out from the network, to weigh the heads by.
        train_every: the fewest observations between two trainings; `simulate` shows rewards so many at a time.
    """

    initial_pulls: CountOrZero = 1
    reward_range: Range = None
    exploration: Probability = 0.0
    settling: Positive = 1.0
    growth: Factor = 1.15
    hold_out: Several = 10
    train_every: Count = 5
    hidden: SomeWidths = (100, 100)
    train_steps: Count = 200
    standardise: Always = True
    l2_by_noise: Always = True


def _of(values: Tensor, components: Tensor) -> Tensor:
    """Of values (runs, k, arms, components) those of one component for every draw and arm, (runs, k, draws, arms)."""
    return values.mT if values.shape[3] == 1 else values.mT.gather(2, components)


class Hybrid(AdamLearner):
    """Thompson sampling with f = (1 − s) f_x + s f_h, linear in the contexts and in a network's last hidden layer.

    A learnt prior replaces the contexts by features of its own; a decision draws a component of it: see `Prior`.

    Both heads are exact Gaussians that every observation updates at once. After a training the head on the hidden layer
    is refitted to all observations, around the network's own last layer. s minimises the squared error of the sum on
    held-out observations: where rewards are linear, or data are few, it is near 0. It is 0 as long as a learnt prior's
    errors are as small as on the problems that it was learnt from.

    The prior is in units of the rewards, so that a reward not yet seen stays possible (`_FUNCTION`, `_NOISE`). How much
    each feature of the contexts matters is learnt from all arms together: see `shared_precision`. σ² is the noise of
    all arms together: b − b₀, which the heads hold, and a − a₀ are summed over them. A decision draws each arm's f with
    one normal number ε for both heads, f + ε ((1 − s) √(V_x) + s √(V_h)) with V = (α² σ² + b₀/a) xᵀ C x. α falls from 1
    to `exploration` with the arm's own observations, and b₀/a with the arm's own a: an arm that was seldom chosen stays
    doubtful however much is known of the others.

    The network's penalty is λσ² m/(m + n): as a prior's, it falls with the observations and with the noise.
    """

    learns_at_once = True
    settings: HybridSettings

    def __init__(self, settings: HybridSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        runs, width = buffer.runs, buffer.contexts.shape[2] + 1
        self._linear = LinearPosterior.prior(runs, n_arms, width, _SHAPE, self.device)
        self._hidden = LinearPosterior.prior(runs, n_arms, settings.hidden[-1] + 1, _SHAPE, self.device)
        self._share = torch.zeros(runs, 1, dtype=torch.float64, device=self.device)
        self._ends = torch.tensor([torch.inf, -torch.inf]).to(self._share).repeat(runs, 1)
        self._due = torch.zeros(runs, dtype=torch.int64)
        self._memory |= {"share": self._share, "ends": self._ends, "due": self._due}
        self._begin_dropped(width)
        for name, head in (("linear", self._linear), ("hidden", self._hidden)):
            self._memory |= {f"{name}.{part}": tensor for part, tensor in vars(head).items()}
        self._choice = self._stream("hybrid", seeds)
        self._prior: Prior | None = None
        # b₀ of both heads as `sampler` knows it, and the range and scale from which it follows.
        self._first_noise: tuple[bytes, list[float]] = (b"", [])
        self._first_shape: Tensor | float = _SHAPE
        # Whether all arms have one component and one σ²; under a learnt prior with exchangeable arms each has its own.
        self._joint = True

    def _begin_dropped(self, width: int) -> None:
        """Statistics, on the contexts' features, of the observations that the buffer no longer holds: none so far."""
        self._dropped = Statistics.zeros(self.buffer.runs, self.n_arms, width, self.device)
        self._dropped_at = torch.zeros((), dtype=torch.int64)
        self._memory |= {f"dropped.{part}": tensor for part, tensor in vars(self._dropped).items()}
        self._memory["dropped.at"] = self._dropped_at

    def start_from(self, prior: Prior) -> None:
        """Replace the head on the contexts by a learnt prior with its features."""
        width = self.buffer.contexts.shape[2]
        if prior.network.n_inputs != width:
            raise MatchError(f"the prior is for contexts of {prior.network.n_inputs} numbers, these have {width}")
        self._joint = not prior.exchangeable
        self._prior = found = prior.to(self.device).for_arms(self.n_arms)
        self._inverse, mean = torch.linalg.inv(found.covariance), found.mean.transpose(0, 1)
        self._first_shape = found.shape
        moments = (mean, found.covariance, found.shape.expand(self.n_arms), torch.zeros_like(mean[..., 0]))
        self._linear = LinearPosterior(*(part.repeat(self.buffer.runs, *[1] * part.dim()) for part in moments))
        self._memory |= {f"linear.{part}": tensor for part, tensor in vars(self._linear).items()}
        self._begin_dropped(mean.shape[2])

    def _range(self) -> Tensor:
        """R in units of the targets, (runs, 1)."""
        given, scale = self.settings.reward_range, self._scale.double()
        if given is not None:
            return (given[1] - given[0]) / scale
        low, high = self._ends[:, :1], self._ends[:, 1:]
        seen = torch.where(high > low, high - low, high.abs().clamp(min=1))
        return _MORE * seen.nan_to_num(posinf=1) / scale

    def _noise(self, head: LinearPosterior) -> Tensor:
        """b₀, (runs, 1)."""
        if self._prior is not None and head is self._linear:
            return self._prior.scale / self._scale.double().square()
        return _NOISE * self._range().square() / (self.buffer.contexts.shape[2] + 1) ** 3

    def _pooled(self, head: LinearPosterior) -> tuple[Tensor, Tensor]:
        """a, (runs, arms, 1), and b − b₀, like the head's: of all arms together where these are joint."""
        shape, scale = head.shape.unsqueeze(2), head.scale
        if head is self._linear and not self._joint:
            return shape, scale
        first = self._first_shape if head is self._linear else _SHAPE
        pooled = first + (shape - first).sum(dim=1, keepdim=True)
        return pooled.expand_as(shape), scale.sum(dim=1, keepdim=True).expand_as(scale)

    def _variance(self, head: LinearPosterior) -> Tensor:
        """σ² of all arms together, (runs, 1), of a head with one component."""
        return ((head.scale.squeeze(2) + self._noise(head)).sum(dim=1) / head.shape.sum(dim=1)).unsqueeze(1)

    def _precision(self, head: LinearPosterior, data: Statistics) -> Tensor:
        """λ1 with λ = σ² E|x|²/(c R)², with which functions have the standard deviation c R."""
        counts = data.gram[..., -1, -1].sum(dim=1)
        squares = data.gram.diagonal(dim1=2, dim2=3).sum(dim=(1, 2)) / counts.clamp(min=1)
        function = (_FUNCTION * self._range().squeeze(1)).square()
        found = (self._variance(head).squeeze(1) * squares / function).clamp(1e-8, 1e8)
        return found[:, None, None, None] * torch.eye(head.mean.shape[3]).to(found)

    def _given(self, contexts: Tensor) -> Tensor:
        return with_constant(contexts) if self._prior is None else self._prior.features(contexts)

    def _likely(self) -> Tensor:
        """The probability of each component of the first head's prior, ∝ b_k^−a, (runs, arms, components)."""
        shape, scale = self._pooled(self._linear)
        return (-shape * (scale + self._noise(self._linear).unsqueeze(2)).log()).softmax(dim=2)

    def _drawn(self, k: int, draws: int, streams: Streams) -> Tensor:
        """Components of the first head's prior, one for every draw and arm, (runs, k, draws, arms)."""
        runs, arms, components, _ = self._linear.mean.shape
        if components == 1:
            return torch.zeros(runs, k, draws, arms, dtype=torch.int64, device=self.device)
        at = streams.uniform(k, draws, 1 if self._joint else arms).double().expand(-1, -1, -1, arms)
        columns = at.permute(0, 3, 1, 2).reshape(runs, arms, -1)
        found = torch.searchsorted(self._likely().cumsum(dim=2), columns.contiguous(), right=True)
        return found.clamp_(max=components - 1).view(runs, arms, k, draws).permute(0, 2, 3, 1)

    def _predictive(self, contexts: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of f given the drawn components, shaped like these, in units of the targets."""
        least, share = self.settings.exploration**2, self._share[..., None, None]
        counts = 2 * (self._linear.shape - self._first_shape).unsqueeze(2)
        tempered = least + (1 - least) * self.settings.settling / (self.settings.settling + counts)
        mean = std = torch.zeros((), device=self.device)
        features = self._given(contexts), self._last_hidden(contexts)
        for head, x, weight in zip((self._linear, self._hidden), features, (1 - share, share), strict=True):
            shape, scale = self._pooled(head)
            noise = tempered * scale / shape + self._noise(head).unsqueeze(2) / head.shape.unsqueeze(2)
            means = (x.unsqueeze(1) @ head.mean.mT).transpose(1, 2)
            variance = _of(noise.unsqueeze(1).expand_as(means), drawn) * head.widths(x).unsqueeze(2)
            mean, std = mean + weight * _of(means, drawn), std + weight * variance.sqrt()
        return mean, std

    def sampler(self, contexts: Tensor) -> Sampler:
        """As `_draws`; of one run with one component by numpy, whose calls cost less than torch's."""
        if len(contexts) * self._linear.mean.shape[2] > 1 or self.device.type != "cpu":
            return super().sampler(contexts)
        key = self._ends.numpy().tobytes() + self._scale.numpy().tobytes()
        if self._first_noise[0] != key:
            self._first_noise = key, [float(self._noise(head)) for head in (self._linear, self._hidden)]
        least, share, first_shape = self.settings.exploration**2, self._share.item(), float(self._first_shape)
        counts = 2 * (self._linear.first[2] - first_shape)
        tempered = least + (1 - least) * self.settings.settling / (self.settings.settling + counts)
        mean = std = np.zeros(())
        heads = (
            (self._linear, self._given, 1 - share, first_shape, self._joint),
            (self._hidden, self._last_hidden, share, _SHAPE, True),
        )
        for (head, features, weight, a, joint), b in zip(heads, self._first_noise[1], strict=True):
            if weight:
                x, (means, _, shape, scale) = features(contexts).numpy()[0], head.first
                pooled = scale.sum() / (a + (shape - a).sum()) if joint else scale[:, 0] / shape
                mean = mean + weight * (x @ means[:, 0].T)
                std = std + weight * np.sqrt((tempered * pooled + b / shape) * head.widths_of_one(x))
        center, width = (torch.from_numpy(of.astype(np.float32)[None, :, None]) for of in (mean, std))
        return lambda n, streams: torch.addcmul(center, width, streams.normal(len(mean), n, self.n_arms))

    def _draws(self, contexts: Tensor, n: int, streams: Streams) -> Tensor:
        drawn = self._drawn(contexts.shape[1], n, streams)
        mean, std = self._predictive(contexts, drawn)
        return (mean + std * streams.normal(*drawn.shape[1:])).float()

    def observe(self, rows: slice) -> None:
        """Update both heads."""
        contexts, arms, rewards = self.buffer.seen(rows)
        rewards = rewards.double()
        low, high = self._ends.unbind(dim=1)
        torch.minimum(low, rewards.amin(dim=1), out=low)
        torch.maximum(high, rewards.amax(dim=1), out=high)
        targets = (rewards - self._shift) / self._scale
        self._linear.update(arms, self._given(contexts), targets)
        if self.stack.done:
            self._hidden.update(arms, self._last_hidden(contexts), targets)
            memory = min(_MEMORY, self.buffer.faded(1)) ** (rows.stop - rows.start)
            self._hidden.scale.mul_(memory)
            self._hidden.shape.sub_(_SHAPE).mul_(memory).add_(_SHAPE)

    @property
    def due(self) -> bool:
        """Whether the observations have grown by the factor `growth`."""
        return self.buffer.total >= int(self._due[0])

    def train(self) -> None:
        """Where a training is due: train the network, refit both heads and their shares."""
        if not self.due:
            return
        more = max(self.settings.train_every, (self.settings.growth - 1) * self.buffer.effective_count)
        self._due.fill_(self.buffer.total + int(more))
        super().train()
        self._fit_linear()
        self._fit_hidden()
        self._weigh()

    def _prepare(self) -> None:
        before = self._scale.clone()
        super()._prepare()
        # Squared errors are in the units of the previous training.
        self._hidden.scale.mul_((before / self._scale).square().unsqueeze(2))
        faded = _PENALISED / (_PENALISED + self.buffer.total)
        torch.mul(self.noise_variance(), self.settings.l2 * faded, out=self._l2)

    def noise_variance(self) -> Tensor:
        """Of the targets, at most theirs, (runs, 1)."""
        found = self._variance(self._hidden) if self.stack.done else torch.ones_like(self._share)
        return found.clamp(max=1).float()

    def _rows(self) -> Tensor:
        """Held-out observations are replaced by their neighbours; in a sample, these may be held out, too."""
        rows = super()._rows()
        for _ in range(4 if self.buffer.settled else 2):
            held_out = self.buffer.numbers[rows] % self.settings.hold_out == 0
            rows = torch.where(held_out, (rows - 1) % self.buffer.count, rows)
        return rows

    def thin(self, rows: Tensor) -> None:
        """Add the others to the statistics of what the buffer no longer holds."""
        buffer, others = self.buffer, torch.ones(self.buffer.count, dtype=torch.bool)
        others[rows] = False
        self._dropped.fade(buffer.faded(buffer.total - int(self._dropped_at)))
        self._dropped_at.fill_(buffer.total)
        for part in torch.split(others.nonzero().squeeze(1), _CHUNK):
            contexts, arms, rewards = buffer.seen(part)
            self._dropped.add(arms, self._given(contexts), rewards.double(), buffer.weights(part))

    def _statistics(self, head: LinearPosterior) -> Statistics:
        """Of all observations, in units of the targets.

        Those that the buffer no longer holds are known by their contexts' statistics; on the hidden layer, those that
        it holds count as all of their arm.
        """
        buffer, features = self.buffer, self._given if head is self._linear else self._last_hidden
        found = Statistics.zeros(buffer.runs, self.n_arms, head.mean.shape[3], self.device)
        for first in range(0, buffer.count, _CHUNK):
            rows = slice(first, min(first + _CHUNK, buffer.count))
            contexts, arms, rewards = buffer.seen(rows)
            found.add(arms, features(contexts), rewards.double(), buffer.weights(rows))
        if buffer.total > buffer.count:
            faded = buffer.faded(buffer.total - int(self._dropped_at))
            if head is self._linear:
                for own, dropped in zip(vars(found).values(), vars(self._dropped).values(), strict=True):
                    own.add_(dropped, alpha=faded)
            else:
                held = found.gram[..., -1, -1]
                more = 1 + faded * self._dropped.gram[..., -1, -1] / held.clamp(min=1)
                for own in vars(found).values():
                    own.mul_(more.view(*more.shape, *[1] * (own.dim() - 2)))
        return found.standardised(self._shift.double(), self._scale.double())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """A file of an earlier release has dropped nothing."""
        none = {name: torch.zeros_like(own) for name, own in self._memory.items() if name.startswith("dropped")}
        super().load(none | dict(tensors))

    def _fit_linear(self) -> None:
        """Around a learnt prior, or else the mean reward of a random arm: agents that learn see better rewards."""
        head, prior = self._linear, self._prior
        data = self._statistics(head)
        # Every arm's observations, less the forgotten ones: the last feature is the constant 1.
        counts = data.gram[..., -1, -1]
        if prior is None:
            mean, precision = torch.zeros_like(head.mean), self._precision(head, data)
            means = data.cross[..., -1] / counts.clamp(min=1)
            mean[..., -1] = (means.sum(dim=1) / (counts > 0).sum(dim=1).clamp(min=1))[:, None, None]
        else:
            mean, precision = prior.mean.transpose(0, 1).repeat(self.buffer.runs, 1, 1, 1), self._inverse
            mean[..., -1] -= self._shift.unsqueeze(2)
            mean /= self._scale[..., None, None]
        head.scale.copy_(head.fit(data, mean, precision))
        head.shape.copy_(self._first_shape + 0.5 * counts)
        if prior is None:
            variance = self._variance(head)
            for _ in range(_SHARED_STEPS):
                gaps = (head.mean - mean).squeeze(2)
                shared = shared_precision(gaps, head.covariance, variance, precision, first_arms=_FIRST_ARMS)
                head.scale.copy_(head.fit(data, mean, shared))

    def _fit_hidden(self) -> None:
        """Around the network's own last layer. The noise stays that of errors made before the rewards were learnt."""
        head = self._hidden
        data, last = self._statistics(head), len(self.network.hidden)
        weight, bias = (self.params[f"layer{last}.{part}"].double() for part in ("weight", "bias"))
        head.fit(data, torch.cat([weight, bias.unsqueeze(2)], dim=2).unsqueeze(2), self._precision(head, data))

    def _weigh(self) -> None:
        """s = Σ ω e_x (e_x − e_h)/(Σ ω (e_x − e_h)² + m σ²) in [0, 1], e the errors of held-out observations left out.

        ω falls with the square of 1 − xᵀ C x, which bounds the weight of outliers.
        """
        rows, every = torch.arange(self.buffer.count, device=self.device), self.settings.hold_out
        rows = (rows[self.buffer.numbers[rows] % every == 0] if self.buffer.settled else rows[::every])[-_CHUNK:]
        contexts, arms, rewards = self.buffer.seen(rows)
        targets = (rewards.double() - self._shift) / self._scale
        average = (self._likely().unsqueeze(3) * self._linear.mean).sum(dim=2)
        first, rest = self._linear.left_out(average, arms, self._given(contexts), targets)
        second, other = self._hidden.left_out(self._hidden.mean.squeeze(2), arms, self._last_hidden(contexts), targets)
        weights = torch.minimum(rest, other).square() * self.buffer.weights(rows)
        noise = torch.minimum((weights * first.square()).mean(dim=1), (weights * second.square()).mean(dim=1))
        gap = first - second
        below = (weights * gap.square()).sum(dim=1) + _CAUTION * noise
        share = ((weights * first * gap).sum(dim=1) / below.clamp(min=torch.finfo(torch.float64).tiny)).clamp_(0, 1)
        if self._prior is not None:
            share[self._holds(self._prior)] = 0
        self._share.copy_(share.unsqueeze(1))

    def _holds(self, prior: Prior) -> Tensor:
        """Whether the errors are not larger than a learnt prior's σ² ~ IG(a₀, b₀) allows, (runs,).

        The errors of the chosen arms may be up to n_arms times as large as the average arm's.
        """
        shape, scale = self._pooled(self._linear)
        first = self._noise(self._linear)
        noise = (self._likely() * (scale + first.unsqueeze(2)) / shape).sum(dim=2)
        above = torch.special.gammainc(prior.shape.expand_as(noise), self.n_arms * first / noise)
        return torch.all(above > _LEAST_PROBABLE, dim=1)


_TUNED = {"lr": 4e-3, "lr_decay": 0.0, "init_range": None, "batch_size": 256, "average": 0.995}
_TUNED |= {"l2": 6e-3, "dropout": 0.2, "standardise": True}
HYBRID = Entry(Hybrid, HybridSettings, tuned=_TUNED, paper=_TUNED)
