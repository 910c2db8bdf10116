"""A network made small from its checkpoint, and loaded as a plain module: `python examples/smaller.py`."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import bayesadam as ba


def network() -> nn.Sequential:
    """Any class of one's own."""
    return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


digits, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
x, y = torch.tensor(digits.data / 16).float()[order], torch.tensor(digits.target)[order]


def told(name: str, model: nn.Module, file: Path) -> None:
    """Accuracy, zeros, bytes."""
    right = (model.eval()(x[1200:]).argmax(1) == y[1200:]).float().mean()
    zeros = sum(int((w == 0).sum()) for w in model.parameters()) / sum(w.numel() for w in model.parameters())
    print(f"{name}: accuracy {right:.3f}, {zeros:.2f} of the weights are 0, {file.stat().st_size:,} bytes")


with tempfile.TemporaryDirectory() as folder:
    last, tiny = Path(folder) / "last.pt", Path(folder) / "tiny.safetensors"
    # Any training that saves the weights and the optimiser's state.
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(600):
        rows = torch.randint(1200, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, last)
    told("last.pt", model, last)

    # Later, elsewhere: the file, the class, and a thousand inputs without labels.
    posterior = ba.Posterior.from_checkpoint(last, network(), n_data=1200, likelihood="classification")
    small = ba.prune(posterior, 0.9, inputs=x[:1000])
    ba.quantise(small, bits=4, inputs=x[:1000]).save(tiny)
    told("tiny.safetensors", ba.load(tiny, network()), tiny)
    print(ba.inspect(tiny))
