"""The server of `bayesadam play`, for this machine only: the page, what it may request, the bands as they train."""

import json
import threading
import time
import webbrowser
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

import torch

from bayesadam.data.toy import Interval, toy_points
from bayesadam.errors import BayesAdamError, SettingError
from bayesadam.play import learners
from bayesadam.play.learners import GaussianProcess, Learner, Request

HOST = "127.0.0.1"
X_INTERVAL, Y_INTERVAL = (-3.0, 3.0), (-2.0, 2.0)
GRID = torch.linspace(*X_INTERVAL, 201)
UNITS = ("tanh", "relu")
MOST_POINTS = 200
# How long Badam trains before it first answers, and how long a learner trains at a time.
FIRST_SECONDS, TURN_SECONDS = 0.06, 0.3
_ASSETS = {"/": "text/html", "/play.js": "text/javascript", "/play.css": "text/css", "/icon.svg": "image/svg+xml"}
Message = dict[str, Any]


@dataclass(frozen=True)
class Slider:
    """One slider: its key in a request, the page's name for it, its range, both ends included, and where it starts."""

    name: str
    label: str
    low: float
    high: float
    default: float
    logarithmic: bool
    whole: bool
    about: str


_BOTH = "Badam at once; BBB, Vadam retrain"
SLIDERS = (
    Slider("n_data", "N", 1, 10_000, 40, True, True, f"data counted: {_BOTH}"),
    Slider("prior_precision", "δ", 0.01, 1000, 5, True, False, f"prior precision: {_BOTH}"),
    Slider("noise", "σ", 0.02, 0.5, 0.1, True, False, "noise of an observation, known to all methods"),
    Slider("dropout", "dropout", 0.01, 0.6, 0.1, False, False, "share of units switched off: MC dropout retrains"),
    Slider("width", "width", 5, 100, 50, False, True, "units in each of two layers: every network restarts"),
)


def parse(body: bytes) -> Request:
    """A request out of the bytes of a POST; sliders that are not named stand at their defaults.

    >>> parse(b'{"page": "a", "points": [[0, 1]], "width": 20}').width
    20
    """
    found = json.loads(body)
    points = tuple((float(x), float(y)) for x, y in found["points"])
    values = {slider.name: float(found.get(slider.name, slider.default)) for slider in SLIDERS}
    for slider in SLIDERS:
        if not slider.low <= values[slider.name] <= slider.high:
            raise ValueError(f"{slider.name} must be from {slider.low:g} to {slider.high:g}")
    if len(points) > MOST_POINTS:
        raise ValueError(f"at most {MOST_POINTS} points, got {len(points)}: remove some, or clear the plane")
    width, units, restart = int(values.pop("width")), str(found.get("units", UNITS[0])), bool(found.get("restart"))
    return Request(str(found["page"]), points, width=width, units=units, restart=restart, **values)


def examples() -> dict[str, list[tuple[float, float]]]:
    """Named sets of points: the paper's toy problem, the same with a hole, a cubic, and a handful.

    >>> {name: len(points) for name, points in examples().items()}
    {'paper': 40, 'gap': 40, 'cubic': 20, 'few': 5}
    """

    def pairs(x: torch.Tensor, y: torch.Tensor) -> list[tuple[float, float]]:
        across, up = x.flatten().clamp(*X_INTERVAL), y.flatten().clamp(*Y_INTERVAL)
        return [(round(a, 3), round(b, 3)) for a, b in zip(across.tolist(), up.tolist(), strict=True)]

    def toy(*intervals: Interval) -> list[tuple[float, float]]:
        found = toy_points(40, generator=torch.Generator().manual_seed(0), intervals=intervals)
        # The plane of the paper's toy problem, stretched onto the page's.
        return pairs((found.x - 0.35) * 3.0 / 0.85, (found.y - 0.4) * 1.5)

    x = torch.linspace(-2, 2, 20)
    cubic = 0.2 * x**3 + 0.1 * torch.randn(20, generator=torch.Generator().manual_seed(0))
    few = [(-1.5, -0.6), (-0.7, 0.5), (0.1, 0.2), (0.8, -0.5), (1.6, 0.8)]
    return {"paper": toy((0.0, 0.5)), "gap": toy((-0.3, 0.1), (0.6, 1.0)), "cubic": pairs(x, cubic), "few": few}


def describe() -> dict[str, Any]:
    """What a page must know to build itself."""
    panels = [{"method": p.method, "title": p.title, "exact": p.learner is GaussianProcess} for p in learners.PANELS]
    plane: Any = {"x": X_INTERVAL, "y": Y_INTERVAL, "grid": len(GRID), "most_points": MOST_POINTS, "units": UNITS}
    return {**plane, "sliders": [asdict(s) for s in SLIDERS], "panels": panels, "examples": examples()}


