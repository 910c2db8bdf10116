"""`calibrate`: what held-out data add to a network, out of one forward pass over them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._alone import unwrap
from bayesadam._progress import Bar
from bayesadam._warnings import warn
from bayesadam.calibrated import doubtful
from bayesadam.calibrated.answer import Answer
from bayesadam.calibrated.fit import Fit, Report, dims_of, few_digits, grown_temperature, spread_and_noise
from bayesadam.calibrated.module import Calibrated
from bayesadam.calibrated.ranges import InputRange, ranges_of
from bayesadam.calibrated.tapped import Tapped
from bayesadam.errors import CalibrationError, MatchError, SettingError
from bayesadam.likelihoods import ClassLikelihood, Component, Likelihood, Moments, agreed
from bayesadam.likelihoods.abstention import abstention, check_abstention, label_abstention, remedy
from bayesadam.likelihoods.classes import IGNORED, SHARE_OF_TEXTS, classes_are_second, of_examples
from bayesadam.likelihoods.fitting import best_temperature
from bayesadam.likelihoods.moments import rows
from bayesadam.predict.batches import batches_of, is_ragged, numbers_of, to_device
from bayesadam.predict.leverage import FEWEST, Leverage, Ratios, chosen, from_inputs, from_structure
from bayesadam.predict.matrices import Matrix, layers_of
from bayesadam.predict.network import Forward
from bayesadam.weights.networks import copy_with
from bayesadam.weights.posterior import Posterior

# Positions of each text that count where there are more possible tokens than these, and of any example, such as pixels.
_POSITIONS, _MANY_CLASSES, _MOST_POSITIONS = 4, 100, 1024
# From so many held-out examples on p-values of classes ask leverage too: rows far out towards a class look certain.
_ASKED = 100
_IN_USE, _TEMPERATURE, _ALONE = "calibrated", "best temperature alone", "network alone"


def calibrate(
    posterior: Posterior | nn.Module,
    held_out: object,
    *,
    likelihood: str | None = None,
    forward: Forward | None = None,
    risk: float | None = None,
    tolerance: float | None = None,
    confidence: float = 0.95,
    by_label: bool = False,
    ignore_index: int = IGNORED,
) -> Calibrated:
    """A network whose numbers can be trusted, from held-out data; what is given is not changed.

    One forward pass over the held-out data finds the leverage of each input in the network's layers, r(x) relative to
    that of familiar inputs, 1 for the usual one. A third of the held-out inputs, at most 1,000, are the familiar ones.

    - Classes: probabilities softmax(f/T(x)), T(x) = T₀ √((1 + r(x))/2), which grow humble where layers have to
      extrapolate. The exponent ½ is smaller where held-out data would lose more than 0.5 % of their likelihood by it.
      T₀ has a prior, −½ (log T/τ)² nats with τ = ½ below 1 and 1 above, so that a few examples that are all right are
      no reason to be certain.
    - Numbers: Var[f] = v r(x), with v, and σ² of a regression, by the likelihood of y.

    `.p_value`, `.set(level)` and `.interval(level)` rest on the scores of the others, whose r(x) is found as for new
    inputs, so that they hold where values tie, too. With `risk`, on the same, `net(x).answered` says which inputs to
    answer, and which to leave to a person: as many as can be shown to have at most `risk` of their answers wrong, on
    data like the held-out. Of all calibrations at most 1 − `confidence` allow more errors. Where nothing can be shown
    it warns, and no input is answered.

    None of this needs the optimiser's state: a plain model will do, with its likelihood.

    Args:
        posterior: the posterior, or a model.
        held_out: data that training never saw: a loader of (inputs, targets), of mappings with their labels, or one
            such pair. Targets belong to the outputs at their positions: class indices (batch, ...) go with outputs
            (batch, ..., classes) or, as torch's cross-entropy takes them, (batch, classes, ...). In answers the classes
            are always last, and a set holds the class of a position of the example drawn at random. Inputs that are
            no rows, such as graphs, are a list of examples, or a `Batch` of PyTorch Geometric with its own `y`.
        likelihood: of the targets; None for the posterior's own.
        forward: `forward(model, inputs)` for models whose call is unusual, or for a part of their outputs; the result
            keeps it.
        risk: the share of wrong answers, where inputs may be left unanswered: 0.02 for 2 %.
        tolerance: of numbers, in units of y: an answer farther than that from y is wrong.
        confidence: that the share of wrong answers is not larger.
        by_label: of binary outputs: each label of an input is answered or not, and of the answers to each at most
            `risk` are wrong, with that confidence of all labels together. Else an input is answered as a whole.
        ignore_index: the class that is left out, as of torch's cross-entropy: 255 in many segmentation masks.

    Raises:
        CalibrationError: the network's outputs are not finite, or nothing tried gave a finite score.
        MatchError: targets that do not go with the outputs.
        SettingError: no likelihood was ever given, or another than the posterior's.
    """
    if not isinstance(posterior, Posterior | nn.Module):
        raise SettingError(f"calibrate takes a Posterior or a torch module, got {type(posterior).__name__}")
    if isinstance(posterior, nn.Module) and isinstance(unwrap(posterior), Calibrated):
        raise SettingError("it is calibrated already: pass its .posterior, or its .model, with the same forward=")
    q = posterior if isinstance(posterior, Posterior) else None
    kind = agreed(likelihood, None if q is None else q.likelihood)
    check_abstention(risk, confidence, tolerance, is_classes=kind.is_classes)
    if by_label and (risk is None or kind.coupled or not kind.is_classes):
        raise SettingError(f"by_label= is for risk= of binary outputs, and the likelihood is {kind.name!r}, {risk=}")
    if ignore_index != IGNORED and not kind.coupled:
        raise SettingError(f"ignore_index={ignore_index!r} is a class, of likelihood='classification' alone")
    model = copy.deepcopy(unwrap(posterior)) if isinstance(posterior, nn.Module) else _at_mean(posterior)
    layers = layers_of(model, dict(model.named_parameters()) if q is None else q.mode)
    tapped = Tapped(model, layers, forward)
    seen = _observed(tapped, kind, held_out, ignore_index)
    f, y = seen.outputs, seen.targets

    leverage, ratios, fresh = _leverage(layers, seen, kind, q)
    if layers and not seen.pooled:
        warn(
            "none of the model's layers ran, so that novelty sees its outputs alone: does forward(model, inputs) call "
            "the model that it is given, not another of that name?"
        )
    # What is compared with new inputs rests on those that A has not seen either.
    of_fresh = fresh.to(f.device)[seen.owners]
    # r of the example that each row belongs to.
    owned = Ratios(*(r.to(f.device)[seen.owners] for r in ratios))
    fit, alone = Fit(kind, leverage, dims=seen.dims, class_dim=tapped.class_dim, ranges=seen.ranges), 1.0
    if isinstance(kind, ClassLikelihood):
        alone, score = best_temperature(kind, f, y)
        exponent, temperature = grown_temperature(kind, f, y, owned, score)
        fit = replace(fit, exponent=exponent, temperature=temperature)
    else:
        spread, noise = spread_and_noise(kind, f, y, owned.gentle)
        fit = replace(fit, spread=spread, noise_variance=noise)
    answer = fit.answer(f, owned, fit.spread, fit.noise_variance)
    nll = _nll(fit, seen, owned, answer, alone)

    rule = None
    if risk is not None and by_label:
        doubt, wrong = (rows(x)[of_fresh] for x in (answer.label_doubt, _wrong_labels(kind, seen, answer)))
        rule = label_abstention(doubt, wrong, risk=risk, confidence=confidence)
        if unanswered := (~rule.answers(doubt).any(dim=0)).nonzero().flatten().tolist():
            first, level = unanswered[0], 1 - (1 - confidence) / doubt.shape[1]
            why = remedy(doubt[:, first], wrong[:, first], risk=risk, confidence=level)
            warn(f"{len(unanswered)} of {doubt.shape[1]} labels are never answered, the first is label {first}: {why}")
    elif risk is not None:
        doubt, wrong = answer.doubt[of_fresh], _wrong(kind, seen, answer, tolerance)[of_fresh]
        rule = abstention(doubt, wrong, risk=risk, confidence=confidence, tolerance=tolerance)
        if rule.threshold is None:
            warn(remedy(doubt, wrong, risk=risk, confidence=confidence))
    last = next(reversed(seen.pooled.values()), None)
    if last is not None and f.dim() == 2 and len(last) == len(y):
        doubtful.warn_of_training_data(kind, f, y, last, None if q is None else q.n_data)
    doubtful.warn_of_number(len(y))
    if (reason := kind.mismatch(f, y)) is not None:
        warn(reason)
    if len(y) >= FEWEST and kind.coupled:
        doubtful.warn_of_labels(y, nll[_ALONE][0], nll[_TEMPERATURE][0], alone)
    elif len(y) >= FEWEST and kind.standardised and not kind.is_classes:
        doubtful.warn_of_scale(kind.locations(f), y)

    fit = replace(fit, report=Report(kind.name, seen.n, nll, _outcome(fit), rule))
    if seen.n >= FEWEST:
        novelty, scores = answer.novelty[of_fresh], _scores(kind, seen, answer, of_fresh)
        if seen.entropy is not None:
            novelty = few_digits(seen.entropy + SHARE_OF_TEXTS * ratios.steep.log().to(seen.entropy))
            novelty = novelty[fresh.to(f.device)]
        fit = replace(fit, novelties=novelty.sort().values, scores=scores)
        if kind.is_classes and leverage is not None and len(novelty) >= _ASKED:
            r = few_digits(ratios.steep)[fresh.to(ratios.steep.device)]
            fit = replace(fit, leverages=r.sort().values)
    return Calibrated(tapped, fit, q)


def _leverage(
    layers: Sequence[Matrix], seen: _Observed, kind: Likelihood, q: Posterior | None
) -> tuple[Leverage | None, Ratios, Tensor]:
    """By the held-out inputs or else by the optimiser's state; r of every example; and which are not in A, (n,)."""
    logits = seen.outputs if kind.coupled and seen.outputs.dim() == 2 and len(seen.outputs) == seen.n else None
    familiar = chosen(seen.n)
    if (by_inputs := from_inputs(layers, seen.pooled, familiar, logits)) is not None:
        leverage, log_h = by_inputs
        return leverage, leverage.ratios(log_h), ~familiar
    everyone, state = torch.ones_like(familiar), None if q is None else from_structure(layers, q.curvature)
    if state is None or not (state := state.among(seen.pooled)).layers:
        return None, Ratios.usual(seen.outputs.new_empty(seen.n, 1)), everyone
    log_h = state.log_h(seen.pooled)
    leverage = state.against(log_h)
    return leverage, leverage.ratios(log_h), everyone


