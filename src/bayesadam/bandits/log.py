"""The log of an agent: one JSON object a line, each appended by one write, so that a kill loses no line."""

from __future__ import annotations

import json
import math
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bayesadam import _storage as storage
from bayesadam._warnings import warn
from bayesadam.errors import FileError, MatchError, MissingFileError

AnyPath = str | os.PathLike[str]
Floats = Sequence[float] | npt.NDArray[np.float32]
# Of the first line, whose `event` it is.
_KIND = storage.Kind("bayesadam.bandits", "a log of decisions", ": give the file that Agent.log wrote")
_BEGINNING = b'{"event":"bayesadam.bandits",'


@dataclass(frozen=True)
class Header:
    """The first line: whose log it is, with how many arms at first, and whether it had a learnt prior."""

    agent: str
    settings: Mapping[str, Any]
    seed: int
    n_features: int
    n_arms: int
    prior: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def check_width(self, n_features: int, path: AnyPath) -> None:
        """Raise where the log's contexts are not an agent's."""
        if self.n_features != n_features:
            raise MatchError(f"{path} has contexts of {self.n_features} numbers, the agent of {n_features}")


class Decided(NamedTuple):
    """An arm was chosen, with its probability, among `arms` with theirs; `tried` if it was its turn at first."""

    decision: int
    context: Floats
    arm: int
    probability: float
    arms: Sequence[int]
    probabilities: Sequence[float]
    tried: bool


class Rewarded(NamedTuple):
    """A decision's reward came."""

    decision: int
    reward: float


class Forgotten(NamedTuple):
    """A decision no longer waits for its reward."""

    decision: int


class Updated(NamedTuple):
    """Rewards came without a decision of this log."""

    contexts: Sequence[Floats] | npt.NDArray[np.float32]
    arms: Sequence[int]
    rewards: Floats


class ArmChanged(NamedTuple):
    """An arm was added, removed or restored."""

    arm: int
    change: Literal["added", "removed", "restored"]


Event = Decided | Rewarded | Forgotten | Updated | ArmChanged
_EVENTS: Mapping[str, type[Event]] = {
    "decision": Decided,
    "reward": Rewarded,
    "forget": Forgotten,
    "update": Updated,
    "arm": ArmChanged,
}
_NAMES: Mapping[type, str] = {kind: name for name, kind in _EVENTS.items()}


def shortest(values: Any) -> Any:
    """Floats, nested as an array of float32 is, with no more digits than a float32 has."""
    return float(str(values)) if np.ndim(values) == 0 else [shortest(value) for value in values]


def _line(event: str, content: Mapping[str, Any]) -> bytes:
    content = {"event": event, **content}
    return json.dumps(content, separators=(",", ":"), allow_nan=False, default=shortest).encode() + b"\n"


