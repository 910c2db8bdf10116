"""From a Gaussian over weights and a batch to a `Component`, the outputs f of one network under it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from bayesadam._alone import alone_with
from bayesadam._warnings import warn
from bayesadam.errors import CollapsedPredictionWarning, SettingError
from bayesadam.gaussian.noise import common_seed, fresh_seed
from bayesadam.likelihoods.component import Component, Novel, Score
from bayesadam.likelihoods.predictive import FEW_OUTPUTS, average
from bayesadam.predict.call import Call, at_positions, batch_size, evaluating, plain
from bayesadam.predict.draws import output_draws
from bayesadam.predict.moments import Moments, moments, parameters_at_mean
from bayesadam.predict.options import MANY_CLASSES, Options, Rows, Top, at_one_position, chosen_positions, is_single
from bayesadam.predict.plan import Plan, plan_for
from bayesadam.predict.sharded import gathered

_DEFAULT_PROBES = 2
# How many numbers of draws are held at once, where they are reduced to some outputs.
_DRAWN_AT_ONCE = 1 << 28


def component_of(gaussian: Any, inputs: Any, options: Options) -> tuple[Component, str]:
    """f of a batch under a posterior over the weights of one network, and how its moments were computed, in words."""
    gaussian.require_proper()
    gaussian.warn_of_limits()
    inputs = plain(inputs)
    if gaussian.is_sharded:
        generator = options.generator or torch.Generator().manual_seed(common_seed(None, gaussian.mode))
        options = replace(options, generator=generator)
        with alone_with(gaussian.model), gathered(gaussian, options.memory_budget) as whole:
            return component_of(whole, inputs, options)
    with evaluating(gaussian.model):
        net = _Network.of(gaussian, inputs, options)
        if net.plan.first is not None and (mismatch := options.record.mismatch(net.plan.first)) is not None:
            warn(mismatch)
        chosen = net.options.choice(net.plan.shape)
        if net.options.predictive != "linearised":
            found, how = _drawn(net, chosen)
        elif chosen is None or len(net.plan.shape) == 1:
            found, how = _linearised(net, chosen)
        else:
            found, how = _at_each_position(net, chosen)
    lost = ~found.mean.reshape(len(found.mean), -1).isfinite().all(dim=1)
    if bool(lost.any()):
        first = int(lost.nonzero()[0])
        warn(
            f"the outputs of {int(lost.sum())} of {len(lost)} examples (first number {first}) are NaN or infinite, "
            "and so is all that is predicted of them: look for NaN in their inputs"
        )
    return found, how


def score_of(gaussian: Any, inputs: Any, options: Options) -> Score:
    """½ tr(H Cov f) of each example, summed over the positions asked for, by random directions of the outputs."""
    if options.probes == 0:
        raise SettingError("a score takes at least one probe: probes=1, or 2 for its standard error")
    gaussian.require_proper()
    gaussian.warn_of_limits()
    with evaluating(gaussian.model):
        net = _Network.of(gaussian, plain(inputs), options)
        (rows, given), shape = net.probes(), net.plan.shape
        if net.options.positions is not None and len(shape) > 1:
            given["positions"] = chosen_positions(net.options.positions, net.inputs, shape).to(net.device)
        found = moments(**net.arguments(), rows=replace(rows, shape=shape), given=given)
    return Score.of(found.variance[0].T / 2)


@dataclass(frozen=True, eq=False)
class _Network:
    """A posterior's model on a batch; `inputs` are pairs with a position where one of each example is asked for."""

    gaussian: Any
    options: Options
    call: Call
    params: Mapping[str, Tensor]
    inputs: Any
    plan: Plan

    @classmethod
    def of(cls, gaussian: Any, inputs: Any, options: Options) -> _Network:
        call, params = Call(gaussian.model, options.forward), parameters_at_mean(gaussian)
        if is_single(options.positions):
            call, shape = at_one_position(call, params, inputs)
            position = chosen_positions(options.positions, inputs, shape)
            outputs = options.outputs if options.chosen is None else _chosen_at(options.chosen, position)
            options = replace(options, positions=None, outputs=outputs)
            inputs = (inputs, position.to(next(iter(params.values())).device))
        return cls(gaussian, options, call, params, inputs, plan_for(call, params, inputs))

    @property
    def device(self) -> torch.device:
        return next(iter(self.params.values())).device

    def probes(self) -> tuple[Rows, dict[str, Tensor]]:
        """Random directions of the outputs, and their random numbers for this batch."""
        record, given = self.options.record, self.options.probes
        noise, t = _noise(self.gaussian, self.options), self.gaussian.temperature
        count = _DEFAULT_PROBES if given is None else given
        rows = Rows(record, probes=count, temperature=t, noise_variance=noise)
        seed = fresh_seed(self.options.generator) if count else 0
        return rows, rows.signs(batch_size(self.inputs), self.plan.outputs, seed, self.device)

    def arguments(self, *others: Any) -> dict[str, Any]:
        """The arguments of `moments` under the posterior, and under others of the same mean."""
        gaussians = [self.gaussian, *others]
        return {
            "call": self.call,
            "params": self.params,
            "variances": [each.coordinate_variance.__getitem__ for each in gaussians],
            "inputs": self.inputs,
            "budget": self.options.memory_budget,
            "bases": self.gaussian.structure.bases,
            "directions": [each.directions for each in gaussians],
            "plan": self.plan,
            "captured": self.options.captured,
        }


