"""`calibrate`: settings fitted to held-out data, what familiar inputs look like, and the scores behind guarantees."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from bayesadam._checks import count, require_kind
from bayesadam._progress import Bar
from bayesadam._warnings import warn
from bayesadam.calibration.fits import (
    at_one,
    best_temperature,
    by_draws,
    by_evidence,
    by_forward,
    by_validation,
    temperature_pays,
)
from bayesadam.calibration.held_out import HeldOut, Observed, aligned, quietly
from bayesadam.calibration.leaked import UNLIKELY, balance
from bayesadam.errors import HeldOutWarning, MatchError, SettingError
from bayesadam.gaussian.noise import fresh_seed
from bayesadam.leverage import Ratios
from bayesadam.likelihoods import Component, Link, agreed
from bayesadam.likelihoods.abstention import AnswerBy, abstention, check_abstention, remedy
from bayesadam.likelihoods.conformal import Guarantee, joined
from bayesadam.likelihoods.predictive import FEWEST_SCORED, CalibrationMethod, Predictive
from bayesadam.posterior import Mixture, Posterior
from bayesadam.posterior.distribution import by_leverage, component_of_member, grown
from bayesadam.posterior.inputs import fingerprints, ranges_of
from bayesadam.posterior.report import CalibrationReport, settings_of
from bayesadam.predict.call import Forward
from bayesadam.predict.moments import DEFAULT_BUDGET
from bayesadam.predict.prediction import Options, PredictiveKind

AnyPosterior = TypeVar("AnyPosterior", Posterior, Mixture)
# A network is out of place if it is so many times worse than a guess, and at its best temperature not better than this
# share of one, or so hot.
_WORSE, _NO_BETTER, _TOO_HOT = 2.0, 0.98, 6.0
# It is so, too, where it is worse than a guess at all and hotter than this.
_ABSURD = 30.0
# The share of held-out examples that may be there before.
_REPEATED = 0.05
# The same of numbers, if its mean squared error is so many times that of the targets' mean, and their correlation shows
# that it was trained for them.
_FAR_OFF, _FOLLOWS = 4.0, 0.3
# Temperatures grow with leverage by the first exponent at which held-out data lose at most 0.5 % of their likelihood.
_EXPONENTS, _DEAREST = (0.5, 0.375, 0.25, 0.125, 0.0), 1.005
_IN_USE, _TEMPERATURE, _ALONE = "calibrated", "best temperature alone", "network alone"
_WITHOUT = "T₀ stays 1: the network alone predicts examples better than a temperature fitted to the others"


def calibrate(
    posterior: AnyPosterior,
    batches: Any,
    *,
    likelihood: str | None = None,
    method: CalibrationMethod | None = None,
    predictive: PredictiveKind = "linearised",
    n_samples: int = 30,
    link: Link = "probit",
    risk: float | None = None,
    confidence: float = 0.95,
    tolerance: float | None = None,
    answer_by: AnswerBy = "confidence",
    forward: Forward | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int = DEFAULT_BUDGET,
) -> AnyPosterior:
    """A posterior whose numbers can be trusted, from held-out data; the one given is not changed.

    - `"temperature"`, the default of classes: T₀ of probabilities softmax(f/T(x)), T(x) = T₀ √((1 + r(x))/2);
    - `"validation"`, of counts and heteroscedastic targets: s, δ, and T or σ², by the log-likelihood of the predictive;
    - `"evidence"`, of a regression: σ² by the residuals y − f ~ N(0, σ² + Var[f]), s so that the total curvature Σ w c
      is the trace of N times the Gauss-Newton matrix, δ by MacKay's fixed point γ/|θ|².

    r(x) is the leverage of an input relative to that of the held-out inputs, 1 for the usual one: probabilities grow
    humble where layers have to extrapolate. The exponent ½ is smaller where held-out data would lose more than 0.5 % of
    their likelihood by it. Of 100 examples and more, T₀ stays 1 where that is likelier than a temperature fitted to
    other folds, of five that examples are dealt to by their loss, four times anew. `"validation"` averages
    probabilities over the posterior instead. T has a prior, −½ (log T/τ)² nats with τ = ½ below 1 and 1 above, so that
    a few examples that are all right are no reason to be certain. Validation inside the data cannot see what δ does
    outside it and shrinks the uncertainty there to nothing, so that regression defaults to evidence. δ comes out as one
    number for all parameters; a `LoraPrior` is multiplied by one number. Under a predictive that samples, s and δ of
    the linearised network are multiplied by the best of powers of ten from 0.1 to 10⁵ in half steps. Under `"forward"`
    the only settings are T₀ of classes, or v of Var[f] = v r, and σ² of a regression, by the likelihood of y.

    `novelty_pvalue`, `prediction_set` and `interval` rest on the scores of the held-out examples: each is left out of
    its own leverage, and the one to three settings are fitted to all. `posterior.calibration` is the report.

    With `risk`, `predict(x).answered` says which inputs to answer, and which to leave to a person: as many as can be
    shown to have at most `risk` of their answers wrong, on data like the held-out. Of all calibrations at most
    1 − `confidence` allow more errors. Where nothing can be shown it warns, and no input is answered.

    Args:
        posterior: the posterior to calibrate; the members of a mixture are calibrated one by one.
        batches: held-out data: a loader of (inputs, targets), of mappings with their labels, or one such pair. Targets
            belong to the outputs at their positions; labels inside a mapping are taken as the model's own loss takes
            them, which for a causal language model is one position further on. Classes of −100 are left out.
        likelihood: of the targets; the result keeps it. None for the posterior's own.
        method: see above; None takes the default.
        predictive: the one that `predict` will be called with; so are the rest, but for the next four.
        risk: the share of wrong answers, where inputs may be left unanswered: 0.02 for 2 %.
        confidence: that the share is not larger.
        tolerance: of numbers, in units of y: an answer farther than that from y is wrong.
        answer_by: what is answered first: `"confidence"`, by `doubt`, or `"novelty"`.

    Raises:
        CalibrationError: nothing tried gave a finite score.
        MatchError: it is not clear which output a label belongs to: pass `forward`, and targets to match its outputs;
            or `risk` was given and examples have no answer, or one for each of many positions.
        SettingError: no likelihood was ever given, or another than the posterior's.
    """
    if method is not None and method not in get_args(CalibrationMethod):
        raise SettingError(f"method must be one of {get_args(CalibrationMethod)}, got {method!r}")
    require_kind(posterior, (Posterior, Mixture), "posterior")
    name = agreed(likelihood, posterior.likelihood)
    # Settings are chosen by the spread of draws.
    count("n_samples", n_samples, "draws", least=2)
    of_predict: Any = {"n_samples": n_samples, "link": link, "forward": forward, "memory_budget": memory_budget}
    options = Options(likelihood=name, predictive=predictive, **of_predict)
    record = options.record
    check_abstention(risk, confidence, tolerance, answer_by, tempered=record.tempered)
    if method is None:
        alone = predictive == "forward" and not record.tempered
        method = record.calibration if predictive in ("linearised", "forward") or not record.tempered else "validation"
        method = "validation" if alone else method
    elif method == "temperature" and not record.tempered:
        raise SettingError(f"method='temperature' is for classes, and the likelihood is {name!r}")
    elif predictive == "forward" and method != ("temperature" if record.tempered else "validation"):
        raise SettingError(f"predictive='forward' has no method={method!r}: leave it out")
    # Every candidate sees the same random numbers, so that they differ by their settings alone.
    seed = 0 if predictive == "linearised" else fresh_seed(generator)
    members = posterior.members if isinstance(posterior, Mixture) else (posterior,)
    weights = posterior.weights if isinstance(posterior, Mixture) else (1.0,)
    held_out = list(aligned(members[0], batches, likelihood=name, forward=forward))
    with Bar("calibrate") as bar:
        data = [HeldOut(q.replace(temperature=1.0, averaged=True), held_out, options, seed, bar.step) for q in members]
        found = [_fitted(each, method) for each in data]
        wrong = None if risk is None else partial(_wrong, tolerance=tolerance, by=answer_by)
        guarantee, scored, answers = _scored(data, found, weights, wrong)
    nll, errors = ({name: of[part] for name, of in scored.items()} for part in (0, 1))
    rule = None
    if risk is not None:
        rule = abstention(*answers, risk=risk, confidence=confidence, by=answer_by, tolerance=tolerance)
        if rule.threshold is None:
            warn(remedy(*answers, risk=risk, confidence=confidence), HeldOutWarning)
    _warn_of_data(data[0], found, nll)
    after = [replace(each.posterior, likelihood=name) for each in found]
    n = sum(len(y) for _, y in held_out)
    report = CalibrationReport(
        likelihood=name,
        method=method,
        n_fitted=n,
        n_scored=n if n >= FEWEST_SCORED else 0,
        nll=nll,
        errors=errors,
        temperatures=tuple(each.temperature for each in after),
        averaged=method != "temperature",
        preferred=_in_words(method, after),
        guarantee=guarantee if n >= FEWEST_SCORED else {},
        before=settings_of(members),
        inputs=ranges_of(inputs for inputs, _ in held_out),
        abstention=rule,
    )
    if isinstance(posterior, Mixture):
        return Mixture(after, posterior.weights, calibration=report)
    return replace(after[0], calibration=report)


class _Fit(NamedTuple):
    """A posterior with the settings that the data prefer, and what it saw of them.

    `temperature` is the best without regard to leverage.
    """

    posterior: Posterior
    seen: Observed
    temperature: float = 1.0


def _fitted(data: HeldOut, method: CalibrationMethod) -> _Fit:
    """One network's fit to all examples."""
    record, predictive, seen = data.options.record, data.options.predictive, data.observed
    posterior = replace(data.posterior, leverage=seen.leverage if seen.leverage.layers else None)
    data = replace(data, posterior=posterior)
    plain = best_temperature(data.options, seen.outputs, seen.targets)[0] if record.tempered else 1.0
    if method == "temperature":
        ratios, best = _grown_temperature(seen, partial(best_temperature, data.options, y=seen.targets))
        pairs = seen.outputs, _tempered(seen, ratios)
        if not temperature_pays(data.options, *pairs, seen.targets, seen.owners, best):
            ratios, best = _grown_temperature(seen, partial(at_one, data.options, y=seen.targets))
        leverage = posterior.leverage and replace(posterior.leverage, exponent=ratios.exponent)
        posterior = posterior.replace(temperature=best, averaged=False, leverage=leverage)
        return _Fit(posterior, seen._replace(ratios=ratios), plain)
    if predictive == "forward":
        return _Fit(by_forward(posterior, data), seen)
    found = by_evidence(posterior, data) if method == "evidence" else by_validation(posterior, data)
    found = found if predictive == "linearised" else by_draws(found, data)
    return _Fit(found, seen, plain)


