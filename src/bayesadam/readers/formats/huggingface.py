"""Folders of Hugging Face: the Trainer's checkpoints, a folder of several of them, Accelerate's `save_state`, adapters.

Safetensors, JSON and files of `torch.save` with weights or the optimiser's state are read. `training_args.bin` and the
random states are pickles of classes, and are not opened. Nothing is fetched, and no code is run that a file names.
"""

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam._extras import require
from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.contents import Contents, Recorded, Rules, recorded_in
from bayesadam.readers.formats.pickles import said
from bayesadam.readers.formats.registry import Format, format_of, refuse_keys
from bayesadam.readers.formats.torch_files import shortened
from bayesadam.readers.match import clean_names

# In the order in which transformers itself looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
STATE = "trainer_state.json"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_STATE_FILE = re.compile(r"optimizer(_\d+)?\.(pt|bin)")
_SHARD = re.compile(r"(pytorch_)?model-\d+-of-\d+\.(safetensors|bin)")
_CHECKPOINT = re.compile(r"checkpoint[-_](\d+)")

# Which parameters the Trainer does not decay: those of nn.LayerNorm, of other classes of norms too where transformers
# listed them (ALL_LAYERNORM_LAYERS, as it happens), and those with such names. The newest rule is first; the second is
# of transformers' pull request 35927, replaced by 38922; the last of before.
_UNDECAYED: tuple[tuple[re.Pattern[str], bool], ...] = (
    (re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE), False),
    (re.compile(r"bias|layernorm|rmsnorm", re.IGNORECASE), False),
    (re.compile(r"bias|layernorm|rmsnorm", re.IGNORECASE), True),
    (re.compile(r"bias"), False),
    (re.compile(r"bias"), True),
)

Orders = list[list[list[str]]]
# Weights by name, whether they are in the model's order, and what else the trainer does.
Loaded = tuple[dict[str, Tensor], bool, Rules]


def _files_of(folder: Path) -> set[str]:
    """The names of what lies in a folder; none of what is no folder."""
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise FileError(f"{path} is truncated, damaged or no JSON object ({error}): copy it again") from error


def _read_weights(folder: Path, names: Sequence[str] = _WEIGHTS) -> tuple[dict[str, Tensor], bool]:
    """The weights in the first of these files, or in the shards it lists, and whether they are in the model's order."""
    there = _files_of(folder)
    chosen = next((name for name in names if name in there), None)
    if chosen is not None:
        return (_sharded(folder / chosen), False) if chosen.endswith(".json") else _tensors_in(folder / chosen)
    raise FileError(
        f"{folder} has no weights, neither {' nor '.join(names)}; it has {sorted(there)[:12]}: copy the whole folder, "
        "or pass the file with the weights"
    )


def _tensors_in(path: Path) -> tuple[dict[str, Tensor], bool]:
    """The tensors of one file, mapped, whatever its name says it is; and whether they are in the model's order."""
    found = format_of(path).read(path, None, None)
    if found.weights is None or found.weights_at:
        raise FileError(f"{path} holds other things than tensors by name: save it with model.save_pretrained(folder)")
    return dict(found.weights), found.ordered


def _sharded(index: Path) -> dict[str, Tensor]:
    """Weights in several files of one folder, as the index says; all of them, or an error."""
    shard_of = _read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise FileError(f"{index} has no 'weight_map' from tensors to files: copy it again")
    shards = list(dict.fromkeys(shard_of.values()))
    for shard in shards:
        # Windows' rule knows both kinds of slashes.
        if not isinstance(shard, str) or shard in ("", "..") or PureWindowsPath(shard).name != shard:
            raise FileError(f"{index} has {shard!r}, which is not in its own folder: nothing outside is read")
        if not (index.parent / shard).is_file():
            raise FileError(f"{index.parent} lacks {shard}, one of {len(shards)} files: copy the whole folder")
    tensors = {shard: _tensors_in(index.parent / shard)[0] for shard in shards}
    for name, shard in shard_of.items():
        if name not in tensors[shard]:
            raise FileError(f"{index.parent / shard} lacks {name!r}, which is in {index.name}: copy the whole folder")
    return {name: tensors[shard][name] for name, shard in shard_of.items()}


