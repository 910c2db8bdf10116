"""A server of the page while a test runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bayesadam.play import server as module
from bayesadam.play.server import Server
from processes import PATIENCE


@contextmanager
def serving() -> Iterator[Server]:
    """A server that answers, in a thread of its own, until the block ends; it does not hang up on a busy machine."""
    with pytest.MonkeyPatch.context() as patched, Server() as server:
        for limit in ("READ_SECONDS", "WRITE_SECONDS", "DRAIN_SECONDS"):
            patched.setattr(module, limit, PATIENCE)
        patched.setattr(module._Handler, "timeout", PATIENCE)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.sessions.cancel()
            server.shutdown()
            thread.join(PATIENCE)
