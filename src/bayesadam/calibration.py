"""Calibration: scale s, prior precision δ, temperature and observation noise from held-out data, and what they are worth."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from bayesadam._warnings import warn
from bayesadam.errors import BayesAdamWarning, CalibrationError, SettingError, UnusedPosteriorWarning
from bayesadam.held_out import aligned
from bayesadam.likelihoods import Likelihood, LikelihoodName, Link, Predictive
from bayesadam.likelihoods.conformal import Guarantee
from bayesadam.likelihoods.predictive import FEWEST_SCORED, has_novelty, place_blocks
from bayesadam.likelihoods.record import CalibrationMethod
from bayesadam.posterior import Mixture, Posterior
from bayesadam.posterior.mixture import require_one_network
from bayesadam.posterior.report import CalibrationReport
from bayesadam.predict.call import Call, Forward, chosen_examples, evaluating, to_device
from bayesadam.predict.gaussian import parameters_at_mean
from bayesadam.predict.generic import VarianceOf
from bayesadam.predict.linearised import DEFAULT_BUDGET, moments
from bayesadam.predict.options import Options, PredictiveKind
from bayesadam.predict.prediction import predictive_of
from bayesadam.structures.noise import fresh_seed
from bayesadam.structures.structure import Directions

Batches = Sequence[tuple[Any, Tensor]]
AnyPosterior = TypeVar("AnyPosterior", Posterior, Mixture)
# Ratios δ/w tried in one pass over the data.
_RATIOS = 13
# Steps along scale and prior under a sampling predictive, at most.
_MOST_STEPS = 8
_NOISE_ROUNDS = 8
# What is compared, and how many parameters each fits.
_POSTERIOR, _TEMPERATURE, _ALONE = "posterior", "best temperature alone", "network alone"
_PARAMETERS = {_POSTERIOR: 3, _TEMPERATURE: 1, _ALONE: 0}
# Temperatures tried, the coldest the least; the hottest there may be; rounds of scale and temperature in turn.
_TEMPERATURES = (0.25, 0.5, 0.75, 1.0, 1.4, 2.0, 3.0, 5.0)
_HOTTEST = 20.0
_ROUNDS = 4
# Below that many examples five folds cost little, and leave enough to fit.
_FEW = 200
_NOISE_SHARES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)


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
    outputs a variance, and compares with the best temperature alone: where that does better, probabilities are the mean
    network's at that temperature, a warning and the report say so, and the posterior stays for all else. `"evidence"`
    takes σ² of greatest likelihood from the held-out residuals r ~ N(0, σ² + Var[f]), s so that the total curvature Σ w c
    equals that of the generalised Gauss-Newton matrix, N E[Σ J² Λ], and δ by MacKay's fixed point δ = γ/|θ|²,
    γ = Σ w c/(w c + δ). Validation inside the data cannot see what δ does outside it and shrinks the uncertainty there to
    nothing, so regression defaults to evidence; for classification evidence fails where validation works, so that is the
    default there, as for every likelihood without a noise of its own to estimate. Either way δ comes out as one number for
    all parameters, whatever it was before. `novelty` is not touched.

    What is compared, and what stands behind `prediction_set` and `novelty_pvalue`, are scores of examples under settings
    that were fitted to the others; the settings themselves are fitted to all. `posterior.calibration` says what was done.

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
    # Every candidate sees the same random numbers, so that they differ by their settings alone.
    seed = 0 if predictive == "linearised" else fresh_seed(generator)
    members = posterior.members if isinstance(posterior, Mixture) else (posterior,)
    held_out = list(aligned(members[0], batches, likelihood=likelihood, forward=forward))
    weights = posterior.weights if isinstance(posterior, Mixture) else (1.0,)
    task = _Task(members, weights, options, seed, method or options.record.calibration)
    fits = task.fitted(held_out)
    for fit in fits:
        fit.posterior.warn_of_limits()
    report, found = _chosen(task, fits, held_out, folds)
    if isinstance(posterior, Mixture):
        return Mixture(found, posterior.weights, calibration=report)
    return replace(found[0], calibration=report)


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of predictions that a user has not asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayesAdamWarning)
        yield


class _Fit(NamedTuple):
    """A posterior with the settings that the data prefer, and the best temperature of the mean network, of classes."""

    posterior: Posterior
    temperature: float


@dataclass(frozen=True, eq=False)
class _Task:
    """What is calibrated, and how: one network, or the members of a mixture."""

    members: Sequence[Posterior]
    weights: Sequence[float]
    options: Options
    seed: int
    method: CalibrationMethod

    def fitted(self, batches: Batches) -> list[_Fit]:
        """Every member fitted to the batches."""
        fits = []
        for member in self.members:
            data = _Data(member.replace(temperature=1.0, averaged=True), batches, self.options, self.seed)
            best = (_by_evidence if self.method == "evidence" else _by_validation)(data.posterior, data)
            if self.options.predictive != "linearised":
                best = _by_repeated_prediction(best, data)
            fits.append(_Fit(best, data.temperature(best) if self.options.record.tempered else 1.0))
        return fits

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
        mixed = len(fits) > 1
        return {n: self.options.record.mixture(each, self.weights) if mixed else each[0] for n, each in named.items()}


def _chosen(
    task: _Task, fits: Sequence[_Fit], held_out: Batches, folds: int | None
) -> tuple[CalibrationReport, list[Posterior]]:
    """The candidate that scores best on examples that it was not fitted to, with the report."""
    record, n = task.options.record, sum(len(y) for _, y in held_out)
    folds = folds or (5 if n < _FEW else 2)
    crossed = folds > 1 and n >= FEWEST_SCORED
    parts = _parts(held_out, folds) if crossed else [held_out]
    totals: defaultdict[str, float] = defaultdict(float)
    scores: list[dict[str, Guarantee]] = []
    count, novelty = 0, []
    for number, part in enumerate(parts):
        others = [batch for index, other in enumerate(parts) if index != number for batch in other]
        own = task.fitted(others) if crossed else fits
        for inputs, y in part:
            named = task.candidates(own, inputs)
            y = y.to(next(iter(named.values())).mean.device)
            for name, found in named.items():
                log_probs = record.log_probs(found, y)
                totals[name] -= float(log_probs.sum(dtype=torch.float64))
            count += len(log_probs)
            if crossed:
                scores.append({name: record.conformity(found, y, seed=len(scores)) for name, found in named.items()})
            if has_novelty(named[_POSTERIOR]):
                # Novelty goes with the noise, and predictions will have that of the fit to all.
                settled = task.candidates(fits, inputs) if record.noise and crossed else named
                novelty.append(settled[_POSTERIOR].novelty)
    nll = {name: total / max(count, 1) for name, total in totals.items()}
    # Fitted to what it is scored on, every parameter of a candidate wins 1/n, as Akaike has it.
    handicap = {name: 0.0 if crossed else _PARAMETERS[name] / max(count, 1) for name in nll}
    # The network alone is told of, and does not compete: whatever it wins across folds, the best temperature has it on all.
    rivals = [name for name in nll if name != _ALONE]
    best = min(rivals, key=lambda name: nll[name] + handicap[name] if math.isfinite(nll[name]) else math.inf)
    guarantee = Guarantee.joined([each[best] for each in scores], novelty if crossed else [])
    outputs = {
        _POSTERIOR: lambda fit: fit.posterior,
        _TEMPERATURE: lambda fit: fit.posterior.replace(temperature=fit.temperature, averaged=False),
    }
    chosen = [outputs[best](fit) for fit in fits]
    temperatures = tuple(each.temperature for each in chosen)
    least, most = (f"{t:.3g}" for t in (min(temperatures), max(temperatures)))
    at = f"temperature {least}" if least == most else f"temperatures from {least} to {most}"
    if best == _POSTERIOR:
        preferred = "the posterior is in use" + (f", with logits at {at}" if record.tempered else "")
    else:
        preferred = f"the data prefer the mean network at {at}: probabilities do not average over the posterior"
        warn(
            f"{preferred} (negative log-likelihood {nll[best]:.4f} against {nll[_POSTERIOR]:.4f}). Variances, draws and "
            "novelty are those of the posterior all the same",
            UnusedPosteriorWarning,
        )
    scored = n if crossed else 0
    options = task.options
    report = CalibrationReport(
        options.likelihood, task.method, n, scored, nll, temperatures, best == _POSTERIOR, preferred, guarantee
    )
    return report, chosen


def _parts(batches: Batches, folds: int) -> list[Batches]:
    """The examples in parts of equal size, drawn at random but always the same."""
    total = sum(len(y) for _, y in batches)
    places = torch.randperm(total, generator=torch.Generator().manual_seed(0)) % folds
    found: list[list[tuple[Any, Tensor]]] = [[] for _ in range(folds)]
    first = 0
    for inputs, y in batches:
        own = places[first : first + len(y)]
        first += len(y)
        for number, part in enumerate(found):
            rows = (own == number).nonzero().flatten()
            if len(rows):
                part.append((chosen_examples(inputs, rows), y[rows.to(y.device)]))
    return list(found)


def log_marginal_likelihood(
    posterior: Posterior, batches: Any, *, likelihood: LikelihoodName, forward: Forward | None = None
) -> Tensor:
    """Laplace's estimate of log p(D) at the posterior's mean μ: log p(D | μ) − ½ δ|μ|² − ½ log det((w c + δ)/δ).

    The likelihood term is that of the batches, taken as N examples: pass training data, or a fair part of it. Where every
    place of a sequence has a class, N counts places.
    """
    require_one_network(posterior, "a marginal likelihood")
    data = list(aligned(posterior, batches, likelihood=likelihood, forward=forward))
    options = Options(likelihood=likelihood, forward=forward)
    if options.record.noise and posterior.noise_variance is None:
        raise SettingError("the posterior has no noise_variance yet: calibrate it, or replace(noise_variance=...)")
    call, params = Call(posterior.model, forward), parameters_at_mean(posterior)
    device = next(iter(params.values())).device
    total, count = torch.zeros((), dtype=torch.float64), 0
    with evaluating(posterior.model), torch.no_grad():
        for inputs, y in data:
            mean = call(params, to_device(inputs, device))
            mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
            found = options.record.predictive(
                mean, torch.zeros_like(mean), link=options.link, noise_variance=posterior.noise_variance
            )
            scores = options.record.log_probs(found, y.to(device))
            total += scores.sum(dtype=torch.float64).cpu()
            count += len(scores)
    fit = posterior.n_data / count * total
    penalty = torch.zeros((), dtype=torch.float64)
    for name, mu in posterior.mean.items():
        delta = torch.as_tensor(posterior.prior_precision[name], dtype=mu.dtype, device=mu.device)
        if not bool((delta > 0).all()):
            raise SettingError(f"the marginal likelihood needs a proper prior, but δ is 0 for {name!r}")
        penalty += (delta * mu.square() - delta.log().expand_as(mu)).sum(dtype=torch.float64).cpu()
    # log det Λ = P log 2πe − 2 H[q].
    log_det = posterior.n_weights * math.log(2 * math.pi * math.e) - 2 * posterior.entropy().cpu()
    return fit - 0.5 * (penalty + log_det)


@dataclass(frozen=True, eq=False)
class _Data:
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
        return self.best_temperature(mean, torch.zeros_like(mean), y, start=1.0, reach=math.log(_HOTTEST))

    def best_weight(
        self, mean: Tensor, table: Tensor, y: Tensor, *, start: float, most: float, **of_outputs: Any
    ) -> float:
        """w of the greatest log-likelihood, the variances being table/w."""
        return _refined(lambda w: self.score(mean, table / w, y, **of_outputs), start, most=most)

    def best_temperature(self, mean: Tensor, variance: Tensor, y: Tensor, *, start: float, reach: float) -> float:
        """T of the greatest log-likelihood, within bounds: a temperature near 0 would be sure of everything."""
        least = math.log(_TEMPERATURES[0])
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


def _by_validation(posterior: Posterior, data: _Data) -> Posterior:
    """One pass over the data for every ratio δ/w; the scale then costs nothing, since it only divides the variances.

    In the likelihood form the mean, too, depends on the ratio, and on it alone: there it takes a pass for each, as it does
    where directions over all weights change with it.
    """
    settings, structure = posterior.settings, posterior.structure
    curvatures = structure.curvatures(settings.power)
    variances: list[VarianceOf]
    positive = torch.cat([c.flatten()[c.flatten() > 0].double().cpu() for c in curvatures])
    if not len(positive):
        raise CalibrationError("every second moment is zero: there is no curvature to calibrate")
    low, high = math.log10(float(positive.median())) - 4, math.log10(float(positive.max())) + 2
    ratios = [10.0 ** (low + (high - low) * i / (_RATIOS - 1)) for i in range(_RATIOS)]
    if settings.form == "map" and not structure.has_directions:
        by_name = dict(zip(structure.second_moment, curvatures, strict=True))
        variances = [lambda name, r=r: 1 / (by_name[name] + r) for r in ratios]  # type: ignore[misc]
        parts = list(data.moments(posterior, variances))
        mean, tables = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], dim=1)
        means = mean.expand(len(ratios), *mean.shape)
    else:
        passes = []
        for r in ratios:
            at = posterior.replace(prior_precision=r * settings.weight)
            variances = [at.coordinate_variance.__getitem__]
            passes.append(list(data.moments(at, variances, directions=[at.directions])))
        parts = passes[0]
        means = torch.stack([torch.cat([p[0] for p in each]) for each in passes])
        tables = settings.weight * torch.stack([torch.cat([p[1][0] for p in each]) for each in passes])
    y = torch.cat([p[3] for p in parts])
    record = data.options.record
    best: tuple[float, float, float, dict[str, Any]] = (-math.inf, 1.0, ratios[0], {})
    # A weight beyond what the posterior's numbers can hold would make 0 · ∞ of it.
    largest = 0.1 * min(torch.finfo(c.dtype).max for c in curvatures)
    steps = range(-6, 5 if record.tempered else 15)
    for table, ratio, mean in zip(tables, ratios, means, strict=True):
        of_outputs: list[dict[str, Any]] = [{}]
        if record.noise:
            residual = (y - mean).square().mean(dim=0)
            of_outputs = [{"noise_variance": share * residual} for share in _NOISE_SHARES]
        elif record.tempered:
            of_outputs = [{"temperature": t} for t in _TEMPERATURES]
        # From swamping the outputs to vanishing; of classes to a hundredth of the outputs' own variance.
        middle = _middle(mean, table)
        if not middle:
            continue
        for each in of_outputs:
            weights = [w for x in steps if (w := middle * 10 ** (x / 2)) <= largest]
            scores = data.scores(mean, torch.stack([table / w for w in weights]), y, **each) if weights else []
            found = max(zip(scores, weights, strict=True), default=best[:2])
            if found[0] > best[0]:
                best = (*found, ratio, each)
    value, weight, ratio, chosen = best
    if not math.isfinite(value):
        raise CalibrationError(
            "no scale or prior precision gives a finite log-likelihood on the held-out data; the posterior is unchanged. "
            "Do the model's outputs contain NaN or infinities there?"
        )
    where = ratios.index(ratio)
    table, mean = tables[where], means[where]

    most = math.log(_middle(mean, table)) + math.log(10) * steps[-1] / 2 if record.tempered else math.inf
    for _ in range(_ROUNDS if "temperature" in chosen else 1):
        weight = data.best_weight(mean, table, y, start=weight, most=most, **chosen)
        if "temperature" in chosen:
            scaled = table / weight
            chosen = {"temperature": data.best_temperature(mean, scaled, y, start=chosen["temperature"], reach=1.2)}
    unit = posterior.settings.weight / posterior.settings.scale
    outputs = {"noise_variance": None} | chosen
    return posterior.replace(scale=weight / unit, prior_precision=weight * ratio, **outputs)


def _middle(mean: Tensor, table: Tensor) -> float:
    """The weight at which the variances of f, table/w, are on average as large as the outputs' own; 0 where they vanish."""
    scale = float(mean.var()) if mean.numel() > 1 else 1.0
    found = float(table.mean()) / (scale if math.isfinite(scale) and scale > 0 else 1.0)
    return found if math.isfinite(found) else 0.0


