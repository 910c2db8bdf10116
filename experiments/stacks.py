"""Stacks of small networks under any rule: what the library's own stack need not do.

`bayesadam.engine` trains by Adam. Here a rule may perturb the weights, and its memory be any tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesadam.engine import stack
from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, unflatten
from bayesadam.engine.rules import EPS
from bayesadam.engine.stack import Schedule
from bayesadam.engine.streams import Streams, epochs
from experiments.rules import Adam, Drawn, Gaussian, Rule, Step

Batch = Callable[[Tensor], tuple[Tensor, Slope]]
# Rows are drawn for this many steps at a time where an epoch has fewer steps than the second number.
_BLOCK, _LONG_EPOCH = 256, 20


def blocks(n: int, size: int, seeds: Sequence[int], steps: int) -> Iterator[Tensor]:
    """The rows of so many steps in blocks, (k, s, size): epochs, or with replacement where an epoch is very short."""
    in_epochs = n // size >= _LONG_EPOCH
    length = n // size if in_epochs else _BLOCK
    streams, shuffled = Streams(seeds, "batches"), epochs(n, size, seeds)
    for done in range(0, steps, length):
        drawn = next(shuffled) if in_epochs else streams.rows(n, length, size).transpose(0, 1)
        yield drawn[: steps - done]


class Stack(stack.Stack):
    """Networks of one shape, one per seed, under one rule.

    Attributes:
        n_data: N, which a rule may need.
        scale: turns the gradient into that of the mean negative log-likelihood, (s, 1), for rules that need it.
        penalties: λ of a penalty (λ/2)|θ|² per network, (s, 1), or None.
    """

    def __init__(
        self, network: Network, rule: Rule, seeds: Sequence[int], batch: Batch, *, n_data: float = 1.0, **options: Any
    ) -> None:
        super().__init__(network, rule, seeds, partial(map, batch), **options)  # type: ignore[arg-type]
        self.batch = batch
        self.rule: Rule = rule  # type: ignore[assignment]
        self.n_data = torch.tensor(float(n_data), device=self.weights.device)
        self.scale = torch.ones(len(seeds), 1, device=self.weights.device)
        self.penalties: Tensor | None = None

    @torch.no_grad()
    def train(self, rows: Tensor, schedule: Schedule) -> None:
        """A step for each of the rows, (k, s, b); the schedule maps steps done before, float64 (k,), to rates."""
        rule, network = self.rule, self.network
        if not self.done:
            self.state = rule.start(self.weights, self.n_data)
            self._at = torch.empty_like(self.weights) if rule.needs_noise else self.weights
            self._by_rule = rule.gradient(network, self._at, self.state)
        done = torch.arange(self.done, self.done + len(rows), dtype=torch.float64, device=self.weights.device)
        newest = 1 - (done / (done + 1)).clamp_(max=self.average)
        rates = torch.stack([schedule(done), *(1 - beta ** (done + 1) for beta in rule.betas), newest], dim=1).float()
        for (lr, first, second, share), chosen in zip(rates, rows.to(self.weights.device), strict=True):
            step, noise = Step(lr, first, second, self.n_data), rule.noise(self.streams, network, rows.shape[2])
            x, slope = self.batch(chosen)
            rule.at(self.weights, self.state, noise, step, self._at)
            gradient = self._by_rule(x, slope, masks=rule.masks(noise, network))
            if self.clip < torch.inf:
                norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
                gradient.mul_((self.clip / norm.clamp_(min=1e-12)).clamp_(max=1))
            if rule.needs_noise:
                gradient.mul_(self.scale)
            if self.penalties is not None:
                gradient.addcmul_(self.weights, self.penalties)
            rule.update(self.weights, gradient, self.state, noise, step)
            if self.average:
                self.mean.lerp_(self.weights, share)
        self.done += len(rows)

    def gaussian(self) -> Gaussian | None:
        """What the rule ends with, around the `mean`."""
        return self.rule.gaussian(self.mean, self.state, self.n_data)

    def functions(self, index: int, n: int, streams: Streams) -> Drawn:
        """n functions drawn from one network's posterior; `streams` has that network's seed alone."""
        state = {name: t[index : index + 1] if t.dim() > 1 else t for name, t in self.state.items()}
        return self.rule.sample(self.network, self.mean[index : index + 1], state, self.n_data, streams, n)

    def state_dict(self, index: int) -> dict[str, Any]:
        """One network's part of Adam's memory, as torch's Adam for that network alone would save it."""
        assert isinstance(self.rule, Adam)
        first, second = (unflatten(self.network, self.state[n][index, None].cpu()) for n in ("exp_avg", "exp_avg_sq"))
        step, names = self.state["step"][0].cpu(), list(first)
        entries = {i: {"step": step, "exp_avg": first[n][0], "exp_avg_sq": second[n][0]} for i, n in enumerate(names)}
        group = {"lr": 0.0, "betas": self.rule.betas, "eps": EPS, "weight_decay": self.rule.weight_decay}
        return {"state": entries, "param_groups": [group | {"params": [*entries], "param_names": names}]}
