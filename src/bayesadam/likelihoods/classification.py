"""Classes: p(class) = softmax(f), classes in the last dimension, and p(y = 1) = σ(f), one logit per output."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods.abstention import doubt_of_classes
from bayesadam.likelihoods.component import Component, function_draws, like, position_blocks, rows
from bayesadam.likelihoods.conformal import Guarantee, SetMethod, check_level, class_scores, threshold, uniform_like
from bayesadam.likelihoods.predictive import FEWEST_TO_JUDGE, Likelihood, Link, Predictive, average, pooled

# The class index that torch and transformers leave out of a loss: padding, a prompt, tokens that were not masked.
IGNORED = -100
_LOGIT_DRAWS = 200
# Of r in novelty, chosen like the settings of leverage on MNIST, Fashion-MNIST and texts.
_SHARE, _STEEP, _SHARE_OF_TEXTS = 10 * math.pi / 4, 1.5, 0.3
# Half precision leaves the sum of probabilities that far from 1.
_SAME_SUM = 1e-2


@dataclass(frozen=True, eq=False, repr=False)
class LogitPredictive(Predictive):
    """p(y) of targets that are classes: p = Σ π_m p_m.

    Without draws of its own, a component's probabilities are by the probit approximation, `link="probit"`, or averages
    over 200 Gaussian draws of the logits, `link="sampling"`. Those draws, which `mutual_information` takes too, are
    independent from logit to logit unless the prediction was made with `covariance=True`.

    Where k outputs were asked for, `mean`, `variance`, `covariance` and `draws` are of their logits; `probs` are of all
    classes, and so are `log_prob`, `entropy` and `prediction_set`, the other classes' logits being at their mean.
    """

    likelihood: ClassLikelihood

    @cached_property
    def _each(self) -> list[Tensor]:
        return [self.likelihood.probs(c, self.link, self.seed) for c in self.components]

    @cached_property
    def probs(self) -> Tensor:
        """The probabilities: of every class, in the last dimension, or of y = 1 for each binary output."""
        return average(self.weights, self._each)

    @property
    def class_probs(self) -> Tensor:
        """The probability of every class, in the last dimension."""
        return self.likelihood.of_classes(self.probs)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of class indices, one number each; of zeros and ones, summed over the outputs of an example."""
        return pooled(self.weights, [self.likelihood.log_prob(probs, y) for probs in self._each])

    def _sample(self, number: int, n: int, generator: torch.Generator | None) -> Tensor:
        return self.likelihood.sample(self._each[number], n, generator)

    @property
    def token_novelty(self) -> Tensor:
        """How unlike the training data each position is, (batch, positions); `novelty` is the mean of an example's."""
        if self.mean.dim() < 3 or not self.likelihood.coupled:
            raise SettingError("token_novelty is of outputs (batch, positions, classes); see novelty")
        return average(self.weights, [self.likelihood.token_novelty(c) for c in self.components])

    def entropy(self) -> Tensor:
        """The entropy of y in nats: all uncertainty."""
        return entropy(self.class_probs)

    def mutual_information(self) -> Tensor:
        """I(y; m, θ) = I(y; m) + Σ π_m (H[E_m p] − E_m[H p]): what more data could still teach, by draws of the logits.

        It is the posterior's also where `probs` are the mean network's (`averaged` is False).
        """
        each = []
        for c in self.components:
            probs = self.likelihood.of_classes(self.likelihood.draw_probs(c, self.seed))
            each.append((entropy(probs.mean(dim=0)) - entropy(probs).mean(dim=0)).clamp(min=0))
        return self.disagreement() + average(self.weights, each)

    def disagreement(self) -> Tensor:
        """I(y; m) = H[Σ π_m p_m] − Σ π_m H[p_m] in nats: what the networks disagree on."""
        within = average(self.weights, [entropy(self.likelihood.of_classes(probs)) for probs in self._each])
        return (self.entropy() - within).clamp(min=0)

    @property
    def epistemic(self) -> Tensor:
        """½ tr(H Cov[f]) as of every predictive, and what the mean networks of a mixture disagree on."""
        within = super().epistemic
        if len(self.components) == 1:
            return within
        between = self.changed(averaged=False, draws=None).disagreement()
        return within + (between if between.shape == within.shape else rows(between).sum(dim=1))

    def prediction_set(
        self, level: float = 0.95, *, method: SetMethod = "lac", by_class: bool = False, seed: int = 1
    ) -> Tensor:
        """Which classes the set holds, booleans of the shape of `class_probs`.

        It contains the true class with probability `level` on data like the held-out.

        Args:
            method: `"lac"` for the smallest sets; `"aps"` for sets that grow with the difficulty of the example;
                `"raps"` for the same without a long tail of unlikely classes.
            by_class: the guarantee for each class by itself, which needs 1/(1 − level) held-out examples of it; a class
                with fewer is in every set.
        """
        check_level(level)
        probs = self.class_probs
        scores = class_scores(probs, method, uniform_like(probs, seed))
        held_out = self._held_out(f"classes.{method}").to(scores)
        if not by_class:
            return scores <= threshold(held_out, level).unsqueeze(-1)
        labels = self._held_out("labels").to(scores.device)
        if labels[0].numel() != 1:
            raise SettingError("by_class=True is for one label per example")
        limits = torch.stack([threshold(held_out[labels == k], level) for k in range(probs.shape[-1])])
        if few := int(limits.isinf().sum()):
            needed = math.ceil(level / (1 - level) - 1e-9)
            warn(
                f"{few} of {len(limits)} classes are in every set: a level of {level:g} for each class needs {needed} "
                "held-out examples of it"
            )
        return scores <= limits

    @property
    def doubt(self) -> Tensor:
        """1 − Π max p over an example's answers, (batch,): the probability that one of them is wrong."""
        return doubt_of_classes(self.class_probs)

    def wrong(self, targets: Tensor, tolerance: float | None = None) -> Tensor:
        """Whether the likeliest class is another than the true one, (batch,); of several outputs, whether any is."""
        answers = self.class_probs.argmax(dim=-1)
        if targets.numel() != answers.numel():
            raise MatchError(f"the targets have shape {tuple(targets.shape)}, the answers {tuple(answers.shape)}")
        return rows(answers != targets.to(answers).reshape(answers.shape)).any(dim=1)

    def conformity(self, targets: Tensor, *, seed: int) -> Guarantee:
        """Scores of the true classes; none where classes are left out, or belong to positions."""
        probs = self.class_probs
        labels, ignored = targets.reshape(probs.shape[:-1]).long(), self.likelihood.ignored
        if ignored is not None and (labels.dim() > 1 or bool((labels == ignored).any())):
            return {}
        # Not the random numbers of `prediction_set`, whose seed is 1.
        uniform = uniform_like(probs, seed + 2)
        every = {method: class_scores(probs, method, uniform) for method in get_args(SetMethod)}
        own = {f"classes.{m}": s.gather(-1, labels.unsqueeze(-1)).squeeze(-1) for m, s in every.items()}
        return {**own, "labels": labels}


