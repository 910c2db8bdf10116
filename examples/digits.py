"""A small network for digits, trained like any other: what most pages of the documentation begin with.

    from examples.digits import held_out, model, optimizer, x, x_test, y, y_test

The imports train it, in a second; put your own network in its place.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


def build() -> nn.Module:
    """For images of 8 × 8 and ten classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int = 1000) -> None:
    """Steps on batches of 32."""
    for _ in range(steps):
        rows = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


torch.manual_seed(0)
digits, order = load_digits(), torch.randperm(1797)
images, labels = torch.tensor(digits.images / 16).float()[order], torch.tensor(digits.target)[order]
x, y = images[:1000], labels[:1000]  # to train on
held_out = images[1000:1400], labels[1000:1400]  # to calibrate on; a DataLoader will do, too
x_test, y_test = images[1400:], labels[1400:]

model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train(model, optimizer, x, y)

if __name__ == "__main__":
    print(f"right: {(model(x_test).argmax(dim=1) == y_test).float().mean():.3f}")
