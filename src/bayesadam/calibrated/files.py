"""Calibrated networks in files: safetensors, and programs for torch alone and for onnxruntime."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam import _storage as storage
from bayesadam._extras import require
from bayesadam._files import damage_named, replacing
from bayesadam._schema import Check, Count, NotNegative, Positive
from bayesadam.calibrated.fit import Fit, Report
from bayesadam.calibrated.ranges import InputRange, example_of
from bayesadam.errors import FileError, MissingFileError, SettingError
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.likelihoods.moments import rows
from bayesadam.predict.batches import is_ragged, numbers_of
from bayesadam.predict.leverage import Leverage
from bayesadam.predict.matrices import layers_of

if TYPE_CHECKING:
    from bayesadam.calibrated.module import Exported

AnyPath = str | os.PathLike[str]
_Range = Annotated[
    InputRange, Check(lambda one: isinstance(getattr(torch, one.dtype, None), torch.dtype), "of a type of torch")
]


class _LeverageHeader(TypedDict):
    source: str
    modules: list[str]


class _Header(TypedDict, total=False):
    exponent: NotNegative
    temperature: Positive
    likelihood: str
    dims: tuple[Count, Count]
    class_dim: int
    forward: bool
    ranges: tuple[_Range, ...]
    report: Report
    leverage: _LeverageHeader


_KIND = storage.Kind(
    "bayesadam.calibrated",
    "a calibrated network",
    ": give the file that net.save wrote; Posterior.load(path, model) reads that of posterior.save",
    schema=_Header,
)
_ABOUT = "bayesadam.json"
# The parts of a program's file: the graph, raw tensors, and what says where they are.
_MEMBERS = ("models/", "data/weights/weight_", "data/constants/tensor_", "extra/", "archive_", "byteorder", ".data/")
_TENSORS = ("weight_", "tensor_")
# Those of torch before 2.8.
_OLDER = ("version", "serialized_exported_program.json", f"extra_files/{_ABOUT}")
_LARGEST_ON_CUDA = 65_535
_MODEL, _PROBE = "model.", "probe"
_TABLES = ("spread", "noise_variance", "novelties", "leverages", "scores")
# How far onnxruntime's numbers may be from torch's.
_SAME = 1e-3
# What follows from an answer's numbers, and turns on their last digits.
_FOLLOWS = ("p_value", "answered", "set")


def write(path: AnyPath, fit: Fit, model: nn.Module, with_forward: bool, probe: Tensor | None) -> None:
    """Write the tensors of a network, of what held-out data added, and f of an example, to a safetensors file."""
    tensors = {} if probe is None else {_PROBE: probe}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise SettingError(
                f"the state dict has {name!r}, a {type(tensor).__name__}, and such files hold tensors: save a .pt2"
            )
        tensors[f"{_MODEL}{name}"] = tensor.contiguous()
    tensors |= {name: tensor for name in _TABLES if (tensor := getattr(fit, name)) is not None}
    header: dict[str, Any] = {name: getattr(fit, name) for name in ("exponent", "temperature")}
    header |= {"likelihood": fit.likelihood.name, "dims": list(fit.dims), "forward": with_forward}
    header["class_dim"] = fit.class_dim
    header["ranges"] = [vars(one) for one in fit.ranges]
    rule = fit.report.abstention
    about = {**vars(fit.report), "nll": dict(fit.report.nll), "abstention": None if rule is None else vars(rule)}
    header["report"] = about
    if (leverage := fit.leverage) is not None:
        assert leverage.medians is not None
        header["leverage"] = {"source": leverage.source, "modules": [layer.module for layer in leverage.layers]}
        names = _factor_names(header["leverage"]["modules"], len(leverage.means))
        tensors |= {"medians": leverage.medians} | dict(zip(names, leverage.factors, strict=True))
        tensors |= {f"mean{n}": mean for n, mean in enumerate(leverage.means)}
    storage.write(path, tensors, header, _KIND)


def read(path: AnyPath, model: nn.Module, with_forward: bool) -> tuple[nn.Module, Fit, Tensor | None]:
    """A copy of the model with the weights of a file, what held-out data added, and f of an example."""
    tensors, header = storage.read(path, _KIND)
    had = bool(header.get("forward"))
    if had != with_forward:
        given = "with forward=, pass the same" if had else "without forward=, leave it out"
        raise SettingError(f"{path} was calibrated {given}: code is not in the file")
    with damage_named(path, "net.save, or of another model"):
        network, weights = copy.deepcopy(model), storage.under(_MODEL, tensors)
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            # In the types of the file, such as bfloat16: in others the answers would be another network's.
            if name in weights:
                tensor.data = tensor.data.to(weights[name].dtype)
        network.load_state_dict(weights)
        return network, _unpacked_fit(header, tensors, network), tensors.get(_PROBE)


def _factor_names(modules: Sequence[str], near: int) -> list[str]:
    """Of the layers, and of the last ones within their class."""
    return [f"factor.{name}" for name in modules] + [f"within.{name}" for name in modules[len(modules) - near :]]


def _unpacked_fit(header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Fit:
    leverage = None
    if "leverage" in header:
        by_module = {layer.module: layer for layer in layers_of(model, dict(model.named_parameters()))}
        modules = header["leverage"]["modules"]
        means = tuple(tensors[f"mean{n}"] for n in range(len(modules)) if f"mean{n}" in tensors)
        factors = tuple(tensors[name] for name in _factor_names(modules, len(means)))
        layers, medians = tuple(by_module[m] for m in modules), tensors["medians"]
        # Files of 0.3 have the medians of two means; the third is the second where no classes are known.
        medians = torch.cat([medians, medians[-1:]]) if len(medians) == len(factors) + 2 else medians
        leverage = Leverage(layers, factors, header["leverage"]["source"], medians, means)
    return Fit(
        likelihood_of(header["likelihood"]),
        leverage,
        header["exponent"],
        header["temperature"],
        **{name: tensors.get(name) for name in _TABLES},
        dims=header["dims"],
        class_dim=header.get("class_dim", -1),
        ranges=header["ranges"],
        report=header["report"],
    )


# --- programs -------------------------------------------------------------------------------------------------------


def read_program(path: AnyPath) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    """A program, and what its file says of itself."""
    if not os.path.isfile(path):
        raise MissingFileError(f"no file at {os.fspath(path)}")
    extra = {_ABOUT: ""}
    try:
        _refuse_pickles(path)
        exported, about = torch.export.load(os.fspath(path), extra_files=extra), json.loads(extra[_ABOUT])
        likelihood_of(about["likelihood"])
        return exported, about
    except FileError:
        raise
    except Exception as error:
        raise FileError(f"{os.fspath(path)} is damaged, or no program of net.save: {error}") from None


def _refuse_pickles(path: AnyPath) -> None:
    """Refuse an archive that torch would unpickle, or run, any part of; `net.save` writes no such parts."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if len({name.lower() for name in names}) < len(names):
            raise FileError(f"{os.fspath(path)} holds two parts of one name")
        for name in names:
            member = name.partition("/")[2]
            if name.endswith(".pt"):
                # Tensors in plain containers.
                torch.load(io.BytesIO(archive.read(name)), weights_only=True)
            elif member.endswith("_config.json"):
                entries = json.loads(archive.read(name))["config"].values()
                safe = all(not e["use_pickle"] and e["path_name"].startswith(_TENSORS) for e in entries)
                if not safe:
                    raise FileError(f"{os.fspath(path)} holds pickles, which are never read: {member}")
            elif not member.startswith(_MEMBERS) and name not in _OLDER:
                raise FileError(f"{os.fspath(path)} holds {member!r}, which no program of net.save has")


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


