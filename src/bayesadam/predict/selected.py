"""Predictions of some outputs, at some places: backward passes in the directions asked for, or draws of all outputs at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bayesadam.errors import SettingError
from bayesadam.gaussian.noise import fresh_seed
from bayesadam.likelihoods import Component, Likelihood, Predictive, likelihood
from bayesadam.likelihoods.component import Novel, Score
from bayesadam.predict.asked import Asked, Probes, Top, rest_weights
from bayesadam.predict.call import Call, batch_size, examples
from bayesadam.predict.gaussian import Gaussian, moments_of
from bayesadam.predict.linearised import Moments
from bayesadam.predict.options import Options
from bayesadam.predict.places import at_places, chosen_places, placed
from bayesadam.predict.plan import Plan
from bayesadam.predict.sampled import warn_of_collapse

_DEFAULT_PROBES = 2
# What has a row for every place.
_ROWS = ("logits", "numbers", "mean", "variance", "covariance", "rest", "noise")
# How many numbers of draws are held at once, at most.
_DRAWN_AT_ONCE = 1 << 28
# (options) → draws of f, (n, batch, ...), and f(x; μ).
Draw = Callable[[Options], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class _Found:
    """Moments of the outputs asked for, of rows (n, k) or places (batch, places…, k).

    Attributes:
        logits: f(x; μ), all outputs of these rows.
        numbers: of the outputs asked for; empty for combinations.
        rest: Var[log Σ_rest exp f].
        plan: how they were found.
        noise: σ² of combinations, where the likelihood has one.
    """

    logits: Tensor
    numbers: Tensor
    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    draws: Tensor | None
    rest: Tensor | None
    score: Score | None
    novel: Novel | None
    plan: str
    noise: Tensor | None = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> _Found:
        """The same with its rows changed; draws come after their own dimension."""

        def of(value: Any) -> Any:
            return None if value is None else change(value)

        score = None if self.score is None else Score(of(self.score.value), of(self.score.error))
        draws = None if self.draws is None else torch.stack([change(draw) for draw in self.draws])
        novel = None
        if self.novel is not None:
            parts = (self.novel.mean, self.novel.variance, self.novel.covariance, self.novel.precision)
            novel = Novel(*map(of, parts))
        changed = {name: of(getattr(self, name)) for name in _ROWS}
        return replace(self, **changed, draws=draws, score=score, novel=novel)


def selected_predictive(
    gaussian: Gaussian,
    call: Call,
    params: Mapping[str, Tensor],
    inputs: Any,
    options: Options,
    chosen: Top | Tensor,
    plan: Plan,
    draw: Draw,
) -> Predictive:
    """The predictive of the outputs chosen; the plan is that of the call on these inputs, which may be at one place already."""
    record, shape = options.record, plan.shape
    is_combination = isinstance(chosen, Tensor) and chosen.is_floating_point()
    probes = _DEFAULT_PROBES if options.probes is None else options.probes
    asked = Asked(
        chosen,
        record,
        gaussian.noise_variance,
        rest=record.coupled and not is_combination,
        probes=probes,
        seed=fresh_seed(options.generator) if probes else 0,
        temperature=gaussian.temperature,
    ).within(shape[-1])
    task = _Selection(gaussian, call, params, options, asked, plan)
    mask = None
    if len(shape) > 1:
        mask = chosen_places("all" if options.positions is None else options.positions, inputs, shape)
    if options.predictive != "linearised":
        found = _restricted(_from_draws(task, options, draw, batch_size(inputs)), mask)
    elif mask is None:
        found = _exact(task, inputs, None)
    else:
        found = _at_many_places(task, inputs, mask, draw)
    if mask is not None and not isinstance(options.positions, Tensor):
        found = found.mapped(lambda t: t.reshape(batch_size(inputs), *shape[:-1], *t.shape[1:]))
    return _assembled(task, found)


def epistemic_score(
    gaussian: Gaussian, call: Call, params: Mapping[str, Tensor], inputs: Any, options: Options, plan: Plan
) -> Score:
    """½ tr(H Cov f), summed over the places asked for, by random directions of the outputs."""
    if options.probes == 0:
        raise SettingError("a score takes at least one probe: probes=1, or 2 for its standard error")
    places = None
    if options.positions is not None and len(plan.shape) > 1:
        places = chosen_places(options.positions, inputs, plan.shape).to(next(iter(params.values())).device)
    along = Probes(
        options.record,
        gaussian.noise_variance,
        _DEFAULT_PROBES if options.probes is None else options.probes,
        fresh_seed(options.generator),
        gaussian.temperature,
        plan.shape,
        places,
    )
    found = moments_of(
        [gaussian],
        call,
        params,
        inputs,
        budget=options.memory_budget,
        along=along,
        plan=plan,
        captured=options.captured,
    )
    return Score.of(found.variance[0].T / 2)


@dataclass(frozen=True, eq=False)
class _Selection:
    """What is asked for, of which network."""

    gaussian: Gaussian
    call: Call
    params: Mapping[str, Tensor]
    options: Options
    asked: Asked
    plan: Plan

    @property
    def shape(self) -> torch.Size:
        """Of an example's outputs."""
        return self.plan.shape

    @property
    def record(self) -> Likelihood[Any]:
        return self.options.record


