"""What a saved optimiser state, or a saved posterior, says about a model's weights: no model, no data."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam.diagnosis import Diagnosis, Finding, diagnose
from bayesadam.errors import BayesAdamError, MissingFileError, SettingError
from bayesadam.gaussian.formulas import precision
from bayesadam.gaussian.settings import Settings
from bayesadam.posterior.stored import StoredPosterior
from bayesadam.readers import (
    Checkpoint,
    CheckpointKeywords,
    CheckpointOptions,
    Entry,
    explain,
    format_of,
    match_checkpoint,
    match_state_dict,
    pieces,
    read_alike,
    read_checkpoint,
    read_entry,
    refuse_keys,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

# log₁₀ of the signal-to-noise ratio: edges from 10⁻¹² to 10⁸, ten a decade. What lies beyond counts in the last bin.
LOG_RANGE = (-12.0, 8.0)
BINS = 200
# Quantiles of a larger tensor come from a sample of this size: within 0.1 percentage points of their rank.
_SAMPLE = 2**20
_LEVELS = (0.05, 0.5, 0.95)
# How the second moments of a saved posterior are read, by its structure.
_READERS = {"diagonal": "published", "kronecker": "published-kronecker"}


@dataclass(frozen=True)
class ParameterReport:
    """The signal-to-noise ratio |μ|/σ of one parameter's weights, or σ where the file has no weights: 5, 50, 95 % quantiles.

    Attributes:
        dead: how many of the weights have v = 0.
        below: how many lie below the threshold; None without a threshold.
        histogram: counts of log₁₀ |μ|/σ, or of log₁₀ σ, in `BINS` bins over `LOG_RANGE`; what is 0 or infinite is in none.
        std_q05, std_q50, std_q95: quantiles of σ where |μ|/σ is not known; else NaN, as those of |μ|/σ are then.
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
    std_q05: float = math.nan
    std_q50: float = math.nan
    std_q95: float = math.nan

    @property
    def quantiles(self) -> tuple[float, float, float]:
        """Those that are known."""
        ratios, deviations = (self.snr_q05, self.snr_q50, self.snr_q95), (self.std_q05, self.std_q50, self.std_q95)
        return ratios if math.isnan(self.std_q50) else deviations


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
        rule: what σ is, where the file is a saved posterior, whose own N, δ and structure count.
        has_weights: whether the file has the weights; without them σ stands for |μ|/σ.
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
    rule: str = ""
    has_weights: bool = True

    @property
    def quantity(self) -> str:
        """What the quantiles and the histograms are of: `"|μ|/σ"` or `"σ"`."""
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
        """Weights below the threshold."""
        return None if self.threshold is None else sum(row.below or 0 for row in self.parameters)

    @property
    def scale_note(self) -> str:
        """What the numbers mean as N is known or not."""
        if self.rule:
            return self.rule
        if self.n_data is not None:
            return f"|μ|/σ = |θ| N^½ v̂^¼ with N = {self.n_data:g}."
        return (
            "|μ|/σ = |θ| v̂^¼, which is N = 1: the number of examples is not known. Every |μ|/σ grows as √N, so only "
            "the order of the weights means something; give n_data (--n-data) for more."
        )

    @property
    def legend(self) -> str:
        """What the columns of the table are."""
        lines = [
            "v = 0: the share of weights that no gradient ever moved (dead units, inputs that are always 0).",
            f"5 %, median, 95 %: quantiles of {self.quantity} over the parameter's weights"
            + (
                ", the size of a weight in units of its uncertainty."
                if self.has_weights
                else ", a weight's uncertainty."
            ),
        ]
        if self.threshold is not None:
            said = (
                "the share of weights with |μ|/σ below that; below 1 the noise is larger than the weight, and pruning"
            )
            lines.append(f"< {self.threshold:g}: {said} by signal-to-noise ratio takes the smallest first.")
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, ...]]:
        """The table as text, its heading first and its total last."""
        heading = ("parameter", "shape", "weights", "v = 0", "5 %", "median", "95 %", f"< {self.threshold or 0:g}")
        table: list[tuple[str, ...]] = [heading]
        for row in self.parameters:
            quantiles = [f"{value:.2g}" for value in row.quantiles]
            cells = [row.name, "×".join(map(str, row.shape)), f"{row.weights:,}", _share(row.dead, row.weights)]
            table.append((*cells, *quantiles, _share(row.below or 0, row.weights)))
        dead, below = _share(self.dead, self.weights), _share(self.below or 0, self.weights)
        table.append(("total", "", f"{self.weights:,}", dead, "", "", "", below))
        return [row if self.threshold is not None else row[:-1] for row in table]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; the histograms are left out."""
        own = ("source", "format", "optimizer", "read_alike", "n_data", "threshold", "weights", "dead", "below", "why")
        unknown = "std_q" if self.has_weights else "snr_q"
        rows = {row.name: {k: v for k, v in vars(row).items() if not k.startswith(unknown)} for row in self.parameters}
        return {
            **{key: getattr(self, key) for key in (*own, "has_weights")},
            "parameters": {n: {k: row[k] for k in row if k not in ("name", "histogram")} for n, row in rows.items()},
            "omitted": dict(self.omitted),
            "doctor": self.diagnosis.to_dict(),
        }

    def __str__(self) -> str:
        table = self.rows()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
        return "\n".join([str(self.diagnosis), "", *lines, "", self.legend, self.scale_note])


def inspect_checkpoint(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    n_data: float | None = None,
    snr: float | None = None,
    seed: int = 0,
    track: Callable[[Sequence[Any], str], Iterable[Any]] | None = None,
    **options: Unpack[CheckpointKeywords],
) -> Inspection:
    """Signal-to-noise ratio and dead weights of every parameter in a checkpoint; one tensor is in memory at a time.

    The signal-to-noise ratio is that of the paper, |θ| N^½ v̂^¼: no prior, so that a weight without curvature has none. Of a
    posterior that `Posterior.save` or `export_checkpoint` wrote it is the posterior's own, `Posterior.snr`; where that has no
    weights, σ is told instead.

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
    shown = track or (lambda items, description: items)
    generator = torch.Generator().manual_seed(seed)
    if (saved := _saved_posterior(path, reading, n_data)) is not None:
        return _of_posterior(saved, snr, generator, shown)
    checkpoint = path if isinstance(path, Checkpoint) else read_checkpoint(path, reading)
    known = n_data if n_data is not None else checkpoint.recorded.n_data
    settings = Settings(1.0 if known is None else known, {})
    threshold = snr if snr is not None or known is None else 1.0
    match = match_checkpoint(checkpoint, options=reading)
    entries = shown(match.entries, "reading the state")
    reports = tuple(_of_entry(entry, settings, threshold, generator) for entry in entries)
    reader = match.entries[0].reader
    diagnosis = diagnose(match, checkpoint.path.name, n_data=known, buffers=checkpoint.weights)
    source = str(checkpoint.path), checkpoint.format, reader.name, read_alike(reader)
    return Inspection(*source, known, threshold, reports, match.omitted, diagnosis, explain(checkpoint, match))


