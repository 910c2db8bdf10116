"""A server of fresh interpreters: every path read from standard input is run as a script in a process of its own.

The processes are forked from one that has imported torch and bayesadam, which every page does itself in its first
lines, and has done nothing else. So a script finds no name and no state but its own, and two seconds of imports are
spent once. The answer to a path is a line with the exit status; what a script printed is in the files `stdout` and
`stderr` next to it.
"""

import os
import runpy
import sys
from pathlib import Path

import torch

import bayesadam

torch.set_num_threads(1)
bayesadam.Posterior  # noqa: B018  # The public names are imported when the first is asked for.


def run(script: Path) -> None:
    """Run it as `python script` in its own folder would, and end this process."""
    os.chdir(script.parent)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.argv = [script.name]
    sys.path[0] = str(script.parent)
    status = 1
    try:
        runpy.run_path(script.name, run_name="__main__")
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(Path(line.rstrip("\n")))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