def _exact(task: _Selection, inputs: Any, place: Tensor | None) -> _Found:
    """By backward passes, at one place of each example."""
    call, asked, options = task.call, task.asked, task.options
    if place is not None:
        call, _ = placed(call, task.params, inputs)
        if isinstance(asked.outputs, Tensor) and asked.outputs.dim() == 3 and not asked.is_combination:
            asked = replace(asked, outputs=at_places(asked.outputs, place))
        inputs = (inputs, place)
    gaussians = [task.gaussian, task.gaussian.for_novelty] if options.novelty else [task.gaussian]
    covariance = options.covariance or bool(options.novelty)
    known = task.plan if place is None else None
    budget = options.memory_budget
    found = moments_of(
        gaussians,
        call,
        task.params,
        inputs,
        budget=budget,
        covariance=covariance,
        along=asked,
        plan=known,
        captured=options.captured,
    )
    numbers, logits, k = found.numbers, found.mean, asked.k
    assert numbers is not None
    mean, noise = logits.gather(1, numbers), None
    if asked.is_combination:
        u = asked.combinations(logits, 0)
        mean, noise = torch.einsum("kbc,bc->bk", u, logits), _noise_of(task, u)
    score = Score.of(found.variance[0][:, k + asked.rest :].T / 2) if asked.probes else None
    novel = _novel(task, found, mean, logits, numbers) if options.novelty else None
    block = None if found.covariance is None or not options.covariance else found.covariance[0][:, :k, :k]
    rest = found.variance[0][:, k] if asked.rest else None
    at_one = place is not None or task.call.at is not None
    plan = (
        f"linearised, exact: {asked.count} backward directions of {task.shape[-1]} outputs"
        + (", at one place of each example" if at_one else "")
        + (", replayed from a CUDA graph" if found.replayed else "")
    )
    return _Found(logits, numbers, mean, found.variance[0][:, :k], block, None, rest, score, novel, plan, noise)


def _noise_of(task: _Selection, u: Tensor) -> Tensor | None:
    """Σ u² σ² over outputs, (b, k), of combinations u, (k, b, c)."""
    noise = task.gaussian.noise_variance
    if not task.record.noise or noise is None:
        return None
    return (u.square() @ noise.to(u).expand(u.shape[-1])).T


def _novel(task: _Selection, found: Moments, mean: Tensor, logits: Tensor, numbers: Tensor) -> Novel:
    """Moments for novelty: of the outputs asked for, and of the rest of the softmax as one more class."""
    assert found.covariance is not None
    d = task.asked.k + task.asked.rest
    precision = task.record.hessian_diagonal(logits, task.gaussian.noise_variance)
    if task.asked.rest:
        mean = torch.cat([mean, logits.scatter(1, numbers, -torch.inf).logsumexp(dim=1, keepdim=True)], dim=1)
        precision = torch.ones_like(mean)
    elif not task.asked.is_combination:
        precision = precision.gather(1, numbers)
    return Novel(mean, found.variance[-1][:, :d], found.covariance[-1][:, :d, :d], precision)


