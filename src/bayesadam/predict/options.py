"""What a prediction is of: its options, checked once, and the outputs and positions that they choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._checks import count
from bayesadam.errors import MatchError, SettingError
from bayesadam.likelihoods import Likelihood, LikelihoodName, Link, likelihood
from bayesadam.predict.call import Call, Forward, at_positions, batch_size, examples
from bayesadam.predict.layers import gram
from bayesadam.predict.plan import agree, weakly

PredictiveKind = Literal["linearised", "sampled", "linearised-sampled"]
Positions = Literal["all", "last"] | Tensor
# A GPU has the memory, and small pieces of work would not fill it.
DEFAULT_BUDGET = (8 if torch.cuda.is_available() else 1) << 30
# Of more classes than these the ten largest are predicted, unless others are asked for.
MANY_CLASSES = 100


@dataclass(frozen=True)
class Top:
    """The k largest outputs of every position."""

    k: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise SettingError(f"Top(k) is of at least one output, got k={self.k!r}")


Outputs = Literal["all", "top"] | Top | Tensor | Sequence[int]


@dataclass(frozen=True, eq=False)
class Options:
    """The keywords of `Distribution.predict`, checked.

    Attributes:
        chosen: the outputs that `outputs` chooses: the largest, indices or combinations; None for all.
        for_novelty: whether the posterior is itself under the settings of novelty, so that its moments serve for both.
    """

    likelihood: LikelihoodName
    predictive: PredictiveKind = "linearised"
    n_samples: int = 30
    covariance: bool = False
    link: Link = "probit"
    forward: Forward | None = None
    generator: torch.Generator | None = None
    memory_budget: int = DEFAULT_BUDGET
    novelty: bool | None = None
    outputs: Outputs | None = None
    positions: Positions | None = None
    probes: int | None = None
    captured: bool = True
    for_novelty: bool = False
    chosen: Top | Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        likelihood(self.likelihood)
        for name, allowed in (("predictive", get_args(PredictiveKind)), ("link", get_args(Link))):
            if getattr(self, name) not in allowed:
                raise SettingError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        object.__setattr__(self, "chosen", _checked_outputs(self.outputs))
        if not isinstance(self.positions, Tensor) and self.positions not in (None, "all", "last"):
            raise SettingError(
                f"positions must be 'all', 'last', an index for each example, or a boolean mask, got {self.positions!r}"
            )
        if self.novelty and self.predictive != "linearised":
            raise SettingError(f"novelty=True needs predictive='linearised', got {self.predictive!r}")
        count("n_samples", self.n_samples, "draws", least=2)
        count("memory_budget", self.memory_budget, "bytes")
        if self.probes is not None:
            count("probes", self.probes, "random directions", least=0)

    @property
    def record(self) -> Likelihood[Any]:
        """The likelihood of that name."""
        return likelihood(self.likelihood)

    @property
    def is_combination(self) -> bool:
        """Whether linear combinations of outputs are asked for."""
        return isinstance(self.chosen, Tensor) and self.chosen.is_floating_point()

    def choice(self, shape: torch.Size) -> Top | Tensor | None:
        """The outputs asked for where an example's have that shape; the largest of many classes; None for all."""
        if (self.chosen is not None or self.positions is not None) and not shape:
            raise SettingError(
                "outputs= and positions= choose among several: this network has one number for each example"
            )
        if self.chosen is not None:
            return self.chosen
        if self.has_many(shape):
            return Top()
        return None if self.positions is None else torch.arange(shape[-1] // self.record.outputs_per_target)

    def has_many(self, shape: torch.Size) -> bool:
        """Whether the largest outputs alone are looked at: there are many classes, and nothing else was asked for."""
        asked = self.outputs is not None or self.covariance or bool(self.novelty)
        many = bool(shape) and shape[-1] > MANY_CLASSES
        return many and self.record.coupled and self.predictive == "linearised" and not asked


def _checked_outputs(outputs: Outputs | None) -> Top | Tensor | None:
    if outputs is None or isinstance(outputs, Top):
        return outputs
    if isinstance(outputs, str) and outputs in ("all", "top"):
        return Top() if outputs == "top" else None
    if isinstance(outputs, str) or not isinstance(outputs, Tensor | Sequence):
        raise SettingError(
            f"outputs must be 'all', 'top', Top(k), the outputs' indices, or the rows of a matrix of combinations, "
            f"got {outputs!r}"
        )
    found = outputs if isinstance(outputs, Tensor) else torch.tensor(outputs, dtype=torch.int64)
    if found.dtype == torch.bool or found.is_complex() or not 1 + found.is_floating_point() <= found.dim() <= 3:
        raise SettingError(
            "outputs must be whole numbers, (k,), (batch, k) or (batch, positions, k), or real combinations, "
            f"(k, outputs) or (batch, k, outputs), got {found.dtype} of shape {tuple(found.shape)}"
        )
    return found


# --- rows over the outputs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Basis:
    """Rows u over the c outputs of b examples: unit vectors by index, (b, k), then others, `dense` (m, b, c)."""

    indices: Tensor
    dense: Tensor

    @classmethod
    def every(cls, outputs: Tensor) -> Basis:
        """The identity over outputs (b, c)."""
        b, c = outputs.shape
        return cls(torch.arange(c, device=outputs.device).expand(b, c), outputs.new_empty(0, b, c))

    def __len__(self) -> int:
        return self.indices.shape[1] + len(self.dense)

    def part(self, start: int, stop: int) -> Basis:
        """Rows `start` to `stop`."""
        k = self.indices.shape[1]
        return Basis(self.indices[:, start:stop], self.dense[max(0, start - k) : max(0, stop - k)])

    def vectors(self) -> Tensor:
        """All rows written out, (d, b, c)."""
        b, k = self.indices.shape
        units = self.dense.new_zeros(b, k, self.dense.shape[2]).scatter_(2, self.indices.unsqueeze(-1), 1.0)
        return torch.cat([units.transpose(0, 1), self.dense])

    def of(self, values: Tensor) -> Tensor:
        """u · values, (..., b, d), of values (..., b, c)."""
        chosen = values.gather(-1, self.indices.expand(*values.shape[:-1], -1))
        return torch.cat([chosen, torch.einsum("mbc,...bc->...bm", self.dense.to(values), values)], dim=-1)

    def times(self, matrix: Tensor) -> Tensor:
        """u M, (d, b, h), of M (c, h): unit vectors pick its rows."""
        if self.indices.stride(0) == 0:
            picked = matrix[self.indices[0]].unsqueeze(1).expand(-1, len(self.indices), -1)
        else:
            picked = matrix[self.indices.T]
        return torch.cat([picked, self.dense.to(matrix) @ matrix]) if len(self.dense) else picked

    def weighted(self, t: Tensor, covariance: bool) -> Tensor:
        """Σ_c u²_dc t_c, (b, d), of t (b, c), or Σ_c u_dc u_ec t_c, (b, d, d)."""
        chosen, dense = t.gather(1, self.indices), self.dense.to(t)
        if not covariance:
            return torch.cat([chosen, (dense.square() * t).sum(dim=2).T], dim=1)
        k = chosen.shape[1]
        block = t.new_zeros(len(t), len(self), len(self))
        block[:, :k, :k] = (self.indices[:, :, None] == self.indices[:, None, :]) * chosen[:, :, None]
        if len(dense):
            cross = dense.transpose(0, 1).gather(2, self.indices[:, None].expand(-1, len(dense), -1)) * chosen[:, None]
            block[:, k:, :k], block[:, :k, k:] = cross, cross.mT
            block[:, k:, k:] = gram((dense * t.sqrt()).transpose(0, 1))
        return block


@dataclass(frozen=True)
class Rows:
    """Rows u of a matrix over an example's outputs: the moments are those of u · f.

    In this order: the outputs chosen, or combinations of them; the rest of the softmax, Σ_rest softmax(f) f, whose
    variance is that of log Σ_rest exp f; probes u = A r, A Aᵀ the Hessian H of −log p and r random signs, so that
    E (u · f)² = tr(H Cov f). Tensors with a row per example are not held here: equal rows are equal work.

    Attributes:
        k: how many outputs or combinations are chosen.
        top: whether they are the largest.
        temperature: T, by which logits are divided in H.
        shape: of an example's outputs, where probes go over all positions; None for one position.
        noise_variance: σ², where the likelihood has one.
    """

    record: Likelihood[Any]
    k: int = 0
    top: bool = False
    rest: bool = False
    probes: int = 0
    temperature: float = 1.0
    shape: torch.Size | None = None
    noise_variance: Tensor | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        """d, how many rows."""
        return self.k + self.rest + self.probes

    def choosing(self, chosen: Top | Tensor, size: int, outputs: int) -> tuple[Rows, dict[str, Tensor]]:
        """With some of the outputs of `size` examples, which have `outputs` each, and the tensors that say which."""
        per, most = self.record.outputs_per_target, outputs // self.record.outputs_per_target
        if isinstance(chosen, Top):
            return replace(self, k=min(chosen.k, most) * per, top=True), {}
        is_combination = chosen.is_floating_point()
        rows = chosen.expand(size, *chosen.shape) if chosen.dim() == 1 + is_combination else chosen
        if len(rows) != size:
            raise MatchError(f"outputs are asked for of {len(rows)} examples, and the batch has {size}")
        if is_combination:
            if rows.shape[-1] != outputs:
                raise MatchError(f"the combinations are of {rows.shape[-1]} outputs, and the network has {outputs}")
            return replace(self, k=rows.shape[1]), {"combinations": rows}
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < most:
            raise MatchError(f"outputs have indices 0 to {most - 1}, got {int(rows.min())} to {int(rows.max())}")
        return replace(self, k=rows.shape[-1] * per), {"indices": rows.long()}

    def signs(self, size: int, outputs: int, seed: int, device: torch.device) -> dict[str, Tensor]:
        """Random signs for the probes, (batch, probes, outputs)."""
        if not self.probes:
            return {}
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (size, self.probes, outputs)
        drawn = torch.randint(2, shape, generator=generator, device=device, dtype=torch.int8)
        return {"signs": 2 * drawn - 1}

    def __call__(self, outputs: Tensor, given: Mapping[str, Tensor]) -> Basis:
        """The rows at outputs (b, c), in float32 or wider, with the batch's own tensors."""
        b, c = outputs.shape
        indices, dense = torch.zeros(b, 0, dtype=torch.int64, device=outputs.device), []
        if "combinations" in given:
            dense.append(given["combinations"].to(outputs).transpose(0, 1))
        elif self.k:
            per = self.record.outputs_per_target
            if self.top:
                indices = self.record.locations(outputs).topk(self.k // per, dim=1).indices
            else:
                indices = given["indices"].to(outputs.device)
            # A target of several outputs is chosen with all of them.
            indices = torch.cat([indices + i * (c // per) for i in range(per)], dim=1) if per > 1 else indices
        if self.rest:
            dense.append(outputs.scatter(1, indices, -torch.inf).softmax(dim=1).nan_to_num(0.0)[None])
        if self.probes:
            at = outputs.reshape(b, *([c] if self.shape is None else self.shape)) / self.temperature
            signs = given["signs"].to(outputs).transpose(0, 1).reshape(self.probes, *at.shape)
            u = self.record.hessian_root_times(at, signs, self.noise_variance) / self.temperature
            if "positions" in given:
                u = u * given["positions"].to(u.device).reshape(*u.shape[1:-1], 1)
            dense.append(u.flatten(2))
        return Basis(indices, torch.cat(dense) if dense else outputs.new_empty(0, b, c))


# --- positions ------------------------------------------------------------------------------------------------------

_calls: WeakKeyDictionary[nn.Module, dict[Any, tuple[str, torch.Size]]] = WeakKeyDictionary()


def at_one_position(call: Call, params: Mapping[str, Tensor], inputs: Any) -> tuple[Call, torch.Size]:
    """The call that takes (inputs, position), and the shape of an example's outputs at all positions.

    The last layer runs at that position alone where cutting its inputs gives what cutting the outputs does. That is
    tried on one example, and cached for the model and the kind of its inputs.
    """
    known = _calls.setdefault(call.model, {})
    leaves, spec = pytree.tree_flatten(inputs)
    kinds = tuple((leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    key = weakly(call.forward), str(spec), kinds
    if key not in known:
        known[key] = _last_layer(call, params, examples(inputs, 0, 1))
    at, shape = known[key]
    return replace(call, at=at), shape


def _last_layer(call: Call, params: Mapping[str, Tensor], one: Any) -> tuple[str, torch.Size]:
    """The linear layer whose inputs can be cut instead of the outputs, or "", and the shape of the outputs."""
    seen: dict[str, Any] = {}
    layers = [(name, m) for name, m in call.model.named_modules() if type(m) is nn.Linear and name]
    handles = [m.register_forward_hook(lambda m, a, z, name=name: seen.update({name: z})) for name, m in layers]
    try:
        with torch.no_grad():
            whole = call(params, one)
    finally:
        for handle in handles:
            handle.remove()
    shape = whole.shape[1:]
    position = torch.full((1,), shape[:-1].numel() // 2, device=whole.device)
    for name, z in seen.items():
        is_output = isinstance(z, Tensor) and z.data_ptr() == whole.data_ptr() and z.shape == whole.shape
        if not is_output or len(shape) < 2:
            continue
        try:
            with torch.no_grad():
                cut = replace(call, at=name)(params, (one, position))
        except (RuntimeError, IndexError, ValueError, MatchError):
            continue
        if cut.shape == (1, whole.shape[-1]) and agree(cut, at_positions(whole, position)):
            return name, shape
    return "", shape


def is_single(positions: Positions | None) -> bool:
    """Whether they are one position of each example."""
    if isinstance(positions, Tensor):
        return positions.dtype != torch.bool
    return positions == "last"


def chosen_positions(positions: Positions | None, inputs: Any, shape: torch.Size) -> Tensor:
    """Positions by index, (batch,), or a mask, (batch, positions), of outputs of that shape, positions first.

    The last one is that of the inputs' `attention_mask`, where there is one.
    """
    size, count = batch_size(inputs), shape[:-1].numel()
    if len(shape) < 2:
        raise MatchError(
            f"positions are of outputs (batch, positions, outputs), but an example's have shape {tuple(shape)}"
        )
    if positions is None or (isinstance(positions, str) and positions == "all"):
        return torch.ones(size, count, dtype=torch.bool)
    if isinstance(positions, str):
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if mask is None or mask.shape != (size, count):
            return torch.full((size,), count - 1)
        last: Tensor = (mask.bool() * torch.arange(count, device=mask.device)).amax(dim=1)
        return last
    if positions.dtype == torch.bool:
        if positions.reshape(len(positions), -1).shape != (size, count):
            raise MatchError(f"a mask of positions has shape {(size, *shape[:-1])}, got {tuple(positions.shape)}")
        return positions.reshape(size, -1)
    if positions.shape != (size,) or positions.is_floating_point():
        raise MatchError(f"positions by index have shape ({size},), one for each example, got {tuple(positions.shape)}")
    if not bool(((positions >= -count) & (positions < count)).all()):
        raise MatchError(f"positions are from 0 to {count - 1}, got {int(positions.min())} to {int(positions.max())}")
    return positions % count
