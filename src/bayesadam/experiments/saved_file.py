"""`bayesadam prune`, `sample` and `export`: a saved network pruned or drawn by its optimiser's state, or that state published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bayesadam._files import keep_apart
from bayesadam.checkpoint import CheckpointOptions
from bayesadam.errors import SettingError
from bayesadam.experiments.run import Run
from bayesadam.pruning import prune_checkpoint
from bayesadam.publish import export_checkpoint
from bayesadam.sample import sample_checkpoint


def plain_settings(settings: dict[str, Any], options: CheckpointOptions) -> dict[str, Any]:
    """A command's settings as plain data, those of the checkpoint among them."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in (settings | vars(options)).items()}


def run_prune(
    *, seed: int, out: Path, quiet: bool, checkpoint: Path, options: CheckpointOptions, **settings: Any
) -> tuple[Path, ...]:
    """The `prune` command: the pruned file, and a record next to it; the settings are those of `prune_checkpoint`."""
    run = Run("prune", seed, out.parent, plain_settings({"checkpoint": checkpoint, **settings}, options), quiet=quiet)
    _prepare(run, out, checkpoint, options)
    if settings["scope"] not in ("global", "layer"):
        raise SettingError(f"--scope must be one of global, layer, got {settings['scope']!r}")
    report = prune_checkpoint(checkpoint, out, **settings, **vars(options))
    run.show(str(report))
    return _finished(run, out, report.to_dict())


def run_sample(
    *, seed: int, out: Path, quiet: bool, checkpoint: Path, options: CheckpointOptions, **settings: Any
) -> tuple[Path, ...]:
    """The `sample` command: the file with the draw, and a record next to it; see `sample_checkpoint`."""
    run = Run("sample", seed, out.parent, plain_settings({"checkpoint": checkpoint, **settings}, options), quiet=quiet)
    _prepare(run, out, checkpoint, options)
    sample_checkpoint(checkpoint, out, seed=seed, **settings, **vars(options))
    return _finished(run, out, {})


def run_export(
    *, seed: int, out: Path, quiet: bool, checkpoint: Path, options: CheckpointOptions, **settings: Any
) -> tuple[Path, ...]:
    """The `export` command: the posterior's file, and a record next to it; see `export_checkpoint`."""
    run = Run("export", seed, out.parent, plain_settings({"checkpoint": checkpoint, **settings}, options), quiet=quiet)
    _prepare(run, out, checkpoint, options)
    export_checkpoint(checkpoint, out, **settings, **vars(options))
    run.show(f"{out.stat().st_size:,} bytes")
    return _finished(run, out, {"bytes": out.stat().st_size})


def _prepare(run: Run, out: Path, checkpoint: Path, options: CheckpointOptions) -> None:
    second = options.optimizer_path
    keep_apart(out, checkpoint, None if second is None else Path(second))
    run.prepare()


def _finished(run: Run, out: Path, results: dict[str, Any]) -> tuple[Path, ...]:
    print(out)
    return (out, *run.finish({}, results, name=f"{out.stem}.metrics.json"))
