"""Whether weights and an optimiser's state are of one moment of training, by what their files say of it."""

from __future__ import annotations

import re
from pathlib import Path

from bayesadam.readers.checkpoint import Checkpoint
from bayesadam.readers.formats.huggingface import STATE
from bayesadam.readers.formats.registry import without_role
from bayesadam.readers.match import Match

_MOMENT = re.compile(r"(?<![a-z])(epoch|step|iteration|iter|checkpoint|ckpt)s?[-_=.]*(\d+)", re.IGNORECASE)
# Steps that a loss scaler skipped are in the trainer's count and not in the optimiser's: so many, or this share.
_SKIPPED, _SHARE = 20, 0.05


def moments_apart(checkpoint: Checkpoint, match: Match) -> str | None:
    """How weights and state differ in age, in words with the remedy; None where nothing shows it.

    Two files are compared by their names (`model_epoch_12.pt`, `optimizer_epoch_11.pt`) and by the epochs and steps
    inside; the folder of a Hugging Face Trainer by its own count of steps and the optimiser's.
    """
    found = _by_names(checkpoint) or _by_records(checkpoint) or _by_steps(checkpoint, match)
    if found is None:
        return None
    return (
        f"the weights are of another moment of training than the optimiser's state: {found}. The second moment "
        "describes the network at its own step alone: pass the state that was saved with these weights"
    )


def _by_names(checkpoint: Checkpoint) -> str | None:
    """Numbers after the same word, or in otherwise equal names, that differ."""
    paths = checkpoint.path, checkpoint.optimizer_path
    if paths[1] is None or paths[0] == paths[1]:
        return None
    one, other = (_numbered(path) for path in paths if path is not None)
    for word in one.keys() & other.keys():
        if one[word] != other[word]:
            return f"by their names {paths[0]} is of {word} {one[word]}, {paths[1]} of {word} {other[word]}"
    (one_name, one_numbers), (other_name, other_numbers) = (_template(path) for path in paths if path is not None)
    if one_name == other_name and one_numbers != other_numbers:
        return f"by their names {paths[0].name} and {paths[1].name} are not of one save"
    return None


def _by_records(checkpoint: Checkpoint) -> str | None:
    own, other = checkpoint.weights_recorded, checkpoint.state_recorded
    for word in ("epoch", "step"):
        one, two = getattr(own, word), getattr(other, word)
        if one is not None and two is not None and one != two:
            return f"{checkpoint.path} says {word} {one}, {checkpoint.optimizer_path} {word} {two}"
    return None


def _by_steps(checkpoint: Checkpoint, match: Match) -> str | None:
    """The Trainer's count of optimiser steps against the optimiser's own."""
    if checkpoint.recorded.step is None or not (checkpoint.path / STATE).is_file():
        return None
    counts = [entry.reader.steps(entry.state, entry.group) for entry in match.entries]
    taken, said = max((count for count in counts if count is not None), default=None), checkpoint.recorded.step
    if taken is None or -1 < said - taken <= max(_SKIPPED, _SHARE * said):
        return None
    return f"{checkpoint.path / STATE} counts {said} steps, the optimiser {taken:g}"


def _numbered(path: Path) -> dict[str, int]:
    """Epochs, steps and the like in the name of a file and of its folder.

    >>> _numbered(Path("run/epoch=3-step=400.ckpt")), _numbered(Path("checkpoint-500/optimizer.pt"))
    ({'epoch': 3, 'step': 400}, {'checkpoint': 500})
    """
    return {word.lower(): int(number) for word, number in _MOMENT.findall(f"{path.parent.name}/{path.name}")}


def _template(path: Path) -> tuple[str, list[int]]:
    """A file's name without its numbers and without the word for what it holds, and the numbers.

    >>> _template(Path("model_12.pt")), _template(Path("optimizer_11.pt"))
    (('_#', [12]), ('_#', [11]))
    """
    name = without_role(path.stem)
    return re.sub(r"\d+", "#", name), [int(number) for number in re.findall(r"\d+", name)]
