"""Calibrated networks as programs: `.pt2` for torch alone, `.onnx` for onnxruntime."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam.calibrated.answer import Answer
from bayesadam.calibrated.fit import Fit
from bayesadam.calibrated.ranges import example_of
from bayesadam.errors import FileError, MissingFileError, SettingError
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.likelihoods.conformal import threshold
from bayesadam.likelihoods.moments import rows
from bayesadam.predict.batches import is_ragged, numbers_of

AnyPath = str | os.PathLike[str]
SUFFIXES = (".pt2", ".onnx")
_ABOUT = "bayesadam.json"
# The parts of a program's file: the graph, raw tensors, and what says where they are.
_MEMBERS = ("models/", "data/weights/weight_", "data/constants/tensor_", "extra/", "archive_", "byteorder", ".data/")
_TENSORS = ("weight_", "tensor_")
# Those of torch before 2.8.
_OLDER = ("version", "serialized_exported_program.json", f"extra_files/{_ABOUT}")
_LARGEST_ON_CUDA = 65_535
# How far onnxruntime's numbers may be from torch's.
_SAME = 1e-3
# What follows from an answer's numbers, and turns on their last digits.
_FOLLOWS = ("p_value", "answered", "set")


class Judging(Protocol):
    """What a program is made of: a calibrated network."""

    fit: Fit
    scores: Tensor | None

    @property
    def model(self) -> nn.Module:
        """The network alone."""

    def judged(self, answer: Answer) -> Answer:
        """An answer with what follows from its numbers."""


class Exported(nn.Module):
    """A calibrated network with a dict of tensors as its answer, which needs no class of this package."""

    reach: Tensor | None

    def __init__(self, net: Judging, level: float) -> None:
        super().__init__()
        self.net: Any = net
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


# --- out of a file --------------------------------------------------------------------------------------------------


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


def export(program: Exported, path: AnyPath, example: object, about: dict[str, Any]) -> None:
    """Write a program whose answer is a dict of tensors, traced with an example."""
    suffix, model = os.path.splitext(os.fspath(path))[1], program.net.model
    first = numbers_of(model)
    example = example_of(program.net.fit.ranges, first.dtype, first.device) if example is None else example
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
            # The file would hold the example, and all of the memory that it is a view of.
            blank = pytree.tree_map(
                lambda leaf: leaf.new_zeros(leaf.shape) if isinstance(leaf, Tensor) else leaf, example
            )
            exported.example_inputs = (blank,), {}
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
