"""Which outputs a prediction is of: as directions u of the outputs of one place, variances being those of u · f."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import Likelihood

# Of more classes than these the largest alone are looked at, unless others are asked for.
MANY_CLASSES = 100


@dataclass(frozen=True)
class Top:
    """The k largest outputs of every place."""

    k: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise SettingError(f"Top(k) is of at least one output, got k={self.k!r}")


Outputs = Literal["all", "top"] | Top | Tensor | Sequence[int]


def checked_outputs(outputs: Outputs | None) -> Top | Tensor | None:
    """What a user asks for as a record: None for every output."""
    if outputs is None or (isinstance(outputs, str) and outputs == "all"):
        return None
    if isinstance(outputs, str) and outputs == "top":
        return Top()
    if isinstance(outputs, Top):
        return outputs
    if isinstance(outputs, str) or not isinstance(outputs, Tensor | Sequence):
        raise SettingError(
            f"outputs must be 'all', 'top', Top(k), the outputs' numbers, or the rows of a matrix of combinations, got {outputs!r}"
        )
    found = outputs if isinstance(outputs, Tensor) else torch.tensor(outputs, dtype=torch.int64)
    is_real = found.is_floating_point()
    if found.dtype == torch.bool or found.is_complex() or not 1 + is_real <= found.dim() <= 3:
        raise SettingError(
            "outputs must be whole numbers, (k,), (batch, k) or (batch, places, k), or real combinations, (k, outputs) or "
            f"(batch, k, outputs), got {found.dtype} of shape {tuple(found.shape)}"
        )
    return found


@dataclass(frozen=True, eq=False)
class Asked:
    """Directions of the outputs of one place: those asked for, then the rest of the softmax, then random ones.

    Attributes:
        outputs: the largest, numbers (k,) or (batch, k), or combinations (k, c) or (batch, k, c).
        record: the likelihood.
        noise_variance: σ², where the likelihood has one.
        rest: whether Σ_rest softmax(f) f is among them, whose variance is that of log Σ_rest exp f.
        probes: how many random directions u = A r there are, A Aᵀ the Hessian of −log p and r signs: E (u · f)² = tr(H Cov f).
        seed: of the signs.
        temperature: T, by which logits are divided in H.
    """

    outputs: Top | Tensor
    record: Likelihood[Any]
    noise_variance: Tensor | None
    rest: bool
    probes: int
    seed: int
    temperature: float = 1.0

    @property
    def is_combination(self) -> bool:
        """Whether combinations are asked for, and not outputs."""
        return isinstance(self.outputs, Tensor) and self.outputs.is_floating_point()

    @property
    def k(self) -> int:
        """How many are asked for; a heteroscedastic target is two outputs."""
        if isinstance(self.outputs, Top):
            return self.outputs.k * self.record.outputs_per_target
        count = self.outputs.shape[-2 if self.is_combination else -1]
        return count if self.is_combination else count * self.record.outputs_per_target

    @property
    def count(self) -> int:
        """d, how many directions."""
        return self.k + self.rest + self.probes

    def within(self, outputs: int) -> Asked:
        """The same of a network with so many outputs, which has no more largest ones, and all whose numbers are asked for."""
        most = outputs // self.record.outputs_per_target
        if isinstance(self.outputs, Top):
            return self if self.outputs.k <= most else replace(self, outputs=Top(most))
        if not self.is_combination and self.outputs.numel():
            least, largest = int(self.outputs.min()), int(self.outputs.max())
            if least < 0 or largest >= most:
                raise MatchError(f"outputs are numbered from 0 to {most - 1}, got {least} to {largest}")
        return self

    @property
    def key(self) -> tuple[Any, ...]:
        """What two of them must have in common to be the same work on other tensors."""
        kind = self.outputs if isinstance(self.outputs, Top) else (self.outputs.dim(), self.outputs.dtype)
        return Asked, kind, self.record.name, self.rest, self.probes, self.temperature, self.noise_variance is None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it holds."""
        return tuple(each for each in (self.outputs, self.noise_variance) if isinstance(each, Tensor))

    def over(self, tensors: Sequence[Tensor]) -> Asked:
        """The same with other tensors in place of `tensors`."""
        given = iter(tensors)
        outputs = next(given) if isinstance(self.outputs, Tensor) else self.outputs
        return replace(self, outputs=outputs, noise_variance=None if self.noise_variance is None else next(given))

    def signs(self, outputs: Tensor, start: int) -> Tensor:
        """Random signs for outputs of such a shape, (b, c), of the examples from `start` on: (probes, b, c)."""
        return _signs(self.probes, outputs, self.seed + start)

    def __call__(self, outputs: Tensor, start: int, signs: Tensor) -> tuple[Tensor, Tensor]:
        """(b, c), those of the examples from `start` on → u, (d, b, c), and the numbers of the outputs asked for, (b, k)."""
        b, c = outputs.shape
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.is_combination:
            own = self.combinations(wide, start)
            numbers = torch.zeros(b, 0, dtype=torch.int64, device=outputs.device)
        else:
            numbers = self.numbers(wide, start)
            own = wide.new_zeros(b, numbers.shape[1], c).scatter_(2, numbers.unsqueeze(-1), 1.0).transpose(0, 1)
        parts = [own]
        if self.rest:
            parts.append(rest_weights(wide, numbers)[None])
        if self.probes:
            parts.append(_hessian_root(self, wide, signs))
        return torch.cat(parts), numbers

    def combinations(self, outputs: Tensor, start: int) -> Tensor:
        """The combinations asked for, (k, b, c), of outputs (b, c)."""
        assert isinstance(self.outputs, Tensor)
        own = self._rows(self.outputs, start, len(outputs), 2).transpose(0, 1).to(outputs)
        if own.shape[-1] != outputs.shape[1]:
            raise MatchError(f"the combinations are of {own.shape[-1]} outputs, and the network has {outputs.shape[1]}")
        return own

    def numbers(self, outputs: Tensor, start: int) -> Tensor:
        """The outputs asked for by number, (b, k), of outputs (b, c)."""
        b, c = outputs.shape
        if isinstance(self.outputs, Top):
            targets = self.record.locations(outputs).topk(self.outputs.k, dim=1).indices
        else:
            targets = self._rows(self.outputs, start, b, 1).to(outputs.device, torch.int64)
        pairs = [
            targets + part * (c // self.record.outputs_per_target) for part in range(self.record.outputs_per_target)
        ]
        return torch.cat(pairs, dim=1)

    def _rows(self, given: Tensor, start: int, size: int, dims: int) -> Tensor:
        """What is asked for of each of some examples, where it was given once, or for each."""
        if given.dim() == dims:
            return given.expand(size, *given.shape)
        if len(given) < start + size:
            raise MatchError(f"outputs are asked for of {len(given)} examples, and the batch has more")
        return given[start : start + size]


@dataclass(frozen=True, eq=False)
class Probes:
    """Random directions alone, over all places of an example: E (u · f)² = Σ tr(H Cov f) over places.

    Attributes:
        shape: of an example's outputs; None for one place.
        places: which of them count, (batch, places); None for all.
    """

    record: Likelihood[Any]
    noise_variance: Tensor | None
    count: int
    seed: int
    temperature: float = 1.0
    shape: torch.Size | None = None
    places: Tensor | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What two of them must have in common to be the same work on other tensors."""
        given = self.noise_variance is None, self.places is None
        return Probes, self.record.name, self.count, self.temperature, self.shape, given

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it holds."""
        return tuple(each for each in (self.noise_variance, self.places) if each is not None)

    def over(self, tensors: Sequence[Tensor]) -> Probes:
        """The same with other tensors in place of `tensors`."""
        given = iter(tensors)
        noise = None if self.noise_variance is None else next(given)
        return replace(self, noise_variance=noise, places=None if self.places is None else next(given))

    def signs(self, outputs: Tensor, start: int) -> Tensor:
        """Random signs for outputs of such a shape, (b, c), of the examples from `start` on: (count, b, c)."""
        return _signs(self.count, outputs, self.seed + start)

    def __call__(self, outputs: Tensor, start: int, signs: Tensor) -> tuple[Tensor, Tensor]:
        """(b, c) → u, (d, b, c), and no numbers."""
        shape = outputs.shape[1:] if self.shape is None else self.shape
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).reshape(len(outputs), *shape)
        u = _hessian_root(self, wide, signs.reshape(self.count, *wide.shape))
        if self.places is not None:
            some = self.places[start : start + len(outputs)].to(u.device)
            u = u * some.reshape(*u.shape[1:-1], 1)
        return u.flatten(2), torch.zeros(len(outputs), 0, dtype=torch.int64, device=outputs.device)


def _signs(count: int, outputs: Tensor, seed: int) -> Tensor:
    """±1, (count, *shape), in float32 or wider."""
    generator = torch.Generator(device=outputs.device).manual_seed(seed)
    half = torch.rand(count, *outputs.shape, generator=generator, device=outputs.device) < 0.5
    return torch.where(half, -1.0, 1.0).to(torch.promote_types(outputs.dtype, torch.float32))


def _hessian_root(asked: Asked | Probes, outputs: Tensor, signs: Tensor) -> Tensor:
    """A r of random signs r, (d, b, ..., c), A Aᵀ the Hessian of −log p at outputs (b, ..., c)."""
    t = asked.temperature
    return asked.record.hessian_root_times(outputs / t, signs, asked.noise_variance) / t


def rest_weights(outputs: Tensor, numbers: Tensor) -> Tensor:
    """softmax over the classes that are not among the numbers, (b, c): the gradient of log Σ_rest exp f; 0 where none is left."""
    masked = outputs.scatter(1, numbers, -torch.inf)
    return masked.softmax(dim=1).nan_to_num(0.0)
