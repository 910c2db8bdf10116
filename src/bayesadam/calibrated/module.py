"""`Calibrated`: a network that knows its doubt, in one forward pass of torch operations alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._version import __version__
from bayesadam._warnings import warn
from bayesadam.calibrated import files, programs
from bayesadam.calibrated.answer import Answer
from bayesadam.calibrated.doubtful import many_novel
from bayesadam.calibrated.fit import Fit, Report, dims_of
from bayesadam.calibrated.ranges import MASK, compared, departure, example_of, ranged
from bayesadam.calibrated.replaying import Replayed
from bayesadam.calibrated.tapped import Tapped
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods.conformal import either, p_values
from bayesadam.predict.batches import is_ragged, numbers_of
from bayesadam.predict.leverage import Ratios, inputs_of_parts, norms, ratios
from bayesadam.predict.tap import require_layers

if TYPE_CHECKING:
    from bayesadam.weights.posterior import Posterior


# Sizes of batches that are remembered.
_MOST_SIZES = 256


def compile_options(mode: str | None) -> dict[str, Any]:
    """The `options` of torch.compile in a mode, with guards of the inputs, and of the state of torch, alone."""
    options: dict[str, Any] = {} if mode is None else torch._inductor.list_mode_options(mode)
    if hasattr(torch.compiler, "keep_tensor_guards_unsafe"):
        options["guard_filter_fn"] = lambda guards: [
            not (guard.is_global or guard.name.startswith("L['self']")) for guard in guards
        ]
    return options


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
    most: Tensor | None

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
        tables |= {f"bounds{n}": one.bounds for n, one in enumerate(fit.ranges)}
        rule = fit.report.abstention
        tables["most"] = None if rule is None else torch.tensor(rule.most)
        for name, tensor in tables.items():
            # torch.export takes no buffer that is None.
            if tensor is None:
                setattr(self, name, None)
            else:
                wide = torch.float32 if tensor.is_floating_point() else None
                moved = tensor.detach().to(device, wide).clone(memory_format=torch.contiguous_format)
                self.register_buffer(name, moved)
        # What was warned of: kinds of words, without their numbers.
        self._warned = set[str]()
        self._silent = False
        self._replayed = Replayed()
        # The arguments of `compile`, what it made, and how often inputs came, by their sizes.
        self._compiling: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._fast: Callable[[object], tuple[Answer, Tensor | None]] | None = None
        self._sizes: dict[Any, int] = {}
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

    def compile(self, *args: Any, **options: Any) -> None:
        """Runs by `torch.compile` from the third batch of a size on, in place, with the checks and warnings of a call.

        Arguments are those of `torch.compile`, as mode="reduce-overhead" for CUDA graphs, whose answers last until the
        next call. The network is compiled whole, and of what was compiled a call looks at the inputs alone: afterwards
        the model must not be changed but in the values of its tensors.
        """
        self._compiling, self._sizes, self._fast = (args, options), {}, None

    def _compiled(self) -> Callable[[object], tuple[Answer, Tensor | None]]:
        if self._fast is None:
            assert self._compiling is not None
            args, given = self._compiling
            options = compile_options(given.get("mode")) | given.get("options", {})
            others = {name: value for name, value in given.items() if name != "mode"}
            others |= {"fullgraph": True, "options": options}
            # What torch compiles it keeps with the code, which other networks must not share.
            code = type(self)._answered.__code__.replace()
            function = FunctionType(code, globals(), "_answered")
            self._fast = torch.compile(MethodType(function, self), *args, **others)
        return self._fast

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, is compiled anew."""
        return {**self.__dict__, "_fast": None}

    def forward(self, inputs: object) -> Answer:
        """The answer to a batch."""
        eager = torch.compiler.is_compiling() or self._compiling is None or self._is_new(inputs)
        answer, inside = self._answered(inputs) if eager else self._compiled()(inputs)
        # Last, as a device has to be waited for.
        if not (torch.compiler.is_compiling() or self._silent):
            left = inside is not None and not bool(inside)
            self._tell(departure(self.fit.ranges, inputs) if left else None, answer)
        return answer

    def _is_new(self, inputs: object) -> bool:
        """Whether a batch has sizes of which two were not yet checked, or none."""
        key: Any = inputs.shape if isinstance(inputs, Tensor) else None
        if key is None and not is_ragged(inputs):
            key = tuple(leaf.shape for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
        checked = self._sizes.get(key, 0)
        if checked < 2:
            if len(self._sizes) >= _MOST_SIZES:
                self._sizes.clear()
            self._sizes[key] = checked + 1
        return checked < 2 or key is None

    def _answered(self, inputs: object) -> tuple[Answer, Tensor | None]:
        """The answer, and whether all examples are in range."""
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
        ragged, leaves = is_ragged(inputs), ranged(fit.ranges, inputs)
        if torch.compiler.is_compiling():
            *numbers, inside = self._numbers(f, seen, leaves, ragged=ragged)
            return self._whole(numbers, f), inside
        require_layers(() if fit.leverage is None else fit.leverage.layers, seen)
        modules, places = tuple(seen), tuple(leaves)

        def numbers_of_tensors(tensors: list[Tensor]) -> tuple[Any, ...]:
            pooled = dict(zip(modules, tensors[1:], strict=False))
            batch = dict(zip(places, tensors[len(modules) + 1 :], strict=True))
            return self._numbers(tensors[0], pooled, batch, ragged=ragged)

        tensors, kind = [f, *seen.values(), *leaves.values()], (modules, places, ragged)
        *numbers, inside = self._replayed(numbers_of_tensors, tensors, list(self._known.values()), kind)
        return self._whole(numbers, f), inside

    def _whole(self, numbers: Sequence[Any], f: Tensor) -> Answer:
        """An answer with what is the same for all batches, and f."""
        same = {"f_mean": f, "scores": self.scores, "noise_variance": self.noise_variance}
        # The compiler of torch before 2.13 returns no tuple that was made by `_replace`.
        return Answer(**{**dict(zip(Answer._fields, numbers, strict=True)), **same})

    def _numbers(
        self, f: Tensor, seen: Mapping[str, Tensor], leaves: Mapping[int, Tensor], *, ragged: bool
    ) -> tuple[Any, ...]:
        """The fields of an answer but f, and whether all examples are in range: of f, the layers' inputs, the batch."""
        bounds = [self._known[f"bounds{n}"] for n in range(len(self.fit.ranges))]
        in_range, lost = compared(self.fit.ranges, leaves, bounds)
        answer = self.answer(f, seen, ragged=ragged)._replace(in_range=in_range)
        if lost is not None:
            answer = answer._replace(novelty=answer.novelty.masked_fill(lost.isnan(), math.inf))
        fields = self.judged(answer)._replace(f_mean=None, scores=None, noise_variance=None)
        return *fields, None if in_range is None else in_range.all()

    @property
    def _known(self) -> dict[str, Tensor]:
        """The buffers: not by name, which a module is slow at."""
        return cast(dict[str, Tensor], self._buffers)

    def answer(self, f: Tensor, seen: Mapping[str, Tensor], *, ragged: bool = False) -> Answer:
        """The numbers of an answer, given the network's outputs and the pooled inputs of its layers."""
        fit, leverage, known = self.fit, self.fit.leverage, self._known
        if leverage is None:
            r = Ratios.usual(f)
        else:
            stacks = [(numbers, tuple(map(known.__getitem__, names))) for numbers, names in self._stacks]
            means = [known[f"means{n}"] for n in range(len(leverage.means))]
            q = norms(inputs_of_parts(seen, leverage.layers, means, f), stacks).square()
            r = ratios(q, known["weights"].to(q), known["centre"].to(q), leverage.power, absent=ragged)
        return fit.answer(f, r, known.get("spread"), known.get("noise_variance"))

    def judged(self, answer: Answer) -> Answer:
        """An answer with what follows from its numbers: p-values, and whether to give it."""
        p_value = None if self.novelties is None else p_values(self.novelties, answer.novelty)
        if p_value is not None and self.leverages is not None and answer.leverage is not None:
            p_value = either(p_value, p_values(self.leverages, answer.leverage))
        rule, answered = self.fit.report.abstention, None
        if rule is not None and self.most is not None:
            answered = (answer.label_doubt if rule.by_label else answer.doubt) <= self.most
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
        self._fast = None
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
        if suffix not in programs.SUFFIXES:
            raise SettingError(f"{os.fspath(path)!r} must end in .safetensors, .pt2 or .onnx")
        about = {"likelihood": self.fit.likelihood.name, "layers": self.layers, "level": level}
        about |= {"bayesadam": __version__, "model": type(self.model).__name__, "report": str(self.report)}
        # An example need not be like the held-out inputs.
        silent, self._silent = self._silent, True
        try:
            programs.export(programs.Exported(self, level), path, example, about)
        finally:
            self._silent = silent
