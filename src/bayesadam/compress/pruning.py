"""Pruning a posterior, or a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam._checks import count
from bayesadam._warnings import warn
from bayesadam.compress.conditioning import conditioned, layers_for
from bayesadam.compress.ranking import (
    Exclude,
    Ranking,
    Scope,
    check_amount,
    eligible,
    excluded,
    masks,
    parsed,
    remaining,
    weight_scores,
)
from bayesadam.compress.report import PruningReport, warn_of_whole
from bayesadam.compress.sensitivity import sensitivities
from bayesadam.compress.solving import Moments
from bayesadam.compress.walking import Walk
from bayesadam.errors import MatchError
from bayesadam.predict.matrices import Matrix
from bayesadam.predict.network import Forward
from bayesadam.readers import CheckpointKeywords, read_checkpoint, write_pruned
from bayesadam.readers.formats.lazy import Lazy, outline_of
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.gaussian import GaussianWeights
from bayesadam.weights.mixture import require_posterior
from bayesadam.weights.named import AnyPath, Named
from bayesadam.weights.posterior import Posterior

if TYPE_CHECKING:
    from typing_extensions import Unpack


@torch.no_grad()
def prune(
    posterior: Posterior,
    fraction: float | None = None,
    *,
    inputs: Any = None,
    ranking: Ranking | None = None,
    scope: Scope = "global",
    exclude: Exclude = (),
    pattern: str | None = None,
    rounds: int | None = None,
    forward: Forward | None = None,
) -> Posterior:
    """A posterior of the pruned network, `.model`, a copy; yours is untouched.

    With a few hundred `inputs`, without labels, the weights that stay move to make up for those that go, in rounds:
    see `condition`. Only what can make up for its losses is pruned then, the matrices of linear layers, convolutions
    and attention, and the ranking sees what the inputs say of v̂: the diagonal of g A is what a weight that goes would
    cost if no other could stand in for it, and

        ṽ_ij = g_i / [(A' + λ)⁻¹]_jj,   g_i = ρ_i Σ_j v̂_ij / Σ_j A'_jj

    what it costs when they do. In each round A' is that of the inputs and the network of then, and ρ_i the share that
    is left of how much the outputs depend on unit i, by gradients of the outputs, without labels: see `sensitivities`.

    Args:
        inputs, forward: as in `condition`; None takes the posterior's own input sides, where it has them.
        rounds: of growing sparsity, in each of which the same share of the weights goes; None for 8, or as many more
            as keep that share at a quarter.
        ranking: as in `masks`; None for `"between"` with inputs and `"snr"` without.
        fraction, scope, exclude, pattern: as in `masks`.

    >>> from torch import nn
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> model(torch.randn(8, 4)).square().mean().backward()
    >>> optimizer.step()
    >>> small = prune(Posterior.from_optimizer(model, optimizer, n_data=8), 0.4)
    >>> int((small.model.weight == 0).sum() + (small.model.bias == 0).sum()), int((model.weight == 0).sum())
    (2, 0)
    """
    require_posterior(posterior, "pruning")
    if 2 * posterior.n_weights < (of := sum(p.numel() for p in posterior.model.parameters())):
        warn(
            f"the posterior holds {posterior.n_weights:,} of the model's {of:,} weights, as frozen ones have no state: "
            "the fraction is of these alone"
        )
    by_default = "snr" if inputs is None or not posterior.curvature.independent else "between"
    how: Any = {"ranking": by_default if ranking is None else ranking, "scope": scope, "exclude": exclude}
    check_amount(fraction, scope, pattern)
    steps, layers = _steps(fraction, pattern, rounds), layers_for(posterior, inputs, posterior.mode, forward)
    only = None if layers is None else {matrix.weight for matrix in layers.matrices.values()}
    left = excluded(posterior, exclude)
    if only is not None and only <= left:
        raise MatchError(
            "inputs can make up for nothing that is pruned: there is no linear layer, convolution or attention of "
            "torch's own among what may be pruned. Prune without inputs="
        )
    if only is not None:
        sizes = {name: shape.numel() for name, shape in posterior.shapes.items()}
        warn_of_whole({name: n for name, n in sizes.items() if name not in left}, only, "pruned with inputs")
    # Only rankings by moments see what the inputs say of them.
    moments = posterior.curvature.independent and how["ranking"] in ("snr", "saliency", "between")
    walk = layers if isinstance(layers, Walk) and moments else None
    alone, before, look = dict[str, Tensor](), dict[str, Tensor](), None
    if walk is not None:
        look = partial(_alone, alone)
        whole = {name: torch.ones(shape, dtype=torch.bool) for name, shape in posterior.shapes.items()}
        conditioned(posterior, posterior, whole, walk, look)
        before = sensitivities(walk.call, walk.batches, walk.matrices)
    small, now = posterior, before
    for number, step in enumerate(steps if layers is not None else steps[-1:]):
        ranked = small
        if walk is not None:
            if number and before:
                now = sensitivities(replace(walk.call, model=small.model), walk.batches, walk.matrices)
            ranked = replace(small, curvature=Diagonal(_moments(posterior, walk.matrices, alone, before, now)))
        small = conditioned(posterior, small, masks(ranked, **step, **how, only=only), layers, look)
    warn_of_empty(posterior.mode, small.mode)
    return small


def _alone(alone: dict[str, Tensor], matrix: Matrix, seen: Moments) -> None:
    """Put 1/[(A' + λ)⁻¹]_jj over Σ_j A'_jj of a matrix, (groups, 1, inputs), into `alone`."""
    inputs = matrix.size[2]
    total = seen.a.diagonal(dim1=1, dim2=2)[:, :inputs].sum(dim=1).clamp(min=1e-30)
    alone[matrix.name] = seen.alone()[..., :inputs] / total[:, None, None]


def _moments(
    posterior: Posterior, matrices: Mapping[str, Matrix], alone: Named, before: Named, now: Named
) -> dict[str, Tensor]:
    """ṽ of the matrices, and v̂ of all else; sensitivities are those of the dense network and of the pruned one."""
    moments = dict(posterior.curvature.second_moment)
    for name, matrix in matrices.items():
        v = matrix.into(moments[matrix.weight])
        share = (now[name] / before[name]).nan_to_num(1.0, 1.0) if name in before and name in now else 1.0
        new = {matrix.weight: moments[matrix.weight].clone()}
        replace(matrix, bias=None).write(alone[name] * v.sum(dim=2, keepdim=True) * share, new)
        moments |= new
    return moments


def _steps(fraction: float | None, pattern: str | None, rounds: int | None) -> list[dict[str, Any]]:
    """Of a fraction f, 1 − (1 − f)^(r/rounds); of a pattern n:m, (m − 1):m and so on."""
    if pattern is not None:
        keep, size = parsed(pattern)
        return [{"pattern": f"{n}:{size}"} for n in range(max(size - 1, keep), keep - 1, -1)]
    assert fraction is not None
    if rounds is None:
        rounds = max(8, round(math.log(1 - fraction, 0.75))) if fraction < 1 else 8
    count("rounds", rounds, "of growing sparsity")
    return [{"fraction": 1 - (1 - fraction) ** (r / rounds)} for r in range(1, rounds)] + [{"fraction": fraction}]


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

    No model and no data are needed. Of the weights one tensor at a time is in memory; scores are in a temporary file.
    The report has the parameters with a state; buffers and frozen weights have no row.

    Args:
        path: a file or folder that the trainer saved, see `read_checkpoint`.
        out: the file to write; with the ending `.safetensors` the weights alone.
        fraction, ranking, scope, exclude: as in `masks`; of the kinds only `"biases"` needs no model.
        **options: how the file is read, see `CheckpointKeywords`.
    """
    check_amount(fraction, scope)
    checkpoint = read_checkpoint(path, **options)
    # N does not change the order.
    saved = GaussianWeights.open(checkpoint, 1.0, prior_precision=0.0, **options)
    outline = outline_of(saved.mode)
    saved = replace(saved, curvature=Diagonal(Lazy(outline, saved.curvature.diagonal)))
    ranked = {name: outline[name] for name in eligible(saved, ranking, exclude, checkpoint.weights)}
    scores = Lazy(ranked, lambda name: weight_scores(saved, ranking, [name])[name])
    kept = remaining(scores, scope, fraction)
    write_pruned(checkpoint, kept, out)
    parameters = {name: tensor for name, tensor in checkpoint.weights.items() if name in outline}
    report = PruningReport.of_file(checkpoint, parameters, kept, out)
    warn_of_empty(parameters, {name: torch.tensor(left) for name, (_, left) in report.parameters.items()})
    return report


def warn_of_empty(before: Named, after: Named) -> None:
    """Warn of the matrices that have lost all their weights."""
    lost = [name for name, w in after.items() if not w.any() and before[name].dim() > 1 and before[name].any()]
    if lost:
        warn(f"no weight is left of {', '.join(lost[:4])}: scope='bounded' keeps some of every parameter")
