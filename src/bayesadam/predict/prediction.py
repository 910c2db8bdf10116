"""From a Gaussian over weights and a batch to a predictive distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam._alone import alone_with
from bayesadam._warnings import warn
from bayesadam.errors import CollapsedPredictionWarning
from bayesadam.likelihoods import LikelihoodName, Predictive
from bayesadam.predict.call import Call, evaluating, plain
from bayesadam.predict.gaussian import Gaussian, parameters_at_mean
from bayesadam.predict.linearised import moments
from bayesadam.predict.options import Options, PredictOptions
from bayesadam.predict.plan import plan_for
from bayesadam.predict.sampled import activation_draws, at_mean, draws_activations, linearised_draws, weight_draws
from bayesadam.predict.sharded import draws_by_module, fits, gathered
from bayesadam.structures.noise import fresh_seed
from bayesadam.structures.sharded import common_seed

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    block: Tensor | None
    draws: Tensor | None = None
    with evaluating(gaussian.model):
        if kind == "linearised":
            params, variances = parameters_at_mean(gaussian), [gaussian.coordinate_variance.__getitem__]
            bases, directions = gaussian.structure.bases, [gaussian.directions]
            found = moments(call, params, variances, inputs, options.covariance, budget, bases, directions)
            mean, variance, block = found.mean, found.variance[0], found.covariance
        else:
            draws, centre = _draws(gaussian, call, inputs, options)
    if draws is not None:
        told = options.record.collapse(draws, centre) if kind == "sampled" else None
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
    noise = gaussian.noise_variance
    return options.record.predictive(mean, variance, block, draws, link=options.link, noise_variance=noise)


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
