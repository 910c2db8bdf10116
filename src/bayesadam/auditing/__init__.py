"""Auditing data: which labels the network does not believe, and which examples it leans on."""

import base64
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from bayesadam._checks import count
from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam._progress import progress
from bayesadam._version import __version__
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import Component, agreed
from bayesadam.likelihoods import likelihood as record_of
from bayesadam.likelihoods.classification import ClassLikelihood, check_classes
from bayesadam.likelihoods.component import rows
from bayesadam.predict import Forward
from bayesadam.predict.batches import batch_size, batches_of, to_device
from bayesadam.readers import warn_of_few
from bayesadam.weights.mixture import require_posterior
from bayesadam.weights.posterior import Posterior

__all__ = ["Audit", "Column", "Suspect", "audit"]

# f at the posterior's settings, f at those of the data's curvature, targets, novelty.
_Predicted = tuple[Component, Component, Tensor, Tensor]
Column = Literal["suspicion", "novelty", "influence", "loss"]
COLUMNS: tuple[Column, ...] = get_args(Column)
# A normal variable is within this many standard deviations half of the time.
_QUARTILE = 0.6744897501960817
# Where nothing says how many examples were behind one gradient.
_USUAL_BATCH = 100
# What a page shows of one example: images with so many channels, and so much of numbers or a text.
_CHANNELS, _MOST_NUMBERS, _MOST_CHARACTERS = (1, 3, 4), 24, 600


@dataclass(frozen=True)
class Suspect:
    """One example: its number in the data, its label or target, what the network predicts, and its measures."""

    index: int
    label: Any
    predicted: Any
    suspicion: float
    novelty: float
    influence: float
    loss: float


@dataclass(frozen=True, eq=False)
class Audit:
    """Measures of every example, on the CPU; larger is stranger. Those of class −100 are NaN.

    Attributes:
        suspicion: how strongly the network, and its uncertainty, speak against the label: look at the largest first.
        novelty: how unlike the training data the input is, as `posterior.novelty`.
        influence: |Δf|, how far the network's outputs at the example would move if it were left out; the order counts,
            the size is too large.
        loss: −log p(y) of the network at the posterior's mean.
        predicted: the likeliest class, or the expected target.
        change: Δf itself, (n, outputs).
        noise_variance: σ² of a regression's residuals, by output; None for other likelihoods.
        noise_estimated: whether σ² was estimated from the residuals.
    """

    likelihood: str
    suspicion: Tensor
    novelty: Tensor
    influence: Tensor
    loss: Tensor
    labels: Tensor
    predicted: Tensor
    change: Tensor
    noise_variance: Tensor | None = None
    noise_estimated: bool = False

    def suspects(self, n: int = 20, *, by: Column = "suspicion") -> list[Suspect]:
        """The n examples that are largest in a column, largest first; NaN never counts, ties keep their order."""
        if by not in COLUMNS:
            raise SettingError(f"by must be one of {COLUMNS}, got {by!r}")
        count("n", n, "examples")
        column: Tensor = getattr(self, by)
        known = (~column.isnan() & ~self.suspicion.isnan()).nonzero().flatten()
        order = known[column[known].argsort(descending=True, stable=True)]
        return [self[index] for index in order[:n].tolist()]

    def __getitem__(self, index: int) -> Suspect:
        """One example's row, by its number."""
        number = range(len(self))[index]
        measures = (float(getattr(self, name)[number]) for name in COLUMNS)
        return Suspect(number, self.labels[number].tolist(), self.predicted[number].tolist(), *measures)

    def __len__(self) -> int:
        return len(self.suspicion)

    def __repr__(self) -> str:
        noise = ", noise variance estimated from the residuals" if self.noise_estimated else ""
        return f"Audit({len(self):,} examples, {self.likelihood}{noise})"

    def to_pandas(self) -> Any:
        """A table with a row per example, its number as the index; needs pandas."""
        targets = {"label": self.labels, "predicted": self.predicted}
        table: dict[str, Any] = {name: t.numpy() if t.dim() == 1 else t.tolist() for name, t in targets.items()}
        table |= {name: getattr(self, name).numpy() for name in COLUMNS}
        return require("pandas").DataFrame(table).rename_axis("index")

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        inputs: Any = None,
        names: Sequence[str] | None = None,
        n: int = 60,
        by: Column = "suspicion",
    ) -> None:
        """Write the n largest of a column as one HTML page that needs nothing else.

        Args:
            inputs: the examples by number: a tensor, a list or a data set. Images, (H, W), (1, H, W) or (3, H, W),
                bytes or other numbers, which are then scaled to their range; texts; or numbers.
            names: of the classes.
        """
        suspects = self.suspects(n, by=by)
        if inputs is not None and hasattr(inputs, "__len__") and len(inputs) != len(self):
            raise MatchError(f"there are {len(inputs):,} inputs, and {len(self):,} examples were audited")
        cards = [(one, {} if inputs is None else shown(inputs[one.index])) for one in suspects]
        jinja2 = require("jinja2")
        environment = jinja2.Environment(loader=jinja2.PackageLoader(__package__, "."), autoescape=True)
        tools: Any = {"number": "{:.3g}".format, "named": partial(_named, names=names), "version": __version__}
        page = environment.get_template("page.html").render(audit=self, cards=cards, by=by, **tools)
        with replacing(path) as temporary:
            temporary.write_text(page, encoding="utf-8")


