"""What a saved optimiser state says about a model's weights, without the model and without data."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam.checkpoint import Checkpoint, CheckpointKeywords, CheckpointOptions, read_checkpoint
from bayesadam.checkpoint.identify import read_alike
from bayesadam.checkpoint.resolve import match_and_explain
from bayesadam.curvature.match import Entry
from bayesadam.curvature.read import pieces, read_entry
from bayesadam.diagnosis import Diagnosis, diagnose
from bayesadam.errors import SettingError
from bayesadam.structures.formulas import precision
from bayesadam.structures.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

# log₁₀ of the signal-to-noise ratio: edges from 10⁻¹² to 10⁸, ten a decade. What lies beyond counts in the last bin.
LOG_RANGE = (-12.0, 8.0)
BINS = 200
# Quantiles of a larger tensor come from a sample of this size: within 0.1 percentage points of their rank.
_SAMPLE = 2**20
_LEVELS = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class ParameterReport:
    """The signal-to-noise ratio |μ|/σ of one parameter's weights: its 5, 50 and 95 % quantiles.

    Attributes:
        dead: how many of the weights have v = 0.
        below: how many lie below the threshold; None without a threshold.
        histogram: counts of log₁₀ |μ|/σ in `BINS` bins over `LOG_RANGE`; weights with |μ|/σ = 0 are in none.
    """

    name: str
    shape: tuple[int, ...]
    weights: int
    dead: int
    snr_q05: float
    snr_q50: float
    snr_q95: float
    below: int | None
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Inspection:
    """What was found; prints as a table and the doctor's remarks.

    Attributes:
        optimizer: the reader that read the state; `"adam or adamw"` where the file does not say which.
        read_alike: optimisers that are read in the very same way.
        n_data: N, or None where it is not known: the numbers are then those of N = 1.
        threshold: the signal-to-noise ratio below which weights are counted; None where they are not.
        omitted: tensors without a state, with the reason.
        why: how the file was read, a sentence each.
    """

    source: str
    format: str
    optimizer: str
    read_alike: tuple[str, ...]
    n_data: float | None
    threshold: float | None
    parameters: tuple[ParameterReport, ...]
    omitted: Mapping[str, str]
    diagnosis: Diagnosis
    why: tuple[str, ...]

    @property
    def weights(self) -> int:
        """Weights with a state."""
        return sum(row.weights for row in self.parameters)

    @property
    def dead(self) -> int:
        """Weights with v = 0."""
        return sum(row.dead for row in self.parameters)

    @property
    def below(self) -> int | None:
        """Weights below the threshold."""
        return None if self.threshold is None else sum(row.below or 0 for row in self.parameters)

    @property
    def scale_note(self) -> str:
        """What the numbers mean as N is known or not."""
        if self.n_data is not None:
            return f"|μ|/σ = |θ| N^½ v̂^¼ with N = {self.n_data:g}."
        return (
            "|μ|/σ = |θ| v̂^¼, which is N = 1: the number of examples is not known. Every |μ|/σ grows as √N, so only "
            "the order of the weights means something; give n_data (--n-data) for more."
        )

    def rows(self) -> list[tuple[str, ...]]:
        """The table as text, its heading first and its total last."""
        heading = ("parameter", "shape", "weights", "v = 0", "5 %", "median", "95 %", f"< {self.threshold or 0:g}")
        table: list[tuple[str, ...]] = [heading]
        for row in self.parameters:
            quantiles = [f"{value:.2g}" for value in (row.snr_q05, row.snr_q50, row.snr_q95)]
            cells = [row.name, "×".join(map(str, row.shape)), f"{row.weights:,}", _share(row.dead, row.weights)]
            table.append((*cells, *quantiles, _share(row.below or 0, row.weights)))
        dead, below = _share(self.dead, self.weights), _share(self.below or 0, self.weights)
        table.append(("total", "", f"{self.weights:,}", dead, "", "", "", below))
        return [row if self.threshold is not None else row[:-1] for row in table]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; the histograms are left out."""
        own = ("source", "format", "optimizer", "read_alike", "n_data", "threshold", "weights", "dead", "below", "why")
        rows = {row.name: vars(row) for row in self.parameters}
        return {
            **{key: getattr(self, key) for key in own},
            "parameters": {n: {k: row[k] for k in row if k not in ("name", "histogram")} for n, row in rows.items()},
            "omitted": dict(self.omitted),
            "doctor": self.diagnosis.to_dict(),
        }

    def __str__(self) -> str:
        table = self.rows()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
        return "\n".join([str(self.diagnosis), "", *lines, "", self.scale_note])


