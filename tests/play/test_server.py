"""The server over real sockets on 127.0.0.1: what it serves, what it refuses, and hang-ups."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bayesadam.engine.rules import IVON
from bayesadam.errors import SettingError
from bayesadam.play import learners
from bayesadam.play import server as module
from bayesadam.play.learners import LENGTHSCALES, EnsembleLearner, Panel
from bayesadam.play.server import GRID, HOST, Server, parse
from play.serving import serving
from processes import PATIENCE, eventually

POINTS = [[-1, 0.5], [0, 0], [1, 0.8], [2, 1]]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def server():
    with serving() as server:
        yield server


def request(server, method="GET", path="/", body=None, **headers):
    connection = http.client.HTTPConnection(HOST, server.port, timeout=PATIENCE)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer, answer.read()


def post(server, body, **headers):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return request(server, "POST", "/bands", raw, **{"Content_Type": "application/json", **headers})


def ask(**changes):
    return {"page": "test", "points": POINTS, "width": 5, **changes}


def open_stream(server, body):
    """A request whose answer is read line by line."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=PATIENCE)
    connection.request("POST", "/bands", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def lines(raw):
    return [json.loads(line) for line in raw.splitlines()]


def alive(server):
    answer, _ = request(server)
    assert answer.status == 200


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(learners, "PANELS", tuple(replace(panel, budget=20) for panel in learners.PANELS))


@pytest.fixture
def endless(monkeypatch):
    monkeypatch.setattr(learners, "PANELS", tuple(replace(panel, budget=10**7) for panel in learners.PANELS))


# --- what it serves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/play.js", "/play.css", "/icon.svg", "/config", "/?a=1"])
def test_the_page_and_its_parts(server, path):
    answer, body = request(server, path=path)
    assert answer.status == 200
    assert int(answer.headers["Content-Length"]) == len(body) > 100
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_the_page_asks_nothing_of_the_network():
    for name in ("page.html", "play.js", "play.css"):
        text = (Path(module.__file__).parent / name).read_text(encoding="utf-8")
        assert not re.search(r"https?:|//[a-z]", text.replace("http://www.w3.org/2000/svg", "")), name


def test_it_listens_on_this_machine_only(server):
    assert server.socket.getsockname() == (HOST, server.port)
    assert server.url == f"http://127.0.0.1:{server.port}/"


def test_a_port_that_is_taken_is_said_in_one_line(server):
    with pytest.raises(SettingError, match=f"{server.port}.*--port 0"):
        Server(server.port)


@pytest.mark.usefixtures("short")
def test_every_method_answers_and_badam_first(server):
    answer, raw = post(server, ask())
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/x-ndjson")
    found = lines(raw)
    order = list(dict.fromkeys(m["method"] for m in found if m["type"] == "bands"))
    assert order == ["badam", "gp", "mc-dropout", "bbb", "vadam", "ensemble"]
    assert found[-1]["type"] == "done"
    for message in found[:-1]:
        assert len(message["mean"]) == len(message["std"]) == len(GRID)
        assert min(message["std"]) >= 0
    last = {m["method"]: m for m in found[:-1]}
    assert all(m["left"] == 0 for m in last.values())
    assert {m: last[m]["steps"] for m in last} == {
        "badam": 20,
        "gp": len(LENGTHSCALES),
        "mc-dropout": 20,
        "bbb": 20,
        "vadam": 20,
        "ensemble": 20,
    }


@pytest.mark.usefixtures("short")
def test_the_sliders_of_the_posterior_retrain_nothing(server):
    first = {m["method"]: m for m in lines(post(server, ask())[1]) if m["type"] == "bands"}
    again = lines(post(server, ask(prior_precision=50))[1])
    badam = [m for m in again if m.get("method") == "badam"]
    assert len(badam) == 1
    assert badam[0]["mean"] == first["badam"]["mean"]
    assert max(badam[0]["std"]) < max(first["badam"]["std"])
    assert next(m for m in again if m.get("method") == "mc-dropout")["std"] == first["mc-dropout"]["std"]
    assert next(m for m in again if m.get("method") == "bbb")["steps"] > 0


@pytest.mark.usefixtures("short")
def test_another_page_knows_nothing_of_the_first(server):
    def strip(found):
        return [{k: v for k, v in m.items() if k != "seconds"} for m in found]

    one, other = (strip(lines(post(server, ask(page=page))[1])) for page in ("one", "other"))
    assert {m["method"]: m for m in one[:-1]} == {m["method"]: m for m in other[:-1]}


@pytest.mark.usefixtures("short")
def test_a_rule_with_a_panel_is_on_the_page(server, monkeypatch):
    monkeypatch.setattr(learners, "PANELS", (*learners.PANELS, Panel("ivon", "IVON", rule=IVON, budget=20)))
    told = json.loads(request(server, path="/config")[1])["panels"]
    methods = [panel["method"] for panel in told]
    assert methods == ["badam", "gp", "mc-dropout", "bbb", "vadam", "ensemble", "ivon"]
    assert [panel["exact"] for panel in told] == [method == "gp" for method in methods]
    assert "ivon" in {m["method"] for m in lines(post(server, ask())[1])[:-1]}


def test_no_points_no_bands(server):
    assert [m["type"] for m in lines(post(server, ask(points=[]))[1])] == ["done"]


@pytest.mark.usefixtures("endless")
def test_badam_answers_long_before_it_is_trained(server):
    for number in range(3):
        connection, answer = open_stream(server, ask(page="soon", points=[*POINTS, [0.5, 0.1 * number]], width=100))
        first = json.loads(answer.readline())
        assert first["method"] == "badam"
        assert first["left"] > 0
        connection.close()


# --- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"), [(b"{", "Expecting"), (ask(points=[[0, 0]] * 201), "200"), (ask(width=10**6), "width")]
)
def test_bad_requests_get_one_line_of_json(server, body, said):
    answer, raw = post(server, body)
    assert (answer.status, answer.headers["Content-Type"]) == (400, "application/json")
    assert said in json.loads(raw)["error"]
    alive(server)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/server.py", 404),
    ],
)
def test_unknown_paths(server, method, path, status):
    assert request(server, method, path)[0].status == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_headers_that_are_not_the_pages(server, headers, status):
    assert post(server, b"{}", **headers)[0].status == status
    alive(server)