def _at_mean(posterior: Posterior) -> nn.Module:
    """A copy of the model at the posterior's mean."""
    posterior.require_whole("calibration")
    if moved := posterior.moved_statistics:
        warn(
            f"read the posterior again, or train a copy of the model: running statistics of its batch norms have "
            f"changed since (first {moved[0]!r}), and predictions are neither the old network's nor the new one's"
        )
    posterior.parameters()
    return copy_with(posterior.model, posterior.mean)


# --- one pass over the held-out data --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Observed:
    """What one forward pass over n held-out examples shows."""

    n: int
    # A row for each target that counts, (m, ...), and the number of the example that it belongs to, (m,).
    outputs: Tensor
    targets: Tensor
    owners: Tensor
    # The inputs of every layer by module, (n, width).
    pooled: dict[str, Tensor]
    # Novelty at r = 1 of outputs at many positions, (n,); None of others.
    entropy: Tensor | None
    dims: tuple[int, int]
    # Which rows make scores, (m,): all; one of each example with positions; None where examples are left out.
    scored: Tensor | None
    ranges: tuple[InputRange, ...]


def _observed(tapped: Tapped, kind: Likelihood, held_out: object, ignored: int) -> _Observed:
    device = numbers_of(tapped).device
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    pooled: list[Mapping[str, Tensor]] = []
    entropies, inputs_seen, scored = [], [], []
    dims, n, every = (0, 0), 0, True
    with Bar("calibrate") as bar, torch.no_grad():
        for number, (inputs, y) in enumerate(batches_of(held_out, tapped.model)):
            _check_targets(kind, inputs, y, tapped.call)
            f, seen = tapped(to_device(inputs, device))
            y = y.to(f.device)
            if kind.coupled:
                # Unsigned types hold no −100.
                y = y if y.is_floating_point() else y.long()
                y = y.where(y != ignored, IGNORED)
                if not n and classes_are_second(y, f, tapped.call is not None):
                    tapped.class_dim, f = 1, f.movedim(1, -1)
            dims = dims_of(f)
            y = kind.matched(y, f)
            keep = kind.counted(f, y)
            owners = torch.arange(n, n + len(y), device=f.device).view(-1, *[1] * (y.dim() - 1)).expand(y.shape)
            if isinstance(keep, Tensor):
                every = every and (keep.dim() > 1 or bool(keep.all()))
                most = _POSITIONS if f.shape[-1] > _MANY_CLASSES else _MOST_POSITIONS
                if keep.dim() > 1 and keep[0].numel() > most:
                    keep = keep & _some(keep, number, most)
                scored.append((_some(keep, number, 1) if keep.dim() > 1 else keep)[keep])
            positions = kind.coupled and f.dim() > 2
            entropies += [kind.novelty(f, torch.ones(len(f), device=f.device))] if positions else []
            parts.append((f[keep], y[keep], owners[keep] if positions else owners.reshape(len(y), -1)[keep, 0]))
            pooled.append(seen)
            if not is_ragged(inputs):
                inputs_seen.append(inputs)
            n += len(y)
            bar.step()
    if not n:
        raise MatchError("there is no held-out data: the loader gave no batch (a generator that was used up?)")
    outputs, targets, owners = (torch.cat(part) for part in zip(*parts, strict=True))
    if not len(targets):
        raise MatchError(f"there is nothing to score: every class is {kind.ignored}, which is left out")
    modules = set.intersection(*(set(seen) for seen in pooled))
    inputs = {name: torch.cat([seen[name] for seen in pooled]) for name in pooled[0] if name in modules}
    # A layer is NaN for the graphs that do not run it.
    inputs = {name: a for name, a in inputs.items() if not bool(a.isnan().all())}
    if not bool(outputs.isfinite().all()) or any(bool(a.isinf().any()) for a in inputs.values()):
        raise CalibrationError(
            "the network's outputs on the held-out data, or the inputs of its layers, are not finite. Do the held-out "
            "inputs contain NaN or infinities?"
        )
    entropy = torch.cat(entropies) if entropies else None
    rows_scored = None if not every else torch.cat(scored) if scored else torch.ones_like(owners, dtype=torch.bool)
    return _Observed(n, outputs, targets, owners, inputs, entropy, dims, rows_scored, ranges_of(inputs_seen))


