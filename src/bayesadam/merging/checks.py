"""What makes a merge impossible or bad: other architectures, poor states, curvatures on different weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.lora import Pair
from bayesadam.merging.experts import Expert
from bayesadam.merging.report import Sums

# Below it the curvatures lie on different weights, as those of networks that know different classes.
LEAST_OVERLAP = 0.5
LEAST_GRADIENTS = 50
_SHOWN = 3


def check_alike(experts: Sequence[Expert], apart: Mapping[str, Pair]) -> None:
    """Refuse networks of another architecture, naming the first tensor that differs; adapters may differ in rank."""
    first = experts[0]
    for other in experts[1:]:
        missing = [name for name in first.outline if name not in other.outline]
        unknown = [name for name in other.outline if name not in first.outline]
        if missing or unknown:
            name, owner, lacking = (missing[0], first, other) if missing else (unknown[0], other, first)
            raise MatchError(
                f"{first.label} and {other.label} are of different architectures: {owner.label} has {name!r}, "
                f"{lacking.label} has not ({len(missing) + len(unknown)} such names). Only networks of one architecture, "
                "fine-tuned from one start, can be merged"
            )
        for name, tensor in first.outline.items():
            theirs = other.outline[name]
            if tensor.shape != theirs.shape and name not in apart:
                raise MatchError(
                    f"{first.label} and {other.label} are of different architectures: {name!r} has shape "
                    f"{tuple(tensor.shape)} in the one and {tuple(theirs.shape)} in the other"
                )


def check_base(base: Expert, first: Expert, trained: Iterable[str]) -> None:
    """Refuse a base of another architecture."""
    for name in trained:
        shape = first.outline[name].shape
        if name not in base.outline or base.outline[name].shape != shape:
            found = f"of shape {tuple(base.outline[name].shape)}" if name in base.outline else "nothing of that name"
            raise MatchError(
                f"the base is of another architecture: {first.label} has {name!r} of shape {tuple(shape)}, the base {found}"
            )


def check_bases(experts: Sequence[Expert], trained: Sequence[str]) -> None:
    """Refuse models without eigenbases, or with bases of too few gradients."""
    for expert in experts:
        if not any(expert.has_bases(name) for name in trained):
            raise SettingError(
                f"method='kronecker' needs eigenbases, and {expert.label} has none: train with a Recorder or with "
                "bayesadam.optim.SOAP and build Posterior.from_optimizer(..., structure='kronecker'), or use method='fisher'"
            )
        fewest = expert.origin.fewest
        if expert.origin.recorded and fewest is not None and fewest < LEAST_GRADIENTS:
            raise SettingError(
                f"the eigenbases of {expert.label} come from {fewest:g} recorded gradients, and merging by them "
                f"needs {LEAST_GRADIENTS} at least: ba.Recorder(optimizer, keep=100), or method='fisher'"
            )


def warn_of_overlap(total: Sums, experts: Sequence[Expert]) -> None:
    """Warn of curvatures on different weights."""
    count = len(experts)
    overlap, i, j = min((total.overlap(i, j), j, i) for i in range(count) for j in range(i))
    if overlap < LEAST_OVERLAP:
        warn(
            f"the curvatures of {experts[i].label} and {experts[j].label} overlap by {overlap:.2f} only, as those of networks "
            "that know different classes do: there merging by curvature is worse than averaging. Compare both on held-out "
            "data"
        )


def notes_on(experts: Sequence[Expert], plain: Sequence[str], trained: Sequence[str]) -> list[str]:
    """What is merged in another way than by curvature, in words."""
    outline, notes = experts[0].outline, []
    partly = [name for name in trained if not all(name in expert.moments for expert in experts)]
    others = [name for name in plain if name not in set(trained)]
    real = [name for name in others if outline[name].is_floating_point() or outline[name].is_complex()]
    whole = [name for name in others if name not in set(real)]
    for names, words in (
        (partly, "that not every model trained come from those that did"),
        (real, "that no model trained were averaged"),
        (whole, f"of integers are those of {experts[0].label}"),
    ):
        if names:
            shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            notes.append(f"{len(names)} tensors {words}: {shown}")
    return notes
