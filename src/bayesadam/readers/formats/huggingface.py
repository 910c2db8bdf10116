"""Folders of Hugging Face: the Trainer's checkpoints, Accelerate's `save_state`, adapters.

Safetensors, JSON and files of `torch.save` with weights or the optimiser's state are read. `training_args.bin` and the
random states are pickles of classes, and are not opened. Nothing is fetched, and no code is run that a file names.
"""

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.contents import Contents, Network, Rules, recorded_in
from bayesadam.readers.formats.lazy import clean_names, tensors_of
from bayesadam.readers.formats.registry import Format, format_of

# In the order in which transformers itself looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
STATE = "trainer_state.json"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_STATE_FILE = re.compile(r"optimizer(_\d+)?\.(pt|bin)")
_SHARD = re.compile(r"(pytorch_)?model-\d+-of-\d+\.(safetensors|bin)")
_CHECKPOINT = re.compile(r"checkpoint[-_]\d+")

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


def _files_of(folder: Path) -> set[str]:
    """The names of what lies in a folder; none of what is no folder."""
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise FileError(f"{path} is truncated, damaged or no JSON object ({error}): copy it again") from error


def _read_weights(folder: Path, names: Sequence[str] = _WEIGHTS) -> tuple[Mapping[str, Tensor], bool]:
    """The weights in the first of these files, or in the shards it lists, and whether they are in the model's order."""
    there = _files_of(folder)
    for name in names:
        if name in there:
            return (_sharded(folder / name), False) if name.endswith(".json") else _tensors_in(folder / name)
    raise FileError(
        f"{folder} has no weights, neither {' nor '.join(names)}; it has {sorted(there)[:12]}: copy the whole folder, "
        "or pass the file with the weights"
    )


def _tensors_in(path: Path) -> tuple[Mapping[str, Tensor], bool]:
    """The tensors of one file, mapped, whatever its name says; and whether they are in the model's order."""
    networks = format_of(path).read(path).networks
    if len(networks) != 1 or networks[0].path:
        raise FileError(f"{path} holds other things than tensors by name: save it with model.save_pretrained(folder)")
    return networks[0].tensors, networks[0].ordered


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


def _contents(path: Path, weights: Mapping[str, Tensor], ordered: bool, rules: Rules) -> Contents:
    """One model, with the optimiser's state in a file of its own."""
    there = sorted(_files_of(path))
    written = _read_json(path / STATE) if STATE in there else {}
    callbacks = written.get("stateful_callbacks")
    # N, where our own callback wrote it down.
    ours = callbacks.get("bayesadam") if isinstance(callbacks, dict) else None
    recorded = recorded_in(level for level in (written, ours) if isinstance(level, dict))
    states = [path / file for file in there if _STATE_FILE.fullmatch(file)]
    return Contents(
        [Network((), weights, ordered)], {}, f"{len(weights)} tensors, {there[:12]}", recorded, rules, states
    )


def decay_orders(model: nn.Module, names: Sequence[str]) -> Orders:
    """The groups into which the Trainer's releases put these parameters: decayed, then undecayed; or one group."""
    modules = [(f"{path}.", m) for path, m in model.named_modules(remove_duplicate=False) if path]
    plain = {path for path, module in modules if isinstance(module, nn.LayerNorm)}
    alike = {path for path, module in modules if type(module).__name__.endswith(("RMSNorm", "LayerNorm"))}
    answers: Orders = []
    for pattern, every_norm in _UNDECAYED:
        norms = tuple(plain | alike if every_norm else plain)
        exempt = {name for name in names if pattern.search(name) or name.startswith(norms)}
        answers.append([[name for name in names if name not in exempt], [name for name in names if name in exempt]])
    return [*answers, [list(names)]]


def _orders(model: nn.Module, stored: Collection[str] | None = None) -> Orders:
    """Of the parameters that are trained; or all in one group, as `AdamW(model.parameters())` has them.

    Of an adapter, of those that are `stored`, trained or not: what else was trained is lost, and no order fits.
    """
    named = dict(model.named_parameters())
    held = [name for name in named if stored is None or name in stored]
    trained = decay_orders(model, [name for name in held if named[name].requires_grad])
    return [*trained, *([] if stored is None else decay_orders(model, held)), [list(named)]]


