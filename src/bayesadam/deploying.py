"""`deploy`: a calibrated posterior as a plain module, one forward pass, which torch.export, ONNX and compilers take."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from bayesadam._checks import require_kind
from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam._version import __version__
from bayesadam.errors import CalibrationError, SettingError
from bayesadam.leverage.layers import Layer
from bayesadam.leverage.leverage import log_leverages, relative
from bayesadam.likelihoods import Component
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.likelihoods.abstention import doubt_of_classes, doubt_of_numbers
from bayesadam.likelihoods.conformal import check_level, threshold
from bayesadam.posterior import Posterior
from bayesadam.posterior.distribution import by_leverage
from bayesadam.posterior.inputs import example_of, inside
from bayesadam.predict.call import Forward, output_tensor

_FORMATS = (".pt2", ".onnx")
_LARGEST_ON_CUDA = 65_535
# To the dynamo of an older torch whatever it compiles is exported.
_TOLD_APART = TorchVersion(torch.__version__) >= TorchVersion("2.13")


class Answer(NamedTuple):
    """What a deployed network says of a batch; None where it does not apply, or was not calibrated.

    Attributes:
        novelty: how unlike the held-out inputs each example is, (batch,).
        p_value: the share of held-out examples at least as novel, (batch,).
        probs: of the classes.
        mean: E[y] of numbers.
        stddev: of y, observation noise included.
        prediction_set: the classes of the conformal set, booleans.
        lower, upper: the ends of the conformal interval of numbers.
        answered: whether to answer it, where `calibrate` was given a `risk`; the others, and what is not in range, are
            for a person.
        in_range: whether its inputs are in the range of the held-out ones.
        layers: log h of each layer less the median of held-out inputs, (batch, layers), by the names in `about`.
    """

    novelty: Tensor
    p_value: Tensor | None = None
    probs: Tensor | None = None
    mean: Tensor | None = None
    stddev: Tensor | None = None
    prediction_set: Tensor | None = None
    lower: Tensor | None = None
    upper: Tensor | None = None
    answered: Tensor | None = None
    in_range: Tensor | None = None
    layers: Tensor | None = None


def deploy(posterior: Posterior, *, level: float = 0.95, forward: Forward | None = None) -> Served:
    """The model with its doubt as a plain module: call it with a batch for an `Answer`.

        served = ba.deploy(posterior)
        answer = served(x)                                    # or served(*tensors), served(**batch)
        served.save("model.pt2", x)                           # or "model.onnx"; x is an example

    It has its own copy of the model, at the posterior's mean, in evaluation mode. `half()` and `bfloat16()` change the
    model alone: what doubt is made of stays in float32. Exported, it gives a dict of the answer's tensors.

    Args:
        posterior: one that `calibrate` was given held-out data for; of numbers with `predictive="forward"`.
        level: of prediction sets and intervals.
        forward: `forward(model, inputs)` for models whose call is unusual, as `predict` takes it.
    """
    require_kind(posterior, Posterior, "posterior")
    check_level(level)
    report = posterior.calibration
    if report is None or posterior.leverage is None:
        raise CalibrationError("only a calibrated posterior can be deployed: calibrate(posterior, held_out) first")
    record = likelihood_of(report.likelihood)
    if record.tempered and posterior.averaged:
        many = "probabilities that average over the posterior take more than a forward pass"
        raise CalibrationError(f"{many}: calibrate with method='temperature'")
    if not record.tempered and posterior.spread is None:
        many = "the variance of this prediction takes backward passes"
        raise CalibrationError(f"{many}: calibrate(posterior, held_out, predictive='forward') fits one without")
    return Served(posterior, level, forward)


class Served(nn.Module):
    """A model and its doubt, in torch operations alone; see `deploy`.

    Attributes:
        about: what it is and what it was calibrated on, plain data.
    """

    order: Tensor
    medians: Tensor
    novelties: Tensor | None
    noise_variance: Tensor | None
    spread: Tensor | None
    reach: Tensor | None
    record: Any

    def __init__(self, posterior: Posterior, level: float, forward: Forward | None) -> None:
        super().__init__()
        report, leverage = posterior.calibration, posterior.leverage
        assert report is not None
        assert leverage is not None
        self.model, self.ranges = _at_mean(posterior), report.inputs
        self.record, self._forward = likelihood_of(report.likelihood), forward
        self.source, self.exponent, self.temperature = leverage.source, leverage.exponent, posterior.temperature
        stacks, order = leverage.stacked
        self.layers = [tuple(layers) for layers, _ in stacks]
        guarantee = report.guarantee
        scores = guarantee.get("classes.lac" if self.record.tempered else "residuals")
        self.rule = report.abstention
        tables = {
            "order": order,
            "medians": leverage.medians,
            "novelties": guarantee.get("novelty"),
            "noise_variance": posterior.noise_variance,
            "spread": posterior.spread,
            "reach": None if scores is None else threshold(scores, level),
        } | {f"factors{number}": w for number, (_, w) in enumerate(stacks)}
        device = next(iter(posterior.mode.values())).device
        for name, tensor in tables.items():
            if tensor is None:
                setattr(self, name, None)
            else:
                own = tensor.to(device, torch.float32 if tensor.is_floating_point() else None)
                self.register_buffer(name, own.clone(memory_format=torch.contiguous_format))
        self.about: dict[str, Any] = {
            "model": type(posterior.model).__name__,
            "likelihood": report.likelihood,
            "calibrated": report.fitted,
            "outcome": report.preferred,
            "held-out NLL": dict(report.nll),
            "leverage": f"{leverage.source}, {len(leverage.layers)} layers",
            "layers": [layer.module for layer in leverage.layers],
            "level": level,
            **({} if report.abstention is None else {"answers": str(report.abstention)}),
            "bayesadam": __version__,
            "torch": torch.__version__,
        }
        self._seen: dict[str, list[Tensor]] | None = None
        for layers in self.layers:
            for layer in layers:
                module = self.model.get_submodule(layer.module)
                module.register_forward_pre_hook(partial(self._see, layer), with_kwargs=True)
        self.eval()

    def train(self, mode: bool = True) -> Served:
        """Stays in evaluation mode, whatever it is part of: with dropout it would be another network."""
        return super().train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The answer to a batch: a tensor, a tuple or a mapping, or what the model is called with."""
        only = args[0] if len(args) == 1 else None
        if isinstance(only, Mapping):
            args, kwargs = (), dict(only)
        elif isinstance(only, tuple | list):
            args = tuple(only)
        args, kwargs = pytree.tree_map(self._typed, (args, kwargs))
        self._seen = {}
        self._mask, self._size = kwargs.get("attention_mask"), _first((args, kwargs)).shape[0]
        try:
            if self._forward is not None:
                found = self._forward(self.model, kwargs or (args[0] if len(args) == 1 else args))
            else:
                found = self.model(*args, **kwargs)
            seen = {name: sum(each[1:], each[0]) / len(each) for name, each in self._seen.items()}
        finally:
            self._seen = self._mask = None
        answer = self._answer(output_tensor(found).float(), seen, inside(self.ranges, kwargs or args))
        if torch.compiler.is_exporting() and (_TOLD_APART or not torch.compiler.is_dynamo_compiling()):
            return {name: tensor for name, tensor in answer._asdict().items() if tensor is not None}
        return answer

    def _answer(self, outputs: Tensor, seen: Mapping[str, Tensor], in_range: Tensor | None) -> Answer:
        factors = [getattr(self, f"factors{number}") for number in range(len(self.layers))]
        log_h = log_leverages(seen, list(zip(self.layers, factors, strict=True)), self.order)
        ratios = relative(log_h, self.medians, self.source, self.exponent)
        spread = self.spread
        component = Component(
            outputs,
            outputs.new_zeros(()) if spread is None else by_leverage(self.record, outputs, ratios.gentle, spread),
            noise_variance=self.noise_variance,
            temperature=self.temperature,
            averaged=False,
            growth=ratios.growth,
            ratio=ratios.steep,
        )
        novelty = self.record.novelty(component)
        p_value = None
        if self.novelties is not None:
            # As `conformal.p_values`, whose search ONNX does not have.
            larger = (self.novelties >= novelty[:, None]).sum(dim=1)
            p_value = (1 + larger).float() / (len(self.novelties) + 1)
        own: dict[str, Tensor | None]
        if self.record.tempered:
            probs = self.record.probs(component, "probit", 0)
            of_classes = self.record.of_classes(probs)
            doubt = doubt_of_classes(of_classes)
            kept = None if self.reach is None else 1 - of_classes <= self.reach.unsqueeze(-1)
            own = {"probs": probs, "prediction_set": kept}
        else:
            mean, stddev = self.record.expected(component), self.record.total_variance(component).sqrt()
            doubt, own = doubt_of_numbers(stddev), {"mean": mean, "stddev": stddev}
            if self.reach is not None:
                reach = self.reach.view(stddev.shape[1:]) * stddev
                own |= {"lower": mean - reach, "upper": mean + reach}
        if self.rule is not None:
            answered = self.rule.answers(novelty if self.rule.by == "novelty" else doubt)
            own["answered"] = answered if in_range is None else answered & in_range
        return Answer(novelty, p_value, **own, in_range=in_range, layers=log_h - self.medians[:-2])

    def _see(self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a layer runs: keep its input."""
        if self._seen is not None:
            a = args[0] if args else next(iter(kwargs.values()))
            self._seen.setdefault(layer.module, []).append(layer.pooled(module, a, self._size, self._mask))

    def _typed(self, leaf: Any) -> Any:
        """Real numbers in the model's type."""
        own = next(self.model.parameters()).dtype
        return leaf.to(own) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != own else leaf

    def _apply(self, fn: Any, recurse: bool = True) -> Served:
        """Moves all of it, and changes the type of the model alone."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            moved = self._buffers[name]
            if tensor is not None and moved is not None:
                self._buffers[name] = tensor.to(moved.device)
        return self

    def save(self, path: str | os.PathLike[str], example: Any = None) -> None:
        """Write it as a `.pt2` file, which torch alone runs, or `.onnx`, which onnxruntime does.

        Either holds what `about` says, and takes batches of any size, on CUDA up to 65,535. Call
        `torch.export.load(path).module()` of a `.pt2` with a batch such as the example. The answer is a dict; the
        outputs of an `.onnx` have its names.

        Args:
            path: ends in one of these.
            example: a batch of at least two: a tensor, a tuple or a mapping; None makes one like the held-out inputs.
        """
        suffix = os.path.splitext(os.fspath(path))[1]
        if suffix not in _FORMATS:
            raise SettingError(f"{os.fspath(path)!r} must end in one of {_FORMATS}")
        own = next(self.model.parameters())
        example = example_of(self.ranges, own.dtype, own.device) if example is None else example
        if example is None:
            why = "the held-out inputs that calibrate saw differ in shape, or are not recorded"
            raise SettingError(f"pass an example, served.save(path, x): {why}")
        if suffix == ".onnx" and any(parameter.dtype == torch.bfloat16 for parameter in self.model.parameters()):
            raise SettingError("onnxruntime runs no bfloat16: served.half() or served.float() before it is saved")
        size = _first(example).shape[0]
        if size < 2:
            raise SettingError("the example batch must hold at least two examples, or the size of batches were fixed")
        # Attention on CUDA takes no more.
        batch = torch.export.Dim("batch", min=1, max=_LARGEST_ON_CUDA if own.is_cuda else None)

        def dynamic(leaf: Any) -> Any:
            return {0: batch} if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else None

        example = dict(example) if isinstance(example, Mapping) else example
        shapes: Any = {"args": (pytree.tree_map(dynamic, example),)}
        with torch.no_grad(), replacing(path) as temporary:
            answer = self(example)._asdict()
            program = torch.export.export(self, (example,), dynamic_shapes=shapes, strict=False)
            if suffix == ".pt2":
                about = {"bayesadam.json": json.dumps(self.about, ensure_ascii=False)}
                with open(temporary, "wb") as file:
                    torch.export.save(program, file, extra_files=about)
                return
            require("onnx")
            require("onnxscript")
            names = [name for name, tensor in answer.items() if tensor is not None]
            written = torch.onnx.export(program, output_names=names, dynamo=True, verbose=False)
            assert written is not None
            written.model.metadata_props["bayesadam"] = json.dumps(self.about, ensure_ascii=False)
            written.save(os.fspath(temporary))


def _at_mean(posterior: Posterior) -> nn.Module:
    """A copy of the model at the posterior's mean, which nothing trains."""
    parameters = posterior.parameters()
    model = copy.deepcopy(posterior.model).requires_grad_(False).eval()
    own = dict(model.named_parameters())
    for name, mu in posterior.mean.items():
        own[name].data = mu.detach().to(parameters[name]).clone()
    return model


def _first(inputs: Any) -> Tensor:
    """The first tensor of a batch."""
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf
    raise SettingError("pass the model's inputs as torch tensors: the batch holds none")