class ClassLikelihood(Likelihood[LogitPredictive]):
    """p(y | f) of classes."""

    kind = LogitPredictive
    calibration = "temperature"
    tempered = True
    weight_decay = 0.3

    @abstractmethod
    def probs_at(self, logits: Tensor, c: Component) -> Tensor:
        """Probabilities given logits that a temperature has divided; `c` has those that are not random."""

    @abstractmethod
    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[p] of Gaussian logits, approximately."""

    @abstractmethod
    def log_prob(self, probs: Tensor, y: Tensor) -> Tensor:
        """log p(y) given probabilities."""

    @abstractmethod
    def sample(self, probs: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws of y given probabilities."""

    @abstractmethod
    def margin(self, c: Component, y: Tensor) -> tuple[Tensor, Tensor]:
        """How far the logit of y is above its strongest rival's, d, (batch, ...), and Var[d]."""

    def of_classes(self, probs: Tensor) -> Tensor:
        """Probabilities as those of classes in the last dimension."""
        return probs

    def probs(self, c: Component, link: Link, seed: int) -> Tensor:
        """The probabilities of one component."""
        if c.draws is None and not c.averaged:
            return self.probs_at(c.mean / (c.temperature * _of_examples(c.growth, c.mean)), c)
        if c.draws is not None or link == "sampling":
            return self.draw_probs(c, seed).mean(dim=0)
        return self.probit(c.mean / c.temperature, c.variance / c.temperature**2)

    def novelty(self, component: Component) -> Tensor:
        """The entropy of probabilities at the temperature of novelty; see `token_novelty` of several positions."""
        logits, r = component.mean if component.logits is None else component.logits, component.ratio
        assert r is not None
        if self.coupled and logits.dim() > 2:
            return rows(self.token_novelty(component)).mean(dim=1)
        at = logits / _of_examples((1 + _SHARE * r**_STEEP).sqrt(), logits)
        return rows(entropy(self.of_classes(self.probs_at(at, replace(component, logits=None))))).mean(dim=1)

    def token_novelty(self, component: Component) -> Tensor:
        """The entropy at each position, and 0.3 log r of the example."""
        logits = component.mean if component.logits is None else component.logits
        found, r = entropy(logits.softmax(dim=-1)), component.ratio
        if r is None:
            raise SettingError("this prediction has no novelty: the leverage of a sharded network is not known")
        return found + _SHARE_OF_TEXTS * _of_examples(r.log(), found)

    def draw_probs(self, c: Component, seed: int) -> Tensor:
        """Probabilities at the component's draws of f, or at 200 Gaussian ones."""
        generator = torch.Generator(device=c.mean.device).manual_seed(seed)
        draws = c.draws if c.draws is not None else function_draws(c, _LOGIT_DRAWS, generator)
        return self.probs_at(draws / c.temperature, c)

    def collapse(self, draws: Tensor, at_mean: Tensor) -> str | None:
        """Other answers than the mean network's, for more than a tenth of the examples."""
        averaged, alone = (self.of_classes(self.probs_at(f, Component(at_mean, at_mean))) for f in (draws, at_mean))
        changed = averaged.mean(dim=0).argmax(dim=-1) != alone.argmax(dim=-1)
        share = float(changed.double().mean())
        if share <= 0.1 or int(changed.sum()) <= 1:
            return None
        return f"averaging over weight draws changes the answer for {share:.0%} of the examples"