class Standing:
    """The decisions that wait and the arms there are, after some events of an agent or of a log."""

    def __init__(self, n_features: int, n_arms: int) -> None:
        self.n_features, self.n_arms, self.next_id = n_features, n_arms, 0
        self.removed: set[int] = set()
        # How often each arm was tried in turn at first.
        self.pulls = [0] * n_arms
        # Context and arm of the decisions that wait for a reward, by id.
        self.waiting: dict[int, tuple[Floats, int]] = {}

    def take(self, event: Event) -> None:
        """The next event; a `ValueError` tells why it does not fit those before."""
        if isinstance(event, Decided):
            self._check(event.context, event.arms)
            if event.decision < self.next_id:
                raise ValueError(f"decision {event.decision} comes after decision {self.next_id - 1}")
            if dict(zip(event.arms, event.probabilities, strict=True)).get(event.arm) != event.probability:
                raise ValueError(f"arm {event.arm} has the probability {event.probability} and another in the list")
            if not 0 < event.probability <= 1 + 1e-9:
                raise ValueError(f"an arm was chosen with probability {event.probability}")
            self.next_id = event.decision + 1
            self.waiting[event.decision] = event.context, event.arm
            self.pulls[event.arm] += event.tried
        elif isinstance(event, Rewarded | Forgotten):
            if event.decision not in self.waiting:
                raise ValueError(f"decision {event.decision} does not wait for a reward")
            context, arm = self.waiting[event.decision]
            if isinstance(event, Rewarded):
                self._check(context, [arm], event.reward)
            del self.waiting[event.decision]
        elif isinstance(event, Updated):
            if not len(event.contexts):
                raise ValueError("an update without contexts")
            for context, arm, reward in zip(event.contexts, event.arms, event.rewards, strict=True):
                self._check(context, [arm], reward)
        elif event.change == "added" and event.arm == self.n_arms:
            self.n_arms += 1
            self.pulls.append(0)
        elif event.change == "removed" and event.arm in range(self.n_arms) and event.arm not in self.removed:
            self.removed.add(event.arm)
        elif event.change == "restored" and event.arm in self.removed:
            self.removed.remove(event.arm)
        else:
            raise ValueError(f"arm {event.arm!r} cannot be {event.change!r} here")

    def _check(self, context: Floats, arms: Sequence[int], reward: float = 0.0) -> None:
        if len(context) != self.n_features:
            raise ValueError(f"a context of {len(context)} numbers, not {self.n_features}")
        for value in (*context, reward):
            if not math.isfinite(value):
                raise ValueError(f"{value} is not a finite number")
        for arm in arms:
            if arm not in range(self.n_arms):
                raise ValueError(f"there is no arm {arm} yet")

    def arms(self) -> list[int]:
        """Those to choose from."""
        return [arm for arm in range(self.n_arms) if arm not in self.removed]

    def changes_since(self, other: Standing) -> list[ArmChanged]:
        """How the arms of the other became these."""
        return [
            *(ArmChanged(arm, "added") for arm in range(other.n_arms, self.n_arms)),
            *(ArmChanged(arm, "removed") for arm in sorted(self.removed - other.removed)),
            *(ArmChanged(arm, "restored") for arm in sorted(other.removed - self.removed)),
        ]


# --- files ----------------------------------------------------------------------------------------------------------


