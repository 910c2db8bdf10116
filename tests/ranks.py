"""Checks that run in several processes at once: a script of them, and what each process found."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from processes import run_ranks

Checks = Mapping[str, Callable[[], Any]]


def found_by_ranks(script: Path, world: int, folder: Path) -> list[dict[str, Any]]:
    """What each of `world` processes found: by check, `{"found": …}`, or `{"error": …}` where it failed."""
    run_ranks(script, world, folder)
    return [torch.load(_results(folder, world, rank), weights_only=True) for rank in range(world)]


def run_checks(checks: Callable[[Path], Checks]) -> None:
    """The whole of such a script, of `found_by_ranks`: joins the other processes, and runs `checks(folder)`."""
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous_{world}"
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=rendezvous, timeout=timedelta(seconds=300))
    results: dict[str, Any] = {}
    for name, check in checks(folder).items():
        try:
            results[name] = {"found": check()}
        except BaseException:
            results[name] = {"error": f"process {rank} of {world}:\n{traceback.format_exc()}"}
    torch.save(results, _results(folder, world, rank))
    # Not every check may have ended alike everywhere, so no farewell is waited for.
    os._exit(0)


def _results(folder: Path, world: int, rank: int) -> Path:
    return folder / f"results_{world}_{rank}.pt"
