"""The signal-to-noise ratios of a checkpoint's or a posterior's weights, layer by layer: no model, no data."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from bayesadam._tables import aligned
from bayesadam.compress import PruningReport, Quantised
from bayesadam.compress.packing import is_packed, report_packed
from bayesadam.diagnosis import Diagnosis, Examined, Finding, diagnose, examine
from bayesadam.errors import BayesAdamError, MatchError, MissingFileError, SettingError
from bayesadam.readers import Checkpoint, CheckpointKeywords, read_checkpoint
from bayesadam.readers.match import Match
from bayesadam.weights.gaussian import GaussianWeights, is_saved

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Quantiles of a larger tensor come from every k-th weight, so many or fewer.
_SAMPLE = 2**20
# More runs of rows are not shown.
_RUNS = 12
# Numbers of rows, and of columns.
Sides = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ParameterReport:
    """|μ|/σ over one parameter's weights, or σ where a file has no weights.

    Attributes:
        dead: how many have v = 0.
        untrained: the rows (units, entries of an embedding) and the columns (inputs) of a matrix in which all have.
        stopped: those whose v, summed, is below 10⁻⁹ of the median's: units that died in training.
        below: how many have |μ|/σ < 1; None where that or N is not known.
        quantiles: 5, 50 and 95 % of |μ|/σ, or of σ.
    """

    name: str
    shape: tuple[int, ...]
    weights: int
    dead: int
    untrained: Sides
    stopped: Sides
    below: int | None
    quantiles: tuple[float, float, float]


@dataclass(frozen=True)
class Inspection:
    """What was found; prints as a table and the doctor's remarks.

    Attributes:
        optimizer: the reader that read the state.
        n_data: N, or None where it is not known: the numbers are then those of N = 1.
        groups: the optimiser's groups of parameters in words; none of a saved posterior.
        omitted: tensors without a state, with the reason.
        why: how the file was read, a sentence each.
        rule: what |μ|/σ or σ is, in words.
        has_weights: whether the file has the weights; without them σ stands for |μ|/σ.
    """

    source: str
    format: str
    optimizer: str
    n_data: float | None
    groups: tuple[str, ...]
    parameters: tuple[ParameterReport, ...]
    omitted: Mapping[str, str]
    diagnosis: Diagnosis
    why: tuple[str, ...]
    rule: str
    has_weights: bool

    @property
    def quantity(self) -> str:
        """What the quantiles are of: `"|μ|/σ"` or `"σ"`."""
        return "|μ|/σ" if self.has_weights else "σ"

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
        """Weights with |μ|/σ < 1; None where that or N is not known."""
        return sum(row.below or 0 for row in self.parameters) if self.has_weights and self.n_data else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        shown = ("source", "format", "optimizer", "n_data", "groups", "weights", "dead", "below", "why")
        parameters = [asdict(row) for row in self.parameters]
        return {
            **{key: getattr(self, key) for key in (*shown, "quantity")},
            "parameters": {row.pop("name"): row for row in parameters},
            "omitted": dict(self.omitted),
            "doctor": self.diagnosis.to_dict(),
        }

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [("parameter", "shape", "weights", "v = 0", "5 %", "median", "95 %", "< 1")]
        for row in self.parameters:
            dead, below = _share(row.dead, row.weights), _share(row.below or 0, row.weights)
            quantiles = (f"{value:.2g}" for value in row.quantiles)
            table.append((row.name, "×".join(map(str, row.shape)), f"{row.weights:,}", dead, *quantiles, below))
        dead, below = _share(self.dead, self.weights), _share(self.below or 0, self.weights)
        table.append(("total", "", f"{self.weights:,}", dead, "", "", "", below))
        idle = [
            f"{why}: {side} {_ranges(at)} of the {length} of {row.name}"
            for why, sides in (
                ("no gradient ever reached (counted from 0)", "untrained"),
                ("dead (v below 10⁻⁹ of the median's)", "stopped"),
            )
            for row in self.parameters
            for side, at, length in zip(("rows", "columns"), getattr(row, sides), row.shape, strict=False)
            if at
        ]
        idle += [f"group {number}: {text}" for number, text in enumerate(self.groups)]
        legend = [
            "v = 0: the share of weights that no gradient ever moved (dead units, inputs that are always 0).",
            f"5 %, median, 95 %: quantiles of {self.quantity} over the parameter's weights.",
            "< 1: the share of weights with |μ|/σ below that.",
        ]
        if self.below is None:
            table, legend = [row[:-1] for row in table], legend[:-1]
        return "\n".join([str(self.diagnosis), "", *aligned(table), "", *idle, "", *legend, self.rule])


@overload
def inspect(source: Quantised) -> PruningReport: ...


@overload
def inspect(
    source: str | os.PathLike[str] | Checkpoint | GaussianWeights,
    *,
    n_data: float | None = None,
    **options: Unpack[CheckpointKeywords],
) -> Inspection: ...


def inspect(
    source: str | os.PathLike[str] | Checkpoint | GaussianWeights | Quantised,
    *,
    n_data: float | None = None,
    **options: Unpack[CheckpointKeywords],
) -> Inspection | PruningReport:
    """Signal-to-noise ratio and dead weights of every parameter; one tensor of a file is in memory at a time.

    Of a checkpoint the ratio is that of the paper, |θ| N^½ v̂^¼, without a prior; of a posterior, live or saved, it is
    `Posterior.snr`. Where a file has no weights, σ is shown instead.

    Args:
        source: a checkpoint, what `read_checkpoint` returned, a saved posterior, or a posterior; of what `quantise`
            returned, and of its file, it is a `PruningReport`, with the bytes of each tensor.
        n_data: N, the number of training examples; None takes what the trainer wrote down, if it did.
        **options: how the file is read, see `CheckpointKeywords`.
    """
    if isinstance(source, Quantised):
        return source.report
    if isinstance(source, str | os.PathLike) and is_packed(source):
        return report_packed(source)
    gaussian, n = _opened(source, n_data, options)
    opened = gaussian.source
    match = None if opened is None else opened.match
    examined, reports = [], []
    for result in examine(gaussian, match):
        if result.part is None:
            raise MatchError(result.error)
        reports.append(_report(result.part, result, n))
        # Without the tensors, which the next step replaces.
        examined.append(replace(result, part=None))
        del result
    return Inspection(
        source=type(getattr(gaussian, "model", gaussian)).__name__ if opened is None else str(opened.path),
        format="posterior" if opened is None else opened.format,
        optimizer=match.entries[0].reader.name if match else " and ".join(gaussian.origin.optimizers) or "unknown",
        n_data=n,
        groups=() if match is None else _groups(match),
        parameters=tuple(reports),
        omitted=gaussian.omitted,
        diagnosis=diagnose(gaussian, examined, match, n_data=n),
        why=() if opened is None else opened.why,
        rule=_rule(gaussian, n, match is not None),
        has_weights=gaussian.has_weights,
    )


def diagnose_checkpoint(
    path: str | os.PathLike[str], *, n_data: float | None = None, **options: Unpack[CheckpointKeywords]
) -> Diagnosis:
    """What `doctor` says of a checkpoint or of a saved posterior; raises only where there is no file."""
    try:
        gaussian, n = _opened(path, n_data, options)
        match = None if gaussian.source is None else gaussian.source.match
        examined = [replace(result, part=None) for result in examine(gaussian, match)]
        return diagnose(gaussian, examined, match, n_data=n)
    except (MissingFileError, SettingError):
        raise
    except BayesAdamError as error:
        finding = Finding("unreadable", "error", str(error))
        return Diagnosis(f"{Path(path).name}: no posterior can be read", (finding,))


def _opened(
    source: str | os.PathLike[str] | Checkpoint | GaussianWeights, n_data: float | None, options: CheckpointKeywords
) -> tuple[GaussianWeights, float | None]:
    """The Gaussian, a checkpoint's without a prior, and N where it is known."""
    if isinstance(source, GaussianWeights):
        gaussian = source if n_data is None else source.replace(n_data=n_data)
        return gaussian, gaussian.n_data
    if is_saved(source, options.get("optimizer_path")):
        gaussian = GaussianWeights.open(source, n_data, **options)
        return gaussian, gaussian.n_data
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source, **options)
    n = checkpoint.recorded.n_data if n_data is None else n_data
    return GaussianWeights.open(checkpoint, 1.0 if n is None else n, prior_precision=0.0, **options), n


