"""A small HTTP service of a calibrated network, which says when its inputs drift: `python examples/serve.py`.

    python examples/serve.py [served.pt2] [--port 8000] [--alarm 0.01] [--state monitor.safetensors] [--rehearse N]

Without a file it trains a CNN on scikit-learn's digits and serves that. POST /predict takes {"inputs": [...]}, a list
of examples, as application/json, and gives the answer to each, with null for numbers that are not finite; GET /health
is a page with the monitor, /health.json the same for a machine. `--name` is what clients call this machine, where
that is not localhost: requests to other names, and those of other sites' pages, are refused. There is no password.
`--rehearse N` sends itself N digits, the second half of them turned upside down, one a request, and stops.
"""

import argparse
import asyncio
import contextlib
import html
import io
import json
import logging
import math
import sys
import tempfile
import threading
import urllib.request
from collections.abc import AsyncIterator, Collection
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import uvicorn
from matplotlib.figure import Figure
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from torch import Tensor, nn

import bayesadam as ba

MOST_BYTES, MOST_EXAMPLES, MOST_REQUESTS = 4 << 20, 1024, 64
# Seconds: between two writes of the monitor, and for the body of a request.
SAVED_EVERY, PATIENCE = 10.0, 20.0
LOCAL = ("localhost", "127.0.0.1", "::1")
log = logging.getLogger("uvicorn.error")
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="refresh" content="5"><title>{state}</title><style>:root {{ color-scheme: light dark }}
body {{ font: 16px system-ui; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }} img {{ max-width: 100% }}
td {{ padding: .1rem 1rem .1rem 0 }}</style><h1>{state}</h1><table>{rows}</table>
<img src="health.png" alt="Evidence of drift over the stream, with the line of the alarm"></html>"""


class Service:
    """A program of torch.export, and the monitor of the novelty of what it is asked."""

    def __init__(self, file: Path, alarm: float, state: Path | None) -> None:
        extra = {"bayesadam.json": ""}
        program = torch.export.load(file, extra_files=extra)
        example = program.example_inputs[0][0]
        self.shape, self.type = tuple(example.shape[1:]), example.dtype
        self.program, self.about, self.state = program.module(), json.loads(extra["bayesadam.json"]), state
        # The file holds the novelties of the held-out inputs.
        self.monitor = ba.Monitor(reference=program.state_dict["net.novelties"], alarm=alarm)
        if state is not None and state.exists():
            resumed = ba.Monitor.load(state)
            if resumed.alarm != alarm or not resumed.same_reference(self.monitor):
                sys.exit(f"{state} is of another model, or of --alarm {resumed.alarm:g}: move it away to begin anew")
            self.monitor = resumed
        self.answered, self.turn = 0, threading.Lock()
        self.keep()

    def parsed(self, body: bytes) -> Tensor:
        """The inputs of a request; a 4xx says what is wrong with them."""
        # A million lists would take seconds, in which nothing else runs.
        lists = 2 + MOST_EXAMPLES * sum(math.prod(self.shape[:axis]) for axis in range(len(self.shape)))
        if body.count(b"[") + body.count(b"{") > lists:
            raise HTTPException(413, f"more lists than {MOST_EXAMPLES} examples of shape {self.shape} have")
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is no JSON: {error}") from None
        if not isinstance(found, dict) or not isinstance(found.get("inputs"), list) or not found["inputs"]:
            raise HTTPException(422, 'send {"inputs": [...]}, a list of at least one example')
        if len(found["inputs"]) > MOST_EXAMPLES:
            raise HTTPException(413, f"at most {MOST_EXAMPLES} examples a request, got {len(found['inputs'])}")
        values, shape = found["inputs"], (len(found["inputs"]), *self.shape)
        # A list whose shape is not this is not made a tensor of, which takes torch seconds.
        for length in self.shape:
            if not all(type(value) is list and len(value) == length for value in values):
                raise HTTPException(422, f"an example is lists of numbers, of shape {self.shape}")
            values = list(chain.from_iterable(values))
        number = (int, float) if self.type.is_floating_point else (int,)
        if not all(type(value) in number for value in values):
            raise HTTPException(422, f"an example is {number[-1].__name__} numbers, of shape {self.shape}")
        try:
            inputs = torch.tensor(values, dtype=self.type).reshape(shape)
        except (ValueError, RuntimeError, OverflowError):
            raise HTTPException(422, f"the inputs have numbers that do not fit {self.type}") from None
        if not bool(inputs.isfinite().all()):
            raise HTTPException(422, "the inputs hold NaN or infinities")
        return inputs

    def answer(self, inputs: Tensor) -> dict[str, Any]:
        """What the network says of each example; the monitor sees all of them."""
        with self.turn, torch.inference_mode():
            found = self.program(inputs)
            drifted = self.monitor.update(found["novelty"])
            self.answered += int(found["answered"].sum()) if "answered" in found else len(inputs)
        return {name: _plain(tensor) for name, tensor in found.items()} | {"drift": drifted}

    def health(self) -> dict[str, Any]:
        """The state of the monitor, and what is served."""
        monitor = self.monitor
        return {
            "drift": monitor.alarmed_at is not None,
            "alarmed at": monitor.alarmed_at,
            "inputs": monitor.n,
            "evidence": math.exp(min(monitor.log_martingale, 700.0)),
            "answered since the start": self.answered,
            "model": self.about,
        }

    def picture(self) -> bytes:
        """The evidence over the stream, as PNG."""
        figure, file = Figure(figsize=(7, 3), layout="constrained"), io.BytesIO()
        with self.turn:
            self.monitor.plot(ax=figure.subplots())
        figure.savefig(file, format="png")
        return file.getvalue()

    def keep(self) -> None:
        """Write the monitor's state, so that a restart goes on with it."""
        if self.state is not None:
            with self.turn:
                self.monitor.save(self.state)

    def try_to_keep(self) -> None:
        """`keep`; where it cannot be written the log says why, and the next time may do."""
        try:
            self.keep()
        except Exception:
            log.exception("the monitor's state could not be written")


