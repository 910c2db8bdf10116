"""A script run by several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(script: str | Path, world: int, folder: Path, *, seconds: float) -> None:
    """`script rank world folder` in `world` processes; all must end well, and none outlives the limit."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(folder)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        told = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(told)[-4000:]
