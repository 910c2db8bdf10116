"""Weights and the optimiser's state in two files next to each other, by their names."""

import re
from pathlib import Path

_WEIGHTS = re.compile(r"(?<![a-z])(params|parameters|weights|model|net|network|module)(?![a-z])", re.IGNORECASE)
_STATES = ("optimizer", "optim", "opt")
_POSTERIOR = "posterior"
_STATE = re.compile(rf"(?<![a-z])({'|'.join((*_STATES, _POSTERIOR))})(?![a-z])", re.IGNORECASE)


def state_beside(path: Path) -> Path | None:
    """The one file with an optimiser's state next to weights: `optimizer.pt` next to `params.pt`, as skorch writes them.

    Without one, the saved posterior that was published with them: `posterior.safetensors` next to `model.safetensors` or
    `pytorch_model.bin`.
    """
    named = _WEIGHTS.search(path.stem)
    if named is None:
        return None
    before, after = path.name[: named.start()], path.name[named.end() :]
    states = [path.with_name(before + word + after) for word in _STATES]
    found = [other for other in states if other.is_file()]
    if found:
        return found[0] if len(found) == 1 else None
    published = path.with_name(before.removesuffix("pytorch_") + _POSTERIOR + after).with_suffix(".safetensors")
    return published if published.is_file() else None


def is_state_file(path: Path) -> bool:
    """Whether a file is by its name an optimiser's state, and the weights are in another next to it."""
    beside = (file for file in path.parent.glob("*") if file != path and file.is_file())
    return bool(_STATE.search(path.stem)) and any(state_beside(file) == path for file in beside)
