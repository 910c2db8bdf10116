"""Folders of PEFT's adapters, and the model behind one: built without values from its base model's `config.json`.

The optimiser numbers the tensors in the model's order, which an adapter's file does not keep. Nothing is fetched, no
code is run that a file names, and a model is used only if it has exactly the tensors of the file.
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
from torch import nn

import bayesadam.readers.formats.huggingface as hf
from bayesadam._extras import require
from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.contents import Contents, Rules
from bayesadam.readers.formats.pickles import said
from bayesadam.readers.formats.registry import refuse_keys
from bayesadam.readers.registry import has_tensors, parameter_shape

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_ADAPTER_CONFIG, _CONFIG = "adapter_config.json", "config.json"
# The Hub's own rule, as far as it matters.
_REPOSITORY = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)

# The kinds that are built, and what in their configuration decides which parameters there are. All else is left out:
# some of it names modules to import (megatron_core) or files to load.
_KINDS = ("LORA", "LOHA", "LOKR", "IA3")
_DECIDING = (
    *("target_modules", "exclude_modules", "target_parameters", "feedforward_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "layer_replication", "trainable_token_indices", "ensure_weight_tying"),
    *("task_type", "r", "rank_pattern", "bias", "lora_bias", "use_dora", "fan_in_fan_out"),
    *("decompose_both", "decompose_factor", "use_effective_conv2d"),
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

# A tensor's shape in the file and in the model; None where it is missing.
Pair = tuple[torch.Size | None, torch.Size | None]


@dataclass(frozen=True)
class _Adapter:
    """The folder that was given, the one with the adapter, its name, its configuration, and its tensors' shapes."""

    path: Path
    folder: Path
    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, torch.Size]


def _adapters_in(path: Path) -> list[Path]:
    """The folders with an adapter: 'default' is at the top; others, beside what the Trainer wrote, have their own."""
    there = hf.files_of(path)
    own = [path] if _ADAPTER_CONFIG in there else []
    if not own and there.isdisjoint({hf.STATE, *hf.OPTIMIZERS}):
        return []
    inner = sorted(path / name for name in there if not hf.CHECKPOINT.fullmatch(name))
    return [*own, *(folder for folder in inner if (folder / _ADAPTER_CONFIG).is_file())]


def _adapter_with(path: Path, weights_key: str | None, optimizer: Mapping[str, Any] | None) -> Contents:
    refuse_keys(path, "it has one set of weights", weights_key=weights_key)
    folders = _adapters_in(path)
    if len(folders) > 1:
        described = ", ".join(repr("default" if folder == path else folder.name) for folder in folders)
        raise FileError(
            f"{path} holds {len(folders)} adapters, {described}, and one state of the optimiser: read them from the "
            "live model and optimiser (Posterior.from_optimizer), or train one at a time"
        )
    config = hf.read_json(folders[0] / _ADAPTER_CONFIG)
    if not isinstance(config.get("peft_type"), str):
        raise FileError(f"{folders[0] / _ADAPTER_CONFIG} has no 'peft_type': it is not PEFT's; copy it again")
    weights, _ = hf.read_weights(folders[0], _WEIGHTS)
    # An adapter of another name than PEFT's first has a folder of that name.
    name = "default" if folders[0] == path else folders[0].name
    adapter = _Adapter(path, folders[0], name, config, {key: tensor.shape for key, tensor in weights.items()})
    # No order is needed where every state has the shape of one tensor alone.
    counts = Counter(adapter.shapes.values())
    states = [] if optimizer is None else [parameter_shape(s) for s in optimizer["state"].values() if has_tensors(s)]
    clear = optimizer is not None and all(shape is not None and counts[shape] == 1 for shape in states)
    rules = Rules(
        model=None if clear else partial(_adapter_model, adapter),
        names=partial(_adapter_names, adapter),
        orders=partial(_adapter_orders, adapter, optimizer),
        partial=True,
    )
    record, summary = hf.trainer_record(path), hf.summary_of(path, weights)
    return Contents(weights, optimizer, summary, recorded=record, rules=rules)


