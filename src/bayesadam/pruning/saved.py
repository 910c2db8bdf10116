"""Pruning a saved network from its optimiser's state: no model, no data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesadam.errors import SettingError
from bayesadam.posterior.running import norm_widths
from bayesadam.pruning.masks import Scope, checked_fraction, compete
from bayesadam.pruning.names import held_by_statistics, matching_names
from bayesadam.pruning.rankings import RANKINGS, Weights
from bayesadam.pruning.report import PrunedParameter, PruningReport
from bayesadam.pruning.select import Cut, cut_after
from bayesadam.readers import (
    CheckpointKeywords,
    CheckpointOptions,
    Entry,
    Lazy,
    check_entries,
    match_checkpoint,
    meta,
    pieces,
    read_checkpoint,
    read_entry,
    write_pruned,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

# N and a prior do not change the order: the ranking sees the paper's |θ| v̂^¼.
_POWER = 0.5


def prune_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    fraction: float,
    *,
    ranking: str = "snr",
    scope: Scope = "global",
    exclude: str | Sequence[str] = (),
    **options: Unpack[CheckpointKeywords],
) -> PruningReport:
    """Write a checkpoint again with a share of its weights at zero, lowest score first; all else in it stays as it was.

    Args:
        path: what the trainer saved, see `read_checkpoint`.
        out: the file to write; with the ending `.safetensors` the weights alone.
        fraction: the share of the weights with a state to remove, 0 to 1.
        ranking: a name from `RANKINGS`.
        scope: `"global"`, all weights compete; `"layer"`, the fraction is removed from each parameter.
        exclude: parameters to leave whole, by name, by pattern (`"norm*.weight"`) or `"biases"`; the other kinds need the
            model, see `pruning_masks`. Biases that a batch norm follows are left whole too, with a warning.
        **options: how the file is read, see `CheckpointOptions`.

    Returns:
        What was removed of the parameters with a state; buffers and frozen weights have no row.
    """
    share = checked_fraction(fraction)
    if ranking not in RANKINGS:
        raise SettingError(f"ranking must be one of {', '.join(map(repr, RANKINGS))}, got {ranking!r}")
    reading = CheckpointOptions(**options)
    checkpoint = read_checkpoint(path, reading)
    match = match_checkpoint(checkpoint, options=reading)
    entries = {entry.name: entry for entry in match.entries}
    whole = matching_names(entries.keys(), exclude)
    check_entries(match)
    widths = norm_widths(checkpoint.weights).values()
    whole |= held_by_statistics(entries.keys() - whole, lambda name: _some_moments(entries[name]), widths)
    eligible = {name: entry for name, entry in entries.items() if name not in whole}
    competing = compete(eligible, scope)
    cuts = _cuts(eligible, competing, RANKINGS[ranking], share)
    outline = {name: meta(entry.parameter.shape, torch.bool) for name, entry in eligible.items()}
    masks = Lazy(outline, lambda name: _mask(eligible[name], RANKINGS[ranking], cuts[name]))
    write_pruned(checkpoint, masks, out)
    found = ((name, tensor) for name, tensor in checkpoint.weights.items() if name in entries)
    return PruningReport.total(tuple(PrunedParameter.of(name, tensor, masks.get(name)) for name, tensor in found))


def _some_moments(entry: Entry) -> Tensor:
    """v̂ of the first piece of a parameter."""
    return read_entry(next(iter(pieces(entry))))[1]


Rank = Callable[[Weights], Tensor]


@torch.no_grad()
def _scored(entries: Sequence[Entry], rank: Rank) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores and weights of parameters, piece by piece."""
    for piece in chain.from_iterable(map(pieces, entries)):
        _, v = read_entry(piece)
        theta = piece.parameter.detach().to(v.dtype)
        yield rank(Weights(theta, v, 1.0, _POWER, 0.0, "map")).reshape(-1), theta.reshape(-1)


def _cuts(
    entries: Mapping[str, Entry], competing: Sequence[Sequence[str]], rank: Rank, share: float
) -> dict[str, Cut | None]:
    """Where the lowest scores end, for every parameter in turn; None where nothing is removed."""
    cuts: dict[str, Cut | None] = {}
    wide = any(entry.parameter.dtype == torch.float64 for entry in entries.values())
    for names in competing:
        count = round(share * sum(entries[name].parameter.numel() for name in names))
        if not count:
            cuts |= dict.fromkeys(names)
            continue
        cut = cut_after(partial(_scored, [entries[name] for name in names], rank), count, wide=wide)
        for name in names:
            cuts[name] = cut
            for score, weight in _scored([entries[name]], rank) if cut.ties else ():
                _, cut = cut.taken(score, weight)
    return cuts


def _mask(entry: Entry, rank: Rank, cut: Cut | None) -> Tensor:
    """True where a weight stays."""
    remaining, first = torch.ones(entry.parameter.numel(), dtype=torch.bool), 0
    for score, weight in _scored([entry], rank) if cut is not None else ():
        assert cut is not None
        taken, cut = cut.taken(score, weight)
        remaining[first : first + len(score)] = taken.logical_not_()
        first += len(score)
    return remaining.view(entry.parameter.shape)