def _at_many_places(task: _Selection, inputs: Any, mask: Tensor, draw: Draw) -> _Found:
    """Backward passes place by place, or draws at all places: what takes less time, by what both took once."""
    counts = mask.sum(dim=1)
    most, n = int(counts.max()), task.options.n_samples
    drawing = replace(task.options, predictive="linearised-sampled", covariance=False, novelty=None)
    backward, forward = _costs(task, inputs, mask, partial(draw, replace(drawing, n_samples=2)))
    backward, forward = backward * most * task.asked.count, forward * n
    measured = (
        f"{backward:.2g} s an example for {most * task.asked.count} backward directions, {forward:.2g} s for {n} draws"
    )
    if forward < backward and not task.options.covariance and not task.options.novelty:
        found = _restricted(_from_draws(task, drawing, draw, len(mask)), mask)
        # The draws stand for moments here, which the link and the temperature then take as those of exact ones.
        return replace(found, draws=None, plan=f"linearised, {n} draws of all outputs at all places ({measured})")
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    parts = [_exact(task, inputs, order[:, j]) for j in range(most)]
    keep = torch.arange(most, device=counts.device)[None] < counts[:, None]
    found = _stacked(parts).mapped(lambda t: t[keep.to(t.device)])
    each = f"linearised, exact: {task.asked.count} backward directions of {task.shape[-1]} outputs"
    return replace(found, plan=f"{each}, at each of up to {most} places ({measured})")


_measured: WeakKeyDictionary[nn.Module, dict[Any, tuple[float, float]]] = WeakKeyDictionary()


