"""Masks on a model: weights set to 0 or left where they are, held there while training continues, and reported."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from torch.optim import Optimizer

from bayesadam._alone import unwrap
from bayesadam.errors import MatchError, SettingError
from bayesadam.gaussian.diagonal import wide
from bayesadam.gaussian.settings import curvature
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_one_network
from bayesadam.readers.match import listed_optimizers

Model = TypeVar("Model", bound=nn.Module)
# First moments: they would carry a weight away from 0 once the masks are lifted.
_MOMENTUM_KEYS = ("exp_avg", "momentum_buffer")


class Owner(NamedTuple):
    """A module that holds a parameter, the parameter's key in it, and its name by that path."""

    name: str
    module: Any
    key: str


def owners(model: nn.Module) -> dict[str, list[Owner]]:
    """The modules that hold each parameter, by its first name; tied parameters have several."""
    first: dict[int, str] = {}
    found: dict[str, list[Owner]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owner = Owner(f"{prefix}.{key}" if prefix else key, module, key)
                found.setdefault(first.setdefault(id(parameter), owner.name), []).append(owner)
    return found


def checked_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks by the first names of their parameters, each boolean and of its parameter's shape; or an error."""
    parameters = dict(model.named_parameters())
    known = {owner.name: name for name, held in owners(model).items() for owner in held}
    found: dict[str, Tensor] = {}
    for given, mask in masks.items():
        name = known.get(given)
        if name is None:
            raise MatchError(f"mask {given!r} is of no parameter of {type(model).__name__}")
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            described = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise MatchError(f"mask {given!r} must be a boolean tensor, True where a weight is kept, not {described}")
        if mask.shape != parameters[name].shape:
            shape = tuple(parameters[name].shape)
            raise MatchError(f"mask {given!r} has shape {tuple(mask.shape)}, the parameter {shape}")
        if name in found and not torch.equal(found[name].to(mask.device), mask):
            raise MatchError(f"{given!r} and {name!r} are one tied parameter, and their masks differ: give one")
        found[name] = mask
    return found


@torch.no_grad()
def prune(model: Model, masks: Mapping[str, Tensor], *, inplace: bool = True) -> Model:
    """θ ← θ where the mask is True, 0 elsewhere.

    Every name and shape is checked before a weight is written. Parameters without a mask are left alone; the model may
    be wrapped for data parallelism or compiled. `inplace=False` prunes and returns a deep copy.
    """
    model = model if inplace else copy.deepcopy(model)
    for parameter, removed in _removals(model, masks):
        # Not a product: it would keep NaN, and make −0.
        parameter.masked_fill_(removed, 0)
    return model


def _removals(model: nn.Module, masks: Mapping[str, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters that lose weights, with True at these."""
    parameters = dict(unwrap(model).named_parameters())
    found = ((parameters[name], ~mask) for name, mask in checked_masks(unwrap(model), masks).items())
    return [(parameter, removed.to(parameter.device)) for parameter, removed in found if bool(removed.any())]


class HeldWeights:
    """Holds some weights of a model where they are, until `remove` or the end of the `with` block.

    Args:
        held: parameters, each with a mask that is True at the weights to hold, and the values to hold them at.
        optimizers: after each of their steps the weights are put back.
    """

    def __init__(
        self, held: Sequence[tuple[nn.Parameter, Tensor, Tensor | float]], optimizers: Sequence[Optimizer]
    ) -> None:
        self._held = held
        self._hooks = [optimizer.register_step_post_hook(self.apply) for optimizer in optimizers]
        for parameter, fixed, _ in held:
            if parameter.requires_grad:
                hook = lambda g, fixed=fixed: g if g.is_sparse else g.masked_fill(fixed, 0)  # noqa: E731
                self._hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def apply(self, *_: Any) -> None:
        """Put the held weights back, whatever weight decay and momentum did to them."""
        for parameter, fixed, values in self._held:
            parameter.copy_(torch.where(fixed, values, parameter))

    def remove(self) -> None:
        """Let the weights go."""
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> HeldWeights:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def keep_pruned(
    model: nn.Module, masks: Mapping[str, Tensor], optimizer: Optimizer | Sequence[Optimizer] | None = None
) -> HeldWeights:
    """Prune the model, and keep it pruned through fine-tuning.

    Gradients of pruned weights are set to 0 before they reach gradient clipping or the optimiser, and the masks are
    applied after every step. Use it in a `with` block, or call `remove` at the end. Momentum of pruned weights is
    cleared, second moments are left alone. Without an optimiser, call `apply` after each step.
    """
    prune(model, masks)
    removals = _removals(model, masks)
    optimizers = [] if optimizer is None else listed_optimizers(optimizer)
    for parameter, removed in removals:
        for state in (each.state.get(parameter, {}) for each in optimizers):
            for moment in (state.get(key) for key in _MOMENTUM_KEYS):
                if isinstance(moment, Tensor) and moment.shape == parameter.shape:
                    moment.masked_fill_(removed, 0)
    return HeldWeights([(parameter, removed, 0.0) for parameter, removed in removals], optimizers)


def tune_only(model: nn.Module, masks: Mapping[str, Tensor], optimizer: Optimizer | Sequence[Optimizer]) -> HeldWeights:
    """Train only the weights at which the masks are True; parameters without a mask stay as they are.

    Gradients of the others are 0 before they reach gradient clipping or the optimiser, and after every step the others
    are put back. Use it in a `with` block, or call `remove` at the end. It keeps a copy of the weights.
    """
    found = checked_masks(unwrap(model), masks)
    if not any(bool(mask.any()) for mask in found.values()):
        raise SettingError("the masks are False throughout: nothing would be trained")
    optimizers = listed_optimizers(optimizer)
    trained = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    held = []
    for name, parameter in unwrap(model).named_parameters():
        chosen = found.get(name, torch.zeros_like(parameter, dtype=torch.bool)).to(parameter.device)
        if bool(chosen.any()) and id(parameter) not in trained:
            raise MatchError(f"{name!r} is to be trained, and the optimiser does not have it: pass the one that has")
        if id(parameter) in trained and not bool(chosen.all()):
            held.append((parameter, ~chosen, parameter.detach().clone()))
    return HeldWeights(held, optimizers)


def to_torch_prune(model: Model, masks: Mapping[str, Tensor]) -> Model:
    """Register the masks with `torch.nn.utils.prune`, on every module that holds the parameter.

    Its `is_pruned`, `remove` and the rest then work: `weight` becomes `weight_orig` × `weight_mask`.
    """
    held = owners(unwrap(model))
    for name, mask in checked_masks(unwrap(model), masks).items():
        for module, key in {(owner.module, owner.key): None for owner in held[name]}:
            torch_prune.custom_from_mask(module, key, mask.to(getattr(module, key)))  # type: ignore[no-untyped-call]
    return model


def from_torch_prune(model: nn.Module) -> dict[str, Tensor]:
    """The masks that `torch.nn.utils.prune` has put on a model, by the names the parameters had before."""
    masks = {}
    for name, module, key in (held[0] for held in owners(unwrap(model)).values()):
        mask = module._buffers.get(f"{key.removesuffix('_orig')}_mask") if key.endswith("_orig") else None
        if mask is not None:
            masks[name.removesuffix("_orig")] = mask != 0
    return masks


@dataclass(frozen=True)
class PrunedParameter:
    """A row of a report: a parameter, its weights and those that remain, its bytes as it is and without the zeros."""

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


@dataclass(frozen=True)
class PruningReport(PrunedParameter):
    """What masks do to a model: the row of all its parameters together, and each one's; prints as a table.

    Attributes:
        rows: one per parameter of the model.
        expected_loss_change: ½ Σ_removed θ² w v̂ᵖ/N, the rise of the mean loss to second order at an optimum, with the
            posterior's precision (its prior left out) over N as the curvature: s B v̂ at p = 1. At the paper's p = ½ it
            compares prunings of one network, and is no loss. None without a posterior that holds every weight removed.
    """

    rows: tuple[PrunedParameter, ...]
    expected_loss_change: float | None = None

    @classmethod
    def total(cls, rows: Sequence[PrunedParameter], expected_loss_change: float | None = None) -> PruningReport:
        """The sum of the rows."""
        keys = ("weights", "kept", "bytes_dense", "bytes_sparse")
        sums = {key: sum(getattr(row, key) for row in rows) for key in keys}
        return cls("total", rows=tuple(rows), expected_loss_change=expected_loss_change, **sums)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        rows = [{**asdict(row), "sparsity": row.sparsity} for row in self.rows]
        return {**asdict(self), "sparsity": self.sparsity, "rows": rows}

    def __str__(self) -> str:
        lines = [["parameter", "weights", "kept", "removed", "bytes", "without zeros"]]
        for row in (*self.rows, self):
            counts = [f"{count:,}" for count in (row.weights, row.kept, row.bytes_dense, row.bytes_sparse)]
            lines.append([row.name, *counts[:2], f"{row.sparsity:.1%}", *counts[2:]])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
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
    rows = [PrunedParameter.of(name, parameter, found.get(name)) for name, parameter in model.named_parameters()]
    removed = {name: ~mask for name, mask in found.items() if not bool(mask.all())}
    if posterior is None or (removed and not posterior.structure.independent) or removed.keys() - posterior.mode.keys():
        return PruningReport.total(rows)
    settings, cost = posterior.settings, 0.0
    for name, gone in removed.items():
        here = gone.to(posterior.mode[name].device)
        theta, v = posterior.mode[name][here], posterior.structure.second_moment[name][here]
        costs = curvature(v, settings.power).mul_(settings.weight / settings.n_data).mul_(theta.square())
        cost += 0.5 * float(costs.sum(dtype=wide(costs)))
    return PruningReport.total(rows, cost)