def _at_each_position(net: _Network, chosen: Top | Tensor) -> tuple[Component, str]:
    """Exact moments of chosen outputs at several positions, one after the other."""
    mask = chosen_positions(net.options.positions, net.inputs, net.plan.shape)
    counts, order = mask.sum(dim=1), mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    most, how, parts = int(counts.max()), "", []
    keep = torch.arange(most, device=counts.device)[None] < counts[:, None]
    call, _ = at_one_position(net.call, net.params, net.inputs)
    for position in order[:, :most].T:
        inputs = (net.inputs, position.to(net.device))
        there = replace(net, call=call, inputs=inputs, plan=plan_for(call, net.params, inputs))
        found, how = _linearised(there, _chosen_at(chosen, position))
        parts.append(found)
    found = _joined(parts, lambda each: torch.stack(list(each), dim=1)[keep.to(each[0].device)])
    return _by_position(found, net.options, len(mask), net.plan.shape), f"{how}, at each of up to {most} positions"


def _chosen_at(chosen: Any, position: Tensor) -> Any:
    """The outputs chosen at a position, where each position has its own, (batch, positions, k)."""
    by_position = isinstance(chosen, Tensor) and chosen.dim() == 3 and not chosen.is_floating_point()
    return at_positions(chosen, position) if by_position else chosen


def _by_position(found: Component, options: Options, size: int, shape: torch.Size) -> Component:
    """Rows of all positions as (batch, positions…, ...); those of a mask stay rows."""
    if isinstance(options.positions, Tensor):
        return found
    return _joined([found], lambda each: each[0].reshape(size, *shape[:-1], *each[0].shape[1:]))


def _joined(parts: Sequence[Component], of: Callable[[Sequence[Tensor]], Tensor]) -> Component:
    """Components of one kind as one, tensor by tensor; draws keep their own dimension first."""

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Novel | Score):
            names = [field.name for field in fields(values[0])]
            return type(values[0])(*(join([getattr(value, name) for value in values]) for name in names))
        return of(values) if isinstance(values[0], Tensor) else values[0]

    names = [field.name for field in fields(Component) if field.name != "draws"]
    found = {name: join([getattr(part, name) for part in parts]) for name in names}
    draws = parts[0].draws
    return Component(**found, draws=None if draws is None else torch.stack([of([draw]) for draw in draws]))


