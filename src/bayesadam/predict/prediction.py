"""From a Gaussian over weights and a batch to a predictive distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam._alone import alone_with
from bayesadam._warnings import warn
from bayesadam.errors import SettingError
from bayesadam.gaussian.noise import fresh_seed
from bayesadam.gaussian.sharded import common_seed
from bayesadam.likelihoods import LikelihoodName, Predictive
from bayesadam.likelihoods.component import Component, Novel, Score
from bayesadam.likelihoods.predictive import FEW_OUTPUTS, average, rows
from bayesadam.predict.asked import MANY_CLASSES, Outputs, Top
from bayesadam.predict.batches import for_model
from bayesadam.predict.call import Call, evaluating, plain
from bayesadam.predict.gaussian import Gaussian, moments_of, parameters_at_mean
from bayesadam.predict.linearised import Moments
from bayesadam.predict.options import Options, PredictOptions
from bayesadam.predict.places import at_one_place, at_places
from bayesadam.predict.plan import Plan, plan_for
from bayesadam.predict.sampled import (
    activation_draws,
    at_mean,
    draws_activations,
    linearised_draws,
    warn_of_collapse,
    weight_draws,
)
from bayesadam.predict.selected import epistemic_score, selected_predictive
from bayesadam.predict.sharded import draws_by_module, fits, gathered
from bayesadam.predict.statistics import running_deviation

if TYPE_CHECKING:
    from typing_extensions import Unpack


def predict(
    gaussian: Gaussian, inputs: Any, *, likelihood: LikelihoodName = "regression", **options: Unpack[PredictOptions]
) -> Predictive:
    """The predictive distribution of a batch: `Posterior.predict`, of anything with a model, a mean and a structure."""
    return predictive_of(gaussian, for_model(inputs, gaussian.model), Options(likelihood=likelihood, **options))


def predictive_of(gaussian: Gaussian, inputs: Any, options: Options) -> Predictive:
    """The same with its options in one record."""
    found = _any_predictive(gaussian, plain(inputs), options)
    _warn_of_nan(found)
    return found


def _warn_of_nan(found: Predictive) -> None:
    """Warn of examples whose outputs are no numbers: comparisons with NaN are false, so that none of them looks novel."""
    lost = ~rows(found.mean).isfinite().all(dim=1)
    if bool(lost.any()):
        numbers = lost.nonzero().flatten().tolist()
        warn(
            f"the outputs of {len(numbers)} of {len(lost)} examples (first number {numbers[0]}) are NaN or infinite, and so is "
            "all that is predicted of them: look for NaN in their inputs"
        )


def _any_predictive(gaussian: Gaussian, inputs: Any, options: Options) -> Predictive:
    gaussian.require_proper()
    gaussian.warn_of_limits()
    if gaussian.is_sharded:
        generator = options.generator or torch.Generator().manual_seed(common_seed(None, gaussian.mode))
        options = replace(options, generator=generator)
        if fits(gaussian, options.predictive, options.memory_budget):
            with alone_with(gaussian.model), gathered(gaussian) as plain_one:
                return _predictive(plain_one, inputs, options)
    return _predictive(gaussian, inputs, options)


def score_of(gaussian: Gaussian, inputs: Any, options: Options) -> Score:
    """½ tr(H Cov f) of each example: `Distribution.epistemic`."""
    gaussian.require_proper()
    gaussian.warn_of_limits()
    inputs, call = plain(inputs), Call(gaussian.model, options.forward)
    with evaluating(gaussian.model):
        params = parameters_at_mean(gaussian)
        call, inputs = at_one_place(call, params, inputs, options.positions) or (call, inputs)
        return epistemic_score(gaussian, call, params, inputs, options, _plan(call, params, inputs))


def outputs_at_mean(gaussian: Gaussian, inputs: Any, options: Options) -> Tensor:
    """f(x; μ), (batch, ...), in float32 or wider."""
    call = Call(gaussian.model, options.forward)
    with evaluating(gaussian.model), torch.no_grad():
        found = call(parameters_at_mean(gaussian), plain(inputs))
    return found.to(torch.promote_types(found.dtype, torch.float32))


def top_of(gaussians: Sequence[Gaussian], weights: Sequence[float], inputs: Any, options: Options) -> Options:
    """Options that ask all members of a mixture for the same outputs: the largest of their average, where the largest are asked for."""
    if not isinstance(options.chosen, Top) and not _may_be_many(options):
        return options
    record, first = options.record, outputs_at_mean(gaussians[0], inputs, options)
    top = _chosen(options, first.shape[1:])
    if not isinstance(top, Top):
        return options
    each = [first, *(outputs_at_mean(gaussian, inputs, options) for gaussian in gaussians[1:])]
    mean = average(weights, [f.softmax(dim=-1) if record.coupled else record.locations(f) for f in each])
    return replace(options, outputs=mean.topk(min(top.k, mean.shape[-1]), dim=-1).indices)


def _predictive(gaussian: Gaussian, inputs: Any, options: Options) -> Predictive:
    call = Call(gaussian.model, options.forward)
    with evaluating(gaussian.model):
        if gaussian.is_sharded:
            return _of_every_output(gaussian, call, inputs, options, None)
        params = parameters_at_mean(gaussian)
        cut = at_one_place(call, params, inputs, options.positions)
        if cut is not None:
            call, inputs = cut
            options = replace(options, positions=None, outputs=_at_place(options, inputs[1]))
        plan = _plan(call, params, inputs)
        if plan.first is not None and (doubt := options.record.mismatch(plan.first)) is not None:
            warn(doubt)
        chosen = _chosen(options, plan.shape)
        if chosen is None:
            return _of_every_output(gaussian, call, inputs, options, plan)

        def draw(drawing: Options) -> tuple[Tensor, Tensor]:
            return _draws(gaussian, call, inputs, drawing, plan)

        return selected_predictive(gaussian, call, params, inputs, options, chosen, plan, draw)


def _at_place(options: Options, place: Tensor) -> Outputs | None:
    """What is asked for of one place, where outputs are numbered place by place, (batch, places, k)."""
    chosen = options.chosen
    by_place = isinstance(chosen, Tensor) and chosen.dim() == 3 and not chosen.is_floating_point()
    return at_places(chosen, place) if by_place else options.outputs  # type: ignore[arg-type]


def has_many(options: Options, shape: torch.Size) -> bool:
    """Whether the largest outputs alone are looked at, there being many classes, and nothing else having been asked for."""
    return _may_be_many(options) and bool(shape) and shape[-1] > MANY_CLASSES


def _may_be_many(options: Options) -> bool:
    asked_for_all = options.outputs is not None or options.covariance or bool(options.novelty)
    return options.record.coupled and options.predictive == "linearised" and not asked_for_all


def _chosen(options: Options, shape: torch.Size) -> Top | Tensor | None:
    """Which outputs: those asked for, the largest of many classes, or all of them at the places asked for; None for all."""
    if options.chosen is not None or options.positions is not None:
        if not shape:
            raise SettingError(
                "outputs= and positions= choose among several: this network has one number for each example"
            )
        if options.chosen is not None:
            return options.chosen
    if has_many(options, shape):
        return Top()
    return None if options.positions is None else torch.arange(shape[-1] // options.record.outputs_per_target)


def _plan(call: Call, params: Mapping[str, Tensor], inputs: Any) -> Plan:
    return plan_for(call, {name: tensor.detach().requires_grad_() for name, tensor in params.items()}, inputs)


def _of_every_output(gaussian: Gaussian, call: Call, inputs: Any, options: Options, plan: Plan | None) -> Predictive:
    record, draws, novel = options.record, None, None
    if options.predictive == "linearised":
        assert plan is not None
        mean, variance, block, novel = _linearised(gaussian, call, inputs, options, plan)
        how = f"linearised, exact: {plan.outputs} backward directions, one for each output"
    else:
        draws, centre = _draws(gaussian, call, inputs, options, plan)
        mean, variance, block = _moments_of_draws(draws, centre, options)
        how = f"{options.predictive}: {len(draws)} draws"
    of_network: Any = {"noise_variance": gaussian.noise_variance, "novel": novel}
    of_network |= {"temperature": gaussian.temperature, "averaged": gaussian.averaged}
    found: Predictive = record.predictive(
        [Component(mean, variance, block, draws, **of_network)], link=options.link, plan=how
    )
    return found


def _linearised(
    gaussian: Gaussian, call: Call, inputs: Any, options: Options, plan: Plan
) -> tuple[Tensor, Tensor, Tensor | None, Novel | None]:
    """Mean, variance, covariance where it is asked for, and the moments for novelty."""
    record, params = options.record, parameters_at_mean(gaussian)
    few = options.novelty is None and plan.outputs <= FEW_OUTPUTS
    other = None
    if options.novelty or few:
        other = gaussian if options.for_novelty else gaussian.for_novelty
    together = other is not None and _same(gaussian.mean, other.mean)
    asked = [gaussian, other] if other is not None and together and other is not gaussian else [gaussian]
    covariance = options.covariance or (together and record.coupled)
    how: Any = {"budget": options.memory_budget, "plan": plan, "captured": options.captured}
    found = moments_of(asked, call, params, inputs, covariance=covariance, **how)
    mean, variance = found.mean, found.variance[0]
    block = found.covariance[0] if options.covariance and found.covariance is not None else None
    if other is None:
        return mean, variance, block, None
    if not together:
        params = parameters_at_mean(other)
        found = moments_of([other], call, params, inputs, covariance=record.coupled, **how)
    precision = record.hessian_diagonal(found.mean, gaussian.noise_variance)
    return mean, variance, block, _novel(found, precision, running_deviation(call, params, inputs))


def _moments_of_draws(draws: Tensor, centre: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mean, variance and covariance: the mean of the linearised draws is known, that of the others estimated from them."""
    n, sampled = len(draws), options.predictive == "sampled"
    if sampled:
        warn_of_collapse(options.record, draws, centre)
    mean, count = (draws.mean(dim=0), n - 1) if sampled else (centre, n)
    centred = (draws - mean).reshape(n, len(mean), -1)
    block = torch.einsum("nbc,nbd->bcd", centred, centred) / count if options.covariance else None
    return mean, centred.square().sum(dim=0).div(count).view_as(mean), block


