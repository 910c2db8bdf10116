"""N, δ, p and the rest: the numbers that turn curvature into precision, and the equations they enter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor, nn

from bayesadam._checks import positive
from bayesadam._shards import is_sharded, placed_like, whole
from bayesadam.errors import SettingError
from bayesadam.readers import working_dtype

Form = Literal["map", "likelihood"]
Precision = float | Tensor


@dataclass(frozen=True, eq=False)
class Settings:
    """N, δ, p and the rest of  precision = w c + δ,  with c = v̂ᵖ and the weight  w = s N B^(2p−1).

    At p = 1/2 the batch size drops out and w c = N v̂^(1/2), the paper's equation; at p = 1 it is the
    Laplace-consistent N B v̂, since v is the square of a *mean* of B gradients.

    Attributes:
        n_data: N, the number of data points.
        prior_precision: δ by parameter name, a number or a tensor of the parameter's shape.
        power: p.
        batch_size: B, needed for p = 1; None counts as 1.
        form: `"map"`, prior in the loss, mean θ; `"likelihood"`, prior applied afterwards, mean w c/(w c + δ) θ.
        scale: s, a factor on N that held-out data determine.
        covariant: whether δ is that of a `CovariantPrior`, of which only the size is free.
        default_prior: whether δ = 1 stands where no prior was given and there was no weight decay.
    """

    n_data: float
    prior_precision: Mapping[str, Precision]
    power: float = 0.5
    batch_size: int | None = None
    form: Form = "map"
    scale: float = 1.0
    covariant: bool = False
    default_prior: bool = False

    def __post_init__(self) -> None:
        positive("n_data", self.n_data, "the number of training examples")
        positive("scale", self.scale, "a factor on n_data")
        positive("power", self.power, "the paper's is 0.5")
        if self.batch_size is not None:
            positive("batch_size", self.batch_size, "the number of examples behind one gradient")
        elif self.power == 1:
            raise SettingError("power=1 needs batch_size, the examples behind one gradient: the precision is N B v")
        if self.form not in get_args(Form):
            raise SettingError(f"form must be one of {get_args(Form)}, got {self.form!r}")
        if self.covariant and self.power != 1:
            raise SettingError(
                f"a prior that follows the weights, such as LoraPrior, needs power=1, got {self.power!r}: the "
                "curvature v̂ᵖ follows them the same way at no other. Pass power=1 and batch_size=..."
            )
        for name, delta in self.prior_precision.items():
            check_prior(name, delta)

    @property
    def prior_shape(self) -> Mapping[str, Precision] | None:
        """R of a prior δ R of which δ alone is free: that of a `CovariantPrior`; None for R = 1."""
        return self.prior_precision if self.covariant else None

    def prior_at(self, delta: float) -> float | dict[str, Precision]:
        """δ R by parameter name, or δ for all where R = 1."""
        return {name: delta * r for name, r in self.prior_precision.items()} if self.covariant else delta

    @property
    def weight(self) -> float:
        """w = s N B^(2p−1), the factor before v̂ᵖ."""
        return self.scale * self.n_data * math.pow(self.batch_size or 1, 2 * self.power - 1)


class CovariantPrior(ABC):
    """A prior on what the weights compute: its precision follows from the weights."""

    @abstractmethod
    def at(self, model: nn.Module, mode: Mapping[str, Tensor], rotated: Container[str]) -> dict[str, Precision]:
        """δ by parameter name at the trained weights; one number for each parameter in `rotated`."""


Plain = Precision | Mapping[str, Precision]
Prior = Plain | CovariantPrior


class SettingKeywords(TypedDict, total=False):
    """How an optimiser's state becomes a Gaussian: see `Posterior.from_optimizer`."""

    prior_precision: Prior | None
    power: float
    batch_size: int | None
    structure: str


