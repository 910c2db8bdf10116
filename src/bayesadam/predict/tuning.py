"""`posterior.tune`: N's scale s, the prior precision δ and the noise σ² or temperature T, fitted to held-out data.

- By evidence, of a regression: σ² by the residuals y − f ~ N(0, σ² + Var[f]), s so that the total curvature Σ w c is
  the trace of N times the Gauss-Newton matrix, δ by MacKay's fixed point γ/|θ|².
- By validation, as the paper's appendix C does: s, δ, and T or σ², by the log-likelihood of the predictive. It cannot
  see what δ does outside the data and shrinks the uncertainty there to nothing, so that regression takes evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor

from bayesadam.errors import CalibrationError, MatchError, SettingError
from bayesadam.likelihoods import Component, Likelihood, Moments, agreed
from bayesadam.likelihoods.classes import Classification
from bayesadam.likelihoods.fitting import best_temperature, log_prior, mean_log_prob, refined
from bayesadam.predict.batches import batches_of
from bayesadam.predict.moments import moments_under
from bayesadam.predict.network import Forward, Gaussian
from bayesadam.weights.named import Named

Q = TypeVar("Q", bound=Gaussian)
Method = Literal["evidence", "validation"]
# Means, (n, ...), variances, (k, n, ...), covariances, (n, c, c), where asked for, and targets of a batch.
_Rows = tuple[Tensor, Tensor, Tensor | None, Tensor]
# Ratios δ/w that one pass over the data tries; temperatures, and shares of the residuals that are noise.
_RATIOS = 13
_TEMPERATURES = (0.25, 0.5, 0.75, 1.0, 1.4, 2.0, 3.0, 5.0)
_NOISE_SHARES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)
# Rounds of scale and temperature in turn, and of noise and scale.
_ROUNDS, _NOISE_ROUNDS = 4, 8


def tune(posterior: Q, held_out: Any, *, method: Method | None = None, forward: Forward | None = None) -> Q:
    """The posterior with s, δ and σ² or T fitted to held-out data; see the module.

    δ comes out as one number for all parameters; a `LoraPrior` is multiplied by one number.
    """
    if method is not None and method not in get_args(Method):
        raise SettingError(f"method must be one of {get_args(Method)}, got {method!r}")
    posterior.require_whole("tune")
    kind = agreed(None, posterior.likelihood)
    batches = list(batches_of(held_out, posterior.model))
    if not batches:
        raise MatchError("there is no held-out data: the loader gave no batch (a generator that was used up?)")
    data = _HeldOut(posterior.replace(temperature=1.0), kind, batches, forward)
    by_evidence = kind.noise if method is None else method == "evidence"
    return _by_evidence(data) if by_evidence else _by_validation(data)


@dataclass(frozen=True, eq=False)
class _HeldOut(Generic[Q]):
    """A posterior, its likelihood, held-out data, and how the model is called."""

    posterior: Q
    kind: Likelihood
    batches: Sequence[tuple[Any, Tensor]]
    forward: Forward | None

    def moments(self, q: Q, variances: Sequence[Named], *, covariance: bool = False) -> Iterator[_Rows]:
        """Of the linearised network at the mean of q, batch by batch, under each of k variances: of what counts."""
        for inputs, y in self.batches:
            mean, spread, blocks = moments_under(q, variances, inputs, forward=self.forward, covariance=covariance)
            y = self.kind.matched(y.to(mean.device), mean)
            keep = self.kind.counted(mean, y)
            yield mean[keep], spread[:, keep], None if blocks is None else blocks[0][keep], y[keep]

    def whole(self, q: Q, variances: Sequence[Named]) -> tuple[Tensor, Tensor, Tensor]:
        """Means, variances and targets of all batches."""
        means, spreads, _, targets = zip(*self.moments(q, variances), strict=True)
        return torch.cat(means), torch.cat(spreads, dim=1), torch.cat(targets)


def _at(posterior: Q, weight: float, delta: float) -> Q:
    """The posterior with N's scale so that w is the weight, and δ."""
    settings = posterior.settings
    scale, prior = weight * settings.scale / settings.weight, settings.prior_at(delta)
    return posterior.replace(scale=scale, prior_precision=prior, covariant=settings.covariant)


