"""A backward pass whose gradients are contracted as they arrive, and dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesadam.predict.layers import Output, Use
from bayesadam.predict.plan import dense

# What some uses of layers contribute: their numbers, and a function of D at each of them.
Share = tuple[Sequence[int], Callable[[Mapping[int, Tensor]], Tensor]]


class Arriving:
    """The sum of shares, each added when the last D that it needs is there.

    Attributes:
        total: of the shares so far.
    """

    def __init__(self, uses: Sequence[Use], shares: Sequence[Share]) -> None:
        self.total: Tensor | float = 0.0
        self.shares = list(shares)
        self.missing = [set(indices) for indices, _ in shares]
        self.here: dict[int, Tensor] = {}
        self.at: dict[Output, list[int]] = {}
        for index in sorted({index for indices, _ in shares for index in indices}):
            self.at.setdefault(uses[index].output, []).append(index)
        self.by_use = {index: k for k, (indices, _) in enumerate(shares) for index in indices}

    def pull(self, source: Tensor, cotangent: Tensor) -> None:
        """One backward pass from the source."""
        last = _farthest(list(self.at))
        handles = [self._hooked(output) for output in self.at if output not in last]
        try:
            edges = [output.edge for output in last if output.edge is not None]
            found = torch.autograd.grad(source, edges, cotangent, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for output, d in zip(last, found, strict=True):
            self._arrived(output, d)
        for number, (_, share) in enumerate(self.shares):
            # Uses that nothing was pulled back to are left out.
            if self.missing[number]:
                self._add(number, share)

    def _hooked(self, output: Output) -> Any:
        assert output.edge is not None
        number = output.edge.output_nr
        return output.edge.node.register_prehook(lambda grads: self._arrived(output, grads[number]))

    def _arrived(self, output: Output, d: Tensor | None) -> None:
        if d is None:
            return
        for index in self.at[output]:
            self.here[index] = dense(d).unsqueeze(0)
            number = self.by_use[index]
            self.missing[number].discard(index)
            if not self.missing[number]:
                self._add(number, self.shares[number][1])

    def _add(self, number: int, share: Callable[[Mapping[int, Tensor]], Tensor]) -> None:
        mine = {index: self.here.pop(index) for index in self.shares[number][0] if index in self.here}
        if mine:
            with torch.no_grad():
                self.total = self.total + share(mine)


def _farthest(outputs: Sequence[Output]) -> list[Output]:
    """Those behind which no other one lies: the paths to them lead through all the others."""
    nodes = {output.edge.node for output in outputs if output.edge is not None}
    beyond: dict[Any, bool] = {}
    for start in nodes:
        stack = [start]
        while stack:
            node = stack[-1]
            if node in beyond:
                stack.pop()
                continue
            before = [each for each, _ in node.next_functions if each is not None]
            waiting = [each for each in before if each not in beyond]
            if waiting:
                stack.extend(waiting)
                continue
            beyond[node] = any(each in nodes or beyond[each] for each in before)
            stack.pop()
    return [output for output in outputs if output.edge is not None and not beyond[output.edge.node]]
