"""`calibrate`: what held-out data add to a network, out of one forward pass over them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._alone import unwrap
from bayesadam._progress import Bar
from bayesadam._warnings import warn
from bayesadam.calibrated import fits
from bayesadam.calibrated.answer import Fit, Predicted, Report, dims_of, doubt, predicted
from bayesadam.calibrated.leaked import UNLIKELY, balance
from bayesadam.calibrated.module import Calibrated, Tapped
from bayesadam.calibrated.ranges import fingerprints, ranges_of
from bayesadam.errors import BayesAdamWarning, CalibrationError, MatchError, SettingError
from bayesadam.likelihoods import ClassLikelihood, Component, Likelihood, Moments, NumericLikelihood, agreed
from bayesadam.likelihoods.abstention import abstention, check_abstention, remedy
from bayesadam.likelihoods.classes import SHARE_OF_TEXTS
from bayesadam.likelihoods.fitting import best_temperature
from bayesadam.likelihoods.moments import rows
from bayesadam.predict.batches import batches_of, to_device
from bayesadam.predict.leverage import FEWEST, Ratios, from_inputs, from_structure
from bayesadam.predict.network import Forward
from bayesadam.predict.tap import layers_of
from bayesadam.weights.posterior import Posterior

# A network is out of place if it is so many times worse than a guess, and at its best temperature not better than this
# share of one, or so hot.
_WORSE, _NO_BETTER, _TOO_HOT = 2.0, 0.98, 6.0
# It is out of place, too, where it is worse than a guess at all and hotter than this.
_ABSURD = 30.0
# The share of held-out examples that may be there before.
_REPEATED = 0.05
# A regression is out of place if its mean squared error is so many times that of the targets' mean, and their
# correlation shows that it was trained for them.
_FAR_OFF, _FOLLOWS = 4.0, 0.3
# Positions of each text that count where there are more possible tokens than these.
_POSITIONS, _MANY_CLASSES = 4, 100
_IN_USE, _TEMPERATURE, _ALONE = "calibrated", "best temperature alone", "network alone"
_MISSING = (
    "there is no posterior: error bars of the weights, pruning, merging and draws need one, from the optimiser's state"
)


def calibrate(
    posterior: Posterior | nn.Module,
    held_out: Any,
    *,
    likelihood: str | None = None,
    forward: Forward | None = None,
    risk: float | None = None,
    tolerance: float | None = None,
    confidence: float = 0.95,
) -> Calibrated:
    """A network whose numbers can be trusted, from held-out data; what is given is not changed.

    One forward pass over the held-out data finds the leverage of each input in the network's layers, r(x) relative to
    that of the held-out inputs, 1 for the usual one. Each held-out example is left out of its own.

    - Classes: probabilities softmax(f/T(x)), T(x) = T₀ √((1 + r(x))/2), which grow humble where layers have to
      extrapolate. The exponent ½ is smaller where held-out data would lose more than 0.5 % of their likelihood by it.
      T₀ has a prior, −½ (log T/τ)² nats with τ = ½ below 1 and 1 above, so that a few examples that are all right are
      no reason to be certain.
    - Numbers: Var[f] = v r(x), with v, and σ² of a regression, by the likelihood of y.

    `.p_value`, `.set(level)` and `.interval(level)` rest on the scores of the held-out examples. With `risk`,
    `net(x).answered` says which inputs to answer, and which to leave to a person: as many as can be shown to have at
    most `risk` of their answers wrong, on data like the held-out. Of all calibrations at most 1 − `confidence` allow
    more errors. Where nothing can be shown it warns, and no input is answered.

    None of this needs the optimiser's state: a plain model will do, with its likelihood.

    Args:
        posterior: the posterior, or a model.
        held_out: data that training never saw: a loader of (inputs, targets), of mappings with their labels, or one
            such pair. Targets belong to the outputs at their positions. Classes of −100 are left out.
        likelihood: of the targets; None for the posterior's own.
        forward: `forward(model, inputs)` for models whose call is unusual, or for a part of their outputs; the result
            keeps it.
        risk: the share of wrong answers, where inputs may be left unanswered: 0.02 for 2 %.
        tolerance: of numbers, in units of y: an answer farther than that from y is wrong.
        confidence: that the share of wrong answers is not larger.

    Raises:
        CalibrationError: the network's outputs are not finite, or nothing tried gave a finite score.
        MatchError: targets that do not go with the outputs.
        SettingError: no likelihood was ever given, or another than the posterior's.
    """
    if not isinstance(posterior, Posterior | nn.Module):
        raise SettingError(f"calibrate takes a Posterior or a torch module, got {type(posterior).__name__}")
    q = posterior if isinstance(posterior, Posterior) else None
    kind = agreed(likelihood, None if q is None else q.likelihood)
    check_abstention(risk, confidence, tolerance, is_classes=kind.is_classes)
    model = copy.deepcopy(unwrap(posterior)) if isinstance(posterior, nn.Module) else _at_mean(posterior)
    names = dict(model.named_parameters()) if q is None else q.mode
    layers = layers_of(model, names)
    tapped = Tapped(model, layers, forward)
    seen = _observed(tapped, kind, held_out)
    state = None if q is None else from_structure(layers, q.curvature)
    leverage, log_h = from_inputs(layers, seen.pooled, state)
    ratios = Ratios.usual(seen.outputs.new_empty(seen.n, 1)) if leverage is None else leverage.ratios(log_h)
    fit = Fit(kind, leverage, dims=seen.dims, ranges=seen.ranges)
    fit, temperature = _fitted(fit, seen, ratios)
    y = predicted(fit, seen.outputs, _of_owners(ratios, seen.owners))
    nll = _nll(fit, seen, ratios, temperature)
    novelty = _novelty(fit, seen, ratios)
    rule = None
    if risk is not None:
        answers = doubt(fit, y), _wrong(fit, seen, y, tolerance)
        rule = abstention(*answers, risk=risk, confidence=confidence, tolerance=tolerance)
        if rule.threshold is None:
            warn(remedy(*answers, risk=risk, confidence=confidence), BayesAdamWarning)
    _warn_of_data(fit, seen, nll, temperature, None if q is None else q.n_data)
    report = Report(kind.name, seen.n, nll, _outcome(fit), "" if q is not None else _MISSING, rule)
    fit = replace(fit, report=report)
    if seen.n >= FEWEST:
        fit = replace(fit, novelties=novelty.sort().values, scores=_scores(fit, seen, y))
    return Calibrated(tapped, fit, q)


def _at_mean(posterior: Posterior) -> nn.Module:
    """A copy of the model at the posterior's mean."""
    posterior.require_whole("calibration")
    if moved := posterior.moved_statistics:
        warn(
            f"read the posterior again, or train a copy of the model: running statistics of its batch norms have "
            f"changed since (first {moved[0]!r}), and predictions are neither the old network's nor the new one's"
        )
    posterior.parameters()
    model = copy.deepcopy(posterior.model)
    parameters = dict(model.named_parameters())
    for name, mu in posterior.mean.items():
        parameters[name].data = mu.detach().to(parameters[name]).clone()
    return model