@dataclass(frozen=True, eq=False)
class PrecisionRule:
    """precision = w v̂ᵖ + δ of one parameter; with `shrink` the mean is w c/(w c + δ) θ."""

    weight: float
    delta: Precision
    power: float
    shrink: bool

    @classmethod
    def of(cls, settings: Settings, delta: Precision) -> PrecisionRule:
        """By a posterior's settings, with the parameter's own δ."""
        return cls(settings.weight, delta, settings.power, settings.form == "likelihood")

    def precision(self, second_moment: Tensor) -> Tensor:
        """w v̂ᵖ + δ.

        >>> PrecisionRule(weight=10.0, delta=1.0, power=0.5, shrink=False).precision(torch.tensor([4.0]))
        tensor([21.])
        """
        return curvature(second_moment, self.power).mul_(self.weight).add_(self.delta)

    def share(self, second_moment: Tensor) -> Tensor:
        """w c/(w c + δ), what the data determine of each weight; 0 where there is neither curvature nor prior."""
        data = curvature(second_moment, self.power).mul_(self.weight)
        return data.div_((data + self.delta).clamp_(min=torch.finfo(data.dtype).tiny))

    def mean(self, mode: Tensor, second_moment: Tensor) -> Tensor:
        """θ, or the shrunk mean."""
        return self.share(second_moment).mul_(mode) if self.shrink else mode


def curvature(second_moment: Tensor, power: float) -> Tensor:
    """c = v̂ᵖ, in new memory."""
    return second_moment.sqrt() if power == 0.5 else second_moment.pow(power)


def check_prior(name: str, delta: object) -> None:
    """Refuse prior precisions that are negative or not finite."""
    if isinstance(delta, Tensor):
        if not bool((torch.isfinite(delta) & (delta >= 0)).all()):
            raise SettingError(f"the prior precision of {name!r} has entries that are negative or not finite")
    elif not isinstance(delta, int | float) or not math.isfinite(delta) or delta < 0:
        raise SettingError(f"the prior precision of {name!r} must be finite and at least 0, got {delta!r}")


def prior_by_name(prior: Plain, like: Mapping[str, Tensor]) -> dict[str, Precision]:
    """δ by parameter name, from one for all or from a mapping that names every parameter; tensors placed like these."""
    named = prior if isinstance(prior, Mapping) else dict.fromkeys(like, prior)
    if named.keys() != like.keys():
        missing, unknown = sorted(like.keys() - named.keys()), sorted(named.keys() - like.keys())
        wrong = f"missing {missing[:4]}, unknown {unknown[:4]}"
        raise SettingError(f"prior_precision must name each parameter of the posterior once: {wrong}")
    return {name: _placed(name, named[name], theta) for name, theta in like.items()}


def _placed(name: str, delta: Precision, theta: Tensor) -> Precision:
    """δ of one parameter, as a number or as a tensor of its shape, sharded as it is."""
    check_prior(name, delta)
    if not isinstance(delta, Tensor) or delta.numel() == 1:
        return float(delta)
    if delta.shape != theta.shape:
        shapes = f"{tuple(delta.shape)}, the parameter {tuple(theta.shape)}"
        raise SettingError(f"the prior precision of {name!r} has shape {shapes}")
    return placed_like(delta.detach(), theta) if is_sharded(theta) else delta.detach()


def noise_of(value: Tensor | Sequence[float] | float | None) -> Tensor | None:
    """σ² as a tensor, checked."""
    if value is None:
        return None
    noise = torch.as_tensor(value)
    noise = noise.detach().to(working_dtype(noise.dtype) if noise.is_floating_point() else torch.float32)
    if not noise.numel() or not bool((torch.isfinite(noise) & (noise >= 0)).all()):
        raise SettingError(f"noise_variance must be finite and at least 0, got {value!r}")
    return noise


def range_of(values: Iterable[float | Tensor]) -> str:
    """The least and the greatest; one number where they are the same."""
    ends = [float(end) for value in values for end in whole(torch.as_tensor(value)).double().aminmax()]
    return " to ".join(dict.fromkeys(f"{end:.3g}" for end in (min(ends), max(ends))))
