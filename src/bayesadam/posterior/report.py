"""What calibration did to a posterior, and the held-out scores behind its guarantees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from bayesadam.gaussian.settings import Precision
from bayesadam.likelihoods.abstention import Abstention
from bayesadam.likelihoods.conformal import Guarantee
from bayesadam.posterior.inputs import InputRange

# Least and greatest of a setting, over parameters, outputs and the members of a mixture.
Range = tuple[float, float]
_SYMBOLS = {"scale": "s", "prior_precision": "δ", "temperature": "T", "noise_variance": "σ²"}


def settings_of(posteriors: Iterable[Any]) -> dict[str, Range]:
    """The settings that calibration changes, as ranges over some posteriors; without those that are not known."""
    found: dict[str, list[Precision]] = {name: [] for name in _SYMBOLS}
    for each in posteriors:
        found["scale"].append(each.settings.scale)
        found["prior_precision"].extend(each.settings.prior_precision.values())
        found["temperature"].append(each.temperature)
        found["noise_variance"].extend([] if each.noise_variance is None else [each.noise_variance])
    ends = {name: [torch.as_tensor(value).double() for value in values] for name, values in found.items() if values}
    return {name: (float(min(v.min() for v in all_)), float(max(v.max() for v in all_))) for name, all_ in ends.items()}


def described(posterior: Any) -> list[tuple[str, str]]:
    """The likelihood, the settings, as `before → now` where calibration changed them, and what it did, line by line."""
    report = posterior.calibration
    lines = [] if posterior.likelihood is None else [("likelihood", posterior.likelihood)]
    for name, value in settings_of(posterior.members).items():
        change = list(dict.fromkeys(map(_words, (value if report is None else report.before.get(name, value), value))))
        if name == "temperature" and change == ["1"]:
            continue
        if report is not None and report.before and name not in report.before:
            change.insert(0, "not known")
        bound = name == "noise_variance" and posterior.likelihood == "heteroscedastic"
        text = f"{_SYMBOLS[name]} {'≤' if bound else '='} {' → '.join(change)}"
        if name == "prior_precision" and any(member.settings.default_prior for member in posterior.members):
            text += " (no weight decay)" if value == (1.0, 1.0) else " (1 where there is no weight decay)"
        lines.append((name.replace("_", " "), text))
    lines.append(("leverage", "; ".join(dict.fromkeys(map(_of_leverage, posterior.members)))))
    if report is None:
        each = all(member.calibration is not None for member in posterior.members)
        words = "each member by itself" if each else "no: calibrate(posterior, held_out, likelihood=...)"
        return [*lines, ("calibrated", words)]
    nll = ", ".join(f"{name} {value}" for name, value in report.scores)
    lines += [("calibrated", report.fitted), ("held-out NLL", nll), ("outcome", report.preferred)]
    return lines if report.abstention is None else [*lines, ("answers", str(report.abstention))]


def _of_leverage(posterior: Any) -> str:
    """Where the leverage of inputs is from, and what would be better."""
    known = posterior.leverage
    source = known.source if known is not None else "gradients" if posterior.structure.bases else "second moments"
    words = {"inputs": "held-out inputs", "gradients": "the right factors of gradients"}
    text = words.get(source, "column sums of the second moment")
    text += ", relative to each batch itself" if known is None else f", relative to {known.n_reference:,} inputs"
    kinds = (type(module).__name__ for module in posterior.model.modules())
    normed = [kind for kind in kinds if kind.endswith(("LayerNorm", "RMSNorm"))]
    if source == "second moments" and normed:
        text += f"; poor after {normed[0]}: calibrate on held-out inputs, or record gradients"
    return text


def _words(value: Sequence[float]) -> str:
    """A range, as one number where its ends are equal.

    >>> _words((0.5, 0.5)), _words((0.0, 6.0))
    ('0.5', '0 to 6')
    """
    return " to ".join(dict.fromkeys(f"{end:.3g}" for end in value))


def table(title: str, lines: Iterable[tuple[str, str]]) -> str:
    """A title above lines whose second column is aligned.

    >>> print(table("Posterior", [("data", "N = 10"), ("scale", "s = 1")]))
    Posterior
      data   N = 10
      scale  s = 1
    """
    lines = list(lines)
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in lines)])


@dataclass(frozen=True, eq=False)
class CalibrationReport:
    """What was done, on how much, before and after, and what the data preferred.

    Attributes:
        method: `"temperature"`, `"validation"` or `"evidence"`.
        n_fitted: held-out examples behind the settings.
        n_scored: how many of them are behind the guarantees, each left out of its own leverage; none of fewer than 20.
        nll: mean negative log-likelihood of the held-out examples as they are now predicted and, of classes, of the
            mean network at the best temperature and at 1.
        errors: their standard errors; none in files of earlier releases.
        temperatures: T of the probabilities, of each member of a mixture.
        averaged: whether probabilities average over the posterior.
        before: the settings as they were, least and greatest of each; none in files of versions before 0.2.
        inputs: the range of every tensor of the held-out inputs; none in files of earlier releases.
        abstention: which inputs are answered; None where `risk` was not given.
    """

    likelihood: str
    method: str
    n_fitted: int
    n_scored: int
    nll: Mapping[str, float]
    temperatures: tuple[float, ...]
    averaged: bool
    preferred: str
    guarantee: Guarantee = field(default_factory=dict, repr=False)
    before: Mapping[str, Range] = field(default_factory=dict)
    inputs: tuple[InputRange, ...] = ()
    abstention: Abstention | None = None
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def scores(self) -> list[tuple[str, str]]:
        """The candidates and their negative log-likelihoods, in words."""
        errors = {name: f" ± {error:.4f}" for name, error in self.errors.items()}
        return [(name, f"{value:.4f}{errors.get(name, '')}") for name, value in self.nll.items()]

    @property
    def fitted(self) -> str:
        """By what, and to how much, in words."""
        scored = "each scored without its own leverage" if self.n_scored else "scored on the same"
        return f"{self.likelihood}: fitted by {self.method} to {self.n_fitted} held-out examples, {scored}"

    def __str__(self) -> str:
        lines = [self.fitted]
        lines += [f"  negative log-likelihood, {name}: {value}" for name, value in self.scores]
        lines.append(f"  {self.preferred}")
        return "\n".join(lines if self.abstention is None else [*lines, f"  answers {self.abstention}"])

    def header(self) -> dict[str, Any]:
        """Its plain data."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("guarantee", "abstention")}
        answers = {} if self.abstention is None else {"abstention": asdict(self.abstention)}
        inputs = [asdict(each) for each in self.inputs]
        plain |= {"nll": dict(self.nll), "errors": dict(self.errors)}
        return plain | {"before": dict(self.before), "inputs": inputs} | answers

    @classmethod
    def of(cls, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CalibrationReport:
        """From its plain data and the tensors of its guarantee."""
        before = {name: tuple(ends) for name, ends in header.get("before", {}).items()}
        inputs = tuple(map(InputRange.of, header.get("inputs", ())))
        plain = {**header, "temperatures": tuple(header["temperatures"]), "before": before, "inputs": inputs}
        if "abstention" in plain:
            plain["abstention"] = Abstention(**plain["abstention"])
        ordered = {name: scores.sort().values if name == "novelty" else scores for name, scores in tensors.items()}
        return cls(**plain, guarantee=ordered)
