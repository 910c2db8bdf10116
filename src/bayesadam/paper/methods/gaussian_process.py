"""The reference of Figure 1: an exact Gaussian process whose hyperparameters maximise the marginal likelihood."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam._progress import Bar
from bayesadam.errors import SettingError
from bayesadam.likelihoods import Component, Predictive
from bayesadam.likelihoods import likelihood as likelihood_named
from bayesadam.paper.methods.base import Fitted, Problem


def fit_gp(problem: Problem) -> Fitted:
    """An RBF kernel with one lengthscale per input, a constant mean and Gaussian noise, one process per seed and output."""
    if problem.data.likelihood != "regression":
        raise SettingError(f"the Gaussian process is for regression, not {problem.data.likelihood!r}")
    gpytorch = require("gpytorch")
    pairs = zip(problem.data.x.double(), problem.data.y.double(), strict=True)
    with Bar("fit") as bar:
        step = bar.step if problem.progress else lambda: None
        trained = [[_trained(gpytorch, x, column, step) for column in y.T] for x, y in pairs]
    return Fitted("gp", tuple(_predictor(gpytorch, outputs) for outputs in trained))


def _trained(gpytorch: Any, x: Tensor, y: Tensor, step: Callable[[], None]) -> Any:
    class Exact(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[1]))

        def forward(self, inputs: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Exact(likelihood).double()
    extent = (x.amax(dim=0) - x.amin(dim=0)).clamp(min=1e-6)
    model.covar_module.base_kernel.lengthscale = 0.3 * extent
    model.covar_module.outputscale = y.var().clamp(min=1e-6)
    model.mean_module.constant.data = y.mean()
    likelihood.noise = 0.1 * y.var().clamp(min=1e-4)
    model.train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = -objective(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        step()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    model.eval()
    return model


def _predictor(gpytorch: Any, outputs: list[Any]) -> Callable[[Tensor], Predictive]:
    def predictor(x: Tensor) -> Predictive:
        with torch.no_grad(), gpytorch.settings.fast_pred_var(False):
            found = [model(x.double()) for model in outputs]
            mean = torch.stack([f.mean for f in found], dim=-1).float()
            variance = torch.stack([f.variance for f in found], dim=-1).float()
            noise = torch.stack([model.likelihood.noise.squeeze() for model in outputs]).float()
        made: Predictive = likelihood_named("regression").predictive([Component(mean, variance, noise_variance=noise)])
        return made

    return predictor