def audit(
    posterior: Posterior, batches: Any, *, likelihood: str | None = None, forward: Forward | None = None
) -> Audit:
    """Which labels the network does not believe, and which examples it leans on; no training, one pass over the data.

    With d = f_y − f_j, j the strongest other class, suspicion is −d/Var[d]^¼ under the settings of novelty: a label
    that the network is against, or only just holds on to where other data said little, as it does to one learned by
    heart. For numbers it is the residual in standard deviations. Influence is |v e|, v = J Σ Jᵀ at the posterior's own
    settings and e = ∂(−log p)/∂f: the change of f if the example were left out, to first order (memory perturbation,
    Nickl et al. 2023).

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
    name = agreed(likelihood, posterior.likelihood)
    record = record_of(name)
    _check_order(batches)
    options: Any = {"likelihood": name, "forward": forward}
    shown = progress(batches, "audit") if isinstance(batches, DataLoader) else batches
    predicted: Iterable[_Predicted] = _predicted(posterior, shown, options)
    noise = None
    if record.noise:
        # The noise may have to be estimated from all residuals.
        predicted = list(predicted)
        noise = _noise(posterior, [rows(record.matched(y, c.mean) - c.mean) for c, _, y, _ in predicted])
    parts = [_measured(record, *each, noise) for each in predicted]
    if not parts:
        raise MatchError("there is nothing to audit: the loader gave no batch (a generator that was used up?)")
    joined = {key: torch.cat([part[key].cpu() for part in parts]) for key in parts[0]}
    columns = {key: column.float() if column.is_floating_point() else column for key, column in joined.items()}
    influence = torch.linalg.vector_norm(columns["change"], dim=1)
    estimated = noise is not None and posterior.noise_variance is None
    noise = None if noise is None else noise.cpu()
    return Audit(name, influence=influence, noise_variance=noise, noise_estimated=estimated, **columns)


def _noise(posterior: Posterior, residuals: list[Tensor]) -> Tensor | None:
    """σ² by output, the posterior's or (median |r| / 0.6745)², which wrong targets hardly move."""
    noise = posterior.noise_variance
    if residuals:
        every = torch.cat(residuals).double()
        found = (every.abs().median(dim=0).values / _QUARTILE).square() if noise is None else noise.to(every).flatten()
        noise = found.expand(every.shape[1])
        if not bool((noise > 0).all()):
            raise SettingError("the noise variance is 0: give one, posterior.replace(noise_variance=...), or calibrate")
    return noise


def _predicted(posterior: Posterior, batches: Any, options: Any) -> Iterator[_Predicted]:
    """f with covariances at both settings, targets and novelty, batch by batch.

    Where the posterior was not calibrated, novelty is relative to the first batch.
    """
    device = next(iter(posterior.mode.values())).device
    for batch in batches_of(batches, posterior.model):
        inputs, y = to_device(batch.inputs, device), batch.targets.to(device)
        size = batch_size(inputs)
        if y.dim() == 0 or len(y) != size:
            raise MatchError(f"a batch has {size} inputs and targets of shape {tuple(y.shape)}: one for each example")
        if posterior.leverage is None:
            posterior = posterior.relative_to([inputs], options["forward"])
        both = posterior, _by_data_alone(posterior)
        found, data = (q.predict(inputs, covariance=True, shift=False, **options) for q in both)
        yield found.components[0], data.components[0], y, found.novelty


def _by_data_alone(posterior: Posterior) -> Posterior:
    """The same at p = s = 1, w = N B and δ = ε mean(w c), or ε mean(w c/R) R with a prior of shape R.

    Neither calibration nor the units of the loss change it. A wrong B scales all variances alike.
    """
    base = replace(
        posterior.settings, power=1.0, scale=1.0, batch_size=posterior.batch_size or _USUAL_BATCH, form="map"
    )
    total = sum(float(c.sum()) for c in posterior.structure.curvatures(1.0, base.prior_shape))
    # Along its own axes a curvature has more very small eigenvalues, which a large δ would hide.
    share = 1e-4 if posterior.structure.bases else 1e-3
    prior = base.prior_at(share * base.weight * total / posterior.n_weights or 1.0)
    named = prior if isinstance(prior, dict) else dict.fromkeys(posterior.prior_precision, prior)
    return replace(posterior, settings=replace(base, prior_precision=named))


