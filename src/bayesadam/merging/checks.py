"""What makes a merge impossible or bad: other architectures, poor states, curvatures on different weights."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import torch

from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.lora import Pair
from bayesadam.merging.experts import Expert, Source
from bayesadam.merging.report import Sums

# Below it the second moments of training lie on different weights, as those of networks that know different classes.
LEAST_OVERLAP = 0.5
LEAST_GRADIENTS = 50
_SHOWN = 3


def check_twice(models: Sequence[Source]) -> None:
    """Refuse a posterior or a path that is given twice."""
    first: dict[Hashable, int] = {}
    for number, source in enumerate(models, 1):
        parts = source if isinstance(source, tuple) else (source,)
        key = tuple(Path(part).resolve() if isinstance(part, str | os.PathLike) else id(part) for part in parts)
        if first.setdefault(key, number) != number:
            paths = ", ".join(str(part) for part in parts if isinstance(part, str | os.PathLike))
            raise SettingError(
                f"{paths or 'one posterior'} is given twice, as models {first[key]} and {number}: give each fine-tuned network "
                "once. One that is to count for more has a larger number in weights="
            )


def warn_of_copies(experts: Sequence[Expert], trained: Sequence[str]) -> None:
    """Warn of models whose trained weights are the same; reading ends with the first tensor that differs."""
    for one, other in combinations(experts, 2):
        if all(_same(one, other, name) for name in trained):
            warn(
                f"{one.label} and {other.label} have the same weights, so that one network counts twice: is one a copy of the "
                "other, or were both read from one model? Give each fine-tuned network once; one that is to count for more "
                "has a larger number in weights="
            )


def warn_of_no_change(base: Expert, experts: Sequence[Expert], trained: Sequence[str]) -> None:
    """Warn of models whose trained weights are those of the base, so that θᵢ − θ₀ = 0."""
    for expert in experts:
        if trained and all(_same(base, expert, name) for name in trained):
            warn(
                f"the base has the weights of {expert.label}, whose fine-tuning then counts for nothing: base= is the network "
                "before fine-tuning"
            )


def _same(one: Expert, other: Expert, name: str) -> bool:
    if one.outline[name].shape != other.outline[name].shape or one.outline[name].dtype != other.outline[name].dtype:
        return False
    own = one.weights[name].detach()
    return torch.equal(own, other.weights[name].detach().to(own.device))


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
    """Warn of second moments on different weights.

    Only of those that an optimiser averaged over training, weight by weight: by them the limit was set. The diagonals of
    Kronecker factors, and second moments of recorded gradients, overlap by less where merging helps and by more where it
    does not.
    """
    known = [number for number, expert in enumerate(experts) if expert.is_averaged]
    found = [(total.overlap(i, j), i, j) for i, j in combinations(known, 2)]
    overlap, i, j = min(found, default=(1.0, 0, 0))
    if overlap < LEAST_OVERLAP:
        warn(
            f"the curvatures of {experts[i].label} and {experts[j].label} overlap by {overlap:.2f} only, as those of networks "
            "that know different classes do: there merging by curvature can be worse than averaging. Compare both on held-out "
            "data of every task"
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
