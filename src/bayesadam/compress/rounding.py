"""Rounding a layer's weights to grids: the Gaussian's mean, given that weights are values of few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesadam.compress.solving import factor
from bayesadam.errors import SettingError

BITS = (2, 3, 4, 8)
_BLOCK = 128
_HALF = torch.finfo(torch.float16)
# Of the scale that holds every weight: clipping pays at few bits.
_SHARES = tuple(1 - k / 36 for k in range(34))
# Weights that are looked at together, which fit a processor's cache.
_TOGETHER = 2**16


@dataclass(frozen=True, eq=False)
class Grid:
    """Weights s (c − z), (rows, inputs).

    Attributes:
        codes: c, uint8, of `bits` bits.
        scale: s, (rows, ⌈inputs / group⌉), for every `group` inputs; it may be negative. It is float16, or float32
            where one that is not 0 is beyond float16's normal numbers.
        zero: z, float16, of as many, or (rows, 1) where the grid is symmetric; half a code where no weight is 0.
        bias: (rows,), of a layer that has one, not rounded.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    group: int
    bias: Tensor | None = None

    def weight(self) -> Tensor:
        """The weights, float32."""
        return self.wide(self.scale) * (self.codes - self.wide(self.zero))

    def wide(self, values: Tensor) -> Tensor:
        """The scale or the zero of every weight, float32."""
        each = values.float().expand(self.scale.shape).repeat_interleave(self.group, dim=1)
        return each[:, : self.codes.shape[1]]


def stacked(grids: Sequence[Grid]) -> Grid:
    """The grids of blocks of rows, such as the groups of a convolution, as one."""
    codes, scale, zero = (torch.cat([getattr(grid, name) for grid in grids]) for name in ("codes", "scale", "zero"))
    biases = [grid.bias for grid in grids if grid.bias is not None]
    return Grid(codes, scale, zero, grids[0].bits, grids[0].group, torch.cat(biases) if biases else None)


