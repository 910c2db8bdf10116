"""Calibrated networks in files: safetensors, and programs for torch alone and for onnxruntime."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam import _storage as storage
from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam._version import __version__
from bayesadam.calibrated.answer import Fit, Report
from bayesadam.calibrated.ranges import InputRange, example_of
from bayesadam.errors import FileError, SettingError
from bayesadam.likelihoods import ClassLikelihood
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.likelihoods.abstention import Abstention
from bayesadam.likelihoods.conformal import threshold
from bayesadam.predict.leverage import Leverage
from bayesadam.predict.tap import layers_of

if TYPE_CHECKING:
    from bayesadam.calibrated.module import Calibrated

AnyPath = str | os.PathLike[str]
_KIND = storage.Kind("bayesadam.calibrated", "a calibrated network", ": give the file that net.save wrote")
_PROGRAMS = (".pt2", ".onnx")
_LARGEST_ON_CUDA = 65_535
_MODEL = "model."
_TABLES = ("spread", "noise_variance", "novelties", "scores")
# How far onnxruntime's numbers may be from torch's.
_SAME = 1e-3


def save(net: Calibrated, path: AnyPath, example: Any, level: float) -> None:
    """Write it in the format of the path's ending."""
    suffix = os.path.splitext(os.fspath(path))[1]
    if suffix == ".safetensors":
        tensors, header = _packed(net)
        storage.write(path, tensors, header, _KIND)
    elif suffix in _PROGRAMS:
        _export(net, path, suffix, example, level)
    else:
        raise SettingError(f"{os.fspath(path)!r} must end in .safetensors, .pt2 or .onnx")


def read(path: AnyPath, model: nn.Module, with_forward: bool) -> tuple[nn.Module, Fit]:
    """A copy of the model with the weights of a file, and what held-out data added."""
    tensors, header = storage.read(path, _KIND)
    had = bool(header.get("forward"))
    if had != with_forward:
        given = "with forward=, pass the same" if had else "without forward=, leave it out"
        raise SettingError(f"{path} was calibrated {given}: code is not in the file")
    try:
        network = copy.deepcopy(model)
        network.load_state_dict(storage.under(_MODEL, tensors))
        return network, _unpacked_fit(header, tensors, network)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"{path} is damaged, or of another model: {error}") from None


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
    if not leaves:
        raise SettingError("pass the model's inputs as torch tensors: the example holds none")
    if (size := leaves[0].shape[0]) == 1:
        # The size of batches were fixed.
        example, size = pytree.tree_map(lambda leaf: _doubled(leaf), example), 2
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
        _check_onnx(temporary, program, example)


def _doubled(leaf: Any) -> Any:
    """A batch of one twice."""
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == 1 else leaf


def _check_onnx(path: AnyPath, program: _Program, example: Any) -> None:
    """Run the file on the example where onnxruntime is installed, and raise where it is not what torch gives."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return
    try:
        session = onnxruntime.InferenceSession(os.fspath(path))
        given = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
        feed = {one.name: leaf.cpu().numpy() for one, leaf in zip(session.get_inputs(), given, strict=True)}
        outputs = session.run(None, feed)
    except Exception as error:
        raise FileError(f"onnxruntime does not run the file, which is not kept: {error}") from error
    for (name, expected), output in zip(program(example).items(), outputs, strict=True):
        exact = expected.cpu().double()
        away = (torch.from_numpy(output).double() - exact).abs()
        if not bool((away <= _SAME * (1 + exact.abs())).all()) and bool(exact.isfinite().all()):
            raise FileError(
                f"onnxruntime's {name!r} is {float(away.max()):.3g} from torch's on the example; the file is not kept: "
                "save a .pt2, which torch itself runs"
            )
