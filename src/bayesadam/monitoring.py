r"""`Monitor`: has the stream of inputs drifted from the held-out ones? A conformal test martingale on their scores.

Of n held-out scores and t of the stream, exchangeable and in random order where they are equal, the next falls into
each of the n + t + 1 gaps between them with the same probability, whatever fell where before. So it falls above the
j-th smallest held-out score and below the next with probability (1 + c_j)/(n + t + 1), where c_j of the stream are
there already: an urn of Pólya's. With U uniform,

.. math::
    p_t = \frac{\sum_{k > j} (m_k + c_k) + U (m_j + c_j)}{n + t + 1}, \qquad m_j = 1,

are then independent and uniform, exactly, and only the counts c are kept, however long the stream. The same holds of
groups of neighbouring gaps, with m_j the number of gaps in the group: these are single gaps at both ends and grow
towards the middle, so that p is known to 3 % of itself, and there are fewer than 1,000 for any n.

Bets on densities f_k of p, each from its own start s on, make a martingale: of a capital of 1, half is on the bets at
the start, and a part w_s of the rest goes to them before the s-th score,

.. math::
    A_{k,t} = (A_{k,t-1} + w_t/K) f_k(p_t), \qquad
    M_t = \sum_k A_{k,t} + \tfrac12 \frac{\log a}{\log(a + t)}, \qquad
    w_t = \tfrac12 \frac{\log a}{\log(a + t - 1)} - \tfrac12 \frac{\log a}{\log(a + t)}.

Where nothing drifts E[M_t] = 1 and, by Ville's inequality, P(M_t ever reaches 1/α) ≤ α. What is not yet bet never
runs out, so that a late change is caught as well: its price grows with the logarithm of the time before it.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bayesadam import _files, _storage
from bayesadam._alone import unwrap
from bayesadam._checks import require_kind
from bayesadam._extras import require
from bayesadam._schema import MonitorHeader
from bayesadam.calibrated import Answer, Calibrated, Program
from bayesadam.errors import CalibrationError, MatchError, SettingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
Scores = ArrayLike | torch.Tensor
_REMEDY = ": give the file that Monitor.save wrote"
_KIND = _storage.Kind("bayesadam.monitor", "a saved monitor", _REMEDY, schema=MonitorHeader)
# Bets are that a share ε of the scores has p near 0, near 1 or near ½: q = p, 1 − p or |2 p − 1| has the density
# κ q^(κ − 1), shifted by δ so that it is bounded, or 2 (1 − q). All were chosen by the delay on made-up streams.
_SHARES, _EXPONENTS, _SHIFT = np.array([0.03, 0.2, 0.9]), np.array([0.05, 0.3, 0.7]), 1e-4
_SCALES = _EXPONENTS / ((1 + _SHIFT) ** _EXPONENTS - _SHIFT**_EXPONENTS)
_DIRECTIONS = ("stranger", "more familiar", "more alike")
_BETS = len(_DIRECTIONS) * (len(_EXPONENTS) + 1) * len(_SHARES)
# a: ½ log a/log(a + t) is not yet bet after t scores.
_PATIENCE = 100.0
# Scores that are taken at once: products of so many bets stay far from the ends of float64.
_CHUNK = 64
_EARLIER = np.tri(_CHUNK, k=-1, dtype=bool)
# Capital beyond which no more is bet.
_ENOUGH = 1e100
# A group at rank r from the nearer end holds r/32 gaps.
_FINE = 32
# Points of the picture.
_POINTS = 1024


class Monitor:
    """Tells when the inputs of a stream are no longer like the held-out ones, at a bounded rate of false alarms.

        monitor = ba.Monitor(net, alarm=0.01)
        for batch in stream:
            if monitor.update(net(batch)):                # True from the alarm on
                ...

    As long as held-out scores and those of the stream are exchangeable, the probability of ever raising an alarm,
    however long the stream, is at most `alarm`: the martingale M starts at 1, and the alarm is raised where it reaches
    1/`alarm`. Time and memory of an update do not depend on what came before. Scores that are not finite count as
    larger than all that are. A part of the stream, such as a camera, has a monitor of its own: of k of them each gets
    `alarm`/k, and a reference of inputs like its own.

    Attributes:
        alarm: the bound.
        n: how many scores the stream had.
        log_martingale: log M now; at most about 230, since nothing is bet beyond.
        alarmed_at: the score that raised the alarm, 1 for the first; None where none did.
        direction: what most of M was bet on at the alarm, or is before one: that scores are `"stranger"` than held-out
            ones, `"more familiar"`, or `"more alike"`.
        p_values: of the last update, (batch,).

    Args:
        net: what `calibrate` returned, or `ba.load`, whose held-out novelties are the reference.
        reference: instead of it, held-out scores of any kind, (n,); larger is stranger.
        alarm: the bound on the probability of a false alarm.
        seed: of the random order of equal scores, and of U.
    """

    def __init__(
        self,
        net: Calibrated | Program | None = None,
        *,
        reference: Scores | None = None,
        alarm: float = 0.01,
        seed: int = 0,
    ) -> None:
        if (net is None) == (reference is None):
            raise SettingError("give either a calibrated network or reference=, the scores of held-out inputs")
        if not 0 < alarm < 1:
            raise SettingError(f"alarm must lie between 0 and 1, the probability of a false alarm, got {alarm!r}")
        if net is not None:
            if isinstance(net, torch.nn.Module):
                net = cast(Calibrated | Program, unwrap(net))
            require_kind(net, (Calibrated, Program), "net")
            reference = net.novelties
            if reference is None:
                raise CalibrationError("the network has no held-out novelties: calibrate on at least 20 examples")
        assert reference is not None
        scores = np.sort(_scores(reference, "reference"))
        if not len(scores):
            raise SettingError("the reference holds no score: some hundred held-out inputs are needed")
        self.alarm, self._draw = alarm, np.random.default_rng(seed)
        self._place(scores, self._draw.random(len(scores)))
        self.reset()

    def _place(self, scores: Array, order: Array) -> None:
        """Groups of gaps between the reference scores; `order` decides between equal ones."""
        self._scores, self._order, n = scores, order, len(scores)
        self._values, block = np.unique(scores, return_inverse=True)
        keys = np.sort(2.0 * block + order)
        # From either end towards the middle, in ranks of gaps.
        ends = [0]
        while ends[-1] < (n + 1) // 2:
            ends.append(min(ends[-1] + max(1, ends[-1] // _FINE), (n + 1) // 2))
        cuts = np.unique([*ends, *(n + 1 - np.array(ends))])
        self._gaps = np.diff(cuts).astype(float)
        self._edges = keys[cuts[1:-1] - 1]

    def reset(self) -> None:
        """Begin anew, with the same reference: the next stream has the bound to itself."""
        self.n, self.log_martingale = 0, 0.0
        self.alarmed_at: int | None = None
        self.p_values: Array = np.zeros(0)
        self._counts, self._capital = np.zeros(len(self._gaps)), np.full(_BETS, 0.5 / _BETS)
        self._at_alarm = self._capital
        self._history, self._stride = np.zeros((1, 2)), 1

    @property
    def alarmed(self) -> bool:
        """Whether there was an alarm since the start or the last `reset`."""
        return self.alarmed_at is not None

    @property
    def direction(self) -> str:
        """What most of M was bet on at the alarm, or is before one."""
        capital = self._at_alarm if self.alarmed else self._capital
        return _DIRECTIONS[int(capital.reshape(len(_DIRECTIONS), -1).sum(axis=1).argmax())]

    def same_reference(self, other: Monitor) -> bool:
        """Whether another monitor ranks scores among the same held-out ones, as one of the same model does."""
        return np.array_equal(self._scores, other._scores)

    def update(self, scores: Scores | Answer) -> bool:
        """Take the scores of a batch, in the order of the stream; whether there was an alarm, now or before.

        Args:
            scores: what the network says of a batch, whose novelty is taken; or scores, (batch,), or a number.
        """
        values = _scores(scores.novelty if isinstance(scores, Answer) else scores, "scores")
        order, u = self._draw.random((len(values), 2)).T
        block = np.searchsorted(self._values, values)
        same = self._values[np.minimum(block, len(self._values) - 1)] == values
        groups = np.searchsorted(self._edges, np.where(same, 2.0 * block + order, 2.0 * block - 0.5))
        starts = range(0, len(values), _CHUNK)
        p_values = [self._advance(groups[i : i + _CHUNK], u[i : i + _CHUNK]) for i in starts]
        self.p_values = np.concatenate([np.zeros(0), *p_values])
        return self.alarmed

    def _advance(self, groups: NDArray[np.int64], u: Array) -> Array:
        """Take the next scores, by their groups of gaps; their p."""
        earlier = _EARLIER[: len(groups), : len(groups)]
        mass = self._gaps + self._counts
        above = mass.sum() - mass.cumsum()
        greater = above[groups] + ((groups > groups[:, None]) & earlier).sum(axis=1)
        equal = mass[groups] + ((groups == groups[:, None]) & earlier).sum(axis=1)
        t = self.n + np.arange(len(groups) + 1)
        p: Array = (greater + u * equal) / (len(self._scores) + 1 + t[:-1])
        np.add.at(self._counts, groups, 1.0)

        rest = 0.5 * math.log(_PATIENCE) / np.log(_PATIENCE + t)
        f, spent = densities(p), (rest[:-1] - rest[1:])[:, None] / _BETS
        if self._capital.sum() >= _ENOUGH:
            f, spent = np.ones_like(f), np.zeros_like(spent)
        grown = f.cumprod(axis=0)
        capital = grown * (self._capital + (spent * f / grown).cumsum(axis=0))
        logs = np.log(capital.sum(axis=1) + rest[1:])
        reached = logs >= -math.log(self.alarm)
        if self.alarmed_at is None and reached.any():
            first = int(reached.argmax())
            self.alarmed_at, self._at_alarm = int(t[first + 1]), capital[first]
        self.n, self._capital, self.log_martingale = int(t[-1]), capital[-1], float(logs[-1])

        points = np.stack([t[1:], logs], axis=1)
        self._history = np.concatenate([self._history, points[t[1:] % self._stride == 0]])
        while len(self._history) > _POINTS:
            self._stride *= 2
            self._history = self._history[self._history[:, 0] % self._stride == 0]
        return p

    def plot(self, ax: Axes | None = None) -> Axes:
        """log M over the scores of the stream, with the limit and where the alarm was."""
        if ax is None:
            _, ax = require("matplotlib.pyplot").subplots(figsize=(5.6, 3.4), layout="constrained")
        assert ax is not None
        numbers, logs = np.concatenate([self._history, [[self.n, self.log_martingale]]]).T
        ax.plot(numbers, logs / math.log(10), color="#0072B2", linewidth=1.6)
        limit = -math.log10(self.alarm)
        ax.axhline(limit, color="#D55E00", linewidth=1.2, linestyle=(0, (4, 3)))
        ax.annotate("alarm", (0, limit), xytext=(4, 3), textcoords="offset points", color="#D55E00")
        if self.alarmed_at is not None:
            ax.axvline(self.alarmed_at, color="#767676", linewidth=1)
            ax.set_title(f"alarm at score {self.alarmed_at:,}", loc="left", fontsize="medium")
        ax.set(xlabel="scores", ylabel="log₁₀ of the martingale")
        return ax

    def __str__(self) -> str:
        state = f"alarm at score {self.alarmed_at:,}: they are {self.direction}" if self.alarmed_at else "no alarm"
        return (
            f"Monitor: at most {100 * self.alarm:g} % false alarms, {len(self._scores):,} held-out scores\n"
            f"{self.n:,} scores, log M {self.log_martingale:.2f} (alarm at {-math.log(self.alarm):.2f}), {state}"
        )

    def save(self, path: _storage.AnyPath) -> None:
        """Write it to a safetensors file, complete or not at all; `Monitor.load` goes on where it was."""
        names = ("n", "log_martingale", "alarm", "alarmed_at")
        header = {name: getattr(self, name) for name in names}
        header |= {"stride": self._stride, "draw": self._draw.bit_generator.state}
        _storage.write(path, {name: torch.tensor(getattr(self, f"_{name}")) for name in _ARRAYS}, header, _KIND)

    @classmethod
    def load(cls, path: _storage.AnyPath) -> Monitor:
        """The monitor that `save` wrote, which goes on to the bit."""
        tensors, header = _storage.read(path, _KIND)
        with _files.damage_named(path, "Monitor.save"):
            if "n" in tensors:
                tensors, header = _of_release_0_3(tensors, header)
            arrays = {name: tensors[name].numpy() for name in _ARRAYS}
            monitor = cls(reference=arrays["scores"], alarm=header["alarm"])
            monitor._place(arrays.pop("scores"), arrays.pop("order"))
            for name, values in arrays.items():
                setattr(monitor, f"_{name}", values)
            monitor.n, monitor.log_martingale = header["n"], header["log_martingale"]
            monitor.alarmed_at, monitor._stride = header["alarmed_at"], header["stride"]
            monitor._draw.bit_generator.state = header["draw"]
            # What the file holds goes together if a copy can go on.
            _, _ = str(monitor), copy.deepcopy(monitor).update(np.zeros(3))
        return monitor


_ARRAYS = ("scores", "order", "counts", "capital", "at_alarm", "history")


def _of_release_0_3(
    tensors: dict[str, torch.Tensor], header: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The whole stream of a monitor that could have slices, which took half of its bound on false alarms."""
    whole = {name: tensor[0] for name, tensor in tensors.items() if name not in ("scores", "order", "history")}
    at_alarm = torch.zeros(len(_DIRECTIONS), _BETS // len(_DIRECTIONS), dtype=torch.float64)
    at_alarm[int(whole["direction"])] = 1.0
    alarm = header["alarm"] / (2 if header["slices"] else 1)
    state = {"alarm": alarm, "n": int(whole["n"]), "log_martingale": float(whole["log"])}
    return {**tensors, **whole, "at_alarm": at_alarm}, {**header, **state}


def densities(p: Array) -> Array:
    """f of p, (..., bets): 1 − ε + ε g(q) of q = p, 1 − p and |2 p − 1|.

    g is κ (q + δ)^(κ − 1)/((1 + δ)^κ − δ^κ) or 2 (1 − q).
    """
    q = np.stack([p, 1 - p, np.abs(2 * p - 1)], axis=-1)[..., None]
    g = np.concatenate([_SCALES * np.exp((_EXPONENTS - 1) * np.log(q + _SHIFT)), 2 - 2 * q], axis=-1)
    mixed: Array = 1 - _SHARES + _SHARES * g[..., None]
    return mixed.reshape(*p.shape, _BETS)


def _scores(values: Scores, name: str) -> Array:
    """(n,), with what is not finite as the largest."""
    if values is None:
        raise MatchError(f"{name} are None: give a number for each input")
    if isinstance(values, torch.Tensor):
        values = values.detach().double().cpu().numpy()
    array = np.atleast_1d(np.asarray(values, np.float64))
    if array.ndim != 1:
        raise MatchError(f"{name} must be one number an input, (n,), got shape {array.shape}")
    return np.where(np.isfinite(array), array, np.inf)