def _compared(adapter: _Adapter, model: nn.Module, name: str) -> tuple[dict[str, str], dict[str, Pair]]:
    """The model's names by those under which PEFT saves its adapter `name`, and what differs from the file."""
    own, shapes, peft = hf.tensors_of(model), adapter.shapes, require("peft")
    try:
        # Embeddings, which PEFT may save as well, keep their names; to find out whether it does, it may go online.
        tensors = peft.get_peft_model_state_dict(model, dict(own), adapter_name=name, save_embedding_layers=False)
    except Exception as error:
        raise MatchError(f"PEFT cannot tell the weights of the model's adapter {name!r} ({error})") from error
    known = {id(tensor): key for key, tensor in own.items()}
    known |= {id(parameter): key for key, parameter in model.named_parameters()}
    saved = {key: known[id(tensor)] for key, tensor in tensors.items() if id(tensor) in known}
    # Without a PeftModel around it, transformers' own model saves under the names that it would have inside one.
    names = {key: key for key in own} | {f"base_model.model.{key}": held for key, held in saved.items()} | saved
    both = {key: (shapes.get(key), own[names[key]].shape if key in names else None) for key in {**shapes, **saved}}
    return names, {key: pair for key, pair in both.items() if pair[0] != pair[1]}


def _difference(key: str, pair: Pair) -> str:
    stored, built = pair
    if stored is None or built is None:
        return f"{key!r} is {'not ' if stored is None else ''}in the adapter and {'not ' if built is None else ''}in"
    return f"{key!r} has shape {tuple(stored)} in the adapter and {tuple(built)} in"


def _adapter_names(adapter: _Adapter, model: nn.Module) -> dict[str, str]:
    """The model's name for each stored one: PEFT leaves out the name of the adapter."""
    kind = type(model).__name__
    load = f"peft.PeftModel.from_pretrained(model, {str(adapter.path)!r}, is_trainable=True)"
    known = getattr(model, "peft_config", None)
    if not isinstance(known, Mapping) or not known:
        raise MatchError(f"{adapter.path} holds an adapter, and {kind} has none: pass the model with it, {load}")
    fitting: dict[str, dict[str, str]] = {}
    misfits: list[str] = []
    for name in known:
        names, differing = _compared(adapter, model, name)
        wrong = [_difference(key, pair) for key, pair in differing.items() if key in adapter.shapes]
        misfits += wrong[:1]
        if not wrong:
            fitting[name] = {key: names[key] for key in adapter.shapes}
    if not fitting:
        built = f"Build it with the configuration in {_ADAPTER_CONFIG}"
        raise MatchError(f"{adapter.path} is another model's adapter: {misfits[0]} {kind}. {built}")
    if len(fitting) > 1:
        which = " and ".join(map(repr, fitting))
        raise MatchError(
            f"{adapter.path} may be any of the model's {which}: pass the model with that one alone, {load}"
        )
    return next(iter(fitting.values()))


def _adapter_orders(adapter: _Adapter, optimizer: Mapping[str, Any] | None, model: nn.Module) -> hf.Orders:
    """The Trainer's orders of what the file holds: whatever else was trained is lost, and that is refused."""
    held = set(_adapter_names(adapter, model).values())
    named = dict(model.named_parameters())
    stored = [name for name in named if name in held]
    trained = [name for name in stored if named[name].requires_grad]
    answers = hf.distinct([*hf.decay_orders(model, trained), *hf.decay_orders(model, stored), [list(named)]])
    if optimizer is None:
        return answers
    groups = [group["params"] for group in optimizer["param_groups"]]
    keys = list(itertools.chain(*groups))
    idle = {number for number, key in enumerate(keys) if not has_tensors(optimizer["state"].get(key))}
    answers = [
        answer
        for answer in answers
        if list(map(len, answer)) == list(map(len, groups))
        and all(name in held or number in idle for number, name in enumerate(itertools.chain(*answer)))
    ]
    if not answers and not all(isinstance(key, str) for key in keys):
        raise MatchError(
            f"{adapter.path}: the optimiser has {len(keys)} parameters, the adapter {len(stored)} tensors: something "
            "was trained that is not in the file. Pass param_names=[...] in the optimiser's order, or read it from the "
            "live model and optimiser (Posterior.from_optimizer)"
        )
    return answers


