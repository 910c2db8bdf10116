"""A learnt prior of the hybrid agent, and empirical Bayes: what earlier problems of one family have in common."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bayesadam import _storage as storage
from bayesadam.bandits.linear import Statistics, normal_equations
from bayesadam.bandits.log import Log, read_log
from bayesadam.bandits.problems import BanditProblem
from bayesadam.engine.network import Network, forward, initial
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.weights.draws import stream_seed

Source = BanditProblem | Log | str | os.PathLike[str]
Arms = Literal["same", "exchangeable"]
_KIND = storage.Kind("bayesadam.bandits.prior", "a saved prior", ": give the file that Prior.save wrote")
_MOMENTS = ("mean", "covariance", "shape", "scale")
_RATE, _BATCH = 2e-3, 2400
# The least variance in the loss, over that of the rewards, and the power of it that weighs an example: at 0 the loss is
# the likelihood, which may give up on hard examples, at 1 all examples count equally, and jumps blur everything else.
_FLOOR, _POWER = 1e-5, 0.5
# The least variance of the noise, over that of the rewards.
_LEAST_NOISE = 1e-8
# a₀ of the noise lies between: how much its size may differ from problem to problem.
_LEAST_SHAPE, _MOST_SHAPE = 2.0, 100.0
# The covariance around each component is one of these shares of that between problems, which has a ridge of the last.
_WIDTHS, _RIDGE = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-6), 1e-3


def features(network: Network, params: Mapping[str, Tensor], contexts: Tensor) -> Tensor:
    """φ(x) = (h(x), x, 1) of contexts (1, k, n)."""
    h = forward(network, params, contexts, n_layers=len(network.hidden))
    return F.pad(torch.cat([h, contexts], dim=2), (0, 1), value=1.0)


@dataclass(frozen=True, eq=False)
class Prior:
    """A mixture: σ² ~ IG(a, b) and β | σ² ~ N(m_k, σ² C), each k equally probable, of an arm's weights on φ(x).

    φ(x) = (h(x), x, 1). Components are earlier problems, and k and σ² are those of all arms: the new problem is like
    one of them. Where arms are exchangeable components are earlier arms, and every arm has a k and σ² of its own.

    Attributes:
        network: whose last hidden layer is h; its output layer is not used.
        params: its weights by name, (1, *shape).
        mean: m, (components, arms, features), with one arm where they are exchangeable.
        covariance: C, (arms, features, features).
        shape, scale: a and b, ().
    """

    network: Network
    params: Mapping[str, Tensor]
    mean: Tensor
    covariance: Tensor
    shape: Tensor
    scale: Tensor

    @property
    def exchangeable(self) -> bool:
        """Whether one prior is every arm's."""
        return self.mean.shape[1] == 1

    def to(self, device: str | torch.device) -> Prior:
        """The same on another device."""
        params = {name: tensor.to(device) for name, tensor in self.params.items()}
        return Prior(self.network, params, *(getattr(self, name).to(device) for name in _MOMENTS))

    def features(self, contexts: Tensor) -> Tensor:
        """φ of contexts (runs, k, n), (runs, k, features), float64."""
        runs, k, width = contexts.shape
        return features(self.network, self.params, contexts.reshape(1, runs * k, width)).double().view(runs, k, -1)

    def for_arms(self, n_arms: int) -> Prior:
        """One row per arm. An arm added later is one drawn at random: it has the moments of the others together."""
        known = self.mean.shape[1]
        if known > n_arms:
            raise MatchError(f"the prior is for {known} arms, and there are {n_arms}: fit one with arms='exchangeable'")
        mean, noise, more = self.mean.mean(dim=1, keepdim=True), self.scale / self.shape, n_arms - known
        apart = self.mean - mean
        between = (apart.unsqueeze(3) * apart.unsqueeze(2)).mean(dim=(0, 1))
        new = (self.covariance.mean(dim=0) + between / noise).expand(more, -1, -1)
        joined = torch.cat([self.mean, mean.expand(-1, more, -1)], dim=1), torch.cat([self.covariance, new])
        return Prior(self.network, self.params, *joined, self.shape, self.scale)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as safetensors."""
        storage.write(path, self.tensors(), self.header(), _KIND)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Prior:
        """The prior that `save` wrote."""
        tensors, header = storage.read(path, _KIND)
        try:
            return cls.of_tensors(tensors, header)
        except (KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{path} is not {_KIND.what}: {error!r}") from error

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name."""
        named = {f"network.{name}": tensor for name, tensor in self.params.items()}
        return named | {name: getattr(self, name).contiguous() for name in _MOMENTS}

    def header(self) -> dict[str, Any]:
        """The shape of the network."""
        own = self.network
        return {"n_features": own.n_inputs, "hidden": [*own.hidden], "activation": own.activation}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Prior:
        """The inverse of `tensors` and `header`."""
        network = Network(header["n_features"], tuple(header["hidden"]), 1, header["activation"])
        params = {name: tensors[f"network.{name}"] for name in _hidden_names(network)}
        return cls(network, params, *(tensors[name] for name in _MOMENTS))


