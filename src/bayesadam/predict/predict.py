"""`predict`: from a posterior and a batch to a predictive distribution."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from bayesadam._alone import alone_with
from bayesadam.errors import BayesAdamWarning, MatchError, SettingError
from bayesadam.predict.call import Call, Forward, evaluating, plain
from bayesadam.predict.linearised import DEFAULT_BUDGET, moments
from bayesadam.predict.plan import plan_for
from bayesadam.predict.predictive import (
    BinaryPredictive,
    ClassificationPredictive,
    Likelihood,
    Link,
    RegressionPredictive,
)
from bayesadam.predict.sampled import (
    activation_draws,
    allows_local_reparameterisation,
    at_mean,
    linearised_draws,
    weight_draws,
)
from bayesadam.predict.sharded import common_generator, draws_by_module, fits, gathered

if TYPE_CHECKING:
    from bayesadam.posterior import Posterior

Method = Literal["linearised", "sampled", "linearised-sampled"]
_FEWEST_TO_JUDGE = 8


class CollapsedPredictionWarning(BayesAdamWarning):
    """Averaging over weight draws changed the prediction out of recognition."""


def predict(
    posterior: Posterior,
    inputs: Any,
    *,
    likelihood: Likelihood = "regression",
    method: Method = "linearised",
    n_samples: int = 30,
    covariance: bool = False,
    link: Link = "probit",
    forward: Forward | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int = DEFAULT_BUDGET,
) -> RegressionPredictive | ClassificationPredictive | BinaryPredictive:
    """The predictive distribution of a batch; the model is as before when it returns, or raises.

    Of a model sharded by FSDP2 every process asks, each for its own batch, with equal options and generators. Where the
    whole posterior fits the memory budget it is gathered for the call, and nothing else is different. Where it does not,
    the sampling methods gather one FSDP module at a time, and run each draw on all of the batch. Either way the model runs
    in the types of its parameters, without FSDP2's mixed precision.

    | method                 | f                                        | cost                                  |
    |------------------------|------------------------------------------|---------------------------------------|
    | `"linearised"`         | N(f(x; μ), J Σ Jᵀ), exact                | a forward pass, a backward one an output |
    | `"linearised-sampled"` | f(x; μ) + J (θ − μ), θ ~ q               | a forward-mode product a draw         |
    | `"sampled"`            | f(x; θ), θ ~ q                           | a forward pass a draw                 |

    The draws of `"sampled"` are of each example by itself: a network of linear layers alone, under a diagonal posterior, has
    its activations drawn, independently from example to example, and not one θ for the batch.

    Other threads that ask for the same model wait for this call to end.

    Args:
        posterior: over the model's weights.
        inputs: a tensor, a tuple (`model(*inputs)`) or a mapping (`model(**inputs)`); the batch comes first.
        likelihood: `"regression"`, `"classification"` (logits in the last dimension) or `"binary"` (one logit an output).
        method: see the table.
        n_samples: draws of the sampling methods.
        covariance: the outputs' whole covariance, (batch, outputs, outputs); without it `link="sampling"` and
            `mutual_information()` take logits as independent of each other.
        link: how logits become probabilities where f is Gaussian: `"probit"` or `"sampling"`.
        forward: `forward(model, inputs)` for models whose call is unusual.
        generator: makes the draws reproducible.
        memory_budget: bytes that activations, gradients and draws may take; work is cut to fit.
    """
    check_options(likelihood, method, link, n_samples, memory_budget)
    inputs = plain(inputs)
    posterior.require_proper()
    posterior.warn_of_limits()
    if posterior.is_sharded:
        generator = common_generator(posterior, generator)
        if fits(posterior, method, memory_budget):
            with alone_with(posterior.model), gathered(posterior) as plain_one:
                return predict(
                    plain_one,
                    inputs,
                    likelihood=likelihood,
                    method=method,
                    n_samples=n_samples,
                    covariance=covariance,
                    link=link,
                    forward=forward,
                    generator=generator,
                    memory_budget=memory_budget,
                )
    call = Call(posterior.model, forward)
    with evaluating(posterior.model):
        if method == "linearised":
            params = parameters_at_mean(posterior)
            found = moments(
                call,
                params,
                [posterior.coordinate_variance.__getitem__],
                inputs,
                covariance=covariance,
                budget=memory_budget,
                bases=posterior.structure.bases,
                directions=[posterior.directions],
            )
            shape = (-1, *found.shape)
            mean = found.mean.reshape(shape).to(found.variance.dtype)
            return wrap(posterior, likelihood, link, mean, found.variance[0].reshape(shape), found.covariance, None)
        draws, centre = _draws(posterior, call, inputs, method, n_samples, generator, memory_budget)
    if method == "sampled":
        _warn_if_collapsed(draws, centre, likelihood)
    # The mean of the linearised draws is known, that of the others estimated from them.
    mean, count = (draws.mean(dim=0), n_samples - 1) if method == "sampled" else (centre, n_samples)
    centred = (draws - mean).reshape(n_samples, len(mean), -1)
    block = torch.einsum("nbc,nbd->bcd", centred, centred) / count if covariance else None
    spread = centred.square().sum(dim=0).div(count).view_as(mean)
    return wrap(posterior, likelihood, link, mean, spread, block, draws)


def parameters_at_mean(posterior: Posterior) -> dict[str, Tensor]:
    """μ in the types and on the devices of the model's parameters."""
    with alone_with(posterior.model):
        own = posterior.parameters()
        return {name: mu.to(own[name]) for name, mu in posterior.mean.items()}


