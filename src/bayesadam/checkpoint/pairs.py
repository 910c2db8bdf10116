"""Weights and the optimiser's state in two files next to each other, by their names."""

import re
from pathlib import Path

_WEIGHTS = re.compile(r"(?<![a-z])(params|parameters|weights|model|net|network|module)(?![a-z])", re.IGNORECASE)
_STATES = ("optimizer", "optim", "opt")
_STATE = re.compile(rf"(?<![a-z])({'|'.join(_STATES)})(?![a-z])", re.IGNORECASE)


def state_beside(path: Path) -> Path | None:
    """The one file with an optimiser's state next to weights: `optimizer.pt` next to `params.pt`, as skorch writes them."""
    named = _WEIGHTS.search(path.stem)
    if named is None:
        return None
    others = [path.with_name(path.name[: named.start()] + word + path.name[named.end() :]) for word in _STATES]
    found = [other for other in others if other.is_file()]
    return found[0] if len(found) == 1 else None


def is_state_file(path: Path) -> bool:
    """Whether a file is by its name an optimiser's state, and the weights are in another next to it."""
    beside = (file for file in path.parent.glob(f"*{path.suffix}") if file != path)
    return bool(_STATE.search(path.stem)) and any(state_beside(file) == path for file in beside)
