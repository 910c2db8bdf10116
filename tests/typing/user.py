"""What a user with `mypy --strict` writes: it must pass without a cast and without an ignore. `test_typing.py` runs
mypy on it.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesadam as ba
from bayesadam.bandits import Agent, Decision, make_agent
from bayesadam.sklearn import BadamClassifier, BadamRegressor


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    held_out: DataLoader[tuple[Tensor, ...]] = DataLoader(TensorDataset(x, y), batch_size=50)
    posterior: ba.Posterior = ba.Posterior.from_optimizer(
        model, optimizer, n_data=100, batch_size=50, likelihood="classification"
    )
    net: ba.Calibrated = ba.calibrate(posterior, held_out, risk=0.05)
    p = net(x)
    sets: Tensor = p.set(0.95)
    monitor = ba.Monitor(net, alarm=0.01)
    if not monitor.update(p):
        net.save("net.onnx", example=x[:2])
    return p.novelty, p.doubt + sets.sum(dim=-1)


def regress(posterior: ba.Posterior, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    posterior = posterior.with_inputs(x).tune((x, y), method="evidence")
    p = posterior.predict(x, covariance=True)
    low, high = ba.calibrate(posterior, (x, y))(x).interval(0.9)
    inside: Tensor = (low < y) & (y < high)
    return float(p.log_prob(y).mean()), inside.float() * p.stddev


def prune(model: nn.Module, posterior: ba.Posterior, folder: Path) -> dict[str, Tensor]:
    masks: dict[str, Tensor] = ba.compress.masks(posterior, fraction=0.75)
    ba.compress.apply_masks(model, masks)
    posterior = ba.prune(posterior, 0.75)
    posterior.save(folder / "posterior.safetensors")
    loaded = ba.Posterior.load(folder / "posterior.safetensors", model)
    with loaded.sampled(generator=torch.Generator().manual_seed(0)):
        model(torch.zeros(1, 4))
    return loaded.sample(8)


def decide(context: np.ndarray[tuple[int], np.dtype[np.float64]], path: Path) -> float:
    agent = make_agent("hybrid", n_features=4, n_arms=3)
    arm: int = agent.act(context)
    agent.update(context, arm, 1.0)
    decision: Decision = agent.decide(context)
    agent.reward(decision.id, 0.0)
    agent.save(path)
    agent = Agent.load(path)
    return decision.probability


def estimate(
    x: np.ndarray[tuple[int, int], np.dtype[np.float64]], y: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> None:
    regressor = BadamRegressor(hidden=(20,), random_state=0).fit(x, y)
    mean, std = regressor.predict(x, return_std=True)
    print(mean + std)
    classifier = BadamClassifier(random_state=0).fit(x, y > 0)
    print(classifier.predict_proba(x).sum())
