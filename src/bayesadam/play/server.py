"""The server behind `bayesadam play`: this machine only, a bounded number of requests, and no answer but a clean one."""

from __future__ import annotations

import json
import os
import select
import socket
import socketserver
import sys
import threading
import time
import webbrowser
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

import torch

from bayesadam._version import __version__
from bayesadam.errors import SettingError
from bayesadam.play import learners
from bayesadam.play.request import MOST_BYTES, Request, RequestError, describe, examples, parse
from bayesadam.play.session import Sessions

HOST = "127.0.0.1"
# Connections open at a time, trainings under way or waiting; seconds for a whole request to arrive, for one write, and for
# more of a request that was refused.
MOST_CONNECTIONS = 32
MOST_STREAMS = 8
READ_SECONDS = 5.0
WRITE_SECONDS = 10.0
DRAIN_SECONDS = 0.2

_ASSETS: Mapping[str, tuple[str, str]] = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/play.js": ("play.js", "text/javascript; charset=utf-8"),
    "/play.css": ("play.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}
_DRAINED_BLOCKS = 16
_FULL = b'{"error": "too many connections at once: try again in a second"}\n'


class _Refused(Exception):
    """A request that gets an error of HTTP and one line of JSON."""

    def __init__(self, status: HTTPStatus, error: str, **headers: str) -> None:
        super().__init__(error)
        self.status, self.headers = status, headers


class Server(ThreadingHTTPServer):
    """Listens on 127.0.0.1, port 0 being any free one; a thread a connection, up to a number, and none that dawdles."""

    daemon_threads = True
    # On Windows the option would let two programs listen at one port.
    allow_reuse_address = os.name != "nt"
    request_queue_size = 64

    def __init__(self, port: int = 0) -> None:
        self.sessions = Sessions()
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._arriving: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise SettingError(
                f"cannot listen on {HOST}:{port} ({error.strerror or error}): pass another --port, or --port 0 for any "
                "free one"
            ) from None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.port}/"

    def server_bind(self) -> None:
        """Bind without asking any name server who we are, as the standard library's would."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, if there is a place; one line and the door otherwise."""
        if not self._places.acquire(blocking=False):
            _turn_away(request)
            self.shutdown_request(request)
            return
        with self._lock:
            self._arriving[request] = time.monotonic() + READ_SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread's work; the place is free again afterwards, whatever happened."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.arrived(request)
            self._places.release()

    def arrived(self, request: socket.socket) -> None:
        """The whole request has been read: it is no longer dawdling."""
        with self._lock:
            self._arriving.pop(request, None)

    def service_actions(self) -> None:
        """Twice a second: hang up on requests that have not arrived in time, however slowly they drip."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, deadline in self._arriving.items() if deadline < now]
            for request in late:
                del self._arriving[request]
        for request in late:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RD)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is the browser's affair; anything else is a bug, told here and not to the page."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request. Everything is checked before anything is done."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = f"bayesadam/{__version__}"
    sys_version = ""
    timeout = READ_SECONDS
    # Streamed lines must leave at once: the page draws them as they come.
    disable_nagle_algorithm = True

    def parse_request(self) -> bool:
        """As the standard library does, but one request a connection: an idle one would hold a thread."""
        good = super().parse_request()
        self.close_connection = True
        return good

    def do_GET(self) -> None:
        """Whose request it is, then the work; what goes wrong becomes a status and one line of JSON."""
        try:
            self._check_origin()
            if self.command != "POST":
                self.server.arrived(self.connection)
            allowed = "POST" if self._path == "/bands" else "GET, HEAD"
            if self._path not in (*_ASSETS, "/config", "/bands"):
                raise _Refused(HTTPStatus.NOT_FOUND, f"nothing at {self._path!r:.60}; the page is at /")
            if self.command not in allowed.split(", "):
                said = f"{self.command} is not for {self._path:.60}, {allowed} is"
                raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, said, Allow=allowed)
            if self._path == "/bands":
                self._bands()
            elif self._path == "/config":
                panels = [panel.describe() for panel in learners.PANELS]
                told = {**describe(), "panels": panels, "examples": examples(), "version": __version__}
                self._send_json(HTTPStatus.OK, told)
            else:
                name, kind = _ASSETS[self._path]
                self._send(HTTPStatus.OK, kind, (files("bayesadam.play") / name).read_bytes())
        except _Refused as refused:
            self._send_json(refused.status, {"error": str(refused)}, refused.headers)
            self._drain()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_GET

    def _bands(self) -> None:
        """Bands for a set of points, line by line as they are ready."""
        request = self._request()
        if not self.server.streams.acquire(blocking=False):
            busy = f"{MOST_STREAMS} trainings are under way: try again in a second"
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, busy, **{"Retry-After": "1"})
        try:
            self._stream(self.server.sessions.of(request.page).answer(request, self._hung_up))
        finally:
            self.server.streams.release()

    def _request(self) -> Request:
        if self.headers.get_content_type() != "application/json":
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send Content-Type: application/json")
        if "Transfer-Encoding" in self.headers:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length, not a Transfer-Encoding")
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        if len(lengths) != 1 or not (lengths[0].isascii() and lengths[0].isdigit() and len(lengths[0]) < 16):
            raise _Refused(HTTPStatus.BAD_REQUEST, "Content-Length must be one whole number")
        if int(lengths[0]) > MOST_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request is at most {MOST_BYTES} bytes")
        try:
            body = self.rfile.read(int(lengths[0]))
        except TimeoutError:
            body = b""
        if len(body) < int(lengths[0]):
            raise _Refused(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {READ_SECONDS:g} seconds")
        self.server.arrived(self.connection)
        try:
            return parse(body)
        except RequestError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(error)) from None

    def _drain(self) -> None:
        """Read a little of what was not wanted: closing on unread bytes would take the answer away from the sender."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(DRAIN_SECONDS)
            for _ in range(_DRAINED_BLOCKS):
                if not self.connection.recv(65536):
                    return

    def _check_origin(self) -> None:
        """Only this page: a name that was made to point at 127.0.0.1, or another site's script, is turned away."""
        own = {f"{name}:{self.server.port}" for name in (HOST, "localhost")}
        if self.headers.get_all("Host", []) not in [[name] for name in own]:
            raise _Refused(HTTPStatus.MISDIRECTED_REQUEST, f"this server answers to {self.server.url} only")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{name}" for name in own}:
            raise _Refused(HTTPStatus.FORBIDDEN, f"requests come from {self.server.url} only, not from other pages")

    def _stream(self, messages: Generator[Mapping[str, Any], None, None]) -> None:
        """Newline-delimited JSON, one chunk a message; a page that hung up ends the training with a broken pipe."""
        self._send_head(HTTPStatus.OK, "application/x-ndjson", {"Transfer-Encoding": "chunked"})
        with closing(messages):
            for message in messages:
                line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    def _send_json(self, status: HTTPStatus, found: Mapping[str, Any], headers: Mapping[str, str] = {}) -> None:
        self._send(status, "application/json", json.dumps(found).encode() + b"\n", headers)

    def _send(self, status: HTTPStatus, kind: str, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self._send_head(status, kind, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: HTTPStatus, kind: str, headers: Mapping[str, str]) -> None:
        self.connection.settimeout(WRITE_SECONDS)
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses itself (bad request lines, unknown methods), as JSON too."""
        self.close_connection = True
        status = HTTPStatus(code)
        # A request line that could not be read has set none of these.
        self.command = getattr(self, "command", None) or ""
        self.request_version = "HTTP/1.1"
        self._send_json(status, {"error": f"{status.phrase}: {message or explain or ''!s:.120}"})

    def _hung_up(self) -> bool:
        """Whether the other end has closed: there is something to read, and it is nothing."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0]

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the user's."""


def _turn_away(request: socket.socket) -> None:
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Length: {len(_FULL)}\r\nRetry-After: 1\r\n"
    kind = "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    with suppress(OSError):
        request.setblocking(False)
        request.send((head + kind).encode() + _FULL)


def _warm_up() -> None:
    """One tiny answer: what torch imports at its first step, and libraries choose, is then not in the first click's time."""
    request = parse(b'{"page": "warm", "points": [[0, 0], [1, 1]], "width": 5}')
    for message in Sessions().of("warm").answer(request, gone=bool):
        if message["type"] == "bands" and message["method"] == learners.PANELS[-1].method:
            return


def run_play(*, port: int, open_browser: bool, quiet: bool) -> None:
    """The `play` command: serve until Ctrl-C; `quiet` prints the address alone."""
    # Networks this small lose by being spread over cores.
    torch.set_num_threads(1)
    with Server(port) as server:
        _warm_up()
        print(server.url if quiet else f"Playing at {server.url}  (Ctrl-C ends it)", flush=True)
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            if not quiet:
                print("\nStopped.", flush=True)
        finally:
            server.sessions.cancel()
