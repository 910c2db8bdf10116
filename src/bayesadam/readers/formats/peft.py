"""Folders of PEFT's adapters, and the model behind one: built without values, where its base model's `config.json` is at hand.

An adapter's file keeps no order of its tensors, and the optimiser numbers them in the model's. That order follows from the
base model's configuration and the adapter's. Nothing is fetched, and no code is run that a file names; what was built is
used only if it has exactly the tensors of the file, in number, name and shape.
"""

import itertools
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam._extras import require
from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.contents import Contents, Rules
from bayesadam.readers.formats.huggingface import (
    CHECKPOINT,
    OPTIMIZERS,
    STATE,
    Orders,
    build_model,
    decay_orders,
    distinct,
    files_of,
    folder_format,
    names_more,
    read_json,
    read_weights,
    recorded_in,
    summary_of,
)
from bayesadam.readers.formats.pickles import said
from bayesadam.readers.formats.registry import refuse_keys
from bayesadam.readers.state import has_tensors, parameter_shape

_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_ADAPTER_CONFIG = "adapter_config.json"
_CONFIG = "config.json"
# The Hub's own rule, as far as it matters.
_REPOSITORY = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)

# The kinds that are built from their configuration, and what in it decides which parameters there are. All else is left
# out: some of it names modules to import (megatron_core) or files to load.
_KINDS = ("LORA", "LOHA", "LOKR", "IA3")
_DECIDING = (
    *("target_modules", "exclude_modules", "target_parameters", "feedforward_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "layer_replication", "trainable_token_indices", "ensure_weight_tying"),
    *("task_type", "r", "rank_pattern", "bias", "lora_bias", "use_dora", "fan_in_fan_out"),
    *("decompose_both", "decompose_factor", "use_effective_conv2d"),
)
# Variants of LoRA with parameters of other shapes, or more of them.
_VARIANTS = (
    "arrow_config",
    "kasa_config",
    "megatron_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
# transformers' tables of classes, by the adapter's task.
_TABLES = {
    "CAUSAL_LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "FEATURE_EXTRACTION": "MODEL_MAPPING_NAMES",
    "QUESTION_ANS": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "SEQ_2_SEQ_LM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
# What is often set for training, and so differs from the base model's configuration: the adapter's shapes tell it.
_RESIZED = ("num_labels", "vocab_size")
_PASS_IT = "pass the model (Posterior.from_checkpoint), or param_names=[...]"

Shapes = Mapping[str, torch.Size]
# In the file and in the model.
Pair = tuple[torch.Size | None, torch.Size | None]


@dataclass(frozen=True)
class _Adapter:
    """What was saved: the folder that was asked for, the one that the adapter is in, its configuration, and its shapes."""

    path: Path
    folder: Path
    config: Mapping[str, Any]
    shapes: Shapes

    @property
    def name(self) -> str:
        """As PEFT calls it: an adapter of another name has a folder of that name."""
        return "default" if self.folder == self.path else self.folder.name


def _adapters_in(path: Path) -> list[Path]:
    """The folders with an adapter: the one called 'default' is at the top, others in a folder with their name.

    The latter only with what the Trainer wrote.
    """
    there = files_of(path)
    own = [path] if _ADAPTER_CONFIG in there else []
    if not own and there.isdisjoint({STATE, *OPTIMIZERS}):
        return []
    inner = sorted(path / name for name in there if not CHECKPOINT.fullmatch(name))
    return [*own, *(folder for folder in inner if (folder / _ADAPTER_CONFIG).is_file())]


def _adapter_with(path: Path, weights_key: str | None, optimizer: Mapping[str, Any] | None) -> Contents:
    refuse_keys(path, "it has one set of weights", weights_key=weights_key)
    folders = _adapters_in(path)
    if len(folders) > 1:
        described = ", ".join(repr("default" if folder == path else folder.name) for folder in folders)
        raise FileError(
            f"{path} holds {len(folders)} adapters, {described}, and one state of the optimiser for all: read them from the "
            "live model and optimiser (Posterior.from_optimizer), or train one at a time"
        )
    config = read_json(folders[0] / _ADAPTER_CONFIG)
    if not isinstance(config.get("peft_type"), str):
        raise FileError(f"{folders[0] / _ADAPTER_CONFIG} has no 'peft_type': it is not PEFT's; copy it again")
    weights, _ = read_weights(folders[0], _ADAPTER_WEIGHTS)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    told = optimizer is not None and _told_by_shapes(shapes, optimizer)
    build = None if told else partial(_adapter_model, _Adapter(path, folders[0], config, shapes))
    return Contents(
        weights=weights,
        optimizer=optimizer,
        summary=summary_of(path, weights),
        recorded=recorded_in(path),
        rules=Rules(
            model=build,
            names=partial(_adapter_names, path, shapes),
            orders=partial(_adapter_orders, path, shapes, optimizer),
            partial=True,
        ),
    )


def _adapter_names(path: Path, shapes: Shapes, model: nn.Module) -> dict[str, str]:
    """The model's name for each stored one: PEFT leaves out the name of the adapter."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or not adapters:
        raise MatchError(
            f"{path} holds an adapter, and {type(model).__name__} has none: pass the model with it, "
            f"peft.PeftModel.from_pretrained(model, {str(path)!r}, is_trainable=True)"
        )
    own = _tensors_of(model)
    by_adapter = {adapter: _saved_names(model, own, adapter) for adapter in adapters}
    fitting = {
        adapter: {key: names[key] for key in shapes}
        for adapter, names in by_adapter.items()
        if all(key in names and own[names[key]].shape == shape for key, shape in shapes.items())
    }
    if len(fitting) > 1:
        raise MatchError(
            f"{path} holds one adapter, which may be any of the model's {' and '.join(map(repr, fitting))}: pass the "
            f"model with that one alone, peft.PeftModel.from_pretrained(model, {str(path)!r}, is_trainable=True)"
        )
    if not fitting:
        names = next(iter(by_adapter.values()))
        key = next(key for key, shape in shapes.items() if key not in names or own[names[key]].shape != shape)
        described = f"shape {tuple(own[names[key]].shape)}" if key in names else "nothing of the kind"
        raise MatchError(
            f"{path} is another model's adapter: {key!r} has shape {tuple(shapes[key])} in the file, and the model has "
            f"{described}. Build it with the configuration in {_ADAPTER_CONFIG}"
        )
    return next(iter(fitting.values()))


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}


def _saved(model: nn.Module, own: Mapping[str, Tensor], adapter: str) -> dict[str, str]:
    """The model's names by those under which PEFT saves the adapter, identified by the tensors themselves."""
    peft = require("peft")
    try:
        # Embeddings, which PEFT may save as well, keep their names; to find out whether it does, it may go online.
        saved = peft.get_peft_model_state_dict(model, dict(own), adapter_name=adapter, save_embedding_layers=False)
    except Exception as error:
        raise MatchError(f"PEFT cannot tell the weights of the model's adapter {adapter!r} ({error})") from error
    names = {id(tensor): name for name, tensor in own.items()}
    names |= {id(parameter): name for name, parameter in model.named_parameters()}
    return {key: names[id(tensor)] for key, tensor in saved.items() if id(tensor) in names}


def _saved_names(model: nn.Module, own: Mapping[str, Tensor], adapter: str) -> dict[str, str]:
    """The same with every other tensor, which keeps its name."""
    found = _saved(model, own, adapter)
    # Without a PeftModel around it, transformers' own model saves under the names that it would have inside one.
    inside = {f"base_model.model.{key}": name for key, name in found.items()}
    return {name: name for name in own} | inside | found


def _adapter_orders(path: Path, shapes: Shapes, optimizer: Mapping[str, Any] | None, model: nn.Module) -> Orders:
    """The Trainer's orders of what the file holds: whatever else was trained is lost, and that is refused."""
    held = set(_adapter_names(path, shapes, model).values())
    named = dict(model.named_parameters())
    stored = [name for name in named if name in held]
    trained = [name for name in stored if named[name].requires_grad]
    answers = distinct([*decay_orders(model, trained), *decay_orders(model, stored), [list(named)]])
    if optimizer is None:
        return answers
    groups = [group["params"] for group in optimizer["param_groups"]]
    keys = [key for group in groups for key in group]
    idle = {place for place, key in enumerate(keys) if not has_tensors(optimizer["state"].get(key))}
    answers = [
        answer
        for answer in answers
        if list(map(len, answer)) == list(map(len, groups))
        and all(name in held or place in idle for place, name in enumerate(itertools.chain(*answer)))
    ]
    if not answers and not all(isinstance(key, str) for key in keys):
        raise MatchError(
            f"{path}: the optimiser has groups of {' and '.join(str(len(group)) for group in groups)} parameters, the "
            f"adapter {len(stored)} tensors: something was trained that is not in the file, or the optimiser was not "
            "the Trainer's own. Pass param_names=[...], the parameter names in the optimiser's order, or read it from "
            "the live model and optimiser (Posterior.from_optimizer)"
        )
    return answers


def _adapter_model(adapter: _Adapter) -> nn.Module:
    """The model that was trained, on the meta device; of the classes that may be meant, the first that fits."""
    kind = adapter.config["peft_type"]
    special = [key for key in _VARIANTS if adapter.config.get(key)]
    if kind not in _KINDS or special:
        described = f"{kind} with {special[0]}" if kind in _KINDS else said(kind)
        raise MatchError(
            f"{adapter.path} holds an adapter of the kind {described}, which is not built here: {_PASS_IT}"
        )
    for package in ("transformers", "peft"):
        require(package)
    source = _base_config(adapter)
    config = read_json(source)
    if names_more(config):
        raise MatchError(
            f"{source} names code of its own or a backbone, and neither is loaded: build the model as it was built for "
            f"training, and {_PASS_IT}"
        )
    classes = _classes(adapter.config, config)
    if not classes:
        raise MatchError(
            f"neither {source} nor {adapter.folder / _ADAPTER_CONFIG} says which class of transformers the model is of: "
            f"{_PASS_IT}"
        )
    refusals: list[MatchError] = []
    for name in classes:
        try:
            return _fitted(adapter, source, name, config)
        except MatchError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _base_config(adapter: _Adapter) -> Path:
    """The base model's `config.json`: beside the adapter, where its configuration says, above it, or in the Hub's cache.

    The adapter's own folder is first, so that a file put there is the one that counts.
    """
    named, revision = adapter.config.get("base_model_name_or_path"), adapter.config.get("revision")
    # A share would be looked for on the network.
    base = named if isinstance(named, str) and not PureWindowsPath(named).drive.startswith("\\") else ""
    above = Path(os.path.abspath(adapter.path)).parent
    places = [adapter.folder, adapter.path]
    if base:
        places += [Path(base), *(place / PureWindowsPath(base).name for place in (adapter.path, above))]
    for place in [*places, above]:
        if os.path.isfile(place / _CONFIG) and _is_model(read_json(place / _CONFIG)):
            return place / _CONFIG
    in_hub = _REPOSITORY.fullmatch(base) is not None
    cached = _in_cache(base, revision if isinstance(revision, str) else None) if in_hub else None
    if cached is not None and _is_model(read_json(cached)):
        return cached
    fetch = f", or fetch it into the cache with `hf download {base} {_CONFIG}`" if in_hub else ""
    raise MatchError(
        f"{adapter.path} holds an adapter, whose optimiser has the parameters in the order of the base model, and the "
        f"{_CONFIG} of that, {said(named)}, is neither beside it nor in the cache of Hugging Face: copy it into "
        f"{adapter.folder}{fetch}; or {_PASS_IT}"
    )


def _is_model(config: Mapping[str, Any]) -> bool:
    """Whether it is transformers', and not what else is called so."""
    return isinstance(config.get("model_type"), str)


def _in_cache(repository: str, revision: str | None) -> Path | None:
    """What was fetched from the Hub before; nothing is fetched now."""
    hub = require("huggingface_hub")
    try:
        found = hub.try_to_load_from_cache(repository, _CONFIG, revision=revision)
    except ValueError:
        # No name of a repository.
        return None
    return Path(found) if isinstance(found, str) else None


def _classes(adapter: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The names of transformers' classes that the base model may be of: as PEFT noted, by the task, as in `config.json`."""
    noted = adapter.get("auto_mapping")
    if isinstance(noted, Mapping) and isinstance(noted.get("base_model_class"), str):
        return [noted["base_model_class"]]
    task = adapter.get("task_type")
    table = getattr(
        require("transformers.models.auto.modeling_auto"), _TABLES.get(task, "") if isinstance(task, str) else "", {}
    )
    own = config.get("architectures")
    found = [table.get(config["model_type"]), *(own if isinstance(own, list) and len(own) == 1 else [])]
    return list(dict.fromkeys(name for name in found if isinstance(name, str)))


def _fitted(adapter: _Adapter, source: Path, name: str, config: Mapping[str, Any]) -> nn.Module:
    """The model of this class with the adapter, if it has exactly the tensors that the file has."""

    def made(wanted: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Pair]]:
        model = _with_adapter(build_model(source, name, wanted), adapter)
        return model, _differing(model, adapter)

    model, differing = made(config)
    changes = _resized(model, differing)
    if changes:
        replaced = {"id2label", "label2id"} if "num_labels" in changes else set()
        model, differing = made({key: value for key, value in config.items() if key not in replaced} | changes)
    if not differing:
        return model
    key, (stored, built) = next(iter(differing.items()))
    described = f"{key!r} has shape {tuple(stored or ())} in the adapter and {tuple(built or ())} in"
    if stored is None or built is None:
        described = (
            f"{key!r} is {'not ' if stored is None else ''}in the adapter and {'not ' if built is None else ''}in"
        )
    raise MatchError(
        f"{source} is not the {_CONFIG} of this adapter's base model: {described} the {name} that it describes. Copy the "
        f"right one into {adapter.folder}; or {_PASS_IT}"
    )


def _with_adapter(model: nn.Module, adapter: _Adapter) -> nn.Module:
    """PEFT's model around this one, with a new adapter."""
    peft = require("peft")
    given = adapter.config
    # Releases of PEFT that do not know a setting do without it where it is not used.
    deciding = {key: given[key] for key in _DECIDING if given.get(key) is not None and given[key] is not False}
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # They are about training.
            warnings.simplefilter("ignore")
            config = peft.get_peft_config({"peft_type": given["peft_type"], **deciding})
            made: nn.Module = peft.get_peft_model(model, config, adapter_name=adapter.name)
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise MatchError(
            f"{adapter.folder / _ADAPTER_CONFIG}: PEFT cannot put this adapter on {type(model).__name__} ({reason}): "
            f"{_PASS_IT}"
        ) from error
    return made


def _differing(model: nn.Module, adapter: _Adapter) -> dict[str, Pair]:
    """What differs between the file and what PEFT would save of the model: the shape in either, None where it is missing."""
    own = _tensors_of(model)
    shapes, saved = adapter.shapes, _saved(model, own, adapter.name)
    # Embeddings, which PEFT may have saved as well, keep their names.
    built = {name: tensor.shape for name, tensor in own.items()} | {key: own[name].shape for key, name in saved.items()}
    both = ((key, (shapes.get(key), built.get(key))) for key in {**shapes, **saved})
    return {key: pair for key, pair in both if pair[0] != pair[1]}


def _resized(model: nn.Module, differing: Mapping[str, Pair]) -> dict[str, int]:
    """The entries of `config.json` that were set for training, as what differs tells them."""
    sizes = {entry: getattr(getattr(model, "config", None), entry, None) for entry in _RESIZED}
    alike = [
        (stored[0], built[0]) for stored, built in differing.values() if stored and built and stored[1:] == built[1:]
    ]
    return {entry: new for new, old in reversed(alike) for entry, size in sizes.items() if size == old}


def _told_by_shapes(shapes: Shapes, optimizer: Mapping[str, Any]) -> bool:
    """Whether no order is needed: every state has the shape of one tensor alone."""
    counts = Counter(shapes.values())
    states = [state for state in optimizer["state"].values() if has_tensors(state)]
    return all((shape := parameter_shape(state)) is not None and counts[shape] == 1 for state in states)


ADAPTER = folder_format("PEFT adapter", lambda path, head: path.is_dir() and bool(_adapters_in(path)), _adapter_with)
