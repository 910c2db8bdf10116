"""Calibrated networks in files: safetensors, and programs for torch alone and for onnxruntime."""

from __future__ import annotations

import copy
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

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
from bayesadam.predict.leverage import Leverage
from bayesadam.predict.tap import layers_of

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
    "bayesadam.calibrated", "a calibrated network", ": give the file that net.save wrote", schema=_Header
)
_ABOUT = "bayesadam.json"
# The parts of a program's file: the graph, raw tensors, and what says where they are.
_MEMBERS = ("models/", "data/weights/weight_", "data/constants/tensor_", "extra/", "archive_", "byteorder", ".data/")
_TENSORS = ("weight_", "tensor_")
# Those of torch before 2.8.
_OLDER = ("version", "serialized_exported_program.json", f"extra_files/{_ABOUT}")
_LARGEST_ON_CUDA = 65_535
_MODEL = "model."
_TABLES = ("spread", "noise_variance", "novelties", "scores")
# How far onnxruntime's numbers may be from torch's.
_SAME = 1e-3


def write(path: AnyPath, fit: Fit, model: nn.Module, with_forward: bool) -> None:
    """Write the tensors of a network, and of what held-out data added, to a safetensors file."""
    tensors = {f"{_MODEL}{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
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
        factors = zip(leverage.layers, leverage.factors, strict=True)
        tensors |= {"medians": leverage.medians} | {f"factor.{layer.module}": w for layer, w in factors}
    storage.write(path, tensors, header, _KIND)


def read(path: AnyPath, model: nn.Module, with_forward: bool) -> tuple[nn.Module, Fit]:
    """A copy of the model with the weights of a file, and what held-out data added."""
    tensors, header = storage.read(path, _KIND)
    had = bool(header.get("forward"))
    if had != with_forward:
        given = "with forward=, pass the same" if had else "without forward=, leave it out"
        raise SettingError(f"{path} was calibrated {given}: code is not in the file")
    with damage_named(path, "net.save, or of another model"):
        network = copy.deepcopy(model)
        network.load_state_dict(storage.under(_MODEL, tensors))
        return network, _unpacked_fit(header, tensors, network)


def _unpacked_fit(header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Fit:
    leverage = None
    if "leverage" in header:
        by_module = {layer.module: layer for layer in layers_of(model, dict(model.named_parameters()))}
        modules = header["leverage"]["modules"]
        layers, factors = tuple(by_module[m] for m in modules), tuple(tensors[f"factor.{m}"] for m in modules)
        leverage = Leverage(layers, factors, header["leverage"]["source"], tensors["medians"])
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
    program: nn.Module, fit: Fit, model: nn.Module, path: AnyPath, example: object, about: dict[str, Any]
) -> None:
    """Write a program whose answer is a dict of tensors, traced with an example."""
    suffix = os.path.splitext(os.fspath(path))[1]
    first = next(model.parameters())
    example = example_of(fit.ranges, first.dtype, first.device) if example is None else example
    if example is None:
        why = "the held-out inputs that calibrate saw differ in shape, or are not recorded"
        raise SettingError(f"pass an example, net.save(path, x[:2]): {why}")
    if suffix == ".onnx" and any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        raise SettingError("onnxruntime runs no bfloat16: net.half() or net.float() before it is saved")
    leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    if not leaves:
        raise SettingError("pass the model's inputs as torch tensors: the example holds none")
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
        exported = torch.export.export(
            program, (example,), dynamic_shapes=(pytree.tree_map(dynamic, example),), strict=False
        )
        if suffix == ".pt2":
            extra = {_ABOUT: json.dumps(about, ensure_ascii=False)}
            with open(temporary, "wb") as file:
                torch.export.save(exported, file, extra_files=extra)
            return
        require("onnx")
        require("onnxscript")
        written = torch.onnx.export(exported, dynamo=True, verbose=False)
        assert written is not None
        _name_outputs(written.model.graph, names)
        written.model.metadata_props["bayesadam"] = json.dumps(about, ensure_ascii=False)
        written.save(os.fspath(temporary))
        _check_onnx(temporary, program, example)


def _doubled(leaf: object) -> object:
    """A batch of one twice."""
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == 1 else leaf


def _check_onnx(path: AnyPath, program: nn.Module, example: object) -> None:
    """Run the file on the example where onnxruntime is installed, and raise where it is not what torch gives."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return
    leaves = [leaf.cpu().numpy() for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    try:
        session = onnxruntime.InferenceSession(os.fspath(path))
        names = [one.name for one in session.get_inputs()]
        outputs = session.run(None, dict(zip(names, leaves, strict=True)))
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
