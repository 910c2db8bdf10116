"""`bayesadam merge`: saved networks made into one by their optimisers' states."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayesadam.errors import SettingError
from bayesadam.merging import merge_checkpoints
from bayesadam.paper.run import Run, Target
from bayesadam.paper.saved_file import plain_settings
from bayesadam.readers import CheckpointOptions


def run_merge(
    *, out: Path, quiet: bool, checkpoints: Sequence[Path], options: CheckpointOptions, **settings: Any
) -> tuple[Path, ...]:
    """The `merge` command: the merged file, and a record next to it; the settings are those of `merge_checkpoints`."""
    numbers = [str(path) for path in checkpoints if re.fullmatch(r"[\d.]+", str(path)) and not path.exists()]
    if settings["weights"] and numbers:
        raise SettingError(
            f"--weight takes one number, and is given once for each checkpoint: write --weight {numbers[0]} as well"
        )
    named = {"checkpoints": list(map(str, checkpoints)), **settings}
    target = Target.of(out, "merged.safetensors")
    run = Run("merge", 0, target.file.parent, plain_settings(named, options), quiet=quiet)
    with run.prepared(), run.busy("merging"):
        report = merge_checkpoints(checkpoints, target.file, **settings, **vars(options))
    run.show(str(report))
    return run.finish_file(target, report.to_dict())
