"""`calibrate`: settings fitted to held-out data, compared on examples that they were not fitted to."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from bayesadam._checks import count, require_kind
from bayesadam._progress import Bar
from bayesadam._warnings import warn
from bayesadam.calibration.fits import (
    MOST_DRAWN,
    Tables,
    Widths,
    best_temperature,
    by_evidence,
    by_validation,
    tables_of,
)
from bayesadam.calibration.held_out import HeldOut, aligned, cut, examples_of, n_examples
from bayesadam.errors import HeldOutWarning, SettingError, UnusedPosteriorWarning
from bayesadam.gaussian.noise import fresh_seed
from bayesadam.likelihoods import Component, Link, Predictive, agreed
from bayesadam.likelihoods.conformal import Guarantee, joined
from bayesadam.likelihoods.predictive import FEWEST_SCORED, CalibrationMethod
from bayesadam.posterior import Mixture, Posterior
from bayesadam.posterior.report import CalibrationReport, settings_of
from bayesadam.predict.call import Forward
from bayesadam.predict.moments import DEFAULT_BUDGET
from bayesadam.predict.prediction import Options, PredictiveKind

AnyPosterior = TypeVar("AnyPosterior", Posterior, Mixture)
# The candidates, and how many parameters each fits.
_POSTERIOR, _TEMPERATURE, _ALONE = "posterior", "best temperature alone", "network alone"
_PARAMETERS = {_POSTERIOR: 3, _TEMPERATURE: 1, _ALONE: 0}
# By how many standard errors of the mean difference the posterior has to beat each simpler candidate.
_SURE = 1.5
# Examples that show whether the data belong to the likelihood.
_JUDGED = 1000
# Scores this near to the largest novelty that is possible, as a share of it, do not tell examples apart; the warning is
# for networks whose negative log-likelihood is below that share of it, which do tell classes apart.
_SATURATED, _TOLD_APART = 1e-3, 0.9
# A network is out of place if it is so many times worse than a guess, and at its best temperature not better than this
# share of one, or so hot.
_WORSE, _NO_BETTER, _TOO_HOT = 2.0, 0.98, 6.0


def calibrate(
    posterior: AnyPosterior,
    batches: Any,
    *,
    likelihood: str | None = None,
    method: CalibrationMethod | None = None,
    predictive: PredictiveKind = "linearised",
    n_samples: int = 30,
    link: Link = "probit",
    forward: Forward | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int = DEFAULT_BUDGET,
    folds: int = 5,
) -> AnyPosterior:
    """A posterior whose numbers can be trusted, from held-out data; the one given is not changed.

    `"validation"` chooses s and δ (and σ² of a regression) by the predictive log-likelihood of the held-out data, under
    the very predictive that will be used. For classes it chooses a temperature T with them, within bounds that leave
    the outputs a variance and under a prior, −½ (log T/τ)² nats with τ = ½ below 1 and 1 above, for which a few
    examples that are all right are no reason to be certain. Where the posterior is not better by more than 1.5 standard
    errors than the network at its best temperature, and than the network alone, probabilities are the mean network's at
    that temperature, a warning and the report say so, and the posterior stays for everything else.

    `"evidence"` takes σ² of greatest likelihood from the held-out residuals r ~ N(0, σ² + Var[f]), s so that the total
    curvature Σ w c equals that of the generalised Gauss-Newton matrix, N E[Σ J² Λ], and δ by MacKay's fixed point δ =
    γ/|θ|², γ = Σ w c/(w c + δ). Validation inside the data cannot see what δ does outside it and shrinks the
    uncertainty there to nothing, so regression defaults to evidence; for classification evidence fails where validation
    works, so that is the default there, as for every likelihood without a noise of its own to estimate. Either way δ
    comes out as one number for all parameters, whatever it was before; a `LoraPrior` is multiplied by one number.
    `novelty` is not touched.

    The comparison, `prediction_set` and `novelty_pvalue` rest on scores of examples under settings that were fitted to
    the others; the settings themselves are fitted to all. `posterior.calibration` is the report.

    Under a predictive that samples, s and δ of the linearised network are multiplied by one number, the best of powers
    of ten from 0.1 to 10⁵ in half steps, by predictions of at most 2,000 of the examples, drawn at random. A fit to a
    part of the examples chooses by the log-likelihood of that part alone, with a temperature of its own.

    Args:
        posterior: the posterior to calibrate; the members of a mixture are calibrated one by one.
        batches: held-out data: a loader of (inputs, targets), of mappings with their labels, or one such pair. Targets
            belong to the outputs at their positions; labels inside a mapping are taken as the model's own loss takes
            them, which for a causal language model is one position further on. Classes of −100 are left out.
        likelihood: of the targets; the result keeps it. None for the posterior's own.
        method: `"validation"` or `"evidence"`; None takes the default above.
        predictive: the one that `predict` will be called with; so are the rest.
        folds: the number of parts of the data, each scored under a fit to the others. With 1, or fewer than 20
            examples, there are no such scores, hence no guarantees.

    Raises:
        CalibrationError: nothing tried gave a finite score.
        MatchError: it is not clear which output a label belongs to: pass `forward`, and targets to match its outputs.
        SettingError: no likelihood was ever given, or another than the posterior's.
    """
    if method is not None and method not in get_args(CalibrationMethod):
        raise SettingError(f"method must be one of {get_args(CalibrationMethod)}, got {method!r}")
    count("folds", folds, "parts of the data")
    require_kind(posterior, (Posterior, Mixture), "posterior")
    name = agreed(likelihood, posterior.likelihood)
    of_predict: Any = {"n_samples": n_samples, "link": link, "forward": forward, "memory_budget": memory_budget}
    options = Options(likelihood=name, predictive=predictive, **of_predict)
    # Every candidate sees the same random numbers, so that they differ by their settings alone.
    seed = 0 if predictive == "linearised" else fresh_seed(generator)
    members = posterior.members if isinstance(posterior, Mixture) else (posterior,)
    weights = posterior.weights if isinstance(posterior, Mixture) else (1.0,)
    held_out = list(aligned(members[0], batches, likelihood=name, forward=forward))
    with Bar("calibrate") as bar:
        plain = [member.replace(temperature=1.0, averaged=True) for member in members]
        data = [HeldOut(member, held_out, options, seed, bar.step) for member in plain]
        networks = [_Network(each, method or options.record.calibration) for each in data]
        _warn_of_data(data[0])
        for network in networks:
            network.whole.posterior.warn_of_limits()
        scores = _scored(networks, weights, folds)
    report, found = _chosen(networks, scores, members)
    if isinstance(posterior, Mixture):
        of_likelihood = [replace(each, likelihood=name) for each in found]
        return Mixture(of_likelihood, posterior.weights, calibration=report)
    return replace(found[0], calibration=report, likelihood=name)


class _Fit(NamedTuple):
    """A posterior with the settings that the data prefer, and the temperature or noise of the mean network alone."""

    posterior: Posterior
    temperature: float = 1.0
    noise_variance: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Network:
    """One network on all held-out data; what it computes there serves the fits to any of the examples."""

    data: HeldOut
    method: CalibrationMethod

    @cached_property
    def some(self) -> tuple[HeldOut, Tensor]:
        """The examples that the search looks at, and their numbers: all, or a random part under draws."""
        n = n_examples(self.data.batches)
        if self.data.options.predictive == "linearised" or n <= MOST_DRAWN:
            return self.data, torch.arange(n)
        chosen = torch.randperm(n, generator=torch.Generator().manual_seed(1)) < MOST_DRAWN
        return replace(self.data, batches=cut(self.data.batches, chosen)), chosen.nonzero().flatten()

    @cached_property
    def tables(self) -> Tables:
        return tables_of(*self.some)

    @cached_property
    def widths(self) -> Widths:
        """Under draws, those of the fit to all."""
        every = torch.ones(n_examples(self.data.batches), dtype=torch.bool)
        return Widths(self._start(every, self.data), *self.some)

    @cached_property
    def whole(self) -> _Fit:
        """Fitted to all examples."""
        return self.fitted(torch.ones(n_examples(self.data.batches), dtype=torch.bool))

    def fitted(self, chosen: Tensor) -> _Fit:
        """Fitted to the chosen examples, booleans."""
        options, record = self.data.options, self.data.options.record
        if options.predictive != "linearised" and not record.noise:
            return _Fit(self.widths.best(chosen))
        data = self.data if bool(chosen.all()) else replace(self.data, batches=cut(self.data.batches, chosen))
        best = self._start(chosen, data)
        if options.predictive != "linearised":
            return _Fit(Widths(best, *self.some).best(chosen))
        if not record.noise and not record.tempered:
            return _Fit(best)
        mean, y = data.outputs(best)
        if record.noise:
            return _Fit(best, noise_variance=(y - mean).square().mean(dim=0))
        return _Fit(best, best_temperature(options, mean, torch.zeros_like(mean), y))

    def _start(self, chosen: Tensor, data: HeldOut) -> Posterior:
        """The best settings of the linearised network, where a search under draws starts."""
        if self.method == "evidence":
            return by_evidence(data.posterior, data)
        return by_validation(data.posterior, data.options, self.tables.of(chosen))

    def candidates(self, fit: _Fit, inputs: Any) -> dict[str, Component]:
        """What may be in use in the end, on one batch: the posterior, or the mean network."""
        c, record = self.data.predicted(fit.posterior, inputs, novelty=None), self.data.options.record
        if record.noise and c.novel is not None:
            # Novelty goes with the noise, and predictions will have that of the fit to all.
            precision = record.hessian_diagonal(c.novel.mean, self.whole.posterior.noise_variance)
            c = replace(c, novel=replace(c.novel, precision=precision))
        if self.data.options.predictive != "linearised" or not (record.noise or record.tempered):
            return {_POSTERIOR: c}
        if record.noise:
            alone = replace(c, variance=torch.zeros_like(c.variance), noise_variance=fit.noise_variance)
            return {_POSTERIOR: c, _ALONE: alone}
        at_temperature = replace(c, temperature=fit.temperature, averaged=False)
        return {_POSTERIOR: c, _TEMPERATURE: at_temperature, _ALONE: replace(at_temperature, temperature=1.0)}


class _Scores(NamedTuple):
    """What each example is worth under every candidate, and the guarantees; `crossed` where no fit saw its examples.

    `limit` is the largest novelty that is possible.
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
    def is_posterior_best(self) -> bool:
        """Whether the posterior beats every simpler candidate beyond chance, for likelihoods that have a temperature.

        Fitted to what it is scored on, every parameter wins 1/n instead, as Akaike has it.
        """
        if _TEMPERATURE not in self.log_probs:
            return True
        for name in (_TEMPERATURE, _ALONE):
            gain = self.log_probs[_POSTERIOR] - self.log_probs[name]
            least = (_PARAMETERS[_POSTERIOR] - _PARAMETERS[name]) / len(gain)
            if self.crossed:
                least = _SURE * float(gain.std()) / math.sqrt(len(gain))
            if not float(gain.mean()) > least:
                return False
        return True