def _check_targets(kind: Likelihood, inputs: object, y: Tensor, forward: Forward | None) -> None:
    """Refuse targets that are not finite, and tokens that stand for themselves and not for the next ones."""
    if y.is_floating_point() and not bool(y.isfinite().all()):
        lost = int((~y.isfinite()).sum())
        raise MatchError(f"{lost} held-out targets are NaN or infinite: leave their examples out")
    if kind.ignored is None or forward is not None or y.dim() != 2 or y.is_floating_point():
        return
    texts = inputs["input_ids"] if isinstance(inputs, Mapping) and "input_ids" in inputs else inputs
    tokens = next((leaf for leaf in pytree.tree_leaves(texts) if isinstance(leaf, Tensor)), None)
    if tokens is None or tokens.shape != y.shape or tokens.is_floating_point():
        return
    tokens = tokens.to(y.device)[:, 1:]
    same, following = (bool(((tokens != part) & (part != kind.ignored)).any()) for part in (y[:, 1:], y[:, :-1]))
    if not same and following:
        raise MatchError(
            "the targets are the inputs at the same positions, and a language model's output is for the next token: "
            "pass forward=lambda model, batch: model(**batch).logits[:, :-1], and labels[:, 1:] as the targets"
        )


def _some(counted: Tensor, seed: int, most: int) -> Tensor:
    """Up to so many of the positions that count of each example, drawn at random, always the same."""
    flat = counted.flatten(1)
    order = torch.rand(flat.shape, generator=torch.Generator().manual_seed(seed)).to(flat.device) * flat
    chosen = order.topk(min(most, flat.shape[1]), dim=1).indices
    return torch.zeros_like(flat).scatter_(1, chosen, value=True).view_as(counted)