def _hidden_names(network: Network) -> list[str]:
    return [name for name in network.shapes() if not name.startswith(f"layer{len(network.hidden)}.")]


def fit_prior(
    sources: Sequence[Source],
    *,
    arms: Arms = "same",
    hidden: tuple[int, ...] = (100, 100, 100),
    rounds: int = 1000,
    steps: int = 4000,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Prior:
    """A prior for the hybrid agent from earlier problems of the same family: `make_agent(..., prior=prior)`.

    A network with one last layer m_p per problem is trained on all of them; they share its hidden layers. A new
    problem's weights are N(m_p, σ² C), with every earlier problem p equally probable. σ²C is a share of the covariance
    between the m_p, the one with which each problem is best predicted from half of its rows and the others: small where
    problems come in kinds, 1 where they are one cloud. The errors of these predictions give the prior of σ².

    >>> from bayesadam.bandits import make_agent, wheel
    >>> prior = fit_prior([wheel(delta) for delta in (0.3, 0.6, 0.9)], hidden=(20,), rounds=100, steps=100)
    >>> agent = make_agent("hybrid", n_features=2, n_arms=5, prior=prior)

    Args:
        sources: problems, of which every arm's reward is seen; logs or their paths, of which the rewards that came.
        arms: `"same"` where an arm means the same in every problem; `"exchangeable"` where arms are permuted, or their
            numbers differ: any arm may be like any earlier one.
        rounds: of every problem; logs are used whole.
        steps: mini-batches of training.
        device: to fit it on; the prior itself is on the CPU.
    """
    if arms not in ("same", "exchangeable") or len(sources) < 2:
        raise SettingError("give two sources or more, and arms='same' or 'exchangeable'")
    seen = [_seen(source, rounds, stream_seed(seed, "prior", number), device) for number, source in enumerate(sources)]
    widths, numbers = {one.shape[1] for one, _ in seen}, {rewards.shape[1] for _, rewards in seen}
    if len(widths) > 1 or (len(numbers) > 1 and arms == "same"):
        raise MatchError(f"the sources have {sorted(widths)} features and {sorted(numbers)} arms: they must agree")
    if arms == "exchangeable":
        # Every arm of which a reward was seen is a problem with one arm.
        every = [(x, own, ~own.isnan()) for x, rewards in seen for own in rewards.unbind(dim=1)]
        seen = [(x[there], own[there].unsqueeze(1)) for x, own, there in every if there.any()]
    there = torch.stack([~rewards.isnan().all(dim=0) for _, rewards in seen]).unsqueeze(2)
    if not (there.sum(dim=0) > 1).all():
        raise MatchError("every arm must be seen in two problems or more: give more, or arms='exchangeable'")
    network = Network(seen[0][0].shape[1], hidden, 1)
    params, heads, noises = _trained(network, seen, steps, seed)
    heads = torch.where(there, heads, torch.where(there, heads, 0).sum(dim=0) / there.sum(dim=0))
    data = []
    for (x, rewards), own in zip(seen, noises, strict=True):
        phi = features(network, params, x.unsqueeze(0)).squeeze(0)
        data.append(_Problem(phi.double(), rewards.double(), _variance(phi, own).double()))
    errors = [(y - phi @ head.mT).square().nanmean() for (phi, y, _), head in zip(data, heads, strict=True)]
    least = _LEAST_NOISE * torch.stack([one.rewards.square().nanmean() for one in data]).mean()
    noise = torch.maximum(torch.stack(errors).mean(), least.clamp(min=torch.finfo(least.dtype).tiny))
    spread = _spread(heads)
    tried = {width: _left_out(data, heads, width * spread, noise) for width in _WIDTHS}
    width = min(tried, key=lambda one: float(tried[one][0]))
    shape, scale = _inverse_gamma(tried[width][1].nan_to_num(nan=float(noise)).clamp(min=noise))
    return Prior(network, params, heads, width * spread * (shape / scale), shape, scale).to("cpu")


def _seen(source: Source, rounds: int, seed: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """Contexts (n, features) of a problem or a log, and rewards (n, arms), NaN where they were not seen."""
    if isinstance(source, BanditProblem):
        most = source.most_rounds
        played = source.run(seed, rounds if most is None else min(rounds, most))
        return torch.from_numpy(played.contexts).to(device), torch.from_numpy(played.rewards).to(device)
    log = source if isinstance(source, Log) else read_log(source)
    if np.isnan(log.rewards).all():
        raise MatchError("a log without a reward says nothing about a prior: leave it out")
    rewards = np.full(log.allowed.shape, np.nan, np.float32)
    rewards[np.arange(len(log.arms)), log.arms] = log.rewards
    return torch.from_numpy(log.contexts).float().to(device), torch.from_numpy(rewards).to(device)


def _trained(
    network: Network, seen: Sequence[tuple[Tensor, Tensor]], steps: int, seed: int
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The hidden layers, and weights on φ of the rewards and of their variance, (problems, arms, features) each.

    The loss is v^β (e²/v + log v) with v as a constant in v^β: the Gaussian's, which learns certain rewards to a
    higher precision, and which β keeps from giving up on the others. v is softplus of a linear function of φ that does
    not train φ.
    """
    device, (xs, ys) = seen[0][0].device, zip(*seen, strict=True)
    contexts = pad_sequence(list(xs), batch_first=True)
    rewards = pad_sequence(list(ys), batch_first=True, padding_value=math.nan)
    known = rewards[~rewards.isnan()]
    shift, unit = known.mean(), known.std().clamp(min=torch.finfo(known.dtype).tiny)
    rewards = (rewards - shift) / unit
    lengths = torch.tensor([[len(x)] for x in xs], device=device)
    problems, each = len(seen), max(1, _BATCH // len(seen))
    start = initial(network, [seed], device=device)
    params = {name: start[name].requires_grad_() for name in _hidden_names(network)}
    shape = problems, rewards.shape[2], network.hidden[-1] + network.n_inputs + 1
    heads, noises = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([*params.values(), heads, noises], lr=_RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    source = torch.Generator(device).manual_seed(stream_seed(seed, "rows"))
    number = torch.arange(problems, device=device).unsqueeze(1)
    for _ in range(steps):
        rows = (torch.rand(problems, each, generator=source, device=device) * lengths).long()
        x, targets = contexts[number, rows], rewards[number, rows]
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


class _Problem(NamedTuple):
    """One problem on the network's features: φ (n, features), rewards and relative variance (n, arms), float64."""

    phi: Tensor
    rewards: Tensor
    variance: Tensor


def _spread(heads: Tensor) -> Tensor:
    """The covariance between problems, (arms, features, features), with a ridge."""
    apart = (heads - heads.mean(dim=0)).transpose(0, 1)
    found = apart.mT @ apart / len(heads)
    # Problems that are all equal differ by rounding only.
    least = (torch.finfo(heads.dtype).eps * heads.square().mean()).clamp(min=1e-100)
    size = found.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=least)
    return found + (_RIDGE * size)[:, None, None] * torch.eye(found.shape[1]).to(found)


def _left_out(data: Sequence[_Problem], heads: Tensor, spread: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Errors on every other row of each problem, given its other rows and the other problems' heads.

    The first is the mean of e²/v over all problems, the second that of e² of each.
    """
    precision = noise * torch.linalg.inv(spread)
    relative, squares = [], []
    for number, (phis, paid, variance) in enumerate(data):
        there = ~paid[::2].isnan()
        phi, rewards = phis[::2], paid[::2].nan_to_num()
        gram = torch.einsum("na,nf,ng->afg", there.to(phi), phi, phi)
        known = Statistics(gram[None], (rewards.mT @ phi)[None], rewards.square().sum(dim=0)[None])
        others = torch.cat([heads[:number], heads[number + 1 :]]).transpose(0, 1)
        _, mean, residual = normal_equations(known, others.unsqueeze(0), precision)
        a = _LEAST_SHAPE + 0.5 * there.sum()
        likely = (-a * (_LEAST_SHAPE * noise + residual[0].sum(dim=0)).log()).softmax(dim=0)
        average = (likely[None, :, None] * mean[0]).sum(dim=1)
        errors = (paid - phis @ average.mT)[1::2].square()
        relative.append((errors / variance[1::2]).nanmean())
        squares.append(errors.nanmean())
    return torch.stack(relative).nanmean(), torch.stack(squares)


def _inverse_gamma(variances: Tensor) -> tuple[Tensor, Tensor]:
    """a and b with the mean and the variance of these."""
    shape = variances.mean().square() / variances.var(correction=0).clamp(min=1e-300) + 2
    shape = shape.clamp(_LEAST_SHAPE, _MOST_SHAPE)
    return shape, shape * variances.mean()