def _folder_format(name: str, recognises: Callable[[Path, bytes], bool], load: Callable[[Path], Loaded]) -> Format:
    """A folder of one model, with the optimiser's state in a file of its own."""

    def read_with(path: Path, weights_key: str | None, optimizer: Mapping[str, Any] | None) -> Contents:
        refuse_keys(path, "it has one set of weights", weights_key=weights_key)
        weights, ordered, rules = load(path)
        summary = f"{len(weights)} tensors, {sorted(_files_of(path))[:12]}"
        return Contents(weights, optimizer, summary, ordered=ordered, recorded=_recorded(path), rules=rules)

    def read(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
        refuse_keys(path, "pass its files, the state as optimizer_path=", optimizer_key=optimizer_key)
        contents = read_with(path, weights_key, None)
        states = sorted(file for file in _files_of(path) if _STATE_FILE.fullmatch(file))
        if len(states) > 1:
            listed = " and ".join(states)
            raise FileError(f"{path} has several states, {listed}: pass the model's file, and one as optimizer_path=")
        if not states:
            return contents
        found = format_of(path / states[0]).read(path / states[0], None, None)
        if found.optimizer is None:
            raise FileError(f"{path / states[0]} holds no optimiser's state: pass another file as optimizer_path=")
        return replace(contents, optimizer=found.optimizer)

    return Format(name, recognises, read, read_with=read_with, folder=True)


def decay_orders(model: nn.Module, names: Sequence[str]) -> Orders:
    """The groups into which the Trainer's releases put these parameters: decayed, then undecayed; or one group."""
    modules = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    plain = {f"{path}." for path, module in modules.items() if isinstance(module, nn.LayerNorm)}
    alike = {f"{path}." for path, module in modules.items() if type(module).__name__.endswith(("RMSNorm", "LayerNorm"))}
    answers: Orders = []
    for pattern, every_norm in _UNDECAYED:
        norms = tuple(plain | alike if every_norm else plain)
        exempt = {name for name in names if pattern.search(name) or name.startswith(norms)}
        answers.append([[name for name in names if name not in exempt], [name for name in names if name in exempt]])
    return [*answers, [list(names)]]


def _trainer_orders(model: nn.Module) -> Orders:
    """Of the parameters that are trained; or all in one group, as `AdamW(model.parameters())` has them."""
    named = dict(model.named_parameters())
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    return [*decay_orders(model, trained), [list(named)]]


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name that they have."""
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}


def own_names(stored: Collection[str], model: nn.Module) -> dict[str, str]:
    """The model's name for each stored one, where they differ: renamed by transformers on saving, wrapped, or tied."""
    own = _tensors_of(model)
    cleaned = {key: name for name, key in clean_names(stored).items()}
    renamed = {} if own.keys() >= set(stored) else _renamed_on_saving(model, own)
    found = {key: key if key in own else renamed.get(key, cleaned[key]) for key in stored}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = set(found.values())
    for key, name in found.items():
        main = first.get(id(own[name]), name) if name in own else name
        if main not in taken:
            found[key] = main
            taken.add(main)
    return {key: name for key, name in found.items() if key != name}


def _renamed_on_saving(model: nn.Module, own: Mapping[str, Tensor]) -> dict[str, str]:
    """The model's names by those of transformers' `save_pretrained`, if imported, where it keeps an older layout."""
    modeling = sys.modules.get("transformers.modeling_utils")
    revert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    if modeling is None or revert is None or not isinstance(model, modeling.PreTrainedModel):
        return {}
    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
    names = {id(tensor): name for name, tensor in blank.items()}
    try:
        saved = revert(model, dict(blank))
    except Exception:
        # Conversions that need values: the names stay as they are in the file, and the weights do not fit the model.
        return {}
    return {key: names[id(tensor)] for key, tensor in saved.items() if id(tensor) in names}


def _names_more(config: Mapping[str, Any]) -> bool:
    """Whether a configuration names code of its own, or a backbone, whose weights may be fetched when it is built."""
    left: list[Any] = [config]
    for item in left:
        if isinstance(item, dict):
            if any(value and ("auto_map" in key or "backbone" in key) for key, value in item.items()):
                return True
            left += item.values()
        elif isinstance(item, list):
            left += item
    return False


def _builder(folder: Path) -> Callable[[], nn.Module] | None:
    """What builds the model that `config.json` describes; None where it names no class, or one with code of its own."""
    path = folder / "config.json"
    config = _read_json(path) if path.is_file() else {}
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str) or _names_more(config):
        return None
    return partial(_build_model, path, classes[0], config)


