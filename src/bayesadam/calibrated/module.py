"""`Calibrated`: a network that knows its doubt, in one forward pass of torch operations alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from bayesadam._alone import alone_with
from bayesadam._files import damage_named
from bayesadam._version import __version__
from bayesadam._warnings import warn
from bayesadam.calibrated import files
from bayesadam.calibrated.answer import Answer
from bayesadam.calibrated.doubtful import many_novel
from bayesadam.calibrated.fit import Fit, Report, dims_of
from bayesadam.calibrated.ranges import MASK, compared, departure, example_of
from bayesadam.compress.packing import is_packed, load_network
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.likelihoods.conformal import either, p_values, threshold
from bayesadam.predict.batches import is_ragged, numbers_of
from bayesadam.predict.leverage import Ratios, inputs_of_parts, norms, ratios
from bayesadam.predict.matrices import Matrix
from bayesadam.predict.network import Call, Forward, output_tensor, widened
from bayesadam.predict.tap import Layouts, Observed, Seen, by_example, require_layers

if TYPE_CHECKING:
    from bayesadam.weights.posterior import Posterior

_PROGRAMS = (".pt2", ".onnx")


class Tapped(nn.Module):
    """A copy of a model with the inputs of its layers: a batch → outputs, and pooled inputs by layer, (batch, width).

    Its parameters are not trained, and it stays in evaluation mode.
    """

    def __init__(self, model: nn.Module, layers: tuple[Matrix, ...], forward: Forward | None) -> None:
        super().__init__()
        self.model, self.call = model.requires_grad_(False).eval(), forward
        # Where the outputs have their classes; the answers have them last.
        self.class_dim = -1
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                # Nested tensors of texts without their padding have no shape, and are not exported.
                module.use_nested_tensor = False
        # The first real numbers, in a tuple, as a module's own parameters have names.
        self._numbers = next(((p,) for p in model.parameters() if p.is_floating_point()), (torch.empty(0),))
        self._seen: Seen | None = None
        self._layouts: Layouts = {}
        self._handles: list[RemovableHandle] = []
        self.watch(layers)

    def watch(self, layers: tuple[Matrix, ...]) -> None:
        """Look at these layers, and at no others."""
        for handle in self._handles:
            handle.remove()
        self._layers = layers
        modules = dict(self.model.named_modules())
        self._handles = [
            modules[layer.module].register_forward_pre_hook(partial(self._see, layer), with_kwargs=True)
            for layer in layers
        ]

    @property
    def _dtype(self) -> torch.dtype:
        return self._numbers[0].dtype

    def forward(self, inputs: object) -> tuple[Tensor, dict[str, Tensor]]:
        """f(x), in float32 or wider, and the mean of a layer's inputs over positions and runs."""
        if torch.compiler.is_compiling() and not is_ragged(inputs):
            return self._once(inputs)[:2]
        with alone_with(self.model):
            return by_example(self._once, inputs, self._layouts, self._dtype)

    def _once(self, inputs: object) -> Observed:
        self._seen = seen = Seen.of(inputs, self._layers)
        try:
            raw = Call(self.model, self.call).run(pytree.tree_map(self._typed, inputs))
        finally:
            self._seen = None
        outputs = output_tensor(raw)
        outputs = outputs if self.class_dim == -1 else outputs.movedim(self.class_dim, -1)
        return widened(outputs), seen.pooled(widened(outputs)), tuple(seen.layout)

    def _see(self, layer: Matrix, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a layer runs: keep its input."""
        if self._seen is not None:
            self._seen.add(layer, module, args, kwargs)

    def _typed(self, leaf: object) -> object:
        """Real numbers in the model's type, unless they are of another that it has too."""
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        first = self._dtype
        alike = leaf.dtype == first or leaf.dtype in {p.dtype for p in self.model.parameters()}
        return leaf if alike else leaf.to(first)


class Calibrated(nn.Module):
    """A network and its doubt: call it with a batch for an `Answer`. Made by `calibrate`.

        net = ba.calibrate(posterior, held_out)
        p = net(x)                       # a tensor, a tuple of tensors, a mapping or a list of examples
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
    leverages: Tensor | None
    scores: Tensor | None
    weights: Tensor
    centre: Tensor

    def __init__(self, tapped: Tapped, fit: Fit, posterior: Posterior | None = None) -> None:
        super().__init__()
        self.tapped, self.fit, self.posterior = tapped, fit, posterior
        leverage, device = fit.leverage, numbers_of(tapped).device
        tapped.class_dim = fit.class_dim
        tapped.watch(() if leverage is None else leverage.layers)
        tables = {name: getattr(fit, name) for name in ("spread", "noise_variance", "novelties", "leverages", "scores")}
        self._stacks: list[tuple[Sequence[int], tuple[str, ...]]] = []
        if leverage is not None and leverage.medians is not None:
            stacks, weights, centre = leverage.relative()
            tables |= {"weights": weights, "centre": centre}
            for n, (numbers, tensors) in enumerate(stacks):
                named = {f"factors{n}_{i}": tensor for i, tensor in enumerate(tensors)}
                self._stacks.append((numbers, tuple(named)))
                tables |= named
            tables |= {f"means{n}": mean for n, mean in enumerate(leverage.means)}
        for name, tensor in tables.items():
            if tensor is None:
                setattr(self, name, None)
            else:
                wide = torch.float32 if tensor.is_floating_point() else None
                moved = tensor.detach().to(device, wide).clone(memory_format=torch.contiguous_format)
                self.register_buffer(name, moved)
        # What was warned of: kinds of words, without their numbers.
        self._warned = set[str]()
        self._silent = False
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
        """The layers whose leverage it knows, by name."""
        return [] if self.fit.leverage is None else [layer.module for layer in self.fit.leverage.layers]

    def train(self, mode: bool = True) -> Calibrated:
        """Stays in evaluation mode, whatever it is part of: with dropout it would be another network."""
        return super().train(False)

    if TYPE_CHECKING:

        def __call__(self, inputs: object) -> Answer:
            """The same, as type checkers see it."""

    def forward(self, inputs: object) -> Answer:
        """The answer to a batch."""
        fit = self.fit
        masked = isinstance(inputs, Mapping) and MASK in inputs
        if fit.ranges and masked != any(one.name == MASK for one in fit.ranges):
            raise MatchError(
                f"pass mappings with {MASK!r} to calibrate and here, or to neither: padding would count as words"
            )
        f, seen = self.tapped(inputs)
        if dims_of(f) != fit.dims:
            raise MatchError(
                f"the outputs {tuple(f.shape)} have another shape than those that were calibrated, {fit.dims[0]} "
                f"dimensions with {fit.dims[1]} in the last"
            )
        compiling = torch.compiler.is_compiling()
        if not compiling:
            require_layers(() if fit.leverage is None else fit.leverage.layers, seen)
        in_range, lost = compared(fit.ranges, inputs)
        answer = self.answer(f, seen, ragged=is_ragged(inputs))._replace(in_range=in_range)
        if lost is not None:
            answer = answer._replace(novelty=answer.novelty.masked_fill(lost.isnan(), math.inf))
        answer = self.judged(answer)
        # Last, as a device has to be waited for.
        if not compiling and not self._silent:
            inside = in_range is None or bool(in_range.all())
            self._tell(None if inside else departure(fit.ranges, inputs), answer)
        return answer

    def answer(self, f: Tensor, seen: Mapping[str, Tensor], *, ragged: bool = False) -> Answer:
        """The numbers of an answer, given the network's outputs and the pooled inputs of its layers."""
        fit, leverage = self.fit, self.fit.leverage
        if leverage is None:
            r = Ratios.usual(f)
        else:
            # Not by name, which a module is slow at.
            known = cast(dict[str, Tensor], self._buffers)
            stacks = [(numbers, tuple(map(known.__getitem__, names))) for numbers, names in self._stacks]
            means = [known[f"means{n}"] for n in range(len(leverage.means))]
            q = norms(inputs_of_parts(seen, leverage.layers, means, f), stacks).square()
            r = ratios(q, self.weights.to(q), self.centre.to(q), leverage.power, absent=ragged)
        return fit.answer(f, r, self.spread, self.noise_variance)

    def judged(self, answer: Answer) -> Answer:
        """An answer with what follows from its numbers: p-values, and whether to give it."""
        p_value = None if self.novelties is None else p_values(self.novelties, answer.novelty)
        if p_value is not None and self.leverages is not None and answer.leverage is not None:
            p_value = either(p_value, p_values(self.leverages, answer.leverage))
        rule = self.fit.report.abstention
        doubt = None if rule is None else answer.label_doubt if rule.by_label else answer.doubt
        answered = None if rule is None or doubt is None else rule.answers(doubt)
        if answered is not None and answer.in_range is not None:
            answered = answered & answer.in_range.view(-1, *[1] * (answered.dim() - 1))
        return answer._replace(p_value=p_value, answered=answered, scores=self.scores)

    def _tell(self, words: str | None, answer: Answer) -> None:
        """Warn, once of each kind, of a batch out of the range of the held-out inputs, or much of it novel."""
        # Where error bars, or what is answered, promise something that other data do not keep.
        promises, p_value = answer.stddev is not None or answer.answered is not None, answer.p_value
        if words is None and promises and p_value is not None and p_value.dim() == 1 and self.novelties is not None:
            words = many_novel(p_value, len(self.novelties))
        if words is not None and (kind := re.sub(r"[\d.,e+-]+", "", words)) not in self._warned:
            self._warned.add(kind)
            warn(words)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Calibrated:
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

    def probe(self) -> Tensor | None:
        """f of two examples across the range of the held-out inputs, by which a model is known again."""
        numbers = numbers_of(self.model)
        example = example_of(self.fit.ranges, numbers.dtype, numbers.device)
        with torch.no_grad():
            return None if example is None else self.tapped(example)[0]

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], example: object = None, *, level: float = 0.95) -> None:
        """Write it: `.safetensors` for `ba.load(path, model)`, `.pt2` for torch alone, `.onnx` for onnxruntime.

        The latter two are programs: their answer is a dict of tensors, with `set`, or `lower` and `upper`, at `level`;
        they take batches of any size, on CUDA up to 65,535. `torch.export.load(path).module()` runs a `.pt2`, and
        `ba.load(path)` gives one that answers as this does.

        Args:
            example: a batch of at least two, which a program is traced with; None makes one like the held-out inputs.
            level: of the programs' sets and intervals.
        """
        suffix = os.path.splitext(os.fspath(path))[1]
        if suffix == ".safetensors":
            f = self.probe()
            # A network that draws its outputs is not known by them.
            same = f is not None and torch.equal(f, cast(Tensor, self.probe()))
            files.write(path, self.fit, self.model, self.tapped.call is not None, f if same else None)
            return
        if suffix not in _PROGRAMS:
            raise SettingError(f"{os.fspath(path)!r} must end in .safetensors, .pt2 or .onnx")
        about = {"likelihood": self.fit.likelihood.name, "layers": self.layers, "level": level}
        about |= {"bayesadam": __version__, "model": type(self.model).__name__, "report": str(self.report)}
        # An example need not be like the held-out inputs.
        silent, self._silent = self._silent, True
        try:
            files.export(Exported(self, level), self.fit, self.model, path, example, about)
        finally:
            self._silent = silent


