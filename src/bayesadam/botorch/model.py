"""`BadamModel`: linearised networks as a BoTorch model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam.errors import MatchError, SettingError
from bayesadam.predict import white_rows
from bayesadam.weights.mixture import Mixture
from bayesadam.weights.posterior import Posterior

if TYPE_CHECKING:
    from typing_extensions import Self

_models: Any = require("botorch.models.model")
GPyTorchPosterior: Any = require("botorch.posteriors.gpytorch").GPyTorchPosterior
_normals: Any = require("gpytorch.distributions")
to_linear_operator: Any = require("linear_operator").to_linear_operator
MultivariateNormal, MultitaskMultivariateNormal = _normals.MultivariateNormal, _normals.MultitaskMultivariateNormal

# Below this share of the largest eigenvalue a covariance is rounding.
_JITTER = 1e-10


class BadamModel(_models.Model, _models.FantasizeMixin):  # type: ignore[misc]
    """A BoTorch model: the Gaussian process of a network, or of several, that were trained for a regression.

    The linearised network has the mean f and the covariance J Σ J'ᵀ; of a mixture the moments are those of its members
    together, Σ π (J Σ J'ᵀ + (f_m − f̄)(f'_m − f̄')ᵀ). Samples of `posterior(X)` have gradients with respect to X, so that
    every acquisition function applies. Several objectives are the outputs of one model, or models in a `ModelList`.

    Args:
        posterior: of a regression of known noise, over inputs and outcomes as they are or as the transforms make them.
        outcome_transform, input_transform: botorch's, fitted: those that the network was trained under.
    """

    likelihood = None

    def __init__(
        self, posterior: Posterior | Mixture, *, outcome_transform: Any = None, input_transform: Any = None
    ) -> None:
        super().__init__()
        mixture = posterior if isinstance(posterior, Mixture) else Mixture([posterior])
        if mixture.likelihood != "regression" or any(q.noise_variance is None for q in mixture):
            known = "posterior.replace(likelihood='regression', noise_variance=...)"
            raise SettingError(f"a BoTorch model is a regression of known noise: {known}")
        matrices = [p for p in mixture.members[0].model.parameters() if p.dim() == 2]
        if not matrices:
            raise MatchError("the network has no matrix that tells how many outputs it has")
        self.mixture, self.outputs = mixture, len(matrices[-1])
        # Inputs, (..., k, d), outcomes and their noise, (..., k, m), that were seen since the training.
        self.observed: tuple[Tensor, Tensor, Tensor] | None = None
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        if input_transform is not None:
            self.input_transform = input_transform
        self.eval()

    @property
    def num_outputs(self) -> int:
        """m, the number of outcomes."""
        return self.outputs

    @property
    def batch_shape(self) -> torch.Size:
        """That of the observations it was conditioned on; none of a model that was not."""
        return torch.Size() if self.observed is None else self.observed[1].shape[:-2]

    @property
    def noise(self) -> Tensor:
        """σ² of the outcomes, (m,), the members' mean."""
        each = [torch.as_tensor(q.noise_variance).double().expand(self.outputs) for q in self.mixture]
        return torch.stack(each).mean(dim=0)

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
        mean, covariance = self.moments(X)
        if isinstance(observation_noise, Tensor) or observation_noise:
            noise = observation_noise if isinstance(observation_noise, Tensor) else self.noise
            covariance = covariance + torch.diag_embed(noise.to(mean).expand(mean.shape).flatten(-2))
        joint = GPyTorchPosterior(_normal(mean, covariance))
        if hasattr(self, "outcome_transform"):
            joint = self.outcome_transform.untransform_posterior(joint, X=X)
        if output_indices is not None:
            joint = _some_outputs(joint, output_indices)
        return joint if posterior_transform is None else posterior_transform(posterior=joint, X=X)

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **_: Any) -> Self:
        """A new model that has also seen outcomes Y, (batch, k, m), at X, (batch, k, d); no weight changes.

        Exact for the model's Gaussian process, and meant for a batch of imagined outcomes: with real ones train the
        network on.
        """
        model = copy.copy(self)
        model._modules = dict(self._modules)
        if hasattr(self, "outcome_transform"):
            Y, noise = self.outcome_transform(Y, noise, X=X)
        new = [self.transform_inputs(X).double(), Y.double(), (self.noise if noise is None else noise).double()]
        new[2] = new[2].expand(Y.shape)
        if self.observed is not None:
            batch: Any = torch.broadcast_shapes(*(t.shape[:-2] for t in (*self.observed, *new)))  # type: ignore[no-untyped-call]
            pairs = zip(self.observed, new, strict=True)
            new = [torch.cat([t.expand(*batch, *t.shape[-2:]) for t in pair], dim=-2) for pair in pairs]
        model.observed = (new[0], new[1], new[2])
        return model

    def _set_transformed_inputs(self) -> None:
        """Nothing: it has no evaluations of its own, which botorch would transform."""

    def moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """E[f], (..., q, m), and Cov[f], (..., q m, q m), of inputs (..., q, d); a point's outputs are neighbours."""
        mean, covariance = self._joint(X.double()) if self.observed is None else self._conditioned(X.double())
        return mean.to(X.dtype), covariance.to(X.dtype)

    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Without observations: the moments of the mixture."""
        batch, q, means, covariances = x.shape[:-2], x.shape[-2], [], []
        for member in self.mixture:
            kind = next(iter(member.draw_types().values()))
            mean, rows = white_rows(member, x.reshape(-1, x.shape[-1]).to(kind))
            rows = rows.double().reshape(*batch, q * self.outputs, -1)
            means.append(mean.double().view(*batch, q, self.outputs))
            covariances.append(rows @ rows.mT)
        of_members = torch.stack(means)
        shares = torch.tensor(self.mixture.weights, dtype=torch.float64).view(-1, *[1] * x.dim())
        mean = (shares * of_members).sum(dim=0)
        away = (of_members - mean).flatten(-2)
        between = away[..., :, None] * away[..., None, :]
        return mean, (shares * (torch.stack(covariances) + between)).sum(dim=0)

    def _conditioned(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Given what was observed: the usual conditional Gaussian."""
        assert self.observed is not None
        seen, y, noise = self.observed
        batch: Any = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # type: ignore[no-untyped-call]
        points = [t.expand(*batch, *t.shape[-2:]) for t in (seen, x)]
        mean, covariance = self._joint(torch.cat(points, dim=-2))
        k = seen.shape[-2] * y.shape[-1]
        floor = noise + _JITTER * covariance.diagonal(dim1=-2, dim2=-1).amax(dim=-1)[..., None, None]
        inner = covariance[..., :k, :k] + torch.diag_embed(floor.expand(*batch, *noise.shape[-2:]).flatten(-2))
        cross = covariance[..., :k, k:]
        solved = torch.cholesky_solve(cross, torch.linalg.cholesky(inner))
        residual = (y - mean[..., : seen.shape[-2], :]).flatten(-2).unsqueeze(-1)
        moved = (solved.mT @ residual).reshape(*batch, x.shape[-2], y.shape[-1])
        return mean[..., seen.shape[-2] :, :] + moved, covariance[..., k:, k:] - cross.mT @ solved


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
