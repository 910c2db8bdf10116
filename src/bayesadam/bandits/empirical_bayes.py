"""Empirical Bayes: the prior that earlier problems of one family have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesadam.bandits.buffer import Buffer
from bayesadam.bandits.learners import Greedy
from bayesadam.bandits.linear import Statistics, normal_equations
from bayesadam.bandits.log import Log, read_log
from bayesadam.bandits.prior import MOMENTS, Prior
from bayesadam.bandits.problems import BanditProblem
from bayesadam.bandits.problems import problem as named_problem
from bayesadam.bandits.settings import GreedySettings
from bayesadam.engine.network import ACTIVATIONS, Network
from bayesadam.engine.stack import Schedule, cosine
from bayesadam.errors import MatchError, SettingError
from bayesadam.structures.noise import stream_seed

Source = BanditProblem | Log | str | os.PathLike[str]
Arms = Literal["same", "exchangeable"]
ARMS = ("same", "exchangeable")
_CHUNK = 4096
# Mini-batches that are drawn at once.
_BLOCK = 1000
_ITERATIONS, _TOLERANCE = 100, 1e-3
# How often moments and noise are fitted in turn, and the ridge of the latter.
_ROUNDS, _RIDGE = 2, 1.0
# The least variance of the noise, over the mean square of the rewards.
_LEAST_NOISE = 1e-8
# a₀ of the noise lies between: how much its size may differ from problem to problem.
_LEAST_SHAPE, _MOST_SHAPE = 2.0, 100.0


def fit_prior(
    sources: Sequence[Source],
    *,
    arms: Arms = "same",
    hidden: tuple[int, ...] = (100, 100),
    activation: str = "relu",
    rounds: int = 1000,
    steps: int = 4000,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Prior:
    """A prior for the hybrid agent out of earlier problems of the same family: `make_agent(..., prior=prior)`.

    A network with one last layer per problem is trained on all of them; what they share is its hidden layers. Then every
    problem p has weights on these features, β_pa ~ N(m_a, S_a) with rewards r = β_pa·φ(x) + N(0, σ_a² exp(γ_a·φ(x))), and m, S
    and σ² maximise the likelihood of all that was seen (EM). γ is fitted to the logarithms of the squared residuals, in turn
    with them. How the residual variance differs between problems gives the prior of σ².

    >>> from bayesadam.bandits import make_agent, wheel
    >>> prior = fit_prior([wheel(delta) for delta in (0.3, 0.6, 0.9)], hidden=(20,), rounds=100, steps=100)
    >>> agent = make_agent("hybrid", n_features=2, n_arms=5, prior=prior)

    Args:
        sources: problems, of which every arm's reward is seen, their names, logs, or paths of logs, of which rewards that came.
        arms: `"same"` where an arm means the same in every problem; `"exchangeable"` where arms are permuted, or their
            numbers differ: one prior for all.
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
    widths, numbers = {one.contexts.shape[1] for one in seen}, {one.n_arms for one in seen}
    if len(widths) > 1:
        raise MatchError(f"the sources have contexts of {sorted(widths)} numbers: they must agree")
    if len(numbers) > 1 and arms == "same":
        raise MatchError(f"the sources have {sorted(numbers)} arms: they must agree, or be arms='exchangeable'")
    if arms == "exchangeable":
        seen = [part for one in seen for part in _arm_by_arm(one)]
    counts = torch.stack([torch.bincount(one.arms, minlength=one.n_arms) for one in seen]).double()
    if not ((counts > 0).sum(dim=0) > 1).all():
        raise MatchError("every arm must be seen in two problems or more: give more, or arms='exchangeable'")
    network, params = _trunk(seen, hidden, activation, steps, seed)
    log_noise = counts.new_zeros(counts.shape[1], hidden[-1] + network.n_inputs + 1)
    bare = Prior(network, params, *[log_noise] * len(MOMENTS))
    for _ in range(_ROUNDS):
        _, weights = _moments(_statistics(bare, seen), counts)
        bare = replace(bare, log_noise=_log_noise(bare, seen, weights))
    moments, _ = _moments(_statistics(bare, seen), counts)
    return Prior(network, params, *moments, bare.log_noise).to(torch.device("cpu"))


