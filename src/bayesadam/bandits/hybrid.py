"""Two exact linear heads, one on the contexts and one on a network's last hidden layer, weighed by what neither has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.bandits.buffer import Buffer
from bayesadam.bandits.learners import Greedy
from bayesadam.bandits.linear import Statistics, normal_equations, with_constant
from bayesadam.bandits.prior import Prior
from bayesadam.bandits.settings import AgentSettings, HybridSettings
from bayesadam.engine.network import forward
from bayesadam.engine.streams import Streams
from bayesadam.errors import MatchError

# The prior, in units of the rewards' range R: functions have a standard deviation of the first times R, and the noise is
# inverse gamma with a shape of the second and a scale of the third times R²/(features + 1).
_FUNCTION, _SHAPE, _NOISE = 0.25, 1.0, 0.05
# What was seen is widened by this factor where nobody said what rewards can be: more may come.
_MORE = 2.0
# Each observation forgets this share of the others' errors when the network's noise is estimated.
_MEMORY = 0.9995
# The share of the hidden layer is drawn towards 0 by as much as so many observations would.
_CAUTION = 4.0
# A learnt prior holds unless the noise is larger than this share of the earlier problems has it.
_DOUBT = 0.01
_CHUNK = 4096
_LEAST, _MOST = 1e-8, 1e8


@dataclass(frozen=True, eq=False)
class Head:
    """σ² ~ IG(a, b_k), β | σ² ~ N(μ_k, σ² C) for every run, arm and component k of its prior, float64; b is without its prior.

    Components differ in their means alone, so that all have one covariance: what was seen counts for component k as b_k^−a.

    Attributes:
        mean: μ, (runs, arms, components, features).
        covariance: C, (runs, arms, features, features).
        shape: a, (runs, arms).
        scale: b − b₀, (runs, arms, components).
    """

    mean: Tensor
    covariance: Tensor
    shape: Tensor
    scale: Tensor

    @classmethod
    def zeros(cls, runs: int, arms: int, width: int, device: torch.device) -> Head:
        """One component around 0, with C = 1."""
        mean = torch.zeros(runs, arms, 1, width, dtype=torch.float64, device=device)
        identity = torch.eye(width).to(mean).repeat(runs, arms, 1, 1)
        return cls(mean, identity, torch.full_like(mean[..., 0, 0], _SHAPE), torch.zeros_like(mean[..., 0]))

    def update(self, arms: Tensor, x: Tensor, rewards: Tensor) -> None:
        """Take in k observations, with arms and rewards (runs, k) and features (runs, k, features).

        With X the rows of an arm, e = r − Xμ and 1 + X C Xᵀ = L Lᵀ: C ← C − GᵀG, μ ← μ + Gᵀz and b ← b + ½ |z|², where
        G = L⁻¹ X C and z = L⁻¹ e are what rank-one updates, one observation after the other, have in turn.
        """
        if arms.shape[1] == 1:
            for run, arm in enumerate(arms.squeeze(1).tolist()):
                self._update_one(run, arm, x[run, 0], rewards[run, 0])
            return
        chosen = F.one_hot(arms, self.mean.shape[1]).mT.to(x)
        own = x.unsqueeze(1) * chosen.unsqueeze(3)
        errors = (rewards[:, None, :, None] - x.unsqueeze(1) @ self.mean.mT) * chosen.unsqueeze(3)
        reach = own @ self.covariance
        factor = reach @ own.mT
        factor.diagonal(dim1=2, dim2=3).add_(1)
        factor = torch.linalg.cholesky(factor)
        gain = torch.linalg.solve_triangular(factor, reach, upper=False)
        z = torch.linalg.solve_triangular(factor, errors, upper=False)
        self.covariance.sub_(gain.mT @ gain)
        self.mean.add_(z.mT @ gain)
        self.shape.add_(0.5 * chosen.sum(dim=2))
        self.scale.add_(0.5 * z.square().sum(dim=2))

    def _update_one(self, run: int, arm: int, x: Tensor, reward: Tensor) -> None:
        """The rank-one update: with u = C x and q = 1 + xᵀ u, C ← C − u uᵀ/q, μ ← μ + u e/q, b ← b + ½ e²/q."""
        mean, covariance = self.mean[run, arm], self.covariance[run, arm]
        errors = reward - mean @ x
        reach = covariance @ x
        spread = 1 + float(reach @ x)
        covariance.addr_(reach, reach, alpha=-1 / spread)
        mean.addr_(errors, reach, alpha=1 / spread)
        self.shape[run, arm] += 0.5
        self.scale[run, arm].addcmul_(errors, errors, value=0.5 / spread)

    def fit(self, data: Statistics, prior: Tensor, precision: Tensor) -> Tensor:
        """Refitted around μ₀ with Λ₀; returns what b − b₀ would be: see `normal_equations`."""
        factor, mean, residual = normal_equations(data, prior, precision)
        torch.cholesky_inverse(factor, out=self.covariance)
        self.mean.copy_(mean)
        return residual

    def widths(self, x: Tensor) -> Tensor:
        """xᵀ C x of every arm, (runs, k, arms)."""
        runs, k, width = x.shape
        sides = self.covariance.transpose(1, 2).reshape(runs, width, -1)
        return ((x @ sides).view(runs, k, -1, width) * x.unsqueeze(2)).sum(dim=3).clamp_(min=0)

    def left_out(self, mean: Tensor, arms: Tensor, x: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Errors of observations that are in the fit, as if each were not, e/(1 − xᵀ C x), and 1 − xᵀ C x: (runs, k).

        Args:
            mean: μ of every arm, (runs, arms, features).
            arms: of the observations, (runs, k); so are the rewards.
            x: their features.
            rewards: in units of the targets.
        """
        own = arms.unsqueeze(2)
        rest = (1 - self.widths(x).gather(2, own).squeeze(2)).clamp_(min=1e-3)
        return (rewards - (x @ mean.mT).gather(2, own).squeeze(2)) / rest, rest


