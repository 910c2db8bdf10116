"""Fine-tuning a few weights of a network: those that its data determine most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bayesadam._alone import unwrap
from bayesadam.errors import MatchError, SettingError
from bayesadam.merging.experts import diagonal_of
from bayesadam.posterior import Posterior
from bayesadam.posterior.mixture import require_posterior
from bayesadam.pruning.masks import pruning_masks
from bayesadam.pruning.names import checked_masks
from bayesadam.readers import listed_optimizers


def tuning_masks(posterior: Posterior, share: float, *, exclude: str | Sequence[str] = ()) -> dict[str, Tensor]:
    """Masks, True at the share of the weights with the largest curvature v̂: those to fine-tune (Sung et al. 2021).

    They have the form of `pruning_masks`, so that `save_masks` and `load_masks` serve them. Of n weights n − round((1 − share) n)
    are chosen, over all parameters together.

    Args:
        posterior: of the network before fine-tuning, or after a few steps of it.
        share: above 0 and up to 1.
        exclude: parameters that are trained as a whole, such as a new head: as in `pruning_masks`.
    """
    require_posterior(posterior, "sparse fine-tuning")
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < float(share) <= 1:
        raise SettingError(f"share must be above 0 and at most 1, the share of weights to train, got {share!r}")
    scores = {name: diagonal_of(posterior.structure, name) for name in posterior.mode}
    masks = pruning_masks(posterior, 1 - float(share), ranking=scores, exclude=exclude)
    if not any(bool(mask.any()) for mask in masks.values()):
        raise SettingError(f"share={share!r} of {posterior.n_weights} weights is not one: nothing would be trained")
    return masks


class TuningHandle:
    """Holds all but the chosen weights of a model where they are, until `remove` or the end of the `with` block."""

    def __init__(self, held: Sequence[tuple[nn.Parameter, Tensor]], optimizers: Sequence[Optimizer]) -> None:
        self._held = [(parameter, fixed, parameter.detach().clone()) for parameter, fixed in held]
        self._hooks: list[RemovableHandle] = [
            parameter.register_hook(lambda gradient, fixed=fixed: gradient.masked_fill(fixed, 0))  # type: ignore[no-untyped-call]
            for parameter, fixed in held
            if parameter.requires_grad
        ]
        self._hooks += [optimizer.register_step_post_hook(self.apply) for optimizer in optimizers]

    @torch.no_grad()
    def apply(self, *_: Any) -> None:
        """Put the other weights back, whatever weight decay and momentum did to them."""
        for parameter, fixed, before in self._held:
            parameter.copy_(torch.where(fixed, before, parameter))

    def remove(self) -> None:
        """Let all weights go."""
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> TuningHandle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def tune_only(
    model: nn.Module, masks: Mapping[str, Tensor], optimizer: Optimizer | Sequence[Optimizer]
) -> TuningHandle:
    """Train only the weights at which the masks are True; parameters without a mask stay as they are.

    Gradients of the others are 0 before they reach the norm of a clipping or the optimiser, and after every step the
    others are put back. Use it in a `with` block, or call `remove` at the end. It keeps a copy of the weights.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> before = model.weight.detach().clone()
    >>> with tune_only(model, {"weight": torch.tensor([[True, False]])}, optimizer):
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> (model.weight != before).tolist()
    [[True, False]]
    """
    inner = unwrap(model)
    found = checked_masks(inner, masks)
    if not any(bool(mask.any()) for mask in found.values()):
        raise SettingError("the masks are False throughout: nothing would be trained")
    optimizers = listed_optimizers(optimizer)
    trained = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    held = []
    for name, parameter in inner.named_parameters():
        chosen = found.get(name)
        if chosen is not None and bool(chosen.any()) and id(parameter) not in trained:
            raise MatchError(f"{name!r} is to be trained, and the optimiser does not have it: pass the one that has")
        fixed = torch.ones_like(parameter, dtype=torch.bool) if chosen is None else ~chosen.to(parameter.device)
        if id(parameter) in trained and bool(fixed.any()):
            held.append((parameter, fixed))
    return TuningHandle(held, optimizers)
