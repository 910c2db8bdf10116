"""The gradients of an optimiser's last steps: what richer posteriors than a diagonal are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from bayesadam._alone import in_eval_mode, listed_optimizers
from bayesadam._checks import count, require_kind
from bayesadam._progress import progress
from bayesadam.errors import MatchError
from bayesadam.readers.curvature import Curvature
from bayesadam.readers.match import Match, match_optimizers
from bayesadam.readers.tracking import Hooked, on_gradients, whole_gradient


class Recorder(Hooked):
    """Keeps the last K mini-batch gradients, one of every k steps, as the optimiser was given them.

    Each costs a copy of the gradients, and K times the weights' memory. They are taken after clipping and unscaling,
    before any weight decay.

    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> recorder = Recorder(optimizer, keep=4, every=1)
    >>> for _ in range(6):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 3)).square().mean().backward()
    ...     optimizer.step()
    >>> recorder.gradients(model)["weight"].shape
    torch.Size([4, 2, 3])

    Args:
        optimizer: the optimiser, or several that step together over one model.
        keep: K.
        every: k.
    """

    def __init__(self, optimizer: Optimizer | Sequence[Optimizer], *, keep: int = 50, every: int = 10) -> None:
        count("keep", keep, "gradients")
        count("every", every, "steps")
        super().__init__(listed_optimizers(optimizer))
        self.keep, self.every = keep, every
        self.batch_size: int | None = None
        self._steps = [0] * len(self.optimizers)
        self._rings: dict[Tensor, Tensor] = {}
        for index, recorded in enumerate(self.optimizers):
            self._handles += on_gradients(recorded, partial(self._record, index))

    @classmethod
    def from_batches(
        cls, model: nn.Module, batches: Iterable[Any], loss_fn: Callable[[Any, Any], Tensor], *, keep: int = 50
    ) -> Recorder:
        """The gradients of K mini-batches at a trained model's weights, in eval mode, whatever trained it.

        Args:
            batches: (inputs, targets), or mappings that the model takes; a smaller last batch is left out.
            loss_fn: of (outputs, targets), or of (outputs, mapping): a mean over the batch.
            keep: K; more batches are not read.
        """
        require_kind(model, nn.Module, "model")
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            raise MatchError(f"every parameter of {type(model).__name__} is frozen: requires_grad_(True) for some")
        # It is never stepped: recorders know their parameters by an optimiser.
        recorder = cls(torch.optim.SGD(parameters, lr=0.0), keep=keep, every=1)
        device = parameters[0].device
        with in_eval_mode(model), torch.inference_mode(False), torch.enable_grad():
            for batch in progress(batches, "recording gradients"):
                batch = pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
                inputs, targets = (batch, batch) if isinstance(batch, Mapping) else batch
                size = len(pytree.tree_leaves(dict(batch) if targets is batch else batch)[0])
                recorder.batch_size = recorder.batch_size or size
                if size != recorder.batch_size:
                    continue
                if isinstance(inputs, Mapping):
                    outputs = model(**inputs)
                else:
                    outputs = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
                gradients = torch.autograd.grad(loss_fn(outputs, targets), parameters, allow_unused=True)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        recorder._keep(parameter, gradient, recorder._steps[0], None)
                recorder._steps[0] += 1
                if recorder.recorded == keep:
                    break
        recorder.remove()
        return recorder

    @property
    def recorded(self) -> int:
        """How many gradients are stored now, K at most."""
        if len(set(self._steps)) > 1:
            raise MatchError(f"the optimisers have taken {self._steps} steps since: they must step together")
        return min(-(-self._steps[0] // self.every), self.keep)

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """The gradients by the model's parameter names, (K, *shape), in no order; 0 where a step had none."""
        return self.matched(match_optimizers(model, self.optimizers, "ogd"))

    def matched(self, match: Match) -> dict[str, Tensor]:
        """The same for matched parameters."""
        if self.recorded == 0:
            raise MatchError("the recorder has seen no step yet: attach it before training, and train")
        entries = [entry for entry in match.entries if entry.parameter in self._rings]
        recorded = {entry.name: self._rings[entry.parameter][: self.recorded] for entry in entries}
        for name, gradients in recorded.items():
            if not bool(torch.isfinite(gradients).all()):
                raise MatchError(f"a recorded gradient of {name!r} is not finite: train on until it is overwritten")
        return recorded

    def _record(self, index: int, optimizer: Optimizer, scale: Tensor | None) -> None:
        taken, rest = divmod(self._steps[index], self.every)
        self._steps[index] += 1
        for group in optimizer.param_groups if rest == 0 else ():
            for parameter in group["params"]:
                self._keep(parameter, parameter.grad, taken % self.keep, scale)

    def _keep(self, parameter: Tensor, gradient: Tensor | None, row: int, scale: Tensor | None) -> None:
        ring = self._rings.get(parameter)
        if gradient is None:
            if ring is not None:
                ring[row].zero_()
            return
        dense = whole_gradient(parameter, gradient, scale)
        if ring is None:
            ring = self._rings[parameter] = dense.new_zeros((self.keep, *parameter.shape))
        ring[row].copy_(dense)


def read_recorder(match: Match, recorder: Recorder) -> tuple[Curvature, dict[str, Tensor]]:
    """The recorded gradients by name, and the mean of their squares as a `Curvature`."""
    gradients = recorder.matched(match)
    never = {entry.name: "no gradient was recorded" for entry in match.entries if entry.name not in gradients}
    curvature = Curvature(
        second_moment={name: g.square().mean(dim=0) for name, g in gradients.items()},
        steps=dict.fromkeys(gradients, float(recorder.recorded)),
        weight_decay={entry.name: entry.weight_decay for entry in match.entries if entry.name in gradients},
        reader=dict.fromkeys(gradients, "recorder"),
        omitted={**match.omitted, **never},
    )
    return curvature, gradients
