"""The paper's experiments, run again: `python -m experiments figure1 | figure2 | table1 | cost | report`."""

from importlib import import_module
from typing import Any

# Imported with the first use: the commands' help needs no torch.
_WHERE = {
    "simulate": "experiments.simulation",
    "classification_problem": "experiments.problems",
    "reward_problem": "experiments.problems",
}
__all__ = ["classification_problem", "reward_problem", "simulate"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
