"""Held-out data: moments of the outputs there, and what targets are worth under them."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import BayesAdamWarning
from bayesadam.likelihoods.predictive import place_blocks
from bayesadam.posterior import Posterior
from bayesadam.predict.call import Call, evaluating, to_device
from bayesadam.predict.gaussian import parameters_at_mean
from bayesadam.predict.generic import VarianceOf
from bayesadam.predict.linearised import moments
from bayesadam.predict.options import Options
from bayesadam.predict.prediction import predictive_of
from bayesadam.structures.structure import Directions

Batches = Sequence[tuple[Any, Tensor]]
# Temperatures from the coldest to the hottest there may be.
COLDEST, HOTTEST = 0.25, 20.0


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of predictions that a user has not asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayesAdamWarning)
        yield


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out data and how the model is called on it."""

    posterior: Posterior
    batches: Batches
    options: Options
    seed: int

    def moments(
        self,
        posterior: Posterior,
        variances: Sequence[VarianceOf],
        *,
        covariance: bool = False,
        directions: Sequence[Directions | None] = (),
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
        """Mean, variances (k, ...), covariance and targets, batch by batch, at a posterior's mean.

        Of classes these have a row for every place that counts, (n, c), (k, n, c), (n, c, c) and (n,).
        """
        record, budget, bases = self.options.record, self.options.memory_budget, posterior.structure.bases
        call = Call(self.posterior.model, self.options.forward)
        params = parameters_at_mean(posterior)
        device = next(iter(params.values())).device
        with evaluating(self.posterior.model):
            for inputs, y in self.batches:
                found = moments(
                    call, params, variances, to_device(inputs, device), covariance, budget, bases, directions
                )
                y = record.matched(y.to(device), found.mean)
                keep = record.counted(found.mean, y)
                block = None if found.covariance is None else place_blocks(found.covariance[0], found.mean)[keep]
                yield found.mean[keep], found.variance[:, keep], block, y[keep]

    def scores(self, mean: Tensor, variances: Tensor, y: Tensor, **of_outputs: Any) -> list[float]:
        """Mean log-likelihood of the targets under each of k sets of variances, (k, n, ...); −∞ where it is not finite."""
        k = len(variances)
        means, targets = mean.expand(k, *mean.shape).flatten(0, 1), y.expand(k, *y.shape).flatten(0, 1)
        found = self.options.record.predictive(means, variances.flatten(0, 1), link=self.options.link, **of_outputs)
        values = found.log_prob(targets).reshape(k, -1).mean(dim=1, dtype=torch.float64)
        return [value if math.isfinite(value) else -math.inf for value in values.tolist()]

    def score(self, mean: Tensor, variance: Tensor, y: Tensor, **of_outputs: Any) -> float:
        """The same under one set of variances, (n, ...)."""
        return self.scores(mean, variance[None], y, **of_outputs)[0]

    def temperature(self, posterior: Posterior) -> float:
        """T of the greatest log-likelihood of the mean network."""
        record, params, parts = self.options.record, parameters_at_mean(posterior), []
        call, device = Call(posterior.model, self.options.forward), next(iter(params.values())).device
        with evaluating(posterior.model), torch.no_grad():
            for inputs, targets in self.batches:
                outputs = call(params, to_device(inputs, device))
                outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
                targets = record.matched(targets.to(device), outputs)
                keep = record.counted(outputs, targets)
                parts.append((outputs[keep], targets[keep]))
        mean, y = (torch.cat(part) for part in zip(*parts, strict=True))
        return self.best_temperature(mean, torch.zeros_like(mean), y, start=1.0, reach=math.log(HOTTEST))

    def best_weight(
        self, mean: Tensor, table: Tensor, y: Tensor, *, start: float, most: float, **of_outputs: Any
    ) -> float:
        """w of the greatest log-likelihood, the variances being table/w."""
        return _refined(lambda w: self.score(mean, table / w, y, **of_outputs), start, most=most)

    def best_temperature(self, mean: Tensor, variance: Tensor, y: Tensor, *, start: float, reach: float) -> float:
        """T of the greatest log-likelihood, within bounds: a temperature near 0 would be sure of everything."""
        least = math.log(COLDEST)
        return _refined(lambda t: self.score(mean, variance, y, temperature=t), start, reach=reach, least=least)

    def nll(self, posterior: Posterior, batches: Batches) -> float:
        """Mean negative log-likelihood of batches under the predictive that is calibrated."""
        total, count = 0.0, 0
        for inputs, y in batches:
            with quietly():
                generator = torch.Generator().manual_seed(self.seed)
                found = predictive_of(posterior, inputs, replace(self.options, generator=generator, novelty=False))
            scores = self.options.record.log_probs(found, y.to(found.mean.device))
            total, count = total - float(scores.sum(dtype=torch.float64)), count + len(scores)
        return total / max(count, 1)


def _refined(
    score: Callable[[float], float],
    start: float,
    *,
    reach: float = 1.2,
    least: float = -math.inf,
    most: float = math.inf,
) -> float:
    """Golden-section search in the logarithm, as far as `reach` to either side of `start`, from `least` to `most`."""
    golden = (math.sqrt(5) - 1) / 2
    low, high = max(math.log(start) - reach, least), min(math.log(start) + reach, most)
    a, b = high - golden * (high - low), low + golden * (high - low)
    fa, fb = score(math.exp(a)), score(math.exp(b))
    for _ in range(25):
        if fa >= fb:
            high, b, fb = b, a, fa
            a = high - golden * (high - low)
            fa = score(math.exp(a))
        else:
            low, a, fa = a, b, fb
            b = low + golden * (high - low)
            fb = score(math.exp(b))
    refined = math.exp((low + high) / 2)
    return refined if score(refined) >= score(start) else start
