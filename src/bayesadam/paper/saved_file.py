"""`bayesadam prune`, `sample` and `export`: a saved network pruned or drawn by its optimiser's state, or that state published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bayesadam._files import keep_apart
from bayesadam.gaussian.weights import GaussianWeights
from bayesadam.paper.run import Run, Target
from bayesadam.pruning import prune_checkpoint
from bayesadam.readers.formats import CheckpointOptions

# Endings of files that are written again as they are; of any other the weights alone are written.
_REWRITTEN = (".pt", ".pth", ".ckpt", ".bin")


def plain_settings(settings: dict[str, Any], options: CheckpointOptions) -> dict[str, Any]:
    """A command's settings as plain data, those of the checkpoint among them."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in (settings | vars(options)).items()}


def run_prune(
    *, seed: int, out: Path, quiet: bool, checkpoint: Path, options: CheckpointOptions, **settings: Any
) -> tuple[Path, ...]:
    """The `prune` command: the pruned file, and a record next to it; the settings are those of `prune_checkpoint`."""
    again = checkpoint.is_file() and checkpoint.suffix in _REWRITTEN
    target = Target.of(out, f"pruned{checkpoint.suffix if again else '.safetensors'}")
    named = plain_settings({"checkpoint": checkpoint, **settings}, options)
    run = Run("prune", seed, target.file.parent, named, quiet=quiet)
    with _prepared(run, target.file, checkpoint, options), run.busy("pruning"):
        report = prune_checkpoint(checkpoint, target.file, **settings, **vars(options))
    run.show(str(report))
    return run.finish_file(target, report.to_dict())


def run_sample(
    *, seed: int, out: Path, quiet: bool, checkpoint: Path, options: CheckpointOptions, **settings: Any
) -> tuple[Path, ...]:
    """The `sample` command: the file with the draw, and a record next to it; see `GaussianWeights.write_sample`."""
    target = Target.of(out, "sample.safetensors")
    named = plain_settings({"checkpoint": checkpoint, **settings}, options)
    run = Run("sample", seed, target.file.parent, named, quiet=quiet)
    with _prepared(run, target.file, checkpoint, options), run.busy("drawing"):
        GaussianWeights.open(checkpoint, **settings, **vars(options)).write_sample(target.file, seed=seed)
    return run.finish_file(target, {})


def run_export(
    *,
    seed: int,
    out: Path,
    quiet: bool,
    checkpoint: Path,
    options: CheckpointOptions,
    compress: str | None = None,
    **settings: Any,
) -> tuple[Path, ...]:
    """The `export` command: the posterior's file, and a record next to it; see `GaussianWeights.export`."""
    target = Target.of(out, "posterior.safetensors")
    named = plain_settings({"checkpoint": checkpoint, "compress": compress, **settings}, options)
    run = Run("export", seed, target.file.parent, named, quiet=quiet)
    with _prepared(run, target.file, checkpoint, options), run.busy("writing the posterior"):
        GaussianWeights.open(checkpoint, **settings, **vars(options)).export(target.file, compress=compress)
    size = target.file.stat().st_size
    run.show(f"{size:,} bytes")
    return run.finish_file(target, {"bytes": size})


@contextmanager
def _prepared(run: Run, out: Path, checkpoint: Path, options: CheckpointOptions) -> Iterator[None]:
    """As `Run.prepared`, once it is known that `out` overwrites nothing that is read."""
    second = options.optimizer_path
    keep_apart(out, checkpoint, None if second is None else Path(second))
    with run.prepared():
        yield
