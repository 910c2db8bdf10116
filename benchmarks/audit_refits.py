"""What leaving an example out really does: a small network trained again without it, many at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import bayesadam as ba

RATE, BETAS, EPS = 3e-3, (0.9, 0.999), 1e-8
BATCH = 50


@dataclass(frozen=True, eq=False)
class Refits:
    """A network of all examples, the optimiser that trained it, and how far its outputs move without each of some
    examples.

    Attributes:
        left_out: the examples' numbers, (k,).
        change: f(x_i) without example i less f(x_i) with it, (k, classes).
    """

    model: nn.Module
    optimizer: torch.optim.Adam
    left_out: Tensor
    change: Tensor


def refits(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    count: int,
    epochs: int,
    prior_precision: float,
    seed: int,
    at_once: int = 101,
) -> Refits:
    """Train the network once with all examples and `count` times without one, from the same weights, by the same
    batches.

    The loss is the mean cross-entropy and (δ/2N)|θ|²; a cosine takes Adam's rate to 0. An example left out counts as 0
    in its batches, whose size stays: nothing else differs.
    """
    x, y = data
    generator = torch.Generator().manual_seed(seed)
    left_out = torch.randperm(len(x), generator=generator)[:count].to(x.device)
    orders = [torch.randperm(len(x), generator=generator).to(x.device) for _ in range(epochs)]
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # No example has the number −1: the first copy is trained with all.
    parts = torch.cat([left_out.new_full((1,), -1), left_out]).split(at_once)
    outputs, first = [], None
    for missing in parts:
        trained, state = _trained(model, start, x, y, orders, missing, prior_precision)
        if first is None:
            first = {name: [each[name][0] for each in (trained, *state)] for name in start}
        rows = missing.clamp(min=0)
        outputs.append(vmap(lambda params, one: functional_call(model, params, (one[None],))[0])(trained, x[rows]))
    assert first is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=BETAS, eps=EPS)
    steps = float(epochs * (len(x) // BATCH))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weights, mean, square = first[name]
            parameter.copy_(weights)
            optimizer.state[parameter] = {"step": torch.tensor(steps), "exp_avg": mean, "exp_avg_sq": square}
        before = model(x[left_out])
    return Refits(model, optimizer, left_out, torch.cat(outputs)[1:] - before)


def _trained(
    model: nn.Module,
    start: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    orders: list[Tensor],
    missing: Tensor,
    prior_precision: float,
) -> tuple[dict[str, Tensor], tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Weights and Adam's two moments of one copy for each number in `missing`, (copies, *shape) by name."""
    decay, steps = prior_precision / len(x), len(orders) * (len(x) // BATCH)

    def loss(params: dict[str, Tensor], rows: Tensor, without: Tensor) -> Tensor:
        losses = F.cross_entropy(functional_call(model, params, (x[rows],)), y[rows], reduction="none")
        return (losses * (rows != without)).mean()

    gradients = vmap(grad(loss), in_dims=(0, None, 0))
    params = {name: theta.expand(len(missing), *theta.shape).clone() for name, theta in start.items()}
    mean, square = ({name: torch.zeros_like(theta) for name, theta in params.items()} for _ in range(2))
    done = 0
    for order in orders:
        for rows in order[: len(x) // BATCH * BATCH].split(BATCH):
            found = gradients(params, rows, missing)
            done += 1
            rate = 0.5 * RATE * (1 + torch.cos(torch.tensor(torch.pi * (done - 1) / steps)).item())
            for name, theta in params.items():
                gradient = found[name].add_(theta, alpha=decay)
                mean[name].lerp_(gradient, 1 - BETAS[0])
                square[name].lerp_(gradient.square_(), 1 - BETAS[1])
                slow = (square[name] / (1 - BETAS[1] ** done)).sqrt_().add_(EPS)
                theta.sub_(mean[name] / slow, alpha=rate / (1 - BETAS[0] ** done))
    return params, (mean, square)


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of ranks."""
    ranks = torch.stack([t.double().argsort().argsort().double() for t in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def batches(data: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    """Data in order, in batches."""
    return list(zip(*(part.split(size) for part in data), strict=True))


def posteriors(found: Refits, data: tuple[Tensor, Tensor], prior_precision: float) -> dict[str, ba.Posterior]:
    """The diagonal of Adam's state, and a Kronecker one of all batches' gradients, at p = 1 and the δ of training."""
    n = len(data[0])
    recorder = ba.Recorder.from_batches(found.model, batches(data, BATCH), F.cross_entropy, keep=min(50, n // BATCH))
    diagonal = ba.Posterior.from_optimizer(
        found.model, found.optimizer, n, batch_size=BATCH, power=1.0, prior_precision=prior_precision
    )
    kronecker = ba.Posterior.from_recorder(found.model, recorder, n, prior_precision=prior_precision)
    return {"diagonal": diagonal, "Kronecker": kronecker}