def _tempered(seen: Observed, ratios: Ratios) -> Tensor:
    """The outputs, each over the growth of its example's temperature."""
    growth = ratios.growth[seen.owners].to(seen.outputs)
    return seen.outputs / growth.view(-1, *[1] * (seen.outputs.dim() - 1))


def _grown_temperature(seen: Observed, fit: Callable[[Tensor], tuple[float, float]]) -> tuple[Ratios, float]:
    """The largest exponent of growth that costs held-out data little, and T₀; `fit` finds T₀ of outputs and a score."""
    _, score = fit(seen.outputs)
    for exponent in _EXPONENTS:
        ratios = replace(seen.ratios, exponent=exponent)
        best, reached = fit(_tempered(seen, ratios))
        if reached >= _DEAREST * score:
            break
    return ratios, best


def _scored(
    data: Sequence[HeldOut],
    fits: Sequence[_Fit],
    weights: Sequence[float],
    wrong: Callable[[Predictive, Tensor], tuple[Tensor, Tensor]] | None,
) -> tuple[Guarantee, dict[str, tuple[float, float]], tuple[Tensor, ...]]:
    """The held-out scores behind guarantees, mean negative log-likelihoods with their errors, and what is wrong."""
    options, record = data[0].options, data[0].options.record
    log_probs: defaultdict[str, list[Tensor]] = defaultdict(list)
    conformity, novelty, answers, first = [], [], [], 0
    for number, (inputs, y) in enumerate(data[0].batches):
        rows, first = slice(first, first + len(y)), first + len(y)
        components = [_component(each, fit, inputs, rows) for each, fit in zip(data, fits, strict=True)]
        candidates = {_IN_USE: components}
        if record.tempered:
            alone = [replace(c, draws=None, averaged=False, growth=None) for c in components]
            for name, at in ((_TEMPERATURE, [fit.temperature for fit in fits]), (_ALONE, [1.0] * len(fits))):
                candidates[name] = [replace(c, temperature=t) for c, t in zip(alone, at, strict=True)]
        for name, each in candidates.items():
            p = record.predictive(each, weights, link=options.link)
            y = y.to(p.mean.device)
            log_probs[name].append(record.log_probs(p, y).double().cpu())
            if name == _IN_USE:
                conformity.append(p.conformity(y, seed=number))
                novelty.append(p.novelty)
                answers += [] if wrong is None else [wrong(p, y)]
    nll = {k: _mean_and_error(-torch.cat(v)) for k, v in log_probs.items()}
    return joined(conformity, novelty), nll, tuple(torch.cat(part).cpu() for part in zip(*answers, strict=True))


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean, and its standard error; 0 of a single value."""
    return float(values.mean()), float(values.std(correction=min(1, len(values) - 1))) / math.sqrt(len(values))


def _wrong(p: Predictive, y: Tensor, *, tolerance: float | None, by: AnswerBy) -> tuple[Tensor, Tensor]:
    """By which examples are answered, and whether their answers are wrong, (batch,) each."""
    if p.likelihood.coupled and p.mean.dim() > 2:
        raise MatchError(
            f"risk= is for one answer to each example, and the outputs {tuple(p.mean.shape)} have many positions: pass "
            "forward=lambda model, batch: ... that returns the outputs at one of them, with their targets"
        )
    if p.likelihood.ignored is not None and bool((y == p.likelihood.ignored).any()):
        raise MatchError(f"risk= needs the class of every held-out example: leave out those of {p.likelihood.ignored}")
    return p.novelty if by == "novelty" else p.doubt, p.wrong(y, tolerance)


def _component(data: HeldOut, fit: _Fit, inputs: Any, rows: slice) -> Component:
    """The prediction of one batch, its leverage with each example left out of its own."""
    options = replace(data.options, generator=torch.Generator().manual_seed(data.seed), shift=False)
    with quietly():
        found, _ = component_of_member(fit.posterior, inputs, options)
    data.step()
    growth, ratio = fit.seen.ratios.growth[rows], fit.seen.ratios.steep[rows]
    if not options.record.tempered and options.predictive == "forward":
        at, spread = fit.seen.ratios.gentle[rows], fit.posterior.spread
        assert spread is not None
        found = replace(found, variance=by_leverage(options.record, found.mean, at, spread))
    elif not options.record.tempered:
        found = grown(found, growth)
    return replace(found, growth=growth, ratio=ratio)


def _in_words(method: CalibrationMethod, after: Sequence[Posterior]) -> str:
    if method != "temperature":
        return "predictions average over the posterior"
    ends = dict.fromkeys(f"{t:.3g}" for t in (min(q.temperature for q in after), max(q.temperature for q in after)))
    words = f"probabilities are softmax(f/T(x)), T(x) = {' to '.join(ends)} × √((1 + r(x))/2), r the relative leverage"
    kept = sum(q.temperature == 1 for q in after)
    return words + (f"; {_WITHOUT}" + (f" of {kept} of {len(after)} networks" if kept < len(after) else "")) * bool(
        kept
    )


def _warn_of_training(data: HeldOut) -> None:
    """Warn of data on which the gradient of the loss vanishes, as it does on those of training alone."""
    seen = data.observed
    if seen.last is None or seen.outputs.dim() != 2 or len(seen.last) != len(seen.targets):
        return
    chance = balance(data.options.record, seen.outputs, seen.targets, seen.last)
    if chance < UNLIKELY:
        n, n_data = len(seen.targets), data.posterior.n_data
        same = ", as many as n_data," if n == n_data else ""
        warn(
            "these look like the training data, not held-out ones: calibrate on examples that training never saw. Over "
            f"the {n} examples{same} the gradient of the loss adds up to less than chance would leave of examples that "
            f"were not trained on (probability {chance:.1g})",
            HeldOutWarning,
        )


def _warn_of_data(data: HeldOut, fits: Sequence[_Fit], nll: dict[str, float]) -> None:
    """Warn of data of training, of those of another likelihood, of too few, and of labels of other inputs."""
    record, seen = data.options.record, data.observed
    _warn_of_training(data)
    rows = [row for inputs, _ in data.batches for row in fingerprints(inputs).tolist()]
    repeated = len(rows) - len(set(rows))
    if repeated > _REPEATED * len(rows):
        warn(
            f"give every held-out example once: {repeated} of {len(rows)} are there before, so that p-values, sets and "
            "intervals claim more than they hold. A sampler that draws with replacement makes such data",
            HeldOutWarning,
        )
    if (reason := record.mismatch(seen.outputs, seen.targets)) is not None:
        warn(reason, HeldOutWarning)
    if (counted := len(seen.targets)) < FEWEST_SCORED:
        warn(
            f"{counted} held-out targets are too few to calibrate on: a fit to them may be chance. Hold out "
            f"{FEWEST_SCORED} at the least, better some hundreds",
            HeldOutWarning,
        )
    elif record.coupled:
        guess, hottest = math.log(max(int(seen.targets.max()) + 1, 2)), max(fit.temperature for fit in fits)
        hot = hottest > _ABSURD and nll[_ALONE] > guess
        if hot or (nll[_ALONE] > _WORSE * guess and (nll[_TEMPERATURE] > _NO_BETTER * guess or hottest > _TOO_HOT)):
            warn(
                f"the network is worse on the held-out data than a guess among their classes (negative log-likelihood "
                f"{nll[_ALONE]:.3g} against {guess:.3g}, {nll[_TEMPERATURE]:.3g} at its best temperature): are the "
                "labels those of these inputs, and are the inputs scaled as in training?",
                HeldOutWarning,
            )
    elif record.standardised and not record.tempered:
        f, y = (each - each.mean(dim=0) for each in (record.locations(seen.outputs), seen.targets))
        error, spread = (seen.targets - record.locations(seen.outputs)).square().mean(), y.square().mean()
        if error > _FAR_OFF * spread and (f * y).mean().square() > _FOLLOWS * f.square().mean() * spread:
            warn(
                "scale the targets as in training: the network's outputs follow the held-out ones, but are farther "
                f"from them than their mean is (mean squared error {error:.3g} against {spread:.3g})",
                HeldOutWarning,
            )
