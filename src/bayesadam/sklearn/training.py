"""Which rows each network is trained on, in which batches, and when it stops; the engine trains them all at once."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesadam.engine.gradients import Slope, loss_and_slope
from bayesadam.engine.network import Network, flatten, forward, initial, member, unflatten
from bayesadam.engine.rules import Adam
from bayesadam.engine.stack import Stack, cosine
from bayesadam.engine.streams import epochs
from bayesadam.errors import SettingError
from bayesadam.likelihoods import Likelihood

_LARGEST_SEED = 2**31 - 1
# Passes over the data that the moving average of the weights reaches back.
_AVERAGED = 5


class Part(NamedTuple):
    """One network's part of the data: the rows it is trained on, those that stop and calibrate it, and its seed."""

    rows: Tensor
    held_out: Tensor
    seed: int


def split(strata: np.ndarray[Any, Any], fraction: float, n_parts: int, random: np.random.RandomState) -> list[Part]:
    """The rows of each network; the first part does not depend on `n_parts`.

    Every stratum, one number per row, gives its share to what is held out, and keeps one row in training. The parts'
    held-out rows overlap as little as possible. At least two rows are held out, or one of two or three. With a fraction
    of 0, or where no stratum has two rows, every part is trained on all rows and held to the same ones.
    """
    n = len(strata)
    order = random.permutation(n)
    order = order[np.argsort(strata[order], kind="stable")]
    spare = np.delete(order, np.unique(strata[order], return_index=True)[1])
    count = min(max(round(fraction * n), min(2, n // 2)), len(spare)) if fraction else 0
    start, seeds = random.uniform(), random.randint(_LARGEST_SEED, size=n_parts)
    if not count:
        everything = torch.arange(n)
        return [Part(everything, everything, int(seed)) for seed in seeds]
    parts = []
    for number, seed in enumerate(seeds):
        # Evenly spaced in an order that has the strata one after the other, and between those of the other parts.
        places = (np.arange(count) + (start + number / n_parts) % 1) * (len(spare) / count)
        held_out = spare[places.astype(int)]
        rows = np.setdiff1d(order, held_out)
        parts.append(Part(torch.from_numpy(rows), torch.from_numpy(held_out), int(seed)))
    return parts


class Trained(NamedTuple):
    """One network after the epoch with its lowest held-out loss, counted from 1: averaged weights and AdamW's v̂."""

    params: dict[str, Tensor]
    second_moment: dict[str, Tensor]
    best_epoch: int
    epochs: int
    batch_size: int


def fit_networks(
    network: Network,
    rule: Adam,
    kind: Likelihood,
    data: tuple[Tensor, Tensor],
    parts: Sequence[Part],
    *,
    lr: float,
    batch_size: int,
    max_epochs: int,
    patience: int | None,
    device: str | torch.device,
    centre: Tensor | None = None,
) -> list[Trained]:
    """One network per part of the data, as it was at its best epoch: averaged weights, v and step alike.

    The average is a moving one over five epochs. `data` are inputs (n, features) in float32, and targets as the
    likelihood's `shaped` has them; `centre` is added to the last layer's initial bias, (outputs,).
    """
    x, y = (tensor.to(device) for tensor in data)
    rows, held_out = (torch.stack([getattr(part, name) for part in parts]).to(device) for name in ("rows", "held_out"))
    index, n, seeds = torch.arange(len(parts), device=device)[:, None], rows.shape[1], [p.seed for p in parts]
    # Equal batches, next to nothing left over: every gradient is a mean of the same number, and v has one meaning.
    size = n // math.ceil(n / batch_size)

    def batch(chosen: Tensor) -> tuple[Tensor, Slope]:
        own = rows[index, chosen]
        targets = y[own]
        return x[own], lambda f: loss_and_slope(lambda g: kind.training_loss(g, targets), f)[1]

    weights = initial(network, seeds, device=device)
    if centre is not None:
        weights[f"layer{len(network.hidden)}.bias"] += centre.to(device)
    steps, falling, patient = n // size, cosine(lr, max_epochs), patience or math.inf
    average = 1 - 1 / (_AVERAGED * steps)
    stack = Stack(network, rule, seeds, partial(map, batch), weights=flatten(weights), device=device, average=average)
    live = {name: stack.tensors()[name] for name in ("mean", "exp_avg_sq")}
    best = {name: tensor.clone() for name, tensor in live.items()}
    lowest = torch.full((len(parts),), math.inf)
    best_epoch, trained = torch.zeros(2, len(parts), dtype=torch.long)
    for epoch, block in enumerate(islice(epochs(n, size, seeds), max_epochs), start=1):
        # The rate of an epoch stays the same from its first step to its last.
        stack.train(block, lambda done: falling((done / steps).floor()))
        with torch.no_grad():
            scores = kind.loss(forward(network, stack.params, x[held_out]), y[held_out]).cpu()
        # A network without patience stays as it was, though it is trained on with the others.
        running = epoch - 1 - best_epoch < patient
        better = running & (scores < lowest)
        trained[running], best_epoch[better], lowest[better] = epoch, epoch, scores[better]
        for name, tensor in live.items():
            best[name][better.to(device)] = tensor[better.to(device)]
        if (epoch - best_epoch >= patient).all():
            break
    if not best_epoch.all():
        raise SettingError(f"the held-out loss was not finite after any of {epoch} epochs: lower lr={lr:g}")
    weights, v = (unflatten(network, best[name].cpu()) for name in ("mean", "exp_avg_sq"))
    trained_networks = []
    for number, at in enumerate(best_epoch.tolist()):
        moment = {name: tensor / (1 - rule.betas[1] ** (steps * at)) for name, tensor in member(v, number).items()}
        trained_networks.append(Trained(member(weights, number), moment, at, int(trained[number]), size))
    return trained_networks
