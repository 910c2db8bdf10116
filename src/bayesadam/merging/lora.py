"""Low-rank adapters: merged as what they add to a weight, ΔW = s B A, since B and A alone mean nothing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayesadam.errors import FileError
from bayesadam.lora import Scaling

_CONFIG = "adapter_config.json"


class Adapter(NamedTuple):
    """B (out, rank), A (rank, in), the second moments of their gradients, and s."""

    up: Tensor
    down: Tensor
    up_moment: Tensor
    down_moment: Tensor
    scale: float


def change_of(adapter: Adapter) -> Tensor:
    """ΔW = s B A."""
    return adapter.scale * (adapter.up @ adapter.down)


def curvature_of(adapter: Adapter) -> Tensor:
    """E[G²] of ΔW as rank one, r_i c_j, from the second moments of both factors.

    With E[G²]_ij = r_i c_j and independent entries

        v_B[i, k] = s² r_i Σ_j c_j A_kj²        v_A[k, j] = s² c_j Σ_i r_i B_ik²

    so r is in proportion to Σ_k v_B[·, k] and c to Σ_k v_A[k, ·]; each equation gives a scale of their product, and the
    geometric mean of both is taken. B → t B, A → A/t leaves it as it is. 0 where either factor has had no gradient.
    """
    rows, columns = adapter.up_moment.sum(dim=1), adapter.down_moment.sum(dim=0)
    by_up = (columns * adapter.down.square()).sum()
    by_down = (rows[:, None] * adapter.up.square()).sum()
    scale = adapter.scale**2 * (by_up * by_down).sqrt()
    if not bool(scale > 0):
        return torch.zeros(len(rows), len(columns), dtype=rows.dtype, device=rows.device)
    return torch.outer(rows, columns) / scale


def factors_of(change: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """B and A of the nearest s B A of a rank, the singular values split evenly between them."""
    left, values, right = torch.linalg.svd(change / scale, full_matrices=False)
    root = values[:rank].sqrt()
    up, down = left[:, :rank] * root, root[:, None] * right[:rank]
    missing = rank - up.shape[1]
    return nn.functional.pad(up, (0, missing)), nn.functional.pad(down, (0, 0, 0, missing))


def scaling_of_folder(path: Path) -> Scaling:
    """s by the configuration in an adapter's folder: α/r, or α/√r where it says so."""
    file = (path if path.is_dir() else path.parent) / _CONFIG
    if not file.is_file():
        return lambda prefix, adapter, rank: None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        general = config.get("lora_alpha")
        patterns = {key: float(alpha) for key, alpha in (config.get("alpha_pattern") or {}).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise FileError(f"{file} is not the configuration of an adapter ({error}): copy it again") from None
    if not isinstance(general, int | float):
        return lambda prefix, adapter, rank: None
    by_root = bool(config.get("use_rslora"))

    def scaling(prefix: str, adapter: str | None, rank: int) -> float:
        fitting = (alpha for key, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", prefix))
        alpha: float = next(fitting, general)
        return alpha / (math.sqrt(rank) if by_root else rank)

    return scaling
