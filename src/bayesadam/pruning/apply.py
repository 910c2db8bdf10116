"""Masks on a model: weights set to 0 or left where they are, held there while training continues, and reported."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesadam._alone import listed_optimizers, unwrap
from bayesadam._tables import aligned
from bayesadam.errors import MatchError, SettingError
from bayesadam.weights.diagonal import wide
from bayesadam.weights.mixture import require_one_network
from bayesadam.weights.named import Named
from bayesadam.weights.posterior import Posterior
from bayesadam.weights.settings import curvature

Model = TypeVar("Model", bound=nn.Module)
Optimizers = Optimizer | Sequence[Optimizer]


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
        shape = parameters[name].shape
        if mask.dtype != torch.bool or mask.shape != shape:
            described = f"{mask.dtype} of shape {tuple(mask.shape)}"
            raise MatchError(f"mask {given!r} must be a boolean tensor of shape {tuple(shape)}, not {described}")
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
    """Holds some weights, where a mask is True, at values, until `remove` or the end of the `with` block."""

    def __init__(self, held: Sequence[tuple[nn.Parameter, Tensor, Tensor | float]], optimizer: Optimizers) -> None:
        self._held = held
        self._hooks = [each.register_step_post_hook(self.apply) for each in listed_optimizers(optimizer)]
        for parameter, fixed, _ in held:
            if parameter.requires_grad:
                hook = lambda g, fixed=fixed: g.masked_fill(fixed, 0)  # noqa: E731
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


def keep_pruned(model: nn.Module, masks: Mapping[str, Tensor], optimizer: Optimizers) -> HeldWeights:
    """Prune the model, and keep it pruned through fine-tuning: in a `with` block, or until `remove`.

    Gradients of pruned weights are 0 before they reach clipping or the optimiser; masks are applied after every step.
    """
    prune(model, masks)
    return HeldWeights([(parameter, removed, 0.0) for parameter, removed in _removals(model, masks)], optimizer)


def tune_only(model: nn.Module, masks: Mapping[str, Tensor], optimizer: Optimizers) -> HeldWeights:
    """Train only the weights at which the masks are True: in a `with` block, or until `remove`.

    Gradients of the others are 0 before they reach clipping or the optimiser, and after every step these are put back.
    """
    found = checked_masks(unwrap(model), masks)
    if not any(bool(mask.any()) for mask in found.values()):
        raise SettingError("the masks are False throughout: nothing would be trained")
    groups = [group for each in listed_optimizers(optimizer) for group in each.param_groups]
    trained = {id(p) for group in groups for p in group["params"]}
    held = []
    for name, parameter in unwrap(model).named_parameters():
        chosen = found.get(name, torch.zeros_like(parameter, dtype=torch.bool)).to(parameter.device)
        if bool(chosen.any()) and id(parameter) not in trained:
            raise MatchError(f"{name!r} is to be trained, and the optimiser does not have it: pass the one that has")
        if id(parameter) in trained and not bool(chosen.all()):
            held.append((parameter, ~chosen, parameter.detach().clone()))
    return HeldWeights(held, optimizer)


@dataclass(frozen=True)
class PrunedParameter:
    """A row of a report: a parameter, its weights and those that remain."""

    name: str
    weights: int
    kept: int

    @property
    def sparsity(self) -> float:
        """The share of weights removed."""
        return 1 - self.kept / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class PruningReport:
    """What masks do to a model, a row for each parameter; prints as a table.

    Attributes:
        expected_loss_change: ½ Σ_removed θ² w v̂ᵖ/N, the rise of the mean loss to second order at an optimum, with the
            posterior's precision (its prior left out) over N as the curvature: s B v̂ at p = 1. At the paper's p = ½ it
            compares prunings of one network, and is no loss. None without a posterior that holds every weight removed.
    """

    rows: tuple[PrunedParameter, ...]
    expected_loss_change: float | None = None

    @classmethod
    def of(cls, parameters: Named, masks: Named, expected_loss_change: float | None = None) -> PruningReport:
        """The report of masks, by the names of the parameters; one without a mask stays whole."""
        kept = {name: int(mask.sum()) for name, mask in masks.items()}
        rows = (PrunedParameter(name, p.numel(), kept.get(name, p.numel())) for name, p in parameters.items())
        return cls(tuple(rows), expected_loss_change)

    @property
    def total(self) -> PrunedParameter:
        """All parameters together."""
        return PrunedParameter("total", sum(row.weights for row in self.rows), sum(row.kept for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        total, *rows = ({**asdict(row), "sparsity": row.sparsity} for row in (self.total, *self.rows))
        return {**total, "expected_loss_change": self.expected_loss_change, "rows": rows}

    def __str__(self) -> str:
        lines = [["parameter", "weights", "kept", "removed"]]
        for row in (*self.rows, self.total):
            lines.append([row.name, f"{row.weights:,}", f"{row.kept:,}", f"{row.sparsity:.1%}"])
        table = aligned(lines)
        if self.expected_loss_change is not None:
            table.append(f"expected rise of the mean loss, to second order: {self.expected_loss_change:.3g}")
        return "\n".join(table)


@torch.no_grad()
def pruning_report(model_or_posterior: nn.Module | Posterior, masks: Mapping[str, Tensor]) -> PruningReport:
    """What the masks remove from each parameter; with a posterior, also the loss that this is expected to cost."""
    require_one_network(model_or_posterior, "a report on pruning")
    posterior = model_or_posterior if isinstance(model_or_posterior, Posterior) else None
    model = unwrap(posterior.model if posterior is not None else model_or_posterior)  # type: ignore[arg-type]
    found, parameters = checked_masks(model, masks), dict(model.named_parameters())
    removed = {name: ~mask for name, mask in found.items() if not bool(mask.all())}
    if posterior is None or (removed and not posterior.structure.independent) or removed.keys() - posterior.mode.keys():
        return PruningReport.of(parameters, found)
    settings, cost = posterior.settings, 0.0
    for name, gone in removed.items():
        here = gone.to(posterior.mode[name].device)
        theta, v = posterior.mode[name][here], posterior.structure.second_moment[name][here]
        costs = curvature(v, settings.power).mul_(settings.weight / settings.n_data).mul_(theta.square())
        cost += 0.5 * float(costs.sum(dtype=wide(costs)))
    return PruningReport.of(parameters, found, cost)