def _rule(gaussian: GaussianWeights, n_data: float | None, is_checkpoint: bool) -> str:
    """What |μ|/σ is in a checkpoint, or σ in a posterior, in a sentence or two."""
    if is_checkpoint and n_data is not None:
        return f"|μ|/σ = |θ| N^½ v̂^¼ with N = {n_data:g}."
    if is_checkpoint:
        return "|μ|/σ = |θ| v̂^¼, which is N = 1: only the order of the weights counts; give n_data (--n-data) for more."
    of, kind = gaussian.settings, gaussian.structure
    text = f"σ is that of the {kind} posterior: N = {of.n_data:g}, 1/σ² = {of.weight:g} v̂^{of.power:g} + δ."
    if gaussian.has_weights:
        return text
    return f"{text}\nFor |μ|/σ inspect the weights' file, with this one as optimizer_path (--optimizer-file)."


@torch.no_grad()
def _report(part: GaussianWeights, result: Examined, n_data: float | None) -> ParameterReport:
    name = result.name
    untrained, stopped = _idle(part.curvature.diagonal(name))
    values = (part.snr() if part.has_weights else part.stddev)[name].flatten().cpu()
    below = int((values < 1).sum()) if part.has_weights and n_data else None
    sample, levels = values[:: 1 + len(values) // _SAMPLE], values.new_tensor((0.05, 0.5, 0.95))
    low, median, high = torch.quantile(sample, levels).tolist() if len(sample) else (math.nan,) * 3
    quantiles, shape = (low, median, high), tuple(part.shapes[name])
    return ParameterReport(name, shape, result.numel, result.zeros, untrained, stopped, below, quantiles)


def _idle(v: Tensor) -> tuple[Sides, Sides]:
    """The rows and columns of a matrix v that are 0, and the others whose sum is below 10⁻⁹ of the median's."""
    if v.dim() < 2 or not v.any():
        return (), ()
    sums = [v.sum([i for i in range(v.dim()) if i != side]).cpu() for side in (0, 1)]
    small = [(side > 0) & (side < 1e-9 * side[side > 0].median()) for side in sums]
    untrained, stopped = (
        tuple(tuple(side.nonzero().flatten().tolist()) for side in sides)
        for sides in ([side == 0 for side in sums], small)
    )
    return untrained, stopped


def _groups(match: Match) -> tuple[str, ...]:
    """How many parameters each group of the optimiser has, with the settings that are numbers."""
    groups = {id(entry.group): entry.group for entry in match.entries}
    return tuple(
        f"{len(group['params'])} parameters, "
        + ", ".join(f"{key} {group[key]}" for key in ("lr", "betas", "weight_decay") if key in group)
        for group in groups.values()
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words.

    >>> _ranges([1, 2, 3, 7])
    '1 to 3, 7'
    """
    runs = [[i for _, i in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    text = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(text if len(text) <= _RUNS else [*text[:_RUNS], "…"])


def _share(count: int, total: int) -> str:
    return f"{100 * count / max(total, 1):.1f} %"