def grid_of(w: Tensor, bits: int, a: Tensor, *, symmetric: bool = True, group: int | None = None) -> Grid:
    """The nearest grid: min Σ_j a_j (s (c_j − z) − w_j)² over s, c and z; weights of 0 stay exactly 0.

    A symmetric grid has z = 2^(bits−1), or at 2 and 3 bits (2^bits − 1) / 2 where that is nearer and no weight is 0.
    """
    if bits not in BITS:
        raise SettingError(f"bits must be one of {BITS}, got {bits}")
    top, inputs = 2**bits - 1, w.shape[1]
    group = min(group or inputs, inputs)
    if len(w) > (n := -(-_TOGETHER // inputs)):
        each = (w[start : start + n] for start in range(0, len(w), n))
        return stacked([grid_of(rows, bits, a, symmetric=symmetric, group=group) for rows in each])
    # Inputs that are always 0 count for a little.
    a = (a + 1e-6 * a.mean() + 1e-30).expand_as(w)
    x, a = (F.pad(t.float(), (0, -inputs % group)).reshape(len(w), -1, group) for t in (w, a))
    low, high = x.amin(2).clamp(max=0), x.amax(2).clamp(min=0)
    on_codes = (w == 0).any(1, keepdim=True) | (bits > 3)

    def rounded(s: Tensor, z: Tensor) -> Tensor:
        """c − z."""
        return (x * _inverse(s)[..., None]).add_(z[..., None]).round_().clamp_(0, top).sub_(z[..., None])

    def best(z: Tensor, signs: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Of the codes at many scales, with the scale of least squares: that which explains most, and how much."""
        unit = torch.maximum(high * _inverse(top - z), -low * _inverse(z))
        s, most = unit, torch.full_like(unit, -1.0)
        for share in (share * sign for sign in signs for share in _SHARES):
            v = rounded(unit * share, z)
            along = (v * ax).sum(2)
            tried = along * _inverse(v.square_().mul_(a).sum(2))
            s, most = torch.where(tried * along > most, tried, s), torch.maximum(tried * along, most)
        return s, most

    ax, z = a * x, torch.full_like(low, 2.0 ** (bits - 1))
    if not symmetric:
        z = -low * _inverse((high - low) / top)
        z = torch.where(on_codes, z.round(), z).half().float()
    s, most = best(z, (1, -1) if symmetric else (1,))
    if symmetric and not on_codes.all():
        half = torch.full_like(low, top / 2)
        other, more = best(half, (1,))
        better = (more.sum(1, keepdim=True) > most.sum(1, keepdim=True)) & ~on_codes
        s, z = torch.where(better, other, s), torch.where(better, half, z)
    size = s[s != 0].abs()
    s = s.half() if bool(((size >= _HALF.tiny) & (size <= _HALF.max)).all()) else s
    codes = (rounded(s.float(), z) + z[..., None]).flatten(1)[:, :inputs].to(torch.uint8)
    return Grid(codes, s, (z[:, :1] if symmetric else z).half(), bits, group)


@torch.no_grad()
def round_to(
    w: Tensor,
    a: Tensor,
    bits: int,
    *,
    mask: Tensor | None = None,
    symmetric: bool = True,
    group: int | None = None,
    sweeps: int = 2,
    bias: bool = False,
) -> Grid:
    """Weights on a grid near the minimum of tr (q − w) A (q − w)ᵀ.

    First the nearest weights, or those given the columns before, in order of falling A_jj, by row what is better:
    q_j = round(w_j − Σ_{i<j} (q − w)_i M_ij / M_jj), A = M Mᵀ, M upper triangular. Then in `sweeps` each given all
    others, q_j = round(w_j − Σ_{i≠j} (q − w)_i A_ij / A_jj), and the scales by least squares: no row's error increases.

    Args:
        w: (outputs, inputs); with `bias` one column more, which is not rounded and follows the others.
        a: A + λ, of as many inputs.
        mask: (outputs, inputs), True where a weight stays; the others are exactly 0.
    """
    a, w, bias_of = a.double(), w.double(), None
    if bias:
        # At the minimum over the bias.
        w, bias_of, pull = w[:, :-1], w[:, -1], a[:-1, -1] / a[-1, -1]
        a = a[:-1, :-1] - torch.outer(pull, a[-1, :-1])
    order = a.diagonal().argsort(descending=True, stable=True)
    kept = torch.ones_like(w, dtype=torch.bool) if mask is None else mask
    grid = grid_of(w * kept, bits, a.diagonal(), symmetric=symmetric, group=group)
    of_group = (torch.arange(len(a), device=a.device) // grid.group)[order]
    a, goal, stays = a[order][:, order], w.T[order].float(), kept.T[order]
    zero, near, scale = grid.wide(grid.zero).T[order], a.float(), grid.scale
    step, codes = grid.wide(scale).T[order] * stays, grid.codes.T[order].float()
    off, m = step * (codes - zero) - goal, factor(a.flip(0, 1)).flip(0, 1)
    given = (m / m.diagonal()).T.tril(-1).float()
    other, other_off = _swept(goal, given, step, zero, bits, torch.zeros_like(off))
    better = (other_off * (near @ other_off)).sum(0) < (off * (near @ off)).sum(0)
    codes, off = torch.where(better, other, codes), torch.where(better, other_off, off)
    couple = (a * _inverse(a.diagonal())[:, None]).float().fill_diagonal_(0)
    for _ in range(sweeps):
        codes, off = _swept(goal, couple, step, zero, bits, off)
        scale = _rescaled(scale, (codes - zero) * stays, off, near, of_group)
        step = grid.wide(scale).T[order] * stays
        off = step * (codes - zero) - goal
    back = order.argsort()
    if bias_of is not None:
        bias_of = (bias_of - off[back].T.double() @ pull).float()
    return Grid(codes[back].T.to(torch.uint8).contiguous(), scale, grid.zero, bits, grid.group, bias_of)


def _swept(w: Tensor, couple: Tensor, step: Tensor, zero: Tensor, bits: int, off: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and q − w, of inputs × rows: each input's in turn rounded at w_j − Σ_i couple_ji (q − w)_i."""
    codes, off, inverse = torch.empty_like(w), off.clone(), _inverse(step)
    for start in range(0, len(w), _BLOCK):
        block = slice(start, start + _BLOCK)
        t, inner = w[block] - couple[block] @ off, couple[block, block]
        for j, k in enumerate(range(start, start + len(t))):
            codes[k] = (t[j] * inverse[k] + zero[k]).round_().clamp_(0, 2**bits - 1)
            new = step[k] * (codes[k] - zero[k]) - w[k]
            t[j + 1 :].addr_(inner[j + 1 :, j], new - off[k], alpha=-1)
            off[k] = new
    return codes, off


def _rescaled(scale: Tensor, v: Tensor, off: Tensor, a: Tensor, of_group: Tensor) -> Tensor:
    """The scales at the minimum of each row's error given v = c − z, where in their type they reduce it."""
    sums, members = off.new_zeros(scale.shape[::-1]), [of_group == g for g in range(scale.shape[1])]
    slope = sums.index_add(0, of_group, v * (a @ off)).T.double()
    bend = torch.stack([sums.index_add(0, of_group, v * (a[:, g] @ v[g])).T for g in members], 2).double()
    size = bend.diagonal(dim1=1, dim2=2)
    moved = scale - torch.linalg.solve(bend + torch.diag_embed(size * 1e-6 + (size <= 0)), slope)
    largest = torch.finfo(scale.dtype).max
    moved = moved.clamp(-largest, largest).to(scale)
    change = moved.double() - scale
    gain = (change * (2 * slope + (bend @ change[..., None])[..., 0])).sum(1, keepdim=True)
    return torch.where(gain < 0, moved, scale)


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 of 0."""
    return torch.where(x == 0, 0, 1 / x)