def _measured(
    record: Any, c: Component, data: Component, y: Tensor, novelty: Tensor, noise: Tensor | None
) -> dict[str, Tensor]:
    """The columns of a batch, in float64."""
    assert c.covariance is not None
    keep = torch.ones(len(y), dtype=torch.bool, device=y.device)
    if record.ignored is not None:
        if c.mean.dim() != 2 or y.dim() != 1 or y.is_floating_point():
            raise MatchError(
                f"an audit has one row per example: pass one whole number for each, its class, not {y.dtype} of shape "
                f"{tuple(y.shape)}, and outputs of shape (batch, classes), not {tuple(c.mean.shape)}"
            )
        keep = y != record.ignored
        check_classes(c.mean[keep], y[keep])
        y = torch.where(keep, y, 0)
    y, f = record.matched(y, c.mean), rows(c.mean.double()).requires_grad_()
    targets = record.shaped(y, f)
    # The gradient of each example's training loss is that of −log p, but for the number of targets and the noise.
    (error,) = torch.autograd.grad(record.loss(f[:, None], targets[:, None]).sum() * targets[0].numel(), f)
    covariance = c.covariance.double()
    if noise is not None:
        c = Component(c.mean.double(), c.variance.double(), covariance, noise_variance=noise.view(c.mean[0].shape))
        error = error / (2 * noise)
    network = record.predictive([Component(f.detach(), torch.zeros_like(f), noise_variance=noise)])
    if isinstance(record, ClassLikelihood):
        difference, variance = record.margin(data, y)
        tiny = torch.finfo(torch.float32).tiny
        suspicion = rows(-difference / variance.clamp(min=tiny) ** 0.25).amax(dim=1)
        labels, predicted = targets.long(), network.class_probs.argmax(dim=-1)
    else:
        suspicion, labels, predicted = record.distance(c, y), targets, rows(record.expected(c))
    change, loss = (covariance @ error.unsqueeze(-1)).squeeze(-1), -network.log_prob(targets)
    return {
        "suspicion": torch.where(keep, suspicion, math.nan),
        "novelty": novelty,
        "loss": torch.where(keep, loss, math.nan),
        "change": torch.where(keep[:, None], change, math.nan),
        "labels": _flat(labels) if record.ignored is None else torch.where(keep, labels, record.ignored),
        "predicted": _flat(predicted),
    }


def _flat(values: Tensor) -> Tensor:
    """(n, 1) as (n,)."""
    return values.squeeze(1) if values.dim() == 2 and values.shape[1] == 1 else values


def _check_order(batches: Any) -> None:
    """Refuse loaders whose order is random: an example's number would not say which it is."""
    sampler = getattr(getattr(batches, "batch_sampler", None), "sampler", getattr(batches, "sampler", None))
    is_random = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    if is_random or getattr(sampler, "shuffle", False):
        raise SettingError(f"the loader shuffles ({type(sampler).__name__}): examples need numbers, shuffle=False")


def _named(value: Any, names: Sequence[str] | None) -> str:
    """A class by its name, numbers in a few digits."""
    if names is not None and isinstance(value, int):
        return names[value]
    return ", ".join(f"{each:g}" for each in (value if isinstance(value, list) else [value]))


def shown(example: Any) -> dict[str, str]:
    """An item of a data set as a `picture`, inline PNG data, or a `text`: of a pair the inputs."""
    if isinstance(example, Mapping):
        texts = [value for value in example.values() if isinstance(value, str)]
        return shown((texts or [value for value in example.values() if hasattr(value, "__array__")])[0])
    if isinstance(example, tuple | list) and example and not isinstance(example[0], int | float):
        return shown(example[0])
    if isinstance(example, str):
        return {"text": example if len(example) <= _MOST_CHARACTERS else f"{example[:_MOST_CHARACTERS]}…"}
    values = torch.as_tensor(example if isinstance(example, Tensor) else np.array(example)).detach().cpu()
    if values.dim() == 3 and values.shape[0] in _CHANNELS:
        values = values.permute(1, 2, 0)
    if values.dim() == 2 or (values.dim() == 3 and values.shape[2] in _CHANNELS):
        return {"picture": _png(values)}
    numbers = values.flatten().tolist()
    some = ", ".join(f"{value:.4g}" for value in numbers[:_MOST_NUMBERS])
    return {"text": some + (f", … ({len(numbers):,} numbers)" if len(numbers) > _MOST_NUMBERS else "")}


def _png(pixels: Tensor) -> str:
    """The address of inline PNG data: bytes as they are, other numbers scaled to their range; 0 is black, or above."""
    if pixels.dtype != torch.uint8:
        values = pixels.double().nan_to_num()
        least = min(float(values.min()), 0.0)
        pixels = ((values - least) * (255 / max(float(values.max()) - least, 1e-12))).round().to(torch.uint8)
    buffer = io.BytesIO()
    image = pixels.squeeze(2) if pixels.dim() == 3 and pixels.shape[2] == 1 else pixels
    require("PIL.Image").fromarray(image.contiguous().numpy()).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