def _scored(networks: Sequence[_Network], weights: Sequence[float], folds: int) -> _Scores:
    """Every example under a fit to the others; under a fit to all where they are too few, or for one fold."""
    data = networks[0].data
    record, n = data.options.record, n_examples(data.batches)
    crossed = folds > 1 and n >= FEWEST_SCORED
    folds = folds if crossed else 1
    fold_of = _folds(n, folds)
    log_probs: defaultdict[str, list[Tensor]] = defaultdict(list)
    conformity: list[dict[str, Guarantee]] = []
    novelty: list[Tensor] = []
    limit = math.inf
    for number in range(min(folds, n)):
        part = cut(data.batches, fold_of == number) if crossed else data.batches
        fits = [network.fitted(fold_of != number) if crossed else network.whole for network in networks]
        for inputs, y in part:
            each = [network.candidates(fit, inputs) for network, fit in zip(networks, fits, strict=True)]
            named: dict[str, Predictive] = {
                name: record.predictive([found[name] for found in each], weights, link=data.options.link)
                for name in each[0]
            }
            posterior = named[_POSTERIOR]
            y = y.to(posterior.mean.device)
            for name, found in named.items():
                log_probs[name].append(record.log_probs(found, y).double().cpu())
            if not crossed:
                continue
            conformity.append({name: found.conformity(y, seed=len(conformity)) for name, found in named.items()})
            if all(c.novel is not None for c in posterior.components):
                novelty.append(posterior.novelty)
                limit = posterior.novelty_limit
    return _Scores({name: torch.cat(found) for name, found in log_probs.items()}, conformity, novelty, limit, crossed)


