"""What is wrong or notable about a model and its optimiser, before anyone trusts a posterior read off them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._alone import unwrap
from bayesadam._shards import whole
from bayesadam.errors import BayesAdamError
from bayesadam.readers import StateReader, read_entry
from bayesadam.readers.match import Entry, Match, match_optimizers
from bayesadam.weights.diagonal import Diagonal, zeros
from bayesadam.weights.gaussian import GaussianWeights, of_match
from bayesadam.weights.networks import biases_before_norms, norm_widths
from bayesadam.weights.settings import Precision

Severity = Literal["error", "warning", "note"]
_MARKS = {"error": "✗", "warning": "!", "note": "·"}


@dataclass(frozen=True)
class Finding:
    """One remark.

    Attributes:
        code: a stable word to test for, such as `"few-steps"`.
        severity: `"error"`, no posterior can be read; `"warning"`, one can but mind this; `"note"`.
        parameters: the parameters concerned; empty where all are.
    """

    code: str
    severity: Severity
    message: str
    parameters: tuple[str, ...] = ()


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

    With N the prior that the weight decay implies gets a number; `reader` is as in `Posterior.from_optimizer`.
    """
    try:
        match = match_optimizers(model, optimizer, reader)
    except BayesAdamError as error:
        finding = Finding("unreadable", "error", str(error))
        return Diagnosis(f"{type(model).__name__}: no posterior can be read", (finding,))
    gaussian = of_match(match, n_data or 1.0, prior_precision=0.0)
    return diagnose(gaussian, list(examine(gaussian, match)), match, n_data=n_data, model=unwrap(model))


@dataclass(frozen=True)
class Examined:
    """What one parameter's second moment looks like: how many are 0, how many negative, NaN or infinite.

    `part` is the Gaussian of that parameter in memory, with others where it depends on them; None where it cannot be
    read, which `error` explains.
    """

    name: str
    numel: int
    part: GaussianWeights | None = None
    zeros: int = 0
    bad: int = 0
    error: str = ""


def examine(gaussian: GaussianWeights, match: Match | None = None) -> Iterator[Examined]:
    """One tensor in memory at a time; with a match, second moments are read without being refused."""
    entries = {} if match is None else {entry.name: entry for entry in match.entries}
    for name, shape in gaussian.shapes.items():
        try:
            result = _examined(gaussian, name, shape.numel(), entries.get(name))
        except BayesAdamError as error:
            result = Examined(name, shape.numel(), error=str(error))
        yield result
        # Its tensors go before the next are read.
        del result


@torch.no_grad()
def _examined(gaussian: GaussianWeights, name: str, numel: int, entry: Entry | None) -> Examined:
    hidden = False
    if entry is None:
        part = gaussian.part(name) if gaussian.curvature.by_parameter else gaussian
        v = part.curvature.diagonal(name)
    else:
        ends, v = read_entry(entry)
        # Squaring or clamping may hide it; the reader refuses it all the same.
        hidden = not bool(torch.isfinite(ends).all() & (ends >= 0).all())
        settings = replace(gaussian.settings, prior_precision={name: gaussian.prior_precision[name]})
        part = GaussianWeights({name: gaussian.mode[name]}, Diagonal({name: v}), settings)
    bad = int(whole((~torch.isfinite(v) | (v < 0)).sum()))
    return Examined(name, numel, part, zeros(v), bad or int(hidden))


def diagnose(
    gaussian: GaussianWeights,
    examined: Sequence[Examined],
    match: Match | None,
    *,
    n_data: float | None = None,
    model: nn.Module | None = None,
) -> Diagnosis:
    """The findings on parameters that were examined, worst first.

    Without a match it is a posterior, whose prior is its own and no weight decay's. Without a model the file that was
    opened has its name and its buffers.
    """
    source = gaussian.source
    model = model or getattr(gaussian, "model", None)
    count = f"{gaussian.n_weights:,} weights in {len(examined)} parameters"
    findings = [*_values(examined), *_dead(examined, {} if match else gaussian.prior_precision)]
    if match is None:
        origin, summary = gaussian.origin, f"a {gaussian.structure} posterior of {count}"
        optimizers = origin.optimizers
        findings += _few_steps(dict.fromkeys(gaussian.mode, (origin.fewest, origin.beta)))
    else:
        optimizers, summary = match.optimizers, f"{count} have a second moment"
        steps = {entry.name: (entry.steps, entry.reader.beta(entry.group)) for entry in match.entries}
        buffers = dict(model.named_buffers()) if model is not None else source.weights if source is not None else {}
        readable = [result.name for result in examined if not result.error and not result.bad]
        findings += _few_steps(steps)
        if source is not None and source.apart is not None:
            findings.append(Finding("other-epoch", "warning", source.apart))
        findings += _of_match(match, n_data)
        findings += _batch_norms(readable, gaussian.curvature.second_moment, norm_widths(buffers))
    if tracked := gaussian.origin.tracked:
        findings.append(Finding("tracked", "note", f"track kept the second moment of {tracked}"))
    findings.sort(key=lambda finding: list(_MARKS).index(finding.severity))
    subject = type(model).__name__ if source is None else source.path.name
    trained = f" trained by {' and '.join(optimizers)}" if optimizers else ""
    return Diagnosis(f"{subject}{trained}: {summary}", tuple(findings))


