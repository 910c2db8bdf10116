"""The commands on a saved file: `bayesadam inspect`, `doctor`, `prune`, `sample`, `export`, `merge` and `deploy`."""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from bayesadam._extras import require
from bayesadam._files import keep_apart
from bayesadam._options import in_options
from bayesadam.commands.running import Run, Table, as_json, target
from bayesadam.deploying import deploy
from bayesadam.errors import BayesAdamWarning, SettingError
from bayesadam.gaussian.weights import GaussianWeights
from bayesadam.inspecting import diagnose_checkpoint, inspect
from bayesadam.merging import merge_checkpoints
from bayesadam.posterior import Posterior
from bayesadam.pruning import prune_checkpoint
from bayesadam.readers import CheckpointOptions

# Endings of files that are written again as they are; of any other the weights alone are written.
_REWRITTEN = (".pt", ".pth", ".ckpt", ".bin")


def run_prune(*, checkpoint: Path, out: Path, **given: Any) -> None:
    """Write the pruned file, and a record next to it; the settings are those of `prune_checkpoint`."""
    again = checkpoint.is_file() and checkpoint.suffix in _REWRITTEN
    where = target(out, f"pruned{checkpoint.suffix if again else '.safetensors'}")
    _write("prune", partial(prune_checkpoint, checkpoint), checkpoint, where, **given)


def run_sample(*, checkpoint: Path, out: Path, seed: int, **given: Any) -> None:
    """Write the draw, and a record next to it; the settings are those of `GaussianWeights.open`."""

    def work(file: Path, **settings: Any) -> None:
        GaussianWeights.open(checkpoint, **settings).write_sample(file, seed=seed)

    _write("sample", work, checkpoint, target(out, "sample.safetensors"), seed=seed, **given)


def run_export(*, checkpoint: Path, out: Path, **given: Any) -> None:
    """Write the posterior's file, and a record next to it; the settings are those of `GaussianWeights.open`."""

    def work(file: Path, compress: Any, **settings: Any) -> None:
        GaussianWeights.open(checkpoint, **settings).export(file, compress=compress)

    _write("export", work, checkpoint, target(out, "posterior.safetensors"), **given)


def run_merge(*, checkpoints: Sequence[Path], out: Path, weights: Sequence[float] | None, **given: Any) -> None:
    """Write the merged file, and a record next to it; the settings are those of `merge_checkpoints`."""
    where = target(out, "merged.safetensors")
    _write("merge", partial(merge_checkpoints, checkpoints), checkpoints, where, weights=weights or None, **given)


def run_deploy(*, posterior: Path, model: str, example: str | None, level: float, out: Path, quiet: bool) -> None:
    """Write the deployed model, and a record next to it; `model` and `example` name functions, module:function."""
    file, record = target(out, "served.pt2")
    keep_apart(file, posterior)
    named = {"posterior": str(posterior), "model": model, "example": example, "level": level}
    run = Run("deploy", 0, file.parent, named, quiet=quiet)
    with run.prepared(), run.busy("deploy"):
        network = _made(model)
        if not isinstance(network, nn.Module):
            raise SettingError(f"{model} gave {type(network).__name__}: it must give the model, with its weights")
        with warnings.catch_warnings():
            # What is shipped must not begin with a doubt about what it is.
            warnings.simplefilter("error", BayesAdamWarning)
            try:
                found = Posterior.load(posterior, network)
            except BayesAdamWarning as warning:
                raise SettingError(str(warning)) from None
        served = deploy(found, level=level)
        served.save(file, None if example is None else _made(example))
    run.show("\n".join(f"{name}: {value}" for name, value in served.about.items()))
    print(file)
    run.finish({}, {"bytes": file.stat().st_size, **served.about}, name=record)


def _made(name: str) -> Any:
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


def _write(
    command: str,
    work: Any,
    source: Path | Sequence[Path],
    where: tuple[Path, str],
    *,
    options: CheckpointOptions,
    quiet: bool,
    seed: int = 0,
    **settings: Any,
) -> None:
    """Let the work write its one file, and write the record beside it; neither overwrites what is read."""
    file, record = where
    single = source if isinstance(source, Path) else None
    keep_apart(file, single, Path(options.optimizer_path) if options.optimizer_path else None)
    named = {"checkpoint": source} if single else {"checkpoints": source}
    run = Run(command, seed, file.parent, _plain({**named, **settings}, options), quiet=quiet)
    with run.prepared(), run.busy(command):
        report = work(file, **settings, **vars(options))
    size = file.stat().st_size
    run.show(f"{size:,} bytes" if report is None else str(report))
    print(file)
    run.finish({}, {"bytes": size} if report is None else report.to_dict(), name=record)


def _plain(settings: Mapping[str, Any], options: CheckpointOptions) -> dict[str, Any]:
    """For `metrics.json`, with paths as text."""
    return json.loads(json.dumps({**settings, **vars(options)}, default=str))  # type: ignore[no-any-return]


def _tell(
    run: Run, results: Mapping[str, Any], reports: Sequence[Any], as_object: bool, files: Any, name: str = ""
) -> None:
    """Show the reports, or the results as one JSON object alone; write the files, and the record where it is named."""
    if not as_object:
        run.show(*reports)
    with redirect_stdout(sys.stderr) if as_object else nullcontext():
        if name:
            run.finish(files, results, name=name)
        elif files:
            print(*run.write(files))
    if as_object:
        print(as_json(results))


def run_doctor(
    *, out: Path | None, quiet: bool, checkpoint: Path, options: CheckpointOptions, n_data: float | None, json: bool
) -> bool:
    """Print what `diagnose_checkpoint` finds, and write it to `out`; returns whether a posterior can be read."""
    run = Run("doctor", 0, out or Path(), _plain({"path": checkpoint, "n_data": n_data}, options), quiet=quiet)
    with run.prepared() if out is not None else nullcontext(), run.busy("reading the state"):
        diagnosis = diagnose_checkpoint(checkpoint, n_data=n_data, **vars(options))
    results = {**diagnosis.to_dict(), "healthy": diagnosis.healthy}
    _tell(run, results, [in_options(str(diagnosis))], json, {}, "metrics.json" if out is not None else "")
    return all(finding.severity != "error" for finding in diagnosis.findings)


def run_inspect(
    *,
    out: Path | None,
    quiet: bool,
    checkpoint: Path,
    options: CheckpointOptions,
    plot: bool,
    json: bool,
    why: bool,
    **settings: Any,
) -> None:
    """Print an inspection; the settings are those of `ba.inspect`.

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
    with run.prepared() if out is not None else nullcontext(), run.busy("reading the state"):
        inspection = inspect(checkpoint, **settings, **vars(options))
    heading, *rows = inspection.rows()
    what = "Signal-to-noise ratio |μ|/σ" if inspection.has_weights else "Standard deviation σ"
    reasons = ["\n".join(inspection.why)] if why else []
    shown = [*reasons, str(inspection.diagnosis), Table(f"{what} of the weights", heading, rows), inspection.legend]
    picture = {file.name: png(inspection_picture(inspection))} if plot or out is not None else {}
    _tell(run, inspection.to_dict(), shown, json, picture, record if out is not None else "")
