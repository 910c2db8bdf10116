"""`Calibrated`: a network that knows its doubt, in one forward pass of torch operations alone."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils import _pytree as pytree

from bayesadam import _storage as storage
from bayesadam._alone import alone_with
from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam._version import __version__
from bayesadam._warnings import warn
from bayesadam.calibrated.leverage import Leverage, Ratios, log_leverages, relative
from bayesadam.calibrated.ranges import MASK, InputRange, departure, example_of, has_mask, inside
from bayesadam.errors import CalibrationError, FileError, InputRangeWarning, MatchError, SettingError
from bayesadam.likelihoods import ClassLikelihood, Component, Likelihood, Moments, NumericLikelihood
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.likelihoods.abstention import Abstention, doubt_of_classes, doubt_of_numbers
from bayesadam.likelihoods.classes import of_examples
from bayesadam.likelihoods.conformal import p_values, threshold
from bayesadam.predict.network import Forward, output_tensor
from bayesadam.predict.tap import Layer, first_input, layers_of

_KIND = storage.Kind("bayesadam.calibrated", "a calibrated network", ": give the file that net.save wrote")
_PROGRAMS = (".pt2", ".onnx")
_LARGEST_ON_CUDA = 65_535
_MODEL = "model."


class Answer(NamedTuple):
    """What a calibrated network says of a batch; None where it does not apply.

    Attributes:
        novelty: how unlike the held-out inputs each example is, (batch,).
        p_value: the share of held-out examples at least as novel, (batch,): of examples like them at most α have p ≤ α.
        probs: of the classes, or of y = 1 for each binary output.
        mean: E[y] of numbers.
        stddev: of y, observation noise included.
        f_mean: f, (batch, ...).
        f_variance: Var[f] of numbers.
        leverage: r of each example, its leverage over that of familiar inputs, (batch,).
        layers: log h of each layer less the median of held-out inputs, (batch, layers), by the names in `net.layers`.
        answered: whether to answer it, where `calibrate` was given a `risk`; the others, and what is not in range, are
            for a person.
        in_range: whether its inputs are in the range of the held-out ones.
        noise_variance, scores: σ², and the held-out scores behind `set` and `interval`.
        likelihood: p(y | f), by name.
    """

    novelty: Tensor
    p_value: Tensor | None = None
    probs: Tensor | None = None
    mean: Tensor | None = None
    stddev: Tensor | None = None
    f_mean: Tensor | None = None
    f_variance: Tensor | None = None
    leverage: Tensor | None = None
    layers: Tensor | None = None
    answered: Tensor | None = None
    in_range: Tensor | None = None
    noise_variance: Tensor | None = None
    scores: Tensor | None = None
    likelihood: str = ""

    def set(self, level: float = 0.95) -> Tensor:
        """Which classes the set holds, booleans: the true one with probability `level` on data like the held-out."""
        kind = likelihood_of(self.likelihood)
        if not isinstance(kind, ClassLikelihood) or self.probs is None:
            raise SettingError("a set is of classes; of numbers see interval(level)")
        return 1 - kind.of_classes(self.probs) <= threshold(self._scores, level).to(self.probs).unsqueeze(-1)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """E[y] ± q sd[y] of each output, which holds y with probability `level` on data like the held-out."""
        if self.mean is None or self.stddev is None:
            raise SettingError("an interval is of numbers; of classes see set(level)")
        reach = threshold(self._scores, level).to(self.mean).view(self.mean.shape[1:]) * self.stddev
        return self.mean - reach, self.mean + reach

    @property
    def _scores(self) -> Tensor:
        if self.scores is None:
            raise CalibrationError(
                "this needs held-out scores: calibrate on at least 20 examples, of classes with one class for each"
            )
        return self.scores

    @property
    def distribution(self) -> Distribution:
        """p(y), a distribution of torch's."""
        kind = likelihood_of(self.likelihood)
        assert self.f_mean is not None
        if isinstance(kind, ClassLikelihood):
            # Those probabilities are of logits at the example's own temperature.
            assert self.probs is not None
            logits = self.probs.log() if kind.coupled else self.probs.logit()
            return kind.distribution([Component(Moments(logits))])
        return kind.distribution([Component(Moments(self.f_mean, self.f_variance), self.noise_variance)])

    @property
    def doubt(self) -> Tensor:
        """By which inputs are answered, (batch,): the probability that an answer is wrong, or the largest stddev."""
        return _doubt(likelihood_of(self.likelihood), self.probs, self.stddev)

    @property
    def token_novelty(self) -> Tensor:
        """How unlike the held-out inputs each position is, (batch, positions); `novelty` is an example's mean."""
        kind = likelihood_of(self.likelihood)
        if not isinstance(kind, ClassLikelihood) or self.f_mean is None or self.f_mean.dim() < 3 or not kind.coupled:
            raise SettingError("token_novelty is of outputs (batch, positions, classes); see novelty")
        assert self.leverage is not None
        return kind.token_novelty(self.f_mean, self.leverage)


