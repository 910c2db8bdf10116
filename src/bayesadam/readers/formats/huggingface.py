"""Folders of Hugging Face: the Trainer's checkpoints, a folder of several of them, Accelerate's `save_state`.

What is read: safetensors, JSON, and files of `torch.save` as far as they hold tensors and plain data. `training_args.bin`
and the random states are pickles of classes, and are not opened.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam._extras import require
from bayesadam._storage import map_tensors
from bayesadam.errors import FileError, MatchError
from bayesadam.readers.formats.contents import Contents, Recorded, Rules, contents_of
from bayesadam.readers.formats.files import is_safetensors, load_tree
from bayesadam.readers.formats.registry import Format, head_of, refuse_keys
from bayesadam.readers.pairing import clean_names, keeps_order

# In the order in which transformers itself looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
STATE = "trainer_state.json"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_ACCELERATE_MODEL = re.compile(r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin)")
_ACCELERATE_OPTIMIZER = re.compile(r"optimizer(_\d+)?\.bin")
_ACCELERATE_RANDOM = re.compile(r"random_states_\d+\.pkl")
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
    """The names of what lies in a folder."""
    try:
        return {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise FileError(f"cannot read {folder}: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} is truncated, damaged or no JSON ({error}): copy it again") from error
    if not isinstance(content, dict):
        raise FileError(f"{path} holds a {type(content).__name__} where an object in braces belongs: copy it again")
    return content


def read_weights(folder: Path, names: Sequence[str] = _WEIGHTS) -> tuple[dict[str, Tensor], bool]:
    """The weights in the first of these files, or in the shards it lists, and whether they are in the model's order."""
    there = files_of(folder)
    chosen = next((name for name in names if name in there), None)
    if chosen is None:
        raise FileError(_no_weights(folder, names, there))
    if chosen.endswith(".json"):
        return _sharded(folder / chosen), False
    return read_tensors(folder / chosen)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], bool]:
    """The tensors of one file, mapped, whatever its name says it is; and whether they are in the model's order."""
    head = head_of(path)
    if not head:
        raise FileError(f"{path} is empty: copy it again")
    if is_safetensors(path, head):
        return map_tensors(path)[0], False
    tree = load_tree(path)
    if not isinstance(tree, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tree.items()
    ):
        raise FileError(f"{path} holds more than tensors by name: save it again with model.save_pretrained(folder)")
    return dict(tree), keeps_order(tree)


def read_optimizer(folder: Path, names: Collection[str], wanted: str | None) -> Mapping[str, Any] | None:
    """The optimiser's state in the one of these files that exists, or that is `wanted`; None where there is none."""
    chosen = choose(folder, names, wanted, "optimizer_key", "the state of an optimiser")
    if chosen is None:
        return None
    try:
        found = contents_of(load_tree(folder / chosen), folder / chosen)
    except FileError as error:
        raise FileError(
            f"{error}. Another file with the optimiser's state can be passed as optimizer_path= (--optimizer-file)"
        ) from error
    if found.optimizer is None:
        raise FileError(
            f"{folder / chosen} holds no optimiser's state: found {found.summary}. Pass the file that has it as "
            "optimizer_path="
        )
    return found.optimizer


