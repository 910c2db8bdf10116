"""Held-out data: moments of the outputs there, and what targets are worth under them."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import BayesAdamWarning
from bayesadam.gaussian.structure import Directions
from bayesadam.likelihoods import Likelihood, Predictive
from bayesadam.likelihoods.predictive import place_blocks
from bayesadam.posterior import Posterior
from bayesadam.posterior.distribution import predictive_of
from bayesadam.predict.call import Call, chosen_examples, evaluating, explaining, to_device
from bayesadam.predict.moments import Moments, VarianceOf, moments, parameters_at_mean
from bayesadam.predict.options import Options, Rows, at_one_position
from bayesadam.predict.plan import plan_for

Batches = Sequence[tuple[Any, Tensor]]
# Temperatures from the coldest to the hottest there may be.
COLDEST, HOTTEST = 0.25, 20.0
# Standard deviations of log T before any example is seen, below T = 1 and above: more networks are too sure than too unsure.
_COLD, _HOT = 0.5, 1.0
# Of texts with many possible tokens so many places are looked at, each.
_PLACES = 4


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of predictions that a user has not asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayesAdamWarning)
        yield


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out data and how the model is called on it; `step` is told of every batch that the model has seen."""

    posterior: Posterior
    batches: Batches
    options: Options
    seed: int
    step: Callable[[], object] = lambda: None

    def moments(
        self,
        posterior: Posterior,
        variances: Sequence[VarianceOf],
        *,
        covariance: bool = False,
        directions: Sequence[Directions | None] = (),
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]]:
        """Mean, variances (k, ...), covariance, targets and the numbers of their examples, batch by batch, at a posterior's mean.

        Of classes these have a row for every place that counts, (n, c), (k, n, c), (n, c, c) and (n,). Where there are many
        classes it is a few places of each example that have one, and variances of 0 but for the largest outputs, as
        predictions have them.
        """
        record, budget, bases = self.options.record, self.options.memory_budget, posterior.structure.bases
        call = Call(self.posterior.model, self.options.forward)
        params = parameters_at_mean(posterior)
        device = next(iter(params.values())).device
        first = 0
        with evaluating(self.posterior.model):
            for number, (inputs, y) in enumerate(self.batches):
                self.step()
                own = torch.arange(first, first + len(y))
                first += len(y)
                inputs = to_device(inputs, device)
                plan = plan_for(call, params, inputs)
                ask = partial(moments, params=params, variances=variances, budget=budget, bases=bases)
                if replace(self.options, predictive="linearised").has_many(plan.shape) and not covariance:
                    places = _some_places(record, y.to(device), plan.shape, seed=number)
                    for given, at, rows, targets in _at_places(call, params, inputs, y.to(device), places):
                        found = ask(at, inputs=given, directions=directions, rows=Rows(record, k=10, top=True))
                        yield found.mean[rows], _scattered(found)[:, rows], None, targets[rows], own[rows.cpu()]
                    continue
                found = ask(call, inputs=inputs, covariance=covariance, directions=directions, plan=plan)
                y = record.matched(y.to(device), found.mean)
                keep = record.counted(found.mean, y)
                block = None if found.covariance is None else place_blocks(found.covariance[0], found.mean)[keep]
                owner = own[examples_of(record, [(inputs, y)])]
                yield found.mean[keep], found.variance[:, keep], block, y[keep], owner

    def scores(self, mean: Tensor, variances: Tensor, y: Tensor, **of_outputs: Any) -> list[float]:
        """Mean log-likelihood of the targets, and log p(T), under each of k sets of variances, (k, n, ...); −∞ where not finite."""
        k = len(variances)
        means, targets = mean.expand(k, *mean.shape).flatten(0, 1), y.expand(k, *y.shape).flatten(0, 1)
        found = self.options.record.predictive(means, variances.flatten(0, 1), link=self.options.link, **of_outputs)
        values = found.log_prob(targets).reshape(k, -1).mean(dim=1, dtype=torch.float64)
        values += log_prior(of_outputs.get("temperature", 1.0)) / max(len(y), 1)
        return [value if math.isfinite(value) else -math.inf for value in values.tolist()]

    def score(self, mean: Tensor, variance: Tensor, y: Tensor, **of_outputs: Any) -> float:
        """The same under one set of variances, (n, ...)."""
        return self.scores(mean, variance[None], y, **of_outputs)[0]

    def outputs(self, posterior: Posterior) -> tuple[Tensor, Tensor]:
        """Outputs of the mean network and the targets that count, (n, ...)."""
        record, params, parts = self.options.record, parameters_at_mean(posterior), []
        call, device = Call(posterior.model, self.options.forward), next(iter(params.values())).device
        with evaluating(posterior.model), torch.no_grad():
            for inputs, targets in self.batches:
                with explaining(call, params, inputs):
                    outputs = call(params, to_device(inputs, device))
                outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
                targets = record.matched(targets.to(device), outputs)
                keep = record.counted(outputs, targets)
                parts.append((outputs[keep], targets[keep]))
                self.step()
        mean, y = (torch.cat(part) for part in zip(*parts, strict=True))
        return mean, y

    def temperature(self, posterior: Posterior) -> float:
        """T of the greatest log-likelihood and prior of the mean network."""
        mean, y = self.outputs(posterior)
        return self.best_temperature(mean, torch.zeros_like(mean), y, start=1.0, reach=math.log(HOTTEST))

    def best_weight(
        self, mean: Tensor, table: Tensor, y: Tensor, *, start: float, most: float, **of_outputs: Any
    ) -> float:
        """w of the greatest log-likelihood, the variances being table/w."""
        return _refined(lambda w: self.score(mean, table / w, y, **of_outputs), start, most=most)

    def best_temperature(self, mean: Tensor, variance: Tensor, y: Tensor, *, start: float, reach: float) -> float:
        """T of the greatest log-likelihood and prior, within bounds."""
        least = math.log(COLDEST)
        return _refined(lambda t: self.score(mean, variance, y, temperature=t), start, reach=reach, least=least)

    def predicted(self, posterior: Posterior, batches: Batches) -> Iterator[Predictive]:
        """The predictive that is calibrated, batch by batch, always with the same random numbers."""
        for inputs, _ in batches:
            with quietly():
                generator = torch.Generator().manual_seed(self.seed)
                found = predictive_of(posterior, inputs, replace(self.options, generator=generator, novelty=False))
            self.step()
            yield found


