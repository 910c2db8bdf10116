"""Empirical Bayes: the prior that earlier problems of one family have in common."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bayesadam.bandits.linear import Statistics, normal_equations
from bayesadam.bandits.log import Log, read_log
from bayesadam.bandits.prior import Prior, features
from bayesadam.bandits.problems import BanditProblem
from bayesadam.bandits.problems import problem as named_problem
from bayesadam.engine.network import ACTIVATIONS, Network, initial
from bayesadam.errors import MatchError, SettingError
from bayesadam.gaussian.noise import stream_seed

Source = BanditProblem | Log | str | os.PathLike[str]
Arms = Literal["same", "exchangeable"]
ARMS = ("same", "exchangeable")
_RATE, _BATCH = 2e-3, 2400
# The least variance in the loss, over that of the rewards, and the power of it that weighs an example: at 0 the loss is the
# likelihood, which may give up what is hard, at 1 all examples count alike, and what jumps blurs all else.
_FLOOR, _POWER = 1e-5, 0.5
# The least variance of the noise, over that of the rewards.
_LEAST_NOISE = 1e-8
# a₀ of the noise lies between: how much its size may differ from problem to problem.
_LEAST_SHAPE, _MOST_SHAPE = 2.0, 100.0
# Of these shares of the covariance between problems one is that around each, which has a ridge of the last number besides.
_WIDTHS, _RIDGE = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-6), 1e-3


def fit_prior(
    sources: Sequence[Source],
    *,
    arms: Arms = "same",
    hidden: tuple[int, ...] = (100, 100, 100),
    activation: str = "relu",
    rounds: int = 1000,
    steps: int = 4000,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Prior:
    """A prior for the hybrid agent out of earlier problems of the same family: `make_agent(..., prior=prior)`.

    A network with one last layer per problem is trained on all of them; what they share is its hidden layers, whose units
    are the features φ. The last layers, m_p, are the components of the prior: a new problem's weights are N(m_p, σ² C), with
    every earlier problem p as likely. σ²C is a share of the covariance between the m_p, the one with which each problem is best
    predicted from half of its rows and the others: small where problems come in kinds, 1 where they are one cloud. The errors
    of these predictions give the prior of σ².

    >>> from bayesadam.bandits import make_agent, wheel
    >>> prior = fit_prior([wheel(delta) for delta in (0.3, 0.6, 0.9)], hidden=(20,), rounds=100, steps=100)
    >>> agent = make_agent("hybrid", n_features=2, n_arms=5, prior=prior)

    Args:
        sources: problems, of which every arm's reward is seen, their names, logs, or paths of logs, of which rewards that came.
        arms: `"same"` where an arm means the same in every problem; `"exchangeable"` where arms are permuted, or their
            numbers differ: any arm may be like any earlier one.
        hidden: widths of the network's hidden layers.
        activation: as in the settings of agents.
        rounds: of every problem; logs are taken whole.
        steps: mini-batches of training.
        seed: of the rounds and the training.
        device: to fit it on; the prior itself is on the CPU.
    """
    if arms not in ARMS:
        raise SettingError(f"arms must be one of {', '.join(ARMS)}, got {arms!r}")
    if not hidden or activation not in ACTIVATIONS:
        raise SettingError(f"a network with hidden layers is needed, got hidden={hidden!r}, activation={activation!r}")
    if len(sources) < 2:
        raise SettingError(f"a prior is what problems have in common: give two or more, got {len(sources)}")
    seen = [_seen(source, rounds, stream_seed(seed, "prior", number), device) for number, source in enumerate(sources)]
    widths, numbers = {one.contexts.shape[1] for one in seen}, {one.rewards.shape[1] for one in seen}
    if len(widths) > 1:
        raise MatchError(f"the sources have contexts of {sorted(widths)} numbers: they must agree")
    if len(numbers) > 1 and arms == "same":
        raise MatchError(f"the sources have {sorted(numbers)} arms: they must agree, or be arms='exchangeable'")
    if arms == "exchangeable":
        seen = [part for one in seen for part in _arm_by_arm(one)]
    counts = torch.stack([one.there().sum(dim=0) for one in seen]).double()
    if not ((counts > 0).sum(dim=0) > 1).all():
        raise MatchError("every arm must be seen in two problems or more: give more, or arms='exchangeable'")
    network = Network(seen[0].contexts.shape[1], hidden, 1, activation, 0.0)
    params, heads, noises = _trained(network, seen, steps, seed)
    there = (counts > 0).unsqueeze(2)
    heads = torch.where(there, heads, torch.where(there, heads, 0).sum(dim=0) / there.sum(dim=0))
    data = _Features.of(network, params, seen, noises)
    own = torch.stack([one.errors(head).square().nanmean() for one, head in zip(data, heads, strict=True)])
    least = torch.stack([_LEAST_NOISE * one.rewards.square().nanmean() for one in data]).mean()
    spread, noise = _spread(heads), torch.maximum(own.mean(), least.clamp(min=torch.finfo(own.dtype).tiny))
    tried = {width: _left_out(data, heads, width * spread, noise) for width in _WIDTHS}
    width = min(tried, key=lambda one: float(tried[one][0]))
    shape, scale = _inverse_gamma(tried[width][1].nan_to_num(nan=float(noise)).clamp(min=noise))
    return Prior(network, params, heads, width * spread * (shape / scale), shape, scale).to(torch.device("cpu"))


# --- what was seen --------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """One problem: contexts (n, features), and rewards (n, arms), NaN where nobody saw them."""

    contexts: Tensor
    rewards: Tensor

    def there(self) -> Tensor:
        """Whether a reward was seen, (n, arms)."""
        return ~self.rewards.isnan()


def _seen(source: Source, rounds: int, seed: int, device: str | torch.device) -> Seen:
    """What is known of a problem or a log."""
    if isinstance(source, str) and not os.path.exists(source):
        source = named_problem(source)
    if isinstance(source, BanditProblem):
        most = source.most_rounds
        played = source.run(seed, rounds if most is None else min(rounds, most))
        return Seen(torch.from_numpy(played.contexts).to(device), torch.from_numpy(played.rewards).to(device))
    log = source if isinstance(source, Log) else read_log(source)
    if np.isnan(log.rewards).all():
        raise MatchError("a log without a reward says nothing about a prior: leave it out")
    rewards = np.full(log.allowed.shape, np.nan, np.float32)
    rewards[np.arange(len(log.arms)), log.arms] = log.rewards
    return Seen(torch.from_numpy(log.contexts).float().to(device), torch.from_numpy(rewards).to(device))


def _arm_by_arm(seen: Seen) -> Iterator[Seen]:
    """Every arm of which a reward was seen, as a problem with one arm."""
    for own in seen.rewards.unbind(dim=1):
        there = ~own.isnan()
        if there.any():
            yield Seen(seen.contexts[there], own[there].unsqueeze(1))


def _trained(network: Network, seen: Sequence[Seen], steps: int, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The hidden layers, and every problem's weights on φ, (problems, arms, features): of the rewards, and of their variance.

    The loss is ½ v^β (e²/v + log v) with v as a constant in v^β: the Gaussian's, which learns what is certain to a higher
    precision, and which β keeps from giving up what is not. v is softplus of a linear function of φ that does not train φ. Adam,
    with a rate that falls along a cosine, on mini-batches in which problems have equal parts.
    """
    device = seen[0].contexts.device
    contexts = pad_sequence([one.contexts for one in seen], batch_first=True)
    rewards = pad_sequence([one.rewards for one in seen], batch_first=True, padding_value=math.nan)
    known = rewards[~rewards.isnan()]
    shift, unit = known.mean(), known.std().clamp(min=torch.finfo(known.dtype).tiny)
    rewards = (rewards - shift) / unit
    lengths = torch.tensor([[len(one.contexts)] for one in seen], device=device)
    problems, arms, each = len(seen), rewards.shape[2], max(1, _BATCH // len(seen))
    params = {
        name: tensor.requires_grad_()
        for name, tensor in initial(network, [seed], device=device).items()
        if not name.startswith(f"layer{len(network.hidden)}.")
    }
    width = network.hidden[-1] + network.n_inputs + 1
    heads, noises = (torch.zeros(problems, arms, width, device=device, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([*params.values(), heads, noises], lr=_RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    source, number = (
        torch.Generator(device).manual_seed(stream_seed(seed, "rows")),
        torch.arange(problems, device=device),
    )
    for _ in range(steps):
        rows = (torch.rand(problems, each, generator=source, device=device) * lengths).long()
        x, targets = (of[number.unsqueeze(1), rows] for of in (contexts, rewards))
        phi = features(network, params, x.view(1, problems * each, -1)).view(problems, each, -1)
        there = ~targets.isnan()
        errors, variance = (phi @ heads.mT - targets)[there], _variance(phi.detach(), noises)[there]
        loss = (variance.detach() ** _POWER * (errors.square() / variance + variance.log())).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        falling.step()
    found = heads.detach().double() * unit
    found[..., -1] += shift
    return {name: tensor.detach() for name, tensor in params.items()}, found, noises.detach()


def _variance(phi: Tensor, noises: Tensor) -> Tensor:
    """v of features (..., n, features) by weights (..., arms, features), in units of the rewards' variance."""
    return F.softplus(phi @ noises.mT) + _FLOOR


@dataclass(frozen=True, eq=False)
class _Features:
    """One problem on the network's features: φ (n, features), rewards and their relative variance (n, arms), float64."""

    phi: Tensor
    rewards: Tensor
    variance: Tensor

    @classmethod
    def of(cls, network: Network, params: dict[str, Tensor], seen: Sequence[Seen], noises: Tensor) -> list[_Features]:
        """Of every problem."""
        found = [features(network, params, one.contexts.unsqueeze(0)).squeeze(0) for one in seen]
        return [
            cls(phi.double(), one.rewards.double(), _variance(phi, own).double())
            for phi, one, own in zip(found, seen, noises, strict=True)
        ]

    def errors(self, weights: Tensor) -> Tensor:
        """Of weights (arms, features), (n, arms); NaN where no reward was seen."""
        return self.rewards - self.phi @ weights.mT

    @cached_property
    def known(self) -> Statistics:
        """Of every other row, as one run's."""
        there = (~self.rewards[::2].isnan()).to(self.phi)
        phi, rewards = self.phi[::2], self.rewards[::2].nan_to_num()
        gram = torch.einsum("na,nf,ng->afg", there, phi, phi)
        return Statistics(gram[None], (rewards.mT @ phi)[None], rewards.square().sum(dim=0)[None])


# --- what they have in common ---------------------------------------------------------------------------------------


def _spread(heads: Tensor) -> Tensor:
    """The covariance between problems, (arms, features, features), with a ridge."""
    apart = (heads - heads.mean(dim=0)).transpose(0, 1)
    found = apart.mT @ apart / len(heads)
    # Problems that are all alike differ by rounding alone.
    least = (torch.finfo(heads.dtype).eps * heads.square().mean()).clamp(min=1e-100)
    size = found.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=least)
    return found + (_RIDGE * size)[:, None, None] * torch.eye(found.shape[1]).to(found)


def _left_out(data: Sequence[_Features], heads: Tensor, spread: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Errors on every other row of each problem, given its other rows and the other problems' heads.

    The first is the mean of e²/v over all problems, the second that of e² of each.
    """
    precision = noise * torch.linalg.inv(spread)
    relative, squares = [], []
    for number, one in enumerate(data):
        others = torch.cat([heads[:number], heads[number + 1 :]]).transpose(0, 1)
        _, mean, residual = normal_equations(one.known, others.unsqueeze(0), precision)
        a = _LEAST_SHAPE + 0.5 * (~one.rewards[::2].isnan()).sum()
        likely = (-a * (_LEAST_SHAPE * noise + residual[0].sum(dim=0)).log()).softmax(dim=0)
        errors = one.errors((likely[None, :, None] * mean[0]).sum(dim=1))[1::2].square()
        relative.append((errors / one.variance[1::2]).nanmean())
        squares.append(errors.nanmean())
    return torch.stack(relative).nanmean(), torch.stack(squares)


def _inverse_gamma(variances: Tensor) -> tuple[Tensor, Tensor]:
    """a and b with the mean and the variance of these."""
    shape = variances.mean().square() / variances.var(correction=0).clamp(min=1e-300) + 2
    shape = shape.clamp(_LEAST_SHAPE, _MOST_SHAPE)
    return shape, shape * variances.mean()
