"""`predict`, `novelty` and `epistemic`, of a posterior and of a mixture of them."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesadam._progress import progress
from bayesadam._warnings import warn
from bayesadam.errors import InputRangeWarning, MatchError, SettingError
from bayesadam.gaussian.noise import fresh_seed, stream_seed
from bayesadam.leverage import Ratios, observed
from bayesadam.likelihoods import Link, Predictive, agreed
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.likelihoods.component import Component, Score
from bayesadam.likelihoods.predictive import average
from bayesadam.posterior.inputs import departure, inside
from bayesadam.predict import prediction
from bayesadam.predict.call import Forward, for_model, inputs_of, is_loader
from bayesadam.predict.moments import DEFAULT_BUDGET
from bayesadam.predict.prediction import Options, Outputs, Positions, PredictiveKind


class Distribution(ABC):
    """q(θ) over named weights, of one network or of several, its `members` with `weights` of sum 1."""

    members: Any
    weights: Any
    likelihood: Any
    calibration: Any

    def predict(
        self,
        inputs: Any,
        *,
        likelihood: str | None = None,
        predictive: PredictiveKind | None = None,
        n_samples: int = 30,
        covariance: bool = False,
        link: Link = "probit",
        forward: Forward | None = None,
        generator: torch.Generator | None = None,
        memory_budget: int = DEFAULT_BUDGET,
        outputs: Outputs | None = None,
        positions: Positions | None = None,
        probes: int | None = None,
        shift: bool = True,
        joint: bool = False,
        method: PredictiveKind | None = None,
    ) -> Any:
        """The predictive distribution of a batch; the model is as before when it returns, or raises.

        Of a loader, or any other iterable of batches, an iterator of predictives, one for each batch:

            probs = torch.cat([p.probs for p in posterior.predict(loader)])

        Targets in its batches are left out: what a mapping or a named tuple has under a label's name, else the last of
        two or more, as `calibrate` finds them. Batches are moved to the model's device, and draws are new for each.
        Inputs that have left the range of those that `calibrate` saw are warned of, once (`InputRangeWarning`).

        Of a model sharded by FSDP2 every process predicts its own batch, with equal options and generators. The whole
        posterior is gathered for the call, within the memory budget, and runs without FSDP2's mixed precision.

        | predictive             | f                          | cost                                      |
        |------------------------|----------------------------|-------------------------------------------|
        | `"linearised"`         | N(f(x; μ), J Σ Jᵀ), exact  | a forward pass, a backward one per output |
        | `"linearised-sampled"` | f(x; μ) + J (θ − μ), θ ~ q | a forward-mode product per draw           |
        | `"sampled"`            | f(x; θ), θ ~ q             | a forward pass per draw                   |
        | `"forward"`            | N(f(x; μ), v r)            | a forward pass                            |

        Where the inputs require gradients, moments and draws have them, at the cost of the Jacobian's rows. Leverage,
        by which a calibrated posterior grows, has them too.

        A mixture's is p(y) = Σ π_m p_m(y), with `n_samples` of each member. The draws of `"sampled"` are of each
        example by itself: a network of linear layers alone, under a diagonal posterior, has its activations drawn,
        independently from example to example, and not one θ for the batch. Other threads that use the model wait.

        Args:
            inputs: a tensor, a tuple or list of them (`model(*inputs)`) or a mapping (`model(**inputs)`); the batch
                comes first. Arrays of numpy may stand for tensors. Or a loader: a `DataLoader`, a generator, or a list
                of tuples, lists or mappings.
            likelihood: as `Posterior.from_optimizer` takes it; None for the posterior's own.
            predictive: see the table; r is the relative leverage of the input, and v fitted by
                `calibrate(..., predictive="forward")`. Classes are at T(x) there. None is `"forward"` of what was
                calibrated for it, else `"linearised"`, which of classes calibrated by temperature runs the mean network
                alone too.
            n_samples: draws of the sampling predictives; variances of one draw are unknown, or of little use.
            covariance: the outputs' whole covariance, (batch, outputs, outputs); without it `link="sampling"`,
                `mutual_information()` and a heteroscedastic density take outputs as independent of each other.
            link: how logits become probabilities where f is Gaussian: `"probit"` or `"sampling"`.
            forward: `forward(model, inputs)` for models whose call is unusual.
            generator: makes the draws reproducible.
            memory_budget: bytes that activations, gradients and draws may take; work is cut to fit.
            outputs: which outputs: `"all"`, `"top"` for the ten largest of every position, `Top(k)`, their indices,
                (k,) or (batch, k), or linear combinations, the rows of a real matrix (k, outputs), such as a margin.
                Moments are then of these. Probabilities are of all classes, the others' logits at their mean.
                Combinations come as a regression of their values. None is `"all"`, or `"top"` of more than a hundred
                classes under `"linearised"`.
            positions: which positions, of outputs (batch, positions, outputs): `"last"`, by the inputs'
                `attention_mask` where there is one, or an index for each example, (batch,): moments are then (batch,
                k). A boolean mask, (batch, positions), gives a row for every position in it. None is `"all"`.
                `"linearised"` takes several one after the other; `"linearised-sampled"` draws all at once.
            probes: random directions of the outputs, from which `epistemic` is estimated; None for 2 where outputs are
                chosen, else none.
            shift: whether probabilities at a temperature grow humble with an example's leverage, T(x) = T √((1 + r)/2);
                False leaves that out, T(x) = T, which is close to temperature scaling: T was fitted with r.
            joint: `joint_covariance` too, between the inputs of a batch; draws are then of one θ for the whole batch.
            method: the old name of `predictive`.
        """
        if method is not None:
            warn(f"predict(method={method!r}) is now called predict(predictive={method!r})", DeprecationWarning)
        name, forward_only = self._likelihood(likelihood), all(q.spread is not None for q in self.members)
        kind = method or predictive or ("forward" if forward_only else "linearised")
        how = covariance, link, forward, generator, memory_budget
        options = Options(name, kind, n_samples, *how, outputs, positions, probes, shift, joint)
        batches = self._watched(self._batches(inputs, "predict", graph=True))
        found = (predictive_of(self, batch, options) for batch in batches)
        return found if is_loader(inputs) else next(found)

    def draw(
        self,
        seed: int = 0,
        *,
        predictive: PredictiveKind = "linearised",
        likelihood: str | None = None,
        forward: Forward | None = None,
        memory_budget: int = DEFAULT_BUDGET,
    ) -> Function:
        """A function drawn from the posterior: from inputs to outputs f, (batch, ...), the same at every call.

        It has gradients with respect to inputs that require them. Of a mixture it is one member's, picked by weight.

        Args:
            predictive: `"linearised"`, f(x; μ) + J (θ − μ), the function whose moments `predict` has; or `"sampled"`,
                the network itself with the weights θ.
        """
        kinds: dict[str, PredictiveKind] = {"linearised": "linearised-sampled", "sampled": "sampled"}
        if predictive not in kinds:
            raise SettingError(f"a drawn function is one of {tuple(kinds)}, got predictive={predictive!r}")
        how: Any = {"forward": forward, "memory_budget": memory_budget, "joint": True}
        options = Options(self._likelihood(likelihood), kinds[predictive], 1, **how)
        number = picks(self.weights, 1, seed)[0]
        return Function(self.members[number], options, stream_seed(seed, "member", number))

    def novelty(
        self, inputs: Any, *, likelihood: str | None = None, reference: Any = None, forward: Forward | None = None
    ) -> Tensor:
        """How unlike the training data each example is, (batch,), as `predict(...).novelty`; one forward pass.

        Of a loader, as `predict` takes it, the scores of all its examples, one after the other.

        It rests on leverage relative to familiar inputs: those that `calibrate` saw, or a batch or a loader of some as
        `reference`, ten will do. Without either the inputs are their own reference, which ranks them.
        """
        options = Options(self._likelihood(likelihood), forward=forward)
        batches = list(self._batches(inputs, "novelty"))
        familiar = batches if reference is None else list(self._batches(reference, "reference"))
        each = []
        for member in self.members:
            if reference is not None or member.leverage is None:
                member = member.relative_to(familiar, forward)
            components = (forward_component(member, batch, options) for batch in batches)
            each.append(torch.cat([options.record.predictive([c]).novelty for c in components]))
        return average(self.weights, each)

    def epistemic(
        self,
        inputs: Any,
        *,
        likelihood: str | None = None,
        positions: Positions | None = None,
        probes: int = 2,
        forward: Forward | None = None,
        generator: torch.Generator | None = None,
        memory_budget: int = DEFAULT_BUDGET,
    ) -> Score:
        """½ tr(H Cov[f]) of each example, summed over positions: `value` and its standard `error`, (batch,).

        A backward pass for each of a few random directions of the outputs, however many these are; unbiased. Of a
        loader, as `predict` takes it, the scores of all its examples, one after the other. Of a mixture it is
        Σ π_m of the members', and of classes what members disagree on, which is exact.
        """
        how: Any = {"forward": forward, "generator": generator, "memory_budget": memory_budget}
        options = Options(self._likelihood(likelihood), outputs=[], positions=positions, probes=probes, **how)
        each = [_score(self, batch, options) for batch in self._batches(inputs, "epistemic")]
        return Score(torch.cat([one.value for one in each]), torch.cat([one.error for one in each]))

    def _likelihood(self, given: str | None) -> str:
        """The likelihood given, or the posterior's own; they must not contradict each other."""
        kept = [q.likelihood for q in (self, *self.members)]
        kept += [q.calibration.likelihood for q in (self, *self.members) if q.calibration is not None]
        return agreed(given, next((name for name in kept if name is not None), None))

    def _watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, with a warning before the first that has left the range of the held-out inputs."""
        if moved := [name for q in self.members for name in q.moved_statistics]:
            warn(
                f"read the posterior again, or train a copy of the model: running statistics of its batch norms have "
                f"changed since (first {moved[0]!r}), and predictions are neither the old network's nor the new one's"
            )
        reports = [q.calibration for q in (self, *self.members) if q.calibration is not None]
        ranges = reports[0].inputs if reports else ()
        for batch in batches:
            if ranges and (difference := departure(ranges, batch)) is not None:
                warn(difference, InputRangeWarning)
                ranges = ()
            yield batch

    def _batches(self, inputs: Any, what: str, *, graph: bool = False) -> Iterator[Any]:
        """The inputs of every batch of a loader, or of the one given."""
        model, batch = self.members[0].model, None
        if not is_loader(inputs):
            yield for_model(inputs, model, graph=graph)
            return
        for batch in progress(inputs, what):
            yield inputs_of(batch, model)
        if batch is None and what != "predict":
            raise MatchError("there is nothing to score: the loader gave no batch (a generator that was used up?)")


@dataclass(frozen=True, eq=False)
class Function:
    """One function from a posterior of one network, by the weights that `seed` draws."""

    member: Any
    options: Options
    seed: int

    def __call__(self, inputs: Any) -> Tensor:
        """f of a batch, (batch, ...)."""
        options = replace(self.options, generator=torch.Generator().manual_seed(self.seed))
        inputs = for_model(inputs, self.member.model, graph=True)
        drawn = component_of_member(self.member, inputs, options)[0].draws
        assert drawn is not None
        return drawn[0]


def picks(weights: Sequence[float], n: int, seed: int) -> list[int]:
    """n members' numbers, drawn with probabilities π from a stream of their own."""
    random = np.random.Generator(np.random.SFC64(stream_seed(seed, "pick")))
    return list(map(int, np.searchsorted(np.cumsum(weights)[:-1], random.random(n), side="right")))


