"""`bayesadam prune`: a saved network, pruned by its optimiser's state."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from bayesadam._files import keep_apart
from bayesadam.errors import SettingError
from bayesadam.experiments.run import Run
from bayesadam.pruning import prune_checkpoint
from bayesadam.pruning.masks import Scope


@dataclass(frozen=True)
class PruneSettings:
    """What to prune and how: see `prune_checkpoint`."""

    checkpoint: Path
    fraction: float
    ranking: str = "snr"
    scope: str = "global"
    exclude: tuple[str, ...] = ()
    optimizer_file: Path | None = None
    optimizer: str | None = None
    groups_in_order: bool = False
    weights_key: str | None = None
    optimizer_key: str | None = None


def run_prune(*, seed: int, out: Path, quiet: bool, settings: PruneSettings) -> tuple[Path, ...]:
    """The `prune` command: the pruned file, and a record of the pruning beside it."""
    asked = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()}
    run = Run("prune", seed, out.parent, asked, quiet=quiet)
    keep_apart(out, settings.checkpoint, settings.optimizer_file)
    run.prepare()
    scopes: dict[str, Scope] = {"global": "global", "layer": "layer"}
    if settings.scope not in scopes:
        raise SettingError(f"--scope must be one of {', '.join(scopes)}, got {settings.scope!r}")
    report = prune_checkpoint(
        settings.checkpoint,
        out,
        settings.fraction,
        ranking=settings.ranking,
        scope=scopes[settings.scope],
        exclude=settings.exclude,
        optimizer_path=settings.optimizer_file,
        optimizer=settings.optimizer,
        groups_in_order=settings.groups_in_order,
        weights_key=settings.weights_key,
        optimizer_key=settings.optimizer_key,
    )
    run.show(str(report))
    print(out)
    return (out, *run.finish({}, report.to_dict(), name=f"{out.stem}.metrics.json"))
