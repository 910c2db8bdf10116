"""A CNN to ship: calibrated, told to abstain, exported, watched for drift: `python examples/cnn.py`."""

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn

import bayesadam as ba

torch.manual_seed(0)
digits, order = load_digits(), torch.randperm(1797)
x, y = torch.tensor(digits.images / 16).float()[order, None], torch.tensor(digits.target)[order]
train, held_out, test = slice(1000), slice(1000, 1400), slice(1400, None)

conv = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()]
model = nn.Sequential(*conv, nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(20):
    for rows in torch.randperm(1000).split(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()

# What is answered shall be wrong at most once in fifty.
posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=1000, batch_size=50, likelihood="classification")
net = ba.calibrate(posterior, (x[held_out], y[held_out]), risk=0.02)
p = net(x[test])
wrong = p.probs.argmax(1) != y[test]
print(f"{p.answered.float().mean():.3f} answered, of these {wrong[p.answered].float().mean():.3f} wrong")
print(f"95 % sets hold the true class {p.set(0.95)[range(397), y[test]].float().mean():.3f} of the time")
print(f"digits: {(p.p_value < 0.05).float().mean():.3f} flagged at p < .05")
for name, images in {"inverted": 1 - x[test], "turned": x[test].mT, "noise": torch.rand(397, 1, 8, 8)}.items():
    q = net(images)
    auroc = roc_auc_score([0] * 397 + [1] * 397, torch.cat([p.novelty, q.novelty]))
    print(f"{name}: {(q.p_value < 0.05).float().mean():.3f} flagged, AUROC {auroc:.3f}")

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "digits.onnx"
    net.save(file, example=x[:1])
    session = onnxruntime.InferenceSession(file)  # on the server: no torch, no bayesadam
    fields = [output.name for output in session.get_outputs()]
    answer = dict(zip(fields, session.run(None, {session.get_inputs()[0].name: x[test].numpy()}), strict=True))
    print(f"from the file: {np.abs(answer['probs'] - p.probs.numpy()).max():.6f} away")

monitor = ba.Monitor(net, alarm=0.01)
for number, image in enumerate(torch.cat([x[test], x[test].flip(2)])):
    if monitor.update(net(image[None]).novelty):
        print(f"drift told at input {number}; digits are upside down from 397 on")
        break
