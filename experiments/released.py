"""What the authors' released code runs where it differs from the paper's text: rows of their own in both figures."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from bayesadam import Posterior
from bayesadam.engine.network import Network, linear, member
from bayesadam.engine.streams import Streams
from experiments.baselines import Predictor, Problem, read, with_noise
from experiments.running import generator

_BETAS = (0.9, 0.999)
Weights = dict[str, Tensor]


def glorot(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """U(±√(6/(fan-in + fan-out))); a bias counts its length as both."""
    fans = shape if len(shape) == 2 else 2 * shape
    return (2 * torch.rand(shape, generator=source) - 1) * math.sqrt(6 / sum(fans))


def narrow(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """N(0, 0.1²)."""
    return 0.1 * torch.randn(shape, generator=source)


@dataclass(frozen=True)
class Recipe:
    """How a network of the released code is trained, for `longer` times the paper's epochs.

    `start` gives the first weights and biases of a shape; `weight_decay` is λ of the penalty (λ/2)|θ|², whose gradient
    Adam squares too, `dropout` the rate at which pre-activations are set to 0. Adam may not have `corrected` the bias
    of its moments, and all epochs may have the same batches, in `one_order`; else each is cut from its own permutation.
    """

    activation: str
    start: Callable[[tuple[int, ...], torch.Generator], Tensor]
    longer: int = 1
    weight_decay: float = 0.0
    dropout: float = 0.0
    corrected: bool = True
    one_order: bool = True


SCRIPT = Recipe("tanh", glorot, weight_decay=1e-4, corrected=False, one_order=False)
NOTEBOOK = Recipe("sigmoid", narrow, longer=2, dropout=0.2)
_BATCH, _LR = 128, 1e-3


def _batches(n: int, seeds: Sequence[int], epochs: int, *, one_order: bool) -> Iterator[Tensor]:
    """Rows (s, b) of every step; the last batch of an epoch has what is left."""
    sources = [generator(seed, "batches") for seed in seeds]
    ends = [*range(0, n, _BATCH), n]
    order = torch.empty(0)
    for _ in range(epochs):
        for first, last in pairwise(ends):
            if not (one_order and len(order)):
                order = torch.stack([torch.randperm(n, generator=source) for source in sources])
            yield order[:, first:last]


def _outputs(params: Weights, x: Tensor, recipe: Recipe, streams: Streams) -> Tensor:
    h, last = x, len(params) // 2 - 1
    for number in range(last + 1):
        h = linear(h, params[f"layer{number}.weight"], params[f"layer{number}.bias"])
        if number < last:
            if recipe.dropout:
                h = h * (streams.uniform(*h.shape[1:]) >= recipe.dropout) / (1 - recipe.dropout)
            h = getattr(torch, recipe.activation)(h)
    return h


def trained(problem: Problem, recipe: Recipe) -> tuple[Network, Weights, Weights]:
    """The network, and the weights and Adam's uncorrected v of every seed, (s, *shape) by name.

    Adam without correction takes steps α m/(√v + ε): torch's, with the rate α (1 − β₁ᵗ)/√(1 − β₂ᵗ).
    """
    data, seeds, device = problem.data, problem.seeds, problem.data.x.device
    network = replace(problem.network, activation=recipe.activation, dropout=0.0)
    sources = [generator(seed, "initial") for seed in seeds]
    shapes = network.shapes().items()
    started = {name: torch.stack([recipe.start(shape, source) for source in sources]) for name, shape in shapes}
    params = {name: tensor.to(device).requires_grad_() for name, tensor in started.items()}
    optimizer = torch.optim.Adam(params.values(), lr=_LR, betas=_BETAS, weight_decay=recipe.weight_decay, fused=True)
    streams, index = Streams(seeds, "dropout", device), torch.arange(len(seeds), device=device)[:, None]
    epochs = recipe.longer * problem.training.epochs
    for step, rows in enumerate(_batches(len(data), seeds, epochs, one_order=recipe.one_order), start=1):
        if not recipe.corrected:
            first, second = (1 - beta**step for beta in _BETAS)
            optimizer.param_groups[0]["lr"] = _LR * first / math.sqrt(second)
        at = index, rows.to(device)
        optimizer.zero_grad()
        losses = data.loss(_outputs(params, data.x[at], recipe, streams), data.y[at])
        torch.autograd.backward(losses.sum())
        optimizer.step()
    moments = {name: optimizer.state[tensor]["exp_avg_sq"] for name, tensor in params.items()}
    return network, {name: tensor.detach() for name, tensor in params.items()}, moments


def fit_script(problem: Problem) -> list[Predictor]:
    """The released script of Figure 1: the covariance 1/(N √v) is divided by N once more, and there is no prior."""
    network, weights, moments = trained(problem, SCRIPT)
    n, posteriors = len(problem.data), []
    for index in range(len(problem.seeds)):
        mean, moment = member(weights, index), member(moments, index)
        variance = {name: 1 / (n**2 * v.sqrt()).clamp(min=1e-30) for name, v in moment.items()}
        posteriors.append(Posterior.from_moments(network.build(mean), mean, variance, n**2, "regression"))
    return with_noise(problem, posteriors)


def fit_letter(problem: Problem) -> list[Predictor]:
    """The paper's text to the letter: the covariance 1/(N √v), N = 200, and no prior."""
    return with_noise(problem, read(problem, prior_precision=0.0))
