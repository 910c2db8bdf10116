"""Where second moments come from: whose state, of how many gradients; and what is wrong with too few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bayesadam._warnings import warn
from bayesadam.readers.match import Match

# Of a group, in the state that stands for a saved posterior: its second moments are of recorded gradients.
RECORDED_MARK = "recorded_gradients"
_SHORT_MEMORY = 0.95
_FEW = 20


@dataclass(frozen=True)
class Origin:
    """The optimisers behind second moments, and how many gradients.

    Attributes:
        optimizers: by their names.
        steps: the fewest and the most gradients behind a parameter; None where nobody has counted.
        beta: the smallest β₂ of the averages; None where they are none, or that is not known.
        recorded: whether the gradients are a `Recorder`'s.
    """

    optimizers: tuple[str, ...] = ()
    steps: tuple[float, float] | None = None
    beta: float | None = None
    recorded: bool = False

    @property
    def fewest(self) -> float | None:
        """The fewest gradients behind a parameter, where that is known."""
        return None if self.steps is None else self.steps[0]

    def header(self) -> dict[str, Any]:
        """Plain data, for the header of a file."""
        steps = None if self.steps is None else list(self.steps)
        return {"optimizer": list(self.optimizers), "steps": steps, "beta2": self.beta, "recorded": self.recorded}

    @classmethod
    def of_header(cls, header: Mapping[str, Any]) -> Origin:
        """What `header` gave, or what an older file has of it."""
        steps = header.get("steps")
        return cls(
            tuple(header.get("optimizer") or ()),
            None if steps is None else (float(steps[0]), float(steps[-1])),
            header.get("beta2"),
            bool(header.get("recorded")),
        )


UNKNOWN = Origin()


def origin_of(match: Match) -> Origin:
    """That of states with names."""
    counted = [entry.reader.steps(entry.state, entry.group) for entry in match.entries]
    steps = [count for count in counted if count is not None]
    known = [entry.reader.beta(entry.group) for entry in match.entries]
    betas = [beta for beta in known if beta is not None and 0 < beta < 1]
    return Origin(
        match.optimizers,
        (min(steps), max(steps)) if steps else None,
        min(betas, default=None),
        any(RECORDED_MARK in entry.group for entry in match.entries),
    )


def warn_of_memory(origin: Origin, label: str) -> None:
    """Warn of second moments of a short memory, or of a training that is shorter than their memory."""
    beta, steps = origin.beta, origin.fewest
    if beta is None:
        return
    if beta <= _SHORT_MEMORY:
        warn(
            f"{label} was trained with β₂ = {beta:g}: its second moment is that of the last {1 / (1 - beta):.0f} steps, too few "
            "to merge by. Train with β₂ of 0.99 or more"
        )
    if steps is not None and steps * (1 - beta) < 1 - 1e-9:
        warn(
            f"{label} was trained for {steps:g} steps against a memory of 1/(1−β₂) = {1 / (1 - beta):.0f}: its second moment "
            "is that of the start of training. Train longer, or with a smaller β₂, before merging"
        )


def warn_of_few(origin: Origin, what: str) -> None:
    """Warn of fewer gradients than any curvature can be known by."""
    if origin.fewest is not None and origin.fewest < _FEW:
        more = "record 100 or more, keep=100" if origin.recorded else "train longer"
        warn(f"{what} has {origin.fewest:g} gradients behind it, too few to know the curvature by: {more}")
