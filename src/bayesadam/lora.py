"""Low-rank adapters, W₀ + s B A: where they are in a model, and a prior on the product, since B and A alone mean nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayesadam._alone import unwrap
from bayesadam._shards import whole
from bayesadam.errors import MatchError, SettingError
from bayesadam.gaussian.settings import CovariantPrior, Precision, positive
from bayesadam.readers import own_parameters

# (the module's name, the adapter's, its rank) → s.
Scaling = Callable[[str, str | None, int], float | None]
# base_model.model.layer.lora_A.default.weight in a model, without `default` in a file.
_DOWN = re.compile(r"(?P<prefix>.*)\.lora_(?P<kind>embedding_)?A(?:\.(?P<adapter>[^.]+?))?(?P<end>\.weight)?")
# The least |A_j|² |B_j|², as a share of its mean over the ranks j.
_LEAST = 1e-6


class Pair(NamedTuple):
    """The two factors of one adapter by their names, and the module and the adapter they belong to."""

    down: str
    up: str
    prefix: str
    adapter: str | None


def pairs_in(names: Iterable[str]) -> list[Pair]:
    """The adapters among parameters, PEFT's names.

    >>> pairs_in(["q.lora_A.default.weight", "q.lora_B.default.weight", "q.base_layer.weight"])
    [Pair(down='q.lora_A.default.weight', up='q.lora_B.default.weight', prefix='q', adapter='default')]
    """
    every = list(names)
    there = set(every)
    found = []
    for name in every:
        match = _DOWN.fullmatch(name)
        kind = (match["kind"] or "") if match else ""
        up = name.replace(f".lora_{kind}A", f".lora_{kind}B")
        if match is not None and up in there:
            found.append(Pair(name, up, match["prefix"], match["adapter"]))
    return found


def scaling_of_model(model: nn.Module) -> Scaling:
    """s of the adapters in a live model of PEFT's."""
    modules = dict(unwrap(model).named_modules())

    def scaling(prefix: str, adapter: str | None, rank: int) -> float | None:
        held = getattr(modules.get(prefix), "scaling", None)
        return float(held[adapter]) if isinstance(held, Mapping) and adapter in held else None

    return scaling


@dataclass(frozen=True)
class LoraPrior(CovariantPrior):
    r"""The prior δ‖s B A‖² on what every adapter adds to its weight; δ itself on weights that are in no adapter.

    (B c, A/c) is the same network as (B, A), so a posterior should say the same of it; with one δ for B and A it does not.
    About the trained weights the penalty δ‖s B A‖² has the diagonal

    .. math::
        \delta_B[i, j] = \delta s^2 \lVert A_j \rVert^2, \qquad \delta_A[j, k] = \delta s^2 \lVert B_j \rVert^2

    with A_j the j-th row of A and B_j the j-th column of B. Under B → B c, A → A/c it goes with c as the curvature N v̂ of the
    data does, so variances, probabilities, novelty and draws of B A stay as they are: for one c an adapter, and, where the
    posterior is diagonal or low-rank, for one c a rank. That holds at power=1 alone, and others are refused. A
    Kronecker-factored posterior gets the mean of these numbers for each factor. `calibrate` multiplies the prior by one number.

    A rank whose |A_j|² |B_j|² is below a millionth of the mean counts as having that much.

    >>> LoraPrior(precision=10.0)
    LoraPrior(precision=10.0, scaling=None)

    Args:
        precision: δ.
        scaling: s, for layers that do not have it as PEFT's do.
    """

    precision: float = 1.0
    scaling: float | None = None

    def __post_init__(self) -> None:
        positive("precision", self.precision, "δ of the prior δ‖s B A‖²")
        if self.scaling is not None:
            positive("scaling", self.scaling, "s of W₀ + s B A")

    def at(self, model: nn.Module, mode: Mapping[str, Tensor], rotated: Container[str]) -> dict[str, Precision]:
        """δ by parameter name.

        Raises:
            MatchError: there is no adapter among the parameters, or its factors do not fit.
            SettingError: B or A of an adapter is 0 still, or s is not known.
        """
        # A factor that was not trained still says how large the product is.
        weights = {**own_parameters(model), **mode}
        pairs = [pair for pair in pairs_in(weights) if pair.down in mode or pair.up in mode]
        if not pairs:
            raise MatchError(
                "LoraPrior found no adapter in the posterior, a lora_A with its lora_B: give prior_precision as a number"
            )
        scaling, found = scaling_of_model(model), dict.fromkeys(mode, self.precision)
        tensors: dict[str, Tensor] = {}
        for pair in pairs:
            up, down = (whole(weights[name]).detach() for name in (pair.up, pair.down))
            if up.dim() < 2 or down.dim() < 2 or up.shape[1] != len(down):
                shapes = f"{tuple(up.shape)} and {tuple(down.shape)}"
                raise MatchError(f"{pair.up!r} and {pair.down!r} of shapes {shapes} are not the factors of a product")
            scale = self.scaling or scaling(pair.prefix, pair.adapter, len(down))
            if scale is None:
                raise SettingError(
                    f"by what the product of {pair.prefix!r} is multiplied is not known: LoraPrior(scaling=...)"
                )
            of_up, of_down = _precisions(up, down, self.precision * scale**2, pair)
            tensors |= {pair.up: of_up, pair.down: of_down}
        own = {name: delta.to(mode[name].dtype) for name, delta in tensors.items() if name in mode}
        return {**found, **{name: float(delta.mean()) if name in rotated else delta for name, delta in own.items()}}


def _precisions(up: Tensor, down: Tensor, delta: float, pair: Pair) -> tuple[Tensor, Tensor]:
    """δ|A_j|² in the shape of B, and δ|B_j|² in that of A."""
    rows = down.double().square().flatten(1).sum(dim=1)
    columns = up.double().square().transpose(0, 1).flatten(1).sum(dim=1)
    least = _LEAST * (rows * columns).mean()
    if not bool(least > 0):
        raise SettingError(
            f"{pair.up!r} or {pair.down!r} is 0, as B is before training: there is no product for a LoraPrior to be on. Train "
            "the adapter, load its weights, or leave it out"
        )
    of_up, of_down = _floored(rows, columns, least), _floored(columns, rows, least)
    shape = (1, -1, *[1] * (up.dim() - 2))
    along = (-1, *[1] * (down.dim() - 1))
    return (
        (delta * of_up).reshape(shape).expand(up.shape).contiguous(),
        (delta * of_down).reshape(along).expand(down.shape).contiguous(),
    )


def _floored(own: Tensor, other: Tensor, least: Tensor) -> Tensor:
    """|A_j|², no less than what makes |A_j|² |B_j|² the least; 1 where both are 0 and nothing depends on it."""
    alone = torch.where(own > 0, own, 1.0)
    return torch.where(other > 0, torch.maximum(own, least / other), alone)
