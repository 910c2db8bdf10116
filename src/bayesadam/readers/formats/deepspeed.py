"""Folders of DeepSpeed, without ZeRO and with its stages 1 and 2.

`mp_rank_00_model_states.pt` has the weights, and the parameters' names and shapes group by group. With ZeRO the parameters
of a group are one long vector, cut into as many pieces as there are ranks: `zero_pp_rank_<r>_mp_rank_00_optim_states.pt`
has rank r's piece of the weights in float32 and of every moment. It also notes where in the piece each parameter lies,
which is wrong where `round_robin_gradients` is on; the order of the shapes is right, and DeepSpeed's own zero_to_fp32 goes
by it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesadam.errors import FileError
from bayesadam.readers.formats.contents import Contents, Recorded, contents_of, describe
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.readers.formats.registry import Format, refuse_keys
from bayesadam.readers.formats.torch_files import load_tree

_MODEL = "mp_rank_00_model_states.pt"
_MODELS = "mp_rank_*_model_states.pt"
_STAGE_3 = "zero_pp_rank_*_model_states.pt"
_RANK = "zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


class _Part(NamedTuple):
    """A rank's part of one parameter: `numel` entries of its vectors from `start` on."""

    rank: int
    start: int
    numel: int


def step_folder(path: Path) -> Path | None:
    """The folder with the files: itself, or the one that `latest` names."""
    if not path.is_dir():
        return None
    if _has_files(path):
        return path
    try:
        tag = (path / "latest").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return path / tag if tag and Path(tag).name == tag and _has_files(path / tag) else None


def _has_files(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in (_MODELS, _STAGE_3, f"*{_RANK.format(rank='*')}"))


