"""Keras 3: the zip that `model.save("model.keras")` writes, and the folder that it writes with `zipped=False`.

`model.weights.h5` has a group for each layer, `layers/<its class in snake case, with a number from the second on>`,
with its variables in `vars/0, 1, …`; and the optimiser's in one list, `optimizer/vars/0, 1, …`: the steps, the learning
rate unless that is a schedule, then what it keeps of the trainable variables, in their order. `config.json` has that
order, the layers', and the optimiser's settings. Nothing has the variables' names, so every shape is compared.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.contents import Contents, Recorded
from bayesadam.readers.formats.registry import Format, refuse_keys
from bayesadam.readers.formats.torch_files import (
    as_file,
    as_memory,
    damage_named,
    inside,
    mapped,
    names_in_zip,
    zip_members,
)
from bayesadam.readers.match import REMEDY, AmbiguousError, Slot, assign

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_AGAIN = "Save the whole model after training with Keras' model.save('model.keras')"
_INTEGERS = {"<i4": torch.int32, "<i8": torch.int64}
_DTYPES = {"<f2": torch.float16, "<f4": torch.float32, "<f8": torch.float64, "bfloat16": torch.bfloat16, **_INTEGERS}
# The layers inside a layer in the order in which it makes them; the file has them in that of the alphabet.
_MADE = (("forward_layer", "backward_layer"), ("query_dense", "key_dense", "value_dense", "output_dense"))
# Where the name of a group is put: no group has this one.
_NAME = "/name"

Tree = Mapping[str, Any]


class _Variable(NamedTuple):
    """A variable of real numbers; whether it can be trained, and whether it is by config.json."""

    name: str
    value: Tensor
    trainable: bool = True
    trained: bool = True


def _load(view: memoryview) -> Tree:
    """An HDF5 file as nested dictionaries of tensors, mapped where they lie; None for numbers of other types."""
    if bytes(view[: len(_HDF5)]) != _HDF5:
        raise FileError(f"Keras keeps its state in HDF5, and {_WEIGHTS} is something else. {_AGAIN}")
    h5py, left = require("h5py"), len(view)
    seen: set[int] = set()

    def opened(group: Any) -> Tree:
        found: dict[str, Any] = {_NAME: group.attrs.get("name")}
        for key in group:
            path = f"{group.name.rstrip('/')}/{key}"
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                raise FileError(f"{path} is a link that may lead out of the file, and is not followed. {_AGAIN}")
            item = group[key]
            address = h5py.h5o.get_info(item.id).addr
            if address in seen:
                raise FileError(f"{path} is in the file under two names, which Keras never writes. {_AGAIN}")
            seen.add(address)
            found[key] = opened(item) if isinstance(item, h5py.Group) else tensor(item, path)
        return found

    def tensor(data: Any, path: str) -> Tensor | None:
        nonlocal left
        start, stored = data.id.get_offset(), data.id.get_storage_size()
        declared = math.prod(data.shape) * data.dtype.itemsize
        left -= declared
        if data.external or data.is_virtual or stored != declared or left < 0 or (start is None and stored):
            raise FileError(
                f"{path} declares {declared} bytes, and {stored} of the file's {len(view)} are there: compressed or "
                f"elsewhere, which Keras never writes. {_AGAIN}"
            )
        kind = _DTYPES.get(data.attrs.get("dtype") if data.dtype.kind == "V" else data.dtype.str)
        if kind is None:
            return None
        memory = as_memory(inside(view, start or 0, stored), kind.itemsize)
        return torch.empty(0, dtype=kind).set_(memory).view(data.shape)

    with h5py.File(as_file(view), "r") as file:
        return opened(file)


def _every(tree: Tree, path: str = "") -> Iterator[_Variable]:
    """All variables of real numbers, in alphabetical order."""
    for key, held in tree.items():
        if isinstance(held, Mapping):
            yield from _every(held, f"{path}{key}.")
        elif isinstance(held, Tensor) and held.is_floating_point():
            yield _Variable(path + key, held)


def _ordered(tree: Tree, config: Mapping[str, Any], path: str = "") -> Iterator[_Variable]:
    """A layer's variables in Keras' order, its own first; what is not the layer that `config` describes is left out."""
    settings, kind, own = config["config"], config["class_name"], tree.get("vars", {})
    name = own.get(_NAME)
    if not _is_keras_own(config) or (name and name != settings.get("name", name)):
        return
    if settings.get("lora_rank") or settings.get("quantization_config"):
        raise FileError(
            f"layer {settings.get('name')!r} has a LoRA or is quantised: what was trained is not in the file"
        )
    # The trainable ones come first; statistics of the data are not trained.
    trainable = 0 if kind == "Normalization" else len(own)
    if kind == "BatchNormalization":
        trainable = bool(settings.get("scale", True)) + bool(settings.get("center", True))
    for number in range(len(own)):
        held = own.get(str(number))
        if held is not None and held.is_floating_point():
            trained = number < trainable and bool(settings.get("trainable", True))
            yield _Variable(f"{path}vars.{number}", held, number < trainable, trained)
    if kind in ("Sequential", "Functional"):
        for key, layer in _group_names(settings["layers"]).items():
            if key in tree.get("layers", {}):
                yield from _ordered(tree["layers"][key], layer, f"{path}layers.{key}.")
        return
    groups = {k: held for k, held in tree.items() if isinstance(held, Mapping) and k != "vars" and any(_every(held))}
    order = next((keys for keys in (*_MADE, tuple(groups)[:1]) if groups.keys() <= set(keys)), ())
    for key in (key for key in order if key in groups):
        # A wrapper describes what it wraps; a layer that makes others does not, and they are frozen with it.
        inner = settings.get(key) or settings.get("layer")
        made = {"module": "keras", "class_name": "", "config": {"trainable": settings.get("trainable", True)}}
        yield from _ordered(groups[key], inner if isinstance(inner, Mapping) else made, f"{path}{key}.")


def _is_keras_own(config: Mapping[str, Any]) -> bool:
    return str(config.get("module")).partition(".")[0] == "keras"


def _group_names(layers: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Layers by the names of their groups; an operation is no layer."""
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
            f"it was trained with {kind}{' and weight decay' if decay else ''}, which is not read: train with Keras' "
            "Adam or AdamW, or with its RMSprop or Adagrad without weight decay"
        )
    group = {"eps": settings["epsilon"], "weight_decay": decay}
    if kind == "Adagrad":
        return group | {"initial_accumulator_value": settings["initial_accumulator_value"]}, [("sum",)]
    if kind == "RMSprop":
        momentum, centered = settings["momentum"] > 0, bool(settings["centered"])
        more = [("momentum_buffer",)] * momentum + [("grad_avg",)] * centered
        return group | {"alpha": settings["rho"], "centered": centered}, [("square_avg",), *more]
    # Keras decays the weights apart from the gradient in its Adam, too.
    amsgrad, betas = bool(settings["amsgrad"]), (settings["beta_1"], settings["beta_2"])
    group |= {"betas": betas, "amsgrad": amsgrad, "decoupled_weight_decay": True}
    return group, [("exp_avg", "exp_avg_sq"), *[("max_exp_avg_sq",)] * amsgrad]