# --- how good its answers are -----------------------------------------------------------------------------------------


def _nll(
    fit: Fit, seen: _Observed, ratios: Ratios, answer: Answer, temperature: float
) -> dict[str, tuple[float, float]]:
    """Mean negative log-likelihoods with their standard errors, as now predicted and, of classes, without leverage."""
    kind, f = fit.likelihood, seen.outputs
    candidates = {_IN_USE: Component(Moments(f, answer.f_variance), fit.noise_variance)}
    if isinstance(kind, ClassLikelihood):
        grown = Moments(f / of_examples(ratios.growth(fit.exponent), f))
        candidates = {_IN_USE: Component(grown, temperature=fit.temperature)}
        candidates |= {_TEMPERATURE: Component(Moments(f), temperature=temperature), _ALONE: Component(Moments(f))}
    values = {name: -kind.log_prob([c], seen.targets).double() for name, c in candidates.items()}
    return {
        name: (float(v.mean()), float(v.std(correction=min(1, len(v) - 1))) / math.sqrt(len(v)))
        for name, v in values.items()
    }


def _outcome(fit: Fit) -> str:
    if not fit.likelihood.is_classes:
        return "the variance of f is v r(x), r the relative leverage"
    power = "" if fit.exponent == 0.5 else f", to the power {fit.exponent:g} and not ½"
    return f"probabilities are softmax(f/T(x)), T(x) = {fit.temperature:.3g} × √((1 + r(x))/2){power}"


