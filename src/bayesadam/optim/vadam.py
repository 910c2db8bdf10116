r"""Vadam (Khan et al. 2018, arXiv 1806.04854): Adam at perturbed weights, whose second moment is q's precision."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bayesadam._checks import positive
from bayesadam.engine.rules import Vadam as Rule
from bayesadam.errors import SettingError
from bayesadam.gaussian.settings import Precision
from bayesadam.optim._perturbed import Group, PerturbedOptimizer
from bayesadam.readers import StateReader


class Vadam(PerturbedOptimizer):
    r"""Variational Adam, a mean-field Gaussian :math:`q = \mathcal N(\mu, (N v + \lambda)^{-1})`.

    .. math::
        &\textbf{input}: \mu, \alpha\ (\text{lr}), \beta_1, \beta_2, N, \lambda\ (\text{prior precision}),
            \rho_0\ (\text{initial precision}), S\ (\text{blocks}); \quad m = 0,\ v = (\rho_0 - \lambda)/N \\
        &\textbf{for}\ t = 1, 2, \ldots \\
        &\quad \textbf{for}\ s = 1, \ldots, S: \quad
            \theta_s = \mu + \epsilon_s / \sqrt{N v + \lambda}, \quad \epsilon_s \sim \mathcal N(0, 1) \\
        &\quad \hat g = \tfrac1S \sum_s \nabla L(\theta_s), \qquad \hat h = \tfrac1S \sum_s (\nabla L(\theta_s))^2 \\
        &\quad m \leftarrow \beta_1 m + (1 - \beta_1)(\hat g + \tfrac{\lambda}{N} \mu), \qquad
            v \leftarrow \beta_2 v + (1 - \beta_2) \hat h \\
        &\quad \hat m = m / (1 - \beta_1^t), \qquad \hat v = v / (1 - \beta_2^t) \\
        &\quad \mu \leftarrow \mu - \alpha\, \hat m / (\sqrt{\hat v} + \lambda / N)

    :math:`L` is the *mean* negative log-likelihood of a mini-batch, without the prior.

    The posterior takes v as it stands, without the correction by :math:`1 - \beta_2^t`: v does not start from zero. The
    step divides all the same, as published. Too small a :math:`\rho_0` drowns the gradients in noise: try several.

    v averages squares of mini-batch *means*. Of M examples these are near 1/M of the per-example ones, so q is about M
    times wider than a Laplace posterior; `posterior(model).replace(batch_size=M)` has the precision N M v + λ instead.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = Vadam(model.parameters(), n_data=100, prior_precision=1.0, initial_precision=50.0, generator=0)
    >>> with optimizer.sampled_parameters():
    ...     model(torch.ones(1, 2)).square().mean().backward()
    >>> optimizer.step()
    >>> optimizer.posterior(model)
    Posterior(Linear, diagonal, 3 weights in 2 parameters, N=100, power=1, form='map')

    Args:
        params: parameters or groups of them; a group may have its own lr, betas, prior_precision and initial_precision.
        lr: α.
        n_data: N, the number of training examples.
        prior_precision: λ of the prior N(0, 1/λ).
        initial_precision: ρ₀, what q's precision starts from; at least λ.
        betas: (β₁, β₂).
        generator: a seed, or a generator that gives one; None takes torch's default one. Replicas need the same seed.
    """

    reader = StateReader(
        "vadam",
        (),
        key="second_moment",
        decay=("betas", 1),
        note="Squared gradients at perturbed weights. Its precision is N v + λ: power=1, batch_size=1, uncorrected.",
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        n_data: float,
        prior_precision: float,
        initial_precision: float,
        betas: tuple[float, float] = (0.9, 0.999),
        generator: torch.Generator | int | None = None,
    ) -> None:
        own = {"lr": lr, "betas": betas, "prior_precision": prior_precision, "initial_precision": initial_precision}
        super().__init__(params, generator, n_data=n_data, **own)

    def _check(self, settings: Group) -> None:
        super()._check(settings)
        prior, initial = settings["prior_precision"], settings["initial_precision"]
        positive("prior_precision", prior, "λ of the prior N(0, 1/λ)")
        positive("initial_precision", initial, "what q starts from")
        if initial < prior:
            raise SettingError(f"initial_precision={initial!r} is below prior_precision={prior!r}: v would be negative")

    def _rule(self, group: Group) -> Rule:
        return Rule(group["betas"], group["prior_precision"], group["initial_precision"] ** -0.5)

    def _prior(self, curvature: Tensor, group: Group) -> Precision:
        return float(group["prior_precision"])
