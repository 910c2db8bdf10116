"""The service of `examples/serve.py` under load: requests a second, their times, and what malformed ones get.

    python -m benchmarks.speed.serve [--quick] [--clients 4] [--requests 20000] [--malformed 10000] [--out out/bench]

The server has one core to itself where there are two, the clients the other, and connections stay open. Malformed are,
in turn: no JSON, JSON of another kind, no inputs, none at all, text for numbers, ragged lists, another shape, NaN and
infinities, numbers too large, lists in lists beyond any depth, too many examples, too many bytes, another path, another
method, and bytes at random. Each must get a status from 400 to 499 with a reason, and well-formed ones in between the
same answer as before. Memory is the server's resident set before and after.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.common.harness import arguments, at_most, setting, write_results

ROOT = Path(__file__).parents[2]
JSON = {"Content-Type": "application/json"}


def started(port: int) -> subprocess.Popen[str]:
    """The example, without a file, on the last core."""
    command = [sys.executable, str(ROOT / "examples" / "serve.py"), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(server.pid, cores[-1:])
        os.sched_setaffinity(0, cores[:-1])
    for _ in range(1200):
        try:
            if asked(port, "GET", "/health.json")[0] == 200:
                return server
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server did not start")


def asked(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    """One request on a connection of its own: the status, and what was answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, JSON)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


def images(n: int, seed: int = 0) -> bytes:
    draw = random.Random(seed)
    made = [[[[round(draw.random(), 3) for _ in range(8)] for _ in range(8)]] for _ in range(n)]
    return json.dumps({"inputs": made}).encode()


def load(port: int, clients: int, requests: int, body: bytes) -> dict[str, float]:
    """So many requests by so many clients at once."""
    seconds: list[float] = []
    failed: list[int] = []

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(requests // clients):
            began = time.perf_counter()
            connection.request("POST", "/predict", body, JSON)
            response = connection.getresponse()
            response.read()
            seconds.append(time.perf_counter() - began)
            if response.status != 200:
                failed.append(response.status)
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - began
    quantiles = statistics.quantiles(seconds, n=100)
    return {
        "requests a second": len(seconds) / taken,
        "median ms": quantiles[49] * 1e3,
        "p99 ms": quantiles[98] * 1e3,
        "failed": len(failed),
    }


def malformed(number: int) -> tuple[str, str, bytes]:
    """(method, path, body) of a request that nothing can be made of."""
    draw = random.Random(number)
    one = json.loads(images(1))["inputs"][0]
    kinds: list[tuple[str, str, bytes]] = [
        ("POST", "/predict", b'{"inputs": [[1, 2'),
        ("POST", "/predict", b"[1, 2, 3]"),
        ("POST", "/predict", b'{"input": []}'),
        ("POST", "/predict", b'{"inputs": []}'),
        ("POST", "/predict", json.dumps({"inputs": [[[["a"] * 8] * 8]]}).encode()),
        ("POST", "/predict", json.dumps({"inputs": [[one[0][:7]], one]}).encode()),
        ("POST", "/predict", json.dumps({"inputs": [[[0.0] * 9] * 8]}).encode()),
        ("POST", "/predict", json.dumps({"inputs": [[[[float("nan")] * 8] * 8]]}).encode()),
        ("POST", "/predict", json.dumps({"inputs": [[[[10**400] * 8] * 8]]}).encode()),
        ("POST", "/predict", b'{"inputs": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
        ("POST", "/predict", json.dumps({"inputs": [0] * 2000}).encode()),
        ("POST", "/predict", b'{"inputs": [' + b"0, " * 1_500_000 + b"0]}"),
        ("POST", "/nothing", b"{}"),
        ("GET", "/predict", b""),
        ("POST", "/predict", draw.randbytes(draw.randrange(1, 500))),
        ("POST", "/predict", json.dumps({"inputs": None}).encode()),
    ]
    return kinds[number % len(kinds)]


def main() -> None:
    parser = arguments(__doc__, quick="few requests")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--malformed", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=8461)
    options = parser.parse_args()
    requests, bad = (200, 64) if options.quick else (options.requests, options.malformed)
    results: dict[str, Any] = setting()
    server = started(options.port)

    def resident() -> float:
        pages = int(Path(f"/proc/{server.pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    try:
        body = images(1, seed=1)
        load(options.port, options.clients, max(requests // 10, 10), body)
        for name, n in (("one image", 1), ("64 images", 64)):
            count = requests if n == 1 else max(requests // 10, 20)
            results[name] = load(options.port, options.clients, count, images(n, seed=n))
            print(name, {key: round(value, 2) for key, value in results[name].items()}, flush=True)
        before = resident()
        truth = asked(options.port, "POST", "/predict", body)[1]["probs"]
        seen = asked(options.port, "GET", "/health.json")[1]["inputs"]
        statuses: dict[int, int] = {}
        wrong, asked_again = [], 0
        for number in range(bad):
            status, told = asked(options.port, *malformed(number))
            statuses[status] = statuses.get(status, 0) + 1
            if not (400 <= status < 500 and isinstance(told, dict) and told.get("error")):
                wrong.append((number, status, told))
            if number % 100 == 0:
                asked_again += 1
                if asked(options.port, "POST", "/predict", body)[1]["probs"] != truth:
                    wrong.append((number, 200, "another answer"))
        after = asked(options.port, "GET", "/health.json")[1]["inputs"]
        results["malformed"] = {
            "requests": bad,
            "statuses": {str(key): value for key, value in sorted(statuses.items())},
            "not told": len(wrong),
            "inputs lost": asked_again - (after - seen),
            "MiB before": before,
            "MiB after": resident(),
        }
        print(results["malformed"], wrong[:3], flush=True)
        at_most("malformed requests without a clear 4xx", 0, len(wrong))
    finally:
        server.terminate()
        server.wait(60)
    write_results(options.out, "serve", results)


if __name__ == "__main__":
    main()
