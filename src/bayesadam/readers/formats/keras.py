"""Keras 3: the zip that `model.save("model.keras")` writes, and the folder that it writes with `zipped=False`.

`model.weights.h5` has a group for each layer, `layers/<its class in snake case, with a number from the second on>`, with its
variables in `vars/0, 1, …`; and the optimiser's in one list, `optimizer/vars/0, 1, …`: the steps, the learning rate unless that
is a schedule, then what it keeps of the trainable variables, in their order. `config.json` has that order, the layers', and the
optimiser's settings. Nothing has the variables' names, so every shape is compared.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.contents import Contents, Recorded
from bayesadam.readers.formats.files import DAMAGED, damaged
from bayesadam.readers.formats.registry import Format, refuse_keys
from bayesadam.readers.formats.torch_files import Part, zip_members
from bayesadam.readers.pairing import REMEDY, AmbiguousError, Slot, assign

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_AGAIN = "Save the whole model after training with Keras' model.save('model.keras')"
_INTEGERS = {"<i4": torch.int32, "<i8": torch.int64}
_DTYPES = {"<f2": torch.float16, "<f4": torch.float32, "<f8": torch.float64, "bfloat16": torch.bfloat16, **_INTEGERS}
# The layers inside a layer in the order in which it makes them; the file has them in that of the alphabet.
_MADE = (("forward_layer", "backward_layer"), ("query_dense", "key_dense", "value_dense", "output_dense"))
# What Keras keeps before the moments where it is told to: the weights' average, the gradients that are added up.
_NOT_READ = ("average", "gradient")
# Where the name of a group is put: no group has this one.
_NAME = "/name"

Tree = Mapping[str, Any]


class _Variable(NamedTuple):
    """A variable of real numbers; whether it can be trained, and whether it is by config.json."""

    name: str
    value: Tensor
    trainable: bool = True
    trained: bool = True


def _load(part: Part) -> Tree:
    """An HDF5 file as nested dictionaries of tensors, mapped where they lie; None for numbers of other types."""
    if part.length < len(_HDF5) or part.inside(0, len(_HDF5)).read() != _HDF5:
        raise FileError(f"Keras keeps its state in HDF5, and {_WEIGHTS} is something else. {_AGAIN}")
    h5py, left = require("h5py"), part.length
    seen: set[int] = set()

    def opened(group: Any) -> Tree:
        found: dict[str, Any] = {_NAME: group.attrs.get("name")}
        for key in group:
            place = f"{group.name.rstrip('/')}/{key}"
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                raise FileError(f"{place} is a link that may lead out of the file, and is not followed. {_AGAIN}")
            item = group[key]
            address = h5py.h5o.get_info(item.id).addr
            if address in seen:
                raise FileError(f"{place} is in the file under two names, which Keras never writes. {_AGAIN}")
            seen.add(address)
            found[key] = opened(item) if isinstance(item, h5py.Group) else tensor(item, place)
        return found

    def tensor(data: Any, place: str) -> Tensor | None:
        nonlocal left
        start, stored = data.id.get_offset(), data.id.get_storage_size()
        declared = math.prod(data.shape) * data.dtype.itemsize
        left -= declared
        if data.external or data.is_virtual or stored != declared or left < 0 or (start is None and stored):
            raise FileError(
                f"{place} declares {declared} bytes, and {stored} of the file's {part.length} are there: compressed, absent "
                f"or in another file, which Keras never writes. {_AGAIN}"
            )
        kind = _DTYPES.get(data.attrs.get("dtype") if data.dtype.kind == "V" else data.dtype.str)
        if kind is None:
            return None
        memory = part.inside(start or 0, stored).memory(kind.itemsize)
        return torch.empty(0, dtype=kind).set_(memory).view(data.shape)

    with h5py.File(part.as_file(), "r") as file:
        return opened(file)


def _every(tree: Tree, path: str = "") -> Iterator[_Variable]:
    """All variables of real numbers, in the order of the alphabet."""
    for key, held in tree.items():
        if isinstance(held, Mapping):
            yield from _every(held, f"{path}{key}.")
        elif isinstance(held, Tensor) and held.is_floating_point():
            yield _Variable(path + key, held)


def _ordered(tree: Tree, config: Mapping[str, Any], path: str = "") -> Iterator[_Variable]:
    """A layer's variables in the order of Keras' `variables`: its own, then those of the layers in it.

    What is no layer of Keras' own, or not the one that `config` describes, is left out.
    """
    settings, kind, own = config["config"], config["class_name"], tree.get("vars", {})
    name = own.get(_NAME)
    if str(config.get("module")).partition(".")[0] != "keras" or (name and name != settings.get("name", name)):
        return
    if settings.get("lora_rank") or settings.get("quantization_config"):
        called = settings.get("name")
        raise FileError(f"layer {called!r} has a LoRA or is quantised: what was trained is not in the file")
    # The trainable ones come first; statistics of the data are not trained.
    trainable = 0 if kind == "Normalization" else len(own)
    if kind == "BatchNormalization":
        trainable = bool(settings.get("scale", True)) + bool(settings.get("center", True))
    for number in range(len(own)):
        held = own.get(str(number))
        if held is not None and held.is_floating_point():
            trained = number < trainable and bool(settings.get("trainable", True))
            yield _Variable(f"{path}vars.{number}", held, number < trainable, trained)
    for key, inner, layer in _inside(tree, settings, kind):
        yield from _ordered(inner, layer, f"{path}{key}.")


def _inside(tree: Tree, settings: Mapping[str, Any], kind: str) -> list[tuple[str, Tree, Mapping[str, Any]]]:
    """The layers in a layer that have variables, in their order: group, content and configuration; none where it is unknown."""
    if kind in ("Sequential", "Functional"):
        held, layers = tree.get("layers", {}), _group_names(settings["layers"])
        return [(f"layers.{key}", held[key], layer) for key, layer in layers.items() if any(_every(held.get(key, {})))]
    groups = {
        key: held for key, held in tree.items() if isinstance(held, Mapping) and key != "vars" and any(_every(held))
    }
    order = next((keys for keys in (*_MADE, tuple(groups)[:1]) if groups.keys() <= set(keys)), ())
    # A wrapper describes what it wraps; a layer that makes others does not, and they are frozen with it.
    made = {"module": "keras", "class_name": "", "config": {"trainable": settings.get("trainable", True)}}
    described = {key: settings.get(key) or settings.get("layer") for key in groups}
    configs = {key: found if isinstance(found, Mapping) else made for key, found in described.items()}
    return [(key, groups[key], configs[key]) for key in order if key in groups]


def _group_names(layers: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Layers by the names of their groups; an operation is no layer.

    >>> list(_group_names([{"class_name": name} for name in ("Conv2D", "LSTM", "LayerNormalization", "LSTM")]))
    ['conv2d', 'lstm', 'layer_normalization', 'lstm_1']
    """
    used: Counter[str] = Counter()
    found: dict[str, Mapping[str, Any]] = {}
    for layer in layers:
        if not str(layer.get("module")).startswith(("keras.src.ops", "keras.ops")):
            word = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", layer["class_name"]))
            word = re.sub(r"([a-z])([A-Z])", r"\1_\2", word).lower()
            found[f"{word}_{used[word]}" if used[word] else word] = layer
            used[word] += 1
    return found