# --- evidence -------------------------------------------------------------------------------------------------------


def _by_evidence(data: _HeldOut[Q]) -> Q:
    """s and δ from the curvature of the outputs; where there is a σ², all three in turn."""
    posterior, kind, shape = data.posterior, data.kind, data.posterior.settings.prior_shape
    unit = {name: torch.ones_like(v) for name, v in posterior.curvature.second_moment.items()}
    unit = unit if shape is None else {name: one / shape[name] for name, one in unit.items()}
    if not kind.noise:
        traces = []
        for mean, (variance,), covariance, _ in data.moments(posterior, [unit], covariance=kind.coupled):
            if isinstance(kind, Classification):
                root = kind.hessian_root(mean)
                traces.append(torch.einsum("nij,nik,njk->n", covariance, root, root))
            else:
                traces.append((kind.hessian_diagonal(mean) * variance).reshape(len(mean), -1).sum(dim=1))
        return _at_evidence(posterior, float(torch.cat(traces).mean(dtype=torch.float64)))
    tuned, noise = posterior, None
    variances: list[Named] = [unit]
    for _ in range(_NOISE_ROUNDS + 1):
        # In the likelihood form the mean moves with δ, and the residuals with it.
        mean, (reach, *uncertain), y = data.whole(tuned, variances)
        square = (y - mean).square().clamp(min=torch.finfo(mean.dtype).tiny)
        if noise is None:
            noise = square.mean(dim=0)
        else:
            # A held-out residual is noise and error of f, and Var[f] goes with σ²: r² ~ σ² (1 + u), u = Var[f]/σ². The
            # mean of r²/(1 + u) has the greatest likelihood: where the network knows little, r says little about σ².
            before, noise = noise, (square / (1 + uncertain[0] / noise)).mean(dim=0)
            if bool(((noise - before).abs() <= 0.01 * before).all()):
                return tuned
        curvature = (reach * kind.hessian_diagonal(mean, noise)).mean(dim=0).sum()
        tuned = _at_evidence(posterior, float(curvature)).replace(noise_variance=noise)
        variances = [unit, tuned.coordinate_variance]
    return tuned


def _at_evidence(posterior: Q, curvature: float) -> Q:
    """s from the trace of the Gauss-Newton matrix, N × `curvature`, and δ from MacKay's fixed point δ = γ/|θ|².

    Under a prior of shape R all of it is in the coordinates R^½ θ, in which that prior is δ.
    """
    settings, shape = posterior.settings, posterior.settings.prior_shape
    total = sum(float(c.sum(dtype=torch.float64)) for c in posterior.curvature.curvatures(settings.power, shape))
    weight = settings.n_data * curvature / total if total else math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise CalibrationError(
            f"the curvature on the held-out data gives a weight of {weight!r}; the posterior is unchanged. Do the "
            "model's outputs contain NaN, or do they not depend on the weights?"
        )
    squares = [(1.0 if shape is None else shape[name]) * theta.square() for name, theta in posterior.mode.items()]
    square = max(sum(float(part.sum(dtype=torch.float64)) for part in squares), 1e-30)
    delta, tuned = 1.0, _at(posterior, weight, 1.0)
    for _ in range(200):
        before, delta = delta, max(tuned.effective_dimension / square, 1e-12)
        tuned = _at(posterior, weight, delta)
        if abs(delta - before) <= 1e-6 * before:
            break
    return tuned


# --- validation -----------------------------------------------------------------------------------------------------