def stream_of(seed: int, number: int) -> torch.Generator:
    """A member's own random numbers."""
    return torch.Generator().manual_seed(stream_seed(seed, "member", number))


def predictive_of(q: Distribution, inputs: Any, options: Options) -> Predictive:
    """p(y) = Σ π_m p_m(y) of a batch; `n_samples` are drawn from each member, from a stream of its own."""
    members, record = q.members, likelihood_of("regression") if options.is_combination else options.record
    streams = _streams(q, options)
    if len(members) > 1:
        for member in members:
            member.require_proper()
        if not all(_is_forward(member, options) for member in members):
            common = prediction.with_common_outputs(members, q.weights, inputs, options)
            streams = [replace(common, generator=own.generator) for own in streams]
    components, plan = [], ""
    for member, own in zip(members, streams, strict=True):
        component, plan = component_of_member(member, inputs, own)
        components.append(component)
    kept: Any = {"link": options.link, "plan": plan}
    if q.calibration is not None:
        kept |= {"guarantee": q.calibration.guarantee}
        if q.calibration.abstention is not None and not options.is_combination:
            kept |= {"abstention": q.calibration.abstention, "in_range": inside(q.calibration.inputs, inputs)}
    found: Predictive = record.predictive(components, q.weights, **kept)
    return found