def _read_deepspeed(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    refuse_keys(path, "DeepSpeed saves one model and its state", weights_key=weights_key, optimizer_key=optimizer_key)
    folder = step_folder(path) or path
    if any(folder.glob(_STAGE_3)):
        raise FileError(
            f"{folder} was saved by ZeRO stage 3, which cuts the model itself and is not read. Save it from training with "
            "stage 1 or 2, or gather the state by name there, with deepspeed.utils.safe_get_full_optimizer_state"
        )
    if len(list(folder.glob(_MODELS))) > 1:
        raise FileError(f"{folder} was saved from several model-parallel ranks, which is not read")
    if not (folder / _MODEL).is_file():
        raise FileError(f"{folder} has no {_MODEL}, where the weights are: copy it from the first rank's machine")
    saved = load_tree(folder / _MODEL)
    try:
        if saved["optimizer"] is not None:
            tree = {"model": saved["module"], "optimizer": saved["optimizer"], "step": saved["global_steps"]}
            return contents_of(tree, path)
        return _partitioned(folder, saved, [_load_rank(folder, rank) for rank in range(saved["dp_world_size"])])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise FileError(
            f"{folder} does not have the layout of DeepSpeed 0.19 ({type(error).__name__}: {error}): files of another "
            "release, or of several saves, cannot be read"
        ) from error


def _load_rank(folder: Path, rank: int) -> Mapping[str, Any]:
    """A rank's part of the optimiser's state, mapped rather than read."""
    names = [prefix + _RANK.format(rank=rank) for prefix in ("", "bf16_")]
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise FileError(f"{folder} has no {names[0]}: every rank wrote its own, copy those of all machines into it")
    saved_state: Mapping[str, Any] = load_tree(file)["optimizer_state_dict"]
    if not isinstance(saved_state["base_optimizer_state"], Mapping):
        raise FileError(
            f"{file} was saved with elastic_checkpoint=True, which leaves out the optimiser's settings: save it without"
        )
    return saved_state


def _partitioned(folder: Path, saved: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> Contents:
    """The weights and states by name, put together from the ranks' vectors when they are accessed."""
    states: dict[str, Lazy] = {}
    groups: list[dict[str, Any]] = []
    masters: dict[str, Lazy] = {}
    for number, shapes in enumerate(saved["param_shapes"]):
        base_states = [rank["base_optimizer_state"] for rank in ranks]
        moments = [state["state"][state["param_groups"][number]["params"][0]] for state in base_states]
        weights = [{"weight": rank["single_partition_of_fp32_groups"][number]} for rank in ranks]
        # All pieces have the length of the first; the padding at the end was cut off from the weights alone.
        length = max(value.numel() for value in moments[0].values() if _is_vector(value))
        start = 0
        for name, shape in shapes.items():
            parts = parts_of(start, shape.numel(), length)
            start += shape.numel()
            states[name] = _joined(folder, name, moments, parts, shape)
            masters[name] = _joined(folder, name, weights, parts, shape)
            _check_place(folder, name, masters[name]["weight"], saved["module"][name])
        groups.append({**base_states[0]["param_groups"][number], "params": list(shapes)})
    # Both names of a tied tensor are in the model's file, one of them in the groups; buffers and frozen ones in none.
    owner = {name: saved["shared_params"].get(name, name) for name in saved["module"]}
    outline = {
        name: masters[owner[name]].outline["weight"] if owner[name] in masters else tensor
        for name, tensor in saved["module"].items()
        if isinstance(tensor, Tensor)
    }
    return Contents(
        weights=Lazy(outline, lambda name: masters[owner[name]]["weight"]),
        optimizer={"state": states, "param_groups": groups},
        summary=describe(saved),
        weights_at=("module",),
        ordered=True,
        recorded=Recorded(step=saved["global_steps"]),
    )


def parts_of(start: int, numel: int, length: int) -> list[_Part]:
    """The ranks' parts of `numel` entries from `start` on in a vector that is cut into pieces of `length`.

    >>> parts_of(4, 5, 6)
    [_Part(rank=0, start=4, numel=2), _Part(rank=1, start=0, numel=3)]
    """
    parts = []
    while numel:
        rank, place = divmod(start, length)
        taken = min(numel, length - place)
        parts.append(_Part(rank, place, taken))
        start, numel = start + taken, numel - taken
    return parts


def _check_place(folder: Path, name: str, master: Tensor, weight: Tensor) -> None:
    """Refuse where the ranks' float32 weights, rounded, are not the model's: the moments are then not its own, either."""
    if master.shape != weight.shape or not torch.equal(master.to(weight.dtype).nan_to_num(), weight.nan_to_num()):
        raise FileError(
            f"{folder}: what the ranks have of {name!r} is not what {_MODEL} has: the files are of different saves, or "
            "of a layout that is not known. Copy the files of all ranks of one save into it"
        )


def _joined(
    folder: Path, name: str, vectors: Sequence[Mapping[str, Any]], parts: Sequence[_Part], shape: torch.Size
) -> Lazy:
    """One parameter's entries: what the ranks keep as vectors, cut out and put in a row; all else as the first has it."""
    first = vectors[0]
    for key in (key for key, value in first.items() if _is_vector(value)):
        lengths = [vector[key].numel() for vector in vectors]
        if any(part.rank >= len(lengths) or part.start + part.numel > lengths[part.rank] for part in parts):
            raise FileError(
                f"{folder} does not have the whole of {name!r}, of shape {tuple(shape)}: for {key!r} the ranks have "
                f"{lengths} entries. Copy the files of all ranks of one save into it"
            )

    def read(key: str) -> Tensor:
        cut = [vectors[part.rank][key][part.start : part.start + part.numel] for part in parts]
        return (cut[0] if len(cut) == 1 else torch.cat([vectors[0][key][:0], *cut])).view(shape)

    return Lazy({key: meta(shape, value.dtype) if _is_vector(value) else value for key, value in first.items()}, read)


def _is_vector(value: Any) -> bool:
    """Whether there is an entry for each weight; a counter has no dimension."""
    return isinstance(value, Tensor) and value.dim() == 1


DEEPSPEED = Format("deepspeed", lambda path, head: step_folder(path) is not None, _read_deepspeed)