def export(
    program: Exported, fit: Fit, model: nn.Module, path: AnyPath, example: object, about: dict[str, Any]
) -> None:
    """Write a program whose answer is a dict of tensors, traced with an example."""
    suffix = os.path.splitext(os.fspath(path))[1]
    first = numbers_of(model)
    example = example_of(fit.ranges, first.dtype, first.device) if example is None else example
    if example is None:
        why = "the held-out inputs that calibrate saw differ in shape, or are not recorded"
        raise SettingError(f"pass an example, net.save(path, x[:2]): {why}")
    if suffix == ".onnx" and any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        raise SettingError("onnxruntime runs no bfloat16: net.half() or net.float() before it is saved")
    leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    if not leaves or is_ragged(example):
        raise SettingError(
            "a program takes torch tensors with a row for each example, and the example is no such batch: pass one, or "
            "save a .safetensors, which takes lists of examples"
        )
    if (size := leaves[0].shape[0]) == 1:
        # The size of batches were fixed.
        example, size = pytree.tree_map(_doubled, example), 2
    # Attention on CUDA takes no more.
    batch = torch.export.Dim("batch", min=1, max=_LARGEST_ON_CUDA if first.is_cuda else None)

    def dynamic(leaf: object) -> object:
        return {0: batch} if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else None

    example = dict(example) if isinstance(example, Mapping) else example
    with torch.no_grad(), replacing(path) as temporary:
        names = list(program(example))
        try:
            exported = torch.export.export(
                program, (example,), dynamic_shapes=(pytree.tree_map(dynamic, example),), strict=False
            )
        except Exception as error:
            raise _not_traced("torch.export", error) from error
        if suffix == ".pt2":
            extra = {_ABOUT: json.dumps(about, ensure_ascii=False)}
            with open(temporary, "wb") as file:
                torch.export.save(exported, file, extra_files=extra)
            with open(temporary, "rb") as written_file:
                again = torch.export.load(written_file).module()
            _check(lambda batch: dict(again(batch)), "torch", program, example, size)
            return
        require("onnx")
        require("onnxscript")
        try:
            written = torch.onnx.export(exported, dynamo=True, verbose=False)
        except Exception as error:
            raise _not_traced("torch.onnx", error) from error
        assert written is not None
        _name_outputs(written.model.graph, names)
        written.model.metadata_props["bayesadam"] = json.dumps(about, ensure_ascii=False)
        written.save(os.fspath(temporary))
        if (run := _onnxruntime(temporary)) is not None:
            _check(run, "onnxruntime", program, example, size)