def component_of_member(member: Any, inputs: Any, options: Options) -> tuple[Component, str]:
    """f of one network; the standard deviation of numbers' f grows with leverage, as temperatures do."""
    if member.is_sharded:
        return prediction.component_of(member, inputs, options)
    forward = forward_component(member, inputs, options)
    if _is_forward(member, options):
        return forward, "one forward pass"
    found, how = prediction.component_of(member, inputs, options)
    growth, ratio = (_of_rows(each, options.positions) for each in (forward.growth, forward.ratio))
    if growth is not None and not options.record.tempered and len(growth) == len(found.mean):
        found = grown(found, growth)
    return replace(found, growth=growth, ratio=ratio), how


def _is_forward(member: Any, options: Options) -> bool:
    """Whether a forward pass is all that was asked for: probabilities are the mean network's, at a temperature."""
    if options.predictive == "forward":
        return True
    asked = options.covariance or options.joint or options.chosen is not None or options.positions is not None
    plainly = options.predictive == "linearised" and not asked and not member.is_sharded
    return plainly and options.record.tempered and not member.averaged


def _of_rows(values: Tensor | None, positions: Positions | None) -> Tensor | None:
    """One number for each example, (batch,), as one for each row: a mask has a row for every position in it."""
    if values is None or not isinstance(positions, Tensor) or positions.dtype != torch.bool:
        return values
    return values.repeat_interleave(positions.flatten(1).sum(dim=1).to(values.device))


