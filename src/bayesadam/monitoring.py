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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bayesadam import _storage
from bayesadam._checks import count, require_kind
from bayesadam._extras import require
from bayesadam._tables import aligned
from bayesadam.calibrated.answer import Answer
from bayesadam.calibrated.module import Calibrated
from bayesadam.errors import CalibrationError, FileError, MatchError, SettingError

Array = NDArray[np.float64]
Scores = ArrayLike | torch.Tensor
_KIND = _storage.Kind("bayesadam.monitor", "a saved monitor", ": give the file that Monitor.save wrote")
# Bets are that a share ε of the scores has p near 0, near 1 or near ½: q = p, 1 − p or |2 p − 1| has the density
# κ q^(κ − 1), shifted by δ so that it is bounded, or 2 (1 − q). All were chosen by the delay on made-up streams.
_SHARES, _EXPONENTS, _SHIFT = np.array([0.03, 0.2, 0.9]), np.array([0.05, 0.3, 0.7]), 1e-4
_SCALES = _EXPONENTS / ((1 + _SHIFT) ** _EXPONENTS - _SHIFT**_EXPONENTS)
_DIRECTIONS = ("stranger", "more familiar", "more alike")
_BETS = len(_DIRECTIONS) * (len(_EXPONENTS) + 1) * len(_SHARES)
# a: ½ log a/log(a + t) is not yet bet after t scores.
_PATIENCE = 100.0
# Scores of a stream that are taken at once: products of so many bets stay far from the ends of float64.
_CHUNK = 64
_EARLIER = np.tri(_CHUNK, k=-1, dtype=bool)
# Capital beyond which no more is bet.
_ENOUGH = 1e100
# A group at rank r from the nearer end holds r/32 gaps.
_FINE = 32
# Points of the picture, and scores over which the means by layer go.
_POINTS, _RECENT = 1024, 200


@dataclass(frozen=True)
class Watched:
    """One stream: all scores, or those of a slice.

    Attributes:
        n: how many scores there were.
        log_martingale: log M now; at most about 230, since nothing is bet beyond.
        peak: the largest log M.
        limit: the log M that raises the alarm.
        alarmed_at: which score of this stream raised it, 1 for the first; None where none did.
        direction: what most of M was bet on at the alarm, or is before one: that scores are `"stranger"` than held-out
            ones, `"more familiar"`, or `"more alike"`.
    """

    n: int
    log_martingale: float
    peak: float
    limit: float
    alarmed_at: int | None
    direction: str


