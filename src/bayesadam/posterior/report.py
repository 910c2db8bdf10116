"""What calibration did to a posterior, and the held-out scores behind its guarantees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from bayesadam.likelihoods.conformal import Guarantee


@dataclass(frozen=True, eq=False)
class CalibrationReport:
    """What was done, on how much, before and after, and what the data preferred.

    Attributes:
        likelihood: its name.
        method: `"validation"` or `"evidence"`.
        n_fitted: held-out examples behind the settings.
        n_scored: how many of them were scored under settings fitted to the others, behind `nll` and the guarantees.
        nll: mean negative log-likelihood of the posterior and, of classes, of the mean network at the best temperature and
            at 1; of examples under settings fitted to others, or to them where `n_scored` is 0.
        temperatures: T of the probabilities, of each member of a mixture.
        averaged: whether probabilities average over the posterior.
        preferred: what the data preferred, in words.
        guarantee: the scores.
    """

    likelihood: str
    method: str
    n_fitted: int
    n_scored: int
    nll: Mapping[str, float]
    temperatures: tuple[float, ...]
    averaged: bool
    preferred: str
    guarantee: Guarantee = field(default_factory=Guarantee, repr=False)

    def __str__(self) -> str:
        scored = "each scored under a fit to others" if self.n_scored else "scored on the same"
        lines = [f"{self.likelihood}: fitted by {self.method} to {self.n_fitted} held-out examples, {scored}"]
        lines += [f"  negative log-likelihood, {name}: {value:.4f}" for name, value in self.nll.items()]
        return "\n".join([*lines, f"  {self.preferred}"])

    def header(self) -> dict[str, Any]:
        """Its plain data."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("guarantee", "nll")} | {
            "nll": dict(self.nll)
        }

    @classmethod
    def of(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CalibrationReport:
        """From its plain data and the tensors of its guarantee."""
        plain = {**header, "temperatures": tuple(header["temperatures"])}
        return cls(**plain, guarantee=Guarantee.of(tensors))