class LogReader:
    """The events of a log in order; the newest goes from byte `start` to `end`.

    `rest` bytes of a half-written line may follow the last event. Any other damage is an error that names the line.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise MissingFileError(f"no file at {self.path}")
        with self.path.open("rb") as file:
            first = file.readline()
        try:
            found = json.loads(first)
            if found.pop("event", None) != _KIND.header or not first.endswith(b"\n"):
                raise ValueError
            storage.check_version(self.path, found.pop("format", None), _KIND)
            self.header = Header(**found)
        except (ValueError, TypeError, AttributeError) as error:
            raise FileError(f"{self.path} is not {_KIND.what}{_KIND.remedy}") from error
        self.standing = Standing(self.header.n_features, self.header.n_arms)
        self.start, self.end, self.rest = 0, len(first), 0

    def __iter__(self) -> Iterator[Event]:
        with self.path.open("rb") as file:
            file.seek(self.end)
            for number, line in enumerate(file, 2):
                if not line.endswith(b"\n"):
                    self.rest = len(line)
                    return
                try:
                    found = json.loads(line)
                    event = _EVENTS[found.pop("event")](**found)
                    self.standing.take(event)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    said = f"{self.path} is damaged in line {number} ({error}): mend or remove the line"
                    raise FileError(said) from None
                self.start, self.end = self.end, self.end + len(line)
                yield event

    def warn_of_rest(self, consequence: str) -> None:
        """Warn of a half-written last line."""
        if self.rest:
            warn(f"the last line of {self.path}, {self.rest} bytes, was only half written and {consequence}")


class LogFile:
    """A log that is written: open, locked against other writers, and read up to its `end`.

    `news` are the events from byte `known[1]` on, where `known[0]` is the id of the log.
    """

    def __init__(self, path: AnyPath, header: Header, *, sync: bool, known: tuple[str, int] | None = None) -> None:
        self.path, self._sync, self._process, self.end = Path(path), sync, os.getpid(), 0
        if not self.path.parent.is_dir():
            raise MissingFileError(f"cannot log to {self.path}: the folder {self.path.parent} does not exist")
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise FileError(f"cannot log to {self.path}: {error.strerror}") from error
        self.close = weakref.finalize(self, os.close, self._descriptor)
        try:
            _lock(self._descriptor, self.path)
            with self.path.open("rb") as file:
                first = file.readline(1 << 20)
            ours = first.startswith(_BEGINNING) or _BEGINNING.startswith(first)
            if first and ours and not first.endswith(b"\n"):
                warn(f"{self.path} had but half of a first line: it is begun anew")
                os.ftruncate(self._descriptor, 0)
                first = b""
            if not first:
                self._append(_line(_KIND.header, {"format": storage.FORMAT_VERSION, **vars(header)}))
            reader = LogReader(self.path)
            reader.header.check_width(header.n_features, self.path)
            self.header, self.standing = reader.header, reader.standing
            log, since = known or (None, 0)
            self.news = [event for event in reader if log == self.header.id and reader.start >= since]
            self.end = reader.end
            if reader.rest:
                os.ftruncate(self._descriptor, self.end)
                reader.warn_of_rest("is cut off")
        except BaseException:
            self.close()
            raise

    @property
    def known(self) -> tuple[str, int]:
        """The log's id and length."""
        return self.header.id, self.end

    def write(self, event: Event) -> None:
        """Append a line, whole or not at all."""
        own, here = self._process, os.getpid()
        if own != here:
            raise FileError(f"{self.path} is the log of process {own}: attach one in this process, {here}")
        self._append(_line(_NAMES[type(event)], event._asdict()))
        self.standing.take(event)

    def _append(self, line: bytes) -> None:
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):
                os.ftruncate(self._descriptor, self.end)
                raise OSError(0, f"only {written} of {len(line)} bytes could be written")
            if self._sync:
                os.fsync(self._descriptor)
        except OSError as error:
            raise FileError(f"cannot log to {self.path}: {error.strerror}; agent.log(None) goes on without") from error
        self.end += len(line)


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        # On Windows.
        return
    except BlockingIOError:
        raise FileError(f"{path} is written by another agent or process: give each a log of its own") from None