def _layout(kind: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """The entries of torch's group, and of each variable's state: list after list, the entries of one list in turn."""
    decay = float(settings.get("weight_decay") or 0.0)
    if kind not in ("Adam", "AdamW", "RMSprop", "Adagrad") or (decay and "Adam" not in kind):
        raise FileError(
            f"it was trained with {kind}{' and weight decay' if decay else ''}, which is not read: train with Keras' Adam or "
            "AdamW, or with its RMSprop or Adagrad without weight decay"
        )
    group = {"eps": settings["epsilon"], "weight_decay": decay}
    if kind == "Adagrad":
        return group | {"initial_accumulator_value": settings["initial_accumulator_value"]}, [("sum",)]
    if kind == "RMSprop":
        centered = bool(settings["centered"])
        lists = [("square_avg",), ("momentum_buffer",), ("grad_avg",)]
        group |= {"alpha": settings["rho"], "centered": centered}
        return group, [
            keys for keys, kept in zip(lists, (True, settings["momentum"] > 0, centered), strict=True) if kept
        ]
    # Keras decays the weights apart from the gradient in its Adam, too.
    amsgrad, betas = bool(settings["amsgrad"]), (settings["beta_1"], settings["beta_2"])
    group |= {"betas": betas, "amsgrad": amsgrad, "decoupled_weight_decay": True}
    return group, [("exp_avg", "exp_avg_sq"), *([("max_exp_avg_sq",)] if amsgrad else [])]


def _states(tree: Tree, saved: Mapping[str, Any]) -> tuple[Recorded, dict[str, Any], list[dict[str, Tensor]]]:
    """What the optimiser is, the entries of torch's group, and the states in the order of the variables that it trained."""
    kind, settings = saved["class_name"], saved["config"]
    if kind == "LossScaleOptimizer":
        return _states(tree["inner_optimizer"], settings["inner_optimizer"])
    if str(saved.get("module")).partition(".")[0] != "keras":
        raise FileError(f"it was trained with {kind}, an optimiser of your own: train with Keras' Adam or AdamW")
    group, lists = _layout(kind, settings)
    batches = settings.get("gradient_accumulation_steps")
    before = [(key,) for key, kept in zip(_NOT_READ, (settings.get("use_ema"), batches), strict=True) if kept]
    lists = [*before, *lists]
    head = 1 if isinstance(settings["learning_rate"], Mapping) else 2
    values = [tree["vars"][str(number)] for number in range(len(tree["vars"].keys() - {_NAME}))]
    count, rest = divmod(len(values) - head, sum(map(len, lists)))
    if rest or count < 0 or any(value.dim() for value in values[:head]) or values[0].is_floating_point():
        raise FileError(
            f"its {kind} has {len(values)} variables, where {head} numbers and {sum(map(len, lists))} for each variable that it "
            f"trained are expected: the layout is not known. {_AGAIN}"
        )
    states: list[dict[str, Tensor]] = [{} for _ in range(count)]
    kept = iter(values[head:])
    for keys in lists:
        for state in states:
            state |= {key: next(kept) for key in keys}
    mixed = next((state for state in states if len({value.shape for value in state.values()}) > 1), None)
    if mixed is not None:
        shapes = {key: tuple(value.shape) for key, value in mixed.items()}
        raise FileError(f"its {kind} has {shapes} for one variable: the layout is not known. {_AGAIN}")
    steps = int(values[0]) // (batches or 1)
    read = [{key: value for key, value in state.items() if key not in _NOT_READ} for state in states]
    counted = [{**state, "step": torch.tensor(float(steps))} for state in read]
    return Recorded(step=steps, optimizer=kind), group, counted


def _keys(states: Sequence[Mapping[str, Tensor]], variables: Sequence[_Variable], ordered: bool) -> Sequence[str | int]:
    """The names of the variables behind the states; their numbers where several answers are possible."""
    shapes = [next(iter(state.values())).shape for state in states]
    trained = {variable.name: variable.value.shape for variable in variables if variable.trained}
    if ordered and list(trained.values()) == shapes:
        return list(trained)
    # A layer may have been frozen, or released, after the optimiser was given its variables.
    slots = [Slot(number, 0, shape, True) for number, shape in enumerate(shapes)]
    candidates = {variable.name: variable.value.shape for variable in variables if variable.trainable}
    try:
        found = assign(slots, candidates, ordered=ordered, in_order=False)
    except AmbiguousError:
        return range(len(shapes))
    except MatchError as error:
        raise FileError(f"{str(error).removesuffix(REMEDY)}{_AGAIN}") from None
    return [found[number] for number in range(len(shapes))]


def _contents(config: Mapping[str, Any], tree: Tree) -> Contents:
    model = {key: held for key, held in tree.items() if key != "optimizer"}
    every, variables = list(_every(model)), list(_ordered(model, config))
    ordered = sorted(one.name for one in variables) == sorted(one.name for one in every)
    variables = variables if ordered else every
    optimizer, recorded = None, Recorded()
    notes: list[str] = []
    if "optimizer" in tree:
        saved = (config.get("compile_config") or {}).get("optimizer")
        if not isinstance(saved, Mapping):
            raise FileError(f"{_CONFIG} does not say which optimiser it was: compile the model with it. {_AGAIN}")
        recorded, group, states = _states(tree["optimizer"], saved)
        keys = _keys(states, variables, ordered)
        if ordered:
            notes += [f"the optimiser's variables are in the order of the layers in {_CONFIG}"]
        if frozen := sum(variable.trainable and not variable.trained for variable in variables):
            notes += [f"{frozen} variables are frozen by {_CONFIG}, which has it as it was when the model was saved"]
        optimizer = {"state": dict(zip(keys, states, strict=True)), "param_groups": [{**group, "params": list(keys)}]}
    return Contents(
        weights={variable.name: variable.value for variable in variables} or None,
        optimizer=optimizer,
        summary=f"{len(variables)} variables of a Keras model" + " without its optimiser" * (optimizer is None),
        ordered=ordered,
        recorded=recorded,
        notes=tuple(notes),
    )


@contextmanager
def _parts(path: Path) -> Iterator[tuple[Part, Part]]:
    if path.is_dir():
        with Part.of(path / _CONFIG) as config, Part.of(path / _WEIGHTS) as weights:
            yield config, weights
    else:
        with Part.of(path) as part:
            members = zip_members(part)
            yield members[_CONFIG], members[_WEIGHTS]


def _read_keras(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    refuse_keys(path, "Keras saves one model and its optimiser", weights_key=weights_key, optimizer_key=optimizer_key)
    try:
        with _parts(path) as (config, weights):
            return _contents(json.loads(config.read().decode("utf-8")), _load(weights))
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    except DAMAGED as error:
        raise damaged(path, "Keras", error) from error


def _is_keras(path: Path, head: bytes) -> bool:
    if path.is_dir():
        return (path / _CONFIG).is_file() and (path / _WEIGHTS).is_file()
    if not head.startswith(b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return {_CONFIG, _WEIGHTS} <= set(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False


def _refuse_hdf5(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    raise FileError(
        f"{path} is an HDF5 file alone. Where Keras' model.save_weights wrote it, it has the optimiser's variables, but says "
        "neither which optimiser it was, nor β₂, nor the order of the layers. In Keras, compile the model as it was, then "
        "model.optimizer.build(model.trainable_variables), model.load_weights(…) and model.save('model.keras'): that is read"
    )


KERAS = Format("keras", _is_keras, _read_keras)
HDF5 = Format("HDF5", lambda path, head: head.startswith(_HDF5), _refuse_hdf5)
