"""A small network for a noisy curve, trained like any other: what the documentation of error bars begins with.

    from examples.waves import held_out, model, optimizer, x, x_test, y, y_test

The imports train it, in a second; put your own network in its place.
"""

import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.rand(500, 1) * 4 - 2
targets = torch.sin(3 * inputs) + 0.2 * torch.randn(500, 1)
x, y = inputs[:400], targets[:400]  # to train on
held_out = inputs[400:450], targets[400:450]  # to calibrate on; a DataLoader will do, too
x_test, y_test = inputs[450:], targets[450:]

model = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(1200):
    rows = torch.randint(len(x), (32,))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
    optimizer.step()

if __name__ == "__main__":
    print(f"root mean square error: {(model(x_test) - y_test).square().mean().sqrt():.3f}")
