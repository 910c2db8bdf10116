"""Folders of Hugging Face: the Trainer's checkpoints, a folder of several of them, Accelerate's `save_state`.

Safetensors, JSON and files of `torch.save` with weights or the optimiser's state are read. `training_args.bin` and the
random states are pickles of classes, and are not opened.
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam._extras import require
from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.contents import Contents, Recorded, Rules, recorded_in
from bayesadam.readers.formats.registry import Format, format_of, refuse_keys
from bayesadam.readers.formats.torch_files import shortened
from bayesadam.readers.match import clean_names

# In the order in which transformers itself looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
STATE = "trainer_state.json"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_STATE_FILE = re.compile(r"optimizer(_\d+)?\.(pt|bin)")
_SHARD = re.compile(r"(pytorch_)?model-\d+-of-\d+\.(safetensors|bin)")
CHECKPOINT = re.compile(r"checkpoint[-_](\d+)")

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


def files_of(folder: Path) -> set[str]:
    """The names of what lies in a folder; none of what is no folder."""
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise FileError(f"{path} is truncated, damaged or no JSON object ({error}): copy it again") from error


def read_weights(folder: Path, names: Sequence[str] = _WEIGHTS) -> tuple[dict[str, Tensor], bool]:
    """The weights in the first of these files, or in the shards it lists, and whether they are in the model's order."""
    there = files_of(folder)
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
    shard_of = read_json(index).get("weight_map")
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


def folder_format(
    name: str, recognises: Callable[[Path, bytes], bool], read_weights: Callable[[Path], Contents]
) -> Format:
    """A folder of one model, with the optimiser's state in a file of its own."""

    def read_with(path: Path, weights_key: str | None, optimizer: Mapping[str, Any] | None) -> Contents:
        refuse_keys(path, "it has one set of weights", weights_key=weights_key)
        return replace(read_weights(path), optimizer=optimizer)

    def read(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
        refuse_keys(path, "pass its files, the state as optimizer_path=", optimizer_key=optimizer_key)
        contents = read_with(path, weights_key, None)
        states = sorted(file for file in files_of(path) if _STATE_FILE.fullmatch(file))
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


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name that they have."""
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}


def own_names(stored: Collection[str], model: nn.Module) -> dict[str, str]:
    """The model's name for each stored one, where they differ: renamed by transformers on saving, wrapped, or tied."""
    own = tensors_of(model)
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


def names_more(config: Mapping[str, Any]) -> bool:
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
    config = read_json(path) if path.is_file() else {}
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str) or names_more(config):
        return None
    return partial(build_model, path, classes[0], config)


def build_model(path: Path, name: str, config: Mapping[str, Any]) -> nn.Module:
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


def trainer_record(folder: Path) -> Recorded:
    """The steps and whole epochs of `trainer_state.json`, and N where our own callback wrote it down."""
    state = read_json(folder / STATE) if (folder / STATE).is_file() else {}
    callbacks = state.get("stateful_callbacks")
    ours = callbacks.get("bayesadam") if isinstance(callbacks, dict) else None
    return recorded_in(level for level in (state, ours) if isinstance(level, dict))


def summary_of(folder: Path, weights: Mapping[str, Tensor]) -> str:
    """What a folder holds, in words."""
    return f"{len(weights)} tensors, {sorted(files_of(folder))[:12]}"


def _is_trainer(path: Path, head: bytes) -> bool:
    there = files_of(path)
    weights = not there.isdisjoint(_WEIGHTS) or any(_SHARD.fullmatch(name) for name in there)
    return STATE in there or (weights and not there.isdisjoint({"config.json", *OPTIMIZERS}))


def _read_trainer(path: Path) -> Contents:
    weights, ordered = read_weights(path)
    return Contents(
        weights=weights,
        optimizer=None,
        summary=summary_of(path, weights),
        ordered=ordered,
        recorded=trainer_record(path),
        rules=Rules(model=_builder(path), names=partial(own_names, list(weights)), orders=_trainer_orders),
    )


def _checkpoints(path: Path) -> str:
    """The folders called checkpoint-N, by N, in words; empty where there is none."""
    found = [(int(match[1]), name) for name in files_of(path) if (match := CHECKPOINT.fullmatch(name))]
    return ", ".join(name for _, name in sorted(found) if (path / name).is_dir())


def _read_parent(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    names = _checkpoints(path)
    newest = path / names.rpartition(", ")[2]
    raise FileError(f"{path} is a folder of checkpoints, {names}: pass one of them; the newest is {newest}")


def _is_accelerate(path: Path, head: bytes) -> bool:
    # The Trainer of transformers may leave an optimizer.bin, too.
    return STATE not in (there := files_of(path)) and "optimizer.bin" in there


def _read_accelerate(path: Path) -> Contents:
    weights, ordered = read_weights(path)
    # The user's script made the optimiser: its order follows no rule.
    rules = Rules(names=partial(own_names, list(weights)))
    return Contents(weights, None, summary_of(path, weights), ordered=ordered, rules=rules)


PARENT = Format("folder of checkpoints", lambda path, head: bool(_checkpoints(path)), _read_parent, folder=True)
TRAINER = folder_format("Hugging Face Trainer", _is_trainer, _read_trainer)
ACCELERATE = folder_format("Accelerate", _is_accelerate, _read_accelerate)
