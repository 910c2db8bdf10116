r"""What held-out data may be that they should not: training data, too few, on another scale, of other inputs.

Training data are known by the last layer. Training ends where the gradient of the training loss vanishes. That layer's
is a sum over examples, of the slope r = ∂loss/∂f times the inputs a of the layer. Of n examples that training never saw
the sum is at least as large as chance makes it, whatever the network: with z_i the gradients along the d strongest of
their directions, each scaled to a mean square of 1,

.. math::
    s = \tfrac1n \bigl|\textstyle\sum_i z_i\bigr|^2 \sim \chi^2_d

where they are 0 on average, and larger where they are not. Far less than χ² allows is the mark of training data, given
whole, after training that has come to rest: a learning rate that fell, or many epochs over little data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesadam._warnings import warn
from bayesadam.engine.gradients import loss_and_slope
from bayesadam.likelihoods import Likelihood
from bayesadam.likelihoods.conformal import chance_of_novel
from bayesadam.predict.leverage import FEWEST

# d, and how many directions of the slopes and of the inputs are looked at, by all their products.
_DIRECTIONS, _WIDTH = 8, 10
# None of chance: of 3858 held-out samples, of 78 networks, one had less than 1e-3 and none so little.
_UNLIKELY = 1e-4
# A batch is other data if so large a share of it has p-values so low, by so small a chance.
_MANY, _RARE, _NOT_BY_CHANCE = 0.2, 0.01, 1e-6
# A network is out of place if it is so many times worse than a guess, and at its best temperature not better than this
# share of one, or so hot; and where it is worse than a guess at all and hotter than absurd.
_WORSE, _NO_BETTER, _TOO_HOT, _ABSURD = 2.0, 0.98, 6.0, 30.0
# A regression is out of place if its mean squared error is so many times that of the targets' mean, and their
# correlation shows that it was trained for them.
_FAR_OFF, _FOLLOWS = 4.0, 0.3


def warn_of_training_data(kind: Likelihood, f: Tensor, y: Tensor, last: Tensor, n_data: float | None) -> None:
    """Warn of examples whose gradients balance, given the inputs of the last layer, (n, width)."""
    chance = balance(kind, f, y, last)
    if chance < _UNLIKELY:
        same = ", as many as n_data," if len(y) == n_data else ""
        warn(
            "these look like the training data, not held-out ones: calibrate on examples that training never saw. "
            f"Over the {len(y)} examples{same} the gradient of the loss adds up to less than chance would leave of "
            f"examples that were not trained on (probability {chance:.1g})"
        )


def warn_of_number(targets: int) -> None:
    """Warn of too few examples."""
    if targets < FEWEST:
        warn(
            f"{targets} held-out targets are too few to calibrate on: a fit to them may be chance. Hold out {FEWEST} "
            "at the least, better some hundreds"
        )


def warn_of_labels(y: Tensor, alone: float, best: float, temperature: float) -> None:
    """Warn of classes that the network predicts worse than a guess, given its NLL alone and at its best temperature."""
    guess = math.log(max(int(y.max()) + 1, 2))
    absurd = temperature > _ABSURD and alone > guess
    if absurd or (alone > _WORSE * guess and (best > _NO_BETTER * guess or temperature > _TOO_HOT)):
        warn(
            f"the network is worse on the held-out data than a guess among their classes (negative log-likelihood "
            f"{alone:.3g} against {guess:.3g}, {best:.3g} at its best temperature): are the labels those of these "
            "inputs, and are the inputs scaled as in training?"
        )


def warn_of_scale(f: Tensor, y: Tensor) -> None:
    """Warn of numbers that the network follows from afar."""
    centred, spread = f - f.mean(dim=0), y - y.mean(dim=0)
    error, variance = (y - f).square().mean(), spread.square().mean()
    follows = (centred * spread).mean().square() > _FOLLOWS * centred.square().mean() * variance
    if error > _FAR_OFF * variance and follows:
        warn(
            "scale the targets as in training: the network's outputs follow the held-out ones, but are farther "
            f"from them than their mean is (mean squared error {error:.3g} against {variance:.3g})"
        )


def many_novel(p_value: Tensor, n: int) -> str | None:
    """Words on a batch of which far more is novel than chance allows, given n held-out examples; None of any other."""
    rank = max(1, math.floor(_RARE * (n + 1) + 1e-9))
    # A p-value of k/(n + 1) is that of rank k.
    count, of = int((p_value * (n + 1) < rank + 0.5).sum()), len(p_value)
    if of < FEWEST or count < _MANY * of or chance_of_novel(count, of, rank, n) > _NOT_BY_CHANCE:
        return None
    return (
        f"these are other data than the held-out ones: {count} of {of} inputs have p_value <= {rank / (n + 1):.2g}, "
        "far more than chance allows. Intervals, p-values and what is answered hold on data like the held-out alone, "
        "and errors may be many times the error bars. Calibrate on data like these, or leave inputs of a low "
        "p_value to others; error bars of posterior.with_inputs(x).predict(...) widen with the distance from x"
    )


def balance(kind: Likelihood, outputs: Tensor, targets: Tensor, inputs: Tensor) -> float:
    """P(χ²_d ≤ s): how likely examples that were not trained on are to balance as well as these do.

    `outputs` are (n, outputs), `inputs` those of the last layer, (n, width). 1 where slopes are not finite.
    """
    targets = kind.shaped(targets, outputs)
    _, slope = loss_and_slope(lambda f: kind.loss(f, targets[None]), outputs[None])
    # Of each other's size, whatever the loss, so that their squares are numbers too.
    slope, inputs = (x / x.abs().amax().clamp(min=torch.finfo(x.dtype).tiny) for x in (slope[0], inputs))
    if not bool(slope.isfinite().all() & inputs.isfinite().all()):
        return 1.0
    r, a = (_strongest(x) for x in (slope, torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)))
    gradients = (r[:, :, None] * a[:, None, :]).flatten(1)
    energy, directions = torch.linalg.eigh(gradients.T @ gradients)
    kept = (energy > 1e-9 * energy[-1]).nonzero().flatten()[-_DIRECTIONS:]
    if not len(kept):
        return 1.0
    s = ((gradients.sum(dim=0) @ directions[:, kept]).square() / energy[kept]).sum()
    return float(torch.special.gammainc(torch.tensor(len(kept) / 2, dtype=s.dtype), s / 2))


def _strongest(x: Tensor) -> Tensor:
    """The rows of a matrix along the few directions in which they are longest, by four rounds of the power method."""
    start = torch.randn(x.shape[1], min(_WIDTH, x.shape[1]), generator=torch.Generator().manual_seed(0))
    directions = start.to(x)
    for _ in range(4):
        directions = torch.linalg.qr(x.T @ (x @ directions)).Q
    return (x @ directions).double().cpu()
