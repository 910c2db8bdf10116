"""Fair side-by-side timing: the candidates take turns, so that a busy machine slows them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` times each, one candidate after the other; the order turns every round."""
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-warmup, rounds):
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.perf_counter()
            candidates[name]()
            if round_number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """The median over rounds of our time over theirs in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True))


def cuda_milliseconds(call: Callable[[], object], *, repeats: int = 100, warmup: int = 10) -> float:
    """The median time of one call on the current CUDA device, by events."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)
