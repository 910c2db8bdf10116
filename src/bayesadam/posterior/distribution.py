"""What a Gaussian over weights and a mixture of them share: signal-to-noise ratios and a typed `predict`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bayesadam._extras import require
from bayesadam._progress import progress
from bayesadam._shards import whole
from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import LikelihoodName, Link, Predictive
from bayesadam.likelihoods.component import Score
from bayesadam.predict.asked import Outputs
from bayesadam.predict.batches import for_model, inputs_of, is_loader
from bayesadam.predict.call import Forward
from bayesadam.predict.linearised import DEFAULT_BUDGET
from bayesadam.predict.options import Options, PredictiveKind, PredictOptions
from bayesadam.predict.places import Positions

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

R = TypeVar("R", bound=Predictive)
C = TypeVar("C", bound=Predictive)
B = TypeVar("B", bound=Predictive)
H = TypeVar("H", bound=Predictive)
P = TypeVar("P", bound=Predictive)
T = TypeVar("T")
# Weights of a layer that its picture is made of.
_LOOKED_AT = 1_000_000


def check_draws(n: int | None) -> None:
    """Refuse numbers of draws that are not positive; None is one draw without a dimension for it."""
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise SettingError(f"n must be a positive number of draws or None, got {n!r}")


def _some(found: Iterator[T]) -> list[T]:
    """All of them, of which there must be one."""
    each = list(found)
    if not each:
        raise MatchError("there is nothing to score: the loader gave no batch (a generator that was used up?)")
    return each


class OfBatches(Iterator[T]):
    """What is found of each batch of a loader, as it is asked for."""

    def __init__(self, what: str, found: Iterator[T]) -> None:
        self._what, self._found = what, found

    def __next__(self) -> T:
        return next(self._found)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._what}(loader) has no {name!r}: it gives one result for each batch. For all of them: "
            f"torch.cat([p.{name} for p in posterior.{self._what}(loader, ...)])"
        )


class Distribution(ABC, Generic[R, C, B, H, P]):
    """q(θ) over named weights; the type arguments are its predictives, likelihood by likelihood."""

    @property
    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """E[θ] by parameter name."""

    @property
    @abstractmethod
    def variance(self) -> dict[str, Tensor]:
        """diag Var[θ] by parameter name."""

    @property
    def stddev(self) -> dict[str, Tensor]:
        """The square root of `variance`."""
        return {name: variance.sqrt_() for name, variance in self.variance.items()}

    def snr(self) -> dict[str, Tensor]:
        """Signal-to-noise ratio |E[θ]|/σ, the paper's ranking for pruning; 0 where the variance is infinite."""
        stddev = self.stddev
        return {name: mu.abs() / stddev[name] for name, mu in self.mean.items()}

    def plot(self, *, ax: Any = None) -> Any:
        """The signal-to-noise ratios of the weights, layer by layer, with matplotlib; returns the axes.

        Weights below 1 are smaller than their standard deviation: `prune` takes the least first. Ratios of 0 are not shown;
        of a layer with more than a million weights every k-th is looked at.

        Args:
            ax: axes to draw on; None for those of a new figure.
        """
        require("matplotlib")
        from bayesadam import _plots as plots

        layers: dict[str, list[Tensor]] = {}
        for name, values in self.snr().items():
            every = whole(values).detach().flatten()
            layers.setdefault(name.rpartition(".")[0] or name, []).append(
                every[:: 1 + every.numel() // _LOOKED_AT].cpu()
            )
        groups = {name: torch.cat(parts).double().numpy() for name, parts in layers.items()}
        label = "signal-to-noise ratio |μ|/σ of the weights"
        return plots.spreads(ax, groups, label=label, threshold=1.0, meaning="|μ| = σ")

    @overload
    def predict(
        self,
        inputs: DataLoader[Any] | Iterator[Any],
        *,
        likelihood: LikelihoodName = ...,
        **options: Unpack[PredictOptions],
    ) -> Iterator[Any]: ...
    @overload
    def predict(
        self, inputs: Any, *, likelihood: Literal["regression"] = ..., **options: Unpack[PredictOptions]
    ) -> R: ...
    @overload
    def predict(
        self, inputs: Any, *, likelihood: Literal["classification"], **options: Unpack[PredictOptions]
    ) -> C: ...
    @overload
    def predict(self, inputs: Any, *, likelihood: Literal["binary"], **options: Unpack[PredictOptions]) -> B: ...
    @overload
    def predict(
        self, inputs: Any, *, likelihood: Literal["heteroscedastic"], **options: Unpack[PredictOptions]
    ) -> H: ...
    @overload
    def predict(self, inputs: Any, *, likelihood: Literal["poisson"], **options: Unpack[PredictOptions]) -> P: ...
    @overload
    def predict(self, inputs: Any, *, likelihood: LikelihoodName, **options: Unpack[PredictOptions]) -> Predictive: ...
    def predict(
        self,
        inputs: Any,
        *,
        likelihood: LikelihoodName = "regression",
        predictive: PredictiveKind = "linearised",
        n_samples: int = 30,
        covariance: bool = False,
        link: Link = "probit",
        forward: Forward | None = None,
        generator: torch.Generator | None = None,
        memory_budget: int = DEFAULT_BUDGET,
        novelty: bool | None = None,
        outputs: Outputs | None = None,
        positions: Positions | None = None,
        probes: int | None = None,
        captured: bool = True,
        method: PredictiveKind | None = None,
    ) -> Predictive | Iterator[Predictive]:
        """The predictive distribution of a batch; the model is as before when it returns, or raises.

        Of a loader, or any other iterable of batches, an iterator of predictives, one for each batch as it is asked for:

            probs = torch.cat([p.probs for p in posterior.predict(loader, likelihood="classification")])

        Targets in its batches are left out: what a mapping or a named tuple has under a label's name, else the last of two
        or more, as `calibrate` finds them. Batches are moved to the model's device, and draws are new for each of them.

        Of a model sharded by FSDP2 every process asks, each for its own batch, with equal options and generators. Where the
        whole posterior fits the memory budget it is gathered for the call, and nothing else is different. Where it does
        not, the sampling predictives gather one FSDP module at a time, and run each draw on all of the batch. Either way
        the model runs in the types of its parameters, without FSDP2's mixed precision.

        | predictive             | f                                        | cost                                       |
        |------------------------|------------------------------------------|--------------------------------------------|
        | `"linearised"`         | N(f(x; μ), J Σ Jᵀ), exact                | a forward pass, a backward one per output  |
        | `"linearised-sampled"` | f(x; μ) + J (θ − μ), θ ~ q               | a forward-mode product per draw            |
        | `"sampled"`            | f(x; θ), θ ~ q                           | a forward pass per draw                    |

        A mixture's is p(y) = Σ π_m p_m(y), with `n_samples` of each member. The draws of `"sampled"` are of each example by
        itself: a network of linear layers alone, under a diagonal posterior, has its activations drawn, independently from
        example to example, and not one θ for the batch.

        Other threads that ask for the same model wait for this call to end.

        Args:
            inputs: a tensor, a tuple or list of them (`model(*inputs)`) or a mapping (`model(**inputs)`); the batch comes
                first. Arrays of numpy may stand for tensors: they are moved to the model's device, real ones in its type.
                Or a loader: a `DataLoader`, a generator, or a list of tuples, lists or mappings.
            likelihood: `"regression"`, `"classification"` (logits in the last dimension), `"binary"` (one logit per
                output), `"heteroscedastic"` (means, then log-variances, in the last dimension) or `"poisson"` (one log-rate
                per target).
            predictive: see the table.
            n_samples: draws of the sampling predictives.
            covariance: the outputs' whole covariance, (batch, outputs, outputs); without it `link="sampling"`,
                `mutual_information()` and a heteroscedastic density take outputs as independent of each other.
            link: how logits become probabilities where f is Gaussian: `"probit"` or `"sampling"`.
            forward: `forward(model, inputs)` for models whose call is unusual.
            generator: makes the draws reproducible.
            memory_budget: bytes that activations, gradients and draws may take; work is cut to fit.
            novelty: the moments for `novelty` too, in the same pass; None where an example has at most 20 outputs.
            outputs: which outputs: `"all"`, `"top"` for the ten largest of every place, `Top(k)`, their numbers, (k,) or
                (batch, k), or linear combinations, the rows of a real matrix (k, outputs), such as a margin. Moments are then
                of these. Probabilities are of all classes, the others' logits at their mean: see `LogitPredictive`.
                Combinations come as a `NumericPredictive` of their values. None is `"all"`, or `"top"` of more than a
                hundred classes under `"linearised"`.
            positions: which places, of outputs (batch, places, outputs): `"last"`, that of the inputs' `attention_mask` where
                there is one, or a place for each example, (batch,): moments are then (batch, k). A boolean mask, (batch,
                places), gives a row for every place in it. None is `"all"`.
            probes: random directions of the outputs, of which `epistemic` is estimated; None for 2 where some outputs
                alone are asked for, else none.
            captured: on CUDA, the linearised work of a batch whose shapes have come twice before is captured as a CUDA graph,
                which keeps its memory, and replayed; each replay is checked on the first example. False for never.
            method: the old name of `predictive`.
        """
        given = (
            likelihood,
            predictive,
            n_samples,
            covariance,
            link,
            forward,
            generator,
            memory_budget,
            novelty,
            outputs,
            positions,
            probes,
            captured,
            method,
        )
        self._warn_of_another(likelihood)
        options = Options(*given)
        return self._each(inputs, "predict", lambda batch: self._predict(batch, options))

    def novelty(
        self,
        inputs: Any,
        *,
        likelihood: LikelihoodName = "classification",
        forward: Forward | None = None,
        memory_budget: int = DEFAULT_BUDGET,
    ) -> Tensor:
        """How unlike the training data each example is, (batch,), as `predict(...).novelty`; no data are needed.

        Of a loader, as `predict` takes it, the scores of all its examples, one after the other.

        It has settings of its own, p = 1 and δ = 1e-3 of the mean curvature, 1e-4 of one in rotated coordinates, which
        calibration does not touch. In a network with batch norm variances grow with the squared distance from the running
        statistics.
        """
        of_inputs: Any = {"likelihood": likelihood, "forward": forward, "memory_budget": memory_budget}
        given = Options(novelty=True, for_novelty=True, **of_inputs)
        found = self._each(inputs, "novelty", lambda batch: self.for_novelty._predict(batch, given).novelty)
        return found if isinstance(found, Tensor) else torch.cat(_some(found))

    def epistemic(
        self,
        inputs: Any,
        *,
        likelihood: LikelihoodName = "classification",
        positions: Positions | None = None,
        probes: int = 2,
        forward: Forward | None = None,
        generator: torch.Generator | None = None,
        memory_budget: int = DEFAULT_BUDGET,
        captured: bool = True,
    ) -> Score:
        """½ tr(H Cov[f]) of each example, summed over the places asked for: `value` and its standard `error`, (batch,).

        A backward pass for each of a few random directions of the outputs, however many these are; unbiased. Of a loader,
        as `predict` takes it, the scores of all its examples, one after the other.
        """
        options: Any = {"likelihood": likelihood, "forward": forward, "memory_budget": memory_budget}
        options |= {"generator": generator, "captured": captured}
        given = Options(outputs=[], positions=positions, probes=probes, **options)
        found = self._each(inputs, "epistemic", lambda batch: self._score(batch, given))
        if isinstance(found, Score):
            return found
        each = _some(found)
        return Score(torch.cat([one.value for one in each]), torch.cat([one.error for one in each]))

    def _warn_of_another(self, likelihood: LikelihoodName) -> None:
        """Warn where it was calibrated for another likelihood, whose scale, noise and temperature these are."""
        report = getattr(self, "calibration", None)
        if report is not None and report.likelihood != likelihood:
            warn(
                f"the posterior was calibrated for likelihood={report.likelihood!r} and is asked to predict with "
                f"likelihood={likelihood!r}: say the same, or calibrate it for this one"
            )

    def _each(self, inputs: Any, what: str, of: Callable[[Any], T]) -> T | Iterator[T]:
        """That of one batch, or of each of a loader's as it is asked for."""
        if not is_loader(inputs):
            return of(for_model(inputs, self._network))
        return OfBatches(what, (of(inputs_of(batch, self._network)) for batch in progress(inputs, what)))

    @property
    @abstractmethod
    def _network(self) -> nn.Module:
        """A model of these weights: where inputs go, and in which type."""

    @abstractmethod
    def _score(self, inputs: Any, options: Options) -> Score:
        """`epistemic`, with its options in one record."""

    @property
    @abstractmethod
    def for_novelty(self) -> Self:
        """The same under the settings of novelty."""

    @abstractmethod
    def _predict(self, inputs: Any, options: Options) -> Predictive:
        """`predict`, with its options in one record."""