@dataclass(frozen=True)
class Report:
    """What `calibrate` did, on how much, and what came of it.

    Attributes:
        n: held-out examples.
        nll: mean negative log-likelihood of the held-out examples as they are now predicted and, of classes, of the
            network at the best temperature and at 1; with their standard errors.
        outcome: what is predicted, in words.
        missing: what a posterior would have added; empty where there was one.
        abstention: which inputs are answered; None where `risk` was not given.
    """

    likelihood: str
    n: int
    nll: Mapping[str, tuple[float, float]]
    outcome: str
    missing: str = ""
    abstention: Abstention | None = None

    def __str__(self) -> str:
        lines = [f"{self.likelihood}: calibrated on {self.n} held-out examples, each left out of its own leverage"]
        lines += [f"  negative log-likelihood, {name}: {v:.4f} ± {error:.4f}" for name, (v, error) in self.nll.items()]
        lines.append(f"  {self.outcome}")
        lines += [] if self.abstention is None else [f"  answers {self.abstention}"]
        return "\n".join([*lines, f"  {self.missing}"] if self.missing else lines)


@dataclass(frozen=True, eq=False)
class Fit:
    """All that held-out data add to a network.

    Attributes:
        likelihood: p(y | f).
        leverage: how far layers extrapolate; None where no layer is known.
        exponent: of ((1 + r)/2), by which temperatures, or standard deviations, grow.
        temperature: T₀ of classes.
        spread: v of Var[f] = v r of numbers, by target.
        noise_variance: σ², or the most that noise can be.
        novelties: of the held-out inputs, ascending.
        scores: of the held-out targets, 1 − p of classes, |y − E[y]|/sd of numbers.
        classes: the last dimension of the outputs.
        ranges: of the held-out inputs.
    """

    likelihood: Likelihood
    leverage: Leverage | None
    exponent: float = 0.5
    temperature: float = 1.0
    spread: Tensor | None = None
    noise_variance: Tensor | None = None
    novelties: Tensor | None = None
    scores: Tensor | None = None
    dims: tuple[int, int] = (0, 0)
    ranges: tuple[InputRange, ...] = ()
    report: Report = field(default_factory=lambda: Report("", 0, {}, ""))


class Predicted(NamedTuple):
    """y of a batch: probabilities, or mean, standard deviation and the variance of f."""

    probs: Tensor | None = None
    mean: Tensor | None = None
    stddev: Tensor | None = None
    f_variance: Tensor | None = None


def predicted(
    fit: Fit, f: Tensor, ratios: Ratios, moved: tuple[Tensor | None, Tensor | None] | None = None
) -> Predicted:
    """y given the network's outputs and relative leverages; `moved` are the fit's v and σ² on another device."""
    kind = fit.likelihood
    spread, noise = (fit.spread, fit.noise_variance) if moved is None else moved
    if isinstance(kind, ClassLikelihood):
        return Predicted(kind.link(f / (fit.temperature * of_examples(ratios.growth(fit.exponent), f))))
    assert isinstance(kind, NumericLikelihood)
    assert spread is not None
    variance = by_leverage(kind, f, ratios.gentle, spread)
    c = Component(Moments(f, variance), noise)
    return Predicted(None, kind.expected(c), kind.variance(c).sqrt(), variance)