def _scores(kind: Likelihood, seen: _Observed, answer: Answer, fresh: Tensor) -> Tensor | None:
    """1 − p of the true classes, of one position of each example, or |y − E[y]|/sd; none where examples are left out.

    Of the `fresh` rows alone, (m,) booleans.

    A position drawn at random from each of n examples and from one more are exchangeable, those of one example are not.
    """
    if isinstance(kind, ClassLikelihood):
        assert answer.probs is not None
        scored = None if seen.scored is None else seen.scored & fresh
        if scored is None or int(scored.sum()) < FEWEST:
            return None
        probs = kind.of_classes(answer.probs)[scored]
        labels = seen.targets[scored].reshape(probs.shape[:-1]).long().unsqueeze(-1)
        return 1 - probs.gather(-1, labels).squeeze(-1)
    assert answer.mean is not None
    assert answer.stddev is not None
    return rows((seen.targets - answer.mean).abs() / answer.stddev)[fresh]


def _wrong(kind: Likelihood, seen: _Observed, answer: Answer, tolerance: float | None) -> Tensor:
    """Whether the answer to each example is wrong, (n,) booleans; of several outputs, whether any is."""
    if seen.entropy is not None:
        raise MatchError(
            "risk= is for one answer to each example, and the outputs have many positions: pass forward=lambda model, "
            "batch: ... that returns the outputs at one of them, with their targets"
        )
    if not isinstance(kind, ClassLikelihood):
        assert answer.mean is not None
        assert tolerance is not None
        return rows((seen.targets - answer.mean).abs() > tolerance).any(dim=1)
    return rows(_wrong_labels(kind, seen, answer)).any(dim=1)


def _wrong_labels(kind: Likelihood, seen: _Observed, answer: Answer) -> Tensor:
    """Whether the answer to each label is wrong, booleans."""
    if seen.scored is None:
        raise MatchError(f"risk= needs the class of every held-out example: leave out those of {kind.ignored}")
    assert isinstance(kind, ClassLikelihood)
    assert answer.probs is not None
    classes = kind.of_classes(answer.probs).argmax(dim=-1)
    return classes != seen.targets.reshape(classes.shape).to(classes)
