r"""Badam, Algorithm 1 of the paper: Adam, whose state gives a posterior when training ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from bayesadam.readers import StateReader
from bayesadam.weights.posterior import Posterior
from bayesadam.weights.settings import SettingKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ReadingKeywords(SettingKeywords, total=False):
    """The options of `Posterior.from_optimizer`."""

    likelihood: str | None
    reader: str | StateReader | None


class Badam(torch.optim.Adam):
    r"""Adam, to the bit, with a method `posterior`.

    .. math::
        &\textbf{input}: \theta_1, \eta, \beta_1, \beta_2, \epsilon, N; \quad m_0 = v_0 = 0 \\
        &\textbf{for}\ t = 1, 2, \ldots \\
        &\quad g_t = \nabla f_t(\theta_t) \\
        &\quad m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad \hat m_t = m_t / (1 - \beta_1^t) \\
        &\quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \qquad \hat v_t = v_t / (1 - \beta_2^t) \\
        &\quad \theta_{t+1} = \theta_t - \eta\, \hat m_t / (\hat v_t^{1/2} + \epsilon) \\
        &\textbf{return}\ \mathcal N\bigl(\theta_t,\ (N \operatorname{diag} \hat v_t^{1/2} + \delta)^{-1}\bigr)

    The paper prints the bias correction inside the recursion, where it would compound; this is the usual form, which is
    what its equation 5 says. Arguments, flags and state dict are those of `torch.optim.Adam`.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = Badam(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.posterior(model, n_data=100)
    Posterior(Linear, diagonal, 3 weights in 2 parameters, N=100, power=0.5, form='map')
    """

    def posterior(self, model: nn.Module, n_data: float, **settings: Unpack[ReadingKeywords]) -> Posterior:
        """The posterior as it stands: `Posterior.from_optimizer(model, self, n_data, **settings)`."""
        return Posterior.from_optimizer(model, self, n_data, **settings)
