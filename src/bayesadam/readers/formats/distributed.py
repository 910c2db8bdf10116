"""Folders of torch.distributed.checkpoint: a list of contents, and for each rank a file of the pieces it held.

`.metadata`, a pickle, is read as data. A tensor is put together from its pieces on access, whatever the number of ranks
and the dimension it was cut along.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesadam._files import damage_named
from bayesadam.errors import FileError
from bayesadam.readers.formats.contents import Contents, contents_of
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.readers.formats.registry import Format
from bayesadam.readers.formats.torch_files import load_tree, load_view, mapped

_WRITER = "torch.distributed.checkpoint"
_METADATA = ".metadata"
_PIECES = "*.distcp"
_DEEPEST = 100


class Piece(NamedTuple):
    """The bytes of a file that hold an entry, or a box of a tensor by first corner and edges."""

    file: Path
    start: int
    length: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class Stored(NamedTuple):
    """One entry of the folder: its key, the keys and list indices that lead to it, its pieces; a tensor has a shape."""

    key: str
    path: tuple[str | int, ...]
    pieces: list[Piece]
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32


def stored_entries(folder: Path) -> list[Stored]:
    """Every entry, in the order of the dictionaries that were saved; nothing but the list of contents is read."""
    source = folder / _METADATA
    if not source.is_file():
        raise FileError(f"{folder} has no {_METADATA}, which is written last: the save did not finish, or it was lost")
    with damage_named(source, _WRITER):
        record = load_tree(source).state
        nesting, kinds = record["planner_data"], record["state_dict_metadata"]
        if not nesting:
            raise FileError(f"{source} has no planner_data: save it with torch's default planner")
        located = {}
        for index, place in record["storage_data"].items():
            low = index.state.get("offset")
            located[index.state["fqn"], None if low is None else tuple(low)] = place.state
        return [_entry(folder, key, path, kinds[key].state, located) for key, path in nesting.items() if key in kinds]


def _entry(folder: Path, key: str, path: Any, kind: Mapping[str, Any], located: Mapping[Any, Any]) -> Stored:
    parts = tuple(path)
    if not 0 < len(parts) <= _DEEPEST or not all(isinstance(part, str | int) for part in parts):
        raise ValueError(f"{key!r} has the path {path!r}")
    if "size" not in kind:
        return Stored(key, parts, [_piece(folder, key, located[key, None])])
    # The type comes first in what torch pickles of a tensor's properties.
    shape, dtype = tuple(kind["size"]), kind["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{key!r} has the type {dtype!r}")
    # Where every rank has the whole, the same box is listed once for each.
    boxes = dict.fromkeys((tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])) for chunk in kind["chunks"])
    filled = [box for box in boxes if math.prod(box[1])]
    corners = [corner for box in filled for corner in zip(*box, shape, strict=True)]
    is_inside = min(shape, default=0) >= 0 and all(
        low >= 0 <= size and low + size <= edge for low, size, edge in corners
    )
    # Ranks share no entry, so that boxes which are as large as the tensor fill it.
    is_whole = is_inside and sum(math.prod(sizes) for _, sizes in filled) == math.prod(shape)
    if not is_whole or any((key, low) not in located for low, _ in filled):
        raise FileError(f"{folder / _METADATA} does not have the whole of {key!r}: a rank's part was not saved")
    return Stored(key, parts, [_piece(folder, key, located[key, box[0]], *box) for box in filled], shape, dtype)


def _piece(folder: Path, key: str, place: Mapping[str, Any], *box: tuple[int, ...]) -> Piece:
    """Where an entry lies; a name that leads out of the folder, or bytes that are not there, are refused."""
    name, start, length = place["relative_path"], place["offset"], place["length"]
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or ":" in name:
        raise FileError(f"{folder / _METADATA} puts {key!r} into {name!r}, outside of the folder: it is not read")
    file = folder / relative
    if not file.is_file():
        raise FileError(f"{folder} has no {name}, where a part of {key!r} is: copy those of all machines")
    if start < 0 or length < 0 or start + length > file.stat().st_size:
        raise FileError(f"{file} is truncated: {key!r} should end at byte {start + length}. Copy it again")
    return Piece(file, start, length, *box)


def read_stored(entry: Stored) -> Any:
    """An entry's value; a tensor is put together from its pieces."""
    if entry.shape is None or len(entry.pieces) == 1:
        return _load(entry, entry.pieces[0])
    # Zeros: pieces of a damaged folder may overlap, and leave memory of the process open.
    tensor = torch.zeros(entry.shape, dtype=entry.dtype)
    for piece in entry.pieces:
        ranges = (slice(low, low + size) for low, size in zip(piece.offsets, piece.sizes, strict=True))
        tensor[tuple(ranges)] = _load(entry, piece)
    return tensor


