"""A network with weights of few bits: the Gaussian given that they lie on grids."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesadam import _storage as storage
from bayesadam._checks import count
from bayesadam._extras import require
from bayesadam.compress.conditioning import Factors
from bayesadam.compress.packing import KIND, packed, report_of
from bayesadam.compress.ranking import Exclude, excluded
from bayesadam.compress.report import PruningReport, warn_of_whole
from bayesadam.compress.rounding import BITS, Grid, round_to, stacked
from bayesadam.compress.solving import Moments, conditional
from bayesadam.compress.walking import Walk
from bayesadam.errors import MatchError, SettingError
from bayesadam.predict.matrices import Matrix, matrices_of
from bayesadam.predict.network import Forward
from bayesadam.weights.gaussian import require_safetensors
from bayesadam.weights.mixture import require_posterior
from bayesadam.weights.named import AnyPath, Named
from bayesadam.weights.networks import copy_with
from bayesadam.weights.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Quantised:
    """A network whose matrices have weights of few bits, `.model`, an ordinary module.

    Attributes:
        grids: by weight its grid, and how it is a matrix.
        moved: by weight how far the outputs of its layer moved, E|z' − z|²/E|z|², on the inputs that reached it; z are
            those of the network that was quantised.
    """

    model: nn.Module
    grids: Mapping[str, tuple[Grid, Matrix]]
    moved: Mapping[str, float]

    def save(self, path: AnyPath) -> None:
        """Write it to a `.safetensors` file, a weight in `bits` or less; `ba.load(path, model)` reads it."""
        require_safetensors(path)
        storage.write(path, *self._packed(), KIND)

    @property
    def report(self) -> PruningReport:
        """Weights, bytes and how far outputs moved, of each tensor in the file; prints as a table."""
        parts, header = self._packed()
        return report_of(parts, header, storage.size_of(parts, header, KIND), self.moved)

    def _packed(self) -> tuple[Named, dict[str, Any]]:
        state, weights = self.model.state_dict(), dict(self.model.named_parameters(remove_duplicate=False))
        return packed(state, self.grids, [name for name in state if name not in weights])

    def torchao(self) -> nn.Module:
        """A copy whose linear layers with a grid hold torchao's integer weights, one byte a code, for its export.

        Needs the package torchao. A layer whose inputs are no multiple of the group stays as it is.
        """
        intx, network = require("torchao.quantization").IntxUnpackedToInt8Tensor, copy.deepcopy(self.model)
        for prefix, module in network.named_modules():
            grid, _ = self.grids.get(f"{prefix}.weight" if prefix else "weight", (None, None))
            if grid is None or not isinstance(module, nn.Linear) or grid.codes.shape[1] % grid.group:
                continue
            middle, weight = 2 ** (grid.bits - 1), module.weight
            codes = (grid.codes.to(torch.int16) - middle).to(weight.device, torch.int8)
            zero = (grid.zero - middle).expand(grid.scale.shape).contiguous()
            kind = getattr(torch, f"int{grid.bits}")
            scale, zero = (one.to(weight.device, weight.dtype) for one in (grid.scale, zero))
            module.weight = nn.Parameter(
                intx(codes, scale, zero, kind, (1, grid.group), weight.dtype, None), requires_grad=False
            )
        return network


@torch.no_grad()
def quantise(
    posterior: Posterior,
    bits: int,
    *,
    inputs: Any = None,
    exclude: Exclude = (),
    symmetric: bool = True,
    group: int | None = None,
    forward: Forward | None = None,
) -> Quantised:
    """The network with its matrices rounded to few bits, those of linear layers, convolutions and attention.

    Rounding is conditioning: a column of a layer after the other is known to be what it is rounded to, and the rest of
    the row moves to the Gaussian's mean given that; layer after layer on a few hundred `inputs`, as those before it now
    give them. Weights of 0 stay 0, so that a pruned network stays as sparse. Yours is untouched.

    Args:
        bits: 8, 4, 3 or 2; 16 keeps all floats in half precision and rounds nothing else.
        inputs, forward: as in `condition`; None takes the posterior's own input sides, or second moments alone.
        exclude: parameters to leave as they are, see `masks`.
        symmetric: whether a grid is the same on both sides of 0, or about.
        group: weights along the inputs that share a scale; None for all of an output.
    """
    require_posterior(posterior, "quantising")
    if bits not in (*BITS, 16):
        raise SettingError(f"bits must be one of {(*BITS, 16)}, got {bits!r}")
    if group is not None:
        count("group", group, "weights along the inputs that share a scale")
    model = copy_with(posterior.model, posterior.mean)
    whole = excluded(posterior, exclude)
    parts: dict[str, list[Grid]] = {}
    moved: dict[str, float] = {}
    own = dict(model.named_parameters())
    if bad := [name for name, weight in own.items() if not bool(weight.isfinite().all())]:
        raise MatchError(
            f"weights of {', '.join(bad[:4])} are NaN or infinite: take a checkpoint from before they were"
        )

    def rounded(matrix: Matrix, w: Tensor, moments: Moments) -> Tensor:
        start, has_bias = matrix.with_bias(own), matrix.bias is not None
        kept = F.pad(matrix.into(own[matrix.weight] != 0), (0, int(has_bias)), value=True)
        goal, a = conditional(moments, w, kept, start), moments.ridged(w).a
        how: Any = {"symmetric": symmetric, "group": group, "bias": has_bias}
        groups, width = zip(goal, a, kept, strict=True), matrix.size[2]
        grid = stacked([round_to(x, y, bits, mask=m[:, :width], **how) for x, y, m in groups])
        parts.setdefault(matrix.weight, []).append(grid)
        new = grid.weight().view(matrix.size).to(goal)
        new = new if grid.bias is None else torch.cat([new, grid.bias.view(*new.shape[:2], 1).to(new)], dim=2)
        if moments.n < math.inf:
            moved[matrix.weight] = max(moved.get(matrix.weight, 0.0), float(moments.moved(new)))
        return new

    listed = [matrix for matrices in matrices_of(posterior.model).values() for matrix in matrices]
    if bits < 16:
        names = {matrix.weight for matrix in listed if matrix.weight not in whole}
        if inputs is not None:
            walk = Walk.of(copy.deepcopy(model), inputs, names, forward)
            walk.through(model, rounded, "quantising")
            names -= {matrix.weight for matrix in walk.matrices.values()}
        Factors.of(posterior, names).through(model, rounded, "quantising")
    else:
        for tensor in model.state_dict().values():
            tensor.copy_(_halved(tensor))
    may = {name: weight.numel() for name, weight in own.items() if name not in whole}
    if bits < 16:
        warn_of_whole(may, parts, "rounded to few bits")
    wholes = {x.weight: replace(x, shape=own[x.weight].shape, rows=None) for x in listed}
    grids = {name: (stacked(grids), wholes[name]) for name, grids in parts.items()}
    return Quantised(model, grids, moved)


def _halved(tensor: Tensor) -> Tensor:
    """Wider floats as float16 where that is nearer than .01, of all together; others as they are."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    small, wide = tensor.half(), tensor.double()
    away = torch.where(small == wide, 0, small - wide).norm()
    return small if bool(away <= 0.01 * wide.nan_to_num(0, 0, 0).norm()) else tensor
