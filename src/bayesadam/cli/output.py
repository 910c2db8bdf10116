"""What the commands read, print and write."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesadam._files import damage_named, keep_apart
from bayesadam._options import in_options
from bayesadam.errors import FileError, MissingFileError, SettingError

if TYPE_CHECKING:
    from torch import nn

    from bayesadam import Posterior
    from bayesadam.compress import PruningReport


def show(report: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Print a report as JSON that any reader takes, null for what is not finite; or as text."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(plain(report), indent=2, ensure_ascii=False) if as_json else in_options(text))


def write(
    work: Callable[[Path], object], out: Path, usual: str, sources: Sequence[Path | None], quiet: bool = True
) -> None:
    """Let the work write its file, apart from what it reads; print what it reports, then the file's path.

    The file is `out` where that has an ending, else the usual name in that folder.
    """
    file = out if out.suffix and not out.is_dir() else out / usual
    keep_apart(file, *sources)
    with _folder_for(file):
        report = work(file)
    if not quiet:
        print(in_options(str(report or f"{file.stat().st_size:,} bytes")), end="\n\n")
    print(file)


@contextmanager
def _folder_for(file: Path) -> Iterator[None]:
    """Make the file's folder before the work inside; if that fails, remove what was made."""
    absent = [folder for folder in file.parents if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot write to {file.parent}: {error.strerror}") from None
    try:
        yield
    except BaseException:
        for folder in absent:
            with suppress(OSError):
                folder.rmdir()
        raise


def called(name: str) -> Any:
    """What a function gives that is named module:function; modules of this folder are found."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise SettingError(f"{name!r} must be module:function, such as app:model for `def model()` of app.py")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise SettingError(f"{name}: {error}. Modules of the current folder and installed ones are found") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    return make()


def network(name: str) -> nn.Module:
    """The network that a function of the user gives."""
    from torch import nn

    made = called(name)
    if not isinstance(made, nn.Module):
        raise SettingError(f"{name} gave {type(made).__name__}: it must give the model, with its weights")
    return made


def posterior(checkpoint: Path, model: str, reading: Mapping[str, Any]) -> Posterior:
    """The Gaussian of a checkpoint over the network that a function gives; N = 1 and no prior, as nothing asks."""
    from bayesadam import Posterior

    return Posterior.from_checkpoint(checkpoint, network(model), n_data=1, prior_precision=0.0, **reading)


def names(listed: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def batch(path: Path | None, model: nn.Module) -> Any:
    """Inputs in a file: an array, or several by the names of the model's keywords; nothing is unpickled."""
    if path is None:
        return None
    import numpy as np
    import torch

    from bayesadam._storage import map_tensors
    from bayesadam.predict.batches import examples, inputs_of
    from bayesadam.predict.network import Call, evaluating
    from bayesadam.readers.formats.torch_files import load_tree

    if not path.is_file():
        raise MissingFileError(f"no file at {path}")
    if path.suffix in (".npy", ".npz"):
        with damage_named(path, "numpy.save"):
            read = np.load(path, allow_pickle=False)
            arrays = read if path.suffix == ".npy" else dict(read)
    else:
        arrays = map_tensors(path)[0] if path.suffix == ".safetensors" else load_tree(path)
    arrays = next(iter(arrays.values())) if isinstance(arrays, Mapping) and len(arrays) == 1 else arrays
    inputs = next(inputs_of(arrays, model))
    try:
        with evaluating(model, differentiable=False), torch.no_grad():
            Call(model).run(examples(inputs, 0, 2))
    except (RuntimeError, TypeError, ValueError) as error:
        raise SettingError(f"{path} is no batch of {type(model).__name__}: {str(error).splitlines()[0]}") from error
    return inputs


def packed(path: Path) -> PruningReport:
    """The tensors of a packed network's file: how many weights are not 0, and the bytes of each."""
    from collections import Counter
    from dataclasses import replace

    from bayesadam import _storage as storage
    from bayesadam.compress import PruningReport
    from bayesadam.compress.packing import KIND, load_packed

    tensors, (parts, header) = load_packed(path), storage.read_mapped(path, KIND)
    sizes, bits = dict.fromkeys(tensors, 0), Counter(grid["bits"] for grid in header["grids"].values())
    for key, part in parts.items():
        sizes[key.partition(".")[2]] += part.nbytes
    notes = tuple(f"{n} of {len(tensors)} tensors have codes of {each} bits" for each, n in sorted(bits.items()))
    return replace(PruningReport.of(tensors, {name: t != 0 for name, t in tensors.items()}, notes), bytes=sizes)
