"""A server of the page while a test runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bayesadam.play.server import Server
from processes import PATIENCE


@contextmanager
def serving() -> Iterator[Server]:
    """A server that answers, in a thread of its own, until the block ends."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.cancel()
            server.shutdown()
            thread.join(PATIENCE)
