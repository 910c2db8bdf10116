"""`BadamModel`: linearised networks as a BoTorch model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam.botorch.surrogate import Process
from bayesadam.errors import MatchError, SettingError
from bayesadam.weights.mixture import Mixture
from bayesadam.weights.posterior import Posterior

if TYPE_CHECKING:
    from typing_extensions import Self

_models: Any = require("botorch.models.model")
GPyTorchPosterior: Any = require("botorch.posteriors.gpytorch").GPyTorchPosterior
_normals: Any = require("gpytorch.distributions")
to_linear_operator: Any = require("linear_operator").to_linear_operator
MultivariateNormal, MultitaskMultivariateNormal = _normals.MultivariateNormal, _normals.MultitaskMultivariateNormal


class BadamModel(_models.Model, _models.FantasizeMixin):  # type: ignore[misc]
    """A BoTorch model: the Gaussian process of one network, or of several.

    `BadamModel.fit(X, Y)` trains small networks and takes the processes of their tangent kernels;
    `BadamModel(posterior)` takes any posterior of a regression, linearised. Samples of
    `posterior(X)` have gradients with respect to X, so every acquisition function applies.
    Several objectives are the outputs of one model, or models in botorch's `ModelList`.

    Args:
        source: a `Posterior` or a `Mixture` over inputs and outcomes as they are, or a `Process`.
        train_X, train_Y: the evaluations behind it, (n, d) and (n, m), for `condition_on_observations(retrain=True)`.
        outcome_transform, input_transform: botorch's; outcomes are standardised without one too.
        settings: the settings of `fit`, for training again.
    """

    likelihood = None

    def __init__(
        self,
        source: Posterior | Mixture | Process,
        train_X: Tensor | None = None,
        train_Y: Tensor | None = None,
        *,
        outcome_transform: Any = None,
        input_transform: Any = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(source, Process):
            mixture = source if isinstance(source, Mixture) else Mixture([source])
            if mixture._likelihood(None) != "regression" or mixture.members[0].noise_variance is None:
                known = "posterior.replace(likelihood='regression', noise_variance=...)"
                raise SettingError(f"a BoTorch model is a regression of known noise: calibrate, or {known}")
            n_inputs, n_outputs = _widths(mixture)
            source = Process(mixture, _nothing(n_inputs), _nothing(n_outputs))
        self.process, self.settings = source, settings or {}
        self.train_inputs = None if train_X is None else (train_X,)
        self.train_targets = train_Y
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        if input_transform is not None:
            self.input_transform = input_transform
        self.eval()

    @classmethod
    def fit(
        cls,
        train_X: Tensor,
        train_Y: Tensor,
        *,
        outcome_transform: Any = None,
        input_transform: Any = None,
        **settings: Any,
    ) -> Self:
        """Train networks on evaluations X, (n, d), and Y, (n, m).

        Args:
            settings: `hidden`, `activation`, `n_ensemble`, `steps`, `lr`, `rounds` and `seed`, as of
                `bayesadam.botorch.surrogate.Ensemble.fit`; `start`, a `BadamModel` whose networks to begin with.
        """
        start = settings.pop("start", None)
        return cls(
            Process.fit(
                *_transformed(train_X, train_Y, outcome_transform, input_transform),
                start=None if start is None else start.process,
                **settings,
            ),
            train_X,
            train_Y,
            outcome_transform=outcome_transform,
            input_transform=input_transform,
            settings=settings,
        )

    @property
    def num_outputs(self) -> int:
        """m, the number of outcomes."""
        return self.process.outcomes.shape[1]

    @property
    def batch_shape(self) -> torch.Size:
        """That of the observations it was conditioned on; none of a model that was fitted."""
        return torch.Size() if self.process.observed is None else self.process.observed[1].shape[:-2]

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
        **_: Any,
    ) -> Any:
        """The joint posterior of q points, X of shape (batch, q, d): a `GPyTorchPosterior`."""
        self.eval()
        X = self.transform_inputs(X)
        if self.batch_shape and X.dim() <= len(self.batch_shape) + 1:
            X = X.expand(*self.batch_shape, *X.shape[-2:])
        mean, covariance = self.process.moments(X)
        if isinstance(observation_noise, Tensor) or observation_noise:
            own = observation_noise if isinstance(observation_noise, Tensor) else self.process.noise
            covariance = covariance + torch.diag_embed(own.to(mean).expand(mean.shape).flatten(-2))
        found = GPyTorchPosterior(_normal(mean, covariance))
        if hasattr(self, "outcome_transform"):
            found = self.outcome_transform.untransform_posterior(found, X=X)
        if output_indices is not None:
            found = _some_outputs(found, output_indices)
        return found if posterior_transform is None else posterior_transform(posterior=found, X=X)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, *, retrain: bool = False, **_: Any
    ) -> Self:
        """A new model that has also seen outcomes Y, (batch, k, m), at X, (batch, k, d).

        Exact for the model's Gaussian process; weights stay as they are. With `retrain` they are trained on, from
        where they are, on all evaluations: for real observations, not for a batch of imagined ones.
        """
        if retrain:
            if self.train_inputs is None or self.train_targets is None or Y.dim() != 2:
                raise MatchError("retrain=True needs the model's own train_X and train_Y, and Y of shape (k, m)")
            every, outcomes = torch.cat([self.train_inputs[0], X]), torch.cat([self.train_targets, Y])
            kept: Any = {name: getattr(self, name, None) for name in ("outcome_transform", "input_transform")}
            return type(self).fit(every, outcomes, start=self, **{**self.settings, **kept})
        found = copy.copy(self)
        found._modules = dict(self._modules)
        if hasattr(self, "outcome_transform"):
            Y, noise = self.outcome_transform(Y, noise, X=X)
        found.process = self.process.observe(self.transform_inputs(X), Y, noise)
        return found

    def _set_transformed_inputs(self) -> None:
        """Nothing: the evaluations are kept as they came, and transformed where they are used."""

    def _revert_to_original_inputs(self) -> None:
        """Nothing, for the same reason."""

    def subset_output(self, idcs: list[int]) -> Any:
        """The model of some of the outcomes."""
        return _Some(self, idcs)


class _Some(_models.Model):  # type: ignore[misc]
    """Some outcomes of a model."""

    def __init__(self, whole: BadamModel, indices: list[int]) -> None:
        super().__init__()
        self.whole, self.indices = whole, indices

    @property
    def num_outputs(self) -> int:
        return len(self.indices)

    @property
    def batch_shape(self) -> torch.Size:
        return self.whole.batch_shape

    def posterior(self, X: Tensor, output_indices: list[int] | None = None, **options: Any) -> Any:
        chosen = self.indices if output_indices is None else [self.indices[i] for i in output_indices]
        return self.whole.posterior(X, output_indices=chosen, **options)


def _normal(mean: Tensor, covariance: Tensor) -> Any:
    # As an operator, for which gpytorch adds the jitter that a factorisation needs.
    operator = to_linear_operator(covariance)
    if mean.shape[-1] == 1:
        return MultivariateNormal(mean.squeeze(-1), operator)
    return MultitaskMultivariateNormal(mean, operator, interleaved=True)


def _some_outputs(posterior: Any, indices: list[int]) -> Any:
    """The same of some outcomes."""
    normal = posterior.distribution
    if not isinstance(normal, MultitaskMultivariateNormal):
        return posterior
    q, m = normal.mean.shape[-2:]
    kept = torch.tensor([i % m for i in indices])
    places = (torch.arange(q)[:, None] * m + kept).flatten()
    covariance = normal.covariance_matrix[..., places, :][..., places]
    return GPyTorchPosterior(_normal(normal.mean[..., kept], covariance))


def _transformed(X: Tensor, Y: Tensor, outcome: Any, inputs: Any) -> tuple[Tensor, Tensor]:
    """What the networks see; the transforms learn what they have to."""
    if inputs is not None:
        X = inputs.train()(X)
        inputs.eval()
    if outcome is not None:
        Y = outcome.train()(Y, X=X)[0]
        outcome.eval()
    return X, Y


def _widths(mixture: Mixture) -> tuple[int, int]:
    """How many inputs and outputs the networks have."""
    matrices = [p for p in mixture.members[0].model.parameters() if p.dim() == 2]
    if not matrices:
        raise MatchError("the network has no matrix that tells how many inputs and outputs it has: pass a Process")
    return matrices[0].shape[1], matrices[-1].shape[0]


def _nothing(width: int) -> Tensor:
    """Centre 0 and scale 1."""
    return torch.stack([torch.zeros(width), torch.ones(width)]).double()