class Exported(nn.Module):
    """The same with a dict of tensors as its answer, which needs no class of this package."""

    reach: Tensor | None

    def __init__(self, net: Calibrated, level: float) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("reach", None if net.scores is None else threshold(net.scores, level).clone())

    def forward(self, inputs: object) -> dict[str, Tensor]:
        """The answer, and the set or the interval."""
        return self.fields(self.net(inputs))

    def implied(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What follows from numbers that a file gave: ranks and sets may turn on their last digits."""
        numbers = {name: tensor for name, tensor in outputs.items() if name in Answer._fields}
        return self.fields(self.net.judged(Answer(**numbers, likelihood=self.net.fit.likelihood.name)))

    def fields(self, answer: Answer) -> dict[str, Tensor]:
        """An answer as a dict of tensors."""
        # What does not depend on the inputs is in the file without that.
        fields = answer._replace(scores=None, noise_variance=None)._asdict()
        if self.reach is not None and answer.probs is not None:
            fields["set"] = answer.set_within(self.reach)
        elif self.reach is not None:
            fields["lower"], fields["upper"] = answer.interval_within(self.reach)
        return {name: tensor.clone() for name, tensor in fields.items() if isinstance(tensor, Tensor)}


class Program(nn.Module):
    """A calibrated network out of a `.pt2` file: the same answers, and no model is needed.

    Attributes:
        about: what the file says of itself: likelihood, layers, report, versions.
    """

    def __init__(self, exported: torch.export.ExportedProgram, about: Mapping[str, Any]) -> None:
        super().__init__()
        self.program, self.about = exported.module(), about
        args, _ = exported.example_inputs
        self._types = [leaf.dtype for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        for name in ("novelties", "scores", "noise_variance"):
            self.register_buffer(name, exported.state_dict.get(f"net.{name}"))

    novelties: Tensor | None
    scores: Tensor | None
    noise_variance: Tensor | None

    if TYPE_CHECKING:

        def __call__(self, inputs: object) -> Answer:
            """The same, as type checkers see it."""

    def forward(self, inputs: object) -> Answer:
        """The answer to a batch."""
        leaves, structure = pytree.tree_flatten(inputs)
        types = iter(self._types)
        leaves = [_as(next(types, None), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        fields: dict[str, Any] = self.program(pytree.tree_unflatten(leaves, structure))
        fields = {name: tensor for name, tensor in fields.items() if name in Answer._fields}
        return Answer(
            **fields, noise_variance=self.noise_variance, scores=self.scores, likelihood=self.about["likelihood"]
        )

    def train(self, mode: bool = True) -> Program:
        """Stays as it is: a program has no other mode."""
        return self


def _as(dtype: torch.dtype | None, leaf: Tensor) -> Tensor:
    """Real numbers in the type that a program takes."""
    return leaf.to(dtype) if dtype is not None and dtype.is_floating_point and leaf.is_floating_point() else leaf


@overload
def load(path: str | os.PathLike[str], model: nn.Module, *, forward: Forward | None = None) -> Calibrated: ...
@overload
def load(path: str | os.PathLike[str]) -> Program: ...
def load(
    path: str | os.PathLike[str], model: nn.Module | None = None, *, forward: Forward | None = None
) -> Calibrated | Program:
    """The calibrated network that `net.save` wrote: to a `.pt2`, which holds the program, or to a `.safetensors`.

    Of a pruned or quantised network's file it is a copy of the model with the weights, an ordinary module.
    A program is code: take it from whom you would take code. One that holds a pickle is refused.

    Args:
        model: for a `.safetensors`: of the same architecture; a copy of it gets the weights of the file.
        forward: the one that it was calibrated with, where there was one: code is not in that file.
    """
    suffix = os.path.splitext(os.fspath(path))[1]
    if suffix == ".onnx":
        raise SettingError(f"{os.fspath(path)!r} is run by onnxruntime.InferenceSession: ba.load takes .pt2 files")
    if suffix == ".pt2":
        if model is not None or forward is not None:
            raise SettingError(f"{os.fspath(path)!r} holds the program: ba.load(path), without a model or forward=")
        return Program(*files.read_program(path))
    if model is None:
        raise SettingError(
            f"{os.fspath(path)!r} holds weights and not the model: ba.load(path, model). A file of net.save('….pt2') "
            "needs none"
        )
    if not isinstance(model, nn.Module):
        raise SettingError(f"ba.load(path, model) takes the model, not its class or a function: got {model!r}")
    if is_packed(path):
        return cast(Calibrated, load_network(path, model))
    network, fit, probe = files.read(path, model, forward is not None)
    with damage_named(os.fspath(path), "net.save"):
        net = Calibrated(Tapped(network, (), forward), fit)
        # What the file holds goes together if it makes an answer out of zeros.
        (dimensions, last), zeros = fit.dims, partial(torch.zeros, device=numbers_of(network).device)
        # As many examples as there are outputs would hide that a tensor has the shape of the other.
        n = 3 + (last == 3)
        f = zeros(n) if dimensions == 1 else zeros(n, *[1] * (dimensions - 2), last)
        seen = {} if fit.leverage is None else {one.module: zeros(n, one.width) for one in fit.leverage.layers}
        answer, _ = net.judged(net.answer(f, seen)), str(net.report)
        if fit.scores is not None:
            _ = answer.set() if fit.likelihood.is_classes else answer.interval()
    if probe is not None and not _same(probe, net):
        raise FileError(
            f"{os.fspath(path)} is of another network: with its weights this model has other outputs. Pass the same "
            "forward=, and a model with the same settings, activations and buffers that no state dict holds"
        )
    return net


def _same(probe: Tensor, net: Calibrated) -> bool:
    """Whether outputs are what they were, but for the rounding of another machine."""
    try:
        f = net.probe()
    except Exception:
        return False
    if f is None or f.shape != probe.shape:
        return False
    few_digits = numbers_of(net.model).dtype in (torch.float16, torch.bfloat16)
    away, unit = (f.cpu() - probe).abs(), 1 + probe.abs().nan_to_num(0, 0, 0).amax()
    return bool((away <= (0.05 if few_digits else 1e-3) * unit)[probe.isfinite()].all())
