"""Auditing data: which labels the network does not believe, and which examples it leans on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from bayesadam._checks import count
from bayesadam._progress import progress
from bayesadam._tables import aligned
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods.moments import Moments
from bayesadam.predict import Forward, linearised
from bayesadam.predict.batches import batch_size, batches_of, to_device
from bayesadam.readers import warn_of_few
from bayesadam.weights.mixture import require_posterior
from bayesadam.weights.posterior import Posterior

__all__ = ["Audit", "Column", "Suspect", "audit"]

Column = Literal["suspicion", "influence", "loss"]
COLUMNS: tuple[Column, ...] = get_args(Column)
# A normal variable is within this many standard deviations half of the time.
_QUARTILE = 0.6744897501960817
# The class index that torch and transformers leave out of a loss.
_IGNORED = -100
_SHOWN = 20
# δ as a share of the mean curvature, of weights and along a curvature's own axes; B where it is not known.
_SHARE, _ROTATED_SHARE, _USUAL_BATCH = 1e-3, 1e-4, 100


@dataclass(frozen=True)
class Suspect:
    """One example: its number in the data, its label or target, what the network predicts, and its measures."""

    index: int
    label: Any
    predicted: Any
    suspicion: float
    influence: float
    loss: float


@dataclass(frozen=True, eq=False)
class Audit:
    """Measures of every example, on the CPU; larger is stranger. Those of class −100 are NaN. Prints its suspects.

    Attributes:
        suspicion: how strongly the network, and its uncertainty, speak against the label: look at the largest first.
        influence: |Δf|, how far the network's outputs at the example would move if it were left out; the order counts,
            the size is too large.
        loss: −log p(y) of the network at the posterior's mean.
        predicted: the likeliest class, or the expected target.
        change: Δf itself, (n, outputs).
        noise_variance: σ² of a regression, the posterior's or estimated from the residuals; None of other likelihoods.
    """

    likelihood: str
    suspicion: Tensor
    influence: Tensor
    loss: Tensor
    labels: Tensor
    predicted: Tensor
    change: Tensor
    noise_variance: Tensor | None = None

    def suspects(self, n: int = _SHOWN, *, by: Column = "suspicion") -> list[Suspect]:
        """The n examples that are largest in a column, largest first; NaN never counts, ties keep their order."""
        if by not in COLUMNS:
            raise SettingError(f"by must be one of {COLUMNS}, got {by!r}")
        count("n", n, "examples")
        column: Tensor = getattr(self, by)
        known = (~column.isnan()).nonzero().flatten()
        order = known[column[known].argsort(descending=True, stable=True)]
        return [self[index] for index in order[:n].tolist()]

    def __getitem__(self, index: int) -> Suspect:
        """One example's row, by its number."""
        number = range(len(self))[index]
        measures = (float(getattr(self, name)[number]) for name in COLUMNS)
        return Suspect(number, self.labels[number].tolist(), self.predicted[number].tolist(), *measures)

    def __len__(self) -> int:
        return len(self.suspicion)

    def __str__(self) -> str:
        lines = [["example", "label", "predicted", *COLUMNS]]
        for one in self.suspects():
            targets = (
                ", ".join(f"{v:g}" for v in (t if isinstance(t, list) else [t])) for t in (one.label, one.predicted)
            )
            lines.append([str(one.index), *targets, *(f"{getattr(one, name):.3g}" for name in COLUMNS)])
        return "\n".join([*aligned(lines), f"the first of {len(self):,} examples, {self.likelihood}, by suspicion"])