# --- one pass over the held-out data --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Observed:
    """What one forward pass over n held-out examples shows.

    Attributes:
        outputs: (m, ...), a row for each target that counts.
        targets: those targets, (m, ...).
        owners: the number of the example that each row belongs to, (m,).
        pooled: the inputs of every layer by module, (n, width).
        entropy: novelty at r = 1 of outputs at many positions, (n,); None of others.
        dims: how many dimensions outputs have, and the last of them.
        every: whether each example has one row, and none is left out.
    """

    n: int
    outputs: Tensor
    targets: Tensor
    owners: Tensor
    pooled: dict[str, Tensor]
    entropy: Tensor | None
    dims: tuple[int, int]
    every: bool
    ranges: Any
    repeated: int


def _observed(tapped: Tapped, kind: Likelihood, held_out: Any) -> _Observed:
    device = next(tapped.parameters()).device
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    pooled: list[Mapping[str, Tensor]] = []
    entropies, inputs_seen, prints = [], [], []
    dims, n, every = (0, 0), 0, True
    with Bar("calibrate") as bar, torch.no_grad():
        for number, (inputs, y) in enumerate(batches_of(held_out, tapped.model)):
            _check_targets(kind, inputs, y, tapped.call)
            f, seen = _run(tapped, to_device(inputs, device), y)
            dims = dims_of(f)
            y = kind.matched(y.to(f.device), f)
            keep = kind.counted(f, y)
            owners = torch.arange(n, n + len(y), device=f.device).view(-1, *[1] * (y.dim() - 1)).expand(y.shape)
            if isinstance(keep, Tensor):
                every = every and keep.dim() == 1 and bool(keep.all())
                if keep.dim() > 1 and f.shape[-1] > _MANY_CLASSES:
                    keep = keep & _some(keep, number)
            positions = kind.coupled and f.dim() > 2
            entropies += [kind.novelty(f, torch.ones(len(f), device=f.device))] if positions else []
            parts.append((f[keep], y[keep], owners[keep] if positions else owners.reshape(len(y), -1)[keep, 0]))
            pooled.append(seen)
            inputs_seen.append(inputs)
            prints += fingerprints(inputs).tolist()
            n += len(y)
            bar.step()
    if not n:
        raise MatchError("there is no held-out data: the loader gave no batch (a generator that was used up?)")
    outputs, targets, owners = (torch.cat(part) for part in zip(*parts, strict=True))
    if not len(targets):
        raise MatchError(f"there is nothing to score: every class is {kind.ignored}, which is left out")
    modules = set.intersection(*(set(seen) for seen in pooled))
    inputs = {name: torch.cat([seen[name] for seen in pooled]) for name in pooled[0] if name in modules}
    if not all(bool(t.isfinite().all()) for t in (outputs, *inputs.values())):
        raise CalibrationError(
            "the network's outputs on the held-out data, or the inputs of its layers, are not finite. Do the held-out "
            "inputs contain NaN or infinities?"
        )
    entropy = torch.cat(entropies) if entropies else None
    repeated = len(prints) - len(set(prints))
    ranges = ranges_of(inputs_seen)
    return _Observed(n, outputs, targets, owners, inputs, entropy, dims, every, ranges, repeated)


