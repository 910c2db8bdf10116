"""What a likelihood is: p(y | f) of targets y given a network's outputs f, with all that differs between families.

A family is one object with the members of `Likelihood`, in their order, and one line of the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributions import Distribution

from bayesadam.likelihoods.moments import Moments, matched

# Fewer examples do not show what outputs are.
FEWEST_TO_JUDGE = 8


@dataclass(frozen=True, eq=False)
class Component:
    """One network of a prediction.

    Attributes:
        f: its outputs.
        noise_variance: σ² of a likelihood that has one, or the most that a noise of the input's own can be.
        temperature: T, which divides logits.
        weight: π, its share in the prediction.
    """

    f: Moments
    noise_variance: Tensor | None = None
    temperature: float = 1.0
    weight: float = 1.0


class Likelihood(ABC):
    """p(y | f).

    Attributes:
        name: as users write it.
        is_classes: whether outputs are logits, which a temperature divides.
        noise: whether it has an observation noise σ² besides the outputs. Its `loss` is then the negative
            log-likelihood at σ² = ½.
        coupled: whether the Hessian couples the outputs in the last dimension; else it is diagonal.
        outputs_per_target: the number of outputs for each target, those of all targets one after the other.
        ignored: the class index that every score leaves out.
        standardised: whether the estimators may standardise targets.
    """

    name: str
    is_classes: bool = False
    noise: bool = False
    coupled: bool = False
    outputs_per_target: int = 1
    ignored: int | None = None
    standardised: bool = True

    # --- training -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of every network of a stack, a mean over its targets: (s, b, o), (s, b, ...) → (s,)."""

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The same, for the estimators to train on; they stop by `loss`."""
        return self.loss(outputs, targets)

    def n_outputs(self, targets: Tensor) -> int:
        """The number of outputs that a network needs for the targets of a data set, (n,) or (n, k)."""
        return self.outputs_per_target * targets[0].numel()

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Targets of a data set as `loss` takes them, checked: (n, k), in the type and on the device of `like`."""
        return targets.reshape(len(targets), -1).to(like)

    def start(self, targets: Tensor) -> Tensor | None:
        """The outputs at which training starts, (o,), given targets (n, k); None for zeros."""
        return None

    # --- targets and outputs ------------------------------------------------------------------------------------------

    def locations(self, outputs: Tensor) -> Tensor:
        """The outputs that locate the targets; refuses outputs that no network of this likelihood has."""
        return outputs

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets in the shape that goes with the outputs, (batch, ...), checked."""
        return matched(targets, self.locations(outputs))

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor | slice:
        """The positions in the batch whose targets count."""
        return slice(None)

    def mismatch(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Why outputs, or outputs and targets, are not those of this likelihood, in words; None if they may be."""
        return None

    # --- mathematics --------------------------------------------------------------------------------------------------

    @abstractmethod
    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """The diagonal of the Hessian of −log p(y | f) in f, of the outputs' shape; its expectation where y matters."""

    @abstractmethod
    def distribution(self, components: Sequence[Component]) -> Distribution:
        """p(y) = Σ π E[p(y | f)]."""

    @abstractmethod
    def log_prob(self, components: Sequence[Component], y: Tensor) -> Tensor:
        """log p(y): one number for each example, or for each class index where an example has many."""

    def ceiling(self, targets: Tensor) -> Tensor | None:
        """The most that noise that depends on the input can be, by target; None where there is none such."""
        return None

    @abstractmethod
    def novelty(self, f: Tensor, r: Tensor) -> Tensor:
        """How unlike familiar inputs each example is, (batch,), of the mean network's f and the relative leverage r."""