def diagnose_checkpoint(
    path: str | os.PathLike[str], *, n_data: float | None = None, **options: Unpack[CheckpointKeywords]
) -> Diagnosis:
    """What `doctor` says, of what a trainer saved or of a saved posterior; raises only where there is no file.

    Args:
        path: the checkpoint.
        n_data: N; with it the prior that the weight decay implies gets a number.
        **options: how the file is read, see `CheckpointOptions`.
    """
    reading = CheckpointOptions(**options)
    try:
        if (saved := _saved_posterior(path, reading, n_data)) is not None:
            return _diagnosis(saved)
        checkpoint = read_checkpoint(path, reading)
        known = n_data if n_data is not None else checkpoint.recorded.n_data
        match = match_checkpoint(checkpoint, options=reading)
        return diagnose(match, checkpoint.path.name, n_data=known, buffers=checkpoint.weights)
    except (MissingFileError, SettingError):
        raise
    except BayesAdamError as error:
        finding = Finding("unreadable", "error", str(error))
        return Diagnosis(f"{Path(path).name}: no posterior can be read", (finding,))


def _saved_posterior(
    path: str | os.PathLike[str] | Checkpoint, options: CheckpointOptions, n_data: float | None
) -> StoredPosterior | None:
    """The posterior of ours that a file is, if it is one and not the state of weights in another file."""
    if isinstance(path, Checkpoint):
        file, apart = path.path, path.optimizer_path is not None
    else:
        file, apart = Path(path), options.optimizer_path is not None
    if apart or format_of(file).name != "posterior":
        return None
    refuse_keys(
        file, "a saved posterior has no levels", weights_key=options.weights_keys, optimizer_key=options.optimizer_key
    )
    return StoredPosterior.open(file, n_data)


def _of_posterior(
    saved: StoredPosterior, snr: float | None, generator: torch.Generator, shown: Callable[[Sequence[Any], str], Any]
) -> Inspection:
    threshold = (1.0 if snr is None else snr) if saved.has_weights else None
    reports = []
    for names in shown(saved.groups, "reading the posterior"):
        for name, marginal in saved.marginals(names).items():
            values = marginal.stddev if marginal.snr is None else marginal.snr
            chunks = [(marginal.dead, values.flatten())]
            reports.append(_report(name, values.shape, chunks, threshold, generator, std=marginal.snr is None))
    return Inspection(
        source=str(saved.path),
        format="posterior",
        optimizer=" and ".join(saved.origin.optimizers) or "unknown",
        read_alike=(),
        n_data=saved.settings.n_data,
        threshold=threshold,
        parameters=tuple(reports),
        omitted=saved.header.get("omitted", {}),
        diagnosis=_diagnosis(saved),
        why=_how(saved),
        rule=_rule(saved),
        has_weights=saved.has_weights,
    )