def grown(component: Component, growth: Tensor) -> Component:
    """With the standard deviation of f of each example multiplied by a number, (batch,)."""
    mean, block, draws, joint = component.mean, component.covariance, component.draws, component.joint
    each = growth.to(mean).repeat_interleave(mean[0].numel())
    factor = growth.to(mean).view(-1, *[1] * (mean.dim() - 1))
    return replace(
        component,
        variance=component.variance * factor**2,
        covariance=None if block is None else block * growth.to(block).square()[:, None, None],
        draws=None if draws is None else mean + (draws - mean) * factor,
        joint=None if joint is None else joint * each[:, None] * each,
    )


# What it caches must serve gradients too.
@torch.inference_mode(False)
def forward_component(member: Any, inputs: Any, options: Options) -> Component:
    """f of the mean network, and its leverage; relative to the batch itself where there is no other reference."""
    leverage = member.leverage or member.state_leverage
    chosen = leverage.medians is not None
    outputs, seen = observed(member, leverage.layers, inputs, options.forward, chosen=chosen)
    leverage = leverage.among(seen)
    ratios = leverage.ratios(leverage.log_h(seen)) if leverage.layers else Ratios.usual(outputs)
    noise = member.noise_variance if options.record.noise else None
    variance = torch.zeros((), dtype=outputs.dtype, device=outputs.device).expand_as(outputs)
    if options.predictive == "forward" and not options.record.tempered:
        if member.spread is None:
            raise SettingError("predictive='forward' of numbers needs calibrate(..., predictive='forward') first")
        variance = by_leverage(options.record, outputs, ratios.gentle, member.spread)
    return Component(
        outputs,
        variance,
        noise_variance=noise,
        temperature=member.temperature,
        averaged=False,
        growth=ratios.growth if options.shift and member.leverage is not None else None,
        ratio=ratios.steep,
        alone=options.record.tempered or options.predictive != "forward",
    )


def by_leverage(record: Any, outputs: Tensor, r: Tensor, spread: Tensor) -> Tensor:
    """Var[f] = v r of the outputs that locate targets, 0 of others."""
    variance = torch.zeros_like(outputs)
    record.locations(variance).copy_(spread.to(outputs) * r.to(outputs).view(-1, *[1] * (outputs.dim() - 1)))
    return variance


def _streams(q: Distribution, options: Options) -> list[Options]:
    """The options of each member, with random numbers of its own where there are several."""
    if len(q.members) == 1:
        return [options]
    seed = fresh_seed(options.generator)
    return [replace(options, generator=stream_of(seed, number)) for number in range(len(q.members))]


def _score(q: Distribution, inputs: Any, options: Options) -> Score:
    pairs = zip(q.members, _streams(q, options), strict=True)
    each = [prediction.score_of(member, inputs, own) for member, own in pairs]
    if len(each) == 1:
        return each[0]
    error = average([w**2 for w in q.weights], [one.error.square() for one in each]).sqrt()
    within = average(q.weights, [one.value for one in each])
    if not options.record.tempered:
        return Score(within, error)
    # I(y; m) = H[Σ π_m p_m] − Σ π_m H[p_m] of the mean networks.
    components = []
    for member in q.members:
        mean = prediction.mean_outputs(member, inputs, options)
        components.append(Component(mean, torch.zeros_like(mean), temperature=member.temperature, averaged=False))

    between: Tensor = options.record.predictive(components, q.weights).disagreement()
    flat = between.reshape(len(between), -1)
    if options.positions is None:
        return Score(within + flat.sum(dim=1), error)
    at = prediction.chosen_positions(options.positions, inputs, components[0].mean.shape[1:]).to(flat.device)
    some = (flat * at).sum(dim=1) if at.dtype == torch.bool else flat.gather(1, at[:, None]).squeeze(1)
    return Score(within + some, error)
