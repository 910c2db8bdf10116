"""Products and orthogonal factors of many matrices at once, with float16 factors and float32 sums."""

from collections.abc import Sequence
from functools import partial, reduce

import torch
from torch import Tensor

# Whether there are CUDA kernels that multiply 16-bit matrices and add the product to float32 ones.
HAS_HALF_KERNELS = torch.version.cuda is not None and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
# Blocks of fewer rows are not worth a product of their own.
_LEAST_BLOCK = 192
# Columns that are made orthonormal together. Each panel waits for the one before, so that few are fast.
PANEL = 128
# The largest entry that the projection of a panel, or its Gram matrix less the identity, may have at the second pass.
_WORST = 0.03


def half_product(a: Tensor, b: Tensor, out: torch.dtype = torch.float32) -> Tensor:
    """A B of stacks of float16 matrices, summed in float32; rounded to `out`.

    Where there is no such kernel, the same rounded factors are multiplied in float32.
    """
    if not a.is_cuda:
        return (a.float() @ b.float()).to(out)
    return torch.bmm(a, b) if out == a.dtype else torch.bmm(a, b, out_dtype=out)


def half_chain(factors: Sequence[Tensor]) -> Tensor:
    """The product of stacks of float16 matrices in float32; what comes between is rounded to float16."""
    *first, last = factors
    return half_product(reduce(partial(half_product, out=torch.float16), first), last)


