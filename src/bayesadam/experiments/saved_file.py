"""`bayesadam prune` and `bayesadam sample`: a saved network, pruned or drawn by its optimiser's state."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bayesadam._files import keep_apart
from bayesadam.checkpoint import CheckpointOptions
from bayesadam.errors import SettingError
from bayesadam.experiments.run import Run
from bayesadam.pruning import prune_checkpoint
from bayesadam.pruning.masks import Scope
from bayesadam.sample import sample_checkpoint


@dataclass(frozen=True)
class PruneSettings:
    """What to prune and how: see `prune_checkpoint`."""

    checkpoint: Path
    options: CheckpointOptions
    fraction: float
    ranking: str = "snr"
    scope: str = "global"
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampleSettings:
    """What to draw from: see `sample_checkpoint`."""

    checkpoint: Path
    options: CheckpointOptions
    n_data: float | None = None
    prior_precision: float | None = None


def flat(settings: Any) -> dict[str, Any]:
    """A command's settings as plain data, those of the checkpoint among them."""
    found = asdict(settings)
    found |= found.pop("options")
    return {key: str(value) if isinstance(value, Path) else value for key, value in found.items()}


def run_prune(*, seed: int, out: Path, quiet: bool, settings: PruneSettings) -> tuple[Path, ...]:
    """The `prune` command: the pruned file, and a record of the pruning next to it."""
    run = _prepared("prune", seed, out, quiet, settings)
    scopes: dict[str, Scope] = {"global": "global", "layer": "layer"}
    if settings.scope not in scopes:
        raise SettingError(f"--scope must be one of {', '.join(scopes)}, got {settings.scope!r}")
    given: Any = {"ranking": settings.ranking, "exclude": settings.exclude, **vars(settings.options)}
    report = prune_checkpoint(settings.checkpoint, out, settings.fraction, scope=scopes[settings.scope], **given)
    run.show(str(report))
    return _finished(run, out, report.to_dict())


def run_sample(*, seed: int, out: Path, quiet: bool, settings: SampleSettings) -> tuple[Path, ...]:
    """The `sample` command: the file with the draw, and a record next to it."""
    run = _prepared("sample", seed, out, quiet, settings)
    given: Any = {"prior_precision": settings.prior_precision, **vars(settings.options)}
    sample_checkpoint(settings.checkpoint, out, settings.n_data, seed=seed, **given)
    return _finished(run, out, {})


def _prepared(command: str, seed: int, out: Path, quiet: bool, settings: PruneSettings | SampleSettings) -> Run:
    run = Run(command, seed, out.parent, flat(settings), quiet=quiet)
    second = settings.options.optimizer_path
    keep_apart(out, settings.checkpoint, None if second is None else Path(second))
    run.prepare()
    return run


def _finished(run: Run, out: Path, results: dict[str, Any]) -> tuple[Path, ...]:
    print(out)
    return (out, *run.finish({}, results, name=f"{out.stem}.metrics.json"))
