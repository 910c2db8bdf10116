"""From a posterior and data to an audit, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from bayesadam._extras import require
from bayesadam._progress import progress as tracked
from bayesadam.auditing.measures import MEASURES, Rows, regression, robust_variance
from bayesadam.auditing.table import Audit, joined
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import LikelihoodName, Predictive
from bayesadam.likelihoods import likelihood as record_of
from bayesadam.likelihoods.predictive import like, rows
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_posterior
from bayesadam.predict.call import Call, Forward, batch_size, batches_of, evaluating, examples, to_device
from bayesadam.predict.moments import parameters_at_mean
from bayesadam.predict.options import DEFAULT_BUDGET
from bayesadam.readers import warn_of_few

# Bytes of an example's covariances for each pair of outputs: two in float32, and what is made of them in float64.
_PER_PAIR = 32


class _Outputs(NamedTuple):
    """A regression's outputs, their covariance and targets, (b, k), (b, k, k) and (b, k), until the noise is known."""

    mean: Tensor
    covariance: Tensor
    targets: Tensor


def audit(
    posterior: Posterior,
    batches: Any,
    *,
    likelihood: LikelihoodName = "classification",
    forward: Forward | None = None,
    memory_budget: int = DEFAULT_BUDGET,
    progress: bool = False,
) -> Audit:
    """Which labels the network does not believe, and which examples it leans on; no training, one pass over the data.

    With d = f_y − f_j, j the strongest other class, suspicion is −d/Var[d]^¼ under the settings of novelty: a label that the
    network is against, or only just holds on to where other data said little, as it does to one learned by heart. Of numbers
    it is a studentised residual. Influence is |v e|, v = J Σ Jᵀ at the posterior's own settings and e = ∂(−log p)/∂f: what
    leaving the example out would change (memory perturbation, Nickl et al. 2023).

    The model is as before when it returns, or raises.

    >>> model = torch.nn.Linear(2, 3)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> x, y = torch.randn(40, 2), torch.randint(3, (40,))
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    >>> posterior = Posterior.from_optimizer(model, optimizer, n_data=40, prior_precision=1.0)
    >>> found = audit(posterior, [(x[:20], y[:20]), (x[20:], y[20:])])
    >>> found
    Audit(40 examples, classification)
    >>> len(found.suspects(5))
    5

    Args:
        posterior: over the network that was trained.
        batches: a loader that does not shuffle, an iterable of (inputs, targets) or of mappings with labels, or one of these;
            examples are numbered as they come. One batch is in memory at a time.
        likelihood: of the targets. Class indices of −100 are left out.
        forward: `forward(model, inputs)` for models whose call is unusual.
        memory_budget: bytes that activations, gradients and covariances may take; work is cut to fit.
        progress: whether to show a bar on standard error from the start; a loader's comes after two seconds by itself.
    """
    require_posterior(posterior, "an audit")
    posterior.require_whole("an audit")
    warn_of_few(posterior.origin, "the audited posterior")
    record_of(likelihood)
    _check_order(batches)
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int) or memory_budget < 1:
        raise SettingError(f"memory_budget must be a positive number of bytes, got {memory_budget!r}")
    options: Any = {"likelihood": likelihood, "forward": forward, "memory_budget": memory_budget}
    novelty: list[Tensor] = []
    measured: list[Rows] = []
    waiting: list[_Outputs] = []
    for predictive, targets in _predictions(posterior, _shown(batches, progress), options):
        novelty.append(predictive.novelty)
        if likelihood == "regression":
            waiting.append(_outputs(predictive, targets))
        else:
            measured.append(MEASURES[likelihood](predictive, targets))
    if not novelty:
        raise MatchError("there is nothing to audit: the loader gave no batch (a generator that was used up?)")
    if likelihood != "regression":
        return _table(likelihood, novelty, measured)
    noise, estimated = _noise(posterior, waiting)
    return _table(likelihood, novelty, [regression(*part, noise) for part in waiting], noise, estimated)


