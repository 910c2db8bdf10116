"""Processes that a test starts, and waiting for what will come.

No test measures how long something takes: a busy machine may take any time. A wait ends with its condition, and its
limit is for what would otherwise hang.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SOURCE = str(Path(__file__).parents[1] / "src")
# Seconds after which a process or a thread hangs, rather than being slow.
PATIENCE = 600.0


def eventually(
    condition: Callable[[], object], what: str = "the condition", *, errors: type[Exception] = OSError
) -> None:
    """Wait until the condition holds; `errors` that it raises mean that it does not yet."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if condition():
                return
        except errors:
            pass
        assert time.monotonic() < end, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.02)


def run_python(code: str, *arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -c code arguments` with the package's source on its path."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE, **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def run_ranks(script: str | Path, world: int, folder: Path) -> None:
    """`script rank world folder` in `world` processes: all must end well, and none outlives one that does not."""
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(world), str(folder)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(world)
        ]

        def codes() -> list[int | None]:
            return [process.poll() for process in processes]

        try:
            eventually(lambda: any(codes()) or None not in codes(), "the end of all processes")
            ended = codes()
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        assert ended == [0] * world, output.read()[-4000:]