def folder_format(
    name: str,
    recognises: Callable[[Path, bytes], bool],
    read_with: Callable[[Path, str | None, Mapping[str, Any] | None], Contents],
    is_optimizer: Callable[[str], object] = OPTIMIZERS.__contains__,
) -> Format:
    """A folder with the optimiser's state in a file of its own, one of those whose name `is_optimizer` accepts."""

    def read(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
        # Mapped, so read twice at little cost: what is wrong with the weights is said first.
        read_with(path, weights_key, None)
        state = read_optimizer(path, [file for file in files_of(path) if is_optimizer(file)], optimizer_key)
        return read_with(path, weights_key, state)

    return Format(name, recognises, read, read_with=read_with)


def choose(folder: Path, names: Collection[str], wanted: str | None, option: str, what: str) -> str | None:
    """The one file of the folder among `names`, or the one asked for by its name, with or without its ending."""
    there = sorted(set(names) & files_of(folder))
    if wanted is not None:
        named = [name for name in there if wanted in (name, Path(name).stem)]
        if len(named) != 1:
            raise FileError(f"{folder} has no file {option}={wanted!r} with {what}; it has {there or 'none'}")
        return named[0]
    if len(there) > 1:
        raise FileError(
            f"{folder} has {len(there)} files, each with {what}, {' and '.join(there)}: say which with "
            f"{option}={there[0]!r}"
        )
    return there[0] if there else None


def _sharded(index: Path) -> dict[str, Tensor]:
    """Weights in several files of one folder, as the index says; all of them, or an error."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(shard, str) for shard in placed.values()):
        raise FileError(f"{index} has no 'weight_map' from tensors to files: copy it again")
    shards = sorted(set(placed.values()))
    for shard in shards:
        # Windows' rule knows both kinds of slashes.
        if shard in ("", "..") or PureWindowsPath(shard).name != shard:
            raise FileError(f"{index} names {shard!r}, which is not in its own folder: nothing outside is read")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise FileError(
            f"{index.parent} lacks {', '.join(missing)}, {len(missing)} of the {len(shards)} files that {index.name} "
            "names: copy the whole folder"
        )
    tensors = {shard: read_tensors(index.parent / shard)[0] for shard in shards}
    for name, shard in placed.items():
        if name not in tensors[shard]:
            described = f"{index.parent / shard} lacks {name!r}, which {index.name} says is there"
            raise FileError(f"{described}: copy the whole folder")
    return {name: tensors[shard][name] for name, shard in placed.items()}


def _no_weights(folder: Path, names: Sequence[str], there: Collection[str]) -> str:
    shards = sorted(name for name in there if _SHARD.fullmatch(name))
    if shards:
        return f"{folder} has {shards[0]} and no index of its shards, such as {names[1]}: copy the whole folder"
    described = _other_checkpoints(folder)
    return f"{folder} has no weights, neither {' nor '.join(names)}; it has {sorted(there)[:12]}." + (
        f" Pass one of {described}" if described else " Pass the file with the weights, and optimizer_path="
    )


def decay_orders(model: nn.Module, names: Sequence[str]) -> Orders:
    """The groups into which the Trainer's releases put these parameters: decayed, then undecayed; or one group.

    >>> decay_orders(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), ["0.weight", "0.bias", "1.weight", "1.bias"])
    [[['0.weight'], ['0.bias', '1.weight', '1.bias']], [['0.weight', '0.bias', '1.weight', '1.bias']]]
    """
    answers: Orders = []
    modules = {place: module for place, module in model.named_modules(remove_duplicate=False) if place}
    for pattern, every_norm in _UNDECAYED:
        norms = {place for place, module in modules.items() if _is_norm(module, every_norm)}
        exempt = {name for name in names if pattern.search(name) or any(name.startswith(f"{n}.") for n in norms)}
        answers.append([[name for name in names if name not in exempt], [name for name in names if name in exempt]])
    return distinct([*answers, [list(names)]])


def _is_norm(module: nn.Module, every_norm: bool) -> bool:
    return isinstance(module, nn.LayerNorm) or (every_norm and type(module).__name__.endswith(("RMSNorm", "LayerNorm")))


def distinct(answers: Orders) -> Orders:
    """Each answer once."""
    return [answer for place, answer in enumerate(answers) if answer not in answers[:place]]


def _trainer_orders(model: nn.Module) -> Orders:
    """Of the parameters that are trained; or all in one group, as `AdamW(model.parameters())` has them."""
    named = dict(model.named_parameters())
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    return distinct([*decay_orders(model, trained), [list(named)]])


def own_names(stored: Collection[str], model: nn.Module) -> dict[str, str]:
    """The model's name for each stored one, where they differ: renamed by transformers on saving, wrapped, or tied.

    Of the names of a tied tensor a file may hold any; it goes by the one that `named_parameters` gives.
    """
    own = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
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
    """The model's names by those that transformers' `save_pretrained` gives them, where it keeps an older layout.

    The model is one of transformers' only if that is imported already. What it does not merely rename is left out, and
    is then found to be missing.
    """
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


def _builder(folder: Path) -> Callable[[], nn.Module] | None:
    """What builds the model that `config.json` describes; None where it names no class, or one with code of its own."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    classes = config.get("architectures")
    named = isinstance(classes, list) and len(classes) == 1 and isinstance(classes[0], str)
    if not named or names_more(config):
        return None
    return partial(build_model, path, classes[0], config)  # type: ignore[index]


def names_more(config: Mapping[str, Any]) -> bool:
    """Whether a configuration names code of its own, or a backbone, whose weights may be fetched when it is built."""
    return any("auto_map" in key or "backbone" in key for key in _keys_of(config))


def _keys_of(config: Mapping[str, Any]) -> set[str]:
    """Every key with something under it, at any depth."""
    found: set[str] = set()
    left: list[Any] = [config]
    for item in left:
        if isinstance(item, dict):
            found |= {key for key, value in item.items() if value}
        left += item.values() if isinstance(item, dict) else item if isinstance(item, list) else []
    return found


def build_model(path: Path, name: str, config: Mapping[str, Any]) -> nn.Module:
    """The model of a `config.json`, on the meta device; of a class that transformers itself defines, or none."""
    transformers = require("transformers")
    remedy = "build the model as it was built for training, and pass it"
    # Attention may be asked for by the address of a kernel.
    plain = {key: value for key, value in config.items() if "attn_implementation" not in key}
    try:
        made: Any = getattr(transformers, name, None)
        ours = isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)
        if not ours or not made.__module__.startswith("transformers."):
            raise MatchError(f"{path} names the class {name!r}, which transformers does not define: {remedy}")
        with torch.device("meta"):
            model: nn.Module = made(made.config_class.from_dict(plain))
    except MatchError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise MatchError(f"{path}: transformers cannot build {name!r} from it ({reason}): {remedy}") from error
    return model


