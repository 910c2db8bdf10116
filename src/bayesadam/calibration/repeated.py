"""Scale, prior and temperature under a predictive that samples, where every candidate is a prediction of its own."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesadam.calibration.data import COLDEST, Batches, HeldOut, cut, examples_of, log_prior, n_examples
from bayesadam.errors import CalibrationError
from bayesadam.likelihoods import Predictive
from bayesadam.posterior import Posterior

# How many examples the coarse steps look at, and the fine ones: more would tell next to nothing more about three numbers.
LEVELS = (500, 2_000)
# Factors on scale and prior together, which is one temperature of the posterior, or on the prior alone.
_COARSE = ((True, 10.0), (False, 10.0))
_FINE = ((True, 10.0**0.5), (True, 10.0**0.25))
_MOST_STEPS = 8
# Rises this small, in nats, are not worth a step: there is a flat end, where the posterior no longer matters.
_RISES = (1e-3, 1e-4)
_TEMPERATURES = tuple(COLDEST * 2 ** (i / 2) for i in range(13))


class _Scored(NamedTuple):
    """The mean log-likelihood of some examples, and the temperature at which it is that."""

    value: float
    temperature: float


@dataclass(frozen=True, eq=False)
class Predictions:
    """log p of held-out examples under every candidate that was looked at, each predicted once.

    A fit to some of the examples sums over those alone. Of classes log p is known at temperatures from the coldest to 16.

    Attributes:
        data: all held-out data.
        pieces: the examples that the coarse steps look at, then those that the fine ones look at besides.
        examples: the numbers of a piece's examples.
        numbers: the example that each score in a piece belongs to.
        tried: the candidates looked at.
    """

    data: HeldOut
    pieces: Sequence[Batches]
    examples: Sequence[Tensor]
    numbers: Sequence[Tensor]
    tried: dict[Any, Posterior] = field(default_factory=dict)
    _known: dict[Any, Tensor] = field(default_factory=dict)
    _drawn: dict[Any, tuple[float, list[Predictive]]] = field(default_factory=dict)

    @classmethod
    def of(cls, data: HeldOut) -> "Predictions":
        """Pieces drawn at random but always the same; a single one, the batches as they are, of few examples."""
        total = n_examples(data.batches)
        if total <= LEVELS[0]:
            pieces, numbers = [data.batches], [torch.arange(total)]
        else:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(1))
            level = torch.bucketize(order, torch.tensor(LEVELS), right=True)
            pieces = [cut(data.batches, level == i) for i in range(len(LEVELS))]
            numbers = [(level == i).nonzero().flatten() for i in range(len(LEVELS))]
        owners = [examples_of(data.options.record, piece) for piece in pieces]
        return cls(data, pieces, numbers, [own[owner] for own, owner in zip(numbers, owners, strict=True)])

    def scored(self, candidate: Posterior, chosen: Tensor, level: int) -> _Scored:
        """The chosen examples, booleans, of the pieces up to that level."""
        kept = range(level + 1)
        parts = [self._log_probs(candidate, i)[:, chosen[self.numbers[i]]] for i in kept]
        scores = torch.cat(parts, dim=1)
        values = scores.mean(dim=1, dtype=torch.float64)
        values = torch.where(values.isfinite(), values, -math.inf)
        if not self.data.options.record.tempered:
            return _Scored(float(values), candidate.temperature)
        prior = values.new_tensor([log_prior(t) for t in _TEMPERATURES])
        return _peak((values + prior / scores.shape[1]).tolist())

    def _log_probs(self, candidate: Posterior, piece: int) -> Tensor:
        """log p, (t, rows), of the temperatures tried, one where the likelihood has none."""
        own = _identity(candidate)
        key = (*own, piece)
        if key not in self._known:
            self.tried[own] = candidate
            record, found = self.data.options.record, []
            predicted: Iterator[Any] = self._predicted(candidate, piece)
            for each, (_, y) in zip(predicted, self.pieces[piece], strict=True):
                at = [replace(each, temperature=t) for t in _TEMPERATURES] if record.tempered else [each]
                y = y.to(each.mean.device)
                found.append(torch.stack([record.log_probs(one, y) for one in at]).cpu())
            self._known[key] = torch.cat(found, dim=1)
        return self._known[key]

    @property
    def finalists(self) -> list[Posterior]:
        """The candidates that were looked at on all pieces."""
        every = range(len(self.pieces))
        return [found for own, found in self.tried.items() if all((*own, piece) in self._known for piece in every)]

    def _predicted(self, candidate: Posterior, piece: int) -> Iterator[Predictive]:
        """Draws batch by batch.

        Those of the linearised network at the same δ/w are one set, f + J (θ − μ) with θ − μ ∝ w^(−½): another weight
        stretches them, as long as they fit the memory budget.
        """
        batches, (weight, delta, noise) = self.pieces[piece], _identity(candidate)
        if self.data.options.predictive != "linearised-sampled":
            return self.data.predicted(candidate, batches)
        key = (f"{delta / weight:.5g}", noise, piece)
        if key not in self._drawn:
            self._drawn[key] = weight, self._kept(self.data.predicted(candidate, batches))
        known, found = self._drawn[key]
        if not found:
            return self.data.predicted(candidate, batches)
        return (_stretched(each, known / weight) for each in found)

    def _kept(self, predicted: Iterator[Predictive]) -> list[Predictive]:
        """All of them, or none where they would not fit the memory budget beside those kept before."""
        found: list[Predictive] = []
        spent = sum(_bytes(each) for _, before in self._drawn.values() for each in before)
        for each in predicted:
            found.append(each)
            spent += _bytes(each)
            if spent > self.data.options.memory_budget:
                return []
        return found


def by_repeated_prediction(start: Posterior, chosen: Tensor, predictions: Predictions) -> Posterior:
    """Start from what suits the linearised network, then go uphill under the real predictive, in ever smaller steps.

    First in steps of ten, along scale and prior together and along the prior alone; then, along both, in smaller ones on
    more examples. Of classes each candidate has its own temperature. `chosen`, booleans, says which examples are fitted to.
    """
    best = start
    last = len(predictions.pieces) - 1
    for level, moves, rise in zip(range(len(LEVELS)), (_COARSE, _FINE), _RISES, strict=True):
        found = predictions.scored(best, chosen, min(level, last))
        for together, factor in moves:
            for step in (factor, 1 / factor):
                for _ in range(_MOST_STEPS):
                    candidate = _moved(best, step, together=together)
                    fresh = predictions.scored(candidate, chosen, min(level, last))
                    if not fresh.value > found.value + rise:
                        break
                    best, found = candidate, fresh
    if not math.isfinite(found.value):
        raise CalibrationError(
            "no scale or prior precision gives a finite log-likelihood under "
            f"predictive={predictions.data.options.predictive!r}; the posterior is unchanged. Use predictive='linearised'"
        )
    return best.replace(temperature=found.temperature)


def best_known(chosen: Tensor, predictions: Predictions) -> Posterior:
    """The finalist of a search that suits the chosen examples best, at their own temperature: nothing is predicted again."""
    last = len(predictions.pieces) - 1
    found = [(predictions.scored(each, chosen, last), each) for each in predictions.finalists]
    scored, best = max(found, key=lambda pair: pair[0].value)
    return best.replace(temperature=scored.temperature)


def _moved(posterior: Posterior, step: float, *, together: bool) -> Posterior:
    """The prior times a step, and the scale with it, or not."""
    settings = posterior.settings
    prior = {name: step * delta for name, delta in settings.prior_precision.items()}
    scale = settings.scale * (step if together else 1.0)
    return posterior.replace(scale=scale, prior_precision=prior, covariant=settings.covariant)


def _identity(posterior: Posterior) -> tuple[float, float, str]:
    """What tells candidates for one network apart: w, δ of the first parameter, to which all others are in proportion, and σ²."""
    first = next(iter(posterior.prior_precision.values()))
    delta = float(first.flatten()[0] if isinstance(first, Tensor) else first)
    noise = posterior.noise_variance
    of_noise = "" if noise is None else str(noise.tolist())
    return float(f"{posterior.settings.weight:.6g}"), float(f"{delta:.6g}"), of_noise


def _peak(values: Sequence[float]) -> _Scored:
    """The vertex of the parabola, in log T, through the best of the temperatures and its neighbours."""
    top = max(range(len(values)), key=values.__getitem__)
    if not 0 < top < len(values) - 1 or not all(map(math.isfinite, values[top - 1 : top + 2])):
        return _Scored(values[top], _TEMPERATURES[top])
    before, at, after = values[top - 1 : top + 2]
    bend = before - 2 * at + after
    shift = 0.5 * (before - after) / bend if bend < 0 else 0.0
    return _Scored(at - 0.25 * (before - after) * shift, _TEMPERATURES[top] * 2 ** (shift / 2))


def _stretched(found: Predictive, factor: float) -> Predictive:
    """The same draws with `factor` times their variance."""
    assert found.draws is not None
    draws = found.mean + math.sqrt(factor) * (found.draws - found.mean)
    return replace(found, draws=draws, variance=factor * found.variance)


def _bytes(found: Predictive) -> int:
    return 0 if found.draws is None else found.draws.numel() * found.draws.element_size()