class Session:
    """The learners of one page; one request at a time, the newest.

    `turns` is held by the learner that trains now, of all pages: small networks gain nothing from running in parallel.
    """

    def __init__(self, turns: threading.Lock) -> None:
        self._turns, self._mine = turns, threading.Lock()
        self._current = threading.Event()
        self._learners: list[Learner] = [panel.learner(panel) for panel in learners.PANELS]

    def answer(self, request: Request) -> Generator[Message, None, None]:
        """Bands, one message a learner and turn, then how it ended: `"done"`, or `"superseded"` by a newer request."""
        began, stop = time.perf_counter(), threading.Event()
        older, self._current = self._current, stop
        older.set()
        with self._mine:
            if request.points:
                yield from self._messages(request, stop)
            ended = "superseded" if stop.is_set() else "done"
            yield {"type": ended, "seconds": round(time.perf_counter() - began, 3)}

    def cancel(self) -> None:
        """End the request under way."""
        self._current.set()

    def _messages(self, request: Request, stop: threading.Event) -> Iterator[Message]:
        """Badam at once, then all in turns."""
        new: Request | None = request
        spent, pending = dict.fromkeys(self._learners, 0.0), list(self._learners)
        while pending:
            for learner in list(pending):
                limit = FIRST_SECONDS if new and learner is self._learners[0] else TURN_SECONDS
                with self._turns:
                    began = time.perf_counter()
                    message = _turn(learner, new, began + limit, stop)
                    spent[learner] += time.perf_counter() - began
                if stop.is_set():
                    return
                failed = message["type"] == "failed"
                if failed:
                    self._learners[self._learners.index(learner)] = learner.panel.learner(learner.panel)
                if failed or not learner.left:
                    pending.remove(learner)
                yield message | {"seconds": round(spent[learner], 3)}
            new = None


def _turn(learner: Learner, new: Request | None, deadline: float, stop: threading.Event) -> Message:
    """Take up a new request, train until the deadline, and report the bands."""
    try:
        if new is not None:
            learner.accept(new)
        while learner.left:
            learner.step()
            if time.perf_counter() >= deadline or stop.is_set():
                break
        bands = learner.bands(GRID)
        if not bands.finite:
            raise ArithmeticError("its numbers are no longer finite: move the sliders, or restart the training")
    except (BayesAdamError, ArithmeticError, RuntimeError) as error:
        return {"type": "failed", "method": learner.panel.method, "error": f"{error!s:.200}"}
    curves = {name: [round(value, 4) for value in getattr(bands, name).tolist()] for name in ("mean", "std")}
    return {"type": "bands", "method": learner.panel.method, "steps": learner.taken, "left": learner.left, **curves}


class Server(ThreadingHTTPServer):
    """Listens on 127.0.0.1, port 0 being any free one; a thread a connection, and a session a page."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self._turns, self._lock = threading.Lock(), threading.Lock()
        self._sessions: dict[str, Session] = {}
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            why = f"{HOST}:{port} ({error.strerror or error})"
            raise SettingError(f"cannot listen on {why}: pass another --port, or --port 0 for any free one") from None
        self.port = int(self.server_address[1])
        self.url = f"http://{HOST}:{self.port}/"

    def session(self, page: str) -> Session:
        """The page's session, made if need be."""
        with self._lock:
            return self._sessions.setdefault(page, Session(self._turns))

    def cancel(self) -> None:
        """End every request under way."""
        for session in list(self._sessions.values()):
            session.cancel()


class _Handler(BaseHTTPRequestHandler):
    """One request a connection."""

    server: Server

    def do_GET(self) -> None:
        """The page, its parts, and what it must know."""
        path = self.path.partition("?")[0]
        if not self._from_the_page():
            self._send(HTTPStatus.FORBIDDEN, "application/json", b"{}")
        elif path == "/config":
            self._send(HTTPStatus.OK, "application/json", json.dumps(describe()).encode())
        elif path in _ASSETS:
            body = (files("bayesadam.play") / (path[1:] or "page.html")).read_bytes()
            self._send(HTTPStatus.OK, f"{_ASSETS[path]}; charset=utf-8", body)
        else:
            self._send(HTTPStatus.NOT_FOUND, "application/json", b"{}")

    def do_POST(self) -> None:
        """Bands for a set of points: lines of JSON as they are ready; a page that hangs up ends the training."""
        if not self._from_the_page():
            self._send(HTTPStatus.FORBIDDEN, "application/json", b"{}")
            return
        try:
            request = parse(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        except (ValueError, TypeError, KeyError) as error:
            self._send(HTTPStatus.BAD_REQUEST, "application/json", json.dumps({"error": str(error)}).encode())
            return
        self._send(HTTPStatus.OK, "application/x-ndjson", None)
        with closing(self.server.session(request.page).answer(request)) as messages:
            for message in messages:
                try:
                    self.wfile.write(json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n")
                except ConnectionError:
                    return

    def _from_the_page(self) -> bool:
        """Whether this page asks: a name made to point at 127.0.0.1, or another site's script, is refused."""
        own = {f"{name}:{self.server.port}" for name in (HOST, "localhost")}
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in own and (origin is None or origin.removeprefix("http://") in own)

    def _send(self, status: HTTPStatus, kind: str, body: bytes | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        if body is not None:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the user's."""


def run_play(*, port: int, open_browser: bool, quiet: bool) -> None:
    """The `play` command: serve until Ctrl-C; `quiet` prints the address alone."""
    # Networks this small lose by being spread over cores.
    torch.set_num_threads(1)
    with Server(port) as server:
        print(server.url if quiet else f"Playing at {server.url}  (Ctrl-C ends it)", flush=True)
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            if not quiet:
                print("\nStopped.", flush=True)
        finally:
            server.cancel()