# --- arrays ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Log:
    """A log as arrays, one row for every decision and every `update`, in their order; see `Log.of`, too.

    Attributes:
        contexts: (n, features).
        arms: those chosen, (n,).
        probabilities: with which they were chosen, (n,); NaN for an `update`.
        rewards: (n,); NaN where none came.
        allowed: the arms that could be chosen from, (n, arms).
        possible: those of them that had a probability above 0, (n, arms).
        tried: where an arm was tried in turn, whatever the context, (n,).
        ids: of the decisions, (n,); −1 for an `update`.
        forgotten: whether a decision no longer waits for its reward, (n,).
        id: of an agent's log.
    """

    contexts: npt.NDArray[np.float32]
    arms: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    rewards: npt.NDArray[np.float64]
    allowed: npt.NDArray[np.bool_]
    possible: npt.NDArray[np.bool_]
    tried: npt.NDArray[np.bool_]
    ids: npt.NDArray[np.int64]
    forgotten: npt.NDArray[np.bool_]
    id: str | None = None

    @classmethod
    def of(
        cls,
        *,
        contexts: npt.ArrayLike,
        arms: npt.ArrayLike,
        probabilities: npt.ArrayLike,
        rewards: npt.ArrayLike,
        allowed: npt.ArrayLike | None = None,
        n_arms: int | None = None,
    ) -> Log:
        """A log from the arrays of another system.

        >>> log = Log.of(contexts=[[0.1], [0.2]], arms=[0, 1], probabilities=[0.5, 0.5], rewards=[1.0, float("nan")])
        >>> log.n_arms, len(log)
        (2, 2)

        Rewards are NaN where none came. All arms are `allowed` by default, as many as the largest of `arms` says.
        """
        chosen, given = np.asarray(arms), np.asarray(probabilities, np.float64)
        table, paid = np.asarray(contexts, np.float32), np.asarray(rewards, np.float64)
        if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer) or chosen.min(initial=0) < 0:
            raise MatchError(f"arms must be (n,) whole numbers from 0 on, got {chosen.dtype} of shape {chosen.shape}")
        n, rows, never = len(chosen), np.arange(len(chosen)), np.zeros(len(chosen), bool)
        if n_arms is None:
            n_arms = int(chosen.max(initial=0)) + 1 if allowed is None else np.shape(allowed)[-1]
        mask = np.ones((n, n_arms), bool) if allowed is None else np.asarray(allowed, bool)
        for name, found, shape, fits in (
            ("contexts", table, "(n, features)", table.ndim == 2 and len(table) == n),
            ("probabilities", given, "(n,)", given.shape == (n,)),
            ("rewards", paid, "(n,)", paid.shape == (n,)),
            ("allowed", mask, "(n, arms)", mask.shape == (n, n_arms)),
        ):
            if not fits:
                raise MatchError(f"{name} must be {shape} with n = {n} as of arms, got shape {found.shape}")
        for rule, wrong in (
            ("arms must be among those allowed", (chosen >= n_arms) | ~mask[rows, chosen.clip(max=n_arms - 1)]),
            ("probabilities must be above 0 and at most 1", ~((given > 0) & (given <= 1))),
            ("contexts must be finite", ~np.isfinite(table).all(axis=1)),
            ("rewards must be finite, or NaN where none came", np.isinf(paid)),
        ):
            if wrong.any():
                raise MatchError(f"{rule}, and those of row {int(wrong.argmax())} are not")
        return cls(table, chosen.astype(np.int64), given, paid, mask, mask, never, rows, never)

    def __len__(self) -> int:
        return len(self.arms)

    @property
    def n_arms(self) -> int:
        """How many arms there have been."""
        return int(self.allowed.shape[1])


def read_log(path: AnyPath) -> Log:
    """The log that `Agent.log` wrote, also while it is written."""
    reader = LogReader(path)
    rows: list[Decided] = []
    # The rewards of decisions, and of updates by −1 less their row.
    paid: dict[int, float] = {}
    forgotten: set[int] = set()
    for event in reader:
        if isinstance(event, Decided):
            rows.append(event)
        elif isinstance(event, Rewarded):
            paid[event.decision] = event.reward
        elif isinstance(event, Forgotten):
            forgotten.add(event.decision)
        elif isinstance(event, Updated):
            for context, arm, reward in zip(event.contexts, event.arms, event.rewards, strict=True):
                paid[-1 - len(rows)] = reward
                rows.append(Decided(-1 - len(rows), context, arm, np.nan, (), (), False))
    reader.warn_of_rest("is left out")
    n, n_arms = len(rows), reader.standing.n_arms
    allowed, possible = np.zeros((n, n_arms), bool), np.zeros((n, n_arms), bool)
    for number, row in enumerate(rows):
        allowed[number, list(row.arms)] = True
        possible[number, [arm for arm, share in zip(row.arms, row.probabilities, strict=True) if share > 0]] = True
    return Log(
        contexts=np.array([row.context for row in rows], np.float32).reshape(n, reader.header.n_features),
        arms=np.array([row.arm for row in rows], np.int64),
        probabilities=np.array([row.probability for row in rows], np.float64),
        rewards=np.array([paid.get(row.decision, np.nan) for row in rows], np.float64),
        allowed=allowed,
        possible=possible,
        tried=np.array([row.tried for row in rows], bool),
        ids=np.array([max(row.decision, -1) for row in rows], np.int64),
        forgotten=np.array([row.decision in forgotten for row in rows], bool),
        id=reader.header.id,
    )
