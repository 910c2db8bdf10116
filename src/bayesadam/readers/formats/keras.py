"""Keras 3: the zip that `model.save("model.keras")` writes, and the folder that it writes with `zipped=False`.

`model.weights.h5` has a group for each layer, `layers/<its class in snake case, with a number from the second on>`,
with its variables in `vars/0, 1, …`; and the optimiser's in one list, `optimizer/vars/0, 1, …`: the steps, the learning
rate unless that is a schedule, then Adam's two moments of each trainable variable. `config.json` has the order of the
layers and the optimiser's settings. Nothing has the variables' names, so every shape is compared.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam.errors import FileError
from bayesadam.readers.formats.contents import Contents, Recorded
from bayesadam.readers.formats.registry import Format, refuse_keys
from bayesadam.readers.formats.torch_files import as_file, damage_named, mapped, names_in_zip, zip_members

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_AGAIN = "Save the whole model after training with Keras' model.save('model.keras')"
_EXTRA_LISTS = ("amsgrad", "use_ema", "gradient_accumulation_steps")
# Where the name of a group is put: no group has this one.
_NAME = "/name"

Tree = Mapping[str, Any]


def _load(view: memoryview) -> Tree:
    """An HDF5 file as nested dictionaries of tensors; None for numbers of types that are not read."""
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
        stored, declared = data.id.get_storage_size(), math.prod(data.shape) * data.dtype.itemsize
        left -= declared
        if data.external or data.is_virtual or stored != declared or left < 0:
            raise FileError(
                f"{path} declares {declared} bytes, and {stored} of the file's {len(view)} are there: compressed or "
                f"elsewhere, which Keras never writes. {_AGAIN}"
            )
        known = data.dtype.str in ("<f2", "<f4", "<f8", "<i4", "<i8")
        return torch.as_tensor(data[()]) if known else None

    with h5py.File(as_file(view), "r") as file:
        return opened(file)


def _every(tree: Tree, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All variables of real numbers, in alphabetical order."""
    for key, held in tree.items():
        if isinstance(held, Mapping):
            yield from _every(held, f"{path}{key}.")
        elif isinstance(held, Tensor) and held.is_floating_point():
            yield path + key, held


def _trained(tree: Tree, config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, bool]]:
    """A layer's variables in Keras' order, its own first, and whether each is trained."""
    settings, kind, own = config["config"], config["class_name"], tree.get("vars", {})
    name = own.get(_NAME)
    if not str(config.get("module")).startswith("keras") or (name and name != settings.get("name", name)):
        # A layer of the user's own, or not the one that is described, may have any order.
        return
    # The trainable ones come first; statistics of the data are not trained.
    trainable = 0 if kind == "Normalization" else len(own)
    if kind == "BatchNormalization":
        trainable = bool(settings.get("scale", True)) + bool(settings.get("center", True))
    for number in range(len(own)):
        if isinstance(own.get(str(number)), Tensor) and own[str(number)].is_floating_point():
            yield f"{path}vars.{number}", number < trainable and bool(settings.get("trainable", True))
    used: Counter[str] = Counter()
    for layer in settings["layers"] if kind in ("Sequential", "Functional") else ():
        if str(layer.get("module")).startswith(("keras.src.ops", "keras.ops")):
            continue
        word = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", layer["class_name"]))
        word = re.sub(r"([a-z])([A-Z])", r"\1_\2", word).lower()
        key = f"{word}_{used[word]}" if used[word] else word
        used[word] += 1
        if key in tree.get("layers", {}):
            yield from _trained(tree["layers"][key], layer, f"{path}layers.{key}.")
    inner = [key for key, held in tree.items() if key not in ("vars", "layers") and isinstance(held, Mapping)]
    if len(inner) == 1:
        # The cell of a recurrent layer, or what a wrapper wraps. The order of several is not in the file.
        made = {"module": "keras", "class_name": "", "config": {"trainable": settings.get("trainable", True)}}
        yield from _trained(tree[inner[0]], settings.get("layer") or made, f"{path}{inner[0]}.")


def _states(tree: Tree, saved: Mapping[str, Any]) -> tuple[int, dict[str, Any], list[dict[str, Tensor]]]:
    """The steps, the entries of torch's group, and the states in the order of the trained variables."""
    kind, settings = saved["class_name"], saved["config"]
    extra = [key for key in _EXTRA_LISTS if settings.get(key)]
    if kind not in ("Adam", "AdamW") or not str(saved.get("module")).startswith("keras") or extra:
        said = f"{kind} of {saved.get('module')}" + "".join(f" with {key}" for key in extra)
        raise FileError(f"it was trained with {said}, which is not read: train with Keras' Adam or AdamW")
    head = 1 if isinstance(settings["learning_rate"], Mapping) else 2
    values = [tree["vars"][str(number)] for number in range(len(tree["vars"].keys() - {_NAME}))]
    moments = list(zip(values[head::2], values[head + 1 :: 2], strict=True))
    if any(value.dim() for value in values[:head]) or any(mean.shape != square.shape for mean, square in moments):
        raise FileError(f"its {kind} has {len(values)} variables in a layout that is not known. {_AGAIN}")
    steps = int(values[0])
    # Keras decays the weights apart from the gradient in its Adam, too.
    group = {"betas": (settings["beta_1"], settings["beta_2"]), "eps": settings["epsilon"]}
    group |= {"weight_decay": float(settings.get("weight_decay") or 0.0), "decoupled_weight_decay": True}
    step = torch.tensor(float(steps))
    return steps, group, [{"exp_avg": mean, "exp_avg_sq": square, "step": step} for mean, square in moments]


def _contents(config: Mapping[str, Any], tree: Tree) -> Contents:
    model = {key: held for key, held in tree.items() if key != "optimizer"}
    values, trained = dict(_every(model)), dict(_trained(model, config))
    ordered = trained.keys() == values.keys()
    weights = {name: values[name] for name in (trained if ordered else values)}
    summary = f"{len(weights)} variables of a Keras model"
    if "optimizer" not in tree:
        return Contents(weights or None, None, f"{summary} without its optimiser", ordered=ordered)
    saved = (config.get("compile_config") or {}).get("optimizer")
    if not isinstance(saved, Mapping):
        raise FileError(f"{_CONFIG} does not say which optimiser it was: compile the model with it. {_AGAIN}")
    steps, group, states = _states(tree["optimizer"], saved)
    # Without an order the states keep their numbers: shapes that occur once decide, or param_names=.
    keys: list[Any] = [name for name in weights if trained[name]] if ordered else list(range(len(states)))
    if ordered and [weights[name].shape for name in keys] != [state["exp_avg"].shape for state in states]:
        raise FileError(
            f"its optimiser's {len(states)} states have other shapes than the {len(keys)} variables trained by "
            f"{_CONFIG}: a layer was frozen or exchanged since, or has a LoRA. {_AGAIN}"
        )
    return Contents(
        weights=weights or None,
        optimizer={"state": dict(zip(keys, states, strict=True)), "param_groups": [{**group, "params": keys}]},
        summary=summary,
        ordered=ordered,
        recorded=Recorded(step=steps, optimizer=saved["class_name"]),
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