def _by_evidence(posterior: Posterior, data: _Data) -> Posterior:
    ones: VarianceOf = lambda name: torch.ones_like(posterior.mode[name])  # noqa: E731
    record = data.options.record
    if not record.noise:
        parts = list(data.moments(posterior, [ones], covariance=record.coupled))
        curvature = torch.cat([_output_curvature(record, mean, variance, block) for mean, variance, block, _ in parts])
        return _at_evidence(posterior, float(curvature.mean(dtype=torch.float64)))

    def residuals(
        at: Posterior, variances: Sequence[VarianceOf], directions: Sequence[Directions | None] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = list(data.moments(at, variances, directions=directions))
        mean, square = (torch.cat(part) for part in zip(*((m, (y - m).square()) for m, _, _, y in parts), strict=True))
        variance = torch.cat([v for _, v, _, _ in parts], dim=1)
        return mean, square.clamp(min=torch.finfo(square.dtype).tiny), variance

    mean, square, (reach,) = residuals(posterior, [ones])
    noise = square.mean(dim=0)
    for _ in range(_NOISE_ROUNDS):
        curvature = (reach * record.hessian_diagonal(mean, noise)).mean(dim=0).sum()
        found = _at_evidence(posterior, float(curvature)).replace(noise_variance=noise)
        # In the likelihood form the mean has moved, and the residuals with it.
        variances = [ones, found.coordinate_variance.__getitem__]
        mean, square, (reach, uncertain) = residuals(found, variances, [None, found.directions])
        # A held-out residual is noise and error of f, and Var[f] goes with σ²: r² ~ σ² (1 + u), u = Var[f]/σ². Of greatest
        # likelihood is the mean of r²/(1 + u): an example of which the network knows little says little about the noise.
        fresh = (square / (1 + uncertain / noise)).mean(dim=0)
        if bool(((fresh - noise).abs() <= 0.01 * noise).all()):
            break
        noise = fresh
    return found


def _output_curvature(record: Likelihood, mean: Tensor, variance: Tensor, covariance: Tensor | None) -> Tensor:
    """tr(J Jᵀ Λ) per example, Λ = A Aᵀ the Hessian of the negative log-likelihood in the outputs."""
    if covariance is None:
        return (variance[0] * record.hessian_diagonal(mean)).reshape(len(mean), -1).sum(dim=1)
    root = record.hessian_root(mean)
    return ((covariance @ root) * root).flatten(1).sum(dim=1)


def _at_evidence(posterior: Posterior, curvature: float) -> Posterior:
    """s from the trace of the Gauss-Newton matrix, N × `curvature`, and δ from MacKay's fixed point δ = γ/|θ|²."""
    total = sum(float(c.sum(dtype=torch.float64)) for c in posterior.structure.curvatures(posterior.settings.power))
    weight = posterior.n_data * curvature / total if total else math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise CalibrationError(
            f"the curvature on the held-out data gives a weight of {weight!r}; the posterior is unchanged. Do the model's "
            "outputs contain NaN, or do they not depend on the weights?"
        )
    unit = posterior.settings.weight / posterior.settings.scale
    posterior = posterior.replace(scale=weight / unit, prior_precision=1.0)
    square = max(sum(float(theta.square().sum(dtype=torch.float64)) for theta in posterior.mode.values()), 1e-30)
    delta = 1.0
    for _ in range(200):
        fresh = max(posterior.effective_dimension / square, 1e-12)
        posterior = posterior.replace(prior_precision=fresh)
        if abs(fresh - delta) <= 1e-6 * delta:
            break
        delta = fresh
    return posterior


def _by_repeated_prediction(posterior: Posterior, data: _Data) -> Posterior:
    """Start from what suits the linearised network, then search along the scale and the prior under the real predictive."""

    def score(candidate: Posterior) -> float:
        value = -data.nll(candidate, data.batches)
        return value if math.isfinite(value) else -math.inf

    best, value = posterior, score(posterior)
    # Uphill in ever smaller steps: first along scale and prior together, which is one temperature, then along the prior.
    for both in (True, False):
        for factor in (10.0, 10.0**0.5, 10.0**0.25):
            for step in (factor, 1 / factor):
                for _ in range(_MOST_STEPS):
                    prior = {name: step * delta for name, delta in best.prior_precision.items()}
                    scale = best.settings.scale * (step if both else 1.0)
                    candidate = best.replace(scale=scale, prior_precision=prior)
                    found = score(candidate)
                    # A rise this small is the flat end, where the posterior no longer matters.
                    if not found > value + 1e-6:
                        break
                    best, value = candidate, found
    if not math.isfinite(value):
        raise CalibrationError(
            f"no scale or prior precision gives a finite log-likelihood under predictive={data.options.predictive!r}; the posterior is "
            "unchanged. Use predictive='linearised'"
        )
    return best


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