def log_prior(temperature: float) -> float:
    """log p(T) but for a constant, −½ (log T/τ)² with τ = ½ below T = 1 and 1 above.

    A few examples that are all told right would else ask for the coldest temperature there is, and the next one that is not
    would cost dearly; hundreds of them outvote it.
    """
    log = math.log(temperature)
    return -0.5 * (log / (_COLD if log < 0 else _HOT)) ** 2


def n_examples(batches: Batches) -> int:
    """How many examples all batches have."""
    return sum(len(y) for _, y in batches)


def cut(batches: Batches, chosen: Tensor) -> Batches:
    """The examples that are chosen, booleans, over all batches; none of those that have none."""
    found, first = [], 0
    for inputs, y in batches:
        rows = chosen[first : first + len(y)].nonzero().flatten()
        first += len(y)
        if len(rows):
            found.append((chosen_examples(inputs, rows), y[rows.to(y.device)]))
    return found


def examples_of(record: Likelihood, batches: Batches) -> Tensor:
    """The number of the example to which each target that counts belongs, in order."""
    y = [y.cpu() for _, y in batches]
    firsts = [sum(map(len, y[:i])) for i in range(len(y))]
    own = [torch.arange(len(t)) if record.ignored is None else (t != record.ignored).nonzero()[:, 0] for t in y]
    return torch.cat([first + each for first, each in zip(firsts, own, strict=True)])


def _scattered(found: Moments) -> Tensor:
    """Variances of all outputs, (k, b, c): 0 but for those asked for."""
    whole = found.variance.new_zeros(len(found.variance), *found.mean.shape)
    return whole.scatter(2, found.indices.expand(len(whole), -1, -1), found.variance)


def _some_places(record: Likelihood, y: Tensor, shape: torch.Size, *, seed: int) -> Tensor | None:
    """Some of the places that count, a mask (batch, places), drawn at random but always the same; None where there is one."""
    if len(shape) == 1:
        return None
    # Their shape alone is looked at.
    outputs = torch.empty(len(y), *shape, device="meta")
    counted = record.counted(outputs, record.matched(y, outputs))
    assert isinstance(counted, Tensor)
    flat = counted.reshape(len(y), -1)
    order = torch.rand(flat.shape, generator=torch.Generator().manual_seed(seed)).to(flat.device) * flat
    few = min(_PLACES, flat.shape[1])
    return torch.zeros_like(flat).scatter(1, order.topk(few, dim=1).indices, True) & flat


def _at_places(
    call: Call, params: Mapping[str, Tensor], inputs: Any, y: Tensor, places: Tensor | None
) -> Iterator[tuple[Any, Call, Tensor, Tensor]]:
    """Inputs, the call for them, which rows count and their targets, place after place."""
    if places is None:
        yield inputs, call, torch.ones(len(y), dtype=torch.bool, device=y.device), y
        return
    cut, _ = at_one_position(call, params, inputs)
    order = places.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    for turn in range(int(places.sum(dim=1).max())):
        place = order[:, turn]
        rows = places.gather(1, place[:, None]).squeeze(1)
        yield (inputs, place), cut, rows, y.reshape(len(y), -1).gather(1, place[:, None]).squeeze(1)


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