def _run(tapped: Tapped, inputs: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The network on a batch; where the network takes the targets and not the inputs, that is told."""
    try:
        found: tuple[Tensor, dict[str, Tensor]] = tapped(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        try:
            tapped(y.to(next(tapped.parameters()).device))
        except Exception:
            raise error from None
        raise MatchError(
            "pass (inputs, targets), not (targets, inputs): the network takes the second of each pair, and of the "
            f"first it says: {error}"
        ) from error
    return found


def _check_targets(kind: Likelihood, inputs: Any, y: Tensor, forward: Forward | None) -> None:
    """Refuse targets that are not finite, and tokens that stand for themselves and not for the next ones."""
    if y.is_floating_point() and not bool(y.isfinite().all()):
        lost = int((~y.isfinite()).sum())
        raise MatchError(f"{lost} held-out targets are NaN or infinite: leave their examples out")
    if kind.ignored is None or forward is not None or y.dim() != 2 or y.is_floating_point():
        return
    given = inputs["input_ids"] if isinstance(inputs, Mapping) and "input_ids" in inputs else inputs
    tokens = next((leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)), None)
    if tokens is None or tokens.shape != y.shape or tokens.is_floating_point():
        return
    tokens = tokens.to(y.device)[:, 1:]
    same, following = (bool(((tokens != part) & (part != kind.ignored)).any()) for part in (y[:, 1:], y[:, :-1]))
    if not same and following:
        raise MatchError(
            "the targets are the inputs at the same positions, and a language model's output is for the next token: "
            "pass forward=lambda model, batch: model(**batch).logits[:, :-1], and labels[:, 1:] as the targets"
        )


def _some(counted: Tensor, seed: int) -> Tensor:
    """Up to four of the positions that count of each example, drawn at random, always the same."""
    flat = counted.flatten(1)
    order = torch.rand(flat.shape, generator=torch.Generator().manual_seed(seed)).to(flat.device) * flat
    chosen = order.topk(min(_POSITIONS, flat.shape[1]), dim=1).indices
    return torch.zeros_like(flat).scatter_(1, chosen, value=True).view_as(counted)


# --- the fit --------------------------------------------------------------------------------------------------------


def _of_owners(ratios: Ratios, owners: Tensor) -> Ratios:
    """r of the example that each row belongs to."""
    return Ratios(*(r.to(owners.device)[owners] for r in (ratios.gentle, ratios.steep)))


def _fitted(fit: Fit, seen: _Observed, ratios: Ratios) -> tuple[Fit, float]:
    """The fit with its temperature, or its spread and noise; and the best temperature without regard to leverage."""
    at = _of_owners(ratios, seen.owners)
    if isinstance(fit.likelihood, ClassLikelihood):
        plain, score = best_temperature(fit.likelihood, seen.outputs, seen.targets)
        exponent, temperature = fits.grown_temperature(fit.likelihood, seen.outputs, seen.targets, at, score)
        return replace(fit, exponent=exponent, temperature=temperature), plain
    spread, noise = fits.spread_and_noise(fit.likelihood, seen.outputs, seen.targets, at.gentle)
    return replace(fit, spread=spread, noise_variance=noise), 1.0


def _novelty(fit: Fit, seen: _Observed, ratios: Ratios) -> Tensor:
    """Of the held-out inputs, (n,)."""
    if seen.entropy is not None:
        return seen.entropy + SHARE_OF_TEXTS * ratios.steep.log().to(seen.entropy)
    return fit.likelihood.novelty(seen.outputs, _of_owners(ratios, seen.owners).steep)


def _scores(fit: Fit, seen: _Observed, y: Predicted) -> Tensor | None:
    """1 − p of the true classes, or |y − E[y]|/sd; none where classes are left out, or belong to positions."""
    kind = fit.likelihood
    if isinstance(kind, ClassLikelihood):
        assert y.probs is not None
        if not seen.every and kind.ignored is not None:
            return None
        probs = kind.of_classes(y.probs)
        labels = seen.targets.reshape(probs.shape[:-1]).long().unsqueeze(-1)
        return 1 - probs.gather(-1, labels).squeeze(-1)
    assert y.mean is not None
    assert y.stddev is not None
    return rows((seen.targets - y.mean).abs() / y.stddev)


def _wrong(fit: Fit, seen: _Observed, y: Predicted, tolerance: float | None) -> Tensor:
    """Whether the answer to each example is wrong, (n,) booleans; of several outputs, whether any is."""
    kind = fit.likelihood
    if seen.entropy is not None:
        raise MatchError(
            "risk= is for one answer to each example, and the outputs have many positions: pass forward=lambda model, "
            "batch: ... that returns the outputs at one of them, with their targets"
        )
    if not isinstance(kind, ClassLikelihood):
        assert y.mean is not None
        assert tolerance is not None
        return rows((seen.targets - y.mean).abs() > tolerance).any(dim=1)
    if not seen.every and kind.ignored is not None:
        raise MatchError(f"risk= needs the class of every held-out example: leave out those of {kind.ignored}")
    assert y.probs is not None
    answers = kind.of_classes(y.probs).argmax(dim=-1)
    return rows(answers != seen.targets.reshape(answers.shape).to(answers)).any(dim=1)


def _nll(fit: Fit, seen: _Observed, ratios: Ratios, temperature: float) -> dict[str, tuple[float, float]]:
    """Mean negative log-likelihoods of the candidates, and their standard errors."""
    kind, f = fit.likelihood, seen.outputs
    at = _of_owners(ratios, seen.owners)
    y = predicted(fit, f, at)
    candidates: dict[str, Component]
    if isinstance(kind, ClassLikelihood):
        growth = at.growth(fit.exponent).to(f).view(-1, *[1] * (f.dim() - 1))
        candidates = {_IN_USE: Component(Moments(f / growth), temperature=fit.temperature)}
        candidates |= {_TEMPERATURE: Component(Moments(f), temperature=temperature), _ALONE: Component(Moments(f))}
    else:
        candidates = {_IN_USE: Component(Moments(f, y.f_variance), fit.noise_variance)}
    values = {name: -kind.log_prob([c], seen.targets).double() for name, c in candidates.items()}
    return {
        name: (float(v.mean()), float(v.std(correction=min(1, len(v) - 1))) / math.sqrt(len(v)))
        for name, v in values.items()
    }


def _outcome(fit: Fit) -> str:
    if isinstance(fit.likelihood, NumericLikelihood):
        return "the variance of f is v r(x), r the relative leverage"
    exponent = "" if fit.exponent == 0.5 else f", to the power {fit.exponent:g} and not ½"
    return f"probabilities are softmax(f/T(x)), T(x) = {fit.temperature:.3g} × √((1 + r(x))/2){exponent}"


# --- warnings -------------------------------------------------------------------------------------------------------


def _warn_of_data(
    fit: Fit, seen: _Observed, nll: Mapping[str, tuple[float, float]], temperature: float, n_data: float | None
) -> None:
    """Warn of data of training, of those of another likelihood, of too few, and of labels of other inputs."""
    told: Callable[[str], None] = lambda words: warn(words, BayesAdamWarning)  # noqa: E731
    kind, f, y = fit.likelihood, seen.outputs, seen.targets
    last = next(reversed(seen.pooled.values()), None)
    if last is not None and f.dim() == 2 and len(last) == len(y):
        chance = balance(kind, f, y, last)
        if chance < UNLIKELY:
            same = ", as many as n_data," if len(y) == n_data else ""
            told(
                "these look like the training data, not held-out ones: calibrate on examples that training never saw. "
                f"Over the {len(y)} examples{same} the gradient of the loss adds up to less than chance would leave of "
                f"examples that were not trained on (probability {chance:.1g})"
            )
    if seen.repeated > _REPEATED * seen.n:
        told(
            f"give every held-out example once: {seen.repeated} of {seen.n} are there before, so that p-values, sets "
            "and intervals claim more than they hold. A sampler that draws with replacement makes such data"
        )
    if (reason := kind.mismatch(f, y)) is not None:
        told(reason)
    if len(y) < FEWEST:
        told(
            f"{len(y)} held-out targets are too few to calibrate on: a fit to them may be chance. Hold out {FEWEST} at "
            "the least, better some hundreds"
        )
    elif kind.coupled:
        guess = math.log(max(int(y.max()) + 1, 2))
        alone, best = nll[_ALONE][0], nll[_TEMPERATURE][0]
        hot = temperature > _ABSURD and alone > guess
        if hot or (alone > _WORSE * guess and (best > _NO_BETTER * guess or temperature > _TOO_HOT)):
            told(
                f"the network is worse on the held-out data than a guess among their classes (negative log-likelihood "
                f"{alone:.3g} against {guess:.3g}, {best:.3g} at its best temperature): are the labels those of these "
                "inputs, and are the inputs scaled as in training?"
            )
    elif kind.standardised and not kind.is_classes:
        centred, spread = (t - t.mean(dim=0) for t in (kind.locations(f), y))
        error, variance = (y - kind.locations(f)).square().mean(), spread.square().mean()
        if error > _FAR_OFF * variance and (
            (centred * spread).mean().square() > _FOLLOWS * centred.square().mean() * variance
        ):
            told(
                "scale the targets as in training: the network's outputs follow the held-out ones, but are farther "
                f"from them than their mean is (mean squared error {error:.3g} against {variance:.3g})"
            )
