"""`bayesadam sample`: a draw of a saved network's weights, by its optimiser's state."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from bayesadam._files import keep_apart
from bayesadam.experiments.run import Run
from bayesadam.sample import sample_checkpoint


@dataclass(frozen=True)
class SampleSettings:
    """What to draw from: see `sample_checkpoint`."""

    checkpoint: Path
    n_data: float | None = None
    prior_precision: float | None = None
    optimizer_file: Path | None = None
    optimizer: str | None = None
    groups_in_order: bool = False
    weights_key: str | None = None
    optimizer_key: str | None = None


def run_sample(*, seed: int, out: Path, quiet: bool, settings: SampleSettings) -> tuple[Path, ...]:
    """The `sample` command: the file with the draw, and a record beside it."""
    asked = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()}
    run = Run("sample", seed, out.parent, asked, quiet=quiet)
    keep_apart(out, settings.checkpoint, settings.optimizer_file)
    run.prepare()
    sample_checkpoint(
        settings.checkpoint,
        out,
        settings.n_data,
        seed=seed,
        prior_precision=settings.prior_precision,
        optimizer_path=settings.optimizer_file,
        optimizer=settings.optimizer,
        groups_in_order=settings.groups_in_order,
        weights_key=settings.weights_key,
        optimizer_key=settings.optimizer_key,
    )
    print(out)
    return (out, *run.finish({}, {}, name=f"{out.stem}.metrics.json"))
