"""Stacks of small networks under any rule, captured as CUDA graphs: what the library's own stack need not do.

`bayesadam.engine` trains by Adam, step by step. Here a rule may perturb the weights, its memory be any tensors, units
and inputs be dropped; random numbers are drawn on the networks' device, and a step on CUDA is a replayed graph.
"""

import gc
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bayesadam.engine import network, rules, streams
from bayesadam.engine.gradients import StackedGradient
from bayesadam.engine.network import dropout_mask, flatten, initial, unflatten
from bayesadam.engine.rules import EPS, State
from bayesadam.engine.stack import Batch, Schedule
from bayesadam.engine.streams import epochs
from bayesadam.errors import SettingError
from bayesadam.weights.draws import stream_seed

Number = float | Tensor
# The most steps in one CUDA graph.
_STEPS_PER_GRAPH = 20
# Rows are drawn for this many steps at a time where an epoch has fewer steps than the second number.
_BLOCK = 256
_LONG_EPOCH = 20
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Network(network.Network):
    """The engine's, with inputs that are dropped in training, too, with the probability `input_dropout`."""

    input_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.input_dropout < 1:
            raise SettingError(f"input_dropout must be at least 0 and below 1, got {self.input_dropout!r}")

    def build(self, params: Mapping[str, Tensor]) -> nn.Sequential:
        built = super().build(params)
        if not self.input_dropout:
            return built
        return nn.Sequential(OrderedDict([("input_dropout", nn.Dropout(self.input_dropout)), *built.named_children()]))


class Streams(streams.Streams):
    """The engine's, on any device. Streams differ between kinds of device."""

    def __init__(self, seeds: Sequence[int], purpose: str, device: str | torch.device = "cpu") -> None:
        super().__init__(seeds, purpose)
        self.device = torch.device(device)
        # A captured CUDA graph must register these.
        self.generators = [
            torch.Generator(device).manual_seed(stream_seed(seed, purpose))
            for seed in (seeds if self.device.type != "cpu" else ())
        ]

    def normal(self, *shape: int) -> Tensor:
        return self._on_device(torch.randn, shape) if self.generators else super().normal(*shape)

    def uniform(self, *shape: int) -> Tensor:
        return self._on_device(torch.rand, shape) if self.generators else super().uniform(*shape)

    def rows(self, n: int, *shape: int) -> Tensor:
        if not self.generators:
            return super().rows(n, *shape)
        return torch.stack([torch.randint(n, shape, generator=g, device=self.device) for g in self.generators])

    def _on_device(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        return torch.stack([draw(shape, generator=g, device=self.device) for g in self.generators])


def blocks(n: int, size: int, seeds: Sequence[int], steps: int) -> Iterator[Tensor]:
    """The rows of so many steps in blocks, (k, s, size): epochs, or with replacement where an epoch is very short."""
    in_epochs = n // size >= _LONG_EPOCH
    length = n // size if in_epochs else _BLOCK
    streams, shuffled = Streams(seeds, "batches"), epochs(n, size, seeds)
    for done in range(0, steps, length):
        drawn = next(shuffled) if in_epochs else streams.rows(n, length, size).transpose(0, 1)
        yield drawn[: steps - done]


class Step(NamedTuple):
    """α, 1 − β₁ᵗ, 1 − β₂ᵗ and N of one step: Python's numbers, or tensors () that a captured graph reads."""

    lr: Number
    first: Number
    second: Number
    n_data: Number


class Rule(ABC):
    """One way to learn; it holds settings only.

    All functions work on flat weights (s, weights), one row per network, and write into the memory that `start` made,
    so that a step can be captured as a CUDA graph. Its tensors of two dimensions or more have one row per network.
    """

    # Whether the gradient is that of the mean negative log-likelihood at weights that `at` writes.
    needs_noise: ClassVar[bool] = False
    betas: tuple[float, float]

    @abstractmethod
    def start(self, weights: Tensor, n_data: Number) -> State:
        """The memory besides the weights, by name."""

    def noise(self, streams: Streams, network: Network, batch: int, *lead: int) -> Tensor:
        """The random numbers of a step, or of many with leading dimensions: (s, *lead, ...); empty for none."""
        return torch.empty(0)

    def masks(self, noise: Tensor, network: Network) -> list[Tensor] | None:
        """The factors of inputs and of every hidden layer's units, (s, b, units) each, where units are dropped."""
        return None

    def gradient(self, network: Network, weights: Tensor, state: State) -> StackedGradient:
        """What takes the gradient at the weights that `at` writes."""
        return StackedGradient(network, weights)

    def at(self, weights: Tensor, state: State, noise: Tensor, step: Step, out: Tensor) -> None:  # noqa: B027
        """Write the weights at which the gradient is taken into `out`; `noise` may be overwritten."""

    @abstractmethod
    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        """One step, in place; `gradient` may be overwritten."""


def adam_state(weights: Tensor) -> State:
    """Zeros for m, v and the count of steps."""
    return rules.Adam().start(weights)


def adam_update(weights: Tensor, gradient: Tensor, state: State, lr: Number, rule: rules.Adam | None = None) -> None:
    """One step of Adam with a rule's settings, in place."""
    (rule or rules.Adam()).update(weights, gradient, state, lr)


def second_moment(state: Mapping[str, Tensor], beta2: float) -> Tensor:
    """v̂ = v/(1 − β₂ᵗ), (s, weights); zeros before the first step."""
    steps = state["step"][0].double()
    return state["exp_avg_sq"] / (1 - beta2**steps).clamp(min=torch.finfo(torch.float32).tiny).float()


@dataclass(frozen=True)
class Adam(Rule):
    """The engine's, with the penalty (λ/2)|θ|² of a `weight_decay` λ."""

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0

    def start(self, weights: Tensor, n_data: Number) -> State:
        return adam_state(weights)

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor, step: Step) -> None:
        adam_update(weights, gradient, state, step.lr, rules.Adam(self.betas, self.weight_decay))