def wrap(
    posterior: Posterior,
    likelihood: Likelihood,
    link: Link,
    mean: Tensor,
    variance: Tensor,
    covariance: Tensor | None,
    draws: Tensor | None,
) -> RegressionPredictive | ClassificationPredictive | BinaryPredictive:
    """Moments and draws of f as the likelihood's predictive distribution."""
    if likelihood == "regression":
        noise = torch.zeros((), dtype=mean.dtype) if posterior.noise_variance is None else posterior.noise_variance
        return RegressionPredictive(mean, variance, covariance, draws, noise.to(mean))
    if likelihood == "classification" and (mean.dim() < 2 or mean.shape[-1] < 2):
        raise MatchError(
            f"classification needs the logits of at least two classes in the last dimension, but the outputs have shape "
            f"{tuple(mean.shape)}: for a single logit use likelihood='binary'"
        )
    kind = ClassificationPredictive if likelihood == "classification" else BinaryPredictive
    return kind(mean, variance, covariance, draws, link)


def _draws(
    posterior: Posterior,
    call: Call,
    inputs: Any,
    method: Method,
    n: int,
    generator: torch.Generator | None,
    budget: int,
) -> tuple[Tensor, Tensor]:
    """Draws of f, (n, batch, ...), and f(x; μ)."""
    if posterior.is_sharded:
        return draws_by_module(posterior, call, inputs, method, n, generator)
    params = parameters_at_mean(posterior)

    def draw() -> dict[str, Tensor]:
        return {name: value.to(params[name].device) for name, value in posterior.sample(generator=generator).items()}

    plan = plan_for(call, {name: tensor.detach().requires_grad_() for name, tensor in params.items()}, inputs)
    bounds = {"activations": plan.activations, "budget": budget}
    if method == "linearised-sampled":
        drawn = linearised_draws(call, params, draw, inputs, n, **bounds)
    elif posterior.structure.independent and allows_local_reparameterisation(call, plan, params, inputs):
        variances = {name: v.to(params[name]) for name, v in posterior.coordinate_variance.items()}
        drawn = activation_draws(call, params, variances, inputs, n, generator=generator, **bounds)
    else:
        drawn = weight_draws(call, draw, inputs, n, **bounds)
    drawn = drawn.to(torch.promote_types(drawn.dtype, torch.float32))
    return drawn, at_mean(call, params, inputs, **bounds).to(drawn.dtype)


def _warn_if_collapsed(draws: Tensor, at_mean: Tensor, likelihood: Likelihood) -> None:
    """Without labels "worse" shows as another answer: other classes, or a mean farther off than the outputs' own spread."""
    if likelihood == "regression":
        drift = (draws.mean(dim=0) - at_mean).square().mean().sqrt()
        scale = at_mean.std() if at_mean.numel() > 1 else torch.zeros_like(drift)
        told = f"the averaged prediction is {float(drift):.3g} from the mean network's, whose outputs spread by {float(scale):.3g}"
        # A few examples, or equal ones, do not show how far apart outputs are.
        collapsed = len(at_mean) >= _FEWEST_TO_JUDGE and bool(drift > scale > 0)
    else:
        probs = draws.softmax(dim=-1) if likelihood == "classification" else draws.sigmoid()
        if likelihood == "classification":
            changed = probs.mean(dim=0).argmax(dim=-1) != at_mean.argmax(dim=-1)
        else:
            changed = (probs.mean(dim=0) > 0.5) != (at_mean > 0)
        share = float(changed.double().mean())
        told = f"averaging over weight draws changes the answer for {share:.0%} of the examples"
        collapsed = share > 0.1 and int(changed.sum()) > 1
    if collapsed:
        warnings.warn(
            f"{told}: the posterior is too wide to be sampled. Calibrate it with predictive='sampled', raise its "
            "prior_precision, or use method='linearised'",
            CollapsedPredictionWarning,
            stacklevel=4,
        )


def check_options(likelihood: str, method: str, link: str, n_samples: int, memory_budget: int) -> None:
    """Refuse options that are none, by name."""
    for name, value, allowed in (
        ("likelihood", likelihood, get_args(Likelihood)),
        ("method", method, get_args(Method)),
        ("link", link, get_args(Link)),
    ):
        if value not in allowed:
            raise SettingError(f"{name} must be one of {allowed}, got {value!r}")
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 2:
        raise SettingError(f"n_samples must be at least 2, got {n_samples!r}")
    if not isinstance(memory_budget, int) or memory_budget < 1:
        raise SettingError(f"memory_budget must be a positive number of bytes, got {memory_budget!r}")