def _not_traced(exporter: str, error: Exception) -> SettingError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return SettingError(
        f"{exporter} does not take this network, and there is no file: {reason}. Leave out of its forward what depends "
        "on values, such as an if or .item(), or save a .safetensors, which needs no program"
    )


def _doubled(leaf: object) -> object:
    """A batch of one twice."""
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == 1 else leaf


def _onnxruntime(path: AnyPath) -> Callable[[object], dict[str, Tensor]] | None:
    """The file as a function, where onnxruntime is installed."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return None
    try:
        session = onnxruntime.InferenceSession(os.fspath(path))
    except Exception as error:
        raise FileError(f"onnxruntime does not run the file, which is not kept: {error}") from error
    inputs, outputs = ([one.name for one in nodes] for nodes in (session.get_inputs(), session.get_outputs()))

    def run(batch: object) -> dict[str, Tensor]:
        leaves = [leaf.cpu().numpy() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        answers = session.run(None, dict(zip(inputs, leaves, strict=True)))
        return {name: torch.from_numpy(answer) for name, answer in zip(outputs, answers, strict=True)}

    return run


def _trials(example: object, size: int, *, beyond: bool) -> Iterator[tuple[str, object]]:
    """The example, batches of other sizes, and `beyond` the held-out range with NaN among them."""

    def batch(n: int, factor: float = 1.0, first: float = 1.0) -> object:
        def changed(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != size:
                return leaf
            leaf = leaf[torch.arange(n, device=leaf.device) % size]
            if leaf.is_floating_point():
                leaf = factor * leaf
                leaf[0] *= first
            return leaf

        return pytree.tree_map(changed, example)

    yield "the example", example
    yield "a batch of one", batch(1)
    yield "a batch of three", batch(3)
    if beyond:
        yield "inputs a thousand times as large", batch(3, 1000.0)
        yield "NaN", batch(3, first=math.nan)


def _check(
    run: Callable[[object], dict[str, Tensor]], runtime: str, program: Exported, example: object, size: int
) -> None:
    """Run a file that was written, and raise where it is not what torch gives.

    Of examples whose f is not a number only `in_range` and `answered` are compared.
    """
    # Beyond the range a number may be an index, which on CUDA would end the process.
    on_cpu = next((leaf.device.type == "cpu" for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)), True)
    for words, batch in _trials(example, size, beyond=on_cpu):
        try:
            expected = program(batch)
        except Exception:
            if batch is example:
                raise
            # The network itself does not take such a batch.
            continue
        try:
            outputs = {name: tensor.to(expected[name].device) for name, tensor in run(batch).items()}
        except Exception as error:
            raise FileError(f"{runtime} does not run the file on {words}, and it is not kept: {error}") from error
        implied = program.implied(outputs)
        for name in expected:
            if (away := _away(name, outputs, expected, implied)) > _SAME:
                remedy = "" if runtime == "torch" else ": save a .pt2, which torch itself runs"
                raise FileError(
                    f"{runtime}'s {name!r} is {away:.3g} from torch's on {words}; the file is not kept{remedy}"
                )


def _away(
    name: str, outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor], implied: Mapping[str, Tensor]
) -> float:
    """How far an output is from torch's, relative to 1 and the largest number; ranks and sets from those implied."""
    output, exact, finite = outputs[name], expected[name], rows(expected["f_mean"]).isfinite().all(dim=1)
    if output.shape != exact.shape:
        return math.inf
    if name in _FOLLOWS:
        exact = torch.where(finite.view(-1, *[1] * (exact.dim() - 1)), implied[name], exact)
    if name not in ("in_range", "answered"):
        output, exact = output[finite], exact[finite]
    output, exact = output.double(), exact.double()
    # A variance is what is left of larger numbers.
    of_size = torch.cat([exact.flatten(), *([expected["mean"][finite].flatten()] if name == "stddev" else [])]).abs()
    away = (output - exact).abs() / (1 + max(of_size.nan_to_num(0, 0, 0).tolist(), default=0.0))
    same = (output == exact) | (output.isnan() & exact.isnan())
    return max(away.masked_fill(same, 0).nan_to_num(math.inf, math.inf).flatten().tolist(), default=0.0)