def _costs(task: _Selection, inputs: Any, mask: Tensor, draw_two: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a backward direction and of a draw, an example, taken once for a model, its posterior's kind and its outputs' shape."""
    known = _measured.setdefault(task.call.model, {})
    key = task.shape, task.gaussian.structure.kind, task.asked.count
    if key not in known:
        few = min(len(mask), 8)
        one = replace(task, asked=_first_only(task.asked, few), options=replace(task.options, novelty=False))
        place = mask.to(torch.uint8).argmax(dim=1)[:few]
        work: list[Callable[[], Any]] = [lambda: _exact(one, examples(inputs, 0, few), place), draw_two]
        # The first time of either is also that of finding out how.
        backward, forward = (min(_seconds(each), _seconds(each)) for each in work)
        known[key] = backward / (few * task.asked.count), forward / (2 * len(mask))
    return known[key]


def _first_only(asked: Asked, few: int) -> Asked:
    """The same of the first examples, where examples are asked for different outputs."""
    per_example = isinstance(asked.outputs, Tensor) and asked.outputs.dim() > 1 + asked.is_combination
    return replace(asked, outputs=asked.outputs[:few]) if per_example else asked  # type: ignore[index]


def _stacked(parts: list[_Found]) -> _Found:
    """Of places one after the other, (batch, places, ...)."""

    def join(values: list[Any]) -> Any:
        return None if values[0] is None else torch.stack(values, dim=1)

    joined = {name: join([getattr(part, name) for part in parts]) for name in _ROWS}
    score, novel = None, None
    if parts[0].score is not None:
        score = Score(*(join([getattr(part.score, name) for part in parts]) for name in ("value", "error")))
    if parts[0].novel is not None:
        fields = ("mean", "variance", "covariance", "precision")
        novel = Novel(*(join([getattr(part.novel, name) for part in parts]) for name in fields))
    return replace(parts[0], **joined, score=score, novel=novel)


def _from_draws(task: _Selection, options: Options, draw: Draw, batch: int) -> _Found:
    """Of all places, as rows (batch · places, ...): draws of all outputs, some at a time, reduced to what is asked for."""
    asked, n, temperature = task.asked, options.n_samples, task.gaussian.temperature
    at_once = max(2, min(n, _DRAWN_AT_ONCE // (task.shape.numel() * batch)))
    drawn, centre = draw(replace(options, n_samples=at_once))
    if options.predictive == "sampled":
        warn_of_collapse(task.record, drawn, centre)
    logits = centre.reshape(-1, centre.shape[-1])
    if isinstance(asked.outputs, Tensor) and asked.outputs.dim() > 1 + asked.is_combination:
        per_place = logits.shape[0] // len(centre)
        outputs = (
            asked.outputs.flatten(0, 1)
            if asked.outputs.dim() == 3 and not asked.is_combination
            else (asked.outputs.repeat_interleave(per_place, dim=0))
        )
        asked = replace(asked, outputs=outputs)
    u = asked.combinations(logits, 0) if asked.is_combination else None
    numbers = asked.numbers(logits, 0) if u is None else logits.new_zeros(len(logits), 0, dtype=torch.int64)
    weights = rest_weights(logits, numbers) if asked.rest else None
    probs = (logits / temperature).softmax(dim=-1) if task.record.coupled else None
    kept, rest, scores, total = [], [], [], torch.zeros_like(logits)
    done = 0
    while done < n:
        size = len(drawn)
        away = drawn.reshape(size, *logits.shape) - logits
        total += away.sum(dim=0)
        kept.append(
            torch.einsum("kbc,nbc->nbk", u, away) if u is not None else away.gather(2, numbers.expand(size, -1, -1))
        )
        if weights is not None:
            rest.append((weights * away).sum(dim=2))
        if probs is not None:
            scores.append(((probs * away.square()).sum(2) - (probs * away).sum(2).square()) / (2 * temperature**2))
        else:
            hessian = task.record.hessian_diagonal(logits, task.gaussian.noise_variance)
            scores.append((hessian * away.square()).sum(dim=2) / 2)
        done += size
        if done < n:
            drawn, _ = draw(replace(options, n_samples=max(2, min(at_once, n - done))))
    away = torch.cat(kept)
    sampled = options.predictive == "sampled"
    centre_of = torch.einsum("kbc,bc->bk", u, logits) if u is not None else logits.gather(1, numbers)
    shift = away.mean(dim=0) if sampled else torch.zeros_like(away[0])
    mean, count = centre_of + shift, len(away) - sampled
    square = (away - shift).square().sum(dim=0) / count
    block = torch.einsum("nbk,nbl->bkl", away - shift, away - shift) / count if options.covariance else None
    of_rest = torch.cat(rest).square().mean(dim=0) if rest else None
    return _Found(
        logits + total / len(away) if sampled else logits,
        numbers,
        mean,
        square,
        block,
        centre_of + away,
        of_rest,
        Score.of(torch.cat(scores)),
        None,
        f"{options.predictive}: {len(away)} draws of all outputs",
        None if u is None else _noise_of(task, u),
    )


def _restricted(found: _Found, mask: Tensor | None) -> _Found:
    """Rows of all places cut to some of them."""
    if mask is None or bool(mask.all()):
        return found
    keep = mask.flatten()
    return found.mapped(lambda t: t[keep.to(t.device)])


def _assembled(task: _Selection, found: _Found) -> Predictive:
    """The predictive of the moments."""
    gaussian, record = task.gaussian, task.record
    given: dict[str, Any] = {"novel": found.novel, "score": found.score}
    if task.asked.is_combination:
        record = likelihood("regression")
        given["noise_variance"] = found.mean.new_zeros(()) if found.noise is None else found.noise
    else:
        given |= {"temperature": gaussian.temperature, "averaged": gaussian.averaged, "outputs": found.numbers}
        if record.noise and gaussian.noise_variance is not None:
            given["noise_variance"] = gaussian.noise_variance.to(found.mean).expand(found.logits.shape[-1])[
                found.numbers
            ]
        if record.coupled:
            rest = found.rest if found.rest is not None else torch.zeros_like(found.mean[..., 0])
            given |= {"logits": found.logits, "rest_variance": rest}
    component = Component(found.mean, found.variance, found.covariance, found.draws, **given)
    made: Predictive = record.predictive([component], link=task.options.link, plan=found.plan)
    return made


def _seconds(work: Callable[[], Any]) -> float:
    """Seconds that some work takes, the device's own included."""
    _synchronise()
    start = time.perf_counter()
    work()
    _synchronise()
    return time.perf_counter() - start


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
