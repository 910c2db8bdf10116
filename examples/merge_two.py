"""Two fine-tunes of one network merged into one, without data: `python examples/merge_two.py`.

A network that reads digits is fine-tuned twice, on mirrored digits and on digits upside down. Each run keeps its
optimiser's state, which says which weights its task depends on. Every task is printed by itself, and the worst: a mean
may hide a task that got worse. Where merging helps and where it does not: docs/merging.md.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

import bayesadam as ba

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images))
train, test = order[:1200], order[1200:]

plain, mirrored, upside_down = (changed.flatten(1) for changed in (images, images.flip(2), images.flip(1)))


def fine_tune(network: nn.Module, x: torch.Tensor, steps: int = 300) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of the network, trained with plain Adam; its memory, 1/(1 − β₂), is shorter than the training."""
    model = copy.deepcopy(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    for _ in range(steps):
        rows = train[torch.randint(len(train), (32,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), labels[rows]).backward()
        optimizer.step()
    return model, optimizer


def accuracy(weights: dict[str, torch.Tensor], x: torch.Tensor) -> float:
    """The accuracy of the network with these weights on test images."""
    network = copy.deepcopy(base)
    network.load_state_dict(weights)
    return (network(x[test]).argmax(dim=-1) == labels[test]).float().mean().item()


start = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
base, _ = fine_tune(start, plain)
model_a, adam_a = fine_tune(base, mirrored)
model_b, adam_b = fine_tune(base, upside_down)

a = ba.Posterior.from_optimizer(model_a, adam_a, n_data=len(train), batch_size=32)
b = ba.Posterior.from_optimizer(model_b, adam_b, n_data=len(train), batch_size=32)
weights_a, weights_b = model_a.state_dict(), model_b.state_dict()
networks = {
    "mirrored": weights_a,
    "upside down": weights_b,
    "average of both": {name: (weights_a[name] + weights_b[name]) / 2 for name in weights_a},
    "ba.merge": ba.merge([a, b]),
    "ba.merge with base": ba.merge([a, b], base=base),
}
print("accuracy on           mirrored  upside down   mean  worst")
for name, weights in networks.items():
    on_a, on_b = accuracy(weights, mirrored), accuracy(weights, upside_down)
    print(f"{name:22} {on_a:7.3f} {on_b:12.3f} {(on_a + on_b) / 2:6.3f} {min(on_a, on_b):6.3f}")
