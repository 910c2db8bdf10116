"""What decides and learns: exact linear heads on the contexts and on a network's last hidden layer."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesadam.bandits.linear import SHAPE, Head, Statistics, normal_equations, shared_precision, with_constant
from bayesadam.bandits.observations import Contexts, Floats, Indices, Observations
from bayesadam.bandits.settings import HybridSettings
from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, unflatten
from bayesadam.engine.rules import Adam
from bayesadam.engine.stack import Stack, constant
from bayesadam.engine.streams import Streams

Arrays = dict[str, npt.NDArray[Any]]
# Mean and standard deviation of what arms pay.
Line = tuple[list[float], list[float]]

# The prior, in units of the rewards' range R: functions have a standard deviation of the first times R, and the noise
# is inverse gamma with a shape of the second and a scale of the third times R²/(features + 1)³: trying everything is
# cheap in few dimensions only.
_FUNCTION, _NOISE = 0.25, 9.0
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
# One of so many observations is held out from the network; the newest of them weigh the heads.
_HOLD_OUT = 10
_WEIGHED = 4096
# So many observations may wait for the head that does not decide.
_WAITING = 64
_CLIP, _CHUNK = 5.0, 512
# The least probability of an arm that was chosen.
_LEAST = 2.0**-24
_ROOT = math.sqrt(2)


def best_shares(mean: Sequence[float], std: Sequence[float]) -> list[float]:
    """P(arm a has the largest mean + |ε| std), ε ~ N(0, 1).

    These are lines of t = |ε|, and the highest ones follow each other as t grows, each steeper than the one before. One
    that is highest between two crossings counts erf(t₂/√2) − erf(t₁/√2).
    """
    shares, reached = [0.0] * len(mean), 0.0
    best = max(range(len(mean)), key=lambda arm: (mean[arm], std[arm]))
    while True:
        m, s, crossing, after = mean[best], std[best], math.inf, -1
        for arm, steep in enumerate(std):
            if steep > s:
                t = (m - mean[arm]) / (steep - s)
                if t < crossing or (t == crossing and steep > std[after]):
                    crossing, after = t, arm
        if after < 0:
            shares[best] = 1 - reached
            return shares
        end = max(reached, math.erf(crossing / _ROOT))
        shares[best], reached, best = end - reached, end, after


def _slope(target: Tensor, weight: Tensor, outputs: Tensor) -> Tensor:
    return outputs.sub_(target).mul_(weight)


@dataclass(eq=False)
class Belief:
    """What decides: both heads, the network's hidden layers, and the share s of the head on the last of them.

    Rewards are learnt in the `units` (shift, scale), as (r − shift)/scale; `ends` are the smallest and largest seen.
    While s = 0 the hidden head does not decide, and observations of it are `waiting`, as contexts, arms and targets.
    """

    linear: Head
    hidden: Head
    layers: list[tuple[Contexts, Contexts]]
    share: float
    units: tuple[float, float]
    ends: tuple[float, float]
    waiting: list[tuple[Contexts, list[int], list[float]]] = field(default_factory=list)

    def features(self, head: Head, contexts: Contexts) -> Floats:
        """Of a head, with a constant 1."""
        h = contexts
        for weight, bias in self.layers if head is self.hidden else ():
            h = h @ weight.T
            np.maximum(np.add(h, bias, out=h), 0, out=h)
        return with_constant(h)

    def learn(self, contexts: Contexts, arms: list[int], rewards: list[float], *, hidden: bool) -> None:
        """Add observations to the head on the contexts, and to the `hidden` one where the network was trained."""
        shift, scale = self.units
        targets = [(reward - shift) / scale for reward in rewards]
        self.ends = min(self.ends[0], *rewards), max(self.ends[1], *rewards)
        self.linear.update(arms, targets, self.features(self.linear, contexts))
        if hidden:
            self.waiting.append((contexts.copy(), arms, targets))
            if self.share or len(arms) > 1 or len(self.waiting) >= _WAITING:
                self.settle()

    def settle(self) -> None:
        """Add what waits to the hidden head."""
        if self.waiting:
            contexts, arms, targets = zip(*self.waiting, strict=True)
            self.waiting = []
            x = self.features(self.hidden, np.concatenate(contexts))
            self.hidden.update(list(chain(*arms)), list(chain(*targets)), x)


class Hybrid:
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

    The network's penalty is λσ² m/(m + n): as a prior's, it falls with the observations and with the noise. Without
    hidden layers there is the head on the contexts alone.
    """

    def __init__(self, settings: HybridSettings, n_features: int, n_arms: int, seed: int) -> None:
        self.settings, self.n_features, self.n_arms, self.seed = settings, n_features, n_arms, seed
        self.network = Network(n_features, settings.hidden, n_arms, dropout=settings.dropout)
        self.stack = Stack(self.network, Adam(), [seed], self._batches, average=settings.average, clip=_CLIP)
        self.streams = {purpose: Streams([seed], purpose) for purpose in ("explore", "hybrid", "batches")}
        self.streams["training"] = self.stack.streams
        memory = min(_MEMORY, 2 ** (-1 / (settings.forget or math.inf)))
        hidden = Head.prior(n_arms, (0, *settings.hidden)[-1] + 1, memory)
        linear, layers = Head.prior(n_arms, n_features + 1), self._layers()
        self.belief = Belief(linear, hidden, layers, 0.0, (0.0, 1.0), (np.inf, -np.inf))
        # How many observations the next training waits for, and for how long one rests after a step.
        self._next, self._rest = 0, 0.0
        # What a training learns from: contexts (n, features), arms and targets (n,).
        self._data: tuple[npt.NDArray[Any], ...] = ()

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
        return _MORE * (width if math.isfinite(width) else 1) / belief.units[1]

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
        mean, std = np.moveaxis(np.array(self._lines(contexts)), 1, 0)
        return mean, std

    def _lines(self, contexts: Contexts) -> list[Line]:
        """The same as lists of every context."""
        belief, noise, parts = self.belief, self._noise(self.belief), []
        for head, weight in ((belief.linear, 1 - belief.share), (belief.hidden, belief.share)):
            if weight:
                floor = [noise / a for a in head.shape.tolist()]
                parts.append((weight, *head.predict(belief.features(head, contexts)), head.noises(_OWN), floor))
        if len(contexts) > 1:
            mean = np.sum([weight * mean for weight, mean, *_ in parts], axis=0)
            stds = [weight * np.sqrt((own * w / (_DOUBT + w) + floor) * w) for weight, _, w, own, floor in parts]
            return list(zip(mean.tolist(), np.sum(stds, axis=0).tolist(), strict=True))
        # Of few numbers, Python's own are faster than arrays.
        means, stds = [0.0] * self.n_arms, [0.0] * self.n_arms
        for weight, mean, widths, own, floor in parts:
            for arm, (m, w, a, b) in enumerate(zip(mean[0].tolist(), widths[0].tolist(), own, floor, strict=True)):
                means[arm] += weight * m
                stds[arm] += weight * math.sqrt((a * w / (_DOUBT + w) + b) * w)
        return [(means, stds)]

    def chosen(self, contexts: Contexts, allowed: Sequence[int]) -> tuple[list[int], list[Line]]:
        """The arms chosen for k contexts, and the lines that `shares` takes."""
        lines, epsilon = self._lines(contexts), self.settings.epsilon
        if len(allowed) < self.n_arms:
            lines = [([mean[arm] for arm in allowed], [std[arm] for arm in allowed]) for mean, std in lines]
        arms, normals = [], self.streams["hybrid"].sources[0].standard_normal(len(contexts), np.float32)
        for (mean, std), optimism in zip(lines, np.abs(normals).tolist(), strict=True):
            values = [m + optimism * s for m, s in zip(mean, std, strict=True)]
            arms.append(allowed[values.index(max(values))])
        if epsilon:
            uniform = self.streams["explore"].sources[0].random((len(contexts), 1 + self.n_arms), np.float32)
            for at in np.flatnonzero(uniform[:, 0] < epsilon):
                arms[at] = allowed[int(uniform[at, 1:][allowed].argmax())]
        return arms, lines

    def shares(self, arms: Sequence[int], lines: list[Line], allowed: Sequence[int]) -> list[list[float]]:
        """The probabilities of the arms allowed, (k, allowed), once one of them was chosen."""
        shares, epsilon = [best_shares(*line) for line in lines], self.settings.epsilon
        for arm, share in zip(arms, shares, strict=True):
            at = allowed.index(arm)
            share[at] = max(share[at], _LEAST)
        if epsilon:
            shares = [[epsilon / len(allowed) + (1 - epsilon) * part for part in share] for share in shares]
        return shares

    def probabilities(self, contexts: Contexts, allowed: npt.NDArray[np.bool_]) -> Floats:
        """π(a | x) = ε/|A| + (1 − ε) P(a), exact, for a mask (k, arms) of the arms allowed."""
        mean, std = self.predictive(contexts)
        pairs = np.where(allowed, mean, -np.inf).tolist(), np.where(allowed, std, 0.0).tolist()
        shares, epsilon = np.array(list(map(best_shares, *pairs))), self.settings.epsilon
        found: Floats = allowed * (epsilon / allowed.sum(axis=1, keepdims=True) + (1 - epsilon) * shares)
        return found

    def observe(self, seen: Observations, rows: slice, belief: Belief | None = None) -> None:
        """Let the belief that decides, or another, learn observations."""
        if rows.start < rows.stop:
            contexts, arms, rewards = seen.contexts[rows], seen.arms[rows].tolist(), seen.rewards[rows].tolist()
            (belief or self.belief).learn(contexts, arms, rewards, hidden=bool(self.stack.done))

    # --- a training -------------------------------------------------------------------------------------------------

    def due(self, seen: Observations) -> bool:
        """Whether the observations have grown enough."""
        return seen.total >= self._next

    def train(self, seen: Observations, old: Belief, rest: float = 0.0) -> Belief:
        """The belief after a training: of the network, of both heads around it, and of the share.

        `old` stays as it is. Where it fails, the network is as it was. It rests so many seconds after each step.
        """
        self._rest = rest
        # In float32, as the network learns.
        shift, scale = (float(np.float32(part)) for part in seen.moments())
        new = replace(copy.deepcopy(old), units=(shift, scale))
        new.settle()
        # Squared errors are in the units of the previous training.
        new.hidden.scale *= (old.units[1] / scale) ** 2
        new.linear = self._fit_linear(seen, new)
        if self.settings.hidden:
            self._data = seen.contexts, seen.arms, (seen.rewards - np.float32(shift)) / np.float32(scale)
            self._train_network(seen, new)
        every = self.settings.train_every
        self._next = seen.total + every * max(1, math.ceil(int((_GROWTH - 1) * seen.effective_count) / every))
        return new

    def _train_network(self, seen: Observations, new: Belief) -> None:
        """Of a belief whose head on the contexts is trained; where it fails, the network is as it was."""
        before, done = {name: tensor.clone() for name, tensor in self.stack.tensors().items()}, self.stack.done
        noise = min(max(self._variance(new, new.hidden), 0), 1) if done else 1.0
        self.stack.penalty = noise * self.settings.l2 * _PENALISED / (_PENALISED + seen.total)
        try:
            self.stack.train(torch.from_numpy(self._rows(seen)).unsqueeze(1), constant(self.settings.lr))
            new.layers = self._layers()
            self._fit_hidden(seen, new)
            new.share = self._share(seen, new)
        except BaseException:
            self.stack.done = done
            for name, tensor in self.stack.tensors().items():
                tensor.copy_(before[name])
            raise

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

    def _batches(self, rows: Tensor) -> Iterator[tuple[Tensor, Slope]]:
        """Contexts, and the gradient by f of (1/b) Σ_i (f_{arm_i}(x_i) − target_i)², of every step of (k, 1, b)."""
        contexts, arms, targets = (part[rows.numpy()] for part in self._data)
        weights = np.zeros((*arms.shape, self.n_arms), np.float32)
        np.put_along_axis(weights, arms[..., None], 2 / rows.shape[2], axis=3)
        for x, target, weight in zip(*map(torch.from_numpy, (contexts, targets[..., None], weights)), strict=True):
            yield x, partial(_slope, target, weight)
            self._pause()

    def _pause(self) -> None:
        """Let other threads take the interpreter's lock, which one of many short calls hardly lets go."""
        if self._rest:
            time.sleep(self._rest)

    def _statistics(self, seen: Observations, belief: Belief, head: Head) -> Statistics:
        """Of the observations, in units of the targets."""
        data = Statistics.zeros(*head.mean.shape)
        for first in range(0, seen.count, _CHUNK):
            part = slice(first, min(first + _CHUNK, seen.count))
            x = belief.features(head, seen.contexts[part])
            data.add(seen.arms[part], x, seen.rewards[part], seen.weights(part))
            self._pause()
        return data.standardised(*belief.units)

    def _fit_linear(self, seen: Observations, belief: Belief) -> Head:
        """Around the mean reward of a random arm: agents that learn see better rewards."""
        data, noise = self._statistics(seen, belief, belief.linear), self._noise(belief)
        counts, center = data.counts, np.zeros_like(data.cross)
        center[:, -1] = (data.cross[:, -1] / counts.clip(min=1)).sum() / max((counts > 0).sum(), 1)
        shape, first = SHAPE + 0.5 * counts, self._precision(belief, belief.linear, data)
        covariance, mean, scale = normal_equations(data, center, first)
        variance = float((scale + noise).sum() / shape.sum())
        for _ in range(_SHARED_STEPS):
            shared = shared_precision(mean - center, covariance, variance, first, first_arms=_FIRST_ARMS)
            covariance, mean, scale = normal_equations(data, center, shared)
        return Head(mean, covariance, shape, scale, 1.0)

    def _fit_hidden(self, seen: Observations, belief: Belief) -> None:
        """Around the network's own last layer. The noise stays that of errors made before the rewards were learnt."""
        head, data = belief.hidden, self._statistics(seen, belief, belief.hidden)
        weight, bias = (tensor[0].numpy() for tensor in list(self.stack.params.values())[-2:])
        last = np.column_stack([weight, bias]).astype(np.float64)
        covariance, mean, _ = normal_equations(data, last, self._precision(belief, head, data))
        belief.hidden = Head(mean, covariance, head.shape, head.scale, head.memory)

    def _share(self, seen: Observations, belief: Belief) -> float:
        """s = Σ ω e_x (e_x − e_h)/(Σ ω (e_x − e_h)² + m σ²) in [0, 1], e the errors of held-out observations left out.

        ω falls with the square of 1 − xᵀ C x, which bounds the weight of outliers.
        """
        rows = np.flatnonzero(self._held_out(seen))[-_WEIGHED:]
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

    def state(self) -> Arrays:
        """Both heads, the network and its optimiser, and where the random numbers are."""
        belief = self.belief
        belief.settle()
        parts = {"linear": belief.linear, "hidden": belief.hidden}
        fields = ("mean", "covariance", "shape", "scale")
        arrays = {f"{name}.{field}": getattr(head, field) for name, head in parts.items() for field in fields}
        numbers = {"share": belief.share, "ends": belief.ends, "shift": belief.units[0], "scale": belief.units[1]}
        numbers |= {"due": self._next, "steps": self.stack.done}
        arrays |= {name: np.array(number) for name, number in numbers.items()}
        arrays |= {name: tensor.numpy() for name, tensor in self.stack.tensors().items()}
        return arrays | {f"stream.{name}": stream.state().numpy() for name, stream in self.streams.items()}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Resume where `state` was taken, with the same settings; releases up to 0.3 have more dimensions."""
        own, belief = self.state(), self.belief
        for name, array in own.items():
            array[...] = state[name].reshape(array.shape)
        self._next, self.stack.done, belief.layers = int(own["due"]), int(own["steps"]), self._layers()
        belief.units, belief.ends = (float(own["shift"]), float(own["scale"])), tuple(own["ends"].tolist())
        belief.share = float(own["share"])
        if not belief.layers and (self.stack.done or belief.share):
            raise ValueError("an agent without hidden layers has no network that was trained")
        for name, stream in self.streams.items():
            stream.restore(torch.from_numpy(own[f"stream.{name}"]))

    def widened(self) -> Hybrid:
        """The same for one more arm, which is as in a new learner."""
        wide = Hybrid(self.settings, self.n_features, self.n_arms + 1, self.seed)
        state = wide.state()
        for name, array in self.state().items():
            for part, whole in zip(self._parts(name, array), wide._parts(name, state[name]), strict=True):
                whole[tuple(slice(0, length) for length in part.shape)] = part
        wide.restore(state)
        return wide

    def _parts(self, name: str, array: npt.NDArray[Any]) -> Sequence[npt.NDArray[Any]]:
        """Views of an array, of each of which the leading part stays: of flat weights, the layers."""
        if name not in self.stack.tensors() or name == "step":
            return (array,)
        return [tensor.numpy() for tensor in unflatten(self.network, torch.from_numpy(array)).values()]
