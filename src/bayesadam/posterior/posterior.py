"""The posterior: a Gaussian over a model's weights, by parameter name."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam import _storage as storage
from bayesadam import likelihoods
from bayesadam._alone import alone_with, unwrap
from bayesadam._kinds import require_kind
from bayesadam._shards import is_sharded, own_part, whole
from bayesadam._warnings import warn
from bayesadam.errors import FileError, ImproperError, MatchError, SettingError, StructureWarning
from bayesadam.gaussian import sharded
from bayesadam.gaussian.diagonal import Diagonal
from bayesadam.gaussian.novelty import novelty_settings
from bayesadam.gaussian.padding import keep_row, padding_rows
from bayesadam.gaussian.registry import load_structure, structure_named
from bayesadam.gaussian.settings import (
    CovariantPrior,
    Form,
    Precision,
    Prior,
    Settings,
    positive,
    prior_by_name,
    prior_or_decay,
)
from bayesadam.gaussian.structure import Directions, Reading, Stored, Structure, StructureSpec
from bayesadam.likelihoods import Predictive
from bayesadam.likelihoods.component import Score
from bayesadam.posterior import folder
from bayesadam.posterior.distribution import Distribution, check_draws
from bayesadam.posterior.header import SETTING_NAMES, header_of, own_weights, weight_roles
from bayesadam.posterior.report import CalibrationReport, described, settings_of, shown, table
from bayesadam.posterior.running import running_statistics, warn_of_other_statistics
from bayesadam.posterior.sums import summed
from bayesadam.predict.options import Options
from bayesadam.predict.prediction import predictive_of, score_of
from bayesadam.readers import StateReader
from bayesadam.readers import match as matching
from bayesadam.readers.compression import compressed, expanded
from bayesadam.readers.formats import CheckpointOptions, load_weights, match_checkpoint, read_checkpoint
from bayesadam.readers.match import check_parameter, match_optimizers, own_parameters
from bayesadam.readers.origin import UNKNOWN, Origin, origin_of, warn_of_few
from bayesadam.readers.read import read_match, working_dtype
from bayesadam.readers.recorder import Recorder, read_recorder

_OUTPUT_SETTINGS = ("noise_variance", "temperature", "averaged")
_GUARANTEE = "guarantee."


@dataclass(frozen=True, eq=False)
class Posterior(
    Distribution[
        likelihoods.NumericPredictive,
        likelihoods.LogitPredictive,
        likelihoods.LogitPredictive,
        likelihoods.NumericPredictive,
        likelihoods.NumericPredictive,
    ]
):
    """q(θ) = N(μ, Σ) over the weights of a model, read off the optimiser that trained it.

    With c = v̂ᵖ the optimiser's curvature, w = s N B^(2p−1) and δ the prior precision (paper, equation 10):

        map form         μ = θ_t                      Σ = (w c + δ)⁻¹
        likelihood form  μ = w c/(w c + δ) θ_t        Σ = (w c + δ)⁻¹

    Frozen: `replace` returns a new one that shares its tensors. It has its own copy of the weights, so training may
    continue. Build it with `from_optimizer`, `from_state_dict` or `from_checkpoint`.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 2)).square().mean().backward()
    ...     optimizer.step()
    >>> posterior = Posterior.from_optimizer(model, optimizer, n_data=160)
    >>> posterior.sample(3)["weight"].shape
    torch.Size([3, 1, 2])

    Attributes:
        model: the model; only `sampled` and `copy_mean_to_model` touch it.
        mode: θ_t, the trained weights, by name.
        structure: the curvature, diagonal or richer.
        settings: N, δ, p and the rest.
        omitted: parameters of the model that are not in the posterior, with the reason.
        noise_variance: σ² of a regression's observations, by output; None until it is calibrated or given.
        temperature: T, by which logits are divided before they become probabilities.
        averaged: whether probabilities average over the posterior; else they are the mean network's at that temperature.
        calibration: what `calibrate` did, as long as nothing was changed since.
        padding: the rows of embeddings that stand for padding, by parameter name: never learned, so held at θ in every draw.
            None for those of the model.
        origin: where the second moments come from: whose state, of how many gradients.
    """

    model: nn.Module
    mode: Mapping[str, Tensor]
    structure: Structure
    settings: Settings
    omitted: Mapping[str, str]
    noise_variance: Tensor | None = None
    temperature: float = 1.0
    averaged: bool = True
    calibration: CalibrationReport | None = None
    padding: Mapping[str, int] = None  # type: ignore[assignment]
    origin: Origin = UNKNOWN
    likelihood: str | None = None

    def __post_init__(self) -> None:
        if self.padding is None:
            # Once: other threads may have other tensors in the model by the time of a `replace`, which takes this over.
            with alone_with(self.model):
                rows = {name: row for name, row in padding_rows(self.model).items() if name in self.mode}
            object.__setattr__(self, "padding", rows)

    @classmethod
    def from_optimizer(
        cls,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        n_data: float,
        *,
        prior_precision: Prior | None = None,
        power: float = 0.5,
        batch_size: int | None = None,
        form: Form = "map",
        structure: str = "diagonal",
        recorder: Recorder | None = None,
        reader: str | StateReader | None = None,
    ) -> Posterior:
        """Read the posterior off a live optimiser; no data, no change to either.

        Args:
            optimizer: the optimiser that trained it, or a list of several over one model.
            n_data: N, the number of training examples.
            prior_precision: δ, one number or one per parameter name, or a `LoraPrior`; None takes N × the weight decay of
                each parameter's group, 0.0 is the paper's equation to the letter.
            power: p of the curvature v̂ᵖ; the paper's is 1/2.
            batch_size: examples behind one gradient; needed for power=1.
            form: `"map"` or `"likelihood"`.
            structure: `"diagonal"`; `"kronecker"`, with the eigenbases of `SOAP` or those of recorded gradients;
                `"low-rank"`, recorded gradients and δ alone outside them, or `"low-rank+diagonal"`, with what the
                optimiser's own second moment has beyond them.
            recorder: a `Recorder` of the optimiser, whose gradients then stand for its state.
            reader: overrides how the optimiser is read; `"ogd"` gives V = 1 for optimisers without a second moment.
        """
        settings = Settings(n_data, {}, power, batch_size, form)
        spec = structure_named(structure, recorded=recorder is not None)
        given = set(map(id, matching.listed_optimizers(optimizer)))
        if recorder is not None and given != set(map(id, recorder.optimizers)):
            raise MatchError(
                "the recorder is attached to another optimiser than the one given, or to none: gradients of "
                "Recorder.from_batches are read by Posterior.from_recorder(model, recorder, n_data)"
            )
        # Recorded gradients do without a second moment of the optimiser's own, which SGD has not.
        chosen = "ogd" if recorder is not None and not spec.needs_state else reader
        match = match_optimizers(model, optimizer, chosen)
        return cls._from_match(model, match, spec, settings, prior_precision, recorder=recorder)

    @classmethod
    def from_recorder(
        cls,
        model: nn.Module,
        recorder: Recorder,
        n_data: float,
        *,
        structure: str = "kronecker",
        prior_precision: Prior = 1.0,
        power: float = 1.0,
        batch_size: int | None = None,
    ) -> Posterior:
        """Of recorded gradients alone: `Recorder.from_batches` serves a model that is already trained, by whatever optimiser.

        The rest is as in `from_optimizer`; the batch size is known from `from_batches`.
        """
        require_kind(recorder, Recorder, "recorder")
        options: Any = {"structure": structure, "prior_precision": prior_precision, "power": power}
        size = batch_size or recorder.batch_size
        found = cls.from_optimizer(model, recorder.optimizers, n_data, recorder=recorder, batch_size=size, **options)
        warn_of_few(found.origin, "the posterior")
        return found

    @classmethod
    def from_state_dict(
        cls,
        model: nn.Module,
        state_dict: Mapping[str, Any],
        n_data: float,
        *,
        optimizer: str | StateReader = "adam",
        param_names: Sequence[str] | None = None,
        prior_precision: Prior | None = None,
        power: float = 0.5,
        batch_size: int | None = None,
        form: Form = "map",
        structure: str = "diagonal",
    ) -> Posterior:
        """The same from `optimizer.state_dict()`, with the model's weights as they are now; the rest as in `from_optimizer`.

        Args:
            optimizer: the name of the optimiser that wrote it, or a reader.
            param_names: the parameter names in the optimiser's order, where the state dict has none of its own.
        """
        settings = Settings(n_data, {}, power, batch_size, form)
        spec = structure_named(structure, recorded=False)
        match = matching.match_state_dict(model, state_dict, optimizer, param_names)
        return cls._from_match(model, match, spec, settings, prior_precision)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        n_data: float | None = None,
        *,
        optimizer_path: str | os.PathLike[str] | None = None,
        optimizer: str | StateReader | None = None,
        param_names: Sequence[str] | None = None,
        groups_in_order: bool = False,
        weights_key: str | None = None,
        optimizer_key: str | None = None,
        prior_precision: Prior | None = None,
        power: float = 0.5,
        batch_size: int | None = None,
        form: Form = "map",
        structure: str = "diagonal",
    ) -> Posterior:
        """The same from what a trainer saved; the model gets the weights and buffers of the file.

        The rest is as in `from_optimizer`, and as in `CheckpointOptions`.

        Args:
            path: the checkpoint; only tensors and plain data are read from it.
            model: the model that was trained, its weights may be any; a part of it will do.
            n_data: N, the number of training examples; None takes what the trainer wrote down, if it did.
            optimizer: the name of the optimiser that wrote the state; None identifies it.
        """
        spec = structure_named(structure, recorded=False)
        options = CheckpointOptions(optimizer_path, optimizer, param_names, groups_in_order, weights_key, optimizer_key)
        checkpoint = read_checkpoint(path, options)
        settings = Settings(checkpoint.n_data_or(n_data), {}, power, checkpoint.batch_size_or(batch_size), form)
        match = match_checkpoint(checkpoint, model, options)
        load = partial(load_weights, checkpoint, model)
        return cls._from_match(model, match, spec, settings, prior_precision, load=load)

    @classmethod
    def from_moments(
        cls, model: nn.Module, mean: Mapping[str, Tensor], variance: Mapping[str, Tensor], n_data: float
    ) -> Posterior:
        """A diagonal Gaussian of known mean and variance, whoever found them (SWAG, Bayes by Backprop, …).

        Kept as power 1 with v = 1/(N σ²) and no prior, so that it can do all that one read off an optimiser can.
        """
        parameters = own_parameters(model)
        for name, sigma in variance.items():
            if name not in parameters or name not in mean or sigma.shape != parameters[name].shape:
                raise MatchError(f"{name!r} is not a parameter of the model with a mean and a variance of its shape")
            if not bool((torch.isfinite(sigma) & (sigma > 0)).all()):
                raise SettingError(f"the variance of {name!r} must be finite and positive")
        mode = {name: mean[name].detach().to(working_dtype(mean[name].dtype), copy=True) for name in variance}
        moments = {name: (n_data * sigma.detach().to(mode[name])).reciprocal() for name, sigma in variance.items()}
        settings = Settings(n_data, dict.fromkeys(variance, 0.0), power=1.0, batch_size=1)
        omitted = {name: "not given" for name in parameters if name not in variance}
        return cls(unwrap(model), mode, Diagonal(moments), settings, omitted)

    @classmethod
    def _from_match(
        cls,
        model: nn.Module,
        match: matching.Match,
        spec: StructureSpec,
        settings: Settings,
        prior_precision: Prior | None,
        *,
        recorder: Recorder | None = None,
        load: Callable[[], None] | None = None,
    ) -> Posterior:
        """Build it from a matched state; `load` fills the model's weights once nothing can be refused any more."""
        if settings.batch_size is not None and settings.batch_size > settings.n_data:
            warn(
                f"n_data={settings.n_data:g} is less than batch_size={settings.batch_size}: n_data counts the training examples, "
                "such as len(loader.dataset), not the batches"
            )
        curvature, gradients = (read_match(match), None) if recorder is None else read_recorder(match, recorder)
        structure = spec.build(Reading(match, curvature, gradients))
        moments = curvature.second_moment
        shapes = {name: v.shape for name, v in moments.items()}
        rule = prior_precision if isinstance(prior_precision, CovariantPrior) else None
        settings = replace(settings, covariant=rule is not None)
        prior = prior_or_decay(None if rule else prior_precision, curvature.weight_decay, settings.n_data, shapes)
        if load is not None:
            load()
        parameters = own_parameters(model)
        mode = {name: parameters[name].detach().to(v.dtype, copy=True) for name, v in moments.items()}
        if rule is not None:
            prior = prior_by_name(rule.at(unwrap(model), mode, structure.bases), shapes)
        settings = replace(settings, prior_precision=sharded.prior_like(prior, mode))
        recorded = None if recorder is None else float(recorder.recorded)
        origin = origin_of(match) if recorded is None else Origin(match.optimizers, (recorded, recorded), recorded=True)
        return cls(unwrap(model), mode, structure, settings, curvature.omitted, origin=origin)

    @property
    def mean(self) -> dict[str, Tensor]:
        """μ by parameter name; the rows that embeddings keep for padding are θ in either form."""
        found = self._filled.mean(self.mode, self.settings)
        return found if self.settings.form == "map" else self._with_padding(found)

    @property
    def variance(self) -> dict[str, Tensor]:
        """diag Σ by parameter name; infinite where a weight has neither curvature nor prior.

        An embedding's padding row has the variance that its curvature, none, and the prior give, though it is not drawn.
        """
        found = self._filled.variance(self.settings)
        for name in self._unfilled:
            keep_row(found[name], torch.full_like(found[name], math.inf), self.padding[name])
        return found

    @cached_property
    def _unfilled(self) -> list[str]:
        """The parameters whose padding row has neither curvature nor prior."""
        flat = self.structure.flat_weights(self.settings) if self.padding else {}
        return [name for name in self.padding if name in flat]

    @cached_property
    def _filled(self) -> Structure:
        """The structure with some curvature in padding rows that have none, and no prior either: any will do."""
        return self.structure.filled({name: self.padding[name] for name in self._unfilled})

    @cached_property
    def coordinate_variance(self) -> Mapping[str, Tensor]:
        """The variances in the coordinates in which Σ is diagonal, `variance` itself for a diagonal one.

        Computed once for all predictions: to be read, not written to.
        """
        return self._filled.coordinate_variance(self.settings)

    @cached_property
    def directions(self) -> Directions | None:
        """The directions over all weights with less variance than `coordinate_variance`, of a low-rank posterior; cached like it."""
        return self._filled.directions(self.settings)

    @cached_property
    def for_novelty(self) -> Posterior:
        """The same curvature under the settings of novelty, p = 1 and δ = ε mean(w c), whatever calibration has chosen."""
        return replace(self, settings=novelty_settings(self.structure, self.settings, self.n_weights))

    @property
    def effective_dimension(self) -> float:
        """γ = tr(w c Σ): how many directions in weight space the data determine, and not the prior."""
        return self.structure.effective_dimension(self.settings)

    @property
    def n_data(self) -> float:
        """N, the number of training examples."""
        return self.settings.n_data

    @property
    def prior_precision(self) -> Mapping[str, Precision]:
        """δ by parameter name: what the prior adds to every weight's precision."""
        return self.settings.prior_precision

    @property
    def scale(self) -> float:
        """s, the factor on N that calibration finds; 1 before."""
        return self.settings.scale

    @property
    def power(self) -> float:
        """p of the curvature c = v̂ᵖ; the paper's is 1/2."""
        return self.settings.power

    @property
    def batch_size(self) -> int | None:
        """B, the number of examples behind one gradient; None where it was not given."""
        return self.settings.batch_size

    @property
    def form(self) -> Form:
        """`"map"`, the mean is θ, or `"likelihood"`, it is shrunk by the prior."""
        return self.settings.form

    @property
    def n_weights(self) -> int:
        """The number of weights the posterior is over."""
        return sum(theta.numel() for theta in self.mode.values())

    @cached_property
    def is_sharded(self) -> bool:
        """Whether its parameters are sharded over processes (FSDP2), each of which then holds its part of everything."""
        return any(is_sharded(theta) for theta in self.mode.values())

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draws from q, in the types of the model's parameters; rows that embeddings keep for padding are not drawn.

        Args:
            n: the number of draws, a leading dimension; None for one draw without it.
            generator: makes the draws reproducible; a parameter's draws depend on it and on the parameter's name
                alone, not on the order of the parameters nor on what else is in the posterior, nor on how many
                processes share a sharded posterior: there the first process's generator counts.
        """
        check_draws(n)
        self.require_proper()
        seed = sharded.common_seed(generator, self.mode)
        with torch.no_grad():
            dtypes = {name: parameter.dtype for name, parameter in self.parameters().items()}
            return self._with_padding(self._filled.sample(self.mode, self.settings, seed=seed, n=n, dtypes=dtypes))

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """log q(θ) of weights by name, summed in float64; leading dimensions, as `sample(n)` makes, stay.

        Padding rows count as any weights, so they need a prior here.
        """
        self._require_proper(self.structure)
        missing, unknown = sorted(self.mode.keys() - params.keys()), sorted(params.keys() - self.mode.keys())
        if missing or unknown:
            raise MatchError(f"log_prob needs every parameter once: missing {missing[:4]}, unknown {unknown[:4]}")
        batch_shapes = set()
        for name, theta in self.mode.items():
            shape = params[name].shape
            split = len(shape) - theta.dim()
            if split < 0 or shape[split:] != theta.shape:
                expected = ", ".join(map(str, theta.shape))
                raise MatchError(f"{name!r} has shape {tuple(shape)}; expected (..., {expected})")
            batch_shapes.add(shape[:split])
        if len(batch_shapes) > 1:
            raise MatchError(f"the parameters have different leading dimensions: {sorted(map(tuple, batch_shapes))}")
        return self.structure.log_prob(params, self.mode, self.settings)

    def entropy(self) -> Tensor:
        """H[q] in nats, padding rows with it."""
        self._require_proper(self.structure)
        return self.structure.entropy(self.settings)

    @contextmanager
    def sampled(self, *, generator: torch.Generator | None = None) -> Iterator[nn.Module]:
        """The model with one draw as its weights; on leaving, by whatever way, weights and buffers are as before.

        The parameters' own memory is set aside, not written to, so what comes back is the very same bits; shards are
        copied aside instead. On a sharded model every process must enter, and run as many forwards. Other threads that
        predict with the same model, or go into `sampled`, wait until this one has left.
        """
        draw = self.sample(generator=generator)
        shards = {name: draw.pop(name) for name in list(draw) if is_sharded(draw[name])}
        with alone_with(self.model), sharded.holding(self.model, shards), self._holding(draw):
            yield self.model

    @contextmanager
    def _holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        parameters = self.parameters()
        originals = {name: parameters[name].data for name in values}
        buffers = [(m, key, b) for m in self.model.modules() for key, b in m._buffers.items() if b is not None]
        copies = [(buffer, buffer.clone()) for _, _, buffer in buffers]
        try:
            for name, value in values.items():
                parameters[name].data = value.to(originals[name].device)
            yield
        finally:
            for name, data in originals.items():
                parameters[name].data = data
            with torch.no_grad():
                for module, key, buffer in buffers:
                    module._buffers[key] = buffer
                for buffer, before in copies:
                    _unexpanded(buffer, buffer).copy_(_unexpanded(before, buffer))

    def copy_mean_to_model(self) -> None:
        """Write μ into the model's parameters, for good."""
        with alone_with(self.model), torch.no_grad():
            parameters = self.parameters()
            for name, mu in self.mean.items():
                own_part(parameters[name]).copy_(own_part(mu))

    @property
    def _network(self) -> nn.Module:
        return self.model

    def _predict(self, inputs: Any, options: Options) -> Predictive:
        found = predictive_of(self, inputs, options)
        return found if self.calibration is None else replace(found, guarantee=self.calibration.guarantee)

    def _score(self, inputs: Any, options: Options) -> Score:
        return score_of(self, inputs, options)

    def replace(self, **changes: Any) -> Posterior:
        """A new one with another n_data, prior_precision, power, batch_size, form, scale, noise_variance, temperature or averaged.

        What calibration said of the old one does not hold for it: it has no report and gives no guarantees.
        """
        if unknown := sorted(changes.keys() - {*SETTING_NAMES, *_OUTPUT_SETTINGS}):
            names = ", ".join((*SETTING_NAMES, *_OUTPUT_SETTINGS))
            raise SettingError(f"cannot replace {unknown}; the settings are {names}")
        outputs = {name: changes.pop(name, getattr(self, name)) for name in _OUTPUT_SETTINGS}
        outputs["noise_variance"] = _noise(outputs["noise_variance"])
        positive("temperature", outputs["temperature"], "by which logits are divided")
        if "prior_precision" in changes:
            shapes = {name: theta.shape for name, theta in self.mode.items()}
            prior = changes["prior_precision"]
            changes.setdefault("covariant", isinstance(prior, CovariantPrior))
            if isinstance(prior, CovariantPrior):
                prior = prior.at(self.model, self.mode, self.structure.bases)
            changes["prior_precision"] = sharded.prior_like(prior_by_name(prior, shapes), self.mode)
        return replace(self, settings=replace(self.settings, **changes), calibration=None, **outputs)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Posterior:
        """The same posterior on another device or in another floating type; the model stays where it is."""
        if dtype is not None and dtype not in (torch.float32, torch.float64):
            raise SettingError(f"a posterior is in float32 or float64, not {dtype}; draws follow the parameters")
        mode = {name: theta.to(device=device, dtype=dtype) for name, theta in self.mode.items()}
        settings = self._settings_with(lambda delta: delta.to(device=device, dtype=dtype))
        noise = None if self.noise_variance is None else self.noise_variance.to(device=device, dtype=dtype)
        structure = self.structure.to(device, dtype)
        return replace(self, mode=mode, structure=structure, settings=settings, noise_variance=noise)

    def gathered(self, model: nn.Module) -> Posterior:
        """The same posterior on every process, of whole tensors over `model`, a plain one of the same architecture.

        For all that a sharded posterior cannot do: calibration, pruning. Every process must call it.
        """
        named = own_parameters(model)
        for name, theta in self.mode.items():
            if name not in named or named[name].shape != theta.shape or is_sharded(named[name]):
                shape = tuple(theta.shape)
                raise MatchError(f"{type(model).__name__} has no plain parameter {name!r} of shape {shape}")
        mode = {name: whole(theta) for name, theta in self.mode.items()}
        structure, settings = self.structure.gathered(), self._settings_with(whole)
        return replace(self, model=unwrap(model), mode=mode, structure=structure, settings=settings)

    def _settings_with(self, change: Callable[[Tensor], Tensor]) -> Settings:
        """The settings with every prior precision that is a tensor changed."""
        prior = {name: change(d) if isinstance(d, Tensor) else d for name, d in self.prior_precision.items()}
        return replace(self.settings, prior_precision=prior)

    def save(self, path: str | os.PathLike[str], *, weights: bool = True, compress: str | None = None) -> None:
        """Write the posterior to one safetensors file, in place of an older one only once it is complete.

        A sharded posterior is written by all processes together, to a folder of torch.distributed.checkpoint, whole.

        Args:
            weights: False leaves out θ_t, for a file to lie beside the weights: `load` then takes the model's own.
            compress: `"8bit"`, a quarter of the bytes of v̂, or `"factored"`, next to none and much coarser: see
                `bayesadam.readers.compression.encode`.
        """
        if not self.is_sharded:
            storage.write(path, *self.packed(weights=weights, compress=compress))
        elif weights and compress is None:
            folder.write(path, *self.packed())
        else:
            self.require_whole("a file without weights, or a compressed one,")

    def packed(self, *, weights: bool = True, compress: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a file holds: tensors under `role.parameter` names, and a header of plain data."""
        tensors = compressed({**weight_roles(self.mode, weights), **self.structure.tensors()}, compress)
        prior = self.prior_precision
        tensors |= {f"prior_precision.{name}": delta for name, delta in prior.items() if isinstance(delta, Tensor)}
        header = {
            **header_of(
                self.structure.kind, self.settings, self.origin, list(self.mode), weights=weights, compress=compress
            ),
            "omitted": dict(self.omitted),
            "noise_variance": None if self.noise_variance is None else self.noise_variance.double().tolist(),
            "temperature": self.temperature,
            "averaged": self.averaged,
            "running_statistics": running_statistics(self.model),
        }
        if self.calibration is not None:
            header["calibration"] = self.calibration.header()
            tensors |= {f"{_GUARANTEE}{name}": t for name, t in self.calibration.guarantee.tensors().items()}
        return tensors, header

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Posterior:
        """Read a saved posterior for `model`, whose weights are not changed (see `copy_mean_to_model`).

        A file without weights takes the model's, which must be those that were trained: they are compared with a few numbers.
        Running statistics of batch norms are not in the file: a warning says where the model's are not those it was saved with.
        The model may be plain or sharded, over any number of processes, whatever the posterior was saved from; a
        folder is read by all processes together.
        """
        parameters = own_parameters(model)
        tensors, header = folder.read(path, parameters) if os.path.isdir(path) else storage.read(path)
        return cls.unpacked(path, tensors, header, model)

    @classmethod
    def unpacked(
        cls, path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any], model: nn.Module
    ) -> Posterior:
        """The posterior that `packed` gave, for `model`; errors name `path`, the file it was read from."""
        if header.get("structure") == "mixture":
            raise FileError(f"{path} holds a mixture of posteriors: read it with Mixture.load")
        parameters = own_parameters(model)
        try:
            names: list[str] = header["parameters"]
            stored: dict[str, Any] = dict(header["settings"])
            tensors = expanded(tensors, str(path))
            found = Stored(path, tensors, names, parameters)
            structure = load_structure(header["structure"], found)
            mode = found.weights("mode") if header.get("has_weights", True) else own_weights(found)
            numbers: dict[str, Precision] = dict(stored.pop("prior_precision"))
            prior = {name: tensors.get(f"prior_precision.{name}", numbers.get(name)) for name in names}
            origin = Origin.of_header(header)
        except (KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{path} is damaged: its header or tensors lack {error}") from None
        for name in names:
            check_parameter(name, parameters[name])
        by_name = prior_by_name(prior, {n: t.shape for n, t in mode.items()})
        try:
            settings = Settings(**stored, prior_precision=sharded.prior_like(by_name, mode))
        except TypeError as error:
            raise FileError(f"{path} is damaged: its settings are not a posterior's ({error})") from None
        report = read_report(path, tensors, header)
        warn_of_other_statistics(path, header.get("running_statistics"), model)
        outputs = _noise(header.get("noise_variance")), header.get("temperature", 1.0), header.get("averaged", True)
        return cls(unwrap(model), mode, structure, settings, header.get("omitted", {}), *outputs, report, origin=origin)

    def __add__(self, later: Posterior) -> Posterior:
        """The precisions of both round the mean of `later`, which was trained anchored to this one; see `summed`."""
        return summed(self, later) if isinstance(later, Posterior) else NotImplemented

    def __repr__(self) -> str:
        return (
            f"Posterior({type(self.model).__name__}, {self.structure.kind}, {self.n_weights:,} weights in "
            f"{len(self.mode)} parameters, N={self.n_data:g}, power={self.settings.power:g}, form={self.settings.form!r})"
        )

    def __str__(self) -> str:
        batch = "" if self.batch_size is None else f", B = {self.batch_size:,}"
        report = self.calibration
        lines = [
            ("structure", f"{self.structure.kind}, {self.n_weights:,} weights in {len(self.mode)} parameters"),
            ("data", f"N = {self.n_data:,.10g}{batch}"),
            ("curvature", f"v̂^{self.power:g}, {self.form} form"),
            *shown(settings_of([self]), {} if report is None else report.before),
            *described(report),
        ]
        return table(f"Posterior over {type(self.model).__name__}", lines)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name, which must still be those of the posterior."""
        parameters = own_parameters(self.model)
        for name, theta in self.mode.items():
            if name not in parameters or parameters[name].shape != theta.shape:
                raise MatchError(f"the model no longer has a parameter {name!r} of shape {tuple(theta.shape)}")
        return parameters

    def _with_padding(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights by name, which are written to, with θ in the rows that stand for padding."""
        for name, row in self.padding.items():
            keep_row(named[name], self.mode[name], row)
        return named

    def require_proper(self) -> None:
        """Raise unless every weight that is drawn has a finite variance."""
        self._require_proper(self._filled)

    def _require_proper(self, structure: Structure) -> None:
        if flat := structure.flat_weights(self.settings):
            name, count = next(iter(flat.items()))
            raise ImproperError(
                f"{sum(flat.values())} weights have v = 0 and prior precision 0, so their variance is infinite (first "
                f"{name!r}: {count} of {self.mode[name].numel()}). {structure.flat_reason}. Give them a prior, "
                "posterior.replace(prior_precision=1.0), or calibrate"
            )

    def warn_of_limits(self) -> None:
        """Warn where the structure cannot hold what the settings ask of it."""
        if (limits := self._filled.limits(self.settings)) is not None:
            warn(limits, StructureWarning)

    def require_whole(self, what: str) -> None:
        """Raise where the posterior is sharded, for `what` needs whole tensors."""
        if self.is_sharded:
            raise SettingError(
                f"{what} needs whole tensors, and this posterior is sharded over processes: use "
                "posterior.gathered(model) with a plain model of the same architecture, on every process alike; numbers "
                "found there go back with posterior.replace(...)"
            )


def _unexpanded(tensor: Tensor, buffer: Tensor) -> Tensor:
    """The first entry alone along the dimensions in which a buffer is one number expanded: there it cannot be written to."""
    if buffer.layout != torch.strided:
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in buffer.stride())]


def read_report(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> CalibrationReport | None:
    """What `calibrate` had to say, out of a file; None where there is nothing."""
    if header.get("calibration") is None:
        return None
    mine = {name.removeprefix(_GUARANTEE): t for name, t in tensors.items() if name.startswith(_GUARANTEE)}
    try:
        return CalibrationReport.of(header["calibration"], mine)
    except TypeError as error:
        raise FileError(f"{path} is damaged: its calibration is not one ({error})") from None


def _noise(value: Any) -> Tensor | None:
    if value is None:
        return None
    noise = torch.as_tensor(value)
    noise = noise.detach().to(working_dtype(noise.dtype) if noise.is_floating_point() else torch.float32)
    if not bool((torch.isfinite(noise) & (noise >= 0)).all()):
        raise SettingError(f"noise_variance must be finite and at least 0, got {value!r}")
    return noise