def _build_model(path: Path, name: str, config: Mapping[str, Any]) -> nn.Module:
    """The model of a `config.json`, on the meta device; of a class that transformers itself defines, or none."""
    transformers = require("transformers")
    remedy = "build the model as it was built for training, and pass it"
    made: Any = getattr(transformers, name, None)
    ours = isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)
    if not ours or not made.__module__.startswith("transformers."):
        raise MatchError(f"{path} names the class {name!r}, which transformers does not define: {remedy}")
    try:
        # Attention may be asked for by the address of a kernel.
        plain = {key: value for key, value in config.items() if "attn_implementation" not in key}
        with torch.device("meta"):
            return made(made.config_class.from_dict(plain))  # type: ignore[no-any-return]
    except Exception as error:
        reason = shortened(error)
        raise MatchError(f"{path}: transformers cannot build {name!r} from it ({reason}): {remedy}") from error


def _recorded(folder: Path) -> Recorded:
    """The steps and whole epochs of `trainer_state.json`, and N where our own callback wrote it down."""
    state = _read_json(folder / STATE) if (folder / STATE).is_file() else {}
    callbacks = state.get("stateful_callbacks")
    ours = callbacks.get("bayesadam") if isinstance(callbacks, dict) else None
    return recorded_in(level for level in (state, ours) if isinstance(level, dict))


def _is_trainer(path: Path, head: bytes) -> bool:
    there = _files_of(path)
    weights = not there.isdisjoint(_WEIGHTS) or any(_SHARD.fullmatch(name) for name in there)
    return STATE in there or (weights and not there.isdisjoint({"config.json", *_OPTIMIZERS}))


def _load_model(path: Path, *, is_trainer: bool) -> Loaded:
    weights, ordered = _read_weights(path)
    names = partial(own_names, list(weights))
    # The user's script made Accelerate's optimiser: its order follows no rule.
    return weights, ordered, Rules(_builder(path), names, _trainer_orders) if is_trainer else Rules(names=names)


def _checkpoints(path: Path) -> str:
    """The folders called checkpoint-N, by N, in words; empty where there is none."""
    found = [(int(match[1]), name) for name in _files_of(path) if (match := _CHECKPOINT.fullmatch(name))]
    return ", ".join(name for _, name in sorted(found) if (path / name).is_dir())


