"""From a Gaussian over weights and a batch to a `Component`, the outputs f of one network under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bayesadam._alone import alone_with
from bayesadam._checks import count
from bayesadam._warnings import warn
from bayesadam.errors import CollapsedPredictionWarning, MatchError, SettingError
from bayesadam.gaussian.noise import fresh_seed
from bayesadam.gaussian.structure import Named
from bayesadam.likelihoods import Likelihood, LikelihoodName, Link, likelihood
from bayesadam.likelihoods.component import Component, Score
from bayesadam.likelihoods.predictive import average
from bayesadam.predict.call import Call, Forward, at_positions, batch_size, evaluating, plain
from bayesadam.predict.draws import output_draws
from bayesadam.predict.moments import DEFAULT_BUDGET, Moments, Rows, Top, moments, parameters_at_mean
from bayesadam.predict.plan import Plan, at_one_position, plan_for
from bayesadam.predict.sharded import gathered

PredictiveKind = Literal["linearised", "sampled", "linearised-sampled", "forward"]
Positions = Literal["all", "last"] | Tensor
Outputs = Literal["all", "top"] | int | Top | Tensor | Sequence[int]
# Of more classes than these the ten largest are predicted, unless others are asked for.
MANY_CLASSES = 100
_DEFAULT_PROBES = 2
# How many numbers of draws are held at once, where they are reduced to some outputs.
_DRAWN_AT_ONCE = 1 << 28


@dataclass(frozen=True, eq=False)
class Options:
    """The keywords of `Distribution.predict`, checked; `chosen` are the largest outputs, indices or combinations."""

    likelihood: LikelihoodName
    predictive: PredictiveKind = "linearised"
    n_samples: int = 30
    covariance: bool = False
    link: Link = "probit"
    forward: Forward | None = None
    generator: torch.Generator | None = None
    memory_budget: int = DEFAULT_BUDGET
    outputs: Outputs | None = None
    positions: Positions | None = None
    probes: int | None = None
    shift: bool = True
    joint: bool = False
    chosen: Top | Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        likelihood(self.likelihood)
        for name, allowed in (("predictive", get_args(PredictiveKind)), ("link", get_args(Link))):
            if getattr(self, name) not in allowed:
                raise SettingError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        found: Any = self.outputs
        if isinstance(found, int) and not isinstance(found, bool):
            found = Top(found)
        if isinstance(found, str) or not isinstance(found, Top | Tensor | Sequence | None):
            if found not in ("all", "top"):
                raise SettingError(
                    "outputs must be 'all', 'top', how many of the largest, indices, or the rows of a matrix of "
                    f"combinations, got {found!r}"
                )
            found = Top() if found == "top" else None
        elif isinstance(found, Sequence):
            found = torch.tensor(found, dtype=torch.int64)
        if isinstance(found, Tensor) and (
            found.dtype == torch.bool or not 1 + found.is_floating_point() <= found.dim() <= 3
        ):
            raise SettingError(
                "outputs must be whole numbers, (k,), (batch, k) or (batch, positions, k), or real combinations, "
                f"(k, outputs) or (batch, k, outputs), got {found.dtype} of shape {tuple(found.shape)}"
            )
        object.__setattr__(self, "chosen", found)
        if not isinstance(self.positions, Tensor) and self.positions not in (None, "all", "last"):
            raise SettingError(f"positions must be 'all', 'last', indices or a boolean mask, got {self.positions!r}")
        asked = self.covariance or self.chosen is not None or self.positions is not None
        if self.predictive == "forward" and asked:
            raise SettingError("predictive='forward' has the mean alone: covariance, outputs, positions need another")
        if self.joint and (self.predictive == "forward" or self.chosen is not None or self.positions is not None):
            raise SettingError(
                "joint=True is of all outputs of every input, by moments or draws: leave out outputs= and positions=, "
                "and predictive='forward'"
            )
        count("n_samples", self.n_samples, "draws")
        count("memory_budget", self.memory_budget, "bytes")
        if self.probes is not None:
            count("probes", self.probes, "random directions", least=0)

    @property
    def record(self) -> Likelihood[Any]:
        """The likelihood of that name."""
        return likelihood(self.likelihood)

    @property
    def is_combination(self) -> bool:
        """Whether linear combinations of outputs are asked for."""
        return isinstance(self.chosen, Tensor) and self.chosen.is_floating_point()

    @property
    def keeps_logits(self) -> bool:
        """Whether probabilities of chosen classes need the logits of all."""
        return self.record.coupled and not self.is_combination

    def choice(self, shape: torch.Size) -> Top | Tensor | None:
        """The outputs asked for where an example's have that shape; the largest of many classes; None for all."""
        if (self.chosen is not None or self.positions is not None) and not shape:
            raise SettingError("outputs= and positions= choose among several: this network has one number an example")
        if self.chosen is not None:
            return self.chosen
        if self.has_many(shape):
            return Top()
        return None if self.positions is None else torch.arange(shape[-1] // self.record.outputs_per_target)

    def has_many(self, shape: torch.Size) -> bool:
        """Whether the largest outputs alone are looked at: there are many classes, and nothing else was asked for."""
        asked = self.outputs is not None or self.covariance or self.joint
        many = bool(shape) and shape[-1] > MANY_CLASSES
        return many and self.record.coupled and self.predictive == "linearised" and not asked


def chosen_positions(positions: Positions | None, inputs: Any, shape: torch.Size) -> Tensor:
    """Indices, (batch,), the last by the inputs' `attention_mask`, or a mask, (batch, positions), of such outputs."""
    size, count = batch_size(inputs), shape[:-1].numel()
    if len(shape) < 2:
        raise MatchError(
            f"positions are of outputs (batch, positions, outputs): an example's have shape {tuple(shape)}"
        )
    if positions is None or (isinstance(positions, str) and positions == "all"):
        return torch.ones(size, count, dtype=torch.bool)
    if isinstance(positions, str):
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if mask is None or mask.shape != (size, count):
            return torch.full((size,), count - 1)
        last: Tensor = (mask.bool() * torch.arange(count, device=mask.device)).amax(dim=1)
        return last
    if positions.dtype == torch.bool:
        if positions.reshape(len(positions), -1).shape != (size, count):
            raise MatchError(f"a mask of positions has shape {(size, *shape[:-1])}, got {tuple(positions.shape)}")
        return positions.reshape(size, -1)
    if positions.shape != (size,) or positions.is_floating_point():
        raise MatchError(f"positions by index have shape ({size},), one for each example, got {tuple(positions.shape)}")
    if not bool(((positions >= -count) & (positions < count)).all()):
        raise MatchError(f"positions are from 0 to {count - 1}, got {int(positions.min())} to {int(positions.max())}")
    return positions % count


# --- predictions --------------------------------------------------------------------------------------------------


def component_of(gaussian: Any, inputs: Any, options: Options) -> tuple[Component, str]:
    """f of a batch under a posterior over the weights of one network, and how its moments were computed, in words."""
    gaussian.require_proper()
    inputs = plain(inputs, graph=True)
    if gaussian.is_sharded:
        generator = options.generator or torch.Generator().manual_seed(fresh_seed(None, gaussian.mode))
        options = replace(options, generator=generator)
        with alone_with(gaussian.model), gathered(gaussian, options.memory_budget) as whole:
            return component_of(whole, inputs, options)
    with evaluating(gaussian.model):
        net = Network.of(gaussian, inputs, options)
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
    with evaluating(gaussian.model):
        net = Network.of(gaussian, plain(inputs), options)
        (rows, given), shape = net.probes(), net.plan.shape
        if net.options.positions is not None and len(shape) > 1:
            given["positions"] = chosen_positions(net.options.positions, net.inputs, shape).to(net.like.device)
        found = net.moments(rows=replace(rows, shape=shape), given=given)
    return Score.of(found.variance[0].T / 2)


@dataclass(frozen=True, eq=False)
class Network:
    """A posterior's model on a batch; `inputs` are pairs with a position where one of each example is asked for."""

    gaussian: Any
    options: Options
    call: Call
    params: Named
    inputs: Any
    plan: Plan

    @classmethod
    def of(cls, gaussian: Any, inputs: Any, options: Options) -> Network:
        """The network that the options ask for."""
        call, params, positions = Call(gaussian.model, options.forward), parameters_at_mean(gaussian), options.positions
        by_index = isinstance(positions, Tensor) and positions.dtype != torch.bool
        if by_index or (isinstance(positions, str) and positions == "last"):
            call, shape = at_one_position(call, params, inputs)
            position = chosen_positions(positions, inputs, shape)
            outputs = options.outputs if options.chosen is None else _chosen_at(options.chosen, position)
            options = replace(options, positions=None, outputs=outputs)
            inputs = (inputs, position.to(next(iter(params.values())).device))
        return cls(gaussian, options, call, params, inputs, plan_for(call, params, plain(inputs)))

    @property
    def like(self) -> Tensor:
        """A parameter, of the type and on the device of all."""
        return next(iter(self.params.values()))

    @property
    def noise(self) -> Tensor | None:
        """σ², or the most that noise can be."""
        found: Tensor | None = self.gaussian.noise_variance
        return found

    def probes(self) -> tuple[Rows, dict[str, Tensor]]:
        """Random directions of the outputs, and their random signs for this batch, (batch, probes, outputs)."""
        n = _DEFAULT_PROBES if self.options.probes is None else self.options.probes
        t = self.gaussian.temperature
        rows = Rows(self.options.record, probes=n, temperature=t, noise_variance=self.noise)
        if n == 0:
            return rows, {}
        generator = torch.Generator(device=self.like.device).manual_seed(fresh_seed(self.options.generator))
        how: Any = {"generator": generator, "device": self.like.device, "dtype": torch.int8}
        return rows, {"signs": 2 * torch.randint(2, (batch_size(self.inputs), n, self.plan.outputs), **how) - 1}

    def moments(self, **options: Any) -> Moments:
        """Those of the linearised network under the posterior."""
        q = self.gaussian
        how: Any = {"structure": q.structure, "plan": self.plan, **options}
        variances, budget = [q.coordinate_variance.__getitem__], self.options.memory_budget
        return moments(self.call, self.params, variances, self.inputs, budget=budget, **how)


def _chosen_at(chosen: Any, position: Tensor) -> Any:
    """The outputs chosen at a position, where each position has its own, (batch, positions, k)."""
    by_position = isinstance(chosen, Tensor) and chosen.dim() == 3 and not chosen.is_floating_point()
    return at_positions(chosen, position) if by_position else chosen


def _at_each_position(net: Network, chosen: Top | Tensor) -> tuple[Component, str]:
    """Exact moments of chosen outputs at several positions, one after the other."""
    mask, shape = chosen_positions(net.options.positions, net.inputs, net.plan.shape), net.plan.shape
    counts, order = mask.sum(dim=1), mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    most, how, parts = int(counts.max()), "", []
    call, _ = at_one_position(net.call, net.params, net.inputs)
    for position in order[:, :most].T:
        inputs = (net.inputs, position.to(net.like.device))
        there = replace(net, call=call, inputs=inputs, plan=plan_for(call, net.params, inputs))
        found, how = _linearised(there, _chosen_at(chosen, position))
        parts.append(found)
    keep = torch.arange(most, device=counts.device)[None] < counts[:, None]

    def joined(values: Sequence[Any]) -> Any:
        first: Any = values[0]
        if isinstance(first, Component | Score):
            names = [f.name for f in fields(first)]
            return type(first)(*(joined([getattr(value, name) for value in values]) for name in names))
        if not isinstance(first, Tensor):
            return first
        by_position = torch.stack(list(values), dim=1)
        if isinstance(net.options.positions, Tensor):
            return by_position[keep.to(first.device)]
        return by_position.reshape(len(mask), *shape[:-1], *by_position.shape[2:])

    return joined(parts), f"{how}, at each of up to {most} positions"


# --- the linearised network -----------------------------------------------------------------------------------------


def _linearised(net: Network, chosen: Top | Tensor | None) -> tuple[Component, str]:
    """Exact moments of all outputs, or of those chosen where an example's are (outputs,)."""
    gaussian, options, rows = net.gaussian, net.options, None
    given: dict[str, Tensor] = {}
    if chosen is not None:
        rows, signs = net.probes()
        rows, given = rows.choosing(chosen, batch_size(net.inputs), net.plan.outputs)
        given = {name: tensor.to(net.like.device) for name, tensor in given.items()} | signs
    found = net.moments(rows=rows, given=given, covariance=options.covariance, joint=options.joint)
    block, joint = (None if each is None else each[0] for each in (found.covariance, found.joint))
    settings: Any = {"temperature": gaussian.temperature, "averaged": gaussian.averaged}
    variance, done = found.variance[0], net.plan.outputs if rows is None else rows.count
    how = f"linearised, exact: {done} backward directions"
    if rows is None:
        every = Component(found.mean, variance, block, joint=joint, noise_variance=net.noise, **settings)
        return every, f"{how}, one for each output"
    k, (mean, noise) = rows.k, _chosen(net.noise if options.record.noise else None, given, found.mean, found.indices)
    some = Component(
        mean,
        variance[:, :k],
        None if block is None else block[:, :k, :k],
        noise_variance=noise,
        score=Score.of(variance[:, k:].T / 2) if rows.probes else None,
        outputs=None if options.is_combination else found.indices,
        logits=found.mean if options.keeps_logits else None,
        **settings,
    )
    return some, f"{how} of {net.plan.outputs} outputs"


def _chosen(noise: Tensor | None, given: Named, logits: Tensor, indices: Tensor) -> tuple[Tensor, Tensor | None]:
    """Means and σ² of outputs by index, (b, k), or of combinations u: u · f and Σ u² σ², 0 without a σ²."""
    noise = noise if noise is None else noise.to(logits).expand(logits.shape[-1])
    if "combinations" not in given:
        return logits.gather(1, indices), None if noise is None else noise[indices]
    u = given["combinations"].to(logits)
    mean = torch.einsum("bkc,bc->bk", u, logits)
    return mean, torch.zeros_like(mean) if noise is None else u.square() @ noise


# --- draws ----------------------------------------------------------------------------------------------------------


def _drawn(net: Network, chosen: Top | Tensor | None) -> tuple[Component, str]:
    """Draws of all outputs, some at a time, reduced to those chosen, and moments; the linearised mean is known."""
    gaussian, options, record = net.gaussian, net.options, net.options.record
    n, sampled = options.n_samples, options.predictive == "sampled"
    numbers = net.plan.outputs * batch_size(net.inputs)
    at_once = n if chosen is None else max(2, min(n, _DRAWN_AT_ONCE // numbers))
    drawn, centre = output_draws(net, at_once)
    if sampled and n > 1 and (collapse := record.collapse(drawn, centre)) is not None:
        warn(
            f"{collapse}: the posterior is too wide to be sampled. Calibrate it with predictive='sampled', raise its "
            "prior_precision, or use predictive='linearised'",
            CollapsedPredictionWarning,
        )
    # Of one draw of the network itself no variance is known: 0/0.
    size, shape, freedom = len(centre), centre.shape[1:], n - sampled
    settings: Any = {"temperature": gaussian.temperature, "averaged": gaussian.averaged}
    if chosen is None:
        mean = drawn.mean(dim=0) if sampled else centre
        centred = (drawn - mean).reshape(n, size, -1)
        asked = options.covariance or options.joint
        block = torch.einsum("nbc,nbd->bcd", centred, centred) / freedom if asked else None
        joint = centred.flatten(1).T @ centred.flatten(1) / freedom if options.joint else None
        variance = centred.square().sum(dim=0).div(freedom).view_as(mean)
        found = Component(mean, variance, block, drawn, joint=joint, noise_variance=net.noise, **settings)
        return found, f"{options.predictive}: {n} draws"
    logits = centre.reshape(-1, shape[-1])
    if isinstance(chosen, Tensor) and chosen.dim() > 1 + options.is_combination:
        by_position = chosen.dim() == 3 and not options.is_combination
        chosen = chosen.flatten(0, 1) if by_position else chosen.repeat_interleave(len(logits) // size, dim=0)
    rows, given = Rows(record).choosing(chosen, len(logits), shape[-1])
    basis, t = rows(logits, given), gaussian.temperature
    probs, total = (logits / t).softmax(dim=-1), torch.zeros_like(logits)
    kept, scores = [], []
    for done in range(0, n, at_once):
        drawn = output_draws(net, min(at_once, n - done))[0] if done else drawn
        away = drawn.reshape(len(drawn), *logits.shape) - logits
        total += away.sum(dim=0)
        along = torch.einsum("mbc,nbc->nbm", basis.dense.to(away), away)
        by_index = away.gather(-1, basis.indices.expand(len(away), -1, -1))
        kept.append(torch.cat([by_index, along], dim=-1))
        # ½ awayᵀ H away, H the Hessian of −log p at the logits.
        if record.coupled:
            curved = ((probs * away.square()).sum(dim=2) - (probs * away).sum(dim=2).square()) / t**2
        else:
            curved = (record.hessian_diagonal(logits, gaussian.noise_variance) * away.square()).sum(dim=2)
        scores.append(curved / 2)
    away = torch.cat(kept)
    shift = away.mean(dim=0) if sampled else torch.zeros_like(away[0])
    mean, noise = _chosen(net.noise if options.record.noise else None, given, logits, basis.indices)
    mask = chosen_positions(options.positions, net.inputs, shape).flatten() if len(shape) > 1 else None

    def there(rows: Any, dim: int = 0) -> Any:
        """At the positions asked for: (batch, positions…, ...), or the rows of a mask."""
        if mask is None or rows is None:
            return rows
        if isinstance(options.positions, Tensor):
            return rows.movedim(dim, 0)[mask.to(rows.device)].movedim(0, dim)
        return rows.unflatten(dim, (size, *shape[:-1]))

    found = Component(
        there(mean + shift),
        there((away - shift).square().sum(dim=0) / freedom),
        there(torch.einsum("nbk,nbl->bkl", away - shift, away - shift) / freedom) if options.covariance else None,
        there(mean + away, 1),
        noise_variance=there(noise),
        score=Score.of(there(torch.cat(scores), 1)),
        outputs=None if options.is_combination else there(basis.indices),
        logits=there(logits + total / n if sampled else logits) if options.keeps_logits else None,
        **settings,
    )
    return found, f"{options.predictive}: {n} draws of all outputs"


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
