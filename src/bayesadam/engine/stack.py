"""A stack of small networks that learn by one rule: their memory, and the step, eager or captured as a CUDA graph."""

import gc
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from bayesadam.engine.gradients import Slope
from bayesadam.engine.network import Network, flatten, initial, unflatten
from bayesadam.engine.rules import Rule, State, Step
from bayesadam.engine.streams import Streams

# The most steps in one CUDA graph.
_STEPS_PER_GRAPH = 20
Batch = Callable[[Tensor], tuple[Tensor, Slope]]
Schedule = Callable[[Tensor], Tensor]


class Stack:
    """Networks of one shape, one per seed, under one rule.

    Training runs in blocks. `prepare` writes the rows and learning rates that a block's steps read, `run` takes the
    steps. A step changes device memory only, so that on CUDA it is captured as a graph and replayed.

    Args:
        seeds: one per network; a seed's numbers do not depend on the other seeds.
        batch: from rows (s, b) to inputs (s, b, inputs) and the function that gives ∂loss/∂f.
        weights: flat weights to start from, (s, weights); None draws them from the seeds.
        average: β of a moving average of the weights, `mean`, which is the weights themselves for 0.
        clip: the norm at which each network's gradient is clipped.
        predraw: on CUDA, draw a block's random numbers outside the graph, which is faster and takes more memory.

    Attributes:
        scale: turns the gradient into that of the mean negative log-likelihood, (s, 1), for rules that need it.
        penalty: λ of a penalty (λ/2)|θ|² per network, (s, 1), or None.
    """

    def __init__(
        self,
        network: Network,
        rule: Rule,
        seeds: Sequence[int],
        batch: Batch,
        *,
        n_data: float = 1.0,
        weights: Tensor | None = None,
        device: str | torch.device = "cpu",
        average: float = 0.0,
        clip: float | None = None,
        predraw: bool = False,
    ) -> None:
        self.network, self.rule, self.seeds, self.batch = network, rule, tuple(seeds), batch
        self.device = torch.device(device)
        self.weights = flatten(initial(network, seeds, device=device)) if weights is None else weights
        self.n_data = torch.tensor(float(n_data), device=device)
        self.state: State = rule.start(self.weights, self.n_data)
        self.average, self.clip = average, clip
        self.mean = self.weights.clone() if average else self.weights
        self.done = 0
        self.scale = torch.ones(len(seeds), 1, device=device)
        self.penalty: Tensor | None = None
        self.streams = Streams(seeds, "training", device)
        self._at = torch.empty_like(self.weights) if rule.needs_noise else self.weights
        self._gradient = rule.gradient(network, self._at, self.state)
        self._predraw = predraw and self.device.type == "cuda"
        # Rates, rows and random numbers of the prepared block.
        self._block: list[Tensor] = []
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        # The captured graph, and how many steps it holds.
        self._replay: Callable[[], None] | None = None
        self._held = 1
        # In its first steps a library chooses its kernels, which cannot be captured; a restored stack has them too.
        self._warm_up = 3

    def prepare(self, rows: Tensor, schedule: Schedule) -> None:
        """Write what the next block reads: the rows of each step, (k, s, b), and the rates of the schedule.

        The schedule maps the number of steps done before each step, float64 (k,), to learning rates.
        """
        if not self.done:
            for name, tensor in self.rule.start(self.weights, self.n_data).items():
                self.state[name].copy_(tensor)
        # Made on the device: a copy from the host would wait for all that is queued there.
        done = torch.arange(self.done, self.done + len(rows), dtype=torch.float64, device=self.device)
        corrections = [1 - beta ** (done + 1) for beta in self.rule.betas]
        newest = 1 - (done / (done + 1)).clamp_(max=self.average)
        block = [torch.stack([schedule(done), *corrections, newest], dim=1).float(), rows.to(self.device)]
        if self._predraw:
            noise = self.rule.noise(self.streams, self.network, rows.shape[2], len(rows))
            block += [noise.transpose(0, 1)] if noise.numel() else []
        self._next.zero_()
        # A graph reads the memory that it was captured with.
        if [tensor.shape for tensor in block] == [tensor.shape for tensor in self._block]:
            for old, new in zip(self._block, block, strict=True):
                old.copy_(new)
        else:
            self._block, self._replay = [tensor.contiguous().clone() for tensor in block], None

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """Take the next steps of the prepared block; on CUDA, all but the first ones by replaying a graph."""
        left = steps
        while left:
            if self.device.type == "cuda" and self._replay is None and not self._warm_up:
                self._held = math.gcd(steps, _STEPS_PER_GRAPH)
                self._replay = self._captured(self._held)
            if self._replay is not None and left >= self._held:
                self._replay()
                left -= self._held
            else:
                self._step()
                left -= 1
                self._warm_up = max(0, self._warm_up - 1)
        self.done += steps

    def _step(self) -> None:
        rates, rows, *drawn = (tensor.index_select(0, self._next)[0] for tensor in self._block)
        lr, first, second, newest = rates.unbind()
        step, rule = Step(lr, first, second, self.n_data), self.rule
        noise = drawn[0] if drawn else rule.noise(self.streams, self.network, rows.shape[1])
        x, slope = self.batch(rows)
        rule.at(self.weights, self.state, noise, step, self._at)
        masks = rule.masks(noise, self.network)
        if masks is not None and self.network.input_dropout:
            x = x * masks.pop(0)
        gradient = self._gradient(x, slope, masks=masks)
        if self.clip is not None:
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((self.clip / norm.clamp_(min=1e-12)).clamp_(max=1))
        if rule.needs_noise:
            gradient.mul_(self.scale)
        if self.penalty is not None:
            gradient.addcmul_(self.weights, self.penalty)
        rule.update(self.weights, gradient, self.state, noise, step)
        if self.average:
            self.mean.lerp_(self.weights, newest)
        self._next += 1

    def _captured(self, steps: int) -> Callable[[], None]:
        """Steps as a CUDA graph; returns its replay."""
        graph = torch.cuda.CUDAGraph()
        for generator in [] if self._predraw else self.streams.generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        # An object that the garbage collector frees during the capture, an older graph for one, would end it.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph):
                for _ in range(steps):
                    self._step()
        finally:
            if collects:
                gc.enable()
        return graph.replay

    @property
    def params(self) -> dict[str, Tensor]:
        """The weights, or their moving average, (s, *shape) by name."""
        return unflatten(self.network, self.mean)

    def tensors(self) -> dict[str, Tensor]:
        """The memory that makes up the state, by name."""
        averaged = {"mean": self.mean} if self.average else {}
        return {"weights": self.weights, **averaged, "n_data": self.n_data, "scale": self.scale, **self.state}


def train(stack: Stack, blocks: Iterable[Tensor], schedule: Schedule) -> None:
    """The training loop, block after block."""
    for rows in blocks:
        stack.prepare(rows, schedule)
        stack.run(len(rows))


def constant(lr: float) -> Schedule:
    """α at every step."""
    return lambda done: torch.full_like(done, lr)


def cosine(lr: float, steps: int) -> Schedule:
    """α ½(1 + cos πt/T), from α down to nothing."""
    return lambda done: 0.5 * lr * (1 + torch.cos(math.pi * done / steps))
