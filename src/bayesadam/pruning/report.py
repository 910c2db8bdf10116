"""What a pruning removes, what it saves, and what the posterior expects it to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam._alone import unwrap
from bayesadam.gaussian.diagonal import wide
from bayesadam.gaussian.settings import precision
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_one_network
from bayesadam.pruning.apply import checked_masks


@dataclass(frozen=True)
class PrunedParameter:
    """One row of a report: a parameter, its weights and those that remain, its bytes as it is and without the zeros."""

    name: str
    weights: int
    kept: int
    bytes_dense: int
    bytes_sparse: int

    @classmethod
    def of(cls, name: str, parameter: Tensor, mask: Tensor | None) -> PrunedParameter:
        """Without its zeros a parameter has a bit for each weight and the remaining values, where that is smaller."""
        weights, size = parameter.numel(), parameter.element_size()
        kept = weights if mask is None else int(mask.sum())
        return cls(name, weights, kept, weights * size, min(weights * size, kept * size + (weights + 7) // 8))

    @property
    def sparsity(self) -> float:
        """The share of weights removed."""
        return 1 - self.kept / self.weights if self.weights else 0.0

    def _cells(self) -> list[str]:
        sizes = [_in_words(self.bytes_dense), _in_words(self.bytes_sparse)]
        return [self.name, f"{self.weights:,}", f"{self.kept:,}", f"{self.sparsity:.1%}", *sizes]


@dataclass(frozen=True)
class PruningReport(PrunedParameter):
    """What masks do to a model: the row of all its parameters together, and each one's; prints as a table.

    Attributes:
        rows: one per parameter of the model.
        expected_loss_change: ½ Σ_removed θ² w v̂ᵖ/N, the rise of the mean loss to second order round an optimum, with the
            posterior's precision (its prior left out) over N as the curvature: s B v̂ at p = 1. At the paper's p = ½ it
            compares prunings of one network, and is no loss. None without a posterior that holds every weight removed.
    """

    rows: tuple[PrunedParameter, ...]
    expected_loss_change: float | None = None

    @classmethod
    def total(cls, rows: tuple[PrunedParameter, ...], expected_loss_change: float | None = None) -> PruningReport:
        """The sum of the rows."""
        sums = (sum(getattr(row, key) for row in rows) for key in ("weights", "kept", "bytes_dense", "bytes_sparse"))
        return cls("total", *sums, rows, expected_loss_change)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        own = ("weights", "kept", "sparsity", "bytes_dense", "bytes_sparse", "expected_loss_change")
        rows = [{**asdict(row), "sparsity": row.sparsity} for row in self.rows]
        return {**{key: getattr(self, key) for key in own}, "rows": rows}

    def __str__(self) -> str:
        heading = ["parameter", "weights", "kept", "removed", "dense", "sparse"]
        lines = [heading, *(row._cells() for row in (*self.rows, self))]
        widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
        table = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        if self.expected_loss_change is not None:
            table.append(f"expected rise of the mean loss, to second order: {self.expected_loss_change:.3g}")
        return "\n".join(table)


@torch.no_grad()
def pruning_report(model_or_posterior: nn.Module | Posterior, masks: Mapping[str, Tensor]) -> PruningReport:
    """What the masks remove from each parameter; with a posterior, also the loss that this is expected to cost.

    Make it before `prune`, or after: only the masks and the posterior's own copy of the weights count.
    """
    require_one_network(model_or_posterior, "a report on pruning")
    posterior = model_or_posterior if isinstance(model_or_posterior, Posterior) else None
    model = unwrap(posterior.model if posterior is not None else model_or_posterior)  # type: ignore[arg-type]
    found = checked_masks(model, masks)
    rows = tuple(PrunedParameter.of(name, parameter, found.get(name)) for name, parameter in model.named_parameters())
    removed = {name: ~mask for name, mask in found.items() if not bool(mask.all())}
    if posterior is None or (removed and not posterior.structure.independent) or removed.keys() - posterior.mode.keys():
        return PruningReport.total(rows)
    settings, cost = posterior.settings, 0.0
    for name, gone in removed.items():
        here = gone.to(posterior.mode[name].device)
        theta, v = posterior.mode[name][here], posterior.structure.second_moment[name][here]
        costs = precision(v, settings.weight / settings.n_data, 0.0, settings.power).mul_(theta.square())
        cost += 0.5 * float(costs.sum(dtype=wide(costs)))
    return PruningReport.total(rows, cost)


def _in_words(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
