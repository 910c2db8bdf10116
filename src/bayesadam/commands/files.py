"""The commands on a saved file: `bayesadam inspect`, `doctor`, `prune`, `sample`, `export` and `merge`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from bayesadam._files import keep_apart
from bayesadam._options import in_options
from bayesadam.commands.running import Run, as_json, target
from bayesadam.errors import SettingError
from bayesadam.gaussian.files import STRUCTURES
from bayesadam.gaussian.weights import GaussianWeights
from bayesadam.inspect import Inspection, diagnose_checkpoint, inspect_checkpoint
from bayesadam.merging import merge_checkpoints
from bayesadam.pruning import prune_checkpoint
from bayesadam.readers import CheckpointOptions

# Structures that need no recorded gradients, which a checkpoint does not hold.
EXPORTED = tuple(name for name, spec in STRUCTURES.items() if not spec.needs_gradients)
# Endings of files that are written again as they are; of any other the weights alone are written.
_REWRITTEN = (".pt", ".pth", ".ckpt", ".bin")
# Columns that a narrow console does without, the first to go first.
_SPARE = ("shape", "95 %", "5 %", "weights")


def run_prune(*, out: Path, quiet: bool, checkpoint: Path, options: CheckpointOptions, **settings: Any) -> None:
    """Write the pruned file, and a record next to it; the settings are those of `prune_checkpoint`."""
    again = checkpoint.is_file() and checkpoint.suffix in _REWRITTEN
    where = target(out, f"pruned{checkpoint.suffix if again else '.safetensors'}")

    def work(file: Path) -> tuple[str, Mapping[str, Any]]:
        report = prune_checkpoint(checkpoint, file, **settings, **vars(options))
        return str(report), report.to_dict()

    _write("prune", where, quiet, {"checkpoint": checkpoint, **settings}, options, work)


def run_sample(
    *, seed: int, out: Path, quiet: bool, checkpoint: Path, options: CheckpointOptions, **settings: Any
) -> None:
    """Write the draw, and a record next to it; the settings are those of `GaussianWeights.open`."""

    def work(file: Path) -> tuple[str, Mapping[str, Any]]:
        GaussianWeights.open(checkpoint, **settings, **vars(options)).write_sample(file, seed=seed)
        return "", {}

    where = target(out, "sample.safetensors")
    _write("sample", where, quiet, {"checkpoint": checkpoint, **settings}, options, work, seed)


def run_export(
    *,
    out: Path,
    quiet: bool,
    checkpoint: Path,
    options: CheckpointOptions,
    compress: str | None = None,
    **settings: Any,
) -> None:
    """Write the posterior's file, and a record next to it; the settings are those of `GaussianWeights.open`."""

    def work(file: Path) -> tuple[str, Mapping[str, Any]]:
        GaussianWeights.open(checkpoint, **settings, **vars(options)).export(file, compress=compress)
        size = file.stat().st_size
        return f"{size:,} bytes", {"bytes": size}

    where = target(out, "posterior.safetensors")
    _write("export", where, quiet, {"checkpoint": checkpoint, "compress": compress, **settings}, options, work)


def run_merge(
    *, out: Path, quiet: bool, checkpoints: Sequence[Path], options: CheckpointOptions, **settings: Any
) -> None:
    """Write the merged file, and a record next to it; the settings are those of `merge_checkpoints`."""
    numbers = [str(path) for path in checkpoints if re.fullmatch(r"[\d.]+", str(path)) and not path.exists()]
    if settings["weights"] and numbers:
        raise SettingError(
            f"--weight takes one number, and is given once for each checkpoint: write --weight {numbers[0]} as well"
        )

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
    work: Callable[[Path], tuple[str, Mapping[str, Any]]],
    seed: int = 0,
) -> None:
    """Let the work write its one file, and write the record beside it; neither overwrites what is read."""
    file, record = where
    second = options.optimizer_path
    keep_apart(file, settings.get("checkpoint"), None if second is None else Path(second))
    run = Run(command, seed, file.parent, _plain(settings, options), quiet=quiet)
    with run.prepared(), run.busy(command):
        report, results = work(file)
    run.show(*filter(None, [report]))
    print(file)
    run.finish({}, results, name=record)


