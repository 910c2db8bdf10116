"""Folders of PEFT's adapters, and the model behind a LoRA: built without values from its base model's `config.json`.

The optimiser numbers the tensors in the model's order, which an adapter's file does not keep. Nothing is fetched, no
code is run that a file names, and a model is used only if it has exactly the tensors of the file.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bayesadam.readers.formats.huggingface as hf
from bayesadam._extras import require
from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.contents import Contents, Rules
from bayesadam.readers.formats.pickles import said
from bayesadam.readers.formats.torch_files import shortened

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
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
    there = hf.files_of(path)
    own = [path] if _ADAPTER_CONFIG in there else []
    if not own and there.isdisjoint({hf.STATE, *hf.OPTIMIZERS}):
        return []
    inner = sorted(path / name for name in there if not hf.CHECKPOINT.fullmatch(name))
    return [*own, *(folder for folder in inner if (folder / _ADAPTER_CONFIG).is_file())]


def _read_adapter(path: Path) -> Contents:
    folders = _adapters_in(path)
    # An adapter of another name than PEFT's first has a folder of that name.
    names = ["default" if folder == path else folder.name for folder in folders]
    if len(folders) > 1:
        raise FileError(
            f"{path} holds {len(folders)} adapters, {', '.join(map(repr, names))}, and one state of the optimiser: "
            "read them from the live model and optimiser (Posterior.from_optimizer), or train one at a time"
        )
    config = hf.read_json(folders[0] / _ADAPTER_CONFIG)
    if not isinstance(config.get("peft_type"), str):
        raise FileError(f"{folders[0] / _ADAPTER_CONFIG} has no 'peft_type': it is not PEFT's; copy it again")
    weights, _ = hf.read_weights(folders[0], _WEIGHTS)
    adapter = _Adapter(path, folders[0], names[0], config, {key: tensor.shape for key, tensor in weights.items()})
    rules = Rules(model=adapter.model, names=adapter.names, orders=adapter.orders, partial=True)
    return Contents(weights, None, hf.summary_of(path, weights), recorded=hf.trainer_record(path), rules=rules)


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

    def orders(self, model: nn.Module) -> hf.Orders:
        """The Trainer's orders of what the file holds: what else was trained is lost, and no order fits."""
        held = set(self.names(model).values())
        named = dict(model.named_parameters())
        stored = [name for name in named if name in held]
        trained = [name for name in stored if named[name].requires_grad]
        return [*hf.decay_orders(model, trained), *hf.decay_orders(model, stored), [list(named)]]

    def _compared(self, model: nn.Module, name: str) -> tuple[dict[str, str], dict[str, str]]:
        """The model's names by those under which PEFT saves its adapter `name`, and what differs from the file."""
        own, peft = hf.tensors_of(model), require("peft")
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
            config = hf.read_json(source) if os.path.isfile(source) else {}
            # Other things are called config.json, too.
            if isinstance(config.get("model_type"), str):
                break
        else:
            raise MatchError(
                f"the order of the parameters is that of the base model, {said(base)}, whose {_CONFIG} is not in the "
                f"adapter's folder: `hf download BASE {_CONFIG} --local-dir {self.path}`; or {_PASS_IT}"
            )
        if hf.names_more(config):
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
        model = self._put_on(hf.build_model(source, name, config))
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


ADAPTER = hf.folder_format("PEFT adapter", lambda path, head: bool(_adapters_in(path)), _read_adapter)
