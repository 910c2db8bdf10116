"""Label 300 digits instead of 1,400: a network chooses its own, ten at a time: `python examples/label_digits.py`."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bayesadam as ba

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
pool, test = order[:1400], order[1400:]


def learn(rows: Tensor) -> ba.Posterior:
    """A network trained on the labelled rows, with the posterior in Adam's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(300):
        batch = rows[torch.randint(len(rows), (32,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model.eval(), optimizer, n_data=len(rows), likelihood="classification")


def accuracy(posterior: ba.Posterior) -> float:
    """Of the network on the test images."""
    guess = posterior.model(images[test]).argmax(dim=1)
    return float((guess == labels[test]).float().mean())


labelled, rest = pool[:20], pool[20:]
posterior = learn(labelled)
while len(labelled) < 300:
    chosen = ba.acquire(posterior, images[rest], 10, seed=len(labelled))
    keep = torch.ones(len(rest), dtype=torch.bool)
    keep[chosen] = False
    # Here a person would give the labels.
    labelled, rest = torch.cat([labelled, rest[chosen]]), rest[keep]
    posterior = learn(labelled)
    if len(labelled) in (100, 200):
        print(f"{len(labelled)} chosen labels: accuracy {accuracy(posterior):.3f}")
print(f"300 chosen labels: accuracy {accuracy(posterior):.3f}")
print(f"300 random labels: accuracy {accuracy(learn(pool[:300])):.3f}")
print(f"all 1400 labels: accuracy {accuracy(learn(pool)):.3f}")
