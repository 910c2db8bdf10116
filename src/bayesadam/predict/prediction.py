"""From a Gaussian over weights and a batch to a `Component`, the outputs f of one network under it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from bayesadam._alone import alone_with
from bayesadam._warnings import warn
from bayesadam.errors import CollapsedPredictionWarning, SettingError
from bayesadam.gaussian.noise import fresh_seed
from bayesadam.gaussian.sharded import common_seed
from bayesadam.likelihoods.component import Component, Novel, Score
from bayesadam.likelihoods.predictive import FEW_OUTPUTS, average
from bayesadam.likelihoods.predictive import rows as as_rows
from bayesadam.predict.call import Call, at_positions, batch_size, evaluating, plain
from bayesadam.predict.draws import output_draws
from bayesadam.predict.moments import Moments, moments, parameters_at_mean
from bayesadam.predict.options import Options, Rows, Top, at_one_position, chosen_positions, is_single
from bayesadam.predict.plan import Plan, plan_for
from bayesadam.predict.sharded import draws_by_module, fits, gathered

_DEFAULT_PROBES = 2
# How many numbers of draws are held at once, where they are reduced to some outputs.
_DRAWN_AT_ONCE = 1 << 28


@dataclass(frozen=True, eq=False)
class _Network:
    """A posterior, its model's call and parameters at the mean, and the options of a prediction."""

    gaussian: Any
    call: Call
    params: Mapping[str, Tensor]
    options: Options

    @property
    def noise(self) -> Tensor | None:
        return self.gaussian.noise_variance if self.options.record.noise else None

    @property
    def settings(self) -> dict[str, Any]:
        return {"temperature": self.gaussian.temperature, "averaged": self.gaussian.averaged}


def component_of(gaussian: Any, inputs: Any, options: Options) -> tuple[Component, str]:
    """f of a batch under a posterior over the weights of one network, and how its moments were computed, in words."""
    gaussian.require_proper()
    gaussian.warn_of_limits()
    inputs = plain(inputs)
    if gaussian.is_sharded:
        generator = options.generator or torch.Generator().manual_seed(common_seed(None, gaussian.mode))
        options = replace(options, generator=generator)
        if fits(gaussian, options.predictive, options.memory_budget):
            with alone_with(gaussian.model), gathered(gaussian) as whole:
                return component_of(whole, inputs, options)
    call = Call(gaussian.model, options.forward)
    with evaluating(gaussian.model):
        if gaussian.is_sharded:
            net = _Network(gaussian, call, {}, options)
            found, plan = _drawn(net, inputs, options.n_samples, lambda n: _module_draws(net, inputs, n))
        else:
            found, plan = _whole(gaussian, call, inputs, options)
    lost = ~as_rows(found.mean).isfinite().all(dim=1)
    if bool(lost.any()):
        numbers = lost.nonzero().flatten().tolist()
        warn(
            f"the outputs of {len(numbers)} of {len(lost)} examples (first number {numbers[0]}) are NaN or infinite, "
            "and so is all that is predicted of them: look for NaN in their inputs"
        )
    return found, plan


