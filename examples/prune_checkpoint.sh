#!/usr/bin/env bash
# Prune a saved checkpoint from the shell, without its model and without data: bash examples/prune_checkpoint.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export FOLDER=$folder

# Any training that saves weights and Adam's state will do; this one reads digits.
python - <<'PYTHON'
import os
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
for _ in range(600):
    rows = torch.randint(1200, (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, os.environ["FOLDER"] + "/last.pt")
PYTHON

bayesadam inspect "$folder/last.pt" --n-data 1200
bayesadam prune "$folder/last.pt" --fraction 0.75 -o "$folder/pruned.safetensors"

# What the pruned weights are worth on images that the training did not see.
python - <<'PYTHON'
import os
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32)[1200:] / 16, torch.tensor(digits.target)[1200:]
model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
folder = os.environ["FOLDER"]
files = {"whole": torch.load(folder + "/last.pt")["model"], "pruned": load_file(folder + "/pruned.safetensors")}
for name, weights in files.items():
    model.load_state_dict(weights)
    zeros = sum(int((w == 0).sum()) for w in weights.values()) / sum(w.numel() for w in weights.values())
    print(f"{name}: {zeros:.2f} of the weights are 0, accuracy {(model(x).argmax(-1) == y).float().mean():.3f}")
PYTHON
