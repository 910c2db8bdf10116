"""Folders of DeepSpeed, without ZeRO and with its stages 1 and 2.

`mp_rank_00_model_states.pt` has the weights, and the parameters' names and shapes group by group. With ZeRO a group is
one long vector, cut into a piece for each rank, in `zero_pp_rank_<r>_mp_rank_00_optim_states.pt`. What that says of
positions is wrong with `round_robin_gradients`; the order of the shapes is right, and zero_to_fp32 goes by it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam._files import damage_named
from bayesadam.errors import FileError
from bayesadam.readers.formats.contents import Contents, Network, Recorded, contents_of, describe
from bayesadam.readers.formats.lazy import Lazy, gathered, meta
from bayesadam.readers.formats.registry import Format
from bayesadam.readers.formats.torch_files import load_tree

_MODEL = "mp_rank_00_model_states.pt"
_MODELS = "mp_rank_*_model_states.pt"
_STAGE_3 = "zero_pp_rank_*_model_states.pt"
_RANK = "zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
_COPY = "Copy the files of all ranks of one save into it"


def _step_folder(path: Path) -> Path | None:
    """The folder with the files: itself, or the one that `latest` names."""
    try:
        tag = (path / "latest").read_text().strip()
    except (OSError, UnicodeDecodeError):
        tag = ""
    named = [path / tag] if tag and Path(tag).name == tag else []
    patterns = (_MODELS, _STAGE_3, f"*{_RANK.format(rank='*')}")
    return next((folder for folder in (path, *named) if any(any(folder.glob(one)) for one in patterns)), None)


def _read_deepspeed(path: Path) -> Contents:
    folder = _step_folder(path) or path
    if any(folder.glob(_STAGE_3)) or len(list(folder.glob(_MODELS))) > 1:
        raise FileError(f"{folder} was saved by ZeRO stage 3 or by model-parallel ranks: stages 1 and 2 are read")
    if not (folder / _MODEL).is_file():
        raise FileError(f"{folder} has no {_MODEL}, where the weights are: copy it from the first rank's machine")
    saved = load_tree(folder / _MODEL)
    with damage_named(folder, "DeepSpeed 0.19"):
        if saved["optimizer"] is not None:
            tree = {"model": saved["module"], "optimizer": saved["optimizer"], "step": saved["global_steps"]}
            return contents_of(tree, path)
        return _partitioned(folder, saved, [_load_rank(folder, rank) for rank in range(saved["dp_world_size"])])


def _load_rank(folder: Path, rank: int) -> Mapping[str, Any]:
    names = [prefix + _RANK.format(rank=rank) for prefix in ("", "bf16_")]
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise FileError(f"{folder} has no {names[0]}: every rank wrote its own, copy those of all machines into it")
    state: Mapping[str, Any] = load_tree(file)["optimizer_state_dict"]
    if not isinstance(state["base_optimizer_state"], Mapping):
        raise FileError(f"{file} was saved with elastic_checkpoint=True, which leaves out settings: save it without")
    return state


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
            states[name] = _joined(folder, name, moments, start, length, shape)
            masters[name] = _joined(folder, name, weights, start, length, shape)
            start += shape.numel()
            # Where the float32 weights, rounded, are not the model's, the moments are not its own, either.
            master, weight = masters[name]["weight"], saved["module"][name]
            if not torch.equal(master.to(weight.dtype).nan_to_num(), weight.nan_to_num()):
                raise FileError(f"{folder}: the ranks' {name!r} is not that of {_MODEL}: different saves. {_COPY}")
        groups.append({**base_states[0]["param_groups"][number], "params": list(shapes)})
    # Both names of a tied tensor are in the model's file, one of them in the groups; buffers and frozen ones in none.
    module = {name: tensor for name, tensor in saved["module"].items() if isinstance(tensor, Tensor)}
    owner = {name: saved["shared_params"].get(name, name) for name in module}
    places = {name: (masters[one], "weight") if one in masters else (module, name) for name, one in owner.items()}
    return Contents(
        networks=[Network(("module",), gathered(places))],
        states={("optimizer",): {"state": states, "param_groups": groups}},
        summary=describe(saved),
        recorded=Recorded(step=saved["global_steps"]),
    )


def _joined(
    folder: Path, name: str, vectors: Sequence[Mapping[str, Any]], start: int, length: int, shape: torch.Size
) -> Lazy:
    """One parameter's entries, from `start` on in vectors cut into pieces of `length`; counters as they are."""

    def parts(key: str) -> list[Tensor]:
        ends = ([max(end - rank * length, 0) for end in (start, start + shape.numel())] for rank in range(len(vectors)))
        return [vector[key][:length][low:high] for vector, (low, high) in zip(vectors, ends, strict=True)]

    cut = {key: value for key, value in vectors[0].items() if _is_vector(value)}
    for key in cut:
        if sum(part.numel() for part in parts(key)) != shape.numel():
            lengths = [vector[key].numel() for vector in vectors]
            raise FileError(f"{folder} does not have the whole of {name!r}: its ranks have {lengths} entries. {_COPY}")
    outline = {**vectors[0], **{key: meta(shape, value.dtype) for key, value in cut.items()}}
    return Lazy(outline, lambda key: torch.cat(parts(key)).view(shape))


def _is_vector(value: Any) -> bool:
    """Whether there is an entry for each weight; a counter has no dimension."""
    return isinstance(value, Tensor) and value.dim() == 1


DEEPSPEED = Format("deepspeed", lambda path, head: _step_folder(path) is not None, _read_deepspeed, folder=True)