class Classification(ClassLikelihood):
    """p(class) = softmax(f), classes in the last dimension, cross-entropy in training.

    `link="probit"` is softmax(κ f) with κ = (1 + π σ̄²/8)^(-1/2), σ̄² the average of the logits' variances under
    softmax(f): one κ per example, so that the order of the classes is the mean network's and adding a constant to all
    logits changes nothing.
    """

    name = "classification"
    coupled = True
    ignored = IGNORED

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)

    def n_outputs(self, targets: Tensor) -> int:
        """One per class, the greatest class index and one more."""
        return int(targets.max()) + 1

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Class indices, (n,)."""
        found = targets.reshape(len(targets), -1).squeeze(1).to(like.device, torch.int64)
        if not bool((found == targets.reshape(found.shape).to(like.device)).all()) or bool((found < 0).any()):
            raise MatchError("the targets of a classification are class indices, whole numbers of at least 0")
        return found

    def locations(self, outputs: Tensor) -> Tensor:
        """The logits, of at least two classes."""
        if outputs.dim() < 2 or outputs.shape[-1] < 2:
            raise MatchError(
                "classification needs the logits of at least two classes in the last dimension, but the outputs have "
                f"shape {tuple(outputs.shape)}: for a single logit use likelihood='binary'"
            )
        return outputs

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Every position but those whose class index is −100."""
        _check_shape(targets, outputs)
        return targets != IGNORED

    def matched(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Class indices, (batch, ...)."""
        _check_shape(targets, self.locations(outputs))
        return targets

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """p (1 − p)."""
        p = outputs.softmax(dim=-1)
        return p * (1 - p)

    def hessian_root_times(self, outputs: Tensor, r: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """√p r − p (√p · r): A = diag(√p) − p √pᵀ, A Aᵀ = diag(p) − p pᵀ."""
        p = outputs.softmax(dim=-1)
        scaled = p.sqrt() * r
        return scaled - p * scaled.sum(dim=-1, keepdim=True)

    def epistemic(self, component: Component) -> Tensor | None:
        """½ (Σ p Var f − pᵀ Cov f p) of the logits over T, at each position."""
        if component.covariance is None:
            return None
        p = (component.mean / component.temperature).softmax(dim=-1)
        blocks = position_blocks(component.covariance, component.mean) / component.temperature**2
        spread = (p * blocks.diagonal(dim1=-2, dim2=-1)).sum(dim=-1)
        return (spread - torch.einsum("...c,...cd,...d->...", p, blocks, p)) / 2

    def probs(self, c: Component, link: Link, seed: int) -> Tensor:
        """Of all classes, also where some are random: the others keep their shares of what those leave."""
        if c.logits is None or c.outputs is None:
            return super().probs(c, link, seed)
        if c.draws is None and (link == "probit" or not c.averaged):
            variance = torch.zeros_like(c.logits).scatter(-1, c.outputs, c.variance)
            return super().probs(replace(c, mean=c.logits, variance=variance, logits=None), link, seed)
        coarse = self.draw_probs(c, seed).mean(dim=0)
        rest = _rest_logits(c).softmax(dim=-1).nan_to_num(0.0)
        return (rest * coarse[..., -1:]).scatter(-1, c.outputs, coarse[..., :-1])

    def probs_at(self, logits: Tensor, c: Component) -> Tensor:
        """softmax; where some classes were asked for, theirs and that of all others together, (..., k + 1)."""
        if c.logits is not None:
            rest = _rest_logits(c).logsumexp(dim=-1, keepdim=True)
            logits = torch.cat([logits, rest.expand(*logits.shape[:-1], 1)], dim=-1)
        return logits.softmax(dim=-1)

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """softmax(κ f), κ = (1 + π σ̄²/8)^(-1/2)."""
        shared = (mean.softmax(dim=-1) * variance).sum(dim=-1, keepdim=True)
        return (mean * (1 + math.pi / 8 * shared).rsqrt()).softmax(dim=-1)

    def log_prob(self, probs: Tensor, y: Tensor) -> Tensor:
        """log p of one class index for each row of probabilities."""
        check_classes(probs, y)
        return _log(probs).gather(-1, y.long().unsqueeze(-1)).squeeze(-1)

    def log_probs(self, predictive: Predictive, targets: Tensor) -> Tensor:
        """log p of every class index but −100, whatever their shape."""
        assert isinstance(predictive, LogitPredictive)
        keep = self.counted(predictive.mean, targets)
        return self.log_prob(predictive.probs[keep], targets[keep])

    def sample(self, probs: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """n class indices, (n, batch, ...)."""
        flat = probs.reshape(-1, probs.shape[-1])
        drawn = torch.multinomial(flat, n, replacement=True, generator=generator)
        return drawn.T.reshape(n, *probs.shape[:-1])

    def margin(self, c: Component, y: Tensor) -> tuple[Tensor, Tensor]:
        """d = f_y − f_j of each example, j the strongest other class."""
        assert c.covariance is not None
        f, own = c.mean.double(), y.unsqueeze(-1)
        strongest = f.scatter(-1, own, -math.inf).max(dim=-1)
        at, rival, block = torch.arange(len(y), device=y.device), strongest.indices, c.covariance.double()
        variance = block[at, y, y] + block[at, rival, rival] - 2 * block[at, y, rival]
        return f.gather(-1, own).squeeze(-1) - strongest.values, variance

    def mismatch(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Outputs that are not negative and sum to 1: probabilities, of which another softmax makes others."""
        sums = outputs.sum(dim=-1)
        if not sums.numel() or bool((outputs < 0).any()) or not bool(((sums - 1).abs() < _SAME_SUM).all()):
            return None
        return (
            "the outputs of each example are positive and sum to 1, as probabilities do, but classification takes "
            "logits: leave out the softmax, or pass forward=lambda model, x: model(x).log()"
        )


class Binary(ClassLikelihood):
    """p(y = 1) = σ(f) for each output, a logit, binary cross-entropy in training."""

    name = "binary"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean binary cross-entropy."""
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=(1, 2))

    def shaped(self, targets: Tensor, like: Tensor) -> Tensor:
        """Zeros and ones, (n, k)."""
        return _zeros_and_ones(super().shaped(targets, like))

    def hessian_diagonal(self, outputs: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """p (1 − p)."""
        p = outputs.sigmoid()
        return p * (1 - p)

    def of_classes(self, probs: Tensor) -> Tensor:
        """p(y = 0) and p(y = 1), in a new last dimension."""
        return torch.stack([1 - probs, probs], dim=-1)

    def probs_at(self, logits: Tensor, c: Component) -> Tensor:
        """σ(f)."""
        return logits.sigmoid()

    def probit(self, mean: Tensor, variance: Tensor) -> Tensor:
        """σ(f (1 + π Var[f]/8)^(-1/2))."""
        return (mean * (1 + math.pi / 8 * variance).rsqrt()).sigmoid()

    def log_prob(self, probs: Tensor, y: Tensor) -> Tensor:
        """log p(y) of zeros and ones, summed over the outputs of an example."""
        y = _zeros_and_ones(like(y, probs))
        return rows(_log(torch.where(y > 0.5, probs, 1 - probs))).sum(dim=1)

    def sample(self, probs: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws of zeros and ones."""
        return torch.bernoulli(probs.expand(n, *probs.shape), generator=generator)

    def margin(self, c: Component, y: Tensor) -> tuple[Tensor, Tensor]:
        """d = ±f of each output."""
        return (2 * y - 1) * c.mean.double(), c.variance.double()

    def mismatch(self, outputs: Tensor, targets: Tensor | None = None) -> str | None:
        """Outputs that are all between 0 and 1: probabilities, not logits."""
        if len(outputs) < FEWEST_TO_JUDGE or not bool(((outputs >= 0) & (outputs <= 1)).all()):
            return None
        return (
            "all outputs lie between 0 and 1, as probabilities do, but likelihood='binary' takes logits: leave out the "
            "sigmoid, or pass forward=lambda model, x: model(x).logit()"
        )


def _of_examples(factor: Tensor | None, like: Tensor) -> Tensor | float:
    """One number for each example, in the dimensions of its outputs; 1 for None."""
    return 1.0 if factor is None else factor.to(like).view(-1, *[1] * (like.dim() - 1))


def entropy(probs: Tensor) -> Tensor:
    """−Σ p log p over the last dimension."""
    found: Tensor = torch.special.entr(probs).sum(dim=-1)
    return found


def check_classes(scores: Tensor, y: Tensor) -> None:
    """Raise unless y holds one class index for each row of scores."""
    _check_shape(y, scores)
    classes = scores.shape[-1]
    if y.numel() and not bool(((y >= 0) & (y < classes)).all()):
        raise MatchError(f"class indices must be 0 to {classes - 1}, got {int(y.min())} to {int(y.max())}")


def _check_shape(y: Tensor, outputs: Tensor) -> None:
    expected = outputs.shape[:-1]
    if y.shape != expected:
        raise MatchError(f"expected class indices of shape {tuple(expected)}, got {tuple(y.shape)}")


def _zeros_and_ones(y: Tensor) -> Tensor:
    if not bool(((y == 0) | (y == 1)).all()):
        raise MatchError(f"binary targets must be 0 or 1, got {float(y.min()):g} to {float(y.max()):g}")
    return y


def _rest_logits(c: Component) -> Tensor:
    """Those of the classes that were not asked for, over T, −∞ at the others."""
    assert c.logits is not None
    assert c.outputs is not None
    return (c.logits / c.temperature).scatter(-1, c.outputs, -torch.inf)


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
