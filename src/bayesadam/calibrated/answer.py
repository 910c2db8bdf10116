"""What a calibrated network says of a batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.distributions import Distribution

from bayesadam.errors import CalibrationError, SettingError
from bayesadam.likelihoods import ClassLikelihood, Component, Moments, NumericLikelihood
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.likelihoods.conformal import threshold

# Scores this near are equal: the last digits depend on the batch that an example came in.
_ROUNDING = 1e-5


class Answer(NamedTuple):
    """What a calibrated network says of a batch; None where it does not apply.

    Attributes:
        novelty: how unlike the held-out inputs each example is, (batch,).
        p_value: the share of held-out examples at least as novel, (batch,): of examples like them at most α have p ≤ α.
            Of classes it asks leverage too, see `either`.
        probs: of the classes, or of y = 1 for each binary output.
        mean: E[y] of numbers.
        stddev: of y, observation noise included.
        f_mean: f, (batch, ...).
        f_variance: Var[f] of numbers.
        leverage: r of each example, its leverage over that of familiar inputs, (batch,).
        answered: whether to answer it, where `calibrate` was given a `risk`, and by label each of its labels; the
            others, and what is not in range, are for a person.
        in_range: whether its inputs are in the range of the held-out ones.
        noise_variance, scores: σ², and the held-out scores behind `set` and `interval`.
        likelihood: p(y | f), by name.
    """

    novelty: Tensor
    p_value: Tensor | None = None
    probs: Tensor | None = None
    mean: Tensor | None = None
    stddev: Tensor | None = None
    f_mean: Tensor | None = None
    f_variance: Tensor | None = None
    leverage: Tensor | None = None
    answered: Tensor | None = None
    in_range: Tensor | None = None
    noise_variance: Tensor | None = None
    scores: Tensor | None = None
    likelihood: str = ""

    def set(self, level: float = 0.95) -> Tensor:
        """Which classes the set holds, booleans: the true one with probability `level` on data like the held-out.

        Of several positions, such as pixels, that is the true one of a position of the example drawn at random.
        """
        return self.set_within(threshold(self._scores, level))

    def set_within(self, reach: Tensor) -> Tensor:
        """The classes whose 1 − p is at most `reach`."""
        kind = likelihood_of(self.likelihood)
        if not isinstance(kind, ClassLikelihood) or self.probs is None:
            raise SettingError("a set is of classes; of numbers see interval(level)")
        return 1 - kind.of_classes(self.probs) <= (reach.to(self.probs) + _ROUNDING).unsqueeze(-1)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """E[y] ± q sd[y] of each output, which holds y with probability `level` on data like the held-out.

        Ends of counts are whole numbers of at least 0.
        """
        return self.interval_within(threshold(self._scores, level))

    def interval_within(self, reach: Tensor) -> tuple[Tensor, Tensor]:
        """E[y] ± `reach` sd[y]."""
        if self.mean is None or self.stddev is None:
            raise SettingError("an interval is of numbers; of classes see set(level)")
        kind = likelihood_of(self.likelihood)
        half = (1 + _ROUNDING) * reach.to(self.mean).view(self.mean.shape[1:]) * self.stddev
        assert isinstance(kind, NumericLikelihood)
        return kind.ends(self.mean - half, self.mean + half)

    @property
    def _scores(self) -> Tensor:
        if self.scores is None:
            raise CalibrationError(
                "this needs held-out scores: calibrate on at least 20 examples, of classes with none left out"
            )
        return self.scores

    @property
    def distribution(self) -> Distribution:
        """p(y), a distribution of torch's."""
        kind = likelihood_of(self.likelihood)
        assert self.f_mean is not None
        if isinstance(kind, ClassLikelihood):
            # Those probabilities are of logits at the example's own temperature.
            assert self.probs is not None
            logits = self.probs.log() if kind.coupled else self.probs.logit()
            return kind.distribution([Component(Moments(logits))])
        return kind.distribution([Component(Moments(self.f_mean, self.f_variance), self.noise_variance)])

    @property
    def doubt(self) -> Tensor:
        """By which inputs are answered, (batch,): the probability that an answer is wrong, or the largest stddev.

        Of several classes to an example the former is 1 − Π max p.
        """
        if self.stddev is not None:
            return self.stddev.reshape(self.stddev.shape[0], -1).amax(dim=1)
        surest = 1 - self.label_doubt
        return 1 - surest.reshape(surest.shape[0], -1).prod(dim=1)

    @property
    def label_doubt(self) -> Tensor:
        """The probability that the answer to each label, or position, is wrong: 1 − max p, (batch, ...)."""
        kind = likelihood_of(self.likelihood)
        if not isinstance(kind, ClassLikelihood) or self.probs is None:
            raise SettingError("labels are of classes; of numbers see stddev")
        return 1 - kind.of_classes(self.probs).amax(dim=-1)