def _chosen(
    networks: Sequence[_Network], scores: _Scores, before: Sequence[Posterior]
) -> tuple[CalibrationReport, list[Posterior]]:
    """The report, and the posteriors that predict from now on."""
    data, nll, fits = networks[0].data, scores.nll, [network.whole for network in networks]
    averaged = scores.is_posterior_best
    best = _POSTERIOR if averaged else _TEMPERATURE
    _warn_of_saturation(scores, nll[best])
    _warn_of_chance(data, fits, nll)
    chosen = [fit.posterior for fit in fits]
    if not averaged:
        chosen = [fit.posterior.replace(temperature=fit.temperature, averaged=False) for fit in fits]
    temperatures = tuple(each.temperature for each in chosen)
    least, most = (f"{t:.3g}" for t in (min(temperatures), max(temperatures)))
    at = f"temperature {least}" if least == most else f"temperatures from {least} to {most}"
    if averaged:
        preferred = "the posterior is in use" + (f", with logits at {at}" if data.options.record.tempered else "")
    else:
        why = f"the data prefer the mean network at {at}"
        if nll[_POSTERIOR] < min(nll[_TEMPERATURE], nll[_ALONE]):
            why = f"what the posterior gains over the mean network at {at} may be chance"
        preferred = f"{why}: probabilities do not average over the posterior"
        values = ", ".join(f"{name} {value:.4f}" for name, value in nll.items())
        warn(
            f"{preferred} (negative log-likelihood: {values}). Variances, draws and novelty are still those of the "
            "posterior",
            UnusedPosteriorWarning,
        )
    n = n_examples(data.batches)
    guarantee = joined([each[best] for each in scores.conformity], scores.novelty)
    report = CalibrationReport(
        likelihood=data.options.likelihood,
        method=networks[0].method,
        n_fitted=n,
        n_scored=n if scores.crossed else 0,
        nll=nll,
        temperatures=temperatures,
        averaged=averaged,
        preferred=preferred,
        guarantee=guarantee,
        before=settings_of(before),
    )
    return report, chosen