def recorded_in(folder: Path) -> Recorded:
    """The steps and whole epochs of `trainer_state.json`, and N where our own callback wrote it down.

    Otherwise N is not in it: the size of a batch is, but not how many were accumulated, on how many machines.
    """
    if not (folder / STATE).is_file():
        return Recorded()
    state = read_json(folder / STATE)
    step, epoch = state.get("global_step"), state.get("epoch")
    callbacks = state.get("stateful_callbacks")
    ours = callbacks.get("bayesadam") if isinstance(callbacks, dict) else None
    n_data = ours.get("n_data") if isinstance(ours, dict) else None
    return Recorded(
        step=step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None,
        n_data=n_data if isinstance(n_data, int) and not isinstance(n_data, bool) and n_data > 0 else None,
        epoch=int(epoch) if isinstance(epoch, int | float) and math.isfinite(epoch) and epoch >= 0 else None,
    )


def _is_trainer(path: Path, head: bytes) -> bool:
    there = files_of(path) if path.is_dir() else set()
    weights = not there.isdisjoint(_WEIGHTS) or any(_SHARD.fullmatch(name) for name in there)
    return STATE in there or (weights and not there.isdisjoint({"config.json", *OPTIMIZERS}))


def _trainer_with(path: Path, weights_key: str | None, optimizer: Mapping[str, Any] | None) -> Contents:
    refuse_keys(path, "it has one set of weights", weights_key=weights_key)
    weights, ordered = read_weights(path)
    return Contents(
        weights=weights,
        optimizer=optimizer,
        summary=summary_of(path, weights),
        ordered=ordered,
        recorded=recorded_in(path),
        rules=Rules(model=_builder(path), names=partial(own_names, list(weights)), orders=_trainer_orders),
    )


def summary_of(folder: Path, weights: Mapping[str, Tensor]) -> str:
    """What a folder holds, in words."""
    described = _other_checkpoints(folder)
    files = sorted(name for name in files_of(folder) if not _SHARD.fullmatch(name))
    return f"{len(weights)} tensors, {files[:12]}" + (f"; checkpoints are in {described}" if described else "")


def _checkpoints_in(path: Path) -> list[Path]:
    """The folders called checkpoint-N, by N."""
    numbered = [(int(match[1]), name) for name in files_of(path) if (match := CHECKPOINT.fullmatch(name))]
    return [path / name for _, name in sorted(numbered) if (path / name).is_dir()]


def _other_checkpoints(path: Path) -> str:
    names = [folder.name for folder in _checkpoints_in(path)]
    return ", ".join(names if len(names) <= 8 else [*names[:3], "…", *names[-3:]])


def _read_parent(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    folders = _checkpoints_in(path)
    raise FileError(
        f"{path} holds {len(folders)} checkpoint{'s' if len(folders) > 1 else ''}, {_other_checkpoints(path)}: pass one "
        f"of them; the newest is {folders[-1]}"
    )


def _is_accelerate(path: Path, head: bytes) -> bool:
    there = files_of(path) if path.is_dir() else set()
    # The Trainer of transformers may leave an optimizer.bin, too.
    return STATE not in there and any(
        _ACCELERATE_OPTIMIZER.fullmatch(name) or _ACCELERATE_RANDOM.fullmatch(name) for name in there
    )


def _accelerate_with(path: Path, weights_key: str | None, optimizer: Mapping[str, Any] | None) -> Contents:
    """One model of those that were prepared; the others are `model_1`, …, as their optimisers are `optimizer_1`, …"""
    there = sorted(files_of(path))
    models = [name for name in there if _ACCELERATE_MODEL.fullmatch(name)]
    if len(models) > 1 or weights_key is not None:
        chosen = choose(path, models, weights_key, "weights_key", "the weights of a model")
        weights, ordered = read_tensors(path / (chosen or ""))
    else:
        weights, ordered = read_weights(path)
    return Contents(
        weights=weights,
        optimizer=optimizer,
        summary=f"{len(weights)} tensors, {there[:12]}",
        ordered=ordered,
        # The user's script made the optimiser: its order follows no rule.
        rules=Rules(names=partial(own_names, list(weights))),
    )


PARENT = Format("folder of checkpoints", lambda path, head: path.is_dir() and bool(_checkpoints_in(path)), _read_parent)
TRAINER = folder_format("Hugging Face Trainer", _is_trainer, _trainer_with)
ACCELERATE = folder_format("Accelerate", _is_accelerate, _accelerate_with, _ACCELERATE_OPTIMIZER.fullmatch)
