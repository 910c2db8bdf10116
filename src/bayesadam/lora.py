"""Low-rank adapters W₀ + s B A: a prior on the product, and its curvature, since B and A alone mean nothing."""

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayesadam._alone import unwrap
from bayesadam._checks import positive
from bayesadam._shards import whole
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.readers import own_parameters
from bayesadam.weights.settings import CovariantPrior, Precision

# (the module's name, the adapter's, its rank) → s, None where it is not known.
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
    """The adapters among parameters, by PEFT's names."""
    listed = dict.fromkeys(names)
    pairs = []
    for match in filter(None, map(_DOWN.fullmatch, listed)):
        kind = match["kind"] or ""
        up = match[0].replace(f".lora_{kind}A", f".lora_{kind}B")
        if up in listed:
            pairs.append(Pair(match[0], up, match["prefix"], match["adapter"]))
    return pairs


def scaling_of_model(model: nn.Module) -> Scaling:
    """s of the adapters in a live model of PEFT's."""
    modules = dict(unwrap(model).named_modules())

    def scaling(prefix: str, adapter: str | None, rank: int) -> float | None:
        scalings = getattr(modules.get(prefix), "scaling", None)
        return float(scalings[adapter]) if isinstance(scalings, Mapping) and adapter in scalings else None

    return scaling


def scaling_of_folder(path: Path) -> Scaling:
    """s by the configuration in an adapter's folder: α/r, or α/√r for rank-stabilised adapters."""
    file = (path if path.is_dir() else path.parent) / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        general, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    except (ValueError, AttributeError) as error:
        raise FileError(f"{file} is not the configuration of an adapter ({error}): copy it again") from None

    def scaling(prefix: str, adapter: str | None, rank: int) -> float | None:
        if not isinstance(general, int | float):
            return None
        fitting = (alpha for key, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", prefix))
        return float(next(fitting, general)) / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return scaling


class Adapter(NamedTuple):
    """B (out, rank), A (rank, in), the second moments of their gradients, and s; s = 1 stands for one not known."""

    up: Tensor
    down: Tensor
    up_moment: Tensor
    down_moment: Tensor
    scale: float | None

    def change(self) -> Tensor:
        """ΔW = s B A."""
        return (self.scale or 1.0) * (self.up @ self.down)

    def curvature(self) -> Tensor:
        """E[G²] of ΔW as rank one, r_i c_j, from the second moments of both factors.

        With E[G²]_ij = r_i c_j and independent entries

            v_B[i, k] = s² r_i Σ_j c_j A_kj²        v_A[k, j] = s² c_j Σ_i r_i B_ik²

        so r is in proportion to Σ_k v_B[·, k] and c to Σ_k v_A[k, ·]; each equation gives a scale of their product, and
        the geometric mean of both is taken. B → t B, A → A/t leaves it as it is. 0 where either factor has had no
        gradient.
        """
        rows, columns = self.up_moment.sum(dim=1), self.down_moment.sum(dim=0)
        by_up, by_down = (columns * self.down.square()).sum(), (rows[:, None] * self.up.square()).sum()
        scale = (self.scale or 1.0) ** 2 * (by_up * by_down).sqrt()
        product = torch.outer(rows, columns)
        return product / scale if bool(scale > 0) else torch.zeros_like(product)

    def nearest(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """B and A of this rank and scale with s B A nearest to ΔW, the singular values split evenly between them."""
        rank = len(self.down)
        left, values, right = torch.linalg.svd(change / (self.scale or 1.0), full_matrices=False)
        root = values[:rank].sqrt()
        up, down = left[:, :rank] * root, root[:, None] * right[:rank]
        missing = rank - up.shape[1]
        return nn.functional.pad(up, (0, missing)), nn.functional.pad(down, (0, 0, 0, missing))


@dataclass(frozen=True)
class LoraPrior(CovariantPrior):
    r"""The prior δ‖s B A‖² on what every adapter adds to its weight; δ itself on weights that are in no adapter.

    (B c, A/c) is the same network as (B, A), so a posterior should say the same of it. About the trained weights the
    penalty δ‖s B A‖² has the diagonal

    .. math::
        \delta_B[i, j] = \delta s^2 \lVert A_j \rVert^2, \qquad \delta_A[j, k] = \delta s^2 \lVert B_j \rVert^2

    with A_j the j-th row of A and B_j the j-th column of B. Under B → B c, A → A/c it goes with c as the curvature N v̂
    of the data does, so variances, probabilities, novelty and draws of B A stay as they are, at power=1 alone: others
    are refused. A Kronecker-factored posterior gets the mean of these numbers for each factor. A rank whose
    |A_j|² |B_j|² is below a millionth of the mean counts as having that much.

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
        """δ by parameter name."""
        # A factor that was not trained still says how large the product is.
        weights = {**own_parameters(model), **mode}
        pairs = [pair for pair in pairs_in(weights) if pair.down in mode or pair.up in mode]
        if not pairs:
            raise MatchError("LoraPrior found no lora_A with its lora_B: give prior_precision a number")
        scaling = scaling_of_model(model)
        precisions: dict[str, Precision] = dict.fromkeys(mode, self.precision)
        for pair in pairs:
            up, down = (whole(weights[name]).detach() for name in (pair.up, pair.down))
            if up.dim() < 2 or up.shape[1] != len(down):
                raise MatchError(f"{pair.up!r} and {pair.down!r} are not the factors of a product")
            scale = self.scaling or scaling(pair.prefix, pair.adapter, len(down))
            if scale is None:
                raise SettingError(f"s of {pair.prefix!r} is not known: LoraPrior(scaling=...)")
            for name, delta in zip((pair.up, pair.down), _precisions(up, down, pair), strict=True):
                if name in mode:
                    delta = (self.precision * scale**2 * delta).to(mode[name].dtype)
                    precisions[name] = float(delta.mean()) if name in rotated else delta
        return precisions


def _precisions(up: Tensor, down: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
    """|A_j|² in the shape of B, and |B_j|² in that of A; their product has a least value, see `LoraPrior`."""
    rows = down.double().square().flatten(1).sum(dim=1)
    columns = up.double().square().transpose(0, 1).flatten(1).sum(dim=1)
    least = _LEAST * (rows * columns).mean()
    if not bool(least > 0):
        raise SettingError(f"{pair.up!r} or {pair.down!r} is 0, as B is before training")

    def floored(own: Tensor, other: Tensor) -> Tensor:
        # 1 where both are 0 and nothing depends on it.
        return torch.where(other > 0, torch.maximum(own, least / other), torch.where(own > 0, own, 1.0))

    of_up = floored(rows, columns).reshape(1, -1, *[1] * (up.dim() - 2)).expand(up.shape)
    of_down = floored(columns, rows).reshape(-1, *[1] * (down.dim() - 1)).expand(down.shape)
    return of_up.contiguous(), of_down.contiguous()