def test_the_pages_own_origin_is_welcome(server):
    for name in (HOST, "localhost"):
        own = f"{name}:{server.port}"
        assert post(server, ask(points=[]), Host=own, Origin=f"http://{own}")[0].status == 200


def test_a_learner_that_fails_is_said_and_restarts(server, short, monkeypatch):
    def broken(self, grid):
        raise RuntimeError("the matrix is singular")

    monkeypatch.setattr(EnsembleLearner, "bands", broken)
    found = lines(post(server, ask())[1])
    assert [m["error"] for m in found if m["type"] == "failed"] == ["the matrix is singular"]
    assert found[-1]["type"] == "done"
    monkeypatch.undo()
    assert lines(post(server, ask(points=[]))[1])[-1]["type"] == "done"


# --- superseded and gone --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("endless")
def test_a_newer_request_of_a_page_supersedes_the_older(server):
    connection, older = open_stream(server, ask())
    assert json.loads(older.readline())["method"] == "badam"
    second, newer = open_stream(server, ask(points=POINTS[:3]))
    assert json.loads(newer.readline())["method"] == "badam"
    rest = lines(older.read())
    assert rest[-1]["type"] == "superseded"
    newer.close()
    second.close()
    connection.close()


@pytest.mark.usefixtures("endless")
def test_a_page_that_hangs_up_ends_its_training(server):
    connection, stream = open_stream(server, ask())
    stream.readline()
    mine = server.session("test")._mine
    assert mine.locked()
    stream.close()
    connection.close()
    eventually(lambda: not mine.locked(), "the end of the training")


# --- sessions -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("endless")
def test_a_request_that_was_superseded_while_it_waited_trains_nothing(server):
    page = server.session("p")
    request_ = parse(json.dumps(ask()).encode())
    running = page.answer(request_)
    assert next(running)["method"] == "badam"
    found, current = [], page._current
    waiting = threading.Thread(target=lambda: found.extend(page.answer(request_)), daemon=True)
    waiting.start()
    eventually(lambda: page._current is not current, "the second request's arrival")
    page.cancel()
    running.close()
    waiting.join(timeout=PATIENCE)
    assert [m["type"] for m in found] == ["superseded"]


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_the_command_prints_where_it_is_and_ends_cleanly():
    source = str(Path(module.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-m", "bayesadam", "play", "--port", "0", "--no-open"],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        said = process.stdout.readline()
        assert said.startswith("Playing at http://127.0.0.1:")
        port = int(said.split(":")[2].partition("/")[0])
        connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode, out.strip(), err) == (0, "Stopped.", "")