def _whole(gaussian: Any, call: Call, inputs: Any, options: Options) -> tuple[Component, str]:
    """Of a model in whole tensors."""
    params = parameters_at_mean(gaussian)
    at_one = is_single(options.positions)
    if at_one:
        call, inputs, options = _at_one_position(call, params, inputs, options)
    plan = plan_for(call, params, inputs)
    if plan.first is not None and (doubt := options.record.doubt(plan.first)) is not None:
        warn(doubt)
    net, chosen = _Network(gaussian, call, params, options), options.choice(plan.shape)
    if options.predictive != "linearised":
        at_once = options.n_samples
        if chosen is not None:
            at_once = max(2, min(at_once, _DRAWN_AT_ONCE // (plan.outputs * batch_size(inputs))))
        return _drawn(net, inputs, at_once, lambda n: _plain_draws(net, inputs, plan, n))
    if chosen is None:
        found, _ = _linearised(net, inputs, plan, None)
        return found, f"linearised, exact: {plan.outputs} backward directions, one for each output"
    if len(plan.shape) == 1:
        found, how = _linearised(net, inputs, plan, chosen)
        return found, how + (", at one position of each example" if at_one else "")
    return _at_each_position(net, inputs, plan, chosen)


def _at_one_position(call: Call, params: Mapping[str, Tensor], inputs: Any, options: Options) -> tuple[Any, Any, Any]:
    """The call, inputs and options of the one position of each example that the options ask for."""
    cut, shape = at_one_position(call, params, inputs)
    position = chosen_positions(options.positions, inputs, shape).to(next(iter(params.values())).device)
    outputs = _indices_at(options.chosen, position) if options.chosen is not None else options.outputs
    return cut, (inputs, position), replace(options, positions=None, outputs=outputs)


def _indices_at(chosen: Any, position: Tensor) -> Any:
    """The outputs chosen at a position, where each position has its own, (batch, positions, k)."""
    by_position = isinstance(chosen, Tensor) and chosen.dim() == 3 and not chosen.is_floating_point()
    return at_positions(chosen, position) if by_position else chosen


def _at_each_position(net: _Network, inputs: Any, plan: Plan, chosen: Top | Tensor) -> tuple[Component, str]:
    """Exact moments of chosen outputs at several positions, one after the other."""
    mask = chosen_positions(net.options.positions, inputs, plan.shape)
    call, _ = at_one_position(net.call, net.params, inputs)
    counts, order = mask.sum(dim=1), mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    most = int(counts.max())
    keep = torch.arange(most, device=counts.device)[None] < counts[:, None]
    own, parts, how = replace(net, call=call), [], ""
    for position in order[:, :most].T:
        there = (inputs, position.to(next(iter(net.params.values())).device))
        found, how = _linearised(own, there, None, _indices_at(chosen, position))
        parts.append(found)
    found = _joined(parts, lambda each: torch.stack(list(each), dim=1)[keep.to(each[0].device)])
    return _by_position(found, net.options, len(mask), plan.shape), f"{how}, at each of up to {most} positions"


def _by_position(found: Component, options: Options, size: int, shape: torch.Size) -> Component:
    """Rows of all positions as (batch, positions…, ...); those of a mask stay rows."""
    if isinstance(options.positions, Tensor):
        return found
    return _joined([found], lambda each: each[0].reshape(size, *shape[:-1], *each[0].shape[1:]))


def _joined(parts: Sequence[Component], of: Callable[[Sequence[Tensor]], Tensor]) -> Component:
    """Components of one kind as one, tensor by tensor; draws keep their own dimension first."""

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Tensor):
            return of(values)
        if isinstance(values[0], Novel | Score):
            names = [field.name for field in fields(values[0])]
            return type(values[0])(*(join([getattr(value, name) for value in values]) for name in names))
        return values[0]

    names = [field.name for field in fields(Component) if field.name != "draws"]
    found = {name: join([getattr(part, name) for part in parts]) for name in names}
    draws = parts[0].draws
    return Component(**found, draws=None if draws is None else torch.stack([of([draw]) for draw in draws]))


# --- the linearised network -----------------------------------------------------------------------------------------


def _rows_of(net: _Network, chosen: Top | Tensor, size: int, outputs: int) -> tuple[Rows, dict[str, Tensor]]:
    """The rows of the outputs chosen, of the rest of a softmax and of probes, and the batch's own tensors for them."""
    options = net.options
    probes = _DEFAULT_PROBES if options.probes is None else options.probes
    rest = options.record.coupled and not options.is_combination
    rows = Rows(
        options.record, rest=rest, probes=probes, temperature=net.gaussian.temperature, noise_variance=net.noise
    )
    return rows.choosing(chosen, size, outputs)


def _linearised(net: _Network, inputs: Any, plan: Plan | None, chosen: Top | Tensor | None) -> tuple[Component, str]:
    """Exact moments of all outputs, or of those chosen where an example's are (outputs,)."""
    gaussian, options, record, rows, given = net.gaussian, net.options, net.options.record, None, {}
    plan = plan_for(net.call, net.params, inputs) if plan is None else plan
    if chosen is not None:
        size, device = batch_size(inputs), next(iter(net.params.values())).device
        rows, given = _rows_of(net, chosen, size, plan.outputs)
        given = {name: tensor.to(device) for name, tensor in given.items()}
        given |= rows.signs(size, plan.outputs, fresh_seed(options.generator) if rows.probes else 0, device)

    def found_of(gaussians: Sequence[Any], params: Mapping[str, Tensor], covariance: bool) -> Moments:
        variances = [each.coordinate_variance.__getitem__ for each in gaussians]
        bases, directions = gaussian.structure.bases, [each.directions for each in gaussians]
        how: Any = {"budget": options.memory_budget, "captured": options.captured, "covariance": covariance}
        return moments(
            net.call, params, variances, inputs, rows=rows, given=given, bases=bases, directions=directions, plan=plan, **how
        )  # fmt: skip

    other = None
    if options.novelty or (options.novelty is None and rows is None and plan.outputs <= FEW_OUTPUTS):
        other = gaussian if options.for_novelty else gaussian.for_novelty
    # Where neither is shrunk by its prior, both have the same mean, and one pass does.
    together = other is not None and all(other.mean[name] is mu for name, mu in gaussian.mean.items())
    blocks = record.coupled or rows is not None
    asked = [gaussian, other] if together and other is not gaussian else [gaussian]
    found = found_of(asked, net.params, options.covariance or (together and blocks))
    of_other, params, novel = found, net.params, None
    if other is not None and not together:
        params = parameters_at_mean(other)
        of_other = found_of([other], params, blocks)
    if other is not None:
        novel = _novel(net, of_other, rows, given, _running_deviation(net.call, params, inputs))
    block = found.covariance[0] if options.covariance and found.covariance is not None else None
    if rows is None:
        plain = Component(found.mean, found.variance[0], block, noise_variance=net.noise, novel=novel, **net.settings)
        return plain, ""
    how = f"linearised, exact: {rows.count} backward directions of {plan.outputs} outputs"
    k, variance = rows.k, found.variance[0]
    mean, noise = _chosen(net, given, found.mean, found.indices)
    component = Component(
        mean,
        variance[:, :k],
        None if block is None else block[:, :k, :k],
        noise_variance=noise,
        novel=novel,
        score=Score.of(variance[:, k + rows.rest :].T / 2) if rows.probes else None,
        outputs=None if options.is_combination else found.indices,
        logits=found.mean if rows.rest else None,
        rest_variance=variance[:, k] if rows.rest else None,
        **net.settings,
    )
    return component, how + (", replayed from a CUDA graph" if found.replayed else "")


def _chosen(
    net: _Network, given: Mapping[str, Tensor], logits: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Means and σ² of outputs by index, (b, k), or of combinations u: u · f and Σ u² σ², 0 where σ² is none or unknown."""
    noise = net.noise if net.noise is None else net.noise.to(logits).expand(logits.shape[-1])
    if "combinations" not in given:
        return logits.gather(1, indices), None if noise is None else noise[indices]
    u = given["combinations"].to(logits)
    mean = torch.einsum("bkc,bc->bk", u, logits)
    return mean, torch.zeros_like(mean) if noise is None else u.square() @ noise


def _novel(
    net: _Network, found: Moments, rows: Rows | None, given: Mapping[str, Tensor], deviation: Tensor | None
) -> Novel:
    """The last of the moments, with variances that grow with the deviation from running statistics.

    Of chosen classes, the rest of the softmax counts as one more class.
    """
    mean, variance, block = found.mean, found.variance[-1], None if found.covariance is None else found.covariance[-1]
    precision = net.options.record.hessian_diagonal(mean, net.gaussian.noise_variance)
    if rows is not None:
        logits, d = mean, rows.k + rows.rest
        mean, _ = _chosen(net, given, logits, found.indices)
        if rows.rest:
            rest = logits.scatter(1, found.indices, -torch.inf).logsumexp(dim=1, keepdim=True)
            mean, precision = torch.cat([mean, rest], dim=1), mean.new_ones(len(mean), d)
        elif "combinations" not in given:
            precision = precision.gather(1, found.indices)
        variance, block = variance[:, :d], None if block is None else block[:, :d, :d]
    if deviation is not None:
        factor = deviation.to(mean)
        variance = variance * factor.view(-1, *[1] * (variance.dim() - 1))
        block = None if block is None else block * factor[:, None, None]
    return Novel(mean, variance, block, precision)


def _running_deviation(call: Call, params: Mapping[str, Tensor], inputs: Any) -> Tensor | None:
    """d(x) = exp mean_l log mean_c (m_lc(x) − μ_lc)²/σ²_lc, (batch,): None without running statistics.

    Over layers l and channels c of batch norm, m the mean of an example's activations over positions, μ and σ² the running
    statistics. Curvature was measured on activations of d ≈ 1 in a layer of single positions, less where m averages many;
    a linear layer's variance grows with the square of its inputs, and so does d.
    """
    layers = [m for m in call.model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    size, found = batch_size(inputs), []

    def take(layer: Any, arguments: tuple[Tensor, ...]) -> None:
        x = arguments[0].detach()
        if x.shape[0] == size:
            means = x.flatten(2).mean(dim=2) if x.dim() > 2 else x
            found.append(((means - layer.running_mean).square() / (layer.running_var + layer.eps)).mean(dim=1))

    handles = [layer.register_forward_pre_hook(take) for layer in layers]
    try:
        with torch.no_grad():
            if layers:
                call(params, inputs)
    finally:
        for handle in handles:
            handle.remove()
    tiny = torch.finfo(torch.float32).tiny
    return torch.stack([d.float().clamp(min=tiny).log() for d in found]).mean(dim=0).exp() if found else None


def score_of(gaussian: Any, inputs: Any, options: Options) -> Score:
    """½ tr(H Cov f) of each example, summed over the positions asked for, by random directions of the outputs."""
    if options.probes == 0:
        raise SettingError("a score takes at least one probe: probes=1, or 2 for its standard error")
    gaussian.require_proper()
    gaussian.warn_of_limits()
    inputs, call, positions = plain(inputs), Call(gaussian.model, options.forward), {}
    with evaluating(gaussian.model):
        params = parameters_at_mean(gaussian)
        device = next(iter(params.values())).device
        if is_single(options.positions):
            call, inputs, options = _at_one_position(call, params, inputs, options)
        plan = plan_for(call, params, inputs)
        if options.positions is not None and len(plan.shape) > 1:
            positions["positions"] = chosen_positions(options.positions, inputs, plan.shape).to(device)
        net = _Network(gaussian, call, params, options)
        rows = Rows(
            options.record,
            probes=_DEFAULT_PROBES if options.probes is None else options.probes,
            temperature=gaussian.temperature,
            shape=plan.shape,
            noise_variance=net.noise,
        )
        signs = rows.signs(batch_size(inputs), plan.outputs, fresh_seed(options.generator), device)
        found = moments(
            call,
            params,
            [gaussian.coordinate_variance.__getitem__],
            inputs,
            rows=rows,
            given={**signs, **positions},
            budget=options.memory_budget,
            bases=gaussian.structure.bases,
            directions=[gaussian.directions],
            plan=plan,
            captured=options.captured,
        )
    return Score.of(found.variance[0].T / 2)


# --- draws ----------------------------------------------------------------------------------------------------------


def _plain_draws(net: _Network, inputs: Any, plan: Plan, n: int) -> tuple[Tensor, Tensor]:
    o = net.options
    return output_draws(net.gaussian, net.call, net.params, inputs, plan, o.predictive, n, o.generator, o.memory_budget)


def _module_draws(net: _Network, inputs: Any, n: int) -> tuple[Tensor, Tensor]:
    return draws_by_module(net.gaussian, net.call, inputs, net.options.predictive, n, net.options.generator)


def _drawn(
    net: _Network, inputs: Any, at_once: int, draw: Callable[[int], tuple[Tensor, Tensor]]
) -> tuple[Component, str]:
    """Draws of all outputs, some at a time, reduced to those chosen, and their moments.

    The mean of the linearised network is known; that of the network itself is estimated from the draws.
    """
    options, n = net.options, net.options.n_samples
    drawn, centre = draw(at_once)
    sampled = options.predictive == "sampled"
    if sampled and (collapse := options.record.collapse(drawn, centre)) is not None:
        warn(
            f"{collapse}: the posterior is too wide to be sampled. Calibrate it with predictive='sampled', raise its "
            "prior_precision, or use predictive='linearised'",
            CollapsedPredictionWarning,
        )
    size, shape = len(centre), centre.shape[1:]
    chosen = options.choice(shape)
    logits, basis, rest = centre.reshape(size, -1), None, False
    if chosen is not None:
        logits = centre.reshape(-1, shape[-1])
        if isinstance(chosen, Tensor) and chosen.dim() > 1 + options.is_combination:
            by_position = chosen.dim() == 3 and not options.is_combination
            chosen = chosen.flatten(0, 1) if by_position else chosen.repeat_interleave(len(logits) // size, dim=0)
        rows, given = _rows_of(net, chosen, len(logits), shape[-1])
        basis, rest = replace(rows, probes=0)(logits, given), rows.rest
    kept, scores, total, done = [], [], torch.zeros_like(logits), 0
    while True:
        away = drawn.reshape(len(drawn), *logits.shape) - logits
        total += away.sum(dim=0)
        kept.append(away if basis is None else basis.of(away))
        if basis is not None:
            scores.append(_quadratic(net, logits, away))
        done += len(drawn)
        if done >= n:
            break
        drawn, _ = draw(max(2, min(at_once, n - done)))
    away = torch.cat(kept)
    shift = away.mean(dim=0) if sampled else torch.zeros_like(away[0])
    centred, count = away - shift, len(away) - sampled
    variance = centred.square().sum(dim=0) / count
    how = f"{options.predictive}: {len(away)} draws"
    if basis is None:
        block = torch.einsum("nbc,nbd->bcd", centred, centred) / count if options.covariance else None
        moved = [part.view(*part.shape[:-1], *shape) for part in (logits + shift, variance, logits + away)]
        moved_mean, moved_variance, draws = moved
        return Component(moved_mean, moved_variance, block, draws, noise_variance=net.noise, **net.settings), how
    k = away.shape[2] - rest
    mean, noise = _chosen(net, given, logits, basis.indices)
    part = centred[..., :k]
    found = Component(
        mean + shift[:, :k],
        variance[:, :k],
        torch.einsum("nbk,nbl->bkl", part, part) / count if options.covariance else None,
        mean + away[..., :k],
        noise_variance=noise,
        score=Score.of(torch.cat(scores)),
        outputs=None if options.is_combination else basis.indices,
        logits=(logits + total / len(away) if sampled else logits) if rest else None,
        rest_variance=away[..., k].square().mean(dim=0) if rest else None,
        **net.settings,
    )
    if len(shape) > 1:
        mask = chosen_positions(options.positions, inputs, shape).flatten()
        if not bool(mask.all()):
            found = _joined([found], lambda each: each[0][mask.to(each[0].device)])
        found = _by_position(found, options, size, shape)
    return found, f"{how} of all outputs"


def _quadratic(net: _Network, logits: Tensor, away: Tensor) -> Tensor:
    """½ awayᵀ H away of each draw, (n, b), H the Hessian of −log p at the logits."""
    if not net.options.record.coupled:
        hessian = net.options.record.hessian_diagonal(logits, net.gaussian.noise_variance)
        return (hessian * away.square()).sum(dim=2) / 2
    t = net.gaussian.temperature
    probs = (logits / t).softmax(dim=-1)
    return ((probs * away.square()).sum(dim=2) - (probs * away).sum(dim=2).square()) / (2 * t**2)


# --- mixtures -------------------------------------------------------------------------------------------------------


def mean_outputs(gaussian: Any, inputs: Any, options: Options) -> Tensor:
    """f(x; μ), (batch, ...), in float32 or wider."""
    call = Call(gaussian.model, options.forward)
    with evaluating(gaussian.model), torch.no_grad():
        found = call(parameters_at_mean(gaussian), plain(inputs))
    return found.to(torch.promote_types(found.dtype, torch.float32))


def with_common_outputs(gaussians: Sequence[Any], weights: Sequence[float], inputs: Any, options: Options) -> Options:
    """Where the largest outputs are asked for, options that ask every network for the largest of their average."""
    if not isinstance(options.chosen, Top) and not options.has_many(torch.Size([10**9])):
        return options
    each = [mean_outputs(gaussians[0], inputs, options)]
    top, record = options.choice(each[0].shape[1:]), options.record
    if not isinstance(top, Top):
        return options
    each += [mean_outputs(gaussian, inputs, options) for gaussian in gaussians[1:]]
    mean = average(weights, [f.softmax(dim=-1) if record.coupled else record.locations(f) for f in each])
    return replace(options, outputs=mean.topk(min(top.k, mean.shape[-1]), dim=-1).indices)