def _plain(settings: Mapping[str, Any], options: CheckpointOptions) -> dict[str, Any]:
    """A command's settings as plain data, those of the checkpoint among them."""
    found = {**settings, **vars(options)}
    return {key: str(value) if isinstance(value, Path) else value for key, value in found.items()}


def run_doctor(
    *, out: Path | None, quiet: bool, checkpoint: Path, options: CheckpointOptions, n_data: float | None, json: bool
) -> bool:
    """Print what `diagnose_checkpoint` finds, and write it to `out`; returns whether a posterior can be read."""
    settings = _plain({"path": checkpoint, "n_data": n_data}, options)
    run = Run("doctor", 0, out or Path(), settings, quiet=quiet)
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
    seed: int,
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
    the current folder. With `json` the inspection is one JSON object, alone on standard output; with `why` the report
    begins with how the file was read.
    """
    from bayesadam.commands.plots import inspection_picture, png

    file, record = target(out or Path(f"{checkpoint.resolve().stem}-snr.png"), "inspect.png")
    if file.suffix != ".png":
        raise SettingError(f"--out {file}: the picture is a PNG, name a file that ends in .png, or a folder")
    run = Run("inspect", seed, file.parent, _plain({"path": checkpoint, **settings}, options), quiet=quiet)
    with run.prepared() if out is not None else nullcontext():
        inspection = inspect_checkpoint(checkpoint, seed=seed, track=run.track, **settings, **vars(options))
    if not json:
        reasons = ["\n".join(inspection.why)] if why else []
        notes = f"{inspection.legend}\n{inspection.scale_note}"
        run.show(*reasons, str(inspection.diagnosis), LayerTable(inspection), notes)
    with redirect_stdout(sys.stderr) if json else nullcontext():
        if out is not None:
            run.finish({file.name: png(inspection_picture(inspection))}, inspection.to_dict(), name=record)
        elif plot:
            run.write({file.name: png(inspection_picture(inspection))})
    if json:
        print(as_json(inspection.to_dict()))


@dataclass(frozen=True)
class LayerTable:
    """One row per parameter, and the total; a narrow console gets fewer columns, then names folded after their dots."""

    inspection: Inspection

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heading, *rows = self.inspection.rows()
        for n_left_out in range(len(_SPARE) + 1):
            kept = [number for number, title in enumerate(heading) if title not in _SPARE[:n_left_out]]
            widths = [max(len(row[number]) for row in (heading, *rows)) for number in kept]
            # Three characters lie between two columns.
            room = options.max_width - sum(widths[1:]) - 3 * (len(kept) - 1)
            if widths[0] <= room:
                break
        what = "Signal-to-noise ratio |μ|/σ" if self.inspection.has_weights else "Standard deviation σ"
        view = Table(title=f"{what} of the weights", title_justify="left", show_footer=True, box=SIMPLE)
        view.show_edge = view.pad_edge = False
        for number in kept:
            justify: Any = "right" if number else "left"
            view.add_column(heading[number], rows[-1][number], justify=justify, no_wrap=number > 0)
        for name, *cells in rows[:-1]:
            view.add_row(_folded(name, room), *(cells[number - 1] for number in kept[1:]))
        yield view
        if n_left_out:
            missing = ", ".join(_SPARE[:n_left_out])
            yield f"Left out for want of room: {missing}. A wider terminal shows them, and --json does."


def _folded(name: str, width: int) -> str:
    """A name on lines of at most so many characters, where its dots allow.

    >>> _folded("encoder.layers.0.weight", 12).split()
    ['encoder.', 'layers.0.', 'weight']
    """
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