def _load(entry: Stored, piece: Piece) -> Any:
    view = mapped(piece.file)[piece.start : piece.start + piece.length]
    value = load_view(view, f"{piece.file}: {entry.key!r}")
    if entry.shape is None:
        return value
    if not isinstance(value, Tensor) or tuple(value.shape) != piece.sizes or value.dtype != entry.dtype:
        raise FileError(f"{piece.file} does not hold {entry.key!r} as it should: the files are not of one save")
    return value.detach()


def nested(leaves: Iterable[tuple[tuple[str | int, ...], Any]]) -> Any:
    """Dictionaries, and lists where a path has a number, from the path of every leaf."""
    below: dict[str | int, list[tuple[tuple[str | int, ...], Any]]] = {}
    for (first, *rest), value in leaves:
        below.setdefault(first, []).append((tuple(rest), value))
    built = {key: inner[0][1] if len(inner) == 1 and not inner[0][0] else nested(inner) for key, inner in below.items()}
    return [built[key] for key in sorted(built)] if all(isinstance(key, int) for key in built) else built


def torch_layout(tree: Any) -> Any:
    """The tree with every optimiser's state in torch's layout: keys are numbers again, flattened ones have levels."""
    if isinstance(tree, list):
        return [torch_layout(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if any(key.startswith("param_groups.") for key in tree) and all(
        key.startswith(("state.", "param_groups.")) for key in tree
    ):
        return _unflattened(tree)
    groups, states = tree.get("param_groups"), tree.get("state", {})
    if isinstance(groups, list) and isinstance(states, dict) and all("params" in group for group in groups):
        number = {str(key): key for group in groups for key in group["params"]}
        return {**tree, "state": {number.get(key, key): state for key, state in states.items()}}
    return {key: torch_layout(value) for key, value in tree.items()}


def _unflattened(flat: Mapping[str, Any]) -> dict[str, Any]:
    """An optimiser's state with levels; every parameter has a group of its own."""
    groups: dict[str, dict[str, Any]] = {}
    states: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        entries = states.setdefault(name, {}) if kind == "state" else groups.setdefault(name, {"params": [name]})
        entries[entry] = value
    return {"state": states, "param_groups": list(groups.values())}


def _read_distributed(path: Path) -> Contents:
    # Counters are needed at once; of larger tensors the shape and type are enough until they are accessed.
    leaves, behind = [], {}
    for entry in stored_entries(path):
        if entry.shape is None or math.prod(entry.shape) == 1:
            leaves.append((entry.path, read_stored(entry)))
        else:
            outline = meta(entry.shape, entry.dtype)
            leaves.append((entry.path, outline))
            behind[id(outline)] = entry
    with damage_named(path / _METADATA, _WRITER):
        tree = torch_layout(nested(leaves))
    contents = contents_of(tree, path)
    if not contents.networks:
        # Some trainers save the model's tensors at the top, with the rest.
        loose = {key: value for key, value in tree.items() if isinstance(value, Tensor)}
        contents = contents_of({"model": loose, **{key: v for key, v in tree.items() if key not in loose}}, path)

    def lazy(outline: Any) -> Any:
        def read(key: str) -> Any:
            inner = outline[key]
            return lazy(inner) if isinstance(inner, Mapping) else read_stored(behind[id(inner)])

        return Lazy(outline, read) if isinstance(outline, Mapping) else outline

    return replace(
        contents,
        networks=[replace(network, tensors=lazy(network.tensors)) for network in contents.networks],
        states={
            path: {**state, "state": {key: lazy(inner) for key, inner in state["state"].items()}}
            for path, state in contents.states.items()
        },
    )


def _is_distributed(path: Path, head: bytes) -> bool:
    """A folder with the writer's list of contents, or with pieces at least."""
    if any(path.glob(_PIECES)):
        return True
    source = path / _METADATA
    return source.is_file() and b"torch.distributed.checkpoint.metadata" in source.read_bytes()[:256]


DISTRIBUTED = Format(_WRITER, _is_distributed, _read_distributed, folder=True)
