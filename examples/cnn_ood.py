"""A CNN with calibrated probabilities that flags inputs unlike its training data: `python examples/cnn_ood.py`."""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesadam as ba

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images))
train, held_out, test = order[:1000], order[1000:1300], order[1300:1550]
train_loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=50, shuffle=True)
held_out_loader = DataLoader(TensorDataset(images[held_out], labels[held_out]), batch_size=200)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(30):
    for x, y in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=len(train), likelihood="classification")
net = ba.calibrate(posterior, held_out_loader)

p = net(images[test])
network = model(images[test]).softmax(dim=-1).detach()
right = p.probs.argmax(dim=-1) == labels[test]
print(f"test accuracy {right.float().mean():.3f}")
for name, probs in (("network alone", network), ("calibrated", p.probs)):
    print(
        f"{name}: NLL {nn.functional.nll_loss(probs.log(), labels[test]):.3f}, ECE "
        f"{ba.scores.ece(probs, labels[test]):.3f}"
    )
sets = p.set(0.95)
print(
    f"95 % prediction sets: hold the true class {sets[range(len(test)), labels[test]].float().mean():.3f} of the time"
)

unlike = {
    "inverted": 1 - images[test],
    "turned": images[test].rot90(1, (2, 3)),
    "noise": torch.rand(len(test), 1, 8, 8),
}
print(f"familiar: {(p.p_value < 0.05).float().mean():.3f} flagged at p < .05")
for name, inputs in unlike.items():
    q = net(inputs)
    truth = [0] * len(test) + [1] * len(test)
    auroc = roc_auc_score(truth, torch.cat([p.novelty, q.novelty]))
    other = model(inputs).softmax(dim=-1).detach()
    entropy = torch.cat([-(probs * probs.clamp_min(1e-30).log()).sum(dim=-1) for probs in (network, other)])
    flagged = (q.p_value < 0.05).float().mean()
    print(
        f"{name}: {flagged:.3f} flagged, AUROC {auroc:.3f}; the network's entropy has "
        f"{roc_auc_score(truth, entropy):.3f}"
    )
