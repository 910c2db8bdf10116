"""A small HTTP service of a calibrated network, which says when its inputs drift: `python examples/serve.py`.

    python examples/serve.py [served.pt2] [--port 8000] [--alarm 0.01] [--state monitor.safetensors] [--rehearse N]

Without a file it trains a CNN on scikit-learn's digits and serves that. POST /predict takes {"inputs": [...]}, a list
of examples, and gives the answer to each; GET /health is a page with the monitor, /health.json the same for a machine.
`--rehearse N` sends itself N digits, the second half of them turned upside down, one a request, and stops.
"""

import argparse
import asyncio
import contextlib
import io
import json
import math
import sys
import tempfile
import threading
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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

MOST_BYTES, MOST_EXAMPLES, SAVED_EVERY = 4 << 20, 1024, 10.0
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
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is no JSON: {error}") from None
        if not isinstance(found, dict) or not isinstance(found.get("inputs"), list) or not found["inputs"]:
            raise HTTPException(422, 'send {"inputs": [...]}, a list of at least one example')
        if len(found["inputs"]) > MOST_EXAMPLES:
            raise HTTPException(413, f"at most {MOST_EXAMPLES} examples a request, got {len(found['inputs'])}")
        try:
            inputs = torch.tensor(found["inputs"], dtype=self.type)
        except (ValueError, TypeError, RuntimeError, OverflowError):
            raise HTTPException(422, f"the inputs are no numbers of equal shape {self.shape}") from None
        if inputs.shape[1:] != self.shape:
            raise HTTPException(422, f"an example has shape {self.shape}, got {tuple(inputs.shape[1:])}")
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


def _plain(tensor: Tensor) -> Any:
    """As JSON has it, where there is no infinity."""
    return tensor.tolist() if bool(tensor.isfinite().all()) else [str(value) for value in tensor.tolist()]


def application(service: Service) -> Starlette:
    """The service's routes."""

    async def predict(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                raise HTTPException(413, f"at most {MOST_BYTES} bytes a request")
        inputs = service.parsed(body)
        return JSONResponse(await run_in_threadpool(service.answer, inputs))

    async def health(request: Request) -> Response:
        found = service.health()
        if request.url.path.endswith(".json"):
            return JSONResponse(found, status_code=503 if found["drift"] else 200)
        if request.url.path.endswith(".png"):
            return Response(await run_in_threadpool(service.picture), media_type="image/png")
        state = f"Drift, told at input {found['alarmed at']:,}" if found["drift"] else "No drift seen"
        shown = {**found, **found.pop("model")}
        rows = "".join(f"<tr><td>{name}<td>{value}" for name, value in shown.items())
        return HTMLResponse(PAGE.format(state=state, rows=rows))

    async def told(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, status_code=error.status_code)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async def keep() -> None:
            while True:
                await asyncio.sleep(SAVED_EVERY)
                await run_in_threadpool(service.keep)

        task = asyncio.create_task(keep())
        yield
        task.cancel()
        service.keep()

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
        with urllib.request.urlopen(urllib.request.Request(f"{url}/predict", body)) as response:
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
    server = uvicorn.Server(uvicorn.Config(application(service), host=given.host, port=given.port, log_level="warning"))
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
