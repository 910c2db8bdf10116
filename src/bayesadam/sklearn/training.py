"""Which rows each network is trained on, in which batches, and when it stops; the engine trains them all at once."""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesadam._progress import Bar
from bayesadam.engine.gradients import Slope, loss_and_slope
from bayesadam.engine.network import Network, flatten, forward, initial, member, unflatten
from bayesadam.engine.rules import Adam, optimizer_state_dict
from bayesadam.engine.stack import Stack, constant, cosine, train
from bayesadam.engine.streams import epochs
from bayesadam.errors import DivergedError
from bayesadam.likelihoods import Likelihood

Schedule = Literal["cosine", "constant"]
_LARGEST_SEED = 2**31 - 1


class Part(NamedTuple):
    """One network's part of the data: the rows it is trained on, those that stop and calibrate it, and its seed.

    All parts have the same number of rows.
    """

    rows: Tensor
    held_out: Tensor
    seed: int


def split(strata: np.ndarray[Any, Any], fraction: float, n_parts: int, random: Any) -> list[Part]:
    """The rows of each network; the first part does not depend on `n_parts`.

    Every stratum gives its share to what is held out, and always keeps one row in training. The parts' held-out rows
    overlap as little as possible: not at all where all of them together are no more than the other rows.

    Args:
        strata: one number per row: its class, or one and the same for all.
        fraction: share of the rows to hold out; two rows at least, or one of two or three. With 0, or where no stratum
            has two rows, every part is trained on all rows and held to the same ones.
        n_parts: the number of networks.
        random: a RandomState.
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
    """One network as it was after the epoch with its lowest held-out loss.

    Attributes:
        params: its weights by name, on the CPU.
        state: the state dict of AdamW after the same step, on the CPU.
        best_epoch: that epoch, from 1.
        epochs: how many were trained.
        batch_size: examples behind every gradient.
    """

    params: dict[str, Tensor]
    state: dict[str, Any]
    best_epoch: int
    epochs: int
    batch_size: int


def fit_networks(
    network: Network,
    rule: Adam,
    kind: Likelihood[Any],
    data: tuple[Tensor, Tensor],
    parts: Sequence[Part],
    *,
    lr: float,
    schedule: Schedule,
    batch_size: int,
    max_epochs: int,
    patience: int | None,
    device: str | torch.device,
    centre: Tensor | None = None,
    verbose: bool = False,
) -> list[Trained]:
    """One network per part of the data, as it was at its best epoch: weights, v and step alike.

    Args:
        network: their shape.
        rule: AdamW.
        kind: the likelihood whose loss they are trained on.
        data: inputs (n, features) in float32, and targets as the likelihood's `shaped` has them.
        lr: the learning rate at the start.
        schedule: `"constant"`, or `"cosine"`, down to 0 at the last epoch.
        batch_size: the most examples behind one gradient.
        patience: epochs without a lower held-out loss after which a network is done; None for no such end.
        centre: what is added to the last layer's initial bias, (outputs,).
        verbose: whether a bar counts the epochs on a terminal, from two seconds on.

    Raises:
        DivergedError: a network's held-out loss was never finite.
    """
    x, y = (tensor.to(device) for tensor in data)
    rows, held_out = (torch.stack([getattr(part, name) for part in parts]).to(device) for name in ("rows", "held_out"))
    index, n, seeds = torch.arange(len(parts), device=device)[:, None], rows.shape[1], [p.seed for p in parts]
    size = even_batch_size(n, batch_size)

    def batch(chosen: Tensor) -> tuple[Tensor, Slope]:
        own = rows[index, chosen]
        targets = y[own]
        return x[own], lambda f: loss_and_slope(lambda g: kind.loss(g, targets), f)[1]

    weights = initial(network, seeds, device=device)
    if centre is not None:
        weights[f"layer{len(network.hidden)}.bias"] += centre.to(device)
    stack = Stack(network, rule, seeds, batch, weights=flatten(weights), device=device)
    best = _Best(stack, patience)

    def proceed() -> bool:
        if verbose:
            bar.step()
        with torch.no_grad():
            scores = kind.loss(forward(network, stack.params, x[held_out]), y[held_out])
        return best.update(scores.cpu())

    steps = n // size
    # The rate of an epoch stays the same from its first step to its last.
    falling = cosine(lr, max_epochs)
    rate = constant(lr) if schedule == "constant" else lambda done: falling((done / steps).floor())
    with Bar("fit", max_epochs) as bar:
        train(stack, islice(epochs(n, size, seeds), max_epochs), rate, proceed=proceed)
    if not best.epoch.all():
        raise DivergedError(f"the held-out loss was not finite after any of {best.now} epochs: lower lr={lr:g}")
    found = []
    for number, (epoch, trained) in enumerate(zip(best.epoch.tolist(), best.epochs.tolist(), strict=True)):
        tensors = {**best.tensors, "step": torch.tensor([float(steps * epoch)])}
        state = optimizer_state_dict(network, tensors, number, rule)
        params = member(unflatten(network, best.tensors["weights"].cpu()), number)
        found.append(Trained(params, state, epoch, trained, size))
    return found


def even_batch_size(n: int, most: int) -> int:
    """The batch size that cuts n examples into equal batches of at most `most`, next to none left over.

    Every gradient is then a mean of the same number of examples, and v has one meaning.

    >>> even_batch_size(100, 32), even_batch_size(10, 32)
    (25, 10)
    """
    return n // math.ceil(n / most)


class _Best:
    """Each network's memory after its best epoch so far; only `update` changes it."""

    def __init__(self, stack: Stack, patience: int | None) -> None:
        self._live = {name: stack.tensors()[name] for name in ("weights", "exp_avg", "exp_avg_sq")}
        self.tensors = {name: tensor.clone() for name, tensor in self._live.items()}
        self.patience = math.inf if patience is None else patience
        self.now = 0
        self.score = torch.full((len(stack.seeds),), math.inf)
        self.epoch, self.epochs = (torch.zeros(len(stack.seeds), dtype=torch.long) for _ in range(2))

    def update(self, scores: Tensor) -> bool:
        """Take note of the next epoch; whether any network should train on.

        One that has lost its patience stays as it is, though it is trained on with the others.
        """
        running = self.now - self.epoch < self.patience
        self.now += 1
        better = running & (scores < self.score)
        self.epochs[running], self.epoch[better] = self.now, self.now
        self.score[better] = scores[better]
        if better.any():
            rows = better.to(self._live["weights"].device)
            for name, tensor in self._live.items():
                self.tensors[name][rows] = tensor[rows]
        return bool((self.now - self.epoch < self.patience).any())
