"""One page's learners, and the order in which they answer: Badam at once, the process, then all in turns."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from bayesadam.errors import BayesAdamError
from bayesadam.play import learners
from bayesadam.play.learners import Learner
from bayesadam.play.request import N_GRID, X_INTERVAL, Request

GRID = torch.linspace(*X_INTERVAL, N_GRID)
# How long Badam trains before it first answers; how long a learner trains at a time, at first and after some turns.
FIRST_SECONDS = 0.06
TURN_SECONDS = (0.15, 0.45)
MOST_SESSIONS = 8

Message = dict[str, Any]


class Session:
    """The learners of one page; one request at a time, the newest: it waits until the older has let go.

    `turns` is held by who trains now, of all pages: networks this small gain nothing from training side by side.
    """

    def __init__(self, turns: threading.Lock) -> None:
        self._turns = turns
        self._mine = threading.Lock()
        self._newest = threading.Lock()
        self._current = threading.Event()
        self._learners: tuple[Learner, ...] = tuple(panel.learner(panel) for panel in learners.PANELS)

    def answer(self, request: Request, gone: Callable[[], bool]) -> Generator[Message, None, None]:
        """Bands, one message a learner and turn, then how it ended: `"done"`, or `"superseded"` by a newer request.

        Between steps, `gone` says whether the page has hung up.
        """
        began = time.perf_counter()
        stop = threading.Event()
        with self._newest:
            older, self._current = self._current, stop
        older.set()
        with self._mine:
            if not request.points:
                yield {"type": "done", "seconds": 0.0}
                return
            for message in self._messages(request, lambda: stop.is_set() or gone()):
                yield message
                if stop.is_set():
                    break
            ended = "superseded" if stop.is_set() else "done"
            yield {"type": ended, "seconds": round(time.perf_counter() - began, 3)}

    def cancel(self) -> None:
        """End the request under way."""
        self._current.set()

    def _messages(self, request: Request, stopped: Callable[[], bool]) -> Iterator[Message]:
        spent = dict.fromkeys((learner.panel.method for learner in self._learners), 0.0)
        pending = list(self._learners)
        first, seconds = True, TURN_SECONDS[0]
        while pending and not stopped():
            for learner in list(pending):
                limit = FIRST_SECONDS if first and learner is self._learners[0] else seconds
                with self._turns:
                    began = time.perf_counter()
                    message = _turn(learner, request if first else None, began + limit, stopped)
                    spent[learner.panel.method] += time.perf_counter() - began
                if message is None:
                    return
                if message["type"] == "failed":
                    self._learners = tuple(
                        own.panel.learner(own.panel) if own is learner else own for own in self._learners
                    )
                if not learner.left or message["type"] == "failed":
                    pending.remove(learner)
                yield message | {"seconds": round(spent[learner.panel.method], 3)}
            first, seconds = False, min(1.5 * seconds, TURN_SECONDS[1])


class Sessions:
    """The pages that were seen last; an older one that comes back restarts."""

    def __init__(self) -> None:
        self._turns = threading.Lock()
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def of(self, page: str) -> Session:
        """The page's session, made if need be."""
        with self._lock:
            session = self._sessions.pop(page, None) or Session(self._turns)
            self._sessions[page] = session
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)[1].cancel()
            return session

    def cancel(self) -> None:
        """End every request under way."""
        with self._lock:
            for session in self._sessions.values():
                session.cancel()


def _turn(learner: Learner, request: Request | None, deadline: float, stopped: Callable[[], bool]) -> Message | None:
    """Take up the request, where it is new, train until the deadline, and say what came of it; nothing if stopped."""
    failed = {"type": "failed", "method": learner.panel.method}
    try:
        if request is not None:
            learner.accept(request)
        while learner.left:
            learner.step()
            if time.perf_counter() >= deadline or stopped():
                break
        if stopped():
            return None
        bands = learner.bands(GRID)
    except (BayesAdamError, ArithmeticError, RuntimeError) as error:
        return {**failed, "error": f"{error!s:.200}"}
    if not bands.finite:
        said = "its numbers are no longer finite: move the sliders from their ends, or restart the training"
        return {**failed, "error": said}
    curves = {name: [round(value, 4) for value in getattr(bands, name).tolist()] for name in ("mean", "std")}
    return {"type": "bands", "method": learner.panel.method, "steps": learner.taken, "left": learner.left, **curves}
