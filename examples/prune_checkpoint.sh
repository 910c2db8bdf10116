#!/usr/bin/env bash
# Make a saved checkpoint smaller from the shell, without data and then with inputs: bash examples/prune_checkpoint.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

cat > digits.py <<'PYTHON'
import torch
from sklearn.datasets import load_digits
from torch import nn

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def network():
    return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
PYTHON

# Any training that saves weights and Adam's state will do; this one reads digits.
python - <<'PYTHON'
import numpy as np
import torch
from digits import network, x, y
from torch import nn

torch.manual_seed(0)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
for _ in range(600):
    rows = torch.randint(1200, (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
np.save("images.npy", x[:1000])
PYTHON

# The file alone.
bayesadam inspect last.pt --n-data 1200
bayesadam prune last.pt --fraction 0.75 -o pruned.pt

# The network and some of its inputs: what is left makes up for what goes.
bayesadam prune last.pt --fraction 0.95 --model digits:network --inputs images.npy -o small.pt
bayesadam quantise small.pt --bits 4 --model digits:network --inputs images.npy -o tiny.safetensors
bayesadam inspect tiny.safetensors

# What they are worth on images that the training did not see.
python - <<'PYTHON'
import torch
from digits import network, x, y

import bayesadam as ba

files = {name: torch.load(f"{name}.pt")["model"] for name in ("last", "pruned", "small")}
for name, weights in {**files, "tiny": ba.load("tiny.safetensors", network()).state_dict()}.items():
    model = network()
    model.load_state_dict(weights)
    zeros = torch.cat([(w == 0).flatten() for w in weights.values()]).double().mean()
    print(f"{name}: {zeros:.2f} of the weights are 0, accuracy {(model(x[1200:]).argmax(1) == y[1200:]).double().mean():.3f}")
PYTHON