def _adapter_model(adapter: _Adapter) -> nn.Module:
    """The model that was trained, on the meta device; of the classes that may be meant, the first that fits."""
    kind = adapter.config["peft_type"]
    if kind not in _KINDS:
        raise MatchError(f"{adapter.path} holds an adapter of kind {said(kind)}, which is not built here: {_PASS_IT}")
    for package in ("transformers", "peft"):
        require(package)
    source = _base_config(adapter)
    config = hf.read_json(source)
    if hf.names_more(config):
        raise MatchError(f"{source} names code of its own or a backbone, and neither is loaded: {_PASS_IT}")
    refusals: list[MatchError] = []
    for name in _classes(adapter.config, config):
        try:
            return _fitted(adapter, source, name, config)
        except MatchError as refusal:
            refusals.append(refusal)
    if refusals:
        raise refusals[0]
    raise MatchError(f"neither {source} nor {_ADAPTER_CONFIG} says which class of transformers it is of: {_PASS_IT}")


def _base_config(adapter: _Adapter) -> Path:
    """The base model's `config.json`: beside the adapter, where that says, above it, or in the Hub's cache."""
    named, revision = adapter.config.get("base_model_name_or_path"), adapter.config.get("revision")
    # A share would be looked for on the network.
    base = named if isinstance(named, str) and not PureWindowsPath(named).drive.startswith("\\") else ""
    above = Path(os.path.abspath(adapter.path)).parent
    last = PureWindowsPath(base).name
    beside = [Path(base), adapter.path / last, above / last] if base else []
    candidates = [folder / _CONFIG for folder in (adapter.folder, adapter.path, *beside, above)]
    in_hub = _REPOSITORY.fullmatch(base) is not None
    if in_hub:
        try:
            cached = require("huggingface_hub").try_to_load_from_cache(
                base, _CONFIG, revision=revision if isinstance(revision, str) else None
            )
        except ValueError:
            # No name of a repository.
            cached = None
        candidates += [Path(cached)] if isinstance(cached, str) else []
    for path in candidates:
        # Other things are called config.json, too.
        if os.path.isfile(path) and isinstance(hf.read_json(path).get("model_type"), str):
            return path
    fetch = f", or fetch it into the cache with `hf download {base} {_CONFIG}`" if in_hub else ""
    raise MatchError(
        f"{adapter.path} holds an adapter, and the {_CONFIG} of its base model, {said(named)}, which has the order of "
        f"the parameters, is neither beside it nor in the cache of Hugging Face: copy it into {adapter.folder}{fetch}; "
        f"or {_PASS_IT}"
    )


def _classes(adapter: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The classes of transformers that the base model may be of: as PEFT noted, by the task, as in `config.json`."""
    noted, task, own = adapter.get("auto_mapping"), adapter.get("task_type"), config.get("architectures")
    if isinstance(noted, Mapping) and isinstance(noted.get("base_model_class"), str):
        return [noted["base_model_class"]]
    tables = require("transformers.models.auto.modeling_auto")
    table = getattr(tables, _TABLES.get(task, "") if isinstance(task, str) else "", {})
    found = [table.get(config["model_type"]), *(own if isinstance(own, list) and len(own) == 1 else [])]
    return list(dict.fromkeys(name for name in found if isinstance(name, str)))


def _fitted(adapter: _Adapter, source: Path, name: str, config: Mapping[str, Any]) -> nn.Module:
    """The model of this class with the adapter, if it has exactly the tensors that the file has."""
    model = _with_adapter(hf.build_model(source, name, config), adapter)
    differing = _compared(adapter, model, adapter.name)[1]
    sizes = {entry: getattr(getattr(model, "config", None), entry, None) for entry in _RESIZED}
    alike = [(one[0], other[0]) for one, other in differing.values() if one and other and one[1:] == other[1:]]
    changes = {entry: new for new, old in reversed(alike) for entry, size in sizes.items() if size == old}
    if changes:
        replaced = {"id2label", "label2id"} if "num_labels" in changes else set()
        changed = {key: value for key, value in config.items() if key not in replaced} | changes
        model = _with_adapter(hf.build_model(source, name, changed), adapter)
        differing = _compared(adapter, model, adapter.name)[1]
    if differing:
        raise MatchError(
            f"{source} is not the {_CONFIG} of this adapter's base model: {_difference(*next(iter(differing.items())))}"
            f" the {name} that it describes. Copy the right one into {adapter.folder}; or {_PASS_IT}"
        )
    return model


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


ADAPTER = hf.folder_format("PEFT adapter", lambda path, head: bool(_adapters_in(path)), _adapter_with)