def _values(examined: Sequence[Examined]) -> Iterator[Finding]:
    for result in examined:
        if result.error:
            yield Finding("unreadable", "error", result.error, (result.name,))
    bad = {result.name: result.bad for result in examined if result.bad}
    if bad:
        text = f"{sum(bad.values())} second moments are negative, NaN or infinite (first {next(iter(bad))!r})"
        yield Finding("bad-values", "error", f"{text}: go back to a checkpoint before that", tuple(bad))


def _few_steps(counted: Mapping[str, tuple[float | None, float | None]]) -> Iterator[Finding]:
    short: dict[str, tuple[float, float]] = {}
    for name, (steps, beta) in counted.items():
        if steps is not None and beta is not None and 0 < beta < 1 and steps * (1 - beta) < 1 - 1e-9:
            short[name] = (steps, 1 / (1 - beta))
    if short:
        steps, memory = min(short.values())
        text = f"{steps:g} steps against a memory of 1/(1−β₂) = {memory:g}: v still averages gradients from the start"
        yield Finding("few-steps", "warning", f"{text}; train longer, or with a smaller β₂", tuple(short))


def _dead(examined: Sequence[Examined], prior: Mapping[str, Precision]) -> Iterator[Finding]:
    """Weights without curvature: a warning where a posterior has no prior on them either."""
    zeros = {result.name: result.zeros for result in examined if result.zeros}
    if zeros:
        count, total = sum(zeros.values()), sum(result.numel for result in examined)
        improper = any(bool((torch.as_tensor(prior.get(name, 1.0)) == 0).any()) for name in zeros)
        text = f"{count:,} of {total:,} weights ({count / total:.1%}) have v = 0: dead units or constant inputs. "
        infinite = "Without a prior their variance is infinite: pass prior_precision > 0, or calibrate"
        text += infinite if improper else "Their variance is the prior's alone, 1/δ"
        yield Finding("zero-curvature", "warning" if improper else "note", text, tuple(zeros))


def _of_match(match: Match, n_data: float | None) -> Iterator[Finding]:
    """Findings on the optimisers' settings and on how they keep their states."""
    coupled = {entry.name: entry.weight_decay for entry in match.entries if entry.reader.couples_decay(entry.group)}
    if coupled:
        text = f"weight decay up to {max(coupled.values()):g} is added to the gradient, and so is in v: take AdamW"
        yield Finding("coupled-decay", "warning", text, tuple(coupled))
    decays = sorted({entry.weight_decay for entry in match.entries})
    described = " and ".join(f"N × {decay:g}" + (f" = {n_data * decay:g}" if n_data else "") for decay in decays)
    text = f"the weight decay implies a prior precision δ of {described}"
    if decays[0] == 0.0:
        text += "; where that is 0 a posterior takes δ = 1 unless prior_precision is given"
    yield Finding("implied-prior", "note", text)
    coarse: dict[str, str] = {}
    for entry in match.entries:
        stored, beta = entry.state.get(entry.reader.key), entry.reader.beta(entry.group)
        if not isinstance(stored, torch.Tensor) or beta is None or not stored.is_floating_point():
            continue
        # Of the changes (1 − β₂)(g² − v), those below half the spacing ε v are lost: at 1 − β₂ = 4 ε, an eighth of v.
        if stored.element_size() < 4 and 1 - beta < 4 * torch.finfo(stored.dtype).eps:
            coarse[entry.name] = str(stored.dtype).removeprefix("torch.")
    if coarse:
        text = f"{len(coarse)} second moments are stored in {' and '.join(sorted(set(coarse.values())))}, too coarse"
        yield Finding("low-precision-state", "warning", f"{text} for β₂: keep the state in float32", tuple(coarse))
    if match.omitted:
        reasons = "; ".join(f"{count} parameters, {why}" for why, count in Counter(match.omitted.values()).items())
        yield Finding("left-out", "note", f"not in the posterior: {reasons}", tuple(match.omitted))
    for reader in {entry.reader.name: entry.reader for entry in match.entries}.values():
        if reader.note:
            yield Finding("optimizer", "note", f"{reader.name}: {reader.note}")


def _batch_norms(
    readable: Sequence[str], moments: Mapping[str, Tensor], widths: Mapping[str, int]
) -> Iterator[Finding]:
    if widths:
        biases = biases_before_norms(readable, moments.__getitem__, widths.values())
        text = f"the running statistics of batch norm ({', '.join(widths)}) are not treated as uncertain"
        if biases:
            text += f"; the second moment of a bias right before it ({', '.join(biases)}) is rounding noise"
        yield Finding("batch-norm", "note", text, biases)