def _plain(tensor: Tensor) -> Any:
    """As JSON has it, where there are no infinities and NaNs: null."""
    return _finite(tensor.tolist()) if not bool(tensor.isfinite().all()) else tensor.tolist()


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value if math.isfinite(value) else None


def _check(request: Request, names: Collection[str]) -> None:
    """Refuse what a page of another site makes a browser send, also under a name that it had point here."""
    host = request.headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        name = None
    if name not in names:
        raise HTTPException(421, "the Host is not one that this service goes by: see --name")
    origin = request.headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        raise HTTPException(403, "pages of other sites may not ask")
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and content != "application/json":
        raise HTTPException(415, "send the Content-Type application/json")


def application(service: Service, names: Collection[str] = LOCAL) -> Starlette:
    """The service's routes; `names` are the hosts that it goes by."""

    async def predict(request: Request) -> Response:
        _check(request, names)
        body = bytearray()

        async def read() -> None:
            async for chunk in request.stream():
                body.extend(chunk)
                if len(body) > MOST_BYTES:
                    raise HTTPException(413, f"at most {MOST_BYTES} bytes a request")

        try:
            await asyncio.wait_for(read(), PATIENCE)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"the body did not come within {PATIENCE:g} seconds") from None
        return await run_in_threadpool(lambda: JSONResponse(service.answer(service.parsed(bytes(body)))))

    async def health(request: Request) -> Response:
        _check(request, names)
        found = service.health()
        if request.url.path.endswith(".json"):
            return JSONResponse(found, status_code=503 if found["drift"] else 200)
        if request.url.path.endswith(".png"):
            return Response(await run_in_threadpool(service.picture), media_type="image/png")
        state = f"Drift, told at input {found['alarmed at']:,}" if found["drift"] else "No drift seen"
        shown = {**found, **found.pop("model")}
        rows = "".join(f"<tr><td>{html.escape(str(name))}<td>{html.escape(str(one))}" for name, one in shown.items())
        return HTMLResponse(PAGE.format(state=state, rows=rows))

    async def told(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, status_code=error.status_code)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async def keep() -> None:
            while True:
                await asyncio.sleep(SAVED_EVERY)
                await run_in_threadpool(service.try_to_keep)

        task = asyncio.create_task(keep())
        yield
        task.cancel()
        service.try_to_keep()

    routes = [Route("/predict", predict, methods=["POST"])]
    routes += [Route(path, health) for path in ("/health", "/health.json", "/health.png")]
    return Starlette(routes=routes, exception_handlers={HTTPException: told}, lifespan=lifespan)


def digits() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits, in an order of their own."""
    from sklearn.datasets import load_digits

    found, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.images, dtype=torch.float32)[order, None] / 16, torch.tensor(found.target)[order]


def train(file: Path) -> None:
    """A CNN of the first digits, calibrated on others so that at most 2 % of what it answers is wrong, deployed."""
    torch.manual_seed(0)
    x, y = digits()
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(15):
        for rows in torch.randperm(800).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=800, batch_size=32, likelihood="classification")
    ba.calibrate(posterior, (x[800:1200], y[800:1200]), risk=0.02).save(file, x[:2])


def rehearse(url: str, count: int) -> None:
    """Send digits that the network has not seen, the second half of them upside down."""
    x, drift = digits()[0][1200:], False
    for number in range(count):
        image = x[number % len(x)]
        image = image.flip(1) if number >= count // 2 else image
        body = json.dumps({"inputs": [image.tolist()]}).encode()
        request = urllib.request.Request(f"{url}/predict", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            found = json.load(response)
        if found["drift"] and not drift:
            drift = True
            print(f"drift at input {number}; inputs are upside down from {count // 2} on", flush=True)
    with urllib.request.urlopen(f"{url}/health") as page:
        print(f"health page: {page.status}, {len(page.read())} bytes; drift seen: {drift}", flush=True)


def main() -> None:
    """Serve until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a .pt2 that `net.save` or `bayesadam deploy` wrote")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at; by default this machine alone")
    parser.add_argument("--name", action="append", default=[], help="a host name that clients use, beside localhost")
    parser.add_argument("--alarm", type=float, default=0.01, help="share of streams without drift that may raise it")
    parser.add_argument("--state", type=Path, help="where the monitor is kept")
    parser.add_argument("--rehearse", type=int, default=0, help="how many digits to send itself")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = given.file or Path(folder) / "served.pt2"
        if given.file is None:
            train(file)
        if file.suffix != ".pt2" or not file.exists():
            sys.exit(f"{file} is no .pt2 file: write one with net.save or bayesadam deploy")
        service = Service(file, given.alarm, given.state)
    app = application(service, {*LOCAL, given.host.lower(), *map(str.lower, given.name)})
    config = {"host": given.host, "port": given.port, "limit_concurrency": MOST_REQUESTS}
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", **config))
    if given.rehearse:
        threading.Thread(target=lambda: _rehearsed(server, given.rehearse), daemon=True).start()
    else:
        print(f"http://{given.host}:{given.port}/health", flush=True)
    server.run()


def _rehearsed(server: uvicorn.Server, count: int) -> None:
    while not server.started:
        threading.Event().wait(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        rehearse(f"http://127.0.0.1:{port}", count)
    finally:
        server.should_exit = True


if __name__ == "__main__":
    main()