def _diagnosis(saved: StoredPosterior) -> Diagnosis:
    """The findings on the second moments in a saved posterior; its prior is its own, and no weight decay's."""
    trained = f" trained by {' and '.join(saved.origin.optimizers)}" if saved.origin.optimizers else ""
    weights = sum(saved.shape(name).numel() for name in saved.names)
    summary = f"{saved.path.name}{trained}: a {saved.structure} posterior of {weights:,} weights in {len(saved.names)} parameters"
    if saved.structure not in _READERS or len(saved.prior) < len(saved.names):
        return Diagnosis(summary, ())
    state = format_of(saved.path).read(saved.path, None, None).optimizer
    match = match_state_dict(saved.skeleton(), state or {}, _READERS[saved.structure])
    found = diagnose(match, saved.path.name, n_data=saved.settings.n_data, prior=saved.prior).findings
    return Diagnosis(summary, tuple(each for each in found if each.code not in ("implied-prior", "optimizer")))


def _rule(saved: StoredPosterior) -> str:
    """What σ is in a saved posterior, in a sentence or two."""
    settings = saved.settings
    ends = dict.fromkeys((min(saved.prior.values(), default=0), max(saved.prior.values(), default=0)))
    known = len(saved.prior) == len(saved.names)
    delta = " to ".join(f"{each:g}" for each in ends) if known else "one for each weight"
    parts = [f"N = {settings.n_data:g}", f"δ = {delta}"]
    parts += [f"s = {settings.scale:g} by calibration"] if settings.scale != 1 else []
    parts += [f"B = {settings.batch_size}"] if settings.power != 0.5 and settings.batch_size else []
    power = "½" if settings.power == 0.5 else f"{settings.power:g}"
    if saved.structure == "diagonal":
        text = f"σ is the saved posterior's own: 1/σ² = {settings.weight:g} v̂^{power} + δ, with {', '.join(parts)}."
    else:
        text = f"σ is the marginal one of the saved {saved.structure} posterior, with {', '.join(parts)}, v̂^{power}."
    if saved.has_weights:
        return text
    missing = (
        "The file has no weights, so |μ|/σ is not known: inspect the weights' file, with this one as optimizer_path"
    )
    return f"{text}\n{missing} (--optimizer-file)."


def _how(saved: StoredPosterior) -> tuple[str, ...]:
    """How a saved posterior was read, a sentence each."""
    kept = saved.header.get("compress")
    steps = dict.fromkeys(saved.origin.steps or ())
    unit = "recorded gradients" if saved.origin.recorded else "steps"
    return (
        f"{saved.path}: format posterior, {saved.structure}, {'with' if saved.has_weights else 'without'} weights.",
        f"Written by bayesadam {saved.header.get('version', 'of an unknown version')}"
        + (f", second moments kept as {kept}" if kept else "")
        + (f", of {' to '.join(f'{each:g}' for each in steps)} {unit}." if steps else "."),
    )


def _of_entry(entry: Entry, settings: Settings, threshold: float | None, generator: torch.Generator) -> ParameterReport:
    def chunks() -> Iterator[tuple[int, Tensor]]:
        for piece in pieces(entry):
            _, v = read_entry(piece)
            root = precision(v, settings.weight, 0.0, settings.power).sqrt_()
            yield int((v == 0).sum()), root.mul_(piece.parameter.detach().abs()).flatten()

    return _report(entry.name, entry.parameter.shape, chunks(), threshold, generator)


@torch.no_grad()
def _report(
    name: str,
    shape: torch.Size,
    chunks: Iterable[tuple[int, Tensor]],
    threshold: float | None,
    generator: torch.Generator,
    *,
    std: bool = False,
) -> ParameterReport:
    """Of |μ|/σ, or of σ, chunk by chunk in the flat order, each with the number of its weights that have v = 0."""
    total = shape.numel()
    large = total > _SAMPLE
    chosen = torch.randint(total, (_SAMPLE,), generator=generator).sort().values if large else torch.zeros(0)
    dead = below = first = 0
    counts = torch.zeros(BINS, dtype=torch.int64)
    sampled = []
    for zeros, values in chunks:
        dead += zeros
        below += 0 if threshold is None else int((values < threshold).sum())
        logs = values[(values > 0) & torch.isfinite(values)].log10_()
        counts += torch.histc(logs.clamp_(*LOG_RANGE), BINS, *LOG_RANGE).long()
        last = first + values.numel()
        here = slice(*torch.searchsorted(chosen, torch.tensor([first, last])).tolist())
        sampled.append(values[chosen[here] - first] if large else values)
        first = last
    levels = dict(zip(("q05", "q50", "q95"), quantiles(torch.cat(sampled), _LEVELS), strict=True))
    nothing = dict.fromkeys(levels, math.nan)
    known = {f"snr_{level}": value for level, value in (nothing if std else levels).items()}
    known |= {f"std_{level}": value for level, value in (levels if std else nothing).items()}
    counted = None if threshold is None else below
    found: Any = {"below": counted, "histogram": tuple(counts.tolist()), **known}
    return ParameterReport(name, tuple(shape), total, dead, **found)


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
