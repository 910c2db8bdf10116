"""IVON (Shen et al. 2024, arXiv 2402.17641): a variational online Newton step, its Hessian estimated from noise."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bayesadam._checks import not_negative, positive
from bayesadam.engine.rules import IVON as Rule
from bayesadam.gaussian.settings import Precision
from bayesadam.optim._perturbed import Group, PerturbedOptimizer
from bayesadam.readers import StateReader


class IVON(PerturbedOptimizer):
    r"""Improved variational online Newton, a mean-field Gaussian :math:`q = \mathcal N(m, (\kappa (h + d))^{-1})`.

    .. math::
        &\textbf{input}: m, \alpha\ (\text{lr}), \beta_1, \beta_2, \kappa\ (\text{n\_data}), d\ (\text{weight decay}),
            h_0\ (\text{initial Hessian}), S\ (\text{blocks}); \quad g = 0,\ h = h_0 \\
        &\textbf{for}\ t = 1, 2, \ldots \\
        &\quad \textbf{for}\ s = 1, \ldots, S: \quad
            n_s = \epsilon_s / \sqrt{\kappa (h + d)}, \quad \epsilon_s \sim \mathcal N(0, 1) \\
        &\quad \hat g = \tfrac1S \sum_s \nabla L(m + n_s), \qquad
            f = \kappa (h + d)\, \tfrac1S \sum_s n_s \nabla L(m + n_s) \\
        &\quad g \leftarrow \beta_1 g + (1 - \beta_1) \hat g \\
        &\quad h \leftarrow \beta_2 h + (1 - \beta_2) f + \tfrac12 (1 - \beta_2)^2 (h - f)^2 / (h + d) \\
        &\quad m \leftarrow m - \alpha (h_0 + d)\, \bigl(g / (1 - \beta_1^t) + d\, m\bigr) / (h + d)

    :math:`L` is the *mean* negative log-likelihood of a mini-batch, without the prior, which is
    :math:`\mathcal N(0, 1/(\kappa d))`. By Stein's identity f is an unbiased estimate of the diagonal of L's Hessian
    averaged over q, whatever the batch size.

    The last term of h keeps :math:`h + d` positive, at least half of what it was, but h itself may be negative where
    the loss curves downwards. `posterior` then splits the same precision as :math:`\kappa \max(h, 0)` for the data and
    :math:`\kappa (d + \min(h, 0))` for the prior, of which one number :math:`\kappa d` is the rule.

    h forgets h₀ after about 1/(1 − β₂) steps, 100,000 by default: in shorter runs a smaller β₂ lets the data speak.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = IVON(model.parameters(), lr=0.1, n_data=100, generator=0)
    >>> with optimizer.sampled_parameters():
    ...     model(torch.ones(1, 2)).square().mean().backward()
    >>> optimizer.step()
    >>> optimizer.posterior(model)
    Posterior(Linear, diagonal, 3 weights in 2 parameters, N=100, power=1, form='map')

    Args:
        params: parameters or groups of them; a group may have its own lr, betas, initial_hessian and weight_decay.
        lr: α.
        n_data: κ, the number of training examples; a larger one makes q narrower, as a lower temperature does.
        initial_hessian: h₀.
        weight_decay: d.
        betas: (β₁, β₂).
        generator: a seed, or a generator that gives one; None takes torch's default one. Replicas need the same seed.
    """

    reader = StateReader(
        "ivon",
        (),
        key="hessian",
        decay=("betas", 1),
        # A posterior's curvature is not negative.
        read=lambda state, group, shape: state["hessian"].clamp(min=0.0),
        note="A Hessian, not a square of gradients. Its precision is κ (h + d): power=1, batch_size=1, uncorrected.",
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        n_data: float,
        initial_hessian: float = 1.0,
        weight_decay: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99999),
        generator: torch.Generator | int | None = None,
    ) -> None:
        own = {"lr": lr, "betas": betas, "initial_hessian": initial_hessian, "weight_decay": weight_decay}
        super().__init__(params, generator, n_data=n_data, **own)

    def _check(self, settings: Group) -> None:
        super()._check(settings)
        positive("initial_hessian", settings["initial_hessian"], "what h starts from")
        not_negative("weight_decay", settings["weight_decay"])

    def _rule(self, group: Group) -> Rule:
        prior = group["n_data"] * group["weight_decay"]
        return Rule(group["betas"], prior_precision=prior, initial_hessian=group["initial_hessian"])

    def _prior(self, curvature: Tensor, group: Group) -> Precision:
        prior = float(group["n_data"] * group["weight_decay"])
        return curvature.clamp(max=0.0).mul_(group["n_data"]).add_(prior) if bool((curvature < 0).any()) else prior