def _predictions(posterior: Posterior, batches: Any, options: Any) -> Iterator[tuple[Predictive, Tensor]]:
    """Predictives with covariances at both settings, so many examples at a time as fit the budget, and their targets."""
    at_once = 0
    device = next(iter(parameters_at_mean(posterior).values())).device
    for batch in batches_of(batches, posterior.model):
        inputs, targets = to_device(batch.inputs, device), batch.targets.to(device)
        size = batch_size(inputs)
        if targets.dim() == 0 or len(targets) != size:
            raise MatchError(
                f"a batch has {size} inputs and targets of shape {tuple(targets.shape)}: one for each example"
            )
        at_once = at_once or _examples_at_once(posterior, examples(inputs, 0, 1), options)
        for start in range(0, size, at_once):
            part = examples(inputs, start, start + at_once)
            yield posterior.predict(part, covariance=True, novelty=True, **options), targets[start : start + at_once]


def _examples_at_once(posterior: Posterior, one: Any, options: Any) -> int:
    """By the number of outputs."""
    call = Call(posterior.model, options["forward"])
    with evaluating(posterior.model), torch.no_grad():
        outputs = call(parameters_at_mean(posterior), one).numel()
    return max(1, int(options["memory_budget"]) // (_PER_PAIR * outputs**2))


def _outputs(predictive: Predictive, y: Tensor) -> _Outputs:
    assert predictive.covariance is not None
    y = like(y, predictive.mean)
    mean, covariance, targets = rows(predictive.mean), predictive.covariance, rows(y)
    return _Outputs(*(t.double().cpu() for t in (mean, covariance, targets)))


def _noise(posterior: Posterior, found: list[_Outputs]) -> tuple[Tensor, bool]:
    """σ² by output, and whether it was estimated."""
    outputs = found[0].mean.shape[1]
    if posterior.noise_variance is not None:
        noise, estimated = posterior.noise_variance.double().cpu().flatten().expand(outputs), False
    else:
        noise, estimated = robust_variance(torch.cat([part.targets - part.mean for part in found])), True
    if not bool((noise > 0).all()):
        raise SettingError(
            "the noise variance is 0, so that no residual is small: give the posterior one, "
            "posterior.replace(noise_variance=...), or calibrate it on held-out data"
        )
    return noise, estimated


def _table(
    name: str,
    novelty: list[Tensor],
    parts: list[Rows],
    noise_variance: Tensor | None = None,
    noise_estimated: bool = False,
) -> Audit:
    change = joined([part.change for part in parts])
    return Audit(
        likelihood=name,
        suspicion=joined([part.suspicion for part in parts]),
        novelty=joined(novelty),
        influence=torch.linalg.vector_norm(change, dim=1),
        loss=joined([part.loss for part in parts]),
        labels=joined([part.targets for part in parts]),
        predicted=joined([part.predicted for part in parts]),
        change=change,
        noise_variance=noise_variance,
        noise_estimated=noise_estimated,
    )


def _check_order(batches: Any) -> None:
    """Refuse loaders whose order is random: an example's number would not say which it is."""
    if not isinstance(batches, DataLoader):
        return
    inner = getattr(batches.batch_sampler, "sampler", None)
    for sampler in (batches.sampler, inner):
        if _is_random(sampler):
            raise SettingError(
                f"the loader shuffles ({type(sampler).__name__}), so an example's number would not say which it is: pass "
                "DataLoader(dataset, batch_size=..., shuffle=False)"
            )


def _is_random(sampler: Sampler[Any] | Iterable[Any] | None) -> bool:
    shuffled = isinstance(sampler, DistributedSampler) and sampler.shuffle
    return shuffled or isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)


def _shown(batches: Any, progress: bool) -> Any:
    """The batches, with a bar on standard error: at once if so asked for, else a loader's after two seconds."""
    if not progress:
        return tracked(batches, "audit") if isinstance(batches, DataLoader) else batches
    console = require("rich.console").Console(stderr=True)
    total = len(batches) if isinstance(batches, DataLoader) else None
    return require("rich.progress").track(batches_of(batches), "audit", total, console=console)