def audit(
    posterior: Posterior, batches: Any, *, likelihood: str | None = None, forward: Forward | None = None
) -> Audit:
    """Which labels the network does not believe, and which examples it leans on; no training, one pass over the data.

    With d = f_y − f_j, j the strongest other class, suspicion is −d/Var[d]^¼, Var[d] at p = 1 and next to no prior: a
    label that the network is against, or only just holds on to where other data said little, as it does to one learned
    by heart. For numbers it is the residual in standard deviations. Influence is |v e|, v = J Σ Jᵀ at the posterior's
    own settings and e = ∂(−log p)/∂f: the change of f if the example were left out, to first order (memory
    perturbation, Nickl et al. 2023).

    Args:
        posterior: over the network that was trained.
        batches: a loader that does not shuffle, an iterable of (inputs, targets) or of mappings with labels, or one of
            these; examples are numbered as they come. One batch is in memory at a time.
        likelihood: of the targets; None for the posterior's own. Class indices of −100 are left out.
        forward: `forward(model, inputs)` for models whose call is unusual.
    """
    require_posterior(posterior, "an audit")
    posterior.require_whole("an audit")
    warn_of_few(posterior.origin, "the audited posterior")
    name = likelihood or posterior.likelihood
    if name not in _NLL or (likelihood and posterior.likelihood not in (None, likelihood)):
        known = posterior.likelihood or "none"
        raise SettingError(
            f"likelihood must be one of {', '.join(_NLL)}; got {likelihood!r}, the posterior has {known}"
        )
    _check_order(batches)
    device = next(iter(posterior.mode.values())).device
    parts: list[tuple[Moments, Moments | None, Tensor]] = []
    columns: list[dict[str, Tensor]] = []
    noise = posterior.noise_variance if name == "regression" else None
    by_data = _by_data(posterior) if name in ("classification", "binary") else None
    for batch in batches_of(
        progress(batches, "audit") if isinstance(batches, DataLoader) else batches, posterior.model
    ):
        inputs, y = to_device(batch.inputs, device), batch.targets.to(device)
        size = batch_size(inputs)
        if y.dim() == 0 or len(y) != size:
            raise MatchError(f"a batch has {size} inputs and targets of shape {tuple(y.shape)}: one for each example")
        own = linearised(posterior, inputs, forward=forward, covariance=True)
        data = linearised(by_data, inputs, forward=forward, covariance=True) if by_data else None
        parts.append((own, data, _targets(name, y, own.mean)))
        if name != "regression":
            columns.append(_measured(name, *parts.pop()))
    if name == "regression" and parts:
        # The noise may have to be estimated from all residuals.
        noise = _noise(noise, torch.cat([y - own.mean.double().reshape(y.shape) for own, _, y in parts]))
        columns = [_measured(name, *part, noise) for part in parts]
    if not columns:
        raise MatchError("there is nothing to audit: the loader gave no batch (a generator that was used up?)")
    joined = {key: torch.cat([part[key].cpu() for part in columns]) for key in columns[0]}
    joined = {key: column.float() if column.is_floating_point() else column for key, column in joined.items()}
    influence = torch.linalg.vector_norm(joined["change"], dim=1)
    return Audit(name, influence=influence, noise_variance=None if noise is None else noise.cpu(), **joined)


def _by_data(posterior: Posterior) -> Posterior:
    """The same at p = s = 1, w = N B and δ a small share of the mean curvature w v̂, whatever the prior."""
    same = posterior.replace(power=1.0, scale=1.0, batch_size=posterior.settings.batch_size or _USUAL_BATCH, form="map")
    total = sum(float(curvature.sum(dtype=torch.float64)) for curvature in same.structure.curvatures(1.0))
    share = _ROTATED_SHARE if same.structure.bases else _SHARE
    return same.replace(prior_precision=share * same.settings.weight * total / same.n_weights or 1.0)


# −log p(y | f) of each example, by f, (n, c), y, and a regression's σ².
_NLL: dict[str, Any] = {
    "classification": lambda f, y, _: F.cross_entropy(f, y, reduction="none"),
    "binary": lambda f, y, _: F.binary_cross_entropy_with_logits(f, y, reduction="none").sum(dim=1),
    "regression": lambda f, y, noise: ((y - f) ** 2 / noise + (2 * math.pi * noise).log()).sum(dim=1) / 2,
    "poisson": lambda f, y, _: (f.exp() - y * f + torch.lgamma(y + 1)).sum(dim=1),
    "heteroscedastic": lambda f, y, _: _heteroscedastic(f, y),
}


def _heteroscedastic(f: Tensor, y: Tensor) -> Tensor:
    mean, log_variance = f.chunk(2, dim=1)
    terms = (y - mean).square() * (-log_variance).exp() + log_variance + math.log(2 * math.pi)
    return terms.sum(dim=1) / 2


def _targets(name: str, y: Tensor, outputs: Tensor) -> Tensor:
    """Class indices, (n,), or numbers in float64, (n, targets), that fit the outputs."""
    if name == "classification":
        if outputs.dim() != 2 or y.dim() != 1 or y.is_floating_point():
            raise MatchError(
                f"an audit has one row per example: pass one whole number for each, its class, not {y.dtype} of shape "
                f"{tuple(y.shape)}, and outputs of shape (batch, classes), not {tuple(outputs.shape)}"
            )
        if bool(((y != _IGNORED) & ((y < 0) | (y >= outputs.shape[1]))).any()):
            raise MatchError(f"class indices must be 0 to {outputs.shape[1] - 1}, got {int(y.min())} to {int(y.max())}")
        return y.long()
    y, width = y.reshape(len(y), -1).double(), outputs[0].numel() // (2 if name == "heteroscedastic" else 1)
    if y.shape[1] != width:
        raise MatchError(f"the targets have {y.shape[1]} numbers for each example, the outputs {width}")
    return y


