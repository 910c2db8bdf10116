"""What an installed copy must do, in an environment that holds nothing else: `python tests/smoke.py`, from any folder.

Train, read the posterior, calibrate, predict, save and load, prune, and the same from the command line. `make
release-test` runs it on the wheel and on the sdist.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import bayesadam as ba


def shell(*arguments: object) -> str:
    """What the installed command prints."""
    command = Path(sys.executable).with_name("bayesadam")
    return subprocess.run([command, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def main() -> None:
    assert ba.__version__ == version("bayesadam") in shell("--version")
    package = Path(ba.__file__).parent
    assert (package / "py.typed").is_file()

    torch.manual_seed(0)
    x = torch.randn(400, 4)
    y = (x[:, 0] + x[:, 1] + 0.5 * torch.randn(400) > 0).long()
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(200):
        rows = torch.randint(200, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()

    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=200, likelihood="classification")
    net = ba.calibrate(posterior, (x[200:300], y[200:300]))
    probs = net(x[300:]).probs
    accuracy = (probs.argmax(dim=-1) == y[300:]).float().mean().item()
    assert accuracy > 0.8, accuracy
    torch.testing.assert_close(probs.sum(dim=-1), torch.ones(100), rtol=1e-5, atol=1e-5)
    linearised = posterior.with_inputs(x[:200]).predict(x[300:]).probs

    agent = ba.bandits.make_agent(n_features=4, n_arms=2, seed=0)
    agent.update(x[0].numpy(), agent.act(x[0].numpy()), 1.0)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        posterior.save(folder / "posterior.safetensors")
        loaded = ba.Posterior.load(folder / "posterior.safetensors", model).with_inputs(x[:200])
        torch.testing.assert_close(loaded.predict(x[300:]).probs, linearised, rtol=1e-4, atol=1e-5)
        net.save(folder / "net.safetensors")
        again = ba.load(folder / "net.safetensors", model)(x[300:]).probs
        torch.testing.assert_close(again, probs, rtol=1e-5, atol=1e-5)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")
        shell("prune", folder / "last.pt", "--fraction", "0.5", "-o", folder / "pruned.pt")
        model.load_state_dict(torch.load(folder / "pruned.pt", weights_only=True)["model"])
    pruned = sum(int((w == 0).sum()) for w in model.parameters()) / sum(w.numel() for w in model.parameters())
    assert 0.4 < pruned < 0.6, pruned
    python = ".".join(map(str, sys.version_info[:3]))
    print(
        f"bayesadam {ba.__version__} on Python {python} with torch {torch.__version__}: accuracy "
        f"{accuracy:.2f}, pruned {pruned:.2f}"
    )


if __name__ == "__main__":
    main()
