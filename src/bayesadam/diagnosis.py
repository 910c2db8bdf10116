"""What is wrong or notable about a model and its optimiser, before anyone trusts a posterior read off them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._alone import unwrap
from bayesadam.errors import BayesAdamError
from bayesadam.posterior.running import biases_before_norms, norm_widths
from bayesadam.readers import Entry, Match, StateReader, match_optimizers, pieces, read_entry

Severity = Literal["error", "warning", "note"]
_MARKS = {"error": "✗", "warning": "!", "note": "·"}
# Weights that the median of a larger tensor comes from.
_SAMPLE = 2**20


@dataclass(frozen=True)
class Finding:
    """One remark.

    Attributes:
        code: a stable word to test for, such as `"few-steps"`.
        severity: `"error"`, no posterior can be read; `"warning"`, one can but mind this; `"note"`.
        parameters: the parameters concerned; empty where all are.
        data: the numbers behind the words.
    """

    code: str
    severity: Severity
    message: str
    parameters: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, worst first; prints as a short report."""

    summary: str
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong: notes alone."""
        return all(finding.severity == "note" for finding in self.findings)

    def codes(self) -> tuple[str, ...]:
        """The findings' codes, in order."""
        return tuple(finding.code for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{_MARKS[f.severity]} {f.code}: {f.message}" for f in self.findings]
        return "\n".join([self.summary, *lines])


def doctor(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    n_data: float | None = None,
    reader: str | StateReader | None = None,
) -> Diagnosis:
    """Examine a model and the optimiser that trained it; never raises on what it finds.

    With `n_data`, N, the prior that the weight decay implies gets a number; `reader` is as in `Posterior.from_optimizer`.
    """
    try:
        match = match_optimizers(model, optimizer, reader)
    except BayesAdamError as error:
        finding = Finding("unreadable", "error", str(error))
        return Diagnosis(f"{type(model).__name__}: no posterior can be read", (finding,))
    buffers = dict(unwrap(model).named_buffers())
    return diagnose(match, type(model).__name__, n_data=n_data, buffers=buffers)


def diagnose(
    match: Match,
    subject: str,
    *,
    n_data: float | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    prior: Mapping[str, float] | None = None,
) -> Diagnosis:
    """The findings on parameters matched to their states, whatever they were matched from.

    Args:
        match: the parameters and their states.
        subject: what is examined, for the summary.
        n_data: N, for the number of the prior that the weight decay implies.
        buffers: what the model has beside its parameters, by name, the running statistics of its batch norms among them.
        prior: δ by parameter, where it is not the one that the weight decay implies.
    """
    examined = [_examine(entry) for entry in match.entries]
    findings = [
        *_values(examined),
        *_steps(match),
        *_dead(examined, prior or {entry.name: entry.weight_decay for entry in match.entries}),
        *_coupled_decay(examined, match),
        *_prior(match, n_data),
        *_low_precision(match),
        *_batch_norms(examined, match, norm_widths(buffers or {})),
        *_left_out(match),
        *_reader_notes(match),
    ]
    findings.sort(key=lambda finding: list(_MARKS).index(finding.severity))
    weights = sum(entry.parameter.numel() for entry in match.entries)
    counts = f"{weights:,} weights in {len(match.entries)} parameters have a second moment"
    return Diagnosis(f"{subject} trained by {' and '.join(match.optimizers)}: {counts}", tuple(findings))


@dataclass(frozen=True)
class _Examined:
    """What one parameter's second moment looks like."""

    name: str
    numel: int
    zeros: int = 0
    bad: int = 0
    error: str = ""
    decay_share: float = 0.0


def _examine(entry: Entry) -> _Examined:
    numel = entry.parameter.numel()
    zeros = bad = 0
    shares = []
    try:
        with torch.no_grad():
            for piece in pieces(entry):
                extremes, v = read_entry(piece)
                zeros += int((v == 0).sum())
                wrong = int((~torch.isfinite(v) | (v < 0)).sum())
                # Squaring or clamping may hide it; the reader refuses it all the same.
                bad += wrong or int(not bool(torch.isfinite(extremes).all() & (extremes >= 0).all()))
                if entry.reader.couples_decay(entry.group) and numel:
                    shares.append(_decay_share(piece, v, every=-(-numel // _SAMPLE)))
            share = float(torch.cat(shares).median()) if shares else 0.0
            return _Examined(entry.name, numel, zeros, bad, "", share)
    except BayesAdamError as error:
        return _Examined(entry.name, numel, error=str(error))


def _decay_share(entry: Entry, v: Tensor, every: int) -> Tensor:
    """The share of weight decay in the squared gradient, of every so-manieth weight."""
    theta, v = entry.parameter.reshape(-1)[::every].to(v), v.reshape(-1)[::every]
    decayed = (entry.weight_decay * theta).square()
    return (decayed / v.clamp(min=torch.finfo(v.dtype).tiny)).clamp(max=1.0).nan_to_num()


def _values(examined: Sequence[_Examined]) -> Iterator[Finding]:
    for result in examined:
        if result.error:
            yield Finding("unreadable", "error", result.error, (result.name,))
    bad = {result.name: result.bad for result in examined if result.bad}
    if bad:
        text = (
            f"{sum(bad.values())} second moments are negative, NaN or infinite (first {next(iter(bad))!r}): training met a "
            "non-finite gradient; go back to a checkpoint before that"
        )
        yield Finding("bad-values", "error", text, tuple(bad), {"entries": bad})


def _steps(match: Match) -> Iterator[Finding]:
    short: dict[str, tuple[float, float]] = {}
    for entry in match.entries:
        steps, beta = entry.reader.steps(entry.state, entry.group), entry.reader.beta(entry.group)
        if steps is not None and beta is not None and 0 < beta < 1 and steps * (1 - beta) < 1 - 1e-9:
            short[entry.name] = (steps, 1 / (1 - beta))
    if short:
        steps, memory = min(short.values())
        text = (
            f"{steps:g} steps against a memory of 1/(1−β₂) = {memory:g}: v still averages gradients from the start of "
            "training. Bias correction keeps it unbiased but noisy; train longer, or with a smaller β₂"
        )
        yield Finding("few-steps", "warning", text, tuple(short), {"steps": steps, "memory": memory})


def _dead(examined: Sequence[_Examined], prior: Mapping[str, float]) -> Iterator[Finding]:
    zeros = {result.name: result.zeros for result in examined if result.zeros}
    total = sum(result.numel for result in examined)
    if zeros and total:
        count = sum(zeros.values())
        improper = any(prior[name] == 0 for name in zeros)
        text = f"{count:,} of {total:,} weights ({count / total:.1%}) have v = 0: dead units or constant inputs. " + (
            "Without a prior their variance is infinite and a draw destroys the network; pass prior_precision > 0 or calibrate"
            if improper
            else "Their variance is the prior's alone, 1/δ"
        )
        data = {"zeros": zeros, "share": count / total}
        yield Finding("zero-curvature", "warning" if improper else "note", text, tuple(zeros), data)


def _coupled_decay(examined: Sequence[_Examined], match: Match) -> Iterator[Finding]:
    coupled = {entry.name: entry.weight_decay for entry in match.entries if entry.reader.couples_decay(entry.group)}
    if coupled:
        shares = {result.name: result.decay_share for result in examined if result.name in coupled}
        text = (
            f"weight decay up to {max(coupled.values()):g} is added to the gradient before it is squared, so it leaks into "
            f"v (for the median weight of {max(shares, key=lambda n: shares[n])!r} it is {max(shares.values()):.1%} of v). "
            "AdamW, or decoupled_weight_decay=True, keeps v the data's alone"
        )
        data = {"weight_decay": coupled, "median_share_of_v": shares}
        yield Finding("coupled-decay", "warning", text, tuple(coupled), data)


def _prior(match: Match, n_data: float | None) -> Iterator[Finding]:
    decays = sorted({entry.weight_decay for entry in match.entries})
    described = " and ".join(f"N × {decay:g}" + (f" = {n_data * decay:g}" if n_data else "") for decay in decays)
    yield Finding(
        "implied-prior",
        "note",
        f"the weight decay implies a prior precision δ of {described}"
        + ("; δ = 0 is the paper's equation to the letter, with no prior at all" if decays[0] == 0.0 else ""),
        data={"weight_decay": decays, "prior_precision": [n_data * d for d in decays] if n_data else None},
    )


def _low_precision(match: Match) -> Iterator[Finding]:
    coarse: dict[str, str] = {}
    for entry in match.entries:
        stored, beta = entry.state.get(entry.reader.key), entry.reader.beta(entry.group)
        if not isinstance(stored, torch.Tensor) or beta is None or not stored.is_floating_point():
            continue
        # Of the changes (1 − β₂)(g² − v), those below half the spacing ε v are lost: at 1 − β₂ = 4 ε, an eighth of v.
        if stored.element_size() < 4 and 1 - beta < 4 * torch.finfo(stored.dtype).eps:
            coarse[entry.name] = str(stored.dtype).removeprefix("torch.")
    if coarse:
        text = (
            f"{len(coarse)} second moments are stored in {' and '.join(sorted(set(coarse.values())))}, too coarse for β₂: an "
            "average that changes by less than its last digit stands still. Keep the optimiser's state in float32"
        )
        yield Finding("low-precision-state", "warning", text, tuple(coarse), {"dtype": coarse})


def _batch_norms(examined: Sequence[_Examined], match: Match, widths: Mapping[str, int]) -> Iterator[Finding]:
    if not widths:
        return
    unreadable = {result.name for result in examined if result.error}
    entries = {entry.name: entry for entry in match.entries if entry.name not in unreadable}
    with torch.no_grad():
        # The first piece of a parameter is as good as all of it.
        biases = biases_before_norms(entries, lambda n: read_entry(next(pieces(entries[n])))[1], widths.values())
    text = (
        f"predictions use the running statistics of batch norm ({_few(tuple(widths))}), which the posterior does not treat as "
        "uncertain"
    )
    if biases:
        text += f"; a bias right before it ({_few(biases)}) has no gradient, so its second moment is rounding noise"
    yield Finding("batch-norm", "note", text, biases, {"layers": list(widths)})


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _left_out(match: Match) -> Iterator[Finding]:
    if match.omitted:
        reasons = "; ".join(f"{count} parameters, {why}" for why, count in Counter(match.omitted.values()).items())
        text = f"not in the posterior: {reasons}"
        yield Finding("left-out", "note", text, tuple(match.omitted), {"omitted": dict(match.omitted)})
    if match.foreign:
        text = f"the optimiser also trains {match.foreign} parameters that are not this model's"
        yield Finding("foreign-parameters", "note", text, data={"count": match.foreign})


def _reader_notes(match: Match) -> Iterator[Finding]:
    for reader in {entry.reader.name: entry.reader for entry in match.entries}.values():
        if reader.note:
            yield Finding("optimizer", "note", f"{reader.name}: {reader.note}", data={"reader": reader.name})
    betas = {beta for entry in match.entries if (beta := entry.reader.beta(entry.group)) is not None}
    if len(betas) > 1:
        text = f"β₂ differs between groups ({min(betas):g} to {max(betas):g}): their v average over different stretches"
        yield Finding("mixed-memory", "note", text, data={"betas": sorted(betas)})
