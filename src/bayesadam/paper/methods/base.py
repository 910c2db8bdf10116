"""One small protocol for every method: fit a `Problem`, get a `Fitted` that predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from bayesadam._progress import progress
from bayesadam.engine.gradients import Slope, loss_and_slope
from bayesadam.engine.network import Network, forward
from bayesadam.engine.rules import Adam, Dropout, Rule
from bayesadam.engine.rules.adam import adam_state, adam_update
from bayesadam.engine.stack import Stack, constant, cosine, train
from bayesadam.engine.streams import Blocks, Streams
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import Component, Likelihood, LikelihoodName, Predictive, likelihood
from bayesadam.posterior import Posterior

# Noise is at least this share of the held-out squared residual, however large the function's own variance.
_LEAST_NOISE = 0.05


@dataclass(frozen=True, eq=False)
class Data:
    """Data for a stack of networks, with a held-out part for calibration; every seed may have its own.

    Attributes:
        x: inputs, (s, n, inputs).
        y: targets, (s, n, targets) numbers, or (s, n) class indices for classification.
        x_held_out: inputs that are not trained on, (s, m, inputs).
        y_held_out: their targets.
        likelihood: the name of a likelihood.
    """

    x: Tensor
    y: Tensor
    x_held_out: Tensor
    y_held_out: Tensor
    likelihood: LikelihoodName

    def __post_init__(self) -> None:
        for name, x, y in (("training", self.x, self.y), ("held-out", self.x_held_out, self.y_held_out)):
            if x.dim() != 3 or x.shape[:2] != y.shape[:2] or not x.shape[1]:
                raise MatchError(
                    f"the {name} data must be (stack, examples, ...), the same for inputs and targets and not empty; got "
                    f"{tuple(x.shape)} and {tuple(y.shape)}"
                )

    def __len__(self) -> int:
        return self.x.shape[1]

    @property
    def kind(self) -> Likelihood[Any]:
        """The likelihood's record."""
        return likelihood(self.likelihood)

    def repeated(self, times: int) -> Data:
        """Every seed's data so many times over."""
        names = ("x", "y", "x_held_out", "y_held_out")
        return replace(self, **{name: getattr(self, name).repeat_interleave(times, dim=0) for name in names})


@dataclass(frozen=True)
class Training:
    """How a network is trained; the defaults are the paper's for its toy problem.

    Attributes:
        epochs: passes over the data, counted in examples.
        weight_decay: λ of the L2 penalty (λ/2)|θ|² that is added to the loss.
        sparsity: λ of a Laplace prior, the penalty λ|θ|₁; Adam's second moment never sees it.
        schedule: `"constant"`, or `"cosine"` from `lr` down to nothing.
    """

    epochs: int = 20_000
    batch_size: int = 100
    lr: float = 1e-3
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    sparsity: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not self.sparsity >= 0:
            raise SettingError(f"sparsity must be at least 0, got {self.sparsity!r}")
        if self.schedule not in ("constant", "cosine"):
            raise SettingError(f"schedule must be 'constant' or 'cosine', got {self.schedule!r}")

    def steps(self, n: int) -> int:
        """The number of steps for n examples."""
        return max(1, round(self.epochs * n / min(self.batch_size, n)))

    def rule(self, kind: type[Rule], **own: Any) -> Rule:
        """A rule with these settings, and some of its own."""
        return kind.with_settings(**{**vars(self), **own})


@dataclass(frozen=True, eq=False)
class Problem:
    """What every method is given.

    Attributes:
        data: one part per seed.
        seeds: one network each.
        draws: those behind a sampled prediction.
        progress: whether training shows a bar on a terminal, after two seconds.
    """

    data: Data
    network: Network
    training: Training
    seeds: tuple[int, ...]
    draws: int = 100
    progress: bool = False

    def __post_init__(self) -> None:
        if len(self.seeds) != self.data.x.shape[0] or len(set(self.seeds)) != len(self.seeds):
            raise MatchError(f"{len(self.seeds)} seeds ({self.seeds}) for {self.data.x.shape[0]} sets of data")

    @cached_property
    def optimum(self) -> Stack:
        """The networks at their optimum under Adam: trained once, shared by the methods that start from there."""
        return trained(self, Dropout if self.network.dropout or self.network.input_dropout else Adam)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A method's result: one predictor per seed, and a posterior each where the method has one.

    A predictor goes from inputs (b, inputs) to a predictive distribution.
    """

    method: str
    predictors: tuple[Callable[[Tensor], Any], ...]
    posteriors: tuple[Posterior, ...] = ()

    def predict(self, x: Tensor) -> list[Any]:
        """The predictive distribution of each seed's network."""
        return [predictor(x) for predictor in self.predictors]


