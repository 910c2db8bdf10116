"""What a likelihood is, and the predictive distribution that it makes of outputs: p(y) = Σ_m π_m E_m[p(y | f)]."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from bayesadam.errors import CalibrationError, SettingError
from bayesadam.likelihoods.abstention import Abstention
from bayesadam.likelihoods.component import Component, Score, like, rows
from bayesadam.likelihoods.conformal import Guarantee, p_values

if TYPE_CHECKING:
    from typing_extensions import Self

Link = Literal["probit", "sampling"]
CalibrationMethod = Literal["temperature", "validation", "evidence"]
P = TypeVar("P", bound="Predictive", covariant=True)
# With fewer held-out examples all of them are fitted, and none is left to score.
FEWEST_SCORED = 20
# Fewer examples do not show what outputs are.
FEWEST_TO_JUDGE = 8


class Likelihood(ABC, Generic[P]):
    """p(y | f) of targets y given a network's outputs f, with all that differs between likelihoods.

    Attributes:
        name: as users write it.
        kind: the class of its predictive.
        noise: whether it has an observation noise σ² besides the outputs, which is estimated. Its `loss` is then the
            negative log-likelihood at σ² = ½.
        calibration: the default method of `calibrate`.
        coupled: whether the Hessian couples the outputs in the last dimension; else it is diagonal.
        tempered: whether outputs are logits, which a temperature divides.
        outputs_per_target: the number of outputs for each target, those of all targets one after the other.
        ignored: the class index that every score leaves out, for targets that are class indices.
        weight_decay: the default of the scikit-learn estimators.
        standardised: whether the scikit-learn estimators may standardise targets.
    """

    name: str
    kind: type[P]
    noise: bool = False
    calibration: CalibrationMethod = "validation"
    coupled: bool = False
    tempered: bool = False
    outputs_per_target: int = 1
    ignored: int | None = None
    weight_decay: float = 0.01
    standardised: bool = True

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of every network of a stack, a mean over its targets: (s, b, o), (s, b, ...) → (s,)."""

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The same, for the scikit-learn estimators to train on; they stop by `loss`."""
        return self.loss(outputs, targets)

    @abstractmethod
    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """The diagonal of the Hessian of −log p(y | f) in f, of the outputs' shape; its expectation where y matters."""

    def hessian_root_times(self, outputs: Tensor, r: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """A r, (..., o), of r, (..., o), with A Aᵀ the Hessian of −log p(y | f) in f, or its expectation over y."""
        return self.hessian_diagonal(outputs, noise_variance).sqrt() * r

    def hessian_root(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """A itself, (..., o, o)."""
        eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return self.hessian_root_times(outputs.unsqueeze(-2), eye, noise_variance).mT

    def epistemic(self, component: Component) -> Tensor | None:
        """½ tr(H Cov[f]) of each example, of the logits over T; None where the moments do not determine it."""
        noise, t = component.noise_variance, component.temperature if self.tempered else 1.0
        if self.noise and (noise is None or not bool((noise > 0).all())):
            return None
        return rows(self.hessian_diagonal(component.mean / t, noise) * component.variance).sum(dim=1) / (2 * t**2)

    def novelty(self, component: Component) -> Tensor:
        """How unlike the training data each example is, (batch,)."""
        assert component.ratio is not None
        return component.ratio

    def predictive(self, components: Sequence[Component], weights: Sequence[float] = (1.0,), **fields: Any) -> P:
        """The distribution of y given f of one network, or of several with weights π, with other fields of its kind."""
        for component in components:
            self.locations(component.mean if component.logits is None else component.logits)
        return self.kind(self, tuple(components), tuple(weights), **fields)

    def n_outputs(self, targets: Tensor) -> int:
        """The number of outputs that a network needs for the targets of a data set, (n,) or (n, k)."""
        return self.outputs_per_target * targets[0].numel()

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Targets of a data set as `loss` takes them, checked: (n, k), in the type and on the device of `like`."""
        return targets.reshape(len(targets), -1).to(like)

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets in the shape that goes with the outputs, (batch, ...), checked."""
        return like(targets, self.locations(outputs))

    def locations(self, outputs: Tensor) -> Tensor:
        """The outputs that locate the targets; refuses outputs that no network of this likelihood has."""
        return outputs

    def start(self, targets: Tensor) -> Tensor | None:
        """The outputs at which training starts, (o,), given targets (n, k); None for zeros."""
        return None

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor | slice:
        """The positions in the batch whose targets count."""
        return slice(None)

    def ceiling(self, targets: Tensor) -> Tensor | None:
        """The most that noise that depends on the input can be, by target; None where there is none such."""
        return None

    def log_probs(self, predictive: Predictive, targets: Tensor) -> Tensor:
        """log p of every target that counts, one number each."""
        return predictive.log_prob(targets)

    def mismatch(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Why outputs, or outputs and targets, are not those of this likelihood, in words; None if they may be."""
        return None

    def collapse(self, draws: Tensor, at_mean: Tensor) -> str | None:
        """How averaging over draws moved the answer farther than the mean network's outputs are apart; else None."""
        draws, at_mean = self.locations(draws), self.locations(at_mean)
        drift = (draws.mean(dim=0) - at_mean).square().mean().sqrt()
        if len(at_mean) < FEWEST_TO_JUDGE or not bool(drift > at_mean.std() > 0):
            return None
        spread = f"whose outputs have a standard deviation of {float(at_mean.std()):.3g}"
        return f"the averaged prediction is {float(drift):.3g} from the mean network's, {spread}"


@dataclass(frozen=True, eq=False, repr=False)
class Predictive(ABC):
    """The distribution of y for every example of a batch: f of one network, or of several with weights π.

    `mean`, `variance`, `covariance` and `draws` are those of the outputs f, without observation noise.

    Attributes:
        likelihood: p(y | f).
        components: f of each network; a `Posterior`'s prediction has one.
        weights: π, of sum 1.
        link: how logits become probabilities where f is Gaussian.
        seed: of the draws of `link="sampling"`.
        guarantee: held-out scores, where the posterior was calibrated on data that it was not fitted to.
        plan: how the moments were computed, in words.
        abstention: when an input is answered, where the posterior was calibrated with `risk=`.
        in_range: whether inputs have values such as the held-out ones, (batch,), where that decides on answers.
    """

    likelihood: Any
    components: tuple[Component, ...]
    weights: tuple[float, ...] = (1.0,)
    link: Link = "probit"
    seed: int = 0
    guarantee: Guarantee | None = None
    plan: str = ""
    abstention: Abstention | None = None
    in_range: Tensor | None = None

    def __repr__(self) -> str:
        networks = f", {len(self.components)} networks" if len(self.components) > 1 else ""
        return (
            f"{type(self).__name__}({self.likelihood.name}, outputs {tuple(self.components[0].mean.shape)}{networks})"
        )

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """E[f] = Σ π_m E_m[f] and Var[f] = Σ π_m (Var_m[f] + (E_m[f] − E[f])²), the covariance alike."""
        if len(self.components) == 1:
            return self.components[0].mean, self.components[0].variance, self.components[0].covariance
        mean, variance = mixed(self.weights, [(c.mean, c.variance) for c in self.components])
        pairs = [(c.covariance, rows(c.mean - mean)) for c in self.components]
        blocks = [block + d[:, :, None] * d[:, None, :] for block, d in pairs if block is not None]
        return mean, variance, average(self.weights, blocks) if len(blocks) == len(pairs) else None

    @property
    def mean(self) -> Tensor:
        """E[f], of the network's output shape, (batch, ...)."""
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        """Var[f], of the same shape."""
        if any(c.alone for c in self.components):
            raise SettingError("this prediction is the mean network's at a temperature: predict with covariance=True")
        return self._moments[1]

    @property
    def covariance(self) -> Tensor | None:
        """Cov[f], (batch, outputs, outputs), of a prediction with `covariance=True` or `joint=True`."""
        return self._moments[2]

    @property
    def joint_covariance(self) -> Tensor | None:
        """Cov[f] between inputs, of `mean.flatten()` with itself, of a prediction with `joint=True`."""
        each = [(c.joint, (c.mean - self.mean).flatten()) for c in self.components]
        found = [joint if len(each) == 1 else joint + d[:, None] * d for joint, d in each if joint is not None]
        return average(self.weights, found) if len(found) == len(each) else None

    @cached_property
    def draws(self) -> Tensor | None:
        """Draws of f, (n, batch, ...), where the method sampled; of several networks in turn and in proportion to π.

        Those of `"linearised-sampled"` are functions: one draw of the weights for the whole batch. Those of `"sampled"`
        need not be: activations may be drawn, independently from example to example.
        """
        drawn = [c.draws for c in self.components if c.draws is not None]
        if len(drawn) < len(self.components) or len(drawn) == 1:
            return drawn[0] if len(drawn) == len(self.components) else None
        heaviest = max(self.weights)
        parts = [d[: round(len(d) * weight / heaviest)] for weight, d in zip(self.weights, drawn, strict=True)]
        positions = torch.cat([(torch.arange(len(d)) + 0.5) / len(d) for d in parts])
        return torch.cat(parts)[positions.argsort(stable=True).to(parts[0].device)]

    @property
    def score(self) -> Score | None:
        """The estimate behind `epistemic` of one network, where its outputs are too many for an exact one."""
        return self.components[0].score if len(self.components) == 1 else None

    @property
    def outputs(self) -> Tensor | None:
        """The indices of the outputs that were asked for, (batch, ..., k); None for all."""
        return self.components[0].outputs

    @property
    def temperature(self) -> float:
        """T, by which logits are divided; that of the first network."""
        return self.components[0].temperature

    @property
    def averaged(self) -> bool:
        """Whether probabilities average over the posterior; else held-out data preferred the mean network's."""
        return self.components[0].averaged

    @property
    def epistemic(self) -> Tensor:
        """½ tr(H Cov[f]), H the Hessian of −log p(y | f): to first order what y would teach about the weights, in nats.

        One number for each example, or for each position of classes; of coupled outputs without their covariance an
        unbiased estimate, whose standard error `score` has.
        """
        each = [self.likelihood.epistemic(c) if c.score is None else c.score.value for c in self.components]
        if any(found is None for found in each):
            raise SettingError(
                "this prediction does not determine ½ tr(H Cov[f]): predict with covariance=True, or with probes=2 for "
                "an estimate"
            )
        return average(self.weights, each)

    @cached_property
    def novelty(self) -> Tensor:
        """How unlike the training data each example is, (batch,): larger is less familiar.

        r is the leverage of the example in the network's layers, relative to that of familiar inputs. For numbers it is
        r itself, for classes the entropy, in nats, of softmax(f/u), u = √(1 + (10 π/4) r^1.5); where outputs are of
        many positions, such as the tokens of a text, their mean entropy at u = 1, and 0.3 log r.
        """
        each = [self.likelihood.novelty(c) for c in self.components if c.ratio is not None]
        if len(each) < len(self.components):
            raise SettingError("this prediction has no novelty: the leverage of a sharded network is not known")
        return average(self.weights, each)

    @property
    def novelty_pvalue(self) -> Tensor:
        """The share of held-out examples at least as novel, in float64: of examples like them at most α have p ≤ α."""
        return p_values(self._held_out("novelty"), self.novelty)

    def _held_out(self, name: str) -> Tensor:
        """Held-out scores."""
        if self.guarantee is None or name not in self.guarantee:
            raise CalibrationError(
                f"this needs held-out scores ({name}): calibrate the posterior with at least {FEWEST_SCORED} examples. "
                "Scores of classes are kept where each example has one class, and none is left out"
            )
        return self.guarantee[name]

    @property
    def answered(self) -> Tensor:
        """Which inputs to answer, (batch,) booleans; the others are for a person.

        Of what it answers at most `risk` is wrong, with the `confidence` that `calibrate` was asked for, on data like
        the held-out. Inputs whose values left the range of those are not answered. See `abstention`.
        """
        if self.abstention is None:
            raise CalibrationError(
                "which inputs to answer depends on how many errors are allowed: calibrate(posterior, held_out, "
                "risk=0.02) finds out, of numbers with tolerance="
            )
        answered = self.abstention.answers(self.novelty if self.abstention.by == "novelty" else self.doubt)
        return answered if self.in_range is None else answered & self.in_range.to(answered.device)

    @property
    @abstractmethod
    def doubt(self) -> Tensor:
        """By which inputs are answered, (batch,): larger is less sure."""

    @abstractmethod
    def wrong(self, targets: Tensor, tolerance: float | None = None) -> Tensor:
        """Whether the answer to each example is wrong, (batch,) booleans; of several outputs, whether any is.

        Numbers farther from E[y] than a tolerance are wrong, than that of `abstention` for None.
        """

    @abstractmethod
    def conformity(self, targets: Tensor, *, seed: int) -> Guarantee:
        """The scores of held-out targets on which `prediction_set` rests."""

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y), one number per example."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """The entropy of y in nats."""

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, (n, batch, ...), each from one network for the whole batch."""
        if len(self.components) == 1:
            return self._sample(0, n, generator)
        shares = torch.tensor(self.weights, dtype=torch.float64, device=self.mean.device)
        picks = torch.multinomial(shares, n, replacement=True, generator=generator)
        turns = [(picks == number).nonzero().flatten() for number in range(len(self.components))]
        drawn = [self._sample(number, len(turn), generator) for number, turn in enumerate(turns) if len(turn)]
        return torch.cat(drawn)[torch.cat(turns).argsort()]

    @abstractmethod
    def _sample(self, number: int, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws of y from one component."""

    def changed(self, **changes: Any) -> Self:
        """The same with other values of some fields in every component."""
        return replace(self, components=tuple(replace(c, **changes) for c in self.components))


def average(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    """Σ π_m x_m."""
    if len(values) == 1:
        return values[0]
    return reduce(torch.add, [weight * value for weight, value in zip(weights, values, strict=True)])


def mixed(weights: Sequence[float], moments: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Σ π_m E_m and Σ π_m (Var_m + (E_m − E)²), of means and variances."""
    mean = average(weights, [each for each, _ in moments])
    return mean, average(weights, [v if len(moments) == 1 else v + (m - mean).square() for m, v in moments])


def pooled(weights: Sequence[float], scores: Sequence[Tensor]) -> Tensor:
    """log Σ π_m exp(scores_m)."""
    if len(scores) == 1:
        return scores[0]
    return torch.logsumexp(torch.stack([s + math.log(w) for w, s in zip(weights, scores, strict=True)]), dim=0)
