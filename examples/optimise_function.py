"""The maximum of a noisy function, by networks of one's own under BoTorch: `python examples/optimise_function.py`."""

import math
import warnings

import torch
from botorch.acquisition import qLogNoisyExpectedImprovement
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.botorch import BadamModel

warnings.filterwarnings("ignore", category=UserWarning)  # botorch's, of inputs it would scale itself
torch.manual_seed(0)
bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def branin(x: Tensor) -> Tensor:
    """Its maximum is -0.398, at three places."""
    a, b = 15 * x[:, 0] - 5, 15 * x[:, 1]
    valley = (b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6) ** 2
    return -(valley + 10 * (1 - 1 / (8 * math.pi)) * torch.cos(a) + 10)


def measured(x: Tensor) -> Tensor:
    """With noise of standard deviation 2."""
    return (branin(x) + 2 * torch.randn(len(x)))[:, None]


def learn(x: Tensor, y: Tensor) -> BadamModel:
    """Four small networks, trained as one likes, and their posteriors as a model of BoTorch's."""
    standard = Standardize(m=1)
    target, _ = standard.train()(y)
    members = []
    for _ in range(4):
        network = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)).double()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
        for _ in range(300):
            optimizer.zero_grad()
            nn.functional.mse_loss(network(x), target).backward()
            optimizer.step()
            schedule.step()
        q = ba.Posterior.from_optimizer(network, optimizer, len(x), likelihood="regression", prior_precision=10.0)
        members.append(q.replace(noise_variance=float((2 / y.std()) ** 2)))
    return BadamModel(ba.Mixture(members), outcome_transform=standard.eval())


x = torch.rand(10, 2, dtype=torch.float64)
y = measured(x)
print(f"best of 10 random points: {branin(x).max():.2f}")
for _ in range(8):
    # Two new points at a time, where the posterior of the networks expects most of them.
    model = learn(x, y)
    acquisition = qLogNoisyExpectedImprovement(model, x, prune_baseline=True)
    new, _ = optimize_acqf(acquisition, bounds, q=2, num_restarts=4, raw_samples=64, options={"maxiter": 30})
    x, y = torch.cat([x, new]), torch.cat([y, measured(new)])
model = learn(x, y)
best = x[model.posterior(x).mean.argmax()]
print(
    f"after {len(x)} evaluations the model's best point has the value {branin(best[None])[0]:.2f}, the maximum is -0.40"
)