def inspect_checkpoint(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    n_data: float | None = None,
    snr: float | None = None,
    seed: int = 0,
    track: Callable[[Sequence[Entry], str], Iterable[Entry]] | None = None,
    **options: Unpack[CheckpointKeywords],
) -> Inspection:
    """Signal-to-noise ratio and dead weights of every parameter in a checkpoint; one tensor is in memory at a time.

    The signal-to-noise ratio is that of the paper, |θ| N^½ v̂^¼: no prior, so that a weight without curvature has none.

    Args:
        path: the checkpoint, or what `read_checkpoint` returned.
        n_data: N, the number of training examples; None takes what the trainer wrote down, if it did.
        snr: weights below this are counted; None is 1 where N is known, and no count where it is not.
        seed: of the sample that the quantiles of very large tensors come from.
        track: iterates over the parameters and may show its progress.
        **options: how the file is read, see `CheckpointOptions`.
    """
    if snr is not None and not (math.isfinite(snr) and snr >= 0):
        raise SettingError(f"snr must be finite and at least 0, got {snr!r}")
    reading = CheckpointOptions(**options)
    checkpoint = path if isinstance(path, Checkpoint) else read_checkpoint(path, reading)
    known = n_data if n_data is not None else checkpoint.recorded.n_data
    settings = Settings(1.0 if known is None else known, {})
    threshold = snr if snr is not None or known is None else 1.0
    match, why = match_and_explain(checkpoint, reading)
    generator = torch.Generator().manual_seed(seed)
    entries = track(match.entries, "reading the state") if track else match.entries
    reports = tuple(_report(entry, settings, threshold, generator) for entry in entries)
    diagnosis, reader = diagnose(match, checkpoint.path.name, n_data=known), match.entries[0].reader
    source = str(checkpoint.path), checkpoint.format, reader.name, read_alike(reader)
    return Inspection(*source, known, threshold, reports, match.omitted, diagnosis, why)


@torch.no_grad()
def _report(entry: Entry, settings: Settings, threshold: float | None, generator: torch.Generator) -> ParameterReport:
    total = entry.parameter.numel()
    large = total > _SAMPLE
    chosen = torch.randint(total, (_SAMPLE,), generator=generator).sort().values if large else torch.zeros(0)
    dead = below = first = 0
    counts = torch.zeros(BINS, dtype=torch.int64)
    sampled = []
    for piece in pieces(entry):
        _, v = read_entry(piece)
        dead += int((v == 0).sum())
        snr = precision(v, settings.weight, 0.0, settings.power).sqrt_().mul_(piece.parameter.detach().abs()).flatten()
        below += 0 if threshold is None else int((snr < threshold).sum())
        logs = snr[(snr > 0) & torch.isfinite(snr)].log10_()
        counts += torch.histc(logs.clamp_(*LOG_RANGE), BINS, *LOG_RANGE).long()
        last = first + snr.numel()
        here = slice(*torch.searchsorted(chosen, torch.tensor([first, last])).tolist())
        sampled.append(snr[chosen[here] - first] if large else snr)
        first = last
    low, median, high = quantiles(torch.cat(sampled), _LEVELS)
    shape, counted = tuple(entry.parameter.shape), None if threshold is None else below
    return ParameterReport(entry.name, shape, total, dead, low, median, high, counted, tuple(counts.tolist()))


def quantiles(values: Tensor, levels: Sequence[float]) -> list[float]:
    """Quantiles of a vector; NaN of an empty one.

    >>> quantiles(torch.arange(11.0), (0.1, 0.5))
    [1.0, 5.0]
    """
    if not values.numel():
        return [math.nan] * len(levels)
    return [float(q) for q in torch.quantile(values, torch.tensor(levels, dtype=values.dtype))]


def _share(count: int, total: int) -> str:
    """A percentage that says 0 or 100 only where it is.

    >>> _share(0, 10), _share(1, 3000), _share(2, 3)
    ('0 %', '<0.1 %', '66.7 %')
    """
    if not total or count in (0, total):
        return "100 %" if count else "0 %"
    share = 100 * count / total
    if share < 0.1:
        return "<0.1 %"
    return ">99.9 %" if share > 99.9 else f"{share:.1f} %"