# --- what was seen --------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """The observations of one problem: contexts (n, features), arms (n,), rewards (n,); and how many arms there are."""

    contexts: Tensor
    arms: Tensor
    rewards: Tensor
    n_arms: int

    def of(self, rows: Tensor | slice) -> Seen:
        """Some of the observations."""
        return Seen(self.contexts[rows], self.arms[rows], self.rewards[rows], self.n_arms)


def _seen(source: Source, rounds: int, seed: int, device: str | torch.device) -> Seen:
    """What is known of a problem or a log."""
    if isinstance(source, str) and not os.path.exists(source):
        source = named_problem(source)
    if isinstance(source, BanditProblem):
        most = source.most_rounds
        played = source.run(seed, rounds if most is None else min(rounds, most))
        t, n_arms = played.rewards.shape
        contexts = torch.from_numpy(played.contexts).to(device).repeat_interleave(n_arms, dim=0)
        rewards = torch.from_numpy(played.rewards).to(device).flatten()
        return Seen(contexts, torch.arange(n_arms, device=device).repeat(t), rewards, n_arms)
    log = source if isinstance(source, Log) else read_log(source)
    came = ~np.isnan(log.rewards)
    if not came.any():
        raise MatchError("a log without a reward says nothing about a prior: leave it out")
    contexts, arms, rewards = (
        torch.from_numpy(part[came]).to(device) for part in (log.contexts, log.arms, log.rewards)
    )
    return Seen(contexts, arms, rewards.float(), log.allowed.shape[1])


class _Trunk(Greedy):
    """A greedy learner whose learning rate falls to 0 along a cosine; the arguments but the steps are those of `Learner`."""

    def __init__(self, steps: int, *more: Any) -> None:
        super().__init__(*more)
        self._total = steps

    def _schedule(self) -> Schedule:
        falling = cosine(self.settings.lr, self._total)
        return lambda done: falling(done.clamp(max=self._total))


def _arm_by_arm(seen: Seen) -> Iterator[Seen]:
    """Every arm as a problem with one arm."""
    for arm in sorted(set(seen.arms.tolist())):
        own = seen.of(seen.arms == arm)
        yield Seen(own.contexts, torch.zeros_like(own.arms), own.rewards, 1)


def _trunk(
    seen: Sequence[Seen], hidden: tuple[int, ...], activation: str, steps: int, seed: int
) -> tuple[Network, dict[str, Tensor]]:
    """The hidden layers of a network with an output for every arm of every problem, each problem drawn alike often."""
    most, n_arms = max(len(one.rewards) for one in seen), seen[0].n_arms
    alike = [one.of(torch.arange(most, device=one.rewards.device) % len(one.rewards)) for one in seen]
    contexts = torch.cat([one.contexts for one in alike])
    buffer = Buffer(contexts.unsqueeze(0))
    arms = torch.cat([one.arms + number * n_arms for number, one in enumerate(alike)])
    buffer.add(arms.unsqueeze(0), torch.cat([one.rewards for one in alike]).unsqueeze(0))
    block = min(steps, _BLOCK)
    settings = GreedySettings(
        hidden=hidden, activation=activation, lr=2e-3, standardise=True, train_steps=block, batch_size=512
    )
    learner = _Trunk(steps, settings, buffer, len(seen) * n_arms, [seed])
    while learner.stack.done < steps:
        learner.train()
    network = Network(contexts.shape[1], hidden, 1, activation, 0.0)
    last = f"layer{len(hidden)}."
    return network, {name: t.clone() for name, t in learner.params.items() if not name.startswith(last)}


def _parts(prior: Prior, seen: Seen) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A problem's features, arms and rewards, (1, k, ...) each, a few at a time."""
    for first in range(0, len(seen.rewards), _CHUNK):
        part = seen.of(slice(first, first + _CHUNK))
        yield prior.features(part.contexts[None]), part.arms[None], part.rewards.double()[None]


