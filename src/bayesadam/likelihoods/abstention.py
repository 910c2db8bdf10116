"""Answers with a guarantee: which inputs are left to a person so that few of the others' answers are wrong.

Inputs are answered in the order of their doubt s. R(t) is the rate of errors among all inputs with s ≤ t. The k-th
smallest doubt of the held-out examples as t leaves k − 1 below it, independent draws of such inputs: were R(t) above
`risk`, at most e errors among them would have a probability of at most
Σ_{j ≤ e} C(k − 1, j) riskʲ (1 − risk)^(k − 1 − j), the p-value of t.

Growing k are tried, which depend on n, `risk` and `confidence` alone. Some bring an equal share of 1 − `confidence`; a
k whose p-value is within what it holds passes all of it to the next, a k that fails loses it, and the largest to pass
sets t (Wiens' fallback procedure). Let K be the first k with R(t) > `risk`. The first such k to pass holds what was
handed down to K, or its own share if it comes later, so that all of these together pass with a probability of at most
1 − `confidence`. K is chance, since t is: where the rate of errors does not fall as s grows, K says nothing of the
errors that would help, and the bound is exact; where it falls, simulations keep it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesadam.errors import SettingError

# Neighbouring numbers of answers that are tried; of 1.02 to 1.2 none was better on made-up data.
_RATIO = 1.03
# Neighbouring risks at which a remedy is looked for, from the one asked for upwards.
_DEARER = 1.1


@dataclass(frozen=True)
class Abstention:
    """When an input is answered: where its doubt is at most a threshold.

    Attributes:
        risk: of what is answered at most this share is wrong, on data like the held-out,
        confidence: in this share of all calibrations.
        tolerance: numbers farther from E[y] are wrong.
        threshold: the greatest doubt that is answered; None where no threshold was certain enough. By label a tuple.
        answered, errors: of the n held-out examples, or their labels, how many are answered, and how many of these are
            wrong.
    """

    risk: float
    confidence: float
    tolerance: float | None
    n: int
    threshold: float | tuple[float | None, ...] | None = None
    answered: int = 0
    errors: int = 0

    @property
    def by_label(self) -> bool:
        """Whether each label of an example is answered or not."""
        return isinstance(self.threshold, tuple)

    @property
    def coverage(self) -> float:
        """The share of the held-out examples, or of their labels, that is answered."""
        return self.answered / (self.n * (len(self.threshold) if isinstance(self.threshold, tuple) else 1))

    @property
    def most(self) -> float | list[float]:
        """The greatest doubt that is answered, by label a list; −∞ where nothing is."""
        if isinstance(self.threshold, tuple):
            return [-math.inf if t is None else t for t in self.threshold]
        return -math.inf if self.threshold is None else self.threshold

    def answers(self, doubt: Tensor) -> Tensor:
        """Which inputs are answered, booleans, given the doubt of each; or labels, (batch, labels)."""
        return doubt <= torch.tensor(self.most, dtype=doubt.dtype, device=doubt.device)

    def __str__(self) -> str:
        whose = " of each label" if self.by_label else ""
        asked = f"at most {self.risk:.3g}{whose} wrong with {self.confidence:.3g} confidence"
        if not self.answered:
            return f"none: {self.n} held-out examples do not show {asked}"
        seen = f"{self.errors} of {self.answered} wrong"
        return f"{self.coverage:.1%} of the held-out {'labels' if whose else 'examples'}, {seen}: {asked}"


def check_abstention(risk: float | None, confidence: float, tolerance: float | None, *, is_classes: bool) -> None:
    """Refuse settings that mean nothing, or nothing of this likelihood."""
    if risk is None:
        if tolerance is not None:
            raise SettingError(f"tolerance={tolerance!r} says what is wrong: it needs risk=, the share that may be")
        return
    for name, value in (("risk", risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise SettingError(f"{name} must lie between 0 and 1, got {value!r}")
    if is_classes and tolerance is not None:
        raise SettingError(f"tolerance={tolerance!r} is for numbers: the answer of classes is wrong or right")
    if not is_classes and (tolerance is None or not tolerance > 0):
        raise SettingError(f"risk= of numbers needs tolerance=, how far from y an answer may be, got {tolerance!r}")


def binomial_cdf(successes: int, trials: int, p: float) -> float:
    """P(X ≤ successes), X ~ Binomial(trials, p), 0 < p < 1.

    >>> round(binomial_cdf(1, 3, 0.5), 12)
    0.5
    """
    j = torch.arange(min(successes, trials) + 1, dtype=torch.float64)
    n = torch.tensor(float(trials), dtype=torch.float64)
    log_choices = torch.lgamma(n + 1) - torch.lgamma(j + 1) - torch.lgamma(n - j + 1)
    terms = log_choices + j * math.log(p) + (n - j) * math.log1p(-p)
    return min(1.0, float(terms.logsumexp(dim=0).exp()))


def needed(risk: float, level: float) -> int:
    """How many examples without an error show a rate of at most `risk`; one more sets the threshold.

    >>> needed(0.02, 0.05)
    150
    """
    return math.ceil(math.log(level) / math.log1p(-risk) - 1e-9) + 1


def starts(n: int, risk: float, level: float) -> list[int]:
    """Numbers of answers that bring an equal share of the level: one for each doubling of the least number to n.

    The first is what no error needs at its share, and the next are its doubles.

    >>> starts(1000, 0.02, 0.05), starts(150, 0.02, 0.05), starts(149, 0.02, 0.05)
    ([184, 368], [150], [])
    """
    doublings = max(1, int(math.log2(max(n / needed(risk, level), 1.0)) + 1e-9))
    first = needed(risk, level / doublings)
    return [k for k in (first * 2**i for i in range(doublings)) if k <= n]


def certified(doubt: Tensor, wrong: Tensor, *, risk: float, confidence: float) -> tuple[float, int, int] | None:
    """The largest threshold that passes, of held-out doubts and errors, (n,), what it answers and how much of it wrong.

    None where none does. The example that sets a threshold is not counted among its trials, but its error is, and so
    are ties.
    """
    doubt, order = doubt.sort(stable=True)
    errors, n, level = wrong[order].long().cumsum(0).tolist(), len(doubt), 1 - confidence
    shares = starts(n, risk, level)
    if not shares:
        return None
    steps = int(math.log(n / shares[0]) / math.log(_RATIO))
    numbers = {round(shares[0] * _RATIO**i) for i in range(steps + 1)} | {*shares, n}
    rule, passed_on = None, 0
    for number in sorted(k for k in numbers if k <= n):
        passed_on += number in shares
        count = int(torch.searchsorted(doubt, doubt[number - 1], right=True))
        if passed_on and binomial_cdf(errors[count - 1], count - 1, risk) <= level * passed_on / len(shares):
            rule = float(doubt[number - 1]), count, errors[count - 1]
        else:
            passed_on = 0
    return rule


def abstention(doubt: Tensor, wrong: Tensor, *, risk: float, confidence: float, tolerance: float | None) -> Abstention:
    """The rule that held-out doubts and errors allow."""
    rule = certified(doubt, wrong, risk=risk, confidence=confidence)
    return Abstention(risk, confidence, tolerance, len(doubt), *(rule or ()))


def label_abstention(doubt: Tensor, wrong: Tensor, *, risk: float, confidence: float) -> Abstention:
    """A rule for each label, of held-out doubts and errors, (n, labels), with that confidence of all together.

    Labels of one example depend on each other, examples do not: each label has its own trials, and 1 − `confidence` is
    divided among them.
    """
    level = (1 - confidence) / doubt.shape[1]
    columns = zip(doubt.unbind(dim=1), wrong.unbind(dim=1), strict=True)
    rules = [certified(of_label, errors, risk=risk, confidence=1 - level) for of_label, errors in columns]
    thresholds = tuple(None if rule is None else rule[0] for rule in rules)
    answered, errors = (sum(rule[i] for rule in rules if rule is not None) for i in (1, 2))
    return Abstention(risk, confidence, None, len(doubt), thresholds, int(answered), int(errors))


def remedy(doubt: Tensor, wrong: Tensor, *, risk: float, confidence: float) -> str:
    """What would let some be answered: more examples, or another risk."""
    asked = f"no input is answered: {len(doubt)} held-out examples do not show that at most {risk:.3g} of the answers"
    asked += f" are wrong, with a confidence of {confidence:.3g}"
    fewest = needed(risk, 1 - confidence)
    if len(doubt) < fewest:
        return f"{asked}. That takes {fewest} examples at the least, if no answer among them is wrong"
    higher = risk
    while (higher := float(f"{higher * _DEARER:.2g}")) < 1:
        if certified(doubt, wrong, risk=higher, confidence=confidence) is not None:
            return f"{asked}: hold out more of them, or ask for a risk of about {higher:g}"
    return f"{asked}: too many of the surest answers are wrong"
