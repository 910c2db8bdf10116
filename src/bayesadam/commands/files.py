"""The commands on a saved file: `bayesadam inspect`, `doctor`, `prune`, `sample`, `export` and `merge`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from bayesadam._extras import require
from bayesadam._files import keep_apart
from bayesadam._options import in_options
from bayesadam.commands.running import Run, Table, as_json, target
from bayesadam.errors import SettingError
from bayesadam.gaussian.files import STRUCTURES
from bayesadam.gaussian.weights import GaussianWeights
from bayesadam.inspect import diagnose_checkpoint, inspect_checkpoint
from bayesadam.merging import merge_checkpoints
from bayesadam.pruning import prune_checkpoint
from bayesadam.readers import CheckpointOptions

# Structures that need no recorded gradients, which a checkpoint does not hold.
EXPORTED = tuple(name for name, spec in STRUCTURES.items() if not spec.needs_gradients)
# Endings of files that are written again as they are; of any other the weights alone are written.
_REWRITTEN = (".pt", ".pth", ".ckpt", ".bin")


Work = Callable[[Path], tuple[str, Mapping[str, Any]]]


def run_prune(*, checkpoint: Path, options: CheckpointOptions, out: Path, quiet: bool, **settings: Any) -> None:
    """Write the pruned file, and a record next to it; the settings are those of `prune_checkpoint`."""
    again = checkpoint.is_file() and checkpoint.suffix in _REWRITTEN

    def work(file: Path) -> tuple[str, Mapping[str, Any]]:
        report = prune_checkpoint(checkpoint, file, **settings, **vars(options))
        return str(report), report.to_dict()

    where = target(out, f"pruned{checkpoint.suffix if again else '.safetensors'}")
    _write("prune", where, quiet, {"checkpoint": checkpoint, **settings}, options, work)


def run_sample(
    *, checkpoint: Path, options: CheckpointOptions, out: Path, quiet: bool, seed: int, **settings: Any
) -> None:
    """Write the draw, and a record next to it; the settings are those of `GaussianWeights.open`."""

    def work(file: Path) -> tuple[str, Mapping[str, Any]]:
        GaussianWeights.open(checkpoint, **settings, **vars(options)).write_sample(file, seed=seed)
        return "", {}

    where = target(out, "sample.safetensors")
    _write("sample", where, quiet, {"checkpoint": checkpoint, **settings}, options, work, seed)


def run_export(
    *, checkpoint: Path, options: CheckpointOptions, out: Path, quiet: bool, compress: str | None, **settings: Any
) -> None:
    """Write the posterior's file, and a record next to it; the settings are those of `GaussianWeights.open`."""

    def work(file: Path) -> tuple[str, Mapping[str, Any]]:
        GaussianWeights.open(checkpoint, **settings, **vars(options)).export(file, compress=compress)
        size = file.stat().st_size
        return f"{size:,} bytes", {"bytes": size}

    where = target(out, "posterior.safetensors")
    _write("export", where, quiet, {"checkpoint": checkpoint, "compress": compress, **settings}, options, work)


def run_merge(
    *, checkpoints: Sequence[Path], options: CheckpointOptions, out: Path, quiet: bool, **settings: Any
) -> None:
    """Write the merged file, and a record next to it; the settings are those of `merge_checkpoints`."""
    numbers = [str(path) for path in checkpoints if re.fullmatch(r"[\d.]+", str(path)) and not path.exists()]
    settings["weights"] = settings["weights"] or None
    if settings["weights"] and numbers:
        raise SettingError(f"--weight takes one number, once for each checkpoint: write --weight {numbers[0]} as well")

    def work(file: Path) -> tuple[str, Mapping[str, Any]]:
        report = merge_checkpoints(checkpoints, file, **settings, **vars(options))
        return str(report), report.to_dict()

    where = target(out, "merged.safetensors")
    _write("merge", where, quiet, {"checkpoints": list(map(str, checkpoints)), **settings}, options, work)


def _write(
    command: str,
    where: tuple[Path, str],
    quiet: bool,
    settings: Mapping[str, Any],
    options: CheckpointOptions,
    work: Work,
    seed: int = 0,
) -> None:
    """Let the work write its one file, and write the record beside it; neither overwrites what is read."""
    file, record = where
    keep_apart(file, settings.get("checkpoint"), Path(options.optimizer_path) if options.optimizer_path else None)
    run = Run(command, seed, file.parent, _plain(settings, options), quiet=quiet)
    with run.prepared(), run.busy(command):
        report, results = work(file)
    if report:
        run.show(report)
    print(file)
    run.finish({}, results, name=record)


def _plain(settings: Mapping[str, Any], options: CheckpointOptions) -> dict[str, Any]:
    found = {**settings, **vars(options)}
    return {key: str(value) if isinstance(value, Path) else value for key, value in found.items()}


def run_doctor(
    *, out: Path | None, quiet: bool, checkpoint: Path, options: CheckpointOptions, n_data: float | None, json: bool
) -> bool:
    """Print what `diagnose_checkpoint` finds, and write it to `out`; returns whether a posterior can be read."""
    run = Run("doctor", 0, out or Path(), _plain({"path": checkpoint, "n_data": n_data}, options), quiet=quiet)
    with run.prepared() if out is not None else nullcontext(), run.busy("reading the state"):
        diagnosis = diagnose_checkpoint(checkpoint, n_data=n_data, **vars(options))
    results = {**diagnosis.to_dict(), "healthy": diagnosis.healthy}
    if not json:
        run.show(in_options(str(diagnosis)))
    with redirect_stdout(sys.stderr) if json else nullcontext():
        if out is not None:
            run.finish({}, results)
    if json:
        print(as_json(results))
    return all(finding.severity != "error" for finding in diagnosis.findings)


def run_inspect(
    *,
    out: Path | None,
    quiet: bool,
    checkpoint: Path,
    options: CheckpointOptions,
    plot: bool = False,
    json: bool = False,
    why: bool = False,
    **settings: Any,
) -> None:
    """Print an inspection; the settings are those of `inspect_checkpoint`.

    To `out` it writes the picture and `metrics.json`; with `plot` and no `out` the picture alone, as `NAME-snr.png` in
    the current folder. With `json` the inspection is one JSON object, alone on standard output.
    """
    # Before any reading, so that a missing package costs no time.
    require("matplotlib")
    from bayesadam.commands.plots import inspection_picture, png

    file, record = target(out or Path(f"{checkpoint.resolve().stem}-snr.png"), "inspect.png")
    if file.suffix != ".png":
        raise SettingError(f"--out {file}: the picture is a PNG, name a file that ends in .png, or a folder")
    run = Run("inspect", 0, file.parent, _plain({"path": checkpoint, **settings}, options), quiet=quiet)
    with run.prepared() if out is not None else nullcontext():
        inspection = inspect_checkpoint(checkpoint, track=run.track, **settings, **vars(options))
    if not json:
        heading, *rows = inspection.rows()
        what = "Signal-to-noise ratio |μ|/σ" if inspection.has_weights else "Standard deviation σ"
        table = Table(f"{what} of the weights", heading, rows)
        reasons = ["\n".join(inspection.why)] if why else []
        run.show(*reasons, str(inspection.diagnosis), table, inspection.legend)
    with redirect_stdout(sys.stderr) if json else nullcontext():
        if out is not None:
            run.finish({file.name: png(inspection_picture(inspection))}, inspection.to_dict(), name=record)
        elif plot:
            run.write({file.name: png(inspection_picture(inspection))})
    if json:
        print(as_json(inspection.to_dict()))
