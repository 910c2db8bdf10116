"""The commands on a saved file: `bayesadam inspect`, `doctor`, `prune`, `merge`, `export` and `deploy`."""

import json as json_
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from bayesadam import inspecting
from bayesadam._files import keep_apart
from bayesadam._options import in_options
from bayesadam.calibrated import load
from bayesadam.compress.pruning import prune_checkpoint
from bayesadam.errors import FileError, SettingError
from bayesadam.inspecting import diagnose_checkpoint
from bayesadam.merging import merge_checkpoints
from bayesadam.weights.gaussian import GaussianWeights

# Endings of files that are written again as they are; of any other the weights alone are written.
_REWRITTEN = (".pt", ".pth", ".ckpt", ".bin")
Reading = Mapping[str, Any]


def inspect(*, checkpoint: Path, n_data: float | None, json: bool, why: bool, reading: Reading) -> None:
    """Print what `bayesadam.inspect` finds; with `why` first how the file was read."""
    inspection = inspecting.inspect(checkpoint, n_data=n_data, **reading)
    reasons = [*inspection.why, ""] if why else []
    print(as_json(inspection.to_dict()) if json else in_options("\n".join([*reasons, str(inspection)])))


def doctor(*, checkpoint: Path, n_data: float | None, json: bool, reading: Reading) -> bool:
    """Print what `diagnose_checkpoint` finds; returns whether a posterior can be read."""
    diagnosis = diagnose_checkpoint(checkpoint, n_data=n_data, **reading)
    report = {**diagnosis.to_dict(), "healthy": diagnosis.healthy}
    print(as_json(report) if json else in_options(str(diagnosis)))
    return all(finding.severity != "error" for finding in diagnosis.findings)


def prune(*, checkpoint: Path, exclude: str, out: Path, quiet: bool, reading: Reading, **settings: Any) -> None:
    """Write the pruned file; the settings are those of `prune_checkpoint`."""
    rewritten = checkpoint.is_file() and checkpoint.suffix in _REWRITTEN
    names = tuple(name.strip() for name in exclude.split(",") if name.strip())
    work = partial(prune_checkpoint, checkpoint, exclude=names, **settings, **reading)
    usual = f"pruned{checkpoint.suffix if rewritten else '.safetensors'}"
    _write(work, _target(out, usual), [checkpoint, reading["optimizer_path"]], quiet)


def merge(
    *, checkpoints: Sequence[Path], out: Path, quiet: bool, weights: Any, reading: Reading, **settings: Any
) -> None:
    """Write the merged network; the settings are those of `merge_checkpoints`."""
    work = partial(merge_checkpoints, checkpoints, weights=weights or None, **settings, **reading)
    _write(work, _target(out, "merged.safetensors"), checkpoints, quiet)


def export(
    *, checkpoint: Path, compress: str | None, out: Path, quiet: bool, reading: Reading, **settings: Any
) -> None:
    """Write the posterior's file; the settings are those of `GaussianWeights.open`."""

    def work(file: Path) -> None:
        GaussianWeights.open(checkpoint, **settings, **reading).export(file, compress=compress)

    _write(work, _target(out, "posterior.safetensors"), [checkpoint, reading["optimizer_path"]], quiet)


def deploy(*, posterior: Path, model: str, example: str | None, level: float, out: Path, quiet: bool) -> None:
    """Write the deployed model; `model` and `example` name functions, module:function."""

    def work(file: Path) -> str:
        network = _called(model)
        if not isinstance(network, nn.Module):
            raise SettingError(f"{model} gave {type(network).__name__}: it must give the model, with its weights")
        net = load(posterior, network)
        net.save(file, None if example is None else _called(example), level=level)
        return str(net.report)

    _write(work, _target(out, "served.pt2"), [posterior], quiet)


def as_json(report: Mapping[str, Any]) -> str:
    """JSON that any reader takes, with null for what is not finite.

    >>> as_json({"a": (1, float("nan"))}).split()
    ['{', '"a":', '[', '1,', 'null', ']', '}']
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json_.dumps(plain(report), indent=2, ensure_ascii=False, allow_nan=False)


def _target(out: Path, usual: str) -> Path:
    """The file itself where `out` has an ending, else the usual name in that folder.

    >>> _target(Path("small/net.pt"), "pruned.pt").name, _target(Path("small"), "pruned.pt").name
    ('net.pt', 'pruned.pt')
    """
    return out if out.suffix and not out.is_dir() else out / usual


def _write(work: Callable[[Path], Any], file: Path, sources: Sequence[Path | None], quiet: bool) -> None:
    """Let the work write its file, apart from what it reads; print what it reports, then the file's path."""
    keep_apart(file, *sources)
    with folder_for(file):
        report = work(file)
    if not quiet:
        print(in_options(str(report or f"{file.stat().st_size:,} bytes")), end="\n\n")
    print(file)


@contextmanager
def folder_for(file: Path) -> Iterator[None]:
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


def _called(name: str) -> Any:
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