def _warn_of_data(data: HeldOut) -> None:
    """Warn where the data look like those of another likelihood, or where there are too few."""
    record = data.options.record
    # Logits show themselves in one example, and those of a text may be many.
    some = cut(data.batches, torch.arange(n_examples(data.batches)) < (1 if record.coupled else _JUDGED))
    if (reason := record.mismatch(*replace(data, batches=some).outputs(data.posterior))) is not None:
        warn(reason, HeldOutWarning)
    if (counted := len(examples_of(record, data.batches))) < FEWEST_SCORED:
        warn(
            f"{counted} held-out targets are too few to calibrate on: a fit to them may be chance. Hold out "
            f"{FEWEST_SCORED} at the least, better some hundreds",
            HeldOutWarning,
        )


def _warn_of_saturation(scores: _Scores, nll: float) -> None:
    """Warn where all held-out examples are as novel as can be, though the network knows their classes."""
    least = min((float(each.min()) for each in scores.novelty), default=0.0)
    if nll < _TOLD_APART * scores.limit and (1 - _SATURATED) * scores.limit < least:
        warn(
            f"the novelty of all held-out examples is near {scores.limit:.3g}, the largest that is possible, which "
            "leaves little to tell them from others: try it on inputs that you know to be unlike them, beside "
            "p.entropy() and p.epistemic, before you rely on it"
        )


def _warn_of_chance(data: HeldOut, fits: Sequence[_Fit], nll: Mapping[str, float]) -> None:
    """Warn where the network is sure of the held-out classes and wrong, as with labels of other inputs."""
    if _TEMPERATURE not in nll or not data.options.record.coupled or n_examples(data.batches) < FEWEST_SCORED:
        return
    guess = math.log(max(int(torch.cat([y.flatten() for _, y in data.batches]).max()) + 1, 2))
    hottest = max(fit.temperature for fit in fits)
    if nll[_ALONE] > _WORSE * guess and (nll[_TEMPERATURE] > _NO_BETTER * guess or hottest > _TOO_HOT):
        warn(
            f"the network is worse on the held-out data than a guess among their classes (negative log-likelihood "
            f"{nll[_ALONE]:.3g} against {guess:.3g}, {nll[_TEMPERATURE]:.3g} at its best temperature): are the labels "
            "those of these inputs, and are the inputs scaled as in training?",
            HeldOutWarning,
        )


def _folds(total: int, folds: int) -> Tensor:
    """The part of each example: parts of equal size, drawn at random, always the same."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(0)) % folds