def _noise(noise: Tensor | None, residuals: Tensor) -> Tensor:
    """σ² by output, the posterior's or (median |r| / 0.6745)², which wrong targets hardly move."""
    estimate = (residuals.abs().median(dim=0).values / _QUARTILE).square()
    noise = (estimate if noise is None else noise.to(residuals).flatten()).expand(residuals.shape[1])
    if not bool((noise > 0).all()):
        raise SettingError("the noise variance is 0: give one, posterior.replace(noise_variance=...)")
    return noise


def _measured(
    name: str, own: Moments, data: Moments | None, y: Tensor, noise: Tensor | None = None
) -> dict[str, Tensor]:
    """The columns of a batch, in float64."""
    keep = y != _IGNORED if name == "classification" else torch.ones(len(y), dtype=torch.bool, device=y.device)
    y = torch.where(keep, y, 0) if name == "classification" else y
    f = own.mean.double().reshape(len(y), -1).requires_grad_()
    loss: Tensor = _NLL[name](f, y, noise)
    (error,) = torch.autograd.grad(loss.sum(), f)
    f, loss = f.detach(), loss.detach()
    assert own.covariance is not None
    covariance = own.covariance.double()
    if data is not None:
        suspicion, predicted = _against(name, f, data, y)
    else:
        predicted, variance = _of_numbers(name, f, covariance.diagonal(dim1=1, dim2=2))
        away = y - predicted
        if noise is not None:
            whole: Tensor = covariance + torch.diag_embed(noise.expand(f.shape))
            suspicion = (away * torch.linalg.solve(whole, away)).sum(dim=1).sqrt()
        else:
            suspicion = (away.square() / variance).sum(dim=1).sqrt()
    change = (covariance @ error.unsqueeze(-1)).squeeze(-1)
    labels = y if data is None else torch.where(keep, y, _IGNORED) if y.dim() == 1 else y.long()
    return {
        "suspicion": torch.where(keep, suspicion, math.nan),
        "loss": torch.where(keep, loss, math.nan),
        "change": torch.where(keep[:, None], change, math.nan),
        "labels": labels.squeeze(1) if labels.dim() == 2 and labels.shape[1] == 1 else labels,
        "predicted": predicted.squeeze(1) if predicted.dim() == 2 and predicted.shape[1] == 1 else predicted,
    }


def _against(name: str, f: Tensor, data: Moments, y: Tensor) -> tuple[Tensor, Tensor]:
    """−d/Var[d]^¼, the largest of an example's labels, and the predicted classes."""
    block = data.covariance.double()  # type: ignore[union-attr]
    if name == "binary":
        difference, variance = (2 * y - 1) * f, block.diagonal(dim1=1, dim2=2)
        predicted = (f > 0).long()
    else:
        rival = f.scatter(1, y[:, None], -math.inf).max(dim=1)
        at, j = torch.arange(len(y), device=y.device), rival.indices
        difference = (f[at, y] - rival.values)[:, None]
        variance = (block[at, y, y] + block[at, j, j] - 2 * block[at, y, j])[:, None]
        predicted = f.argmax(dim=1)
    least = torch.finfo(torch.float32).tiny
    return (-difference / variance.clamp(min=least) ** 0.25).amax(dim=1), predicted


def _of_numbers(name: str, f: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E[y] and Var[y], but for a regression's noise."""
    if name == "poisson":
        rate = f.exp()
        return rate, rate + rate.square() * variance
    if name == "heteroscedastic":
        mean, log_noise = f.chunk(2, dim=1)
        return mean, variance.chunk(2, dim=1)[0] + log_noise.exp()
    return f, variance


def _check_order(batches: Any) -> None:
    """Refuse loaders whose order is random: an example's number would not say which it is."""
    sampler = getattr(getattr(batches, "batch_sampler", None), "sampler", getattr(batches, "sampler", None))
    is_random = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    if is_random or getattr(sampler, "shuffle", False):
        raise SettingError(f"the loader shuffles ({type(sampler).__name__}): examples need numbers, shuffle=False")