def own_names(stored: Collection[str], model: nn.Module) -> dict[str, str]:
    """The model's name for each stored one, where they differ: renamed by transformers on saving, wrapped, or tied."""
    tensors = tensors_of(model)
    cleaned = {key: name for name, key in clean_names(stored).items()}
    renamed = {} if tensors.keys() >= set(stored) else _renamed_on_saving(model, tensors)
    names = {key: key if key in tensors else renamed.get(key, cleaned[key]) for key in stored}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = set(names.values())
    for key, name in names.items():
        main = first.get(id(tensors[name]), name) if name in tensors else name
        if main not in taken:
            names[key] = main
            taken.add(main)
    return {key: name for key, name in names.items() if key != name}


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


def _is_trainer(path: Path, head: bytes) -> bool:
    there = _files_of(path)
    weights = not there.isdisjoint(_WEIGHTS) or any(_SHARD.fullmatch(name) for name in there)
    return STATE in there or (weights and not there.isdisjoint({"config.json", *_OPTIMIZERS}))


def _read_model(path: Path, *, is_trainer: bool) -> Contents:
    weights, ordered = _read_weights(path)
    # The user's script made Accelerate's optimiser: its order follows no rule.
    rules = Rules(partial(own_names, list(weights)), _orders if is_trainer else None)
    return _contents(path, weights, ordered, rules)


# --- PEFT's adapters -----------------------------------------------------------------------------------------------

_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_ADAPTER_CONFIG = "adapter_config.json"


def _adapters_in(path: Path) -> list[Path]:
    """The folders with an adapter: 'default' is at the top; others, beside what the Trainer wrote, have their own."""
    there = _files_of(path)
    top = [path] if _ADAPTER_CONFIG in there else []
    if not top and there.isdisjoint({STATE, *_OPTIMIZERS}):
        return []
    inner = sorted(path / name for name in there if not _CHECKPOINT.fullmatch(name))
    return [*top, *(folder for folder in inner if (folder / _ADAPTER_CONFIG).is_file())]


def _read_adapter(path: Path) -> Contents:
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
    shapes = {key: tensor.shape for key, tensor in weights.items()}
    renamed = partial(_adapter_names, path, shapes)
    rules = Rules(renamed, lambda model: _orders(model, set(renamed(model).values())), partial=True)
    return _contents(path, weights, False, rules)


def _adapter_names(path: Path, shapes: Mapping[str, torch.Size], model: nn.Module) -> dict[str, str]:
    """The model's name for each stored one: PEFT leaves out the name of the adapter, and of copies of whole modules."""
    load = f"peft.PeftModel.from_pretrained(model, {str(path)!r}, is_trainable=True)"
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or not adapters:
        kind = type(model).__name__
        raise MatchError(f"{path} holds an adapter, and {kind} has none: pass the model with it, {load}")
    own = tensors_of(model)
    fitting, misfit = {}, ""
    for adapter in adapters:
        part = re.compile(rf"(\.modules_to_save)?\.{re.escape(adapter)}(?=\.|$)")
        saved = {name: part.sub("", name).replace("_magnitude_vector.weight", "_magnitude_vector") for name in own}
        # Without a PeftModel around it, transformers' own model saves under the names that it would have inside one.
        names = {f"base_model.model.{key}": name for name, key in saved.items()}
        names |= {key: name for name, key in saved.items()}
        odd = next((key for key, shape in shapes.items() if key not in names or own[names[key]].shape != shape), None)
        if odd is None:
            fitting[adapter] = {key: names[key] for key in shapes}
        else:
            here = f"shape {tuple(own[names[odd]].shape)}" if odd in names else "nothing"
            misfit = misfit or f"{odd!r} has shape {tuple(shapes[odd])} in the adapter and {here} in the model"
    if not fitting:
        raise MatchError(f"{path} is another model's adapter: {misfit}. Build it as {_ADAPTER_CONFIG} says")
    if len(fitting) > 1:
        which = " and ".join(map(repr, fitting))
        raise MatchError(f"{path} may be the model's {which}: pass the model with that one alone, {load}")
    return next(iter(fitting.values()))


TRAINER = Format("Hugging Face Trainer", _is_trainer, partial(_read_model, is_trainer=True), folder=True)
# The Trainer of transformers may leave an optimizer.bin, too.
ACCELERATE = Format(
    "Accelerate",
    lambda path, head: "optimizer.bin" in (there := _files_of(path)) and STATE not in there,
    partial(_read_model, is_trainer=False),
    folder=True,
)
ADAPTER = Format("PEFT adapter", lambda path, head: bool(_adapters_in(path)), _read_adapter, folder=True)
