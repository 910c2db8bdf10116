"""The options of a prediction, checked once."""

from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from bayesadam._warnings import warn
from bayesadam.errors import SettingError
from bayesadam.likelihoods import Likelihood, LikelihoodName, Link, likelihood
from bayesadam.predict.asked import Outputs, Top, checked_outputs
from bayesadam.predict.call import Forward
from bayesadam.predict.linearised import DEFAULT_BUDGET
from bayesadam.predict.places import Positions, check_positions

PredictiveKind = Literal["linearised", "sampled", "linearised-sampled"]


class PredictOptions(TypedDict, total=False):
    """The keywords of `predict` besides the likelihood."""

    predictive: PredictiveKind
    n_samples: int
    covariance: bool
    link: Link
    forward: Forward | None
    generator: torch.Generator | None
    memory_budget: int
    novelty: bool | None
    outputs: Outputs | None
    positions: Positions | None
    probes: int | None
    captured: bool
    method: PredictiveKind | None


@dataclass(frozen=True, eq=False)
class Options:
    """The keywords of `predict`; `method` is the old name of `predictive`.

    `chosen` is what `outputs` asks for, checked; None for all. With `for_novelty` the posterior is under the settings of novelty itself: its moments serve for both.
    """

    likelihood: LikelihoodName = "regression"
    predictive: PredictiveKind = "linearised"
    n_samples: int = 30
    covariance: bool = False
    link: Link = "probit"
    forward: Forward | None = None
    generator: torch.Generator | None = None
    memory_budget: int = DEFAULT_BUDGET
    novelty: bool | None = None
    outputs: Outputs | None = None
    positions: Positions | None = None
    probes: int | None = None
    captured: bool = True
    method: InitVar[PredictiveKind | None] = None
    for_novelty: bool = False
    chosen: Top | Tensor | None = field(init=False, default=None)

    def __post_init__(self, method: PredictiveKind | None) -> None:
        if method is not None:
            warn(f"predict(method={method!r}) is now called predict(predictive={method!r})", DeprecationWarning)
            object.__setattr__(self, "predictive", method)
        likelihood(self.likelihood)
        for name, allowed in (("predictive", get_args(PredictiveKind)), ("link", get_args(Link))):
            if getattr(self, name) not in allowed:
                raise SettingError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        object.__setattr__(self, "chosen", checked_outputs(self.outputs))
        check_positions(self.positions)
        if self.probes is not None and (
            isinstance(self.probes, bool) or not isinstance(self.probes, int) or self.probes < 0
        ):
            raise SettingError(f"probes must be a whole number, at least 0, got {self.probes!r}")
        if self.novelty and self.predictive != "linearised":
            raise SettingError(f"novelty=True needs predictive='linearised', got {self.predictive!r}")
        if isinstance(self.n_samples, bool) or not isinstance(self.n_samples, int) or self.n_samples < 2:
            raise SettingError(f"n_samples must be at least 2, got {self.n_samples!r}")
        if not isinstance(self.memory_budget, int) or self.memory_budget < 1:
            raise SettingError(f"memory_budget must be a positive number of bytes, got {self.memory_budget!r}")

    @property
    def record(self) -> Likelihood[Any]:
        """The likelihood of that name."""
        return likelihood(self.likelihood)
