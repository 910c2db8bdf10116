"""What a likelihood must be able to do: one frozen record each, looked up by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bayesadam.likelihoods.conformal import Guarantee, SetMethod, class_scores, uniform_like
from bayesadam.likelihoods.predictive import (
    Link,
    LogitPredictive,
    Novel,
    NumericPredictive,
    Predictive,
    PredictiveMixture,
    like,
    mixture_of,
)

CalibrationMethod = Literal["validation", "evidence"]
# A few examples, or equal ones, do not show how far apart outputs are.
FEWEST_TO_JUDGE = 8


@dataclass(frozen=True)
class Likelihood(ABC):
    """p(y | f) of targets y given a network's outputs f.

    Attributes:
        name: what users call it.
        kind: the class of its predictive.
        noise: whether it has an observation noise σ² besides the outputs, which is estimated.
        calibration: the default method of `calibrate`.
        coupled: whether the Hessian couples the outputs in the last dimension; else it is diagonal.
        outputs_per_target: how many outputs there are of one target, those of all targets one after the other.
        ignored: the target that is left out of every score, of likelihoods whose targets are class indices, one per place.
    """

    name: str
    kind: type[Predictive]
    noise: bool = False
    calibration: CalibrationMethod = "validation"
    coupled: bool = False
    ignored: int | None = None
    outputs_per_target: int = 1

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss of every network of a stack, a mean over its batch: (s, b, o), (s, b, ...) → (s,)."""

    def n_outputs(self, targets: Tensor) -> int:
        """How many outputs a network needs for the targets of a data set, (n,) or (n, k)."""
        return targets[0].numel()

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Targets of a data set, checked, as `loss` takes them: (n, k) numbers in the type and on the device of `like`."""
        return targets.reshape(len(targets), -1).to(like)

    @abstractmethod
    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """The diagonal of the Hessian of −log p(y | f) in f, of the outputs' shape; its expectation where y matters."""

    def hessian_root(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """A, (..., o, k), with A Aᵀ the Hessian of −log p(y | f) in f, or its expectation over y where it depends on y."""
        return torch.diag_embed(self.hessian_diagonal(outputs, noise_variance).sqrt())

    def hessian_root_times(self, outputs: Tensor, r: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """A r, (..., o), for as many r, (..., o), without forming A."""
        return self.hessian_diagonal(outputs, noise_variance).sqrt() * r

    def predictive(
        self,
        mean: Tensor,
        variance: Tensor,
        covariance: Tensor | None = None,
        draws: Tensor | None = None,
        *,
        link: Link = "probit",
        noise_variance: Tensor | None = None,
        novel: Novel | None = None,
        guarantee: Guarantee | None = None,
        temperature: float = 1.0,
        averaged: bool = True,
    ) -> Predictive:
        """Moments and draws of f as a predictive distribution of y; σ² counts as 0 where it is not given, with a warning."""
        self.locations(mean)
        noise = mean.new_zeros(()) if noise_variance is None else noise_variance.to(mean)
        given: dict[str, Any] = {"link": link, "noise_variance": noise, "novel": novel, "guarantee": guarantee}
        given |= {"temperature": temperature, "averaged": averaged, "noise_known": noise_variance is not None}
        own = {field.name for field in fields(self.kind)}
        return self.kind(mean, variance, covariance, draws, **{key: given[key] for key in given.keys() & own})

    def mixture(self, members: Sequence[Predictive], weights: Sequence[float]) -> PredictiveMixture:
        """Predictives of this likelihood, of the same batch, as one distribution."""
        return mixture_of(members, weights)

    @property
    def tempered(self) -> bool:
        """Whether its outputs are logits, which a temperature divides."""
        return issubclass(self.kind, LogitPredictive)

    def conformity(self, predictive: Predictive, targets: Tensor, *, seed: int) -> Guarantee:
        """Scores of held-out targets for `prediction_set`; none where classes are left out, or belong to places."""
        if isinstance(predictive, NumericPredictive):
            centre = predictive.predicted_mean
            away = (like(targets, centre) - centre).abs() / predictive.stddev
            return Guarantee(residuals=away.reshape(len(away), -1))
        assert isinstance(predictive, LogitPredictive)
        probs, labels = predictive.class_probs, targets.reshape(predictive.class_probs.shape[:-1]).long()
        if self.ignored is not None and (labels.dim() > 1 or bool((labels == self.ignored).any())):
            return Guarantee()
        # Other numbers than those of `prediction_set`, whose seed is 1.
        uniform = uniform_like(probs, seed + 2)
        every = {method: class_scores(probs, method, uniform) for method in get_args(SetMethod)}
        true = {method: s.gather(-1, labels.unsqueeze(-1)).squeeze(-1) for method, s in every.items()}
        return Guarantee(true, labels)

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor | slice:
        """The places in the batch whose targets count."""
        return slice(None)

    def log_probs(self, predictive: Predictive, targets: Tensor) -> Tensor:
        """log p of every target that counts, one number each."""
        return predictive.log_prob(targets)

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets in the shape that goes with the outputs, (batch, ...)."""
        return like(targets, self.locations(outputs))

    def doubt(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Why outputs, or outputs and targets, look like those of another likelihood, in words; None where they do not."""
        return None

    def locations(self, outputs: Tensor) -> Tensor:
        """Those outputs that say where the targets are; refuses outputs that no network of this likelihood has."""
        return outputs

    def collapse(self, draws: Tensor, at_mean: Tensor) -> str | None:
        """How averaging over draws changed the answer of the network at the mean out of recognition; None if it did not.

        Without targets "worse" shows as another answer: a mean farther off than the outputs are from each other.
        """
        draws, at_mean = self.locations(draws), self.locations(at_mean)
        drift = (draws.mean(dim=0) - at_mean).square().mean().sqrt()
        scale = at_mean.std() if at_mean.numel() > 1 else torch.zeros_like(drift)
        if len(at_mean) < FEWEST_TO_JUDGE or not bool(drift > scale > 0):
            return None
        return (
            f"the averaged prediction is {float(drift):.3g} from the mean network's, whose outputs have a standard deviation "
            f"of {float(scale):.3g}"
        )


def changed_answers(changed: Tensor) -> str | None:
    """`collapse` of classes, by which answers changed."""
    share = float(changed.double().mean())
    if share <= 0.1 or int(changed.sum()) <= 1:
        return None
    return f"averaging over weight draws changes the answer for {share:.0%} of the examples"
