"""The log of an agent: one JSON object a line, each appended by one write, so that a kill loses no line.

The first line says whose log it is. The others are events, dictionaries here as there:

    {"event": "decision", "context": [...], "decision": id, "arm": 0, "probability": 0.5,
     "arms": [0, 1], "probabilities": [0.5, 0.5], "tried": false}       tried: it was the arm's turn at first
    {"event": "reward", "decision": id, "reward": 1.0}
    {"event": "forget", "decision": id}
    {"event": "update", "contexts": [[...]], "arms": [0], "rewards": [1.0]}     without a decision
    {"event": "arm", "arm": 2, "change": "added"}                               or removed, or restored
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import secrets
import weakref
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bayesadam import _storage as storage
from bayesadam._warnings import warn
from bayesadam.errors import FileError, MatchError, MissingFileError

try:
    import fcntl
except ImportError:
    # On Windows.
    fcntl = None  # type: ignore[assignment]

AnyPath = str | os.PathLike[str]
Event = dict[str, Any]
_MARKED = 4096
# Of the first line, whose `event` it is.
_KIND = storage.Kind("bayesadam.bandits", "a log of decisions", ": give the file that Agent.log wrote")


@cache
def _list(n: int, digits: int) -> str:
    """What formats n numbers as a list; nine digits are exact of float32, seventeen of float64."""
    return f"[{','.join([f'%.{digits}g'] * n)}]"


@dataclass(frozen=True)
class Decision:
    """A chosen arm, with its probability in this context; its reward is reported by the `id`."""

    id: int
    arm: int
    probability: float


def decision_line(made: Decision, context: Any, arms: list[int], shares: list[float], tried: bool) -> str:
    """Of a decision among these arms with these probabilities; there are many, and they are formatted by hand."""
    features = np.asarray(context, np.float32).tolist()
    return (
        f'{{"event":"decision","context":{_list(len(features), 9) % tuple(features)},"decision":{made.id},'
        f'"arm":{made.arm},"probability":{made.probability},"arms":{arms},'
        f'"probabilities":{_list(len(shares), 17) % tuple(shares)},"tried":{"true" if tried else "false"}}}\n'
    )


def line(event: Event) -> str:
    """Of any other event."""
    if event["event"] == "reward":
        return f'{{"event":"reward","decision":{event["decision"]},"reward":{event["reward"]}}}\n'
    return f"{json.dumps(event, separators=(',', ':'), allow_nan=False)}\n"


class Standing:
    """The decisions that wait and the arms there are, after some events of an agent or of a log."""

    def __init__(self, n_features: int, n_arms: int) -> None:
        self.n_features, self.n_arms, self.next_id = n_features, n_arms, 0
        self.removed: set[int] = set()
        # How often each arm was tried in turn at first.
        self.pulls = [0] * n_arms
        # Context and arm of the decisions that wait for a reward, by id.
        self.waiting: dict[int, tuple[Any, int]] = {}

    def decided(self, made: Decision, context: Any, tried: bool) -> None:
        """The next decision."""
        self.next_id = made.id + 1
        self.waiting[made.id] = context, made.arm
        self.pulls[made.arm] += tried

    def take(self, event: Event) -> tuple[Any, Any, Any] | None:
        """The next event; contexts, arms and rewards where there is something to learn from it.

        Raise a `ValueError`, `LookupError`, `TypeError` or `AttributeError` where it does not fit those before.
        """
        contexts, arms, numbers, lesson = list[Any](), list[int](), list[float](), None
        match event:
            case {"event": "decision", "decision": decision, "arm": arm, "arms": arms, "probabilities": numbers}:
                contexts, made = [event["context"]], Decision(decision, arm, event["probability"])
                possible = 0 < made.probability <= 1 + 1e-9 and len(arms) == len(numbers)
                if decision < self.next_id or arm not in arms or not possible:
                    raise ValueError(f"decision {decision} is out of order, or its arm impossible")
                self.decided(made, event["context"], event["tried"])
            case {"event": "reward", "decision": decision, "reward": reward} if decision in self.waiting:
                context, arm = self.waiting.pop(decision)
                numbers, lesson = [reward], ([context], [arm], [reward])
            case {"event": "forget", "decision": decision} if decision in self.waiting:
                del self.waiting[decision]
            case {"event": "update", "contexts": contexts, "arms": arms, "rewards": numbers}:
                lesson = contexts, arms, numbers
                if not len(contexts) == len(arms) == len(numbers):
                    raise ValueError("as many contexts, arms and rewards must be there")
            case {"event": "arm", "change": change, "arm": arm}:
                if arm not in {"added": [self.n_arms], "removed": self.arms(), "restored": self.removed}[change]:
                    raise ValueError(f"arm {arm} cannot be {change} here")
                if change == "added":
                    self.n_arms, self.pulls = self.n_arms + 1, [*self.pulls, 0]
                self.removed = self.removed | {arm} if change == "removed" else self.removed - {arm}
            case _:
                raise ValueError("no event that can be here")
        if any(len(context) != self.n_features for context in contexts):
            raise ValueError(f"a context must have {self.n_features} numbers")
        if not all(map(math.isfinite, itertools.chain(numbers, *contexts))):
            raise ValueError("contexts, rewards and probabilities must be finite numbers")
        if not set(arms) <= set(range(self.n_arms)):
            raise ValueError(f"there are {self.n_arms} arms here, not all of {arms}")
        return lesson

    def copy(self) -> Standing:
        """The same, in memory of its own."""
        other = copy.copy(self)
        other.pulls, other.waiting = list(self.pulls), dict(self.waiting)
        return other

    def arms(self) -> list[int]:
        """Those to choose from."""
        return [arm for arm in range(self.n_arms) if arm not in self.removed]

    def lines(self) -> list[str]:
        """How a new log comes to where this is. What the probabilities of its decisions were is not known."""
        lines = [line({"event": "arm", "arm": arm, "change": "removed"}) for arm in sorted(self.removed)]
        for number, (context, arm) in self.waiting.items():
            lines.append(decision_line(Decision(number, arm, 1.0), context, [arm], [1.0], True))
        return lines


@dataclass(frozen=True)
class Position:
    """A place in a log: its id, the byte after a line, and the checksum of those before, None of release 0.3.

    Without a byte, the agent went on without its log.
    """

    id: str
    end: int = 0
    mark: int | None = None


class LogReader:
    """A log as it is now: its header, and the standing at its end. Iterated over, it reads the events, one at a time.

    With a position in it, and the standing there, these are the events after that, and what is before is not read. A
    half-written line after the byte `end` is left out, with a warning. Other damage is an error that names the line.
    """

    def __init__(self, path: AnyPath, since: Position | None = None, standing: Standing | None = None) -> None:
        if not Path(path).is_file():
            raise MissingFileError(f"no file at {path}")
        self.path = path
        with Path(path).open("rb") as file:
            first = file.readline()
            try:
                self.header = json.loads(first)
                if self.header["event"] != _KIND.header or not first.endswith(b"\n"):
                    raise ValueError
                storage.check_version(path, self.header.get("format"), _KIND)
                self.id = self.header["id"]
                self.standing = Standing(self.header["n_features"], self.header["n_arms"])
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise FileError(f"{path} is not {_KIND.what}{_KIND.remedy}") from error
            self._first = self.end = len(first)
            if since is not None and standing is not None and since.id == self.id:
                cut = os.fstat(file.fileno()).st_size < since.end
                if not since.end or cut or since.mark not in (None, mark(path, since.end)):
                    reason = "has lost lines that the agent knows of" if since.end else "lacks what the agent did since"
                    raise MatchError(f"{path} {reason}: give a new file, or make an agent by replay")
                self._first = self.end = since.end
                self.standing = standing.copy()
            for line in _lines(file, self.end):
                if not line.endswith(b"\n"):
                    warn(f"the last line of {path}, {len(line)} bytes, was only half written and is left out")
                    break
                try:
                    self.standing.take(json.loads(line))
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    number = 1 + sum(1 for _ in _lines(file, 0, self.end))
                    raise FileError(f"{path} is damaged in line {number} ({error!r}): mend or remove it") from None
                self.end += len(line)

    def __iter__(self) -> Iterator[Event]:
        with Path(self.path).open("rb") as file:
            yield from map(json.loads, _lines(file, self._first, self.end))

    def position(self) -> Position:
        """Its end."""
        return Position(self.id, self.end, mark(self.path, self.end))


def mark(file: AnyPath | int, end: int) -> int:
    """The checksum of the bytes before one, of a path or a descriptor; many enough to tell a log from another."""
    with open(file, "rb", buffering=0, closefd=not isinstance(file, int)) as raw:
        raw.seek(max(0, end - _MARKED))
        return zlib.crc32(raw.read(min(end, _MARKED)))


def _lines(file: BinaryIO, start: int, end: float = math.inf) -> Iterator[bytes]:
    """Those from one byte of a file to another."""
    file.seek(start)
    while start < end and (line := file.readline()):
        start += len(line)
        yield line


class LogWriter:
    """A log that is written: open, and locked against other writers.

    `before` is what it had after a position in it, with the standing there; None for a new one.
    """

    def __init__(
        self, path: AnyPath, about: Mapping[str, Any], *, sync: bool, since: Position | None, standing: Standing
    ) -> None:
        self.path, self._sync, self._process, self.end = path, sync, os.getpid(), 0
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise FileError(f"cannot log to {path}: {error.strerror}") from error
        self.close = weakref.finalize(self, os.close, self._descriptor)
        try:
            _lock(self._descriptor, path)
            self.before = LogReader(path, since, standing) if os.fstat(self._descriptor).st_size else None
            if self.before is None:
                self.id = secrets.token_hex(8)
                self.write(line({"event": _KIND.header, "format": storage.FORMAT_VERSION, **about, "id": self.id}))
            else:
                self.id, self.end = self.before.id, self.before.end
                os.ftruncate(self._descriptor, self.end)
        except BaseException:
            self.close()
            raise

    def position(self) -> Position:
        """The end."""
        return Position(self.id, self.end, mark(self._descriptor, self.end))

    def write(self, lines: str) -> None:
        """Append lines, by one write, whole or not at all."""
        if self._process != os.getpid():
            raise FileError(f"{self.path} is another process's log: attach one in this process, {os.getpid()}")
        text = lines.encode()
        try:
            written = os.write(self._descriptor, text)
            if written < len(text):
                os.ftruncate(self._descriptor, self.end)
                raise OSError(0, f"only {written} of {len(text)} bytes could be written")
            if self._sync:
                os.fsync(self._descriptor)
        except OSError as error:
            raise FileError(f"cannot log to {self.path}: {error.strerror}; agent.log(None) goes on without") from error
        self.end += len(text)


def _lock(descriptor: int, path: AnyPath) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError(f"{path} is written by another agent or process: give each a log of its own") from None


@dataclass(frozen=True, eq=False)
class Log:
    """A log as arrays, one row for every decision and every `update`, in their order; see `Log.of`, too.

    Attributes:
        contexts: (n, features).
        arms: those chosen, (n,).
        probabilities: with which they were chosen, (n,); NaN for an `update`.
        rewards: (n,); NaN where none came.
        allowed: the arms that could be chosen from, (n, arms).
        tried: where an arm was tried in turn, whatever the context, (n,).
        ids: of the decisions, (n,); −1 for an `update`.
        shares: the probabilities of all arms, (n, arms); all 0 in the rows of which only the chosen arm's is known.
        id: of an agent's log.
    """

    contexts: npt.NDArray[np.float32]
    arms: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    rewards: npt.NDArray[np.float64]
    allowed: npt.NDArray[np.bool_]
    tried: npt.NDArray[np.bool_]
    ids: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]
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
        `probabilities` are those of the arms chosen, (n,), or of all arms, (n, arms).
        """
        chosen, given = np.asarray(arms), np.asarray(probabilities, np.float64)
        table, paid = np.asarray(contexts, np.float32), np.asarray(rewards, np.float64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise MatchError(f"arms must be (n,) whole numbers, got {chosen.dtype} of shape {chosen.shape}")
        n, rows, full = len(chosen), np.arange(len(chosen)), given.ndim == 2
        many = n_arms or (given.shape[1] if full else int(chosen.max(initial=0)) + 1)
        mask = np.ones((n, many), bool) if allowed is None else np.asarray(allowed, bool)
        shapes = table.shape[:1], mask.shape[:1], paid.shape, given.shape[:1]
        if set(shapes) != {(n,)} or table.ndim != 2 or mask.ndim != 2 or (full and given.shape != mask.shape):
            raise MatchError(f"contexts and allowed must have {n} rows, probabilities and rewards be ({n},)")
        inside = (chosen >= 0) & (chosen < mask.shape[1])
        place = rows, np.where(inside, chosen, 0)
        of_chosen, shares = (given[place], given) if full else (given, np.zeros(mask.shape))
        for rule, holds in (
            ("arms must be among those allowed", inside & mask[place]),
            ("probabilities must be above 0 and at most 1", (of_chosen > 0) & (of_chosen <= 1)),
            ("probabilities must sum to 1 over the arms allowed", np.abs((shares * mask).sum(axis=1) - full) < 1e-4),
            ("probabilities must be at least 0, and 0 where not allowed", (shares * mask == abs(shares)).all(axis=1)),
            ("contexts must be finite", np.isfinite(table).all(axis=1)),
            ("rewards must be finite, or NaN where none came", ~np.isinf(paid)),
        ):
            if not holds.all():
                raise MatchError(f"{rule}, and those of row {int(holds.argmin())} are not")
        return cls(table, chosen.astype(np.int64), of_chosen, paid, mask, np.zeros(n, bool), rows, shares)

    def __len__(self) -> int:
        return len(self.arms)

    @property
    def n_arms(self) -> int:
        """How many arms there have been."""
        return int(self.allowed.shape[1])

    @property
    def possible(self) -> npt.NDArray[np.bool_]:
        """The arms allowed that are not known to have had the probability 0, (n, arms)."""
        return self.allowed & ((self.shares > 0) | ~self.shares.any(axis=1, keepdims=True))


def read_log(path: AnyPath) -> Log:
    """The log that `Agent.log` wrote, also while it is written."""
    reader = LogReader(path)
    rows: list[Event] = []
    # The rewards of decisions, by id.
    paid: dict[int, float] = {}
    for event in reader:
        if event["event"] == "decision":
            rows.append(event)
        elif event["event"] == "reward":
            paid[event["decision"]] = event["reward"]
        elif event["event"] == "update":
            unknown = {"decision": -1, "probability": np.nan, "arms": [], "probabilities": [], "tried": False}
            for context, arm, reward in zip(event["contexts"], event["arms"], event["rewards"], strict=True):
                rows.append({**unknown, "context": context, "arm": arm, "reward": reward})
    n, standing = len(rows), reader.standing
    shares, allowed = np.zeros((n, standing.n_arms)), np.zeros((n, standing.n_arms), bool)
    for number, row in enumerate(rows):
        shares[number, row["arms"]], allowed[number, row["arms"]] = row["probabilities"], True
    return Log(
        contexts=np.array([row["context"] for row in rows], np.float32).reshape(n, standing.n_features),
        arms=np.array([row["arm"] for row in rows], np.int64),
        probabilities=np.array([row["probability"] for row in rows], np.float64),
        rewards=np.array([row.get("reward", paid.get(row["decision"], np.nan)) for row in rows], np.float64),
        allowed=allowed,
        tried=np.array([row["tried"] for row in rows], bool),
        ids=np.array([row["decision"] for row in rows], np.int64),
        shares=shares,
        id=reader.id,
    )