def _noise(gaussian: Any, options: Options) -> Tensor | None:
    return gaussian.noise_variance if options.record.noise else None


# --- the linearised network -----------------------------------------------------------------------------------------


def _linearised(net: _Network, chosen: Top | Tensor | None) -> tuple[Component, str]:
    """Exact moments of all outputs, or of those chosen where an example's are (outputs,)."""
    gaussian, options, rows = net.gaussian, net.options, None
    given: dict[str, Tensor] = {}
    if chosen is not None:
        rows, signs = net.probes()
        rows = replace(rows, rest=options.record.coupled and not options.is_combination)
        rows, given = rows.choosing(chosen, batch_size(net.inputs), net.plan.outputs)
        given = {name: tensor.to(net.device) for name, tensor in given.items()} | signs
    other = None
    if options.novelty or (options.novelty is None and rows is None and net.plan.outputs <= FEW_OUTPUTS):
        other = gaussian if options.for_novelty else gaussian.for_novelty
    # Where neither is shrunk by its prior, both have the same mean, and one pass does.
    together = other is not None and all(other.mean[name] is mu for name, mu in gaussian.mean.items())
    blocks = options.record.coupled or rows is not None
    others = [other] if together and other is not gaussian else []
    covariance = options.covariance or (together and blocks)
    found = moments(**net.arguments(*others), rows=rows, given=given, covariance=covariance)
    novel = None
    if other is not None:
        its = net if together else replace(net, gaussian=other, params=parameters_at_mean(other))
        own = found if together else moments(**its.arguments(), rows=rows, given=given, covariance=blocks)
        novel = _novel(its, own, rows, given)
    block = found.covariance[0] if options.covariance and found.covariance is not None else None
    settings: Any = {"temperature": gaussian.temperature, "averaged": gaussian.averaged, "novel": novel}
    if rows is None:
        how = f"linearised, exact: {net.plan.outputs} backward directions, one for each output"
        noise = _noise(gaussian, options)
        return Component(found.mean, found.variance[0], block, noise_variance=noise, **settings), how
    k, variance = rows.k, found.variance[0]
    mean, noise = _chosen(gaussian, options, given, found.mean, found.indices)
    component = Component(
        mean,
        variance[:, :k],
        None if block is None else block[:, :k, :k],
        noise_variance=noise,
        score=Score.of(variance[:, k + rows.rest :].T / 2) if rows.probes else None,
        outputs=None if options.is_combination else found.indices,
        logits=found.mean if rows.rest else None,
        rest_variance=variance[:, k] if rows.rest else None,
        **settings,
    )
    how = f"linearised, exact: {rows.count} backward directions of {net.plan.outputs} outputs"
    return component, how + (", replayed from a CUDA graph" if found.replayed else "")


