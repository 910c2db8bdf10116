"""Files of `torch.save`: the weights and the optimiser's state somewhere in a dictionary."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from bayesadam.checkpoint.beside import reading_beside
from bayesadam.checkpoint.contents import Contents, contents_of
from bayesadam.checkpoint.names import memory_of
from bayesadam.checkpoint.registry import Format
from bayesadam.errors import FileError

_RESAVE = "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, path)"


def load_tree(path: Path) -> Any:
    """What `torch.save` wrote, mapped rather than read; nothing but tensors and plain data is unpickled."""
    try:
        with reading_beside():
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        what = f"the class {wanted[1]}" if wanted else "more than tensors and plain data"
        raise FileError(
            f"{path} needs {what} to be unpickled, which could run any code and is not done here. Save it again from "
            f"where it was made, {_RESAVE}; or, if you trust the file, do so in Python with what "
            "torch.load(path, weights_only=False) returns, or allow the class there with "
            "torch.serialization.add_safe_globals before bayesadam reads it"
        ) from None
    except SafetensorError:
        # Recent torch goes by the name.
        raise FileError(f"{path} is a file of torch.save with the name of another kind: rename it to .pt") from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise FileError(f"{path} is truncated, damaged or no file of torch.save ({reason})") from error


def _read_torch(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    return contents_of(load_tree(path), path, weights_key=weights_key, optimizer_key=optimizer_key)


def _rewrite_torch(source: Path, weights_at: tuple[str, ...], weights: Mapping[str, Tensor], target: Path) -> None:
    """The same tree with the weights at `weights_at` exchanged; all else is passed on as it is."""
    tree = copy.copy(load_tree(source))
    level = tree
    for part in weights_at:
        key = next(key for key in level if str(key) == part)
        level[key] = copy.copy(level[key])
        level = level[key]
    # One tensor for all the names of a tied one, so that it is tied in the new file.
    made: dict[tuple[Any, ...], Tensor] = {}
    for name in weights:
        old = level[name]
        memory = memory_of(old)
        tensor = made[memory] = made[memory] if memory in made else weights[name]
        level[name] = nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor
    torch.save(tree, target)


def _read_old_torch(path: Path, weights_key: str | None, optimizer_key: str | None) -> Contents:
    raise FileError(
        f"{path} is a plain pickle or a file of torch before 1.6, which cannot be mapped and is not read. If it is "
        f"yours, load it and save it again, {_RESAVE}"
    )


TORCH = Format("torch", lambda path, head: head.startswith(b"PK\x03\x04"), _read_torch, _rewrite_torch)
OLD_TORCH = Format("torch before 1.6", lambda path, head: head[:1] == b"\x80", _read_old_torch)