def by_leverage(kind: Likelihood, f: Tensor, r: Tensor, spread: Tensor) -> Tensor:
    """Var[f] = v r of the outputs that locate targets, 0 of others."""
    located = spread.to(f) * of_examples(r, f).expand(kind.locations(f).shape)
    rest = f.shape[-1] - located.shape[-1] if f.dim() > 1 else 0
    return located if not rest else torch.nn.functional.pad(located, (0, rest))


def _doubt(kind: Likelihood, probs: Tensor | None, stddev: Tensor | None) -> Tensor:
    if isinstance(kind, ClassLikelihood):
        assert probs is not None
        return doubt_of_classes(kind.of_classes(probs))
    assert stddev is not None
    return doubt_of_numbers(stddev)


def doubt(fit: Fit, y: Predicted) -> Tensor:
    """By which inputs are answered, (batch,)."""
    return _doubt(fit.likelihood, y.probs, y.stddev)


# --- the module -----------------------------------------------------------------------------------------------------


class Tapped(nn.Module):
    """A copy of a model with the inputs of its layers: a batch → outputs, and pooled inputs by layer, (batch, width).

    Its parameters are not trained, and it stays in evaluation mode.
    """

    def __init__(self, model: nn.Module, layers: tuple[Layer, ...], forward: Forward | None) -> None:
        super().__init__()
        self.model, self.call = model.requires_grad_(False).eval(), forward
        self._seen: dict[str, list[Tensor]] | None = None
        self._size, self._mask = 0, None
        self._handles: list[Any] = []
        self.watch(layers)

    def watch(self, layers: tuple[Layer, ...]) -> None:
        """Look at these layers, and at no others."""
        for handle in self._handles:
            handle.remove()
        modules = dict(self.model.named_modules())
        self._handles = [
            modules[layer.module].register_forward_pre_hook(partial(self._see, layer), with_kwargs=True)
            for layer in layers
        ]

    def forward(self, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """f(x), in float32 or wider, and the mean of a layer's inputs over positions and runs."""
        first = next((leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()), None)
        if first is None:
            raise MatchError("pass the model's inputs as torch tensors: the batch holds none")
        compiling = torch.compiler.is_compiling()
        with nullcontext() if compiling else alone_with(self.model):
            self._seen, self._size = {}, first.shape[0]
            self._mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
            try:
                found = self._run(pytree.tree_map(self._typed, inputs))
                seen = {name: sum(each[1:], each[0]) / len(each) for name, each in self._seen.items()}
            finally:
                self._seen = self._mask = None
        outputs = output_tensor(found)
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32)), seen

    def _run(self, inputs: Any) -> Any:
        if self.call is not None:
            return self.call(self.model, inputs)
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, tuple | list) else self.model(inputs)

    def _see(self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a layer runs: keep its input."""
        if self._seen is not None:
            a = first_input(args, kwargs)
            if torch.compiler.is_compiling() or layer.has_rows(a, self._size):
                self._seen.setdefault(layer.module, []).append(layer.pooled(module, a, self._size, self._mask))

    def _typed(self, leaf: Any) -> Any:
        """Real numbers in the model's type."""
        own = next(self.model.parameters()).dtype
        return leaf.to(own) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != own else leaf


class Calibrated(nn.Module):
    """A network and its doubt: call it with a batch for an `Answer`. Made by `calibrate`.

        net = ba.calibrate(posterior, held_out)
        p = net(x)                       # a tensor, a tuple of tensors or a mapping, as the model takes
        net.save("model.onnx", example=x[:2])

    It has its own copy of the model, in evaluation mode. `half()` and `bfloat16()` change the model alone: what doubt
    is made of stays in float32. `torch.export.export(net, (x,))` and `torch.compile(net)` take it as it is.

    Attributes:
        posterior: the one that was calibrated; None of a plain model.
        report: what `calibrate` did.
        layers: the names of the layers whose leverage it knows.
    """

    spread: Tensor | None
    noise_variance: Tensor | None
    novelties: Tensor | None
    scores: Tensor | None
    medians: Tensor
    order: Tensor

    def __init__(self, tapped: Tapped, fit: Fit, posterior: Any = None) -> None:
        super().__init__()
        self.tapped, self.fit, self.posterior = tapped, fit, posterior
        leverage, device = fit.leverage, next(tapped.parameters()).device
        tapped.watch(() if leverage is None else leverage.layers)
        tables = {name: getattr(fit, name) for name in ("spread", "noise_variance", "novelties", "scores")}
        tables["medians"] = None if leverage is None else leverage.medians
        tables["order"] = None if leverage is None else leverage.order
        self._stacks = [] if leverage is None else [layers for layers, _ in leverage.stacks]
        tables |= {f"factors{n}": w for n, (_, w) in enumerate([] if leverage is None else leverage.stacks)}
        for name, tensor in tables.items():
            if tensor is None:
                setattr(self, name, None)
            else:
                wide = torch.float32 if tensor.is_floating_point() else None
                own = tensor.detach().to(device, wide).clone(memory_format=torch.contiguous_format)
                self.register_buffer(name, own)
        self._told = False
        self.eval()

    @property
    def report(self) -> Report:
        """What `calibrate` did."""
        return self.fit.report

    @property
    def model(self) -> nn.Module:
        """The network, a copy at the posterior's mean."""
        return self.tapped.model

    @property
    def layers(self) -> list[str]:
        """The layers whose leverage it knows, by name, in the order of `Answer.layers`."""
        return [] if self.fit.leverage is None else [layer.module for layer in self.fit.leverage.layers]

    def train(self, mode: bool = True) -> Calibrated:
        """Stays in evaluation mode, whatever it is part of: with dropout it would be another network."""
        return super().train(False)

    def forward(self, inputs: Any) -> Answer:
        """The answer to a batch."""
        fit, kind = self.fit, self.fit.likelihood
        if has_mask(fit.ranges) != (isinstance(inputs, Mapping) and MASK in inputs) and fit.ranges:
            raise MatchError(
                f"pass mappings with {MASK!r} to calibrate and here, or to neither: padding would count as words"
            )
        f, seen = self.tapped(inputs)
        if (f.dim(), f.shape[-1]) != fit.dims:
            raise MatchError(
                f"the outputs {tuple(f.shape)} have another shape than those that were calibrated, {fit.dims[0]} "
                f"dimensions with {fit.dims[1]} in the last"
            )
        if fit.leverage is None:
            ratios, layers = Ratios.usual(f), None
        else:
            factors = [getattr(self, f"factors{n}") for n in range(len(self._stacks))]
            log_h = log_leverages(seen, list(zip(self._stacks, factors, strict=True)), self.order)
            ratios, layers = relative(log_h, self.medians, fit.leverage.source), log_h - self.medians[:-2]
        in_range = inside(fit.ranges, inputs)
        if not torch.compiler.is_compiling():
            self._tell(inputs, in_range)
        y = predicted(fit, f, ratios, (self.spread, self.noise_variance))
        novelty = kind.novelty(f, ratios.steep)
        answered, rule = None, fit.report.abstention
        if rule is not None:
            answered = rule.answers(doubt(fit, y))
            answered = answered if in_range is None else answered & in_range
        return Answer(
            novelty,
            None if self.novelties is None else p_values(self.novelties, novelty),
            y.probs,
            y.mean,
            y.stddev,
            f,
            y.f_variance,
            ratios.steep,
            layers,
            answered,
            in_range,
            self.noise_variance,
            self.scores,
            kind.name,
        )

    def _tell(self, inputs: Any, in_range: Tensor | None) -> None:
        """Warn, once, of a batch that has left the range of the held-out inputs."""
        if self._told or in_range is None or bool(in_range.all()):
            return
        if (difference := departure(self.fit.ranges, inputs)) is not None:
            self._told = True
            warn(difference, InputRangeWarning)

    def _apply(self, fn: Any, recurse: bool = True) -> Calibrated:
        """Moves all of it, and changes the type of the model alone."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            moved = self._buffers[name]
            if tensor is not None and moved is not None:
                self._buffers[name] = tensor.to(moved.device)
        return self

    def __repr__(self) -> str:
        return f"Calibrated({type(self.model).__name__}, {self.fit.likelihood.name}, {len(self.layers)} layers)"

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], example: Any = None, *, level: float = 0.95) -> None:
        """Write it: `.safetensors` for `ba.load(path, model)`, `.pt2` for torch alone, `.onnx` for onnxruntime.

        The latter two are programs: their answer is a dict of tensors, with `set`, or `lower` and `upper`, at `level`;
        they take batches of any size, on CUDA up to 65,535. `torch.export.load(path).module()` runs a `.pt2`.

        Args:
            example: a batch of at least two, which a program is traced with; None makes one like the held-out inputs.
            level: of the programs' sets and intervals.
        """
        suffix = os.path.splitext(os.fspath(path))[1]
        if suffix == ".safetensors":
            tensors, header = _packed(self)
            storage.write(path, tensors, header, _KIND)
        elif suffix in _PROGRAMS:
            _export(self, path, suffix, example, level)
        else:
            raise SettingError(f"{os.fspath(path)!r} must end in .safetensors, .pt2 or .onnx")


def load(path: str | os.PathLike[str], model: nn.Module, *, forward: Forward | None = None) -> Calibrated:
    """The calibrated network that `net.save("….safetensors")` wrote.

    Args:
        model: of the same architecture; a copy of it gets the weights of the file.
        forward: the one that it was calibrated with, where there was one: code is not in the file.
    """
    tensors, header = storage.read(path, _KIND)
    had = bool(header.get("forward"))
    if had != (forward is not None):
        given = "with forward=, pass the same" if had else "without forward=, leave it out"
        raise SettingError(f"{path} was calibrated {given}: code is not in the file")
    try:
        own = copy.deepcopy(model)
        own.load_state_dict(storage.under(_MODEL, tensors))
        fit = _unpacked_fit(header, tensors, own)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"{path} is damaged, or of another model: {error}") from None
    return Calibrated(Tapped(own, (), forward), fit)


def _packed(net: Calibrated) -> tuple[dict[str, Tensor], dict[str, Any]]:
    fit, report = net.fit, net.fit.report
    tensors = {f"{_MODEL}{name}": tensor.contiguous() for name, tensor in net.model.state_dict().items()}
    tensors |= {name: t for name in _TABLES if (t := getattr(net, name)) is not None}
    header: dict[str, Any] = {name: getattr(fit, name) for name in ("exponent", "temperature")}
    header |= {"likelihood": fit.likelihood.name, "dims": list(fit.dims), "forward": net.tapped.call is not None}
    header["ranges"] = [vars(each) for each in fit.ranges]
    header["report"] = {**vars(report), "nll": dict(report.nll)}
    header["report"]["abstention"] = None if report.abstention is None else vars(report.abstention)
    if fit.leverage is not None:
        header["leverage"] = {"source": fit.leverage.source, "modules": net.layers}
        tensors["medians"] = net.medians
        tensors |= {
            f"factor.{layer.module}": w for layer, w in zip(fit.leverage.layers, fit.leverage.factors, strict=True)
        }
    return tensors, header


_TABLES = ("spread", "noise_variance", "novelties", "scores")


def _unpacked_fit(header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Fit:
    about = dict(header["report"])
    if about["abstention"] is not None:
        about["abstention"] = Abstention(**about["abstention"])
    about["nll"] = {name: (float(v), float(e)) for name, (v, e) in about["nll"].items()}
    leverage = None
    if "leverage" in header:
        by_module = {layer.module: layer for layer in layers_of(model, dict(model.named_parameters()))}
        modules = header["leverage"]["modules"]
        layers, factors = tuple(by_module[m] for m in modules), tuple(tensors[f"factor.{m}"] for m in modules)
        leverage = Leverage(layers, factors, header["leverage"]["source"], tensors["medians"])
    return Fit(
        likelihood_of(header["likelihood"]),
        leverage,
        float(header["exponent"]),
        float(header["temperature"]),
        **{name: tensors.get(name) for name in _TABLES},
        dims=tuple(header["dims"]),
        ranges=tuple(map(InputRange.of, header["ranges"])),
        report=Report(**about),
    )


# --- programs -------------------------------------------------------------------------------------------------------


class _Program(nn.Module):
    """The same with a dict of tensors as its answer, which needs no class of this package."""

    def __init__(self, net: Calibrated, level: float) -> None:
        super().__init__()
        self.net = net
        self.reach: Tensor | None
        if net.scores is None:
            self.reach = None
        else:
            self.register_buffer("reach", threshold(net.scores, level).clone())

    def forward(self, inputs: Any) -> dict[str, Tensor]:
        """The answer, and the set or the interval."""
        answer = self.net(inputs)
        told = {name: getattr(answer, name) for name in ("novelty", "p_value", "probs", "mean", "stddev", "answered")}
        told |= {"in_range": answer.in_range, "layers": answer.layers}
        kind = self.net.fit.likelihood
        if self.reach is not None and isinstance(kind, ClassLikelihood):
            told["set"] = 1 - kind.of_classes(answer.probs) <= self.reach.unsqueeze(-1)
        elif self.reach is not None:
            reach = self.reach.view(answer.stddev.shape[1:]) * answer.stddev
            told |= {"lower": answer.mean - reach, "upper": answer.mean + reach}
        return {name: tensor.clone() for name, tensor in told.items() if tensor is not None}


def _name_outputs(graph: Any, names: Sequence[str]) -> None:
    """Give the outputs their names, which values inside may have had, such as that of the operation `mean`."""
    outputs = {id(value) for value in graph.outputs}
    for node in graph:
        for value in node.outputs:
            if value.name in names and id(value) not in outputs:
                value.name = f"{value.name}_inside"
    for number, value in enumerate(graph.outputs):
        value.name = f"output_{number}"
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name


def _export(net: Calibrated, path: str | os.PathLike[str], suffix: str, example: Any, level: float) -> None:
    first = next(net.model.parameters())
    example = example_of(net.fit.ranges, first.dtype, first.device) if example is None else example
    if example is None:
        why = "the held-out inputs that calibrate saw differ in shape, or are not recorded"
        raise SettingError(f"pass an example, net.save(path, x[:2]): {why}")
    if suffix == ".onnx" and any(parameter.dtype == torch.bfloat16 for parameter in net.model.parameters()):
        raise SettingError("onnxruntime runs no bfloat16: net.half() or net.float() before it is saved")
    leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    size = leaves[0].shape[0] if leaves else 0
    if size < 2:
        raise SettingError("the example batch must hold at least two examples, or the size of batches were fixed")
    # Attention on CUDA takes no more.
    batch = torch.export.Dim("batch", min=1, max=_LARGEST_ON_CUDA if first.is_cuda else None)

    def dynamic(leaf: Any) -> Any:
        return {0: batch} if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else None

    example = dict(example) if isinstance(example, Mapping) else example
    about = {"likelihood": net.fit.likelihood.name, "layers": net.layers, "level": level, "bayesadam": __version__}
    about |= {"model": type(net.model).__name__, "report": str(net.report)}
    # An example need not be like the held-out inputs.
    told, net._told = net._told, True
    try:
        _write_program(_Program(net, level), path, suffix, example, dynamic, about)
    finally:
        net._told = told


def _write_program(
    program: _Program, path: str | os.PathLike[str], suffix: str, example: Any, dynamic: Any, about: Mapping[str, Any]
) -> None:
    with torch.no_grad(), replacing(path) as temporary:
        names = list(program(example))
        exported = torch.export.export(
            program, (example,), dynamic_shapes=(pytree.tree_map(dynamic, example),), strict=False
        )
        if suffix == ".pt2":
            files = {"bayesadam.json": json.dumps(about, ensure_ascii=False)}
            with open(temporary, "wb") as file:
                torch.export.save(exported, file, extra_files=files)
            return
        require("onnx")
        require("onnxscript")
        written = torch.onnx.export(exported, dynamo=True, verbose=False)
        assert written is not None
        _name_outputs(written.model.graph, names)
        written.model.metadata_props["bayesadam"] = json.dumps(about, ensure_ascii=False)
        written.save(os.fspath(temporary))