class Monitor:
    """Tells when the inputs of a stream are no longer like the held-out ones, at a bounded rate of false alarms.

        monitor = ba.Monitor(net, alarm=0.01)
        for batch in stream:
            if monitor.update(net(batch)):                # True from the alarm on
                ...

    As long as held-out scores and those of the stream are exchangeable, the probability of ever raising an alarm,
    however long the stream, is at most `alarm`: the martingale M starts at 1, and the alarm is raised where it reaches
    1/`alarm`. Time and memory of an update do not depend on what came before. Scores that are not finite count as
    larger than all that are.

    With `slices=k` up to k parts of the stream, such as cameras or customers, are watched as well, each against the
    same held-out scores. The whole stream then has half of `alarm`, and each slice the k-th part of the other half, so
    that the probability of any false alarm at all is at most `alarm`. The inputs of a slice must be like the held-out
    ones; those of one class are not, and need a monitor with a reference of that class.

    Attributes:
        alarm: the bound.
        whole: the stream as a whole.
        slices: those seen, by name.
        alarmed_at: the score of the stream at which it or a slice raised the alarm, 1 for the first; None without.
        p_values: of the last update, (batch,).

    Args:
        net: what `calibrate` returned, whose held-out novelties are the reference.
        reference: instead of it, held-out scores of any kind, (n,); larger is stranger.
        alarm: the bound on the probability of a false alarm.
        slices: how many slices there may be.
        seed: of the random order of equal scores, and of U.
    """

    def __init__(
        self,
        net: Calibrated | None = None,
        *,
        reference: Scores | None = None,
        alarm: float = 0.01,
        slices: int = 0,
        seed: int = 0,
    ) -> None:
        if (net is None) == (reference is None):
            raise SettingError("give either a calibrated network or reference=, the scores of held-out inputs")
        if not 0 < alarm < 1:
            raise SettingError(f"alarm must lie between 0 and 1, the probability of a false alarm, got {alarm!r}")
        count("slices", slices, "how many there may be", least=0)
        self._layers: tuple[str, ...] = ()
        if net is not None:
            require_kind(net, Calibrated, "net")
            if net.novelties is None:
                raise CalibrationError("the network has no held-out novelties: calibrate on at least 20 examples")
            reference, self._layers = net.novelties, tuple(net.layers)
        assert reference is not None
        scores = np.sort(_scores(reference, "reference"))
        if not len(scores):
            raise SettingError("the reference holds no score: some hundred held-out inputs are needed")
        self.alarm, self._most = alarm, slices
        self._draw = np.random.default_rng(seed)
        self._place(scores, self._draw.random(len(scores)))
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the same reference: the next stream has the bound to itself."""
        rows = 1 + self._most
        self._names: dict[Any, int] = {}
        self._counts = np.zeros((rows, len(self._gaps)))
        self._capital = np.full((rows, _BETS), 0.5 / _BETS)
        self._n = np.zeros(rows, np.int64)
        self._log, self._peak = np.zeros(rows), np.zeros(rows)
        self._alarmed, self._direction = np.zeros((2, rows), np.int64)
        self.alarmed_at: int | None = None
        self.p_values: Array = np.zeros(0)
        self._history, self._stride = np.zeros((1, 2)), 1
        self._excess, self._weight = np.zeros(1), 0.0

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

    def _groups(self, scores: Array, order: Array) -> NDArray[np.int64]:
        """The group of gaps that each score falls into."""
        block = np.searchsorted(self._values, scores)
        same = self._values[np.minimum(block, len(self._values) - 1)] == scores
        return np.searchsorted(self._edges, np.where(same, 2.0 * block + order, 2.0 * block - 0.5))

    @property
    def n(self) -> int:
        """How many scores the stream had."""
        return int(self._n[0])

    def same_reference(self, other: Monitor) -> bool:
        """Whether another monitor ranks scores among the same held-out ones, as one of the same model does."""
        return np.array_equal(self._scores, other._scores)

    @property
    def alarmed(self) -> bool:
        """Whether there was an alarm since the start or the last `reset`."""
        return self.alarmed_at is not None

    @property
    def log_martingale(self) -> float:
        """log M of the whole stream."""
        return self.whole.log_martingale

    @property
    def peak(self) -> float:
        """The largest log M of the whole stream."""
        return self.whole.peak

    @property
    def whole(self) -> Watched:
        """The stream as a whole."""
        return self._watched(0)

    @property
    def slices(self) -> dict[Any, Watched]:
        """The slices seen, by name."""
        return {name: self._watched(row) for name, row in self._names.items()}

    def _watched(self, row: int) -> Watched:
        at, log, peak = int(self._alarmed[row]), float(self._log[row]), float(self._peak[row])
        direction = int(self._direction[row]) if at else _direction(self._capital[row])
        return Watched(int(self._n[row]), log, peak, self._limit(row), at or None, _DIRECTIONS[direction])

    def _limit(self, row: int) -> float:
        parts = 1 if not self._most else 2 * self._most if row else 2
        return math.log(parts / self.alarm)

    def update(self, scores: Scores | Answer, *, slices: Sequence[Any] | Scores | None = None) -> bool:
        """Take the scores of a batch, in the order of the stream; whether there was an alarm, now or before.

        Args:
            scores: what the network says of a batch, whose novelty is taken and whose layers `drivers` tells of; or
                scores, (batch,), or a number.
            slices: the name of each score's slice, strings or whole numbers.
        """
        layers = scores.layers if isinstance(scores, Answer) else None
        scores = scores.novelty if isinstance(scores, Answer) else scores
        values = _scores(scores, "scores")
        rows = None if slices is None else self._rows(slices, len(values))
        excess = None if layers is None else self._matched(layers, len(values))
        order, *uniform = self._draw.random((len(values), 3)).T
        groups = self._groups(values, order)
        first, zeros = self.n, np.zeros(len(values), np.int64)
        logs, self.p_values = self._advance(zeros, groups, uniform[0])
        reached = logs >= self._limit(0)
        if rows is not None:
            reached |= self._advance(rows, groups, uniform[1])[0] >= self._limit(1)
        if self.alarmed_at is None and reached.any():
            self.alarmed_at = first + int(reached.argmax()) + 1
        self._remember(first, logs)
        if excess is not None and len(excess):
            kept = (1 - 1 / _RECENT) ** np.arange(len(excess), -1, -1.0)
            self._excess = kept[0] * self._excess + kept[1:] @ excess
            self._weight = kept[0] * self._weight + kept[1:].sum()
        return self.alarmed

    def _rows(self, slices: Any, n: int) -> NDArray[np.int64]:
        """The row of each name, with new rows for new names."""
        named = slices.tolist() if isinstance(slices, torch.Tensor | np.ndarray) else list(slices)
        if len(named) != n:
            raise MatchError(f"slices has {len(named)} names and scores has {n}: give each score the name of its slice")
        new = [name for name in dict.fromkeys(named) if name not in self._names]
        if odd := [name for name in new if not isinstance(name, str | int)]:
            raise SettingError(f"names of slices are strings or whole numbers, got {odd[0]!r}")
        if len(self._names) + len(new) > self._most:
            many = f"{len(self._names) + len(new)} slices, {new[-1]!r} among them, are more than slices={self._most}"
            raise SettingError(f"{many}: Monitor(..., slices=) sets how many there may be")
        self._names |= {name: row for row, name in enumerate(new, start=len(self._names) + 1)}
        return np.array([self._names[name] for name in named], np.int64)

    def _matched(self, layers: Scores, n: int) -> Array:
        found = _array(layers)
        width = len(self._layers) or (len(self._excess) if self._weight else found.shape[-1])
        if found.shape != (n, width):
            raise MatchError(f"layers has shape {found.shape}, it must be ({n}, {width}): a row for each score")
        return np.where(np.isfinite(found), found, 0.0)

    def _advance(self, rows: NDArray[np.int64], groups: NDArray[np.int64], u: Array) -> tuple[Array, Array]:
        """log M and p of each score; the streams of `rows` go on, in chunks and side by side."""
        own, stream, many = np.unique(rows, return_inverse=True, return_counts=True)
        turn = np.empty(len(rows), np.int64)
        turn[np.argsort(stream, kind="stable")] = np.arange(len(rows)) - np.repeat(np.cumsum(many) - many, many)
        logs, p = np.empty(len(rows)), np.empty(len(rows))
        for start in range(0, int(many.max(initial=0)), _CHUNK):
            now = np.flatnonzero((turn >= start) & (turn < start + _CHUNK))
            left = np.flatnonzero(many > start)
            at = np.searchsorted(left, stream[now]), turn[now] - start
            shape = len(left), int(at[1].max()) + 1
            table, uniform, valid = np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape, bool)
            table[at], uniform[at], valid[at] = groups[now], u[now], True
            found = self._chunk(own[left], table, uniform, valid)
            logs[now], p[now] = found[0][at], found[1][at]
        return logs, p

    def _chunk(
        self, rows: NDArray[np.int64], groups: NDArray[np.int64], u: Array, valid: NDArray[np.bool_]
    ) -> tuple[Array, Array]:
        """log M and p, (streams, scores), of the next scores of several streams; not valid are those beyond the end."""
        many, size = np.arange(len(rows)), groups.shape[1]
        mass = self._gaps + self._counts[rows]
        above = mass.sum(axis=1, keepdims=True) - mass.cumsum(axis=1)
        earlier = _EARLIER[:size, :size] & valid[:, None]
        mine, others, here = groups[:, :, None], groups[:, None], (many[:, None], groups)
        greater = above[here] + ((others > mine) & earlier).sum(axis=2)
        equal = mass[here] + ((others == mine) & earlier).sum(axis=2)
        t = self._n[rows][:, None] + np.arange(size + 1)
        p = (greater + u * equal) / (len(self._scores) + 1 + t[:, :-1])

        capital, rest = self._capital[rows], 0.5 * math.log(_PATIENCE) / np.log(_PATIENCE + t)
        bets = valid & (capital.sum(axis=1) < _ENOUGH)[:, None]
        f = np.where(bets[..., None], densities(p), 1.0)
        spent = np.where(bets, rest[:, :-1] - rest[:, 1:], 0.0)[..., None] / _BETS
        grown = f.cumprod(axis=1)
        capitals = grown * (capital[:, None] + (spent * f / grown).cumsum(axis=1))
        logs = np.log(capitals.sum(axis=2) + rest[:, 1:])

        last = valid.sum(axis=1) - 1
        np.add.at(self._counts, (np.broadcast_to(rows[:, None], valid.shape)[valid], groups[valid]), 1.0)
        self._capital[rows], self._log[rows] = capitals[many, last], logs[many, last]
        shown = np.where(valid, logs, -np.inf)
        self._peak[rows] = np.maximum(self._peak[rows], shown.max(axis=1))
        reached = shown >= np.where(rows > 0, self._limit(1), self._limit(0))[:, None]
        new = (self._alarmed[rows] == 0) & reached.any(axis=1)
        at = reached.argmax(axis=1)
        self._alarmed[rows[new]] = t[many, at + 1][new]
        self._direction[rows[new]] = _direction(capitals[many, at])[new]
        self._n[rows] += last + 1
        return logs, p

    def _remember(self, first: int, logs: Array) -> None:
        """Keep every so many-th point of the picture; half of them where they are too many."""
        numbers = np.arange(first + 1, first + 1 + len(logs))
        kept = numbers % self._stride == 0
        self._history = np.concatenate([self._history, np.stack([numbers, logs], axis=1)[kept]])
        while len(self._history) > _POINTS:
            self._stride *= 2
            self._history = self._history[self._history[:, 0] % self._stride == 0]

    def drivers(self, k: int = 5) -> dict[str, float]:
        """The k layers that extrapolate most: the mean of log h of recent inputs less the median of held-out ones.

        0 is about as on held-out inputs, 1 a leverage e times as large, less than 0 more familiar. The mean is over
        about the last 200 scores.
        """
        if not self._weight:
            raise SettingError("no layers were given: monitor.update(net(x)), not its novelty alone")
        means = self._excess / self._weight
        names = self._layers or tuple(map(str, range(len(means))))
        return {names[i]: float(means[i]) for i in np.argsort(-means, kind="stable")[:k]}

    def plot(self, ax: Any = None) -> Any:
        """log M of the whole stream over its scores, with the limit and where the alarm was."""
        if ax is None:
            _, ax = require("matplotlib.pyplot").subplots(figsize=(5.6, 3.4), layout="constrained")
        numbers, logs = np.concatenate([self._history, [[self.n, self.log_martingale]]]).T
        ax.plot(numbers, logs / math.log(10), color="#0072B2", linewidth=1.6)
        limit = self._limit(0) / math.log(10)
        ax.axhline(limit, color="#D55E00", linewidth=1.2, linestyle=(0, (4, 3)))
        ax.annotate("alarm", (0, limit), xytext=(4, 3), textcoords="offset points", color="#D55E00")
        if self.alarmed_at is not None:
            ax.axvline(self.alarmed_at, color="#767676", linewidth=1)
            ax.set_title(f"alarm at score {self.alarmed_at:,}", loc="left", fontsize="medium")
        ax.set(xlabel="scores", ylabel="log₁₀ of the martingale")
        return ax

    def __str__(self) -> str:
        shown = sorted(self.slices.items(), key=lambda item: -item[1].peak)
        rows = [["stream", "scores", "log M", "peak", "limit", "alarm", "they are"]]
        for name, one in [("whole", self.whole), *shown[:5]]:
            numbers = (f"{value:.2f}" for value in (one.log_martingale, one.peak, one.limit))
            alarm = [f"{one.alarmed_at:,}", one.direction] if one.alarmed_at else ["none", "as usual"]
            rows.append([str(name), f"{one.n:,}", *numbers, *alarm])
        title = f"Monitor: at most {100 * self.alarm:g} % false alarms, {len(self._scores):,} held-out scores"
        more = [f"and {len(shown) - 5:,} more slices"] if len(shown) > 5 else []
        return "\n".join([title, *aligned(rows), *more])

    def save(self, path: _storage.AnyPath) -> None:
        """Write it to a safetensors file, complete or not at all; `Monitor.load` goes on where it was."""
        header = {
            "alarm": self.alarm,
            "slices": self._most,
            "names": list(self._names),
            "layers": list(self._layers),
            "alarmed_at": self.alarmed_at,
            "stride": self._stride,
            "weight": self._weight,
            "draw": self._draw.bit_generator.state,
        }
        tensors = {name: torch.tensor(getattr(self, f"_{name}")) for name in _SAVED}
        _storage.write(path, tensors, header, _KIND)

    @classmethod
    def load(cls, path: _storage.AnyPath) -> Monitor:
        """The monitor that `save` wrote, which goes on to the bit."""
        tensors, header = _storage.read(path, _KIND)
        try:
            found = {name: tensors[name].numpy() for name in _SAVED}
            settings = {name: header[name] for name in ("alarm", "slices")}
            monitor = cls(reference=found["scores"], **settings)
            monitor._place(found.pop("scores"), found.pop("order"))
            for name, values in found.items():
                setattr(monitor, f"_{name}", values)
            monitor._names = {name: row for row, name in enumerate(header["names"], start=1)}
            monitor._layers, monitor.alarmed_at = tuple(header["layers"]), header["alarmed_at"]
            monitor._stride, monitor._weight = header["stride"], header["weight"]
            monitor._draw.bit_generator.state = header["draw"]
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is damaged: {error}") from None
        return monitor


_SAVED = ("scores", "order", "counts", "capital", "n", "log", "peak", "alarmed", "direction", "history", "excess")


def _direction(capital: Array) -> Any:
    """Which kind of bets has the most of a capital, (..., bets)."""
    return capital.reshape(*capital.shape[:-1], len(_DIRECTIONS), -1).sum(axis=-1).argmax(axis=-1)


def densities(p: Array) -> Array:
    """f of p, (..., bets): 1 − ε + ε g(q) of q = p, 1 − p and |2 p − 1|.

    g is κ (q + δ)^(κ − 1)/((1 + δ)^κ − δ^κ) or 2 (1 − q).
    """
    q = np.stack([p, 1 - p, np.abs(2 * p - 1)], axis=-1)[..., None]
    g = np.concatenate([_SCALES * np.exp((_EXPONENTS - 1) * np.log(q + _SHIFT)), 2 - 2 * q], axis=-1)
    found: Array = 1 - _SHARES + _SHARES * g[..., None]
    return found.reshape(*p.shape, _BETS)


def _array(values: Scores) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, np.float64)


def _scores(values: Scores, name: str) -> Array:
    """(n,), with what is not finite as the largest."""
    if values is None:
        raise MatchError(f"{name} are None: give a number for each input")
    found = np.atleast_1d(_array(values))
    if found.ndim != 1:
        raise MatchError(f"{name} must be one number an input, (n,), got shape {found.shape}")
    return np.where(np.isfinite(found), found, np.inf)