def _states(tree: Tree, saved: Mapping[str, Any]) -> tuple[Recorded, dict[str, Any], list[dict[str, Tensor]]]:
    """What the optimiser is, the entries of torch's group, and the states in the order of the trained variables."""
    kind, settings = saved["class_name"], saved["config"]
    if kind == "LossScaleOptimizer":
        return _states(tree["inner_optimizer"], settings["inner_optimizer"])
    if not _is_keras_own(saved):
        raise FileError(f"it was trained with {kind}, an optimiser of your own: train with Keras' Adam or AdamW")
    group, lists = _layout(kind, settings)
    # The weights' average and the gradients that are added up come before the moments, and are not read.
    batches = settings.get("gradient_accumulation_steps")
    lists = [("",)] * (bool(settings.get("use_ema")) + bool(batches)) + lists
    head = 1 if isinstance(settings["learning_rate"], Mapping) else 2
    values = [tree["vars"][str(number)] for number in range(len(tree["vars"].keys() - {_NAME}))]
    count, rest = divmod(len(values) - head, sum(map(len, lists)))
    if rest or count < 0 or any(value.dim() for value in values[:head]) or values[0].is_floating_point():
        raise FileError(
            f"its {kind} has {len(values)} variables, where {head} numbers and {sum(map(len, lists))} for each trained "
            f"variable are expected: the layout is not known. {_AGAIN}"
        )
    steps = int(values[0]) // (batches or 1)
    states: list[dict[str, Tensor]] = [{} for _ in range(count)]
    kept = iter(values[head:])
    for keys, state in itertools.product(lists, states):
        state |= {key: next(kept) for key in keys}
        if len({value.shape for value in state.values()}) > 1:
            shapes = {key: tuple(value.shape) for key, value in state.items() if key}
            raise FileError(f"its {kind} has {shapes} for one variable: the layout is not known. {_AGAIN}")
    for state in states:
        state.pop("", None)
        state["step"] = torch.tensor(float(steps))
    return Recorded(step=steps, optimizer=kind), group, states


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


def _read_keras(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    refuse_keys(path, "Keras saves one model and its optimiser", weights_key=weights_key, optimizer_key=optimizer_key)
    try:
        with damage_named("the file", "Keras"):
            if path.is_dir():
                members = {name: mapped(path / name) for name in (_CONFIG, _WEIGHTS)}
            else:
                members = zip_members(mapped(path))
            return _contents(json.loads(bytes(members[_CONFIG]).decode("utf-8")), _load(members[_WEIGHTS]))
    except FileError as error:
        raise FileError(f"{path}: {error}") from None


def _is_keras(path: Path, head: bytes) -> bool:
    if path.is_dir():
        return (path / _CONFIG).is_file() and (path / _WEIGHTS).is_file()
    return names_in_zip(path, head) >= {_CONFIG, _WEIGHTS}


def _refuse_hdf5(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    raise FileError(
        f"{path} is an HDF5 file alone, which says neither which optimiser it was, nor β₂, nor the layers' order. "
        "In Keras, compile the model, model.optimizer.build(model.trainable_variables), model.load_weights(…), and "
        "model.save('model.keras'): that is read"
    )


KERAS = Format("keras", _is_keras, _read_keras)
HDF5 = Format("HDF5", lambda path, head: head.startswith(_HDF5), _refuse_hdf5)
