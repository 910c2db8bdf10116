"""`predict`, `draw` and `novelty` of a posterior, and of a mixture of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayesadam._checks import count
from bayesadam._progress import progress
from bayesadam._warnings import warn
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import Component, Prediction, agreed
from bayesadam.likelihoods.moments import rows
from bayesadam.predict.batches import for_model, inputs_of, is_loader
from bayesadam.predict.draws import linearised_draws, sampled
from bayesadam.predict.leverage import Ratios, from_structure
from bayesadam.predict.matrices import layers_of
from bayesadam.predict.moments import linearised
from bayesadam.predict.network import Forward, Gaussian
from bayesadam.predict.tap import Layouts, observed, require_layers
from bayesadam.weights.draws import fresh_seed, stream_seed

# So many familiar inputs, that differ, set the scale of novelty.
_FAMILIAR = 10
Covariance = bool | Literal["joint"]


def predict(
    members: Sequence[Gaussian],
    weights: Sequence[float],
    inputs: Any,
    *,
    draws: int | None = None,
    covariance: Covariance = False,
    forward: Forward | None = None,
    generator: torch.Generator | None = None,
) -> Prediction | Iterator[Prediction]:
    """The prediction of a batch; of a loader an iterator of predictions, one for each batch."""
    kind, model = agreed(None, members[0].likelihood), members[0].model
    if covariance not in (False, True, "joint"):
        raise SettingError(f"covariance must be False, True or 'joint', got {covariance!r}")
    if draws is not None:
        count("draws", draws, "networks to draw", least=2)
    if moved := [name for q in members for name in q.moved_statistics]:
        warn(
            f"read the posterior again, or train a copy of the model: running statistics of its batch norms have "
            f"changed since (first {moved[0]!r}), and predictions are neither the old network's nor the new one's"
        )

    def of_batch(batch: Any) -> Prediction:
        components: list[Component] = []
        seed = None if draws is None else fresh_seed(generator)
        for number, (q, weight) in enumerate(zip(members, weights, strict=True)):
            if draws is None or seed is None:
                f = linearised(q, batch, forward=forward, covariance=bool(covariance), joint=covariance == "joint")
            else:
                of_member = seed if len(members) == 1 else stream_seed(seed, "member", number)
                f = sampled(q, batch, draws, forward=forward, generator=torch.Generator().manual_seed(of_member))
            components.append(Component(f, q.noise_variance, q.temperature, weight))
        mean = components[0].f.mean
        if (mismatch := kind.mismatch(mean.detach())) is not None:
            warn(mismatch)
        lost = ~mean.detach().reshape(len(mean), -1).isfinite().all(dim=1)
        if bool(lost.any()):
            warn(
                f"the outputs of {int(lost.sum())} of {len(lost)} examples (first number {int(lost.nonzero()[0])}) are "
                "NaN or infinite, and so is all that is predicted of them: look for NaN in their inputs"
            )
        return Prediction(kind, tuple(components))

    if is_loader(inputs):
        return (of_batch(batch) for batch in inputs_of(progress(inputs, "predict"), model))
    return of_batch(for_model(inputs, model, graph=True))


@dataclass(frozen=True, eq=False)
class Function:
    """One function from a posterior: f(x; μ) + J (θ − μ) at the weights θ that `seed` draws, whatever the batch."""

    posterior: Gaussian
    seed: int
    forward: Forward | None = None

    def __call__(self, inputs: Any) -> Tensor:
        """f of a batch, (batch, ...), with gradients with respect to inputs that require them."""
        batch = for_model(inputs, self.posterior.model, graph=True)
        source = torch.Generator().manual_seed(self.seed)
        drawn = linearised_draws(self.posterior, batch, 1, forward=self.forward, generator=source).draws
        assert drawn is not None
        return drawn[0]


def novelty(
    posterior: Gaussian, inputs: Any, *, reference: Any, likelihood: str | None = None, forward: Forward | None = None
) -> Tensor:
    """How unlike familiar inputs each example is, (batch,), by one forward pass; without calibration.

    It rests on the leverage that the posterior gives: its input side, the right factors of its gradients, or the column
    sums of its second moment.

    Args:
        inputs: a batch or a loader.
        reference: other inputs, which are familiar, ten will do: a batch or a loader.
    """
    if inputs is reference:
        raise SettingError("the reference is the inputs themselves, which makes them familiar: pass others, that are")
    posterior.require_whole("novelty")
    kind = agreed(likelihood, posterior.likelihood)
    leverage = from_structure(layers_of(posterior.model, posterior.mode), posterior.curvature)
    layouts: Layouts = {}

    def seen(batches: Any, words: bool) -> list[tuple[Tensor, dict[str, Tensor]]]:
        batches = inputs_of(batches, posterior.model)
        return [observed(posterior, leverage.layers, batch, forward, layouts, words) for batch in batches]

    familiar = seen(reference, words=False)
    ran = {name for _, pooled in familiar for name, a in pooled.items() if not bool(a.isnan().all())}
    leverage = leverage.among(ran.intersection(*(set(pooled) for _, pooled in familiar)))
    if leverage.layers:
        log_h = torch.cat([leverage.log_h(pooled) for _, pooled in familiar])
        finite = ~log_h.isinf().any(dim=1) & torch.cat([rows(f).isfinite().all(dim=1) for f, _ in familiar])
        if lost := int((~finite).sum()):
            raise MatchError(f"{lost} of {len(log_h)} inputs of the reference give NaN or infinities: leave them out")
        if (different := len(torch.unique(log_h.nan_to_num(), dim=0))) < _FAMILIAR:
            warn(f"{different} different inputs in the reference set the scale of novelty: pass {_FAMILIAR} or more")
        leverage = leverage.against(log_h)
    scores = []
    for outputs, pooled in seen(inputs, words=True):
        require_layers(leverage.layers, pooled)
        ratios = leverage.ratios(leverage.log_h(pooled)) if leverage.layers else Ratios.usual(outputs)
        scores.append(kind.novelty(outputs, ratios.near))
    return torch.cat(scores)