def _tables(data: _HeldOut[Q]) -> tuple[list[float], Tensor, Tensor, Tensor]:
    """Ratios δ/w, of δ R/w under a prior of shape R; E[f] and w Var[f] at each, (k, n, ...); the targets.

    The scale then costs nothing, since it only divides. One pass over the data serves all ratios. In the likelihood
    form the mean, too, depends on the ratio: there it takes a pass for each.
    """
    posterior, settings = data.posterior, data.posterior.settings
    curvatures = posterior.curvature.curvatures(settings.power, settings.prior_shape)
    positive = torch.cat([c.flatten()[c.flatten() > 0].double().cpu() for c in curvatures])
    if not len(positive):
        raise CalibrationError("every second moment is zero: there is no curvature to tune")
    low, high = math.log10(float(positive.median())) - 4, math.log10(float(positive.max())) + 2
    ratios = [10.0 ** (low + (high - low) * i / (_RATIOS - 1)) for i in range(_RATIOS)]
    trials = [_at(posterior, settings.weight, ratio * settings.weight) for ratio in ratios]
    if settings.form == "map":
        mean, variance, y = data.whole(posterior, [q.coordinate_variance for q in trials])
        means = mean.expand(_RATIOS, *mean.shape)
    else:
        passes = [data.whole(q, [q.coordinate_variance]) for q in trials]
        means, variance = torch.stack([part[0] for part in passes]), torch.cat([part[1] for part in passes])
        y = passes[0][2]
    return ratios, means, settings.weight * variance, y


def _by_validation(data: _HeldOut[Q]) -> Q:
    """The ratio, and temperature or share of noise, of the greatest likelihood, each with its own scale."""
    (ratios, means, tables, y), kind, posterior = _tables(data), data.kind, data.posterior
    best: tuple[float, float, int, dict[str, Any]] = (-math.inf, 1.0, 0, {})
    # A weight beyond what the posterior's numbers can hold would make 0 · ∞ of it.
    largest = 0.1 * min(torch.finfo(c.dtype).max for c in posterior.curvature.second_moment.values())
    # From drowning the outputs to vanishing; of classes to a hundredth of the outputs' own variance.
    steps = range(-6, 5 if kind.is_classes else 15)
    for number, (table, mean) in enumerate(zip(tables, means, strict=True)):
        candidates: list[dict[str, Any]] = [{"noise_variance": kind.ceiling(y)}]
        if kind.noise:
            candidates = [{"noise_variance": share * (y - mean).square().mean(dim=0)} for share in _NOISE_SHARES]
        elif kind.is_classes:
            candidates = [{"temperature": t} for t in _TEMPERATURES]
        middle = _middle(mean, table)
        weights = [w for x in steps if 0 < (w := middle * 10 ** (x / 2)) <= largest]
        for candidate in candidates:
            for weight in weights:
                value = mean_log_prob(kind, Component(Moments(mean, table / weight), **candidate), y)
                value += log_prior(candidate.get("temperature", 1.0)) / max(len(y), 1)
                if value > best[0]:
                    best = value, weight, number, candidate
    value, weight, number, chosen = best
    if not math.isfinite(value):
        raise CalibrationError(
            "no scale or prior precision gives a finite log-likelihood on the held-out data; the posterior is "
            "unchanged. Do the model's outputs contain NaN or infinities there?"
        )
    table, mean = tables[number], means[number]
    most = _middle(mean, table) * 10 ** (steps[-1] / 2) if kind.is_classes else math.inf

    def score(w: float) -> float:
        return mean_log_prob(kind, Component(Moments(mean, table / w), **chosen), y)

    for _ in range(_ROUNDS if kind.is_classes else 1):
        weight, _ = refined(score, weight, most=most)
        if kind.is_classes:
            near = best_temperature(kind, mean, y, variance=table / weight, start=chosen["temperature"], reach=1.2)
            chosen = {"temperature": near[0]}
    return _at(posterior, weight, weight * ratios[number]).replace(**chosen)


def _middle(mean: Tensor, table: Tensor) -> float:
    """The weight at which the variances of f, table/w, are on average the outputs' own; 0 if they vanish."""
    scale = float(mean.var()) if mean.numel() > 1 else 1.0
    weight = float(table.mean()) / (scale if math.isfinite(scale) and scale > 0 else 1.0)
    return weight if math.isfinite(weight) else 0.0
