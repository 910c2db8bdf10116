"""A bandit behind a service: `python examples/bandit_service.py 8000`; without a port it tries itself.

POST /decide {"context": [...]} gives an id and an arm, POST /reward {"id": ..., "reward": ...} may come days later.
A decision is on the disk before it is answered: killed, the service goes on from its log.
"""

import json
import sys
import tempfile
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np

import bayesadam as ba


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body, found, status = self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 1 << 16)), {}, 200
        try:
            if self.headers.get("Content-Type") != "application/json":
                raise ValueError("send the Content-Type application/json")
            if self.path == "/decide":
                decision = self.agent.decide(np.array(json.loads(body)["context"], dtype=float))
                found = {"id": decision.id, "arm": decision.arm}
            else:
                self.agent.reward(json.loads(body)["id"], float(json.loads(body)["reward"]))
        except (ba.BayesAdamError, ValueError, TypeError, KeyError) as error:
            found, status = {"error": str(error)}, 422
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())


def _post(url: str, **body: object) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


port = int(sys.argv[1]) if sys.argv[1:] else 0
with tempfile.TemporaryDirectory() as folder:
    file, new = Path() / ("" if port else folder) / "decisions.jsonl", ba.bandits.make_agent(n_features=6, n_arms=4)
    _Handler.agent = ba.bandits.replay(file) if file.exists() else new
    _Handler.agent.log(file)
    server = HTTPServer(("127.0.0.1", port), _Handler)
    threading.Thread(target=server.serve_forever, daemon=not port).start()
    if not port:
        _Handler.log_message, url = lambda *_: None, f"http://127.0.0.1:{server.server_port}"
        rng, bought = np.random.default_rng(0), []
        taste = rng.normal(size=(6, 4))
        for context in rng.normal(size=(300, 6)):
            made = _post(f"{url}/decide", context=context.tolist())
            bought.append(float(rng.random() < 1 / (1 + np.exp(-2 * context @ taste[:, made["arm"]]))))
            _post(f"{url}/reward", id=made["id"], reward=bought[-1])
        print(f"bought: {np.mean(bought[:50]):.2f} of the first fifty, {np.mean(bought[-200:]):.2f} of the last 200")
        _Handler.agent.log(None)
