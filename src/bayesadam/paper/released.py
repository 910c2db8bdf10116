"""What the authors' released code runs where it differs from the paper's text: rows of their own in both figures."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bayesadam.engine.network import Network, linear, member
from bayesadam.engine.streams import Streams
from bayesadam.paper.methods import Fitted, Problem, with_noise
from bayesadam.weights.draws import stream_seed
from bayesadam.weights.posterior import Posterior

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
    """How a network of the released code is trained.

    Attributes:
        start: the first weights and biases of a shape.
        longer: how many times the paper's epochs.
        weight_decay: λ of the penalty (λ/2)|θ|², whose gradient Adam squares too.
        dropout: the rate at which pre-activations are set to 0.
        corrected: whether Adam corrects the bias of its moments.
        one_order: whether every epoch has the same batches; else every batch is cut from a permutation of its own.
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
    sources = [torch.Generator().manual_seed(stream_seed(seed, "batches")) for seed in seeds]
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
    sources = [torch.Generator().manual_seed(stream_seed(seed, "initial")) for seed in seeds]
    shapes = network.shapes().items()
    started = {name: torch.stack([recipe.start(shape, each) for each in sources]) for name, shape in shapes}
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
        losses = data.kind.loss(_outputs(params, data.x[at], recipe, streams), data.y[at])
        torch.autograd.backward(losses.sum())
        optimizer.step()
    moments = {name: optimizer.state[tensor]["exp_avg_sq"] for name, tensor in params.items()}
    return network, {name: tensor.detach() for name, tensor in params.items()}, moments


def posteriors(problem: Problem, recipe: Recipe, precision: float) -> list[Posterior]:
    """N(θ, 1/(c √v)) of every seed's network; c is what the code multiplies √v by."""
    network, weights, moments = trained(problem, recipe)
    found = []
    for index in range(len(problem.seeds)):
        mean, moment = ({name: t.cpu() for name, t in member(part, index).items()} for part in (weights, moments))
        variance = {name: 1 / (precision * t.sqrt()).clamp(min=1e-30) for name, t in moment.items()}
        found.append(Posterior.from_moments(network.build(mean), mean, variance, precision))
    return found


def fit_script(problem: Problem) -> Fitted:
    """The released script of Figure 1: the covariance 1/(N √v) is divided by N once more, and there is no prior."""
    return with_noise(problem, posteriors(problem, SCRIPT, float(len(problem.data)) ** 2))


def fit_letter(problem: Problem) -> Fitted:
    """The paper's text to the letter: the covariance 1/(N √v), N = 200, and no prior."""
    states = map(problem.optimum.state_dict, range(len(problem.seeds)))
    pairs = zip(problem.networks(), states, strict=True)
    given: Any = {"n_data": len(problem.data), "prior_precision": 0.0}
    return with_noise(problem, [Posterior.from_state_dict(*pair, **given) for pair in pairs])
