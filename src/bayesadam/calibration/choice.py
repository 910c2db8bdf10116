"""`calibrate`: settings fitted to held-out data, compared on examples that they were not fitted to."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from bayesadam._kinds import require_kind
from bayesadam._progress import Bar
from bayesadam._warnings import warn
from bayesadam.calibration.data import Batches, HeldOut, cut, examples_of, n_examples, quietly
from bayesadam.calibration.evidence import by_evidence
from bayesadam.calibration.repeated import Predictions, best_known, by_repeated_prediction
from bayesadam.calibration.validation import Tables, by_validation, tables_of
from bayesadam.errors import HeldOutWarning, SettingError, UnusedPosteriorWarning
from bayesadam.gaussian.noise import fresh_seed
from bayesadam.held_out import aligned
from bayesadam.likelihoods import LikelihoodName, Link, Predictive
from bayesadam.likelihoods.conformal import Guarantee
from bayesadam.likelihoods.predictive import FEWEST_SCORED, has_novelty
from bayesadam.likelihoods.record import CalibrationMethod
from bayesadam.posterior import Mixture, Posterior
from bayesadam.posterior.distribution import predictive_of
from bayesadam.posterior.report import CalibrationReport, settings_of
from bayesadam.predict.call import Forward
from bayesadam.predict.options import DEFAULT_BUDGET, Options, PredictiveKind

AnyPosterior = TypeVar("AnyPosterior", Posterior, Mixture)
# What is compared, and how many parameters each fits.
_POSTERIOR, _TEMPERATURE, _ALONE = "posterior", "best temperature alone", "network alone"
_PARAMETERS = {_POSTERIOR: 3, _TEMPERATURE: 1, _ALONE: 0}
# Below that many examples five folds cost little, and leave enough to fit.
_FEW = 200
# So many examples tell whether they belong to the likelihood.
_JUDGED = 1000
# So near to the largest novelty there can be, as a share of it, scores do not tell examples apart.
_SATURATED = 1e-3
# A negative log-likelihood below that share of it is that of a network that tells classes apart.
_TOLD_APART = 0.9
# A network is out of place that is sure and wrong, so many times worse than a guess, and then at its best temperature no better
# than one by more than that share, or so hot.
_WORSE, _NO_BETTER, _TOO_HOT = 2.0, 0.98, 6.0
# By how many standard errors of the mean difference the posterior has to beat the best temperature.
_SURE = 1.5


def calibrate(
    posterior: AnyPosterior,
    batches: Any,
    *,
    likelihood: LikelihoodName,
    method: CalibrationMethod | None = None,
    predictive: PredictiveKind = "linearised",
    n_samples: int = 30,
    link: Link = "probit",
    forward: Forward | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int = DEFAULT_BUDGET,
    folds: int | None = None,
) -> AnyPosterior:
    """A posterior whose numbers can be trusted, from held-out data; the one given is not changed.

    `"validation"` chooses s and δ (and σ² of a regression) by the predictive log-likelihood of the held-out data, under
    the very predictive that will be used. Of classes it chooses a temperature T with them, within bounds that leave the
    outputs a variance and under a prior, −½ (log T/τ)² nats with τ = ½ below 1 and 1 above, for which a few examples that
    are all right are no reason to be certain, and compares with the best temperature alone: where the posterior is not
    better by more than 1.5 standard errors, probabilities are the mean network's at that temperature, a warning and the
    report say so, and the posterior stays for all else.

    `"evidence"` takes σ² of greatest likelihood from the held-out residuals r ~ N(0, σ² + Var[f]), s so that the total
    curvature Σ w c equals that of the generalised Gauss-Newton matrix, N E[Σ J² Λ], and δ by MacKay's fixed point
    δ = γ/|θ|², γ = Σ w c/(w c + δ). Validation inside the data cannot see what δ does outside it and shrinks the uncertainty there to
    nothing, so regression defaults to evidence; for classification evidence fails where validation works, so that is the
    default there, as for every likelihood without a noise of its own to estimate. Either way δ comes out as one number for
    all parameters, whatever it was before; a `LoraPrior` is multiplied by one number. `novelty` is not touched.

    What is compared, and what stands behind `prediction_set` and `novelty_pvalue`, are scores of examples under settings
    that were fitted to the others; the settings themselves are fitted to all. `posterior.calibration` says what was done.

    Under a predictive that samples, every candidate is a prediction of its own: the search starts from what suits the
    linearised network, takes coarse steps on 500 of the examples, drawn at random, and fine ones on 2,000 (of the noise of
    a regression all of them tell). A fit to a part of the examples then chooses among the candidates of the fine steps, by
    the log-likelihood of that part alone, with a temperature of its own.

    Args:
        posterior: the posterior to calibrate; the members of a mixture are calibrated one by one.
        batches: held-out data: a loader of (inputs, targets), of mappings with their labels, or one such pair. Targets
            belong to the outputs at their places; labels inside a mapping are taken as the model's own loss takes them,
            which for a causal language model is one place further on. Classes of −100 are left out.
        method: `"validation"` or `"evidence"`; None takes the default above.
        predictive: what `predict` will be called with; so are the rest.
        folds: into how many parts the data are cut, each scored under a fit to the others; None for 2, or 5 where there are
            fewer than 200 examples. With 1, or fewer than 20 examples, there are no such scores, hence no guarantees.

    Raises:
        CalibrationError: nothing tried gave a finite score.
        MatchError: it is not clear which output a label belongs to: pass `forward`, and targets to match its outputs.
    """
    if method is not None and method not in get_args(CalibrationMethod):
        raise SettingError(f"method must be one of {get_args(CalibrationMethod)}, got {method!r}")
    if folds is not None and (isinstance(folds, bool) or not isinstance(folds, int) or folds < 1):
        raise SettingError(f"folds must be a whole number of at least 1, got {folds!r}")
    options = Options(
        likelihood=likelihood,
        predictive=predictive,
        n_samples=n_samples,
        link=link,
        forward=forward,
        memory_budget=memory_budget,
    )
    require_kind(posterior, (Posterior, Mixture), "posterior")
    # Every candidate sees the same random numbers, so that they differ by their settings alone.
    seed = 0 if predictive == "linearised" else fresh_seed(generator)
    members = posterior.members if isinstance(posterior, Mixture) else (posterior,)
    held_out = list(aligned(members[0], batches, likelihood=likelihood, forward=forward))
    weights = posterior.weights if isinstance(posterior, Mixture) else (1.0,)
    with Bar("calibrate") as bar:
        task = _Task(members, weights, options, seed, method or options.record.calibration, held_out, bar.step)
        _warn_of_doubt(task)
        fits = [network.whole for network in task.networks]
        for fit in fits:
            fit.posterior.warn_of_limits()
        report, found = _chosen(task, fits, folds)
    if isinstance(posterior, Mixture):
        return Mixture(found, posterior.weights, calibration=report)
    return replace(found[0], calibration=report)


class _Fit(NamedTuple):
    """A posterior with the settings that the data prefer, and what suits the mean network alone: a temperature, or a noise."""

    posterior: Posterior
    temperature: float = 1.0
    noise_variance: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Network:
    """One network on all held-out data; what it computes there serves the fits to any of the examples."""

    data: HeldOut
    method: CalibrationMethod

    @cached_property
    def predictions(self) -> Predictions:
        return Predictions.of(self.data)

    @cached_property
    def tables(self) -> Tables:
        """Of all examples, or of those that are predicted again and again, to which they are a start."""
        data = self.data
        if data.options.predictive == "linearised":
            return tables_of(data.posterior, data, torch.arange(n_examples(data.batches)))
        looked_at = replace(data, batches=[batch for piece in self.predictions.pieces for batch in piece])
        return tables_of(data.posterior, looked_at, torch.cat(list(self.predictions.examples)))

    @cached_property
    def whole(self) -> _Fit:
        """Fitted to all examples."""
        return self._fitted(torch.ones(n_examples(self.data.batches), dtype=torch.bool), self.data)

    def fitted(self, chosen: Tensor) -> _Fit:
        """Fitted to the examples that are chosen, booleans.

        Under a predictive that samples, and with no noise of their own, they choose among the finalists of the fit to all.
        """
        whole = self.whole
        if self.data.options.predictive != "linearised" and not self.data.options.record.noise:
            return _Fit(best_known(chosen, self.predictions), whole.temperature)
        return self._fitted(chosen, replace(self.data, batches=cut(self.data.batches, chosen)))

    def _fitted(self, chosen: Tensor, data: HeldOut) -> _Fit:
        if self.method == "evidence":
            best = by_evidence(data.posterior, data)
        else:
            best = by_validation(data.posterior, data, self.tables.of(chosen))
        if data.options.predictive != "linearised":
            return _Fit(by_repeated_prediction(best, chosen, self.predictions))
        if data.options.record.noise:
            mean, y = data.outputs(best)
            return _Fit(best, noise_variance=(y - mean).square().mean(dim=0))
        return _Fit(best, data.temperature(best) if data.options.record.tempered else 1.0)


@dataclass(frozen=True, eq=False)
class _Task:
    """What is calibrated, and how: one network, or the members of a mixture."""

    members: Sequence[Posterior]
    weights: Sequence[float]
    options: Options
    seed: int
    method: CalibrationMethod
    batches: Batches
    step: Callable[[], object]

    @cached_property
    def networks(self) -> list[_Network]:
        """Every member with all that is held out."""
        plain = [member.replace(temperature=1.0, averaged=True) for member in self.members]
        return [
            _Network(HeldOut(member, self.batches, self.options, self.seed, self.step), self.method) for member in plain
        ]

    def fitted(self, chosen: Tensor) -> list[_Fit]:
        """Every member fitted to the examples that are chosen, booleans."""
        return [each.fitted(chosen) for each in self.networks]

    def candidates(self, fits: Sequence[_Fit], inputs: Any) -> dict[str, Predictive]:
        """What may be in use in the end, on one batch: the posterior, and of classes the mean network at a temperature."""
        options = replace(self.options, generator=torch.Generator().manual_seed(self.seed))
        with quietly():
            found = [predictive_of(fit.posterior, inputs, options) for fit in fits]
        named = {_POSTERIOR: found}
        if self.options.record.tempered and self.options.predictive == "linearised":
            both: Any = list(zip(fits, found, strict=True))
            named[_TEMPERATURE] = [replace(p, temperature=fit.temperature, averaged=False) for fit, p in both]
            named[_ALONE] = [replace(p, temperature=1.0, averaged=False) for _, p in both]
        elif self.options.record.noise and self.options.predictive == "linearised":
            moments = [(p.mean, torch.zeros_like(p.mean)) for p in found]
            alone = zip(moments, fits, strict=True)
            named[_ALONE] = [self.options.record.predictive(*m, noise_variance=f.noise_variance) for m, f in alone]
        mixed = len(fits) > 1
        return {n: self.options.record.mixture(each, self.weights) if mixed else each[0] for n, each in named.items()}


class _Scores(NamedTuple):
    """Of every candidate what each example is worth, and what guarantees rest on; `crossed` where no fit saw its examples.

    `limit` is the largest novelty there can be.
    """

    log_probs: Mapping[str, Tensor]
    conformity: Sequence[Mapping[str, Guarantee]]
    novelty: Sequence[Tensor]
    limit: float
    crossed: bool

    @property
    def nll(self) -> dict[str, float]:
        return {name: -float(found.mean()) for name, found in self.log_probs.items()}

    @property
    def best(self) -> str:
        """The posterior where it beats the best temperature beyond chance.

        Fitted to what it is scored on, every parameter wins 1/n instead, as Akaike has it. The network alone does not
        compete: whatever it wins across folds, the best temperature has it on all.
        """
        if _TEMPERATURE not in self.log_probs:
            return _POSTERIOR
        gain = self.log_probs[_POSTERIOR] - self.log_probs[_TEMPERATURE]
        if not bool(gain.isfinite().all()):
            return min(
                (_POSTERIOR, _TEMPERATURE), key=lambda name: v if math.isfinite(v := self.nll[name]) else math.inf
            )
        n, parameters = len(gain), _PARAMETERS[_POSTERIOR] - _PARAMETERS[_TEMPERATURE]
        least = _SURE * float(gain.std()) / math.sqrt(n) if self.crossed else parameters / n
        return _POSTERIOR if float(gain.mean()) > least else _TEMPERATURE


def _scored(task: _Task, fits: Sequence[_Fit], folds: int | None) -> _Scores:
    """Every example under a fit to the others; under `fits` where there are too few of them, or one fold is asked for."""
    record, n = task.options.record, n_examples(task.batches)
    folds = folds or (5 if n < _FEW else 2)
    crossed = folds > 1 and n >= FEWEST_SCORED
    parts = _parts(task.batches, folds) if crossed else [task.batches]
    places = _places(n, len(parts))
    log_probs: defaultdict[str, list[Tensor]] = defaultdict(list)
    conformity: list[dict[str, Guarantee]] = []
    novelty: list[Tensor] = []
    limit = math.inf
    for number, part in enumerate(parts):
        own = task.fitted(places != number) if crossed and part else fits
        for inputs, y in part:
            task.step()
            named = task.candidates(own, inputs)
            y = y.to(next(iter(named.values())).mean.device)
            for name, found in named.items():
                log_probs[name].append(record.log_probs(found, y).double().cpu())
            if not crossed:
                continue
            conformity.append({name: record.conformity(f, y, seed=len(conformity)) for name, f in named.items()})
            if has_novelty(named[_POSTERIOR]):
                # Novelty goes with the noise, and predictions will have that of the fit to all.
                settled = task.candidates(fits, inputs) if record.noise else named
                novelty.append(settled[_POSTERIOR].novelty)
                limit = named[_POSTERIOR].novelty_limit
    return _Scores({name: torch.cat(found) for name, found in log_probs.items()}, conformity, novelty, limit, crossed)


def _chosen(task: _Task, fits: Sequence[_Fit], folds: int | None) -> tuple[CalibrationReport, list[Posterior]]:
    """What predicts from now on, and the report."""
    scores = _scored(task, fits, folds)
    best, nll = scores.best, scores.nll
    _warn_of_saturation(scores, nll[best])
    _warn_of_chance(task, fits, nll)
    averaged = best == _POSTERIOR
    chosen = [
        fit.posterior if averaged else fit.posterior.replace(temperature=fit.temperature, averaged=False)
        for fit in fits
    ]
    temperatures = tuple(each.temperature for each in chosen)
    least, most = (f"{t:.3g}" for t in (min(temperatures), max(temperatures)))
    at = f"temperature {least}" if least == most else f"temperatures from {least} to {most}"
    if averaged:
        preferred = "the posterior is in use" + (f", with logits at {at}" if task.options.record.tempered else "")
    else:
        mean = f"the mean network at {at}"
        why = (
            f"what the posterior gains over {mean} may be chance"
            if nll[_POSTERIOR] < nll[best]
            else f"the data prefer {mean}"
        )
        preferred = f"{why}: probabilities do not average over the posterior"
        warn(
            f"{preferred} (negative log-likelihood {nll[best]:.4f} against {nll[_POSTERIOR]:.4f}). Variances, draws and "
            "novelty are those of the posterior all the same",
            UnusedPosteriorWarning,
        )
    n = n_examples(task.batches)
    guarantee = Guarantee.joined([each[best] for each in scores.conformity], scores.novelty)
    of_data = task.options.likelihood, task.method, n, n if scores.crossed else 0
    before = settings_of(task.members)
    return CalibrationReport(*of_data, nll, temperatures, averaged, preferred, guarantee, before), chosen


def _warn_of_doubt(task: _Task) -> None:
    """Warn where the data look like those of another likelihood, or where there are too few."""
    record, first = task.options.record, task.networks[0].data
    total = n_examples(task.batches)
    # Logits show themselves in one example, and those of a text may be many.
    some = cut(task.batches, torch.arange(total) < (1 if record.coupled else _JUDGED))
    if (doubt := record.doubt(*replace(first, batches=some).outputs(first.posterior))) is not None:
        warn(doubt, HeldOutWarning)
    if (counted := len(examples_of(record, task.batches))) < FEWEST_SCORED:
        warn(
            f"{counted} held-out targets are too few to calibrate on: what is fitted to them may be chance. Hold out "
            f"{FEWEST_SCORED} at the least, better some hundreds",
            HeldOutWarning,
        )


def _warn_of_saturation(scores: _Scores, nll: float) -> None:
    """Warn where held-out examples are all as novel as can be, though the network knows their classes."""
    least = min((float(each.min()) for each in scores.novelty), default=0.0)
    if nll < _TOLD_APART * scores.limit and (1 - _SATURATED) * scores.limit < least:
        warn(
            f"the novelty of all held-out examples is near {scores.limit:.3g}, the largest there can be, so that little is left "
            "by which it could tell them from others: try it on inputs that you know to be unlike them, beside p.entropy() and "
            "p.epistemic, before you rely on it"
        )


def _warn_of_chance(task: _Task, fits: Sequence[_Fit], nll: Mapping[str, float]) -> None:
    """Warn where the network is sure of the held-out classes and wrong, as by labels of other inputs or inputs of another scale."""
    if _TEMPERATURE not in nll or not task.options.record.coupled or n_examples(task.batches) < FEWEST_SCORED:
        return
    guess = math.log(max(int(torch.cat([y.flatten() for _, y in task.batches]).max()) + 1, 2))
    hottest = max(fit.temperature for fit in fits)
    if nll[_ALONE] > _WORSE * guess and (nll[_TEMPERATURE] > _NO_BETTER * guess or hottest > _TOO_HOT):
        warn(
            f"the network is worse on the held-out data than a guess among their classes (negative log-likelihood "
            f"{nll[_ALONE]:.3g} against {guess:.3g}, {nll[_TEMPERATURE]:.3g} at its best temperature): are the labels those of "
            "these inputs, and are the inputs scaled as in training?",
            HeldOutWarning,
        )


def _places(total: int, folds: int) -> Tensor:
    """Which part each example is in: parts of equal size, drawn at random but always the same."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(0)) % folds


def _parts(batches: Batches, folds: int) -> list[Batches]:
    """The examples part by part."""
    places = _places(n_examples(batches), folds)
    return [cut(batches, places == number) for number in range(folds)]
