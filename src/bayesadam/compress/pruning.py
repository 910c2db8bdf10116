"""Pruning a posterior, a checkpoint, or whole channels with Torch-Pruning."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesadam._alone import alone_with, unwrap
from bayesadam._extras import require
from bayesadam._tables import aligned
from bayesadam.compress.masking import apply_masks
from bayesadam.compress.ranking import Exclude, Ranking, Scope, eligible, masks, removals, weight_scores
from bayesadam.errors import MatchError
from bayesadam.readers import Checkpoint, CheckpointKeywords, read_checkpoint, write_pruned
from bayesadam.readers.formats.lazy import Lazy, meta
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.gaussian import GaussianWeights
from bayesadam.weights.mixture import require_posterior
from bayesadam.weights.named import AnyPath, Named, outlined
from bayesadam.weights.posterior import Posterior, copy_into

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The prior precision of a pruned weight, which is known to be 0: its standard deviation is 1e-15.
_KNOWN = 1e30


@torch.no_grad()
def prune(
    posterior: Posterior,
    fraction: float | None = None,
    *,
    ranking: Ranking = "snr",
    scope: Scope = "global",
    exclude: Exclude = (),
    pattern: str | None = None,
) -> Posterior:
    """A posterior of the pruned network, `.model`, a copy; yours is untouched. The arguments are those of `masks`.

    Of a pruned weight it is known that it is 0: it has a prior precision of 10³⁰ around 0, so that draws and variances
    are those of the weights that stay, until `replace` gives the posterior another prior. In the rotated coordinates of
    `"inputs"` and `"kronecker"` no single weight can be known: only the mean is pruned there.

    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> model(torch.randn(8, 4)).square().mean().backward()
    >>> optimizer.step()
    >>> small = prune(Posterior.from_optimizer(model, optimizer, n_data=8), 0.4)
    >>> int((small.model.weight == 0).sum() + (small.model.bias == 0).sum()), int((model.weight == 0).sum())
    (2, 0)
    """
    require_posterior(posterior, "pruning")
    kept = masks(posterior, fraction, ranking=ranking, scope=scope, exclude=exclude, pattern=pattern)
    kept = {name: mask.to(posterior.mode[name].device) for name, mask in kept.items()}
    mode = {name: theta.masked_fill(~kept[name], 0) for name, theta in posterior.mode.items()}
    prior = dict(posterior.prior_precision)
    for name, mask in kept.items():
        if posterior.curvature.independent and not bool(mask.all()):
            prior[name] = torch.where(mask, torch.as_tensor(prior[name]).to(mode[name]), _KNOWN)
    with alone_with(posterior.model):
        model = copy.deepcopy(posterior.model)
    settings = replace(posterior.settings, prior_precision=prior)
    # The statistics of the copy's batch norms are looked at anew.
    small = replace(posterior, mode=mode, settings=settings, model=model, running=None)
    copy_into(model, small.mean)
    apply_masks(model, kept)
    return small


@dataclass(frozen=True)
class PruningReport:
    """What pruning left: the weights and those kept of each parameter, and of all; prints as a table.

    Of a file, `notes` say which of its weights were read, and what else was pruned or stays as it was.
    """

    parameters: Mapping[str, tuple[int, int]]
    weights: int
    kept: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, parameters: Named, kept: Named, notes: tuple[str, ...] = ()) -> PruningReport:
        """The report of masks, by the names of the parameters; one without a mask stays whole."""
        counts = {name: int(mask.sum()) for name, mask in kept.items()}
        rows = {name: (p.numel(), counts.get(name, p.numel())) for name, p in parameters.items()}
        return cls(rows, sum(weights for weights, _ in rows.values()), sum(left for _, left in rows.values()), notes)

    def __str__(self) -> str:
        lines = [["parameter", "weights", "kept", "removed"]]
        for name, (weights, kept) in {**self.parameters, "total": (self.weights, self.kept)}.items():
            lines.append([name, f"{weights:,}", f"{kept:,}", f"{1 - kept / max(weights, 1):.1%}"])
        return "\n".join([*(f"{note[0].upper()}{note[1:]}." for note in self.notes), *aligned(lines)])


def prune_checkpoint(
    path: AnyPath,
    out: AnyPath,
    fraction: float,
    *,
    ranking: str = "snr",
    scope: Scope = "global",
    exclude: Exclude = (),
    **options: Unpack[CheckpointKeywords],
) -> PruningReport:
    """Write a checkpoint again with a share of its weights at zero, lowest score first; all else in it stays.

    No model and no data are needed, and of the weights one tensor at a time is in memory. The report has the parameters
    with a state; buffers and frozen weights have no row.

    Args:
        path: a file or folder that the trainer saved, see `read_checkpoint`.
        out: the file to write; with the ending `.safetensors` the weights alone.
        fraction, ranking, scope, exclude: as in `masks`; of the kinds only `"biases"` needs no model.
        **options: how the file is read, see `CheckpointKeywords`.
    """
    checkpoint = read_checkpoint(path, **options)
    # N does not change the order.
    saved = GaussianWeights.open(checkpoint, 1.0, prior_precision=0.0, **options)
    outline = outlined(saved.mode)
    saved = replace(saved, curvature=Diagonal(Lazy(outline, saved.curvature.diagonal)))
    ranked = {name: outline[name] for name in eligible(saved, ranking, exclude, checkpoint.weights)}
    scores = Lazy(ranked, lambda name: weight_scores(saved, ranking, [name])[name])
    removed = removals(scores, scope, fraction)
    kept = Lazy({name: meta(like.shape, torch.bool) for name, like in ranked.items()}, lambda name: ~removed[name])
    write_pruned(checkpoint, kept, out)
    parameters = {name: tensor for name, tensor in checkpoint.weights.items() if name in outline}
    is_whole = Path(out).suffix != ".safetensors" or checkpoint.format == "safetensors"
    return PruningReport.of(parameters, kept, _notes(checkpoint, len(parameters), is_whole))


def _notes(checkpoint: Checkpoint, states: int, is_whole: bool) -> tuple[str, ...]:
    """Which weights of a file were read, and what became of the others."""

    def listed(paths: Iterable[tuple[str, ...]]) -> str:
        return ", ".join(repr(".".join(path)) if path else "the weights" for path in dict.fromkeys(paths))

    read = f"read {listed(checkpoint.networks)}: {states} of {len(checkpoint.weights)} tensors have a state"
    if not is_whole:
        return (read,)
    copies = listed(network.path for network, _ in checkpoint.copies.values())
    dense = [f"{listed(checkpoint.left)} left as it was"] if checkpoint.left else []
    return (read, *([f"pruned by the same masks: {copies}"] if copies else []), *dense, *checkpoint.notes)


@torch.no_grad()
def importance(posterior: Posterior, model: nn.Module, *, ranking: Ranking = "snr") -> Any:
    """An importance for Torch-Pruning, which takes whole channels out of `model`, the posterior's or a copy of it.

    A channel's is the sum over all weights that would go with it of their scores, as in `masks`. The scores are put
    into the parameters' gradients as score/θ, which Torch-Pruning cuts along with the weights: its Taylor importance is
    Σ |θ · gradient|. Clear them when it is done. Scores compare across layers, so prune globally:

        small = copy.deepcopy(posterior.model)
        how = ba.compress.importance(posterior, small)
        pruner = torch_pruning.pruner.BasePruner(
            small, example, how, global_pruning=True, pruning_ratio=0.3, ignored_layers=[small.head]
        )
        pruner.step()
        small.zero_grad()
    """
    torch_pruning = require("torch_pruning")
    scores: dict[str, Tensor] = weight_scores(posterior, ranking)
    for name, parameter in unwrap(model).named_parameters():
        score = scores.get(name, torch.zeros_like(parameter)).to(parameter)
        if score.shape != parameter.shape:
            raise MatchError(f"{name!r} has shape {tuple(parameter.shape)}, in the posterior {tuple(score.shape)}")
        parameter.grad = torch.where(parameter == 0, 0, score / parameter)
    return torch_pruning.importance.GroupTaylorImportance(group_reduction="sum", normalizer=None, bias=True)