def _chosen(
    gaussian: Any, options: Options, given: Mapping[str, Tensor], logits: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Means and σ² of outputs by index, (b, k), or of combinations u: u · f and Σ u² σ², 0 without a σ²."""
    noise = _noise(gaussian, options)
    noise = noise if noise is None else noise.to(logits).expand(logits.shape[-1])
    if "combinations" not in given:
        return logits.gather(1, indices), None if noise is None else noise[indices]
    u = given["combinations"].to(logits)
    mean = torch.einsum("bkc,bc->bk", u, logits)
    return mean, torch.zeros_like(mean) if noise is None else u.square() @ noise


def _novel(net: _Network, found: Moments, rows: Rows | None, given: Mapping[str, Tensor]) -> Novel:
    """The last of the moments, with variances that grow with the deviation from running statistics.

    Of chosen classes, the rest of the softmax counts as one more class.
    """
    mean, variance, block = found.mean, found.variance[-1], None if found.covariance is None else found.covariance[-1]
    precision = net.options.record.hessian_diagonal(mean, net.gaussian.noise_variance)
    if rows is not None:
        logits, d = mean, rows.k + rows.rest
        mean, _ = _chosen(net.gaussian, net.options, given, logits, found.indices)
        if rows.rest:
            rest = logits.scatter(1, found.indices, -torch.inf).logsumexp(dim=1, keepdim=True)
            mean, precision = torch.cat([mean, rest], dim=1), mean.new_ones(len(mean), d)
        elif "combinations" not in given:
            precision = precision.gather(1, found.indices)
        variance, block = variance[:, :d], None if block is None else block[:, :d, :d]
    deviation = running_deviation(net.call, net.params, net.inputs)
    if deviation is not None:
        factor = deviation.to(mean)
        variance = variance * factor.view(-1, *[1] * (variance.dim() - 1))
        block = None if block is None else block * factor[:, None, None]
    return Novel(mean, variance, block, precision)


def running_deviation(call: Call, params: Mapping[str, Tensor], inputs: Any) -> Tensor | None:
    """d(x) = exp mean_l log mean_c (m_lc(x) − μ_lc)²/σ²_lc, (batch,): None without running statistics.

    Over layers l and channels c of batch norm, m the mean of an example's activations over positions, μ and σ² the
    running statistics. Curvature was measured on activations of d ≈ 1; a linear layer's variance grows with the square
    of its inputs, and so does d.
    """
    layers = [m for m in call.model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not layers:
        return None
    size, found = batch_size(inputs), []

    def take(layer: Any, arguments: tuple[Tensor, ...]) -> None:
        x = arguments[0].detach()
        if x.shape[0] == size:
            means = x.flatten(2).mean(dim=2) if x.dim() > 2 else x
            found.append(((means - layer.running_mean).square() / (layer.running_var + layer.eps)).mean(dim=1))

    handles = [layer.register_forward_pre_hook(take) for layer in layers]
    try:
        with torch.no_grad():
            call(params, inputs)
    finally:
        for handle in handles:
            handle.remove()
    tiny = torch.finfo(torch.float32).tiny
    return torch.stack([d.float().clamp(min=tiny).log() for d in found]).mean(dim=0).exp() if found else None


# --- draws ----------------------------------------------------------------------------------------------------------


def _drawn(net: _Network, chosen: Top | Tensor | None) -> tuple[Component, str]:
    """Draws of all outputs, some at a time, reduced to those chosen, and their moments.

    The mean of the linearised network is known; that of the network itself is estimated from the draws.
    """
    gaussian, options, record = net.gaussian, net.options, net.options.record
    n, sampled = options.n_samples, options.predictive == "sampled"
    numbers = net.plan.outputs * batch_size(net.inputs)
    at_once = n if chosen is None else max(2, min(n, _DRAWN_AT_ONCE // numbers))
    of_net = gaussian, net.call, net.params, net.inputs, net.plan
    draw = partial(output_draws, *of_net, options.predictive, options.generator, options.memory_budget)
    drawn, centre = draw(at_once)
    if sampled and (collapse := record.collapse(drawn, centre)) is not None:
        warn(
            f"{collapse}: the posterior is too wide to be sampled. Calibrate it with predictive='sampled', raise its "
            "prior_precision, or use predictive='linearised'",
            CollapsedPredictionWarning,
        )
    size, shape = len(centre), centre.shape[1:]
    settings: Any = {"temperature": gaussian.temperature, "averaged": gaussian.averaged}
    if chosen is None:
        mean, count = (drawn.mean(dim=0), n - 1) if sampled else (centre, n)
        centred = (drawn - mean).reshape(n, size, -1)
        block = torch.einsum("nbc,nbd->bcd", centred, centred) / count if options.covariance else None
        variance, noise = centred.square().sum(dim=0).div(count).view_as(mean), _noise(gaussian, options)
        found = Component(mean, variance, block, drawn, noise_variance=noise, **settings)
        return found, f"{options.predictive}: {n} draws"
    logits = centre.reshape(-1, shape[-1])
    if isinstance(chosen, Tensor) and chosen.dim() > 1 + options.is_combination:
        by_position = chosen.dim() == 3 and not options.is_combination
        chosen = chosen.flatten(0, 1) if by_position else chosen.repeat_interleave(len(logits) // size, dim=0)
    rows = Rows(record, rest=record.coupled and not options.is_combination)
    rows, given = rows.choosing(chosen, len(logits), shape[-1])
    basis, k = rows(logits, given), rows.k
    kept, scores, total, done = [], [], torch.zeros_like(logits), 0
    while True:
        away = drawn.reshape(len(drawn), *logits.shape) - logits
        total += away.sum(dim=0)
        kept.append(basis.of(away))
        scores.append(_quadratic(gaussian, options, logits, away))
        done += len(drawn)
        if done >= n:
            break
        drawn, _ = draw(max(2, min(at_once, n - done)))
    away = torch.cat(kept)
    shift, count = away.mean(dim=0) if sampled else torch.zeros_like(away[0]), done - sampled
    centred, (mean, noise) = away - shift, _chosen(gaussian, options, given, logits, basis.indices)
    part = centred[..., :k]
    found = Component(
        mean + shift[:, :k],
        part.square().sum(dim=0) / count,
        torch.einsum("nbk,nbl->bkl", part, part) / count if options.covariance else None,
        mean + away[..., :k],
        noise_variance=noise,
        score=Score.of(torch.cat(scores)),
        outputs=None if options.is_combination else basis.indices,
        logits=(logits + total / done if sampled else logits) if rows.rest else None,
        rest_variance=away[..., k].square().mean(dim=0) if rows.rest else None,
        **settings,
    )
    if len(shape) > 1:
        mask = chosen_positions(options.positions, net.inputs, shape).flatten()
        if not bool(mask.all()):
            found = _joined([found], lambda each: each[0][mask.to(each[0].device)])
        found = _by_position(found, options, size, shape)
    return found, f"{options.predictive}: {done} draws of all outputs"


def _quadratic(gaussian: Any, options: Options, logits: Tensor, away: Tensor) -> Tensor:
    """½ awayᵀ H away of each draw, (n, b), H the Hessian of −log p at the logits."""
    if not options.record.coupled:
        return (options.record.hessian_diagonal(logits, gaussian.noise_variance) * away.square()).sum(dim=2) / 2
    t = gaussian.temperature
    probs = (logits / t).softmax(dim=-1)
    found: Tensor = ((probs * away.square()).sum(dim=2) - (probs * away).sum(dim=2).square()) / (2 * t**2)
    return found


# --- mixtures -------------------------------------------------------------------------------------------------------


def mean_outputs(gaussian: Any, inputs: Any, options: Options) -> Tensor:
    """f(x; μ), (batch, ...), in float32 or wider."""
    call = Call(gaussian.model, options.forward)
    with evaluating(gaussian.model), torch.no_grad():
        found = call(parameters_at_mean(gaussian), plain(inputs))
    return found.to(torch.promote_types(found.dtype, torch.float32))


def with_common_outputs(gaussians: Sequence[Any], weights: Sequence[float], inputs: Any, options: Options) -> Options:
    """Where the largest outputs are asked for, options that ask every network for the largest of their average."""
    if not isinstance(options.chosen, Top) and not options.has_many(torch.Size([MANY_CLASSES + 1])):
        return options
    each, record = [mean_outputs(gaussian, inputs, options) for gaussian in gaussians], options.record
    top = options.choice(each[0].shape[1:])
    if not isinstance(top, Top):
        return options
    mean = average(weights, [f.softmax(dim=-1) if record.coupled else record.locations(f) for f in each])
    return replace(options, outputs=mean.topk(min(top.k, mean.shape[-1]), dim=-1).indices)