class Dropped(Rule):
    """The network's dropout, in prediction as in training (MC dropout), before the rule that it stands in front of."""

    def noise(self, streams: Streams, network: Network, batch: int, *lead: int) -> Tensor:
        """One uniform number for each unit of each example."""
        return streams.uniform(*lead, batch * sum(width for width, _ in _dropped(network)))

    def masks(self, noise: Tensor, network: Network) -> list[Tensor] | None:
        """(s, b, units) per layer, contiguous; first the inputs' where these are dropped."""
        dropped = _dropped(network)
        b = noise.shape[1] // sum(width for width, _ in dropped)
        parts = torch.split(noise, [b * width for width, _ in dropped], dim=1)
        return [dropout_mask(part.view(-1, b, width), r) for part, (width, r) in zip(parts, dropped, strict=True)]


def _dropped(network: Network) -> list[tuple[int, float]]:
    inputs = [(network.n_inputs, network.input_dropout)] if network.input_dropout else []
    return inputs + [(width, network.dropout) for width in network.hidden]


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

    def state_dict(self, index: int) -> dict[str, Any]:
        """One network's part of Adam's memory, as torch's Adam for that network alone would save it."""
        assert isinstance(self.rule, Adam)
        first, second = (unflatten(self.network, self.state[key][index, None].cpu()) for key in _MOMENTS)
        step, names = self.state["step"][0].cpu(), list(first)
        entries = {i: {"step": step, "exp_avg": first[n][0], "exp_avg_sq": second[n][0]} for i, n in enumerate(names)}
        group = {"lr": 0.0, "betas": self.rule.betas, "eps": EPS, "weight_decay": self.rule.weight_decay}
        return {"state": entries, "param_groups": [group | {"params": [*entries], "param_names": names}]}

    def tensors(self) -> dict[str, Tensor]:
        """The memory that makes up the state, by name."""
        averaged = {"mean": self.mean} if self.average else {}
        return {"weights": self.weights, **averaged, "n_data": self.n_data, "scale": self.scale, **self.state}


def train(stack: Stack, blocks: Iterable[Tensor], schedule: Schedule) -> None:
    """The training loop, block after block."""
    for rows in blocks:
        stack.prepare(rows, schedule)
        stack.run(len(rows))
