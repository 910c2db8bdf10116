"""Sharded posteriors on disk: a folder of torch.distributed.checkpoint, and the header as a JSON file in it.

Each process writes its shards; any number of processes reads them. The one pickle there, torch's list of contents, is
read by `checkpoint.distributed`, which makes nothing but plain records of it, before torch is let near it.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam._files import replacing
from bayesadam._shards import is_sharded, on_first_rank, wrapped
from bayesadam._storage import FORMAT_VERSION, POSTERIOR, check_owner, check_version
from bayesadam.errors import FileError, MissingFileError
from bayesadam.readers.formats.distributed import stored_entries

_HEADER_FILE = f"{POSTERIOR.header}.json"


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors under `role.parameter` names, from all processes together; an older folder is replaced at the end."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    target = Path(path)
    unfinished = target.with_name(f".{target.name}.unfinished")
    _by_first(lambda: _prepare(target, unfinished))
    try:
        save(dict(tensors), checkpoint_id=str(unfinished))
    except CheckpointException as failure:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise FileError(f"cannot save to {target}: {failure}") from failure
    _by_first(lambda: _finish(target, unfinished, json.dumps({"format": FORMAT_VERSION, **header})))


def read(path: str | os.PathLike[str], parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, each placed as the parameter it is named after, and the header; all processes must call it."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    source = Path(path)
    header = _read_header(source)
    tensors: dict[str, Tensor] = {}
    for entry in stored_entries(source):
        if entry.shape is None:
            raise FileError(f"{source} is damaged: {entry.key!r} is not a tensor")
        name = entry.key.partition(".")[2]
        check_owner(source, {name: torch.Size(entry.shape)}, parameters)
        tensors[entry.key] = _empty_like(parameters[name], entry.dtype)
    try:
        with warnings.catch_warnings():
            # That one process reads alone is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, checkpoint_id=str(source))
    except CheckpointException as failure:
        raise FileError(f"{source} cannot be read: {failure}") from failure
    return tensors, header


def _read_header(source: Path) -> dict[str, Any]:
    try:
        header = json.loads((source / _HEADER_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{source} is a folder but not a saved posterior: it has no {_HEADER_FILE}") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{source / _HEADER_FILE} cannot be read ({error})") from error
    header = header if isinstance(header, dict) else {}
    check_version(source, header.get("format"))
    return header


def _empty_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    if is_sharded(parameter):
        return wrapped(torch.empty_like(parameter.to_local(), dtype=dtype, requires_grad=False), parameter)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def _prepare(target: Path, unfinished: Path) -> None:
    if not target.parent.is_dir():
        raise MissingFileError(f"cannot save to {target}: the folder {target.parent} does not exist")
    if target.exists() and not (target / _HEADER_FILE).is_file():
        raise FileError(f"cannot save to {target}: it exists and is not the folder of a saved posterior")
    shutil.rmtree(unfinished, ignore_errors=True)


def _finish(target: Path, unfinished: Path, header: str) -> None:
    with replacing(unfinished / _HEADER_FILE) as temporary:
        temporary.write_text(header, encoding="utf-8")
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        unfinished.rename(target)
        shutil.rmtree(old)
    else:
        unfinished.rename(target)


def _by_first(work: Callable[[], None]) -> None:
    """Have the first process do something while the others wait; they fail together."""
    try:
        on_first_rank(work)
    except OSError as error:
        raise FileError(str(error)) from error
