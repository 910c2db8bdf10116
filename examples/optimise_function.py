"""The maximum of a noisy function, by a neural surrogate under BoTorch: `python examples/optimise_function.py`."""

import math
import warnings

import torch
from botorch.acquisition import qLogNoisyExpectedImprovement
from botorch.optim import optimize_acqf
from torch import Tensor

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


x = torch.rand(10, 2, dtype=torch.float64)
y = measured(x)
print(f"best of 10 random points: {branin(x).max():.2f}")
model = BadamModel.fit(x, y)
for _ in range(8):
    # Two new points at a time, where the posterior of the networks expects most of them.
    acquisition = qLogNoisyExpectedImprovement(model, x, prune_baseline=True)
    new, _ = optimize_acqf(acquisition, bounds, q=2, num_restarts=4, raw_samples=64, options={"maxiter": 30})
    values = measured(new)
    model = model.condition_on_observations(new, values, retrain=True)
    x, y = torch.cat([x, new]), torch.cat([y, values])
best = x[model.posterior(x).mean.argmax()]
print(
    f"after {len(x)} evaluations the model's best point has the value {branin(best[None])[0]:.2f}, the maximum is -0.40"
)