def _read_parent(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    names = _checkpoints(path)
    newest = path / names.rpartition(", ")[2]
    raise FileError(f"{path} is a folder of checkpoints, {names}: pass one of them; the newest is {newest}")


def _is_accelerate(path: Path, head: bytes) -> bool:
    # The Trainer of transformers may leave an optimizer.bin, too.
    return STATE not in (there := _files_of(path)) and "optimizer.bin" in there


# --- PEFT's adapters, and the model behind a LoRA: built without values from its base model's `config.json` -----------

# The optimiser numbers the tensors in the model's order, which an adapter's file does not keep: a model is used only if
# it has exactly the tensors of the file.
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_ADAPTER_CONFIG, _CONFIG = "adapter_config.json", "config.json"

# What in LoRA's configuration decides which parameters there are. All else is left out: some of it names modules to
# import (megatron_core) or files to load.
_DECIDING = (
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("trainable_token_indices", "task_type", "r", "rank_pattern", "bias", "lora_bias", "use_dora", "fan_in_fan_out"),
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
# Heads with a row for each class, whose number is set for training: the base model's configuration has another.
_HEADS = ("classifier.weight", "score.weight", "classifier.out_proj.weight")
_PASS_IT = "pass the model (Posterior.from_checkpoint), or param_names=[...]"


def _adapters_in(path: Path) -> list[Path]:
    """The folders with an adapter: 'default' is at the top; others, beside what the Trainer wrote, have their own."""
    there = _files_of(path)
    own = [path] if _ADAPTER_CONFIG in there else []
    if not own and there.isdisjoint({STATE, *_OPTIMIZERS}):
        return []
    inner = sorted(path / name for name in there if not _CHECKPOINT.fullmatch(name))
    return [*own, *(folder for folder in inner if (folder / _ADAPTER_CONFIG).is_file())]


def _load_adapter(path: Path) -> Loaded:
    folders = _adapters_in(path)
    # An adapter of another name than PEFT's first has a folder of that name.
    names = ["default" if folder == path else folder.name for folder in folders]
    if len(folders) > 1:
        raise FileError(
            f"{path} holds {len(folders)} adapters, {', '.join(map(repr, names))}, and one state of the optimiser: "
            "read them from the live model and optimiser (Posterior.from_optimizer), or train one at a time"
        )
    config = _read_json(folders[0] / _ADAPTER_CONFIG)
    if not isinstance(config.get("peft_type"), str):
        raise FileError(f"{folders[0] / _ADAPTER_CONFIG} has no 'peft_type': it is not PEFT's; copy it again")
    weights, _ = _read_weights(folders[0], _ADAPTER_WEIGHTS)
    adapter = _Adapter(path, folders[0], names[0], config, {key: tensor.shape for key, tensor in weights.items()})
    return weights, False, Rules(adapter.model, adapter.names, adapter.orders, partial=True)


@dataclass(frozen=True)
class _Adapter:
    """The folder that was given, the one with the adapter, PEFT's name for it, its configuration, its shapes."""

    path: Path
    folder: Path
    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, torch.Size]

    def names(self, model: nn.Module) -> dict[str, str]:
        """The model's name for each stored one: PEFT leaves out the name of the adapter."""
        load = f"peft.PeftModel.from_pretrained(model, {str(self.path)!r}, is_trainable=True)"
        known = getattr(model, "peft_config", None)
        if not isinstance(known, Mapping) or not known:
            kind = type(model).__name__
            raise MatchError(f"{self.path} holds an adapter, and {kind} has none: pass the model with it, {load}")
        compared = {name: self._compared(model, name) for name in known}
        fitting = [name for name, (_, misfits) in compared.items() if self.shapes.keys().isdisjoint(misfits)]
        if not fitting:
            reason = next(text for _, all_ in compared.values() for key, text in all_.items() if key in self.shapes)
            raise MatchError(f"{self.path} is another model's adapter: {reason}. Build it as {_ADAPTER_CONFIG} says")
        if len(fitting) > 1:
            which = " and ".join(map(repr, fitting))
            raise MatchError(f"{self.path} may be the model's {which}: pass the model with that one alone, {load}")
        return {key: compared[fitting[0]][0][key] for key in self.shapes}

    def orders(self, model: nn.Module) -> Orders:
        """The Trainer's orders of what the file holds: what else was trained is lost, and no order fits."""
        held = set(self.names(model).values())
        named = dict(model.named_parameters())
        stored = [name for name in named if name in held]
        trained = [name for name in stored if named[name].requires_grad]
        return [*decay_orders(model, trained), *decay_orders(model, stored), [list(named)]]

    def _compared(self, model: nn.Module, name: str) -> tuple[dict[str, str], dict[str, str]]:
        """The model's names by those under which PEFT saves its adapter `name`, and what differs from the file."""
        own, peft = _tensors_of(model), require("peft")
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
        inner: Any = getattr(model, "get_base_model", lambda: model)
        kind = type(inner()).__name__
        misfits = {}
        for key in {**self.shapes, **saved}:
            stored, built = self.shapes.get(key), own[names[key]].shape if key in names else None
            if stored is None or built is None:
                where = "not in the adapter and in" if stored is None else "in the adapter and not in"
                misfits[key] = f"{key!r} is {where} the {kind}"
            elif stored != built:
                misfits[key] = f"{key!r} has shape {tuple(stored)} in the adapter and {tuple(built)} in the {kind}"
        return names, misfits

    def model(self) -> nn.Module:
        """The model that was trained, on the meta device, if it has exactly the tensors that the file has."""
        if self.config["peft_type"] != "LORA":
            kind = said(self.config["peft_type"])
            raise MatchError(f"{self.path} holds an adapter of kind {kind}, which is not built here: {_PASS_IT}")
        for package in ("transformers", "peft"):
            require(package)
        base = self.config.get("base_model_name_or_path")
        config: dict[str, Any] = {}
        for folder in (self.path, self.path.parent, *([Path(base)] if isinstance(base, str) else [])):
            source = folder / _CONFIG
            # The name of the base model may be no path at all.
            config = _read_json(source) if os.path.isfile(source) else {}
            # Other things are called config.json, too.
            if isinstance(config.get("model_type"), str):
                break
        else:
            raise MatchError(
                f"the order of the parameters is that of the base model, {said(base)}, whose {_CONFIG} is not in the "
                f"adapter's folder: `hf download BASE {_CONFIG} --local-dir {self.path}`; or {_PASS_IT}"
            )
        if _names_more(config):
            raise MatchError(f"{source} names code of its own or a backbone, and neither is loaded: {_PASS_IT}")
        name = _class_of(self.config, config)
        if name is None:
            raise MatchError(
                f"neither {source} nor {_ADAPTER_CONFIG} says which class of transformers it is: {_PASS_IT}"
            )
        heads = [shape for key, shape in self.shapes.items() if key.endswith(_HEADS)]
        if heads:
            config = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
            config["num_labels"] = heads[0][0]
        model = self._put_on(_build_model(source, name, config))
        misfits = self._compared(model, self.name)[1]
        if misfits:
            raise MatchError(
                f"{source} is not the {_CONFIG} of this adapter's base model: {next(iter(misfits.values()))} that it "
                f"describes. Copy the right one there; or {_PASS_IT}"
            )
        return model

    def _put_on(self, model: nn.Module) -> nn.Module:
        """PEFT's model around this one, with a new adapter."""
        peft, given = require("peft"), self.config
        # Releases of PEFT that do not know a setting do without it where it is not used.
        deciding = {key: given[key] for key in _DECIDING if given.get(key) is not None and given[key] is not False}
        try:
            with torch.device("meta"), warnings.catch_warnings():
                # They are about training.
                warnings.simplefilter("ignore")
                made: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**deciding), adapter_name=self.name)
        except Exception as error:
            raise MatchError(
                f"{self.folder / _ADAPTER_CONFIG}: PEFT cannot put this adapter on {type(model).__name__} "
                f"({shortened(error)}): {_PASS_IT}"
            ) from error
        return made


def _class_of(adapter: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The base model's class in transformers: as PEFT noted, by the task, or as in `config.json`."""
    noted, task, own = adapter.get("auto_mapping"), adapter.get("task_type"), config.get("architectures")
    tables = require("transformers.models.auto.modeling_auto")
    table = getattr(tables, _TABLES.get(task, "") if isinstance(task, str) else "", {})
    found = [
        noted.get("base_model_class") if isinstance(noted, Mapping) else None,
        table.get(config["model_type"]),
        *(own if isinstance(own, list) and len(own) == 1 else []),
    ]
    return next((name for name in found if isinstance(name, str)), None)


PARENT = Format("folder of checkpoints", lambda path, head: bool(_checkpoints(path)), _read_parent, folder=True)
TRAINER = _folder_format("Hugging Face Trainer", _is_trainer, partial(_load_model, is_trainer=True))
ACCELERATE = _folder_format("Accelerate", _is_accelerate, partial(_load_model, is_trainer=False))
ADAPTER = _folder_format("PEFT adapter", lambda path, head: bool(_adapters_in(path)), _load_adapter)
