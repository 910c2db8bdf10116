"""The service refuses what it cannot answer, fast, and goes on after a disk that was full."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import bayesadam as ba

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("matplotlib")
JSON = {"host": "localhost:8000", "content-type": "application/json"}


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "serve.py"
    spec = importlib.util.spec_from_file_location("serve", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def service(serve: ModuleType, tmp_path: Path) -> Any:
    """Of a program whose mean is the sum of an example's numbers."""
    one = object.__new__(serve.Service)
    one.shape, one.type, one.about = (2, 3), torch.float32, {"model": "<script>alert(1)</script>"}
    one.program = lambda x: {"mean": x.sum(dim=(1, 2)).square()[:, None], "novelty": x.sum(dim=(1, 2))}
    one.monitor = ba.Monitor(reference=np.arange(50.0))
    one.answered, one.turn, one.state = 0, threading.Lock(), tmp_path / "monitor.safetensors"
    return one


async def ask(app: Any, path: str, body: bytes | None = None, headers: dict[str, str] = JSON) -> tuple[int, bytes]:
    """One request; a body is posted."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode()}
    scope |= {"scheme": "http", "query_string": b"", "http_version": "1.1", "server": ("127.0.0.1", 8000)}
    await app({**scope, "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def posted(app: Any, inputs: Any, **headers: str) -> tuple[int, Any]:
    status, body = asyncio.run(ask(app, "/predict", json.dumps({"inputs": inputs}).encode(), JSON | headers))
    return status, json.loads(body)


ONES = [[1.0] * 3] * 2


def test_answers_come_and_infinities_are_null_where_they_are(serve, service):
    status, found = posted(serve.application(service), [ONES, [[3e38] * 3] * 2, [[0, 1, 0], [0, 0, 0]]])
    assert status == 200
    assert found["mean"] == [[36.0], [None], [1.0]]
    assert found["novelty"] == [6.0, None, 1.0]
    assert found["drift"] is False


@pytest.mark.parametrize(
    ("inputs", "status"),
    [
        ([], 422),
        ([1.0], 422),
        ([[[1.0] * 3]], 422),
        ([[[1.0] * 2] * 2], 422),
        ([[["1"] * 3] * 2], 422),
        ([[[True] * 3] * 2], 422),
        ([[[None] * 3] * 2], 422),
        ([[[[1.0]] * 3] * 2], 422),
        ([[[1e39] * 3] * 2], 422),
        ([[[10**400] * 3] * 2], 422),
        ([[[float("nan")] * 3] * 2], 422),
        ([ONES] * 1025, 413),
        ({"a": 1}, 422),
    ],
)
def test_inputs_that_do_not_fit_are_refused(serve, service, inputs, status):
    told, found = posted(serve.application(service), inputs)
    assert (told, list(found)) == (status, ["error"])
    assert service.monitor.n == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 200_000, b'{"inputs": ' + b"[" * 90_000, b"\xff\xfe", b"[1]"])
def test_bodies_that_are_no_json_are_refused(serve, service, body):
    status, _ = asyncio.run(ask(serve.application(service), "/predict", body))
    assert status in (400, 413, 422)


def test_whole_numbers_stay_whole(serve, service):
    service.type = torch.int64
    service.program = lambda x: {"novelty": x.sum(dim=(1, 2)).double()}
    app = serve.application(service)
    assert posted(app, [[[1, 2, 3]] * 2])[1]["novelty"] == [12.0]
    assert posted(app, [[[1.5, 2, 3]] * 2])[0] == 422
    assert posted(app, [[[2**70, 2, 3]] * 2])[0] == 422


def test_a_large_body_of_nested_lists_does_not_hold_others_up(serve, service):
    bodies = [
        b'{"inputs": [' + b"[]," * 1_000_000 + b"[]]}",
        b'{"inputs": [[[1, 2, 3], [' + b"[0.5]," * 400_000 + b"1]]]}",
        b'{"inputs": [[[1, 2, 3], [' + b"0.1," * 600_000 + b"1]]]}",
        b'{"inputs": [' + b"{}," * 1_000_000 + b"{}]}",
    ]
    app = serve.application(service)
    made, parsed = [], []
    make, parse = torch.tensor, json.loads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", lambda *args, **kwargs: made.append(args) or make(*args, **kwargs))
        patch.setattr(json, "loads", lambda text: parsed.append(len(text)) or parse(text))
        for body in bodies:
            assert len(body) <= serve.MOST_BYTES
            assert asyncio.run(ask(app, "/predict", body))[0] in (413, 422)
    # Many lists are not even parsed.
    assert (made, parsed) == ([], [len(bodies[2])])
    status, _ = asyncio.run(ask(app, "/predict", b" " * (serve.MOST_BYTES + 1)))
    assert status == 413


def test_requests_are_parsed_and_answered_beside_the_event_loop(serve, service):
    threads = []
    parsed = service.parsed
    service.parsed = lambda body: (threads.append(threading.current_thread()), parsed(body))[1]
    assert posted(serve.application(service), [ONES])[0] == 200
    assert threads[0] is not threading.main_thread()


def test_a_body_that_does_not_come_is_not_waited_for(serve, service, monkeypatch):
    monkeypatch.setattr(serve, "PATIENCE", 0.01)
    sent: list[dict[str, Any]] = []

    async def never() -> dict[str, Any]:
        await asyncio.sleep(600)
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict", "scheme": "http"}
    scope |= {
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(k.encode(), v.encode()) for k, v in JSON.items()],
    }
    asyncio.run(serve.application(service)(scope, never, send))
    assert sent[0]["status"] == 408


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "Model.example"}, 200),
        ({"host": "evil.example:8000"}, 421),
        ({"host": "localhost.evil.example"}, 421),
        ({"host": "localhost@evil.example"}, 421),
        ({"host": "[::1"}, 421),
        ({"host": ""}, 421),
        ({"origin": "http://localhost:8000"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:9000"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "text/plain; a=application/json"}, 415),
        ({"content-type": ""}, 415),
    ],
)
def test_other_hosts_and_sites_are_refused(serve, service, headers, status):
    app = serve.application(service, {*serve.LOCAL, "model.example"})
    assert posted(app, [ONES], **headers)[0] == status
    if "content-type" not in headers:
        assert asyncio.run(ask(app, "/health.json", headers=JSON | headers))[0] == status
    assert service.monitor.n == (status == 200)


def test_a_write_that_fails_is_told_and_tried_again(serve, service, monkeypatch, caplog):
    monkeypatch.setattr(serve, "SAVED_EVERY", 0.001)
    saves, full = [], threading.Event()
    save = service.monitor.save

    def fails(path: Path) -> None:
        saves.append(path)
        if len(saves) < 3:
            raise ba.errors.FileError("cannot save: no space left on device")
        save(path)
        full.set()

    service.monitor.save = fails
    app = serve.application(service)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            begun = time.monotonic()
            while not full.is_set() and time.monotonic() < begun + 60:
                await asyncio.sleep(0.001)

    asyncio.run(live())
    assert full.is_set()
    assert service.state.exists()
    assert caplog.text.count("the monitor's state could not be written") == 2
    assert "no space left on device" in caplog.text


def test_the_health_page_escapes_what_a_file_says(serve, service):
    status, page = asyncio.run(ask(serve.application(service), "/health"))
    assert status == 200
    assert b"<script>" not in page
    assert b"&lt;script&gt;" in page