def _same(mean: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two means are the same tensors, as they are where neither is shrunk by its prior."""
    return all(other[name] is mu for name, mu in mean.items())


def _novel(found: Moments, precision: Tensor, deviation: Tensor | None) -> Novel:
    """The last of the moments, with variances that grow with the deviation from running statistics."""
    factor = found.mean.new_ones(len(found.mean)) if deviation is None else deviation.to(found.mean)
    variance = found.variance[-1] * factor.view(-1, *[1] * (found.mean.dim() - 1))
    block = None if found.covariance is None else found.covariance[-1] * factor[:, None, None]
    return Novel(found.mean, variance, block, precision)


def _draws(gaussian: Gaussian, call: Call, inputs: Any, options: Options, plan: Plan | None) -> tuple[Tensor, Tensor]:
    """Draws of f, (n, batch, ...), and f(x; μ)."""
    kind, n, generator = options.predictive, options.n_samples, options.generator
    if plan is None:
        return draws_by_module(gaussian, call, inputs, kind, n, generator)
    params = parameters_at_mean(gaussian)

    def draw() -> dict[str, Tensor]:
        return {name: value.to(params[name].device) for name, value in gaussian.sample(generator=generator).items()}

    # Nothing is kept for a way back: what counts is the largest of the activations.
    bounds = {"activations": plan.widest, "budget": options.memory_budget}
    centre = at_mean(call, params, inputs, **bounds)
    centre = centre.to(torch.promote_types(centre.dtype, torch.float32))
    diagonal = not gaussian.structure.bases and gaussian.directions is None
    if kind == "linearised-sampled":
        drawn = centre + linearised_draws(call, params, draw, inputs, n, kept=plan.activations, **bounds)
    elif diagonal and draws_activations(call, plan, params, inputs):
        variances = {name: v.to(params[name]) for name, v in gaussian.coordinate_variance.items()}
        drawn = activation_draws(call, params, variances, inputs, n, seed=fresh_seed(generator), **bounds)
    else:
        drawn = weight_draws(call, draw, inputs, n, **bounds)
    return drawn.to(centre.dtype), centre