def _statistics(prior: Prior, seen: Sequence[Seen]) -> Statistics:
    """Of every problem's arms on the features, weighted by their noise: problems take the place of runs."""
    n_arms, width = prior.log_noise.shape
    found = Statistics.zeros(len(seen), n_arms, width, prior.log_noise.device)
    for number, one in enumerate(seen):
        own = Statistics(*(tensor[number : number + 1] for tensor in vars(found).values()))
        for features, arms, rewards in _parts(prior, one):
            own.add(arms, features, rewards, prior.weights(features, arms))
    return found


def _log_noise(prior: Prior, seen: Sequence[Seen], weights: Tensor) -> Tensor:
    """γ by least squares of log e² on φ, with e the residuals of every problem's mean; what all arms share is σ²'s."""
    n_arms, width = prior.log_noise.shape
    found = Statistics.zeros(1, n_arms, width, prior.log_noise.device)
    least = _LEAST_NOISE * max(float(one.rewards.double().square().mean()) for one in seen)
    for own, one in zip(weights, seen, strict=True):
        for features, arms, rewards in _parts(prior, one):
            errors = rewards - (features @ own.mT).gather(2, arms.unsqueeze(2)).squeeze(2)
            found.add(arms, features, (errors.square() + least).log(), torch.ones_like(errors))
    average = (found.cross[..., -1] / found.gram[..., -1, -1]).mean(dim=1, keepdim=True)
    centred = found.standardised(average, torch.ones_like(average))
    identity = torch.eye(found.gram.shape[2]).to(found.gram)
    _, mean, _ = normal_equations(centred, torch.zeros_like(found.cross), _RIDGE * identity)
    return mean[0]


# --- empirical Bayes ------------------------------------------------------------------------------------------------


def _moments(data: Statistics, counts: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """m, C = S/σ², a and b of every arm by EM over the problems, and the means of the problems' weights.

    E: β ~ N(μ, Σ) with Σ⁻¹ = S⁻¹ + Σ_x φφᵀ/σ² and μ = Σ (S⁻¹ m + Σ_x φ r/σ²). M: m the mean of μ, S that of
    Σ + (μ − m)(μ − m)ᵀ, and σ² the mean of E(r − β·φ)². Arms of which a problem saw nothing do not count.
    """
    gram, cross, squares = data.gram, data.cross, data.squares
    there = (counts > 0).to(gram)
    width, total = gram.shape[-1], counts.sum(dim=0)
    identity = torch.eye(width).to(gram)
    # Functions begin as wide as the rewards are.
    noise = (squares.sum(dim=0) / total).clamp(min=torch.finfo(gram.dtype).tiny)
    size = gram.diagonal(dim1=2, dim2=3).sum(dim=(0, 2)) / total
    mean, spread = torch.zeros_like(cross[0]), (noise / size)[:, None, None] * identity
    noise, floor = 0.1 * noise, _LEAST_NOISE * noise
    for _ in range(_ITERATIONS):
        inverse = torch.linalg.inv(spread)
        covariance = torch.linalg.inv(inverse + gram / noise[:, None, None])
        pull = (inverse @ mean.unsqueeze(2)).squeeze(2) + cross / noise[:, None]
        weights = (covariance @ pull.unsqueeze(3)).squeeze(3)
        second = covariance + weights.unsqueeze(3) * weights.unsqueeze(2)
        errors = squares - 2 * (weights * cross).sum(dim=2) + (gram * second).sum(dim=(2, 3))
        problems = there.sum(dim=0)
        mean = (there.unsqueeze(2) * weights).sum(dim=0) / problems.unsqueeze(1)
        apart = weights - mean
        spread = (there[..., None, None] * (covariance + apart.unsqueeze(3) * apart.unsqueeze(2))).sum(dim=0)
        spread = spread / problems[:, None, None]
        before, noise = noise, torch.maximum(errors.sum(dim=0) / total, floor)
        if ((noise / before).log().abs() < _TOLERANCE).all():
            break
    own = errors.clamp(min=0) / counts.clamp(min=1)
    average = (there * own).sum(dim=0) / problems
    variance = (there * (own - average).square()).sum(dim=0) / problems
    # An inverse gamma with this mean and variance has a = mean²/variance + 2.
    shape = (average.square() / variance.clamp(min=1e-300) + 2).clamp(_LEAST_SHAPE, _MOST_SHAPE)
    return (mean, spread / noise[:, None, None], shape, shape * noise), weights
