"""A model with the inputs of its layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from bayesadam._alone import alone_with
from bayesadam.predict.batches import is_ragged
from bayesadam.predict.matrices import Matrix
from bayesadam.predict.network import Call, Forward, output_tensor, widened
from bayesadam.predict.tap import Layouts, Observed, Seen, Ways, by_example


class Tapped(nn.Module):
    """A copy of a model with the inputs of its layers: a batch → outputs, and pooled inputs by layer, (batch, width).

    Its parameters are not trained, and it stays in evaluation mode.
    """

    def __init__(self, model: nn.Module, layers: tuple[Matrix, ...], forward: Forward | None) -> None:
        super().__init__()
        self.model, self.call = model.requires_grad_(False).eval(), forward
        # Where the outputs have their classes; the answers have them last.
        self.class_dim = -1
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                # Nested tensors of texts without their padding have no shape, and are not exported.
                module.use_nested_tensor = False
        # The first real numbers, in a tuple, as a module's own parameters have names.
        self._numbers = next(((p,) for p in model.parameters() if p.is_floating_point()), (torch.empty(0),))
        self._seen: Seen | None = None
        self._layouts: Layouts = {}
        self._ways: Ways = {}
        self._handles: list[RemovableHandle] = []
        self.watch(layers)

    def watch(self, layers: tuple[Matrix, ...]) -> None:
        """Look at these layers, and at no others."""
        for handle in self._handles:
            handle.remove()
        self._layers = layers
        modules = dict(self.model.named_modules())
        self._handles = [
            modules[layer.module].register_forward_pre_hook(partial(self._see, layer), with_kwargs=True)
            for layer in layers
        ]

    @property
    def _dtype(self) -> torch.dtype:
        return self._numbers[0].dtype

    def forward(self, inputs: object) -> tuple[Tensor, dict[str, Tensor]]:
        """f(x), in float32 or wider, and the mean of a layer's inputs over positions and runs."""
        if torch.compiler.is_compiling() and not is_ragged(inputs):
            return self._once(inputs)[:2]
        with alone_with(self.model):
            return by_example(self._once, inputs, self._layouts, self._dtype)

    def _once(self, inputs: object) -> Observed:
        # A compiler would look at every known way at every call.
        ways = None if torch.compiler.is_compiling() else self._ways
        self._seen = seen = Seen.of(inputs, self._layers, ways=ways)
        try:
            typed = self._typed(inputs) if isinstance(inputs, Tensor) else pytree.tree_map(self._typed, inputs)
            raw = Call(self.model, self.call).run(typed)
        finally:
            self._seen = None
        outputs = widened(output_tensor(raw))
        outputs = outputs if self.class_dim == -1 else outputs.movedim(self.class_dim, -1)
        return outputs, seen.pooled(outputs), tuple(seen.layout)

    def _see(self, layer: Matrix, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a layer runs: keep its input."""
        if self._seen is not None:
            self._seen.add(layer, module, args, kwargs)

    def _typed(self, leaf: object) -> object:
        """Real numbers in the model's type, unless they are of another that it has too."""
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        first = self._dtype
        alike = leaf.dtype == first or leaf.dtype in {p.dtype for p in self.model.parameters()}
        return leaf if alike else leaf.to(first)
