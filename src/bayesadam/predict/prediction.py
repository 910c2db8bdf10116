"""From a Gaussian over weights and a batch to a predictive distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam._alone import alone_with
from bayesadam._warnings import warn
from bayesadam.errors import CollapsedPredictionWarning
from bayesadam.likelihoods import LikelihoodName, Predictive
from bayesadam.likelihoods.predictive import Novel
from bayesadam.predict.call import Call, evaluating, plain
from bayesadam.predict.gaussian import Gaussian, parameters_at_mean
from bayesadam.predict.linearised import Moments, moments
from bayesadam.predict.options import Options, PredictOptions
from bayesadam.predict.plan import plan_for
from bayesadam.predict.sampled import activation_draws, at_mean, draws_activations, linearised_draws, weight_draws
from bayesadam.predict.sharded import draws_by_module, fits, gathered
from bayesadam.predict.statistics import running_deviation
from bayesadam.structures.noise import fresh_seed
from bayesadam.structures.sharded import common_seed

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Novelty costs a covariance of all outputs with each other; up to here that is a small part of a prediction.
_FEW_OUTPUTS = 20


def predict(
    gaussian: Gaussian, inputs: Any, *, likelihood: LikelihoodName = "regression", **options: Unpack[PredictOptions]
) -> Predictive:
    """The predictive distribution of a batch: `Posterior.predict`, of anything with a model, a mean and a structure."""
    return predictive_of(gaussian, inputs, Options(likelihood=likelihood, **options))


def predictive_of(gaussian: Gaussian, inputs: Any, options: Options) -> Predictive:
    """The same with its options in one record."""
    inputs = plain(inputs)
    gaussian.require_proper()
    gaussian.warn_of_limits()
    if gaussian.is_sharded:
        generator = options.generator or torch.Generator().manual_seed(common_seed(None, gaussian.mode))
        options = replace(options, generator=generator)
        if fits(gaussian, options.predictive, options.memory_budget):
            with alone_with(gaussian.model), gathered(gaussian) as plain_one:
                return _predictive(plain_one, inputs, options)
    return _predictive(gaussian, inputs, options)


def _predictive(gaussian: Gaussian, inputs: Any, options: Options) -> Predictive:
    call, kind, n = Call(gaussian.model, options.forward), options.predictive, options.n_samples
    budget = options.memory_budget
    record, noise = options.record, gaussian.noise_variance
    block: Tensor | None
    draws: Tensor | None = None
    novel: Novel | None = None
    with evaluating(gaussian.model):
        if kind == "linearised":
            params = parameters_at_mean(gaussian)
            few = options.novelty is None and _outputs(call, params, inputs) <= _FEW_OUTPUTS
            other = None
            if options.novelty or few:
                other = gaussian if options.for_novelty else gaussian.for_novelty
            together = other is not None and _same(gaussian.mean, other.mean)
            asked = [gaussian, other] if other is not None and together and other is not gaussian else [gaussian]
            covariance = options.covariance or (together and record.coupled)
            found = _moments(call, params, asked, inputs, covariance, budget)
            mean, variance = found.mean, found.variance[0]
            block = found.covariance[0] if options.covariance and found.covariance is not None else None
            if other is not None:
                if not together:
                    params = parameters_at_mean(other)
                    found = _moments(call, params, [other], inputs, record.coupled, budget)
                precision = record.hessian_diagonal(found.mean, noise)
                novel = _novel(found, precision, running_deviation(call, params, inputs))
        else:
            draws, centre = _draws(gaussian, call, inputs, options)
    if draws is not None:
        told = record.collapse(draws, centre) if kind == "sampled" else None
        if told is not None:
            warn(
                f"{told}: the posterior is too wide to be sampled. Calibrate it with predictive='sampled', raise its "
                "prior_precision, or use predictive='linearised'",
                CollapsedPredictionWarning,
            )
        # The mean of the linearised draws is known, that of the others estimated from them.
        mean, count = (draws.mean(dim=0), n - 1) if kind == "sampled" else (centre, n)
        centred = (draws - mean).reshape(n, len(mean), -1)
        block = torch.einsum("nbc,nbd->bcd", centred, centred) / count if options.covariance else None
        variance = centred.square().sum(dim=0).div(count).view_as(mean)
    of_outputs: Any = {"noise_variance": noise, "temperature": gaussian.temperature, "averaged": gaussian.averaged}
    return record.predictive(mean, variance, block, draws, link=options.link, novel=novel, **of_outputs)


def _outputs(call: Call, params: Mapping[str, Tensor], inputs: Any) -> int:
    return plan_for(call, {name: tensor.detach().requires_grad_() for name, tensor in params.items()}, inputs).outputs


def _same(mean: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two means are the same tensors, as they are where neither is shrunk by its prior."""
    return all(other[name] is mu for name, mu in mean.items())


def _moments(
    call: Call, params: Mapping[str, Tensor], asked: Sequence[Gaussian], inputs: Any, covariance: bool, budget: int
) -> Moments:
    variances = [each.coordinate_variance.__getitem__ for each in asked]
    bases, directions = asked[0].structure.bases, [each.directions for each in asked]
    return moments(call, params, variances, inputs, covariance, budget, bases, directions)


def _novel(found: Moments, precision: Tensor, deviation: Tensor | None) -> Novel:
    """The last of the moments, with variances that grow with the deviation from running statistics."""
    factor = found.mean.new_ones(len(found.mean)) if deviation is None else deviation.to(found.mean)
    variance = found.variance[-1] * factor.view(-1, *[1] * (found.mean.dim() - 1))
    block = None if found.covariance is None else found.covariance[-1] * factor[:, None, None]
    return Novel(found.mean, variance, block, precision)


def _draws(gaussian: Gaussian, call: Call, inputs: Any, options: Options) -> tuple[Tensor, Tensor]:
    """Draws of f, (n, batch, ...), and f(x; μ)."""
    kind, n, generator = options.predictive, options.n_samples, options.generator
    if gaussian.is_sharded:
        return draws_by_module(gaussian, call, inputs, kind, n, generator)
    params = parameters_at_mean(gaussian)

    def draw() -> dict[str, Tensor]:
        return {name: value.to(params[name].device) for name, value in gaussian.sample(generator=generator).items()}

    plan = plan_for(call, {name: tensor.detach().requires_grad_() for name, tensor in params.items()}, inputs)
    bounds = {"activations": plan.activations, "budget": options.memory_budget}
    diagonal = not gaussian.structure.bases and gaussian.directions is None
    if kind == "linearised-sampled":
        drawn = linearised_draws(call, params, draw, inputs, n, **bounds)
    elif diagonal and draws_activations(call, plan, params, inputs):
        variances = {name: v.to(params[name]) for name, v in gaussian.coordinate_variance.items()}
        drawn = activation_draws(call, params, variances, inputs, n, seed=fresh_seed(generator), **bounds)
    else:
        drawn = weight_draws(call, draw, inputs, n, **bounds)
    drawn = drawn.to(torch.promote_types(drawn.dtype, torch.float32))
    return drawn, at_mean(call, params, inputs, **bounds).to(drawn.dtype)
