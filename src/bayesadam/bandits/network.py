"""The hybrid agent: exact linear heads on the contexts and on a network's last hidden layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam.bandits.linear import (
    Arrays,
    Head,
    Learner,
    Sampler,
    Scores,
    Statistics,
    normal_equations,
    shared_precision,
    with_constant,
)
from bayesadam.bandits.observations import Contexts, Floats, Indices, Observations
from bayesadam.bandits.settings import HybridSettings
from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, unflatten
from bayesadam.engine.rules import Adam
from bayesadam.engine.stack import Stack, constant, train
from bayesadam.engine.streams import Streams

# The prior, in units of the rewards' range R: functions have a standard deviation of the first times R, and the noise
# is inverse gamma with a shape of the second and a scale of the third times R²/(features + 1)³: trying everything is
# cheap in few dimensions only.
_FUNCTION, _SHAPE, _NOISE = 0.25, 1.0, 9.0
# The prior that arms share is learnt from them and from so many arms with the prior above, in so many steps a training.
_FIRST_ARMS, _SHARED_STEPS = 4.0, 2
# Half as many observations as the noise of all arms together counts for beside an arm's own.
_OWN = 4.0
# The leverage at which half of the noise acts.
_DOUBT = 16.0
# The range seen is widened by this factor where `reward_range` is not given: more may come.
_MORE = 2.0
# Each observation forgets this share of the others' errors when the network's noise is estimated.
_MEMORY = 0.9995
# The share of the hidden layer is drawn towards 0 as if by this many observations.
_CAUTION = 4.0
# The penalty falls to a half over this many observations.
_PENALISED = 500.0
# The next training comes when the number of observations has grown by this factor.
_GROWTH = 1.3
# One of so many observations is held out from the network, to weigh the heads by.
_HOLD_OUT = 10
_CLIP, _CHUNK = 5.0, 4096


@dataclass(eq=False)
class Belief:
    """What decides: both heads, the network's hidden layers, and the share s of the head on the last of them.

    Rewards are learnt in the `units` (shift, scale), as (r − shift)/scale; `ends` are the smallest and largest seen.
    """

    linear: Head
    hidden: Head
    layers: list[tuple[Contexts, Contexts]]
    share: float
    units: tuple[float, float]
    ends: tuple[float, float]

    def features(self, head: Head, contexts: Contexts) -> Floats:
        """Of a head, with a constant 1."""
        h = contexts
        for weight, bias in self.layers if head is self.hidden else ():
            h = np.maximum(h @ weight.T + bias, 0)
        return with_constant(h)


class Hybrid(Learner):
    """Randomised optimism about f = (1 − s) f_x + s f_h, linear in contexts and in a network's last hidden layer.

    Both heads are exact Gaussians that every observation updates at once. After a training the head on the hidden layer
    is refitted to all observations, around the network's own last layer. s minimises the squared error of the sum on
    held-out observations: where rewards are linear, or data are few, it is near 0.

    The prior is in units of the rewards, so that a reward not yet seen stays possible (`_FUNCTION`, `_NOISE`). How much
    each feature of the contexts matters is learnt from all arms together: see `shared_precision`.

    A decision draws one normal number ε for all arms and both heads, and takes the arm of the largest
    f + |ε| ((1 − s) √(V_x) + s √(V_h)): among many doubtful arms none wins by the luck of a draw of its own. Here
    V = (α² σ_a² + b₀/a) w and w = xᵀ C x. σ_a² = (b + κσ²)/(n/2 + κ) is the arm's noise, shrunk toward that of all arms
    as by 2κ observations: an arm that always pays the same does not make others look certain. α² = w/(c + w) falls
    where the arm was tried, not elsewhere.

    The network's penalty is λσ² m/(m + n): as a prior's, it falls with the observations and with the noise.
    """

    settings: HybridSettings
    choice = "hybrid"

    def __init__(self, settings: HybridSettings, n_features: int, n_arms: int, seed: int) -> None:
        super().__init__(settings, n_features, n_arms, seed)
        self.network = Network(n_features, settings.hidden, n_arms, dropout=settings.dropout)
        self.stack = Stack(self.network, Adam(), [seed], self._batch, average=settings.average, clip=_CLIP)
        self.streams |= {"batches": Streams([seed], "batches"), "training": self.stack.streams}
        linear, hidden = (Head.prior(n_arms, width + 1, _SHAPE) for width in (n_features, settings.hidden[-1]))
        self.belief = Belief(linear, hidden, self._layers(), 0.0, (0.0, 1.0), (np.inf, -np.inf))
        # How many observations the next training waits for.
        self._next = 0
        # What a training learns from, in which units.
        self._seen, self._units = Observations(n_features), (0.0, 1.0)

    def _layers(self) -> list[tuple[Contexts, Contexts]]:
        """A copy of the network's hidden layers."""
        params = {name: tensor[0].numpy().copy() for name, tensor in self.stack.params.items()}
        return [(params[f"layer{at}.weight"], params[f"layer{at}.bias"]) for at in range(len(self.network.hidden))]

    # --- what decides -----------------------------------------------------------------------------------------------

    def _range(self, belief: Belief) -> float:
        """R in units of the targets."""
        if self.settings.reward_range is not None:
            low, high = self.settings.reward_range
            return (high - low) / belief.units[1]
        low, high = belief.ends
        width = high - low if high > low else max(abs(high), 1)
        return _MORE * (width if np.isfinite(width) else 1) / belief.units[1]

    def _noise(self, belief: Belief) -> float:
        """b₀."""
        return float(_NOISE * self._range(belief) ** 2 / (self.n_features + 1) ** 3)

    def _variance(self, belief: Belief, head: Head) -> float:
        """σ² of all arms together."""
        return float((head.scale + self._noise(belief)).sum() / head.shape.sum())

    def _precision(self, belief: Belief, head: Head, data: Statistics) -> Floats:
        """λ1 with λ = σ² E|x|²/(c R)², with which functions have the standard deviation c R."""
        squares = np.trace(data.gram, axis1=1, axis2=2).sum() / max(data.counts.sum(), 1)
        function = (_FUNCTION * self._range(belief)) ** 2
        precision = np.clip(self._variance(belief, head) * squares / function, 1e-8, 1e8)
        return np.full(head.mean.shape[1], precision)

    def predictive(self, contexts: Contexts) -> tuple[Floats, Floats]:
        """Mean and standard deviation of f, (k, arms), in units of the targets."""
        belief, noise = self.belief, self._noise(self.belief)
        mean = std = np.zeros(())
        for head, weight in ((belief.linear, 1 - belief.share), (belief.hidden, belief.share)):
            if weight:
                x = belief.features(head, contexts)
                widths, halves = head.widths(x), head.shape - _SHAPE
                own = (head.scale + _OWN * head.scale.sum() / (_SHAPE + halves.sum())) / (halves + _OWN)
                mean = mean + weight * (x @ head.mean.T)
                std = std + weight * np.sqrt((own * widths / (_DOUBT + widths) + noise / head.shape) * widths)
        return mean, std

    def sampler(self, contexts: Contexts) -> Sampler:
        """One number |ε| a draw for all arms."""
        mean, std = (part.astype(np.float32)[:, None] for part in self.predictive(contexts))

        def draw(n: int, streams: Streams) -> Scores:
            optimism: Scores = np.abs(streams.normal(len(contexts), n, 1).numpy()[0])
            return mean + optimism * std

        return draw

    def observe(self, seen: Observations, rows: slice) -> None:
        """Update both heads."""
        self.note(self.belief, seen, rows)

    def note(self, belief: Belief, seen: Observations, rows: slice) -> None:
        """Update both heads of a belief, once trained; the hidden one then forgets its errors little by little."""
        contexts, rewards, memory = seen.contexts[rows], seen.rewards[rows], min(_MEMORY, seen.faded(1))
        targets = ((rewards.astype(np.float64) - belief.units[0]) / belief.units[1]).tolist()
        belief.ends = min(belief.ends[0], float(rewards.min())), max(belief.ends[1], float(rewards.max()))
        for head in (belief.linear, belief.hidden) if self.stack.done else (belief.linear,):
            features = belief.features(head, contexts)
            for arm, x, target in zip(seen.arms[rows].tolist(), features, targets, strict=True):
                head.update(arm, x, target)
                if head is belief.hidden:
                    head.scale *= memory
                    head.shape += (1 - memory) * (_SHAPE - head.shape)

    # --- a training -------------------------------------------------------------------------------------------------

    def due(self, seen: Observations) -> bool:
        """Whether the observations have grown enough."""
        return seen.total >= self._next

    def train(self, seen: Observations, old: Belief) -> Belief:
        """The belief after a training: of the network, of both heads around it, and of the share.

        `old` is a copy of the one that decides, which goes on. Where it fails, the network is as it was.
        """
        before = {name: tensor.clone() for name, tensor in self.stack.tensors().items()}
        done, settings = self.stack.done, self.settings
        # In float32, as the network learns.
        shift, scale = map(np.float32, seen.moments())
        self._seen, self._units = seen, (float(shift), float(scale))
        # Squared errors are in the units of the previous training.
        errors = old.hidden.scale * (old.units[1] / self._units[1]) ** 2
        new = replace(old, hidden=replace(old.hidden, scale=errors), units=self._units)
        noise = min(self._variance(new, new.hidden), 1) if done else 1.0
        self.stack.penalty = noise * settings.l2 * _PENALISED / (_PENALISED + seen.total)
        try:
            rows = torch.from_numpy(self._rows(seen)).unsqueeze(1)
            train(self.stack, [rows], constant(settings.lr))
            new.layers = self._layers()
            new.linear = self._fit_linear(new)
            self._fit_hidden(new)
            new.share = self._share(new)
        except BaseException:
            self.stack.done = done
            for name, tensor in self.stack.tensors().items():
                tensor.copy_(before[name])
            raise
        self._next = seen.total + int(max(settings.train_every, (_GROWTH - 1) * seen.effective_count))
        return new

    def _rows(self, seen: Observations) -> Indices:
        """Of the mini-batches; held-out observations are replaced by their neighbours."""
        rows = seen.drawn(self.streams["batches"], self.settings.train_steps, self.settings.batch_size)
        for _ in range(2):
            rows = np.where(self._held_out(seen)[rows], (rows - 1) % seen.count, rows)
        return rows

    def _held_out(self, seen: Observations) -> npt.NDArray[np.bool_]:
        """Which observations are not trained on."""
        numbers = np.arange(seen.total - seen.count, seen.total)
        return np.equal(numbers % _HOLD_OUT, 0)

    def _batch(self, rows: Tensor) -> tuple[Tensor, Slope]:
        """Contexts, and the gradient by f of (1/b) Σ_i (f_{arm_i}(x_i) − target_i)²."""
        at, seen, (shift, scale) = rows[0].numpy(), self._seen, self._units
        contexts, chosen, rewards = (torch.from_numpy(of[at])[None] for of in (seen.contexts, seen.arms, seen.rewards))
        targets, arms = rewards.sub_(shift).div_(scale), chosen.unsqueeze(2)

        def slope(outputs: Tensor) -> Tensor:
            errors = outputs.gather(2, arms).squeeze(2).sub_(targets).mul_(2 / len(at))
            return torch.zeros_like(outputs).scatter_(2, arms, errors.unsqueeze(2))

        return contexts, slope

    def _statistics(self, belief: Belief, head: Head) -> Statistics:
        """Of the observations, in units of the targets."""
        seen, data = self._seen, Statistics.zeros(*head.mean.shape)
        for first in range(0, seen.count, _CHUNK):
            part = slice(first, min(first + _CHUNK, seen.count))
            x = belief.features(head, seen.contexts[part])
            data.add(seen.arms[part], x, seen.rewards[part], seen.weights(part))
        return data.standardised(*belief.units)

    def _fit_linear(self, belief: Belief) -> Head:
        """Around the mean reward of a random arm: agents that learn see better rewards."""
        data, noise = self._statistics(belief, belief.linear), self._noise(belief)
        counts, center = data.counts, np.zeros_like(data.cross)
        center[:, -1] = (data.cross[:, -1] / counts.clip(min=1)).sum() / max((counts > 0).sum(), 1)
        shape, first = _SHAPE + 0.5 * counts, self._precision(belief, belief.linear, data)
        covariance, mean, scale = normal_equations(data, center, first)
        variance = float((scale + noise).sum() / shape.sum())
        for _ in range(_SHARED_STEPS):
            shared = shared_precision(mean - center, covariance, variance, first, first_arms=_FIRST_ARMS)
            covariance, mean, scale = normal_equations(data, center, shared)
        return Head(mean, covariance, shape, scale)

    def _fit_hidden(self, belief: Belief) -> None:
        """Around the network's own last layer. The noise stays that of errors made before the rewards were learnt."""
        head, data = belief.hidden, self._statistics(belief, belief.hidden)
        weight, bias = (tensor[0].numpy() for tensor in list(self.stack.params.values())[-2:])
        last = np.column_stack([weight, bias]).astype(np.float64)
        head.covariance, head.mean, _ = normal_equations(data, last, self._precision(belief, head, data))

    def _share(self, belief: Belief) -> float:
        """s = Σ ω e_x (e_x − e_h)/(Σ ω (e_x − e_h)² + m σ²) in [0, 1], e the errors of held-out observations left out.

        ω falls with the square of 1 − xᵀ C x, which bounds the weight of outliers.
        """
        seen = self._seen
        rows = np.flatnonzero(self._held_out(seen))[-_CHUNK:]
        contexts, arms = seen.contexts[rows], seen.arms[rows]
        targets = (seen.rewards[rows].astype(np.float64) - belief.units[0]) / belief.units[1]
        (first, rest), (second, other) = (
            head.left_out(arms, belief.features(head, contexts), targets) for head in (belief.linear, belief.hidden)
        )
        weights = np.minimum(rest, other) ** 2 * seen.weights(rows)
        noise, gap = min((weights * first**2).mean(), (weights * second**2).mean()), first - second
        below = (weights * gap**2).sum() + _CAUTION * noise
        share = (weights * first * gap).sum() / max(below, np.finfo(np.float64).tiny)
        return float(np.clip(share, 0, 1))

    # --- the state --------------------------------------------------------------------------------------------------

    def arrays(self) -> Arrays:
        """Both heads, the network and its optimiser."""
        belief = self.belief
        parts = {"linear": belief.linear, "hidden": belief.hidden}
        arrays = {f"{name}.{field}": array for name, part in parts.items() for field, array in vars(part).items()}
        numbers = {"share": belief.share, "ends": belief.ends, "shift": belief.units[0], "scale": belief.units[1]}
        numbers |= {"due": self._next, "steps": self.stack.done}
        arrays |= {name: np.array(number) for name, number in numbers.items()}
        return arrays | {name: tensor.numpy() for name, tensor in self.stack.tensors().items()}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over all of it."""
        own, belief = self.arrays(), self.belief
        for name, array in own.items():
            array[...] = arrays[name].reshape(array.shape)
        self._next, self.stack.done, belief.layers = int(own["due"]), int(own["steps"]), self._layers()
        belief.units, belief.ends = (float(own["shift"]), float(own["scale"])), tuple(own["ends"].tolist())
        belief.share = float(own["share"])

    def parts(self, array: npt.NDArray[Any]) -> Sequence[npt.NDArray[Any]]:
        """The layers of flat weights."""
        flat = array.shape == tuple(self.stack.weights.shape)
        return [t.numpy() for t in unflatten(self.network, torch.from_numpy(array)).values()] if flat else (array,)