def add_product(sums: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> None:
    """S ← β S + α A B in place, of factors of S's type, or 16-bit ones."""
    if a.dtype == sums.dtype:
        sums.addmm_(a, b, beta=beta, alpha=alpha)
    elif sums.is_cuda:
        torch.addmm(sums, a, b, out_dtype=sums.dtype, beta=beta, alpha=alpha, out=sums)
    else:
        sums.addmm_(a.to(sums.dtype), b.to(sums.dtype), beta=beta, alpha=alpha)


def add_gram(sums: Tensor, rows: Tensor, *, beta: float, alpha: float) -> None:
    """S ← β S + α X Xᵀ in place; S is symmetric, and of large ones the upper right is copied from the lower left."""
    half = len(rows) // 2
    if half < _LEAST_BLOCK or sums.is_cuda:
        add_product(sums, rows, rows.mT, beta=beta, alpha=alpha)
        return
    add_gram(sums[:half, :half], rows[:half], beta=beta, alpha=alpha)
    add_gram(sums[half:, half:], rows[half:], beta=beta, alpha=alpha)
    add_product(sums[half:, :half], rows[half:], rows[:half].mT, beta=beta, alpha=alpha)
    sums[:half, half:].copy_(sums[half:, :half].mT)


def halved(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Float16 matrices and the powers of two, one a matrix, that they are to be multiplied with; entries are at most 1."""
    largest = torch.linalg.vector_norm(matrices, ord=torch.inf, dim=(-2, -1), keepdim=True)
    scale = largest.clamp_min_(torch.finfo(matrices.dtype).tiny).log2_().ceil_().exp2_()
    return torch.div(matrices, scale, out=torch.empty_like(matrices, dtype=torch.float16)), scale


def split_product(a: Tensor, b: Tensor) -> Tensor:
    r"""A B of stacks of float32 matrices to nearly all their digits, out of float16 factors.

    .. math::
        A B \approx A_1 B_1 + A_1 B_2 + A_2 B_1, \qquad A_1 = \operatorname{half}(A), \quad A_2 = \operatorname{half}(A - A_1)
    """
    (first, rest, scale_a), (other, remainder, scale_b) = _split(a), _split(b)
    found = half_product(torch.cat([first, first, rest], dim=2), torch.cat([other, remainder, other], dim=1))
    return found.mul_(scale_a * scale_b)


def _split(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, scale = halved(matrices)
    return first, (matrices / scale).sub_(first).half(), scale


def orthonormal_columns(stacks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    r"""Q of S = Q R for stacks (b, n, n) of float32 matrices, and whether each Q is orthonormal, (b,).

    Columns are taken in panels P, in their order, as in the Gram-Schmidt process, with X the columns before:

    .. math::
        P \leftarrow P - X X^\top P, \qquad P \leftarrow P\, C^{-\top}, \quad P^\top P = C C^\top \text{ in float64}

    and once more, where the second :math:`C^{-\top}` is that of first order. Every factor on the right is upper triangular,
    so Q is the QR decomposition's up to rounding. Stacks go on side by side, so that the small matrices of all are decomposed
    at once, and nothing waits for the device.

    >>> (q, is_orthonormal), = orthonormal_columns([torch.tensor([[[3.0, 1.0], [4.0, 2.0]]])])
    >>> q, is_orthonormal
    (tensor([[[ 0.6000, -0.8000],
             [ 0.8000,  0.6000]]]), tensor([True]))
    """
    bases = [torch.empty_like(stack) for stack in stacks]
    # Each column as a float16 one and what that leaves, as `split_product` has them.
    halves = [torch.empty_like(stack, dtype=torch.float16) for stack in stacks]
    rests = [torch.empty_like(half) for half in halves]
    worst = [stack.new_zeros(len(stack)) for stack in stacks]
    for start in range(0, max(stack.shape[2] for stack in stacks), PANEL):
        active = [i for i, stack in enumerate(stacks) if start < stack.shape[2]]
        columns = slice(start, start + PANEL)
        before = {i: (halves[i][:, :, :start], rests[i][:, :, :start]) for i in active}
        panels = [_projected(_unit(stacks[i][:, :, columns]), *before[i])[0] for i in active]
        for i, panel in zip(active, _decorrelated(panels), strict=True):
            panel, leaked = _projected(panel, *before[i])
            excess = panel.mT @ panel - torch.eye(panel.shape[2], device=panel.device)
            panel = panel - panel @ (excess.triu(1) + 0.5 * excess.diagonal(dim1=1, dim2=2).diag_embed())
            bases[i][:, :, columns] = panel
            halves[i][:, :, columns] = panel
            rests[i][:, :, columns] = panel - halves[i][:, :, columns]
            # A maximum with NaN is NaN.
            worst[i] = worst[i].maximum(leaked).maximum(excess.abs().amax(dim=(1, 2)))
    return [(basis, value < _WORST) for basis, value in zip(bases, worst, strict=True)]


def _unit(panel: Tensor) -> Tensor:
    """Columns of length 1, as float16 needs them; those of zeros stay."""
    lengths: Tensor = torch.linalg.vector_norm(panel, dim=1, keepdim=True)
    return panel / lengths.clamp_min_(torch.finfo(panel.dtype).tiny)


def _projected(panel: Tensor, half: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """P − X Xᵀ P of columns of length 1, X = half + rest, to nearly all digits; the largest entry of Xᵀ P in each matrix."""
    if not half.shape[2]:
        return panel, panel.new_zeros(len(panel))
    along = _small_product(half.mT, rest.mT, panel)
    return panel - _small_product(half, rest, along), along.abs().amax(dim=(1, 2))


def _small_product(half: Tensor, rest: Tensor, panel: Tensor) -> Tensor:
    """(half + rest) P, as `split_product` has it, of entries of at most about 1."""
    first = panel.half()
    return half_product(half, first).add_(half_product(rest, first)).add_(half_product(half, (panel - first).half()))


def _decorrelated(panels: Sequence[Tensor]) -> list[Tensor]:
    """P C⁻ᵀ with Pᵀ P = C Cᵀ, the Cholesky factors of all panels at once."""
    exact = [panel.double() for panel in panels]
    grams, lengths = [], []
    for panel in exact:
        gram = panel.mT @ panel
        length = gram.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
        gram = gram * length[:, :, None] * length[:, None, :]
        width = panel.shape[2]
        padded = torch.eye(PANEL, dtype=gram.dtype, device=gram.device).repeat(len(gram), 1, 1)
        padded[:, :width, :width] = gram
        grams.append(padded)
        lengths.append(length)
    # Columns that depend on one another have a Gram matrix without a factor, but for a little on its diagonal.
    whole = torch.cat(grams)
    whole.diagonal(dim1=1, dim2=2).add_(1e-12)
    factors = torch.linalg.cholesky_ex(whole).L
    identity = torch.eye(PANEL, dtype=whole.dtype, device=whole.device).expand_as(whole)
    inverses = torch.linalg.solve_triangular(factors, identity, upper=False).split([len(gram) for gram in grams])
    return [
        (panel @ (length[:, :, None] * inverse.mT[:, : panel.shape[2], : panel.shape[2]])).float()
        for panel, length, inverse in zip(exact, lengths, inverses, strict=True)
    ]
