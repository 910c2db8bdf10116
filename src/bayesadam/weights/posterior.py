"""The posterior: a Gaussian over a model's weights, and the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam import _storage as storage
from bayesadam import readers
from bayesadam._alone import alone_with, unwrap
from bayesadam._checks import positive, require_kind
from bayesadam._files import damage_named
from bayesadam._shards import holding, is_sharded, whole
from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import Prediction
from bayesadam.likelihoods import likelihood as likelihood_named
from bayesadam.predict import Forward, input_sides, predicting, tuning
from bayesadam.predict.network import Gaussian
from bayesadam.readers import CheckpointKeywords, Recorder
from bayesadam.readers.match import Match, match_optimizers, match_state_dict, own_parameters
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.gaussian import GaussianWeights, of_match, unpacked
from bayesadam.weights.named import AnyPath, Inputs, Named, PredictKeywords
from bayesadam.weights.networks import (
    copy_into,
    padding_rows,
    running_statistics,
    unheld_statistics,
    warn_of_other_statistics,
    writes_to_statistics,
)
from bayesadam.weights.settings import (
    CovariantPrior,
    Plain,
    Prior,
    SettingKeywords,
    Settings,
    noise_of,
    prior_by_name,
    range_of,
)
from bayesadam.weights.store import SETTING_NAMES, read_folder, warn_of_calibration

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


_OUTPUT_SETTINGS = ("likelihood", "noise_variance", "temperature")


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(Gaussian):
    """q(θ) = N(μ, Σ) over the weights of a model, read off the optimiser that trained it.

    A `GaussianWeights`, which has the equation, with a model and a likelihood. Frozen, with its own copy of the
    weights: training may continue. Build it with `from_optimizer`, `from_state_dict` or `from_checkpoint`.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 2)).square().mean().backward()
    ...     optimizer.step()
    >>> posterior = Posterior.from_optimizer(model, optimizer, n_data=160, likelihood="regression")
    >>> posterior.sample(3)["weight"].shape
    torch.Size([3, 1, 2])

    Attributes:
        model: the model; only `load` and `sampled` write to it.
        likelihood: the name of the likelihood of its outputs, such as `"classification"`; None where none was given.
        noise_variance: σ² of a regression's observations, by output, or the most that heteroscedastic noise can be;
            None until it is tuned or given.
        temperature: T, by which logits are divided before they become probabilities.
        padding: None for the padding rows of the model's embeddings.
    """

    padding: Mapping[str, int] = field(default=None, kw_only=True)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.likelihood is not None:
            likelihood_named(self.likelihood)
        if self.padding is None:
            # Once: other threads may have other tensors in the model by the time of a `replace`, which keeps this.
            with alone_with(self.model):
                rows = {name: row for name, row in padding_rows(self.model).items() if name in self.mode}
            object.__setattr__(self, "padding", rows)
        if self.running is None:
            object.__setattr__(self, "running", (writes_to_statistics(self.model), running_statistics(self.model)))

    @classmethod
    def from_optimizer(
        cls,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        n_data: float,
        likelihood: str | None = None,
        *,
        prior_precision: Prior | None = None,
        power: float = 0.5,
        batch_size: int | None = None,
        structure: str = "diagonal",
        reader: str | readers.StateReader | None = None,
    ) -> Posterior:
        """Read the posterior off a live optimiser; no data, no change to either.

        The mean is θ. The paper's other form, in which the prior is applied after training and shrinks the mean, is
        `posterior.replace(form="likelihood")`.

        Args:
            optimizer: the optimiser that trained it, or a list of several over one model.
            n_data: N, the number of training examples.
            likelihood: of the outputs: `"regression"`, `"classification"` (logits in the last dimension), `"binary"`
                (one logit per output), `"heteroscedastic"` (means, then log-variances, in the last dimension),
                or `"poisson"` (one log-rate per target); kept, so that `predict` needs none.
            prior_precision: δ, one number or one per parameter name, or a `LoraPrior`; None takes N × the weight decay
                of each parameter's group, and 1 where there is none. 0.0 is the paper's equation to the letter.
            power: p of the curvature v̂ᵖ; the paper's is 1/2.
            batch_size: examples behind one gradient; needed for power=1. None takes what `track` was told.
            structure: `"diagonal"`; `"kronecker"`, with the eigenbases of a SOAP. See `from_recorder` for those of
                recorded gradients, and `with_inputs` for the input side of the layers.
            reader: overrides how the optimiser is read; `"ogd"` gives V = 1 for optimisers without a second moment.
        """
        match = match_optimizers(model, optimizer, reader)
        how = SettingKeywords(prior_precision=prior_precision, power=power, batch_size=batch_size, structure=structure)
        return cls._of_match(model, match, likelihood, n_data, **how)

    @classmethod
    def from_recorder(
        cls,
        model: nn.Module,
        recorder: Recorder,
        n_data: float,
        likelihood: str | None = None,
        **settings: Unpack[SettingKeywords],
    ) -> Posterior:
        """Of recorded gradients, of training or of `Recorder.from_batches`, which knows the batch size.

        The other settings are as in `from_optimizer`; by default δ = 1, p = 1, and the structure is `"kronecker"`.
        """
        require_kind(recorder, Recorder, "recorder")
        match = match_optimizers(model, list(recorder.optimizers), "ogd")
        how: SettingKeywords = {"prior_precision": 1.0, "power": 1.0, "structure": "kronecker", **settings}
        how["batch_size"] = how.get("batch_size") or recorder.batch_size
        q = cls._of_match(model, match, likelihood, n_data, recorder=recorder, **how)
        readers.warn_of_few(q.origin, "the posterior")
        return q

    @classmethod
    def from_state_dict(
        cls,
        model: nn.Module,
        state_dict: Mapping[str, Any],
        n_data: float,
        likelihood: str | None = None,
        *,
        optimizer: str | readers.StateReader = "adam",
        param_names: Sequence[str] | None = None,
        **settings: Unpack[SettingKeywords],
    ) -> Posterior:
        """The same from `optimizer.state_dict()`, with the model's weights as they are now.

        Args:
            optimizer: the name of the optimiser that wrote it, or a reader.
            param_names: the parameter names in the optimiser's order, where the state dict has none of its own.
            **settings: `prior_precision`, `power`, `batch_size` and `structure`, as in `from_optimizer`.
        """
        match = match_state_dict(model, state_dict, optimizer, param_names)
        return cls._of_match(model, match, likelihood, n_data, **settings)

    @classmethod
    def from_checkpoint(
        cls,
        path: AnyPath,
        model: nn.Module,
        n_data: float | None = None,
        likelihood: str | None = None,
        *,
        prior_precision: Prior | None = None,
        power: float = 0.5,
        batch_size: int | None = None,
        structure: str = "diagonal",
        **reading: Unpack[CheckpointKeywords],
    ) -> Posterior:
        """The same from what a trainer saved; the model gets the weights and buffers of the file.

        Args:
            path: the checkpoint; only tensors and plain data are read from it.
            model: the model that was trained, its weights may be any; a part of it will do.
            n_data: N, the number of training examples; None takes what the trainer wrote down, if it did.
            **reading: how the file is read, such as `optimizer_path`: see `CheckpointKeywords`.
        """
        checkpoint = readers.read_checkpoint(path, **reading)
        n_data, batch_size = checkpoint.n_data_or(n_data), checkpoint.batch_size_or(batch_size)
        match = readers.match_checkpoint(checkpoint, model, **reading)
        if (apart := readers.moments_apart(checkpoint, match)) is not None:
            warn(apart)
        load = partial(readers.load_weights, checkpoint, model)
        how = SettingKeywords(prior_precision=prior_precision, power=power, batch_size=batch_size, structure=structure)
        return cls._of_match(model, match, likelihood, n_data, load=load, **how)

    @classmethod
    def from_second_moment(
        cls,
        model: nn.Module,
        second_moment: Named,
        n_data: float,
        likelihood: str | None = None,
        *,
        mean: Named | None = None,
        prior_precision: Plain = 1.0,
        power: float = 0.5,
        batch_size: int | None = None,
    ) -> Posterior:
        """From v̂ by parameter name, free of bias, whoever kept it; θ is the model's, or `mean`."""
        parameters = own_parameters(model)
        theta: Named = parameters if mean is None else mean
        mode, moments = {}, {}
        for name, v in second_moment.items():
            if name not in parameters or name not in theta or v.shape != parameters[name].shape:
                raise MatchError(f"{name!r} is not a parameter of the model with a mean and a variance of its shape")
            if not bool((torch.isfinite(v) & (v >= 0)).all()):
                raise SettingError(f"the second moment of {name!r} must be finite and not negative")
            mode[name] = theta[name].detach().to(readers.working_dtype(theta[name].dtype), copy=True)
            moments[name] = v.detach().to(mode[name], copy=True)
        settings = Settings(n_data, prior_by_name(prior_precision, mode), power, batch_size)
        omitted = {name: "not given" for name in parameters if name not in mode}
        return cls(mode, Diagonal(moments), settings, omitted, model=unwrap(model), likelihood=likelihood)

    @classmethod
    def from_moments(
        cls, model: nn.Module, mean: Named, variance: Named, n_data: float, likelihood: str | None = None
    ) -> Posterior:
        """A diagonal Gaussian of known mean and variance (SWAG, Bayes by Backprop, …).

        Kept as power 1 with v = 1/(N σ²) and no prior.
        """
        for name, sigma in variance.items():
            if not bool((torch.isfinite(sigma) & (sigma > 0)).all()):
                raise SettingError(f"the variance of {name!r} must be finite and positive")
        wide = {name: sigma.detach().to(readers.working_dtype(sigma.dtype)) for name, sigma in variance.items()}
        v = {name: (n_data * sigma).reciprocal() for name, sigma in wide.items()}
        return cls.from_second_moment(
            model, v, n_data, likelihood, mean=mean, prior_precision=0.0, power=1.0, batch_size=1
        )

    @classmethod
    def _of_match(
        cls,
        model: nn.Module,
        match: Match,
        likelihood: str | None,
        n_data: float,
        *,
        recorder: Recorder | None = None,
        load: Callable[[], None] | None = None,
        **settings: Unpack[SettingKeywords],
    ) -> Posterior:
        """Build it from a matched state; `load` fills the model's weights once nothing can be refused any more."""
        curvature, gradients = readers.read_recorder(match, recorder) if recorder else (readers.read_match(match), None)
        q = of_match(match, n_data, curvature=curvature, gradients=gradients, **settings)
        readers.warn_of_order(match, curvature.second_moment)
        if load is not None:
            load()
            match.settle()
        parameters, v, origin = own_parameters(model), curvature.second_moment, q.origin
        mode = {name: parameters[name].detach().to(v[name].dtype, copy=True) for name in v}
        if recorder is not None:
            origin = readers.Origin(match.optimizers, (float(recorder.recorded),) * 2, recorded=True)
        posterior = cls._over(model, q, mode=mode, origin=origin, likelihood=likelihood)
        return posterior.replace(prior_precision=settings["prior_precision"]) if q.settings.covariant else posterior

    @classmethod
    def load(cls, path: AnyPath, model: nn.Module) -> Posterior:
        """Read a saved posterior for `model`, plain or sharded, which gets its mean as weights.

        A file without weights leaves the model's as they are, which must be those that were trained: they are compared
        with a few numbers. Running statistics of batch norms and frozen weights are not in the file: a warning says
        where the model's are not those it was saved with.
        """
        own_parameters(model)
        tensors, header = read_folder(path) if os.path.isdir(path) else storage.read(path)
        posterior = cls.unpacked(path, tensors, header, model)
        warn_of_calibration(path, header)
        if header.get("has_weights", True):
            copy_into(posterior.model, posterior.mean)
        return posterior

    @classmethod
    def unpacked(cls, path: AnyPath, tensors: Named, header: Mapping[str, Any], model: nn.Module) -> Posterior:
        """The posterior that `packed` gave, for `model`; errors name `path`, the file it was read from."""
        parameters = own_parameters(model)
        q = unpacked(path, tensors, header, parameters)
        for name in q.mode:
            readers.check_parameter(name, parameters[name])
        with damage_named(path, "Posterior.save"):
            warn_of_other_statistics(path, header.get("running_statistics") or {}, model)
            # Files of releases before 0.3 have it in their calibration alone.
            likelihood = header.get("likelihood") or (header.get("calibration") or {}).get("likelihood")
            noise, temperature = noise_of(header.get("noise_variance")), header.get("temperature", 1.0)
            positive("temperature", temperature, "by which logits are divided")
            return cls._over(model, q, likelihood=likelihood, noise_variance=noise, temperature=temperature)

    @classmethod
    def _over(cls, model: nn.Module, q: GaussianWeights, **changes: Any) -> Posterior:
        """A Gaussian with a model."""
        how = {"mode": q.mode, "origin": q.origin, **changes}
        return cls(curvature=q.curvature, settings=q.settings, omitted=q.omitted, model=unwrap(model), **how)

    def packed(self, *, weights: bool = True, compress: str | None = None) -> tuple[Named, dict[str, Any]]:  # noqa: D102
        tensors, header = super().packed(weights=weights, compress=compress)
        header |= {
            "likelihood": self.likelihood,
            "noise_variance": None if self.noise_variance is None else self.noise_variance.double().tolist(),
            "temperature": self.temperature,
            "running_statistics": unheld_statistics(self.model, self.mode),
        }
        return tensors, header

    @overload
    def predict(  # type: ignore[overload-overlap]
        self, inputs: Inputs, **how: Unpack[PredictKeywords]
    ) -> Prediction: ...

    @overload
    def predict(self, inputs: Iterable[Any], **how: Unpack[PredictKeywords]) -> Iterator[Prediction]: ...

    def predict(
        self,
        inputs: Any,
        *,
        draws: int | None = None,
        covariance: bool | Literal["joint"] = False,
        forward: Forward | None = None,
        generator: torch.Generator | None = None,
    ) -> Prediction | Iterator[Prediction]:
        """The prediction of a batch, f ~ N(f(x; μ), J Σ Jᵀ), exactly; the model is as before when it returns.

        Of a loader an iterator of predictions, one for each batch, whose targets are left out. Where the inputs require
        gradients, moments have them. Of 20,000 outputs, or of one of many positions, ask for those that matter:
        `forward=lambda model, x: model(x)[:, index]`; of many classes `ba.calibrate(posterior, held_out)(x)` answers in
        one forward pass.

        Args:
            inputs: a tensor, a tuple or list of them (`model(*inputs)`) or a mapping (`model(**inputs)`); the batch
                comes first. Arrays of numpy may stand for tensors. Or a loader.
            draws: so many networks are drawn instead, f(x; θ), θ ~ q.
            covariance: the outputs' covariance too, of each example, or `"joint"`: of all examples together.
            forward: `forward(model, inputs)` for models whose call is unusual, or for a part of their outputs.
            generator: makes draws reproducible.
        """
        return predicting.predict(
            (self,), (1.0,), inputs, draws=draws, covariance=covariance, forward=forward, generator=generator
        )

    def draw(self, seed: int, *, forward: Forward | None = None) -> predicting.Function:
        """A function drawn from the posterior: from inputs to outputs f, (batch, ...), the same at every call.

        It is f(x; μ) + J (θ − μ), whose moments `predict` has, with gradients with respect to inputs.
        """
        return predicting.Function(self, seed, forward)

    def novelty(
        self, inputs: Any, *, reference: Any, likelihood: str | None = None, forward: Forward | None = None
    ) -> Tensor:
        """How unlike familiar inputs each example is, (batch,), by one forward pass; see `predicting.novelty`."""
        return predicting.novelty(self, inputs, reference=reference, likelihood=likelihood, forward=forward)

    def tune(
        self, held_out: Any, *, method: Literal["evidence", "validation"] | None = None, forward: Forward | None = None
    ) -> Posterior:
        """N's scale s, δ and σ² or T fitted to held-out data, by evidence or validation; see `tuning`."""
        return tuning.tune(self, held_out, method=method, forward=forward)

    def with_inputs(self, inputs: Any, *, forward: Forward | None = None) -> Self:
        """The same Gaussian with the input side of its layers, from a few hundred inputs without labels.

        Row i of a matrix W with inputs a has the precision w g_iᵖ A + δ, with A = E[a aᵀ] and g_i = Σ_j v̂_ij/Σ_j A_jj;
        the bias is a column of W, for the constant 1 in a, and shares its δ. Parameters that no such layer has stay as
        they are. `inputs` is a batch or a loader, whose targets are left out.
        """
        self.require_whole("the input side")
        if not self.curvature.independent:
            raise SettingError(f"with_inputs adds to a diagonal posterior, and this is {self.structure}")
        v, prior = self.curvature.second_moment, dict(self.prior_precision)
        sides = input_sides(self, inputs, forward=forward)
        sides = {name: side for name, side in sides.items() if side.bias is None or side.bias in v}
        joined = {*sides, *(side.bias for side in sides.values())}
        moments = {name: tensor for name, tensor in v.items() if name not in joined}
        for name, side in sides.items():
            if isinstance(prior[name], Tensor):
                raise SettingError(f"with_inputs needs one prior precision for all weights of {name!r}")
            moments[name] = side.moments(v[name], None if side.bias is None else v[side.bias])
            prior |= {} if side.bias is None else {side.bias: prior[name]}
        settings = replace(self.settings, prior_precision=prior)
        return replace(self, curvature=Diagonal(moments, {}, sides), settings=settings)

    def replace(self, **changes: Any) -> Self:
        """A new one with other settings.

        They are n_data, prior_precision, power, batch_size, form, scale, likelihood, noise_variance and temperature.
        """
        if unknown := sorted(changes.keys() - {*SETTING_NAMES, *_OUTPUT_SETTINGS}):
            names = ", ".join((*SETTING_NAMES, *_OUTPUT_SETTINGS))
            raise SettingError(f"cannot replace {unknown}; the settings are {names}")
        outputs = {name: changes.pop(name, getattr(self, name)) for name in _OUTPUT_SETTINGS}
        outputs["noise_variance"] = noise_of(outputs["noise_variance"])
        positive("temperature", outputs["temperature"], "by which logits are divided")
        prior = changes.get("prior_precision")
        if isinstance(prior, CovariantPrior):
            named = prior.at(self.model, self.mode, self.curvature.bases)
            changes = {"covariant": True, **changes, "prior_precision": named}
        return replace(super().replace(**changes), **outputs)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same posterior on another device or in another floating type; the model stays where it is."""
        noise = None if self.noise_variance is None else self.noise_variance.to(device, dtype)
        return replace(super().to(device, dtype), noise_variance=noise)

    def gathered(self, model: nn.Module) -> Posterior:
        """The same posterior on every process, of whole tensors over `model`, a plain one of the same architecture.

        For all that a sharded posterior cannot do. Every process must call it.
        """
        named = own_parameters(model)
        for name, theta in self.mode.items():
            if name not in named or named[name].shape != theta.shape or is_sharded(named[name]):
                shape = tuple(theta.shape)
                raise MatchError(f"{type(model).__name__} has no plain parameter {name!r} of shape {shape}")
        return replace(self.each(whole), model=unwrap(model))

    def network_tensors(self) -> Named:  # noqa: D102
        state = self.model.state_dict(keep_vars=True)
        return {name: tensor.detach() for name, tensor in state.items() if isinstance(tensor, Tensor)}

    def draw_types(self) -> Mapping[str, torch.dtype]:  # noqa: D102
        return {name: parameter.dtype for name, parameter in own_parameters(self.model).items()}

    def _drawn(self, seed: int, n: int | None) -> dict[str, Tensor]:
        # The model must still be the one that was trained.
        self.parameters()
        return super()._drawn(seed, n)

    @contextmanager
    def sampled(self, *, generator: torch.Generator | None = None) -> Iterator[nn.Module]:
        """The model with one draw as its weights; on leaving, by whatever way, weights and buffers are as before.

        What comes back is the very same bits. On a sharded model every process must enter, and run as many forwards.
        Other threads that predict with the same model, or go into `sampled`, wait until this one has left.
        """
        draw = self.sample(generator=generator)
        shards = {name: draw.pop(name) for name in list(draw) if is_sharded(draw[name])}
        with alone_with(self.model), holding(self.model, shards):
            parameters = self.parameters()
            originals = {name: parameters[name].data for name in draw}
            named = [module._buffers for module in self.model.modules()]
            slots = [(buffers, key, b) for buffers in named for key, b in buffers.items() if b is not None]
            try:
                for name, value in draw.items():
                    parameters[name].data = value.to(originals[name].device)
                for buffers, key, buffer in slots:
                    buffers[key] = buffer.clone()
                yield self.model
            finally:
                for name, data in originals.items():
                    parameters[name].data = data
                for buffers, key, buffer in slots:
                    buffers[key] = buffer

    def __str__(self) -> str:
        settings, noise = self.settings, self.noise_variance
        default = " (1 where there is no weight decay)" if settings.default_prior else ""
        whole = sum(p.numel() for p in self.model.parameters())
        share = f" of the model's {whole:,}" if self.n_weights < whole else ""
        lines = {
            "structure": f"{self.structure}, {self.n_weights:,} weights{share} in {len(self.mode)} parameters",
            "data": f"N = {self.n_data:,.10g}" + (f", B = {settings.batch_size}" if settings.batch_size else ""),
            "curvature": f"v̂^{settings.power:g}, {settings.form} form",
            "likelihood": self.likelihood,
            "scale": f"s = {self.scale:.3g}",
            "prior precision": f"δ = {range_of(self.prior_precision.values())}{default}",
            "noise variance": None if noise is None else f"σ² = {range_of([noise])}",
            "temperature": f"T = {self.temperature:.3g}" if self.temperature != 1 else None,
            "tracked": self.origin.tracked,
        }
        rows = [f"  {name:<15}  {value}" for name, value in lines.items() if value]
        return "\n".join([f"Posterior over {type(self.model).__name__}", *rows])