def _of(values: Tensor, components: Tensor) -> Tensor:
    """Of values (runs, k, arms, components) those of one component for every draw and arm, (runs, k, draws, arms)."""
    values = values.mT
    return values if values.shape[2] == 1 else values.gather(2, components)


class Hybrid(Greedy):
    """Thompson sampling with f = (1 − s) f_x + s f_h, linear in the contexts and in a network's last hidden layer.

    A learnt prior has features of its own in place of the contexts, and is a mixture, of which a decision draws a component:
    see `Prior`.

    Both heads are exact Gaussians that every observation updates at once. After a training the one on the hidden layer is
    fitted again to all that was seen, around the network's own last layer. s minimises the squared error of the sum on
    observations that the network was not trained on, each left out of its head: where rewards are linear, or data are few, it is
    near 0. It is 0 as long as a learnt prior's errors are what they were on the problems that it is learnt from.

    The prior is in units of the rewards, so that a reward which was not yet seen stays possible (`_FUNCTION`, `_NOISE`). A
    decision draws each arm's f with one normal number ε for both heads: f + ε √(a/g) ((1 − s) √(V_x) + s √(V_h)) with g ~ Γ(a)
    and V = (α² (b − b₀) + b₀)/a · xᵀ C x; α falls from 1 to `exploration`.

    Trainings come when the observations have grown by a factor, not at regular intervals: their number is logarithmic. The
    network's penalty is λσ² n₀/(n₀ + n), which falls with the observations and is small where there is little noise, as a prior's.
    """

    learns_at_once = True
    settings: HybridSettings

    def __init__(self, settings: AgentSettings, buffer: Buffer, n_arms: int, seeds: Sequence[int]) -> None:
        super().__init__(settings, buffer, n_arms, seeds)
        runs, width = buffer.runs, buffer.contexts.shape[2] + 1
        self._linear = Head.zeros(runs, n_arms, width, self.device)
        self._hidden = Head.zeros(runs, n_arms, self.settings.hidden[-1] + 1, self.device)
        self._share = torch.zeros(runs, 1, dtype=torch.float64, device=self.device)
        self._ends = torch.tensor([torch.inf, -torch.inf]).to(self._share).repeat(runs, 1)
        self._due = torch.zeros(runs, dtype=torch.int64)
        self._memory |= {"share": self._share, "ends": self._ends, "due": self._due}
        for name, head in (("linear", self._linear), ("hidden", self._hidden)):
            self._memory |= {f"{name}.{part}": tensor for part, tensor in vars(head).items()}
        self._choice = self._stream("hybrid", seeds)
        self._prior: Prior | None = None
        self._joint = False

    def start_from(self, prior: Prior) -> None:
        """Put a learnt prior, its features among it, in the place of the head on the contexts."""
        if prior.network.n_inputs != self.buffer.contexts.shape[2]:
            raise MatchError(
                f"the prior is for contexts of {prior.network.n_inputs} numbers, these have {self.buffer.contexts.shape[2]}"
            )
        self._joint = not prior.exchangeable
        self._prior = found = prior.to(self.device).for_arms(self.n_arms)
        self._inverse, mean = torch.linalg.inv(found.covariance), found.mean.transpose(0, 1)
        moments = (mean, found.covariance, found.shape.expand(self.n_arms), torch.zeros_like(mean[..., 0]))
        self._linear = Head(*(part.repeat(self.buffer.runs, *[1] * part.dim()) for part in moments))
        self._memory |= {f"linear.{part}": tensor for part, tensor in vars(self._linear).items()}

    # --- units

    def _units(self) -> tuple[Tensor, Tensor]:
        """What is subtracted from rewards, and what they are divided by, (runs, 1), float64."""
        return self._shift.double(), self._scale.double()

    def _range(self) -> Tensor:
        """R in units of the targets, (runs, 1)."""
        given, scale = self.settings.reward_range, self._units()[1]
        if given is not None:
            return (given[1] - given[0]) / scale
        low, high = self._ends[:, :1], self._ends[:, 1:]
        seen = torch.where(high > low, high - low, high.abs().clamp(min=1))
        return _MORE * seen.nan_to_num(posinf=1) / scale

    def _noise(self, head: Head) -> Tensor:
        """b₀, (runs, 1)."""
        if self._prior is not None and head is self._linear:
            return self._prior.scale / self._units()[1].square()
        return _NOISE * self._range().square() / (self.buffer.contexts.shape[2] + 1)

    def _pooled(self, head: Head) -> tuple[Tensor, Tensor]:
        """a, (runs, arms, 1), and b − b₀, like the head's: of all arms together where a learnt prior says so."""
        shape, scale = head.shape.unsqueeze(2), head.scale
        if not (self._joint and head is self._linear):
            return shape, scale
        first = self._shape()
        pooled = first + (shape - first).sum(dim=1, keepdim=True)
        return pooled.expand_as(shape), scale.sum(dim=1, keepdim=True).expand_as(scale)

    def _shape(self) -> Tensor | float:
        """a₀ of the first head."""
        return _SHAPE if self._prior is None else self._prior.shape

    def _variance(self, head: Head) -> Tensor:
        """σ² of all arms together, (runs, 1), of a head with one component."""
        return ((head.scale.squeeze(2) + self._noise(head)).sum(dim=1) / head.shape.sum(dim=1)).unsqueeze(1)

    def _precision(self, head: Head, data: Statistics) -> Tensor:
        """λ1 with λ = σ² E|x|²/(c R)², with which functions have the standard deviation c R."""
        noise = self._variance(head).squeeze(1)
        counts = data.gram[..., -1, -1].sum(dim=1)
        squares = data.gram.diagonal(dim1=2, dim2=3).sum(dim=(1, 2)) / counts.clamp(min=1)
        found = (noise * squares / (_FUNCTION * self._range().squeeze(1)).square()).clamp(_LEAST, _MOST)
        return found[:, None, None, None] * torch.eye(head.mean.shape[3]).to(found)

    # --- choosing

    def _fades(self) -> float:
        """n₀/(n₀ + n)."""
        return self.settings.settling / (self.settings.settling + self.buffer.count)

    def _given(self, contexts: Tensor) -> Tensor:
        """Features that no training changes."""
        return with_constant(contexts) if self._prior is None else self._prior.features(contexts)

    def _features(self, contexts: Tensor) -> Tensor:
        return with_constant(forward(self.network, self.params, contexts, n_layers=len(self.network.hidden)))

    def _likely(self) -> Tensor:
        """How likely each component of the first head's prior is, (runs, arms, components): in proportion to b_k^−a."""
        shape, scale = self._pooled(self._linear)
        return (-shape * (scale + self._noise(self._linear).unsqueeze(2)).log()).softmax(dim=2)

    def _drawn(self, k: int, draws: int, streams: Streams) -> Tensor:
        """Components of the first head's prior, one for every draw and arm, (runs, k, draws, arms)."""
        runs, arms, components, _ = self._linear.mean.shape
        if components == 1:
            return torch.zeros(runs, k, draws, arms, dtype=torch.int64, device=self.device)
        ends = self._likely().cumsum(dim=2)
        at = streams.uniform(k, draws, 1 if self._joint else arms).double().expand(-1, -1, -1, arms)
        columns = at.permute(0, 3, 1, 2).reshape(runs, arms, -1)
        found = torch.searchsorted(ends, columns.contiguous(), right=True).clamp_(max=components - 1)
        return found.view(runs, arms, k, draws).permute(0, 2, 3, 1)

    def _predictive(self, contexts: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of f given the first head's components, which they are like, in units of the targets."""
        own, share = self.settings, self._share[..., None, None]
        tempered = own.exploration**2 + (1 - own.exploration**2) * self._fades()
        mean, std = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for head, x, weight in (
            (self._linear, self._given(contexts), 1 - share),
            (self._hidden, self._features(contexts), share),
        ):
            shape, scale = self._pooled(head)
            noise = (tempered * scale + self._noise(head).unsqueeze(2)) / shape
            means = (x.unsqueeze(1) @ head.mean.mT).transpose(1, 2)
            variance = _of(noise.unsqueeze(1).expand_as(means), drawn) * head.widths(x).unsqueeze(2)
            mean, std = mean + weight * _of(means, drawn), std + weight * variance.sqrt()
        return mean, std

    def _scores(self, contexts: Tensor, streams: Streams) -> Tensor:
        return self._many_scores(contexts, 1, streams).squeeze(2)

    def _many_scores(self, contexts: Tensor, draws: int, streams: Streams) -> Tensor:
        drawn = self._drawn(contexts.shape[1], draws, streams)
        mean, std = self._predictive(contexts, drawn)
        scales = self._pooled(self._linear)[0].mT.unsqueeze(1).expand(drawn.shape)
        scales = (scales / streams.gamma(scales)).sqrt()
        return (mean + std * scales * streams.normal(*drawn.shape[1:])).float()

    def _outcomes(self, contexts: Tensor) -> None:
        return None

    # --- learning

    def observe(self, places: slice) -> None:
        """Update both heads."""
        super().observe(places)
        contexts, arms, rewards = self.buffer.seen(places)
        rewards, count = rewards.double(), places.stop - places.start
        low, high = self._ends.unbind(dim=1)
        torch.minimum(low, rewards.amin(dim=1), out=low)
        torch.maximum(high, rewards.amax(dim=1), out=high)
        shift, scale = self._units()
        targets = (rewards - shift) / scale
        self._linear.update(arms, self._given(contexts), targets)
        if self.stack.done:
            self._hidden.update(arms, self._features(contexts), targets)
            memory = min(_MEMORY, self.buffer.faded(1)) ** count
            self._hidden.scale.mul_(memory)
            self._hidden.shape.sub_(_SHAPE).mul_(memory).add_(_SHAPE)

    def train(self) -> None:
        """Where one is due: a training of the network, both heads fitted again, and their shares."""
        if self.buffer.count < int(self._due[0]):
            return
        more = max(self.settings.train_every, (self.settings.growth - 1) * self.buffer.effective_count)
        self._due.fill_(self.buffer.count + int(more))
        super().train()
        self._fit_linear()
        self._fit_hidden()
        self._weigh()

    def _prepare(self) -> None:
        before = self._scale.clone()
        super()._prepare()
        # Squared errors are in the units of the training before.
        self._hidden.scale.mul_((before / self._scale).square().unsqueeze(2))
        torch.mul(self.noise_variance(), self.settings.l2 * self._fades(), out=self._l2)

    def _estimates_noise(self) -> bool:
        """The head has it."""
        return False

    def noise_variance(self) -> Tensor:
        """Of the targets, at most theirs, (runs, 1)."""
        found = self._variance(self._hidden) if self.stack.done else torch.ones_like(self._share)
        return found.clamp(max=1).float()

    def _rows(self) -> Tensor:
        """The neighbours of what is held out stand in for it."""
        rows = super()._rows()
        beside = torch.where(rows + 1 < self.buffer.count, rows + 1, rows - 1).clamp_(min=0)
        return torch.where(rows % self.settings.hold_out == 0, beside, rows)

    def _statistics(self, head: Head) -> Statistics:
        """Of all that was seen, in units of the targets."""
        buffer, features = self.buffer, self._given if head is self._linear else self._features
        found = Statistics.zeros(buffer.runs, self.n_arms, head.mean.shape[3], self.device)
        for first in range(0, buffer.count, _CHUNK):
            places = slice(first, min(first + _CHUNK, buffer.count))
            contexts, arms, rewards = buffer.seen(places)
            found.add(arms, features(contexts), rewards.double(), buffer.weights(places))
        return found.standardised(*self._units())

    def _counts(self) -> Tensor:
        """Every arm's observations, less what is forgotten of them, (runs, arms)."""
        seen = slice(0, self.buffer.count)
        zeros = torch.zeros(self.buffer.runs, self.n_arms, dtype=torch.float64, device=self.device)
        arms = self.buffer.arms[:, seen]
        return zeros.scatter_add_(1, arms, self.buffer.weights(seen).expand(arms.shape))

    def _fit_linear(self) -> None:
        """Around a learnt prior, or else what an arm drawn at random pays: agents that learn see better rewards than that."""
        head, prior = self._linear, self._prior
        data, counts = self._statistics(head), self._counts()
        if prior is None:
            mean, precision = torch.zeros_like(head.mean), self._precision(head, data)
            means = data.cross[..., -1] / counts.clamp(min=1)
            mean[..., -1] = (means.sum(dim=1) / (counts > 0).sum(dim=1).clamp(min=1))[:, None, None]
        else:
            shift, scale = self._units()
            mean, precision = prior.mean.transpose(0, 1).repeat(len(shift), 1, 1, 1), self._inverse
            mean[..., -1] -= shift.unsqueeze(2)
            mean /= scale[..., None, None]
        head.scale.copy_(head.fit(data, mean, precision))
        head.shape.copy_(self._shape() + 0.5 * counts)

    def _fit_hidden(self) -> None:
        """Around the network's own last layer. The noise stays that of errors made before the rewards were learnt from."""
        head = self._hidden
        data = self._statistics(head)
        last = len(self.network.hidden)
        weight, bias = (self.params[f"layer{last}.{part}"].double() for part in ("weight", "bias"))
        head.fit(data, torch.cat([weight, bias.unsqueeze(2)], dim=2).unsqueeze(2), self._precision(head, data))

    def _weigh(self) -> None:
        """s = Σ ω e_x (e_x − e_h)/(Σ ω (e_x − e_h)² + m σ²) in [0, 1], e the errors of what was held out and left out.

        ω falls with the square of what is left of an observation when it is left out, which bounds that of outliers.
        """
        shift, scale = self._units()
        places = torch.arange(0, self.buffer.count, self.settings.hold_out, device=self.device)[-_CHUNK:]
        contexts, arms, rewards = self.buffer.seen(places)
        targets = (rewards.double() - shift) / scale
        average = (self._likely().unsqueeze(3) * self._linear.mean).sum(dim=2)
        first, rest = self._linear.left_out(average, arms, self._given(contexts), targets)
        second, other = self._hidden.left_out(self._hidden.mean.squeeze(2), arms, self._features(contexts), targets)
        weights = torch.minimum(rest, other).square() * self.buffer.weights(places)
        noise = torch.minimum((weights * first.square()).mean(dim=1), (weights * second.square()).mean(dim=1))
        gap = first - second
        below = (weights * gap.square()).sum(dim=1) + _CAUTION * noise
        share = (weights * first * gap).sum(dim=1) / below.clamp(min=torch.finfo(torch.float64).tiny)
        self._share.copy_(torch.where(self._holds(), 0, share.clamp_(0, 1)).unsqueeze(1))

    def _holds(self) -> Tensor:
        """Whether there is a learnt prior whose errors are not larger than σ² ~ IG(a₀, b₀) allows, (runs,).

        Errors of the arms that are chosen may be those of all arms together: as many times as large as the average arm's.
        """
        if self._prior is None:
            return torch.zeros(self.buffer.runs, dtype=torch.bool, device=self.device)
        shape, scale = self._pooled(self._linear)
        first = self._noise(self._linear)
        noise = (self._likely() * (scale + first.unsqueeze(2)) / shape).sum(dim=2)
        above = torch.special.gammainc(self._prior.shape.expand_as(noise), self.n_arms * first / noise)
        return torch.as_tensor((above > _DOUBT).all(dim=1))