Method = Callable[[Problem], Fitted]


def trained(problem: Problem, kind: type[Rule], *, lr: float | None = None, **own: Any) -> Stack:
    """A stack trained on the problem's data by one rule, with settings of its own; `lr` of None is the rule's usual one."""
    data, training, n = problem.data, problem.training, len(problem.data)
    rule, device = training.rule(kind, **own), data.x.device
    level = _NoiseLevel(len(problem.seeds), training, device) if rule.needs_noise and data.kind.noise else None
    index = torch.arange(len(problem.seeds), device=device)[:, None]

    def batch(rows: Tensor) -> tuple[Tensor, Slope]:
        y = data.y[index, rows]

        def slope(outputs: Tensor) -> Tensor:
            losses, found = loss_and_slope(lambda f: data.kind.loss(f, y), outputs)
            if level is not None:
                stack.scale.copy_(level.update(losses))
            return found

        return data.x[index, rows], slope

    weights = problem.optimum.weights.clone() if rule.starts_trained else None
    stack = Stack(problem.network, rule, problem.seeds, batch, n_data=n, weights=weights, device=device)
    steps, rate = rule.steps(training.steps(n)), lr or rule.lr or training.lr
    schedule = cosine(rate, steps) if training.schedule == "cosine" else constant(rate)
    rows = Blocks(n, min(training.batch_size, n), problem.seeds, steps)
    train(stack, progress(rows, "fit") if problem.progress else rows, schedule)
    return stack


class _NoiseLevel:
    """log σ of a regression, one per network, learnt by Adam on r²/(2σ²) + log σ with r² the squared error."""

    def __init__(self, networks: int, training: Training, device: torch.device) -> None:
        self._log = torch.full((networks,), -1.0, device=device)
        self._state, self._lr = adam_state(self._log), torch.tensor(training.lr, device=device)

    def update(self, losses: Tensor) -> Tensor:
        """1/(2σ²), (s, 1), before a step with these losses."""
        precision = torch.exp(-2 * self._log)
        adam_update(self._log, 1 - losses * precision, self._state, lr=self._lr, betas=(0.9, 0.999))
        return 0.5 * precision.unsqueeze(1)


def noise_variance(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """σ² per output from held-out residuals, E[r²] = σ² + Var[f], not below a small share of them."""
    square = (y.reshape(mean.shape) - mean).square().mean(dim=0)
    return (square - variance.mean(dim=0)).clamp(min=_LEAST_NOISE * square)


def held_out_noise(problem: Problem, index: int, draw: Callable[[Tensor], Tensor]) -> Tensor | None:
    """σ² of one seed's held-out data given draws of f, (n, b, outputs); None where the likelihood has none."""
    data = problem.data
    if not data.kind.noise:
        return None
    draws = draw(data.x_held_out[index])
    return noise_variance(draws.mean(dim=0), draws.var(dim=0, correction=int(len(draws) > 1)), data.y_held_out[index])


def from_draws(kind: Likelihood[Any], draws: Tensor, noise: Tensor | None) -> Predictive:
    """Draws of f, (n, b, outputs), as a predictive distribution; one draw is a function that is known."""
    if len(draws) == 1:
        component = Component(draws[0], torch.zeros_like(draws[0]), noise_variance=noise)
    else:
        component = Component(draws.mean(dim=0), draws.var(dim=0), draws=draws, noise_variance=noise)
    found: Predictive = kind.predictive([component])
    return found


def sampled(name: str, problem: Problem, stack: Stack) -> Fitted:
    """Predictions from functions drawn from what a rule has learnt, with noise from the held-out part."""

    def predictor(index: int) -> Callable[[Tensor], Predictive]:
        def draw(x: Tensor) -> Tensor:
            streams = Streams([problem.seeds[index]], f"{name}-prediction", x.device)
            params, masks = stack.functions(index, problem.draws, streams)
            return forward(stack.network, params, x, masks=masks)

        noise = held_out_noise(problem, index, draw)
        return lambda x: from_draws(problem.data.kind, draw(x), noise)

    indices = range(len(problem.seeds))
    return Fitted(name, tuple(map(predictor, indices)), tuple(posteriors(problem, stack)))


def posteriors(problem: Problem, stack: Stack) -> Sequence[Posterior]:
    """The Gaussian of each network, where the rule has one."""
    found = filter(None, map(stack.moments, range(len(problem.seeds))))
    return [Posterior.from_moments(stack.network.build(mu), mu, variance, len(problem.data)) for mu, variance in found]
