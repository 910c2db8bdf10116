"""Writes every kind of checkpoint that `wild` reads, without bayesadam:
python -m benchmarks.checkpoints.write FOLDER [NAME ...].
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.checkpoints import libraries  # noqa: F401
from benchmarks.checkpoints.networks import KINDS, Kind

EXPECTED, LEFT_OUT = "expected.pt", "left_out.json"
DISTRIBUTIONS = {"ignite": "pytorch-ignite", "muon": "muon-optimizer"}


def write_all(folder: Path, only: Sequence[str]) -> None:
    """Write every kind that is not there yet; of what cannot be written the first environment's reason stays."""
    for number, kind in enumerate(KINDS):
        own = folder / f"{number:03d}"
        if (only and not any(part in kind.name for part in only)) or (own / EXPECTED).is_file():
            continue
        content = own / f"content-{len(list(own.glob('content-*')))}"
        content.mkdir(parents=True)
        try:
            library = library_of(kind)
            written = kind.write(content)
        except Exception as error:
            if not isinstance(error, ImportError):
                traceback.print_exc()
            if not (own / LEFT_OUT).is_file():
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                (own / LEFT_OUT).write_text(json.dumps({"kind": kind.name, "left_out": reason}), encoding="utf-8")
            continue
        distinct(written.weights)
        options = [{key: str(v) if isinstance(v, Path) else v for key, v in one.items()} for one in written.options]
        about = {"kind": kind.name, "library": library, "options": options}
        saved = {**vars(written), "path": str(written.path), "optional": list(written.optional)}
        torch.save({**saved, **about}, own / EXPECTED)
        (own / LEFT_OUT).unlink(missing_ok=True)


def library_of(kind: Kind) -> str:
    """Which one writes, and its version; an error where it, or what it needs, is absent or another version."""
    for module in kind.needs:
        importlib.import_module(module)
    name = DISTRIBUTIONS.get(kind.needs[0], kind.needs[0])
    version = importlib.metadata.version(name)
    if not version.startswith(kind.version):
        raise ImportError(f"{name} {version} is installed, {kind.version}* is wanted")
    return f"{name.replace('_', '-')} {version}"


def distinct(weights: Mapping[str, Tensor]) -> None:
    """Parameters are told by their values, so that no two may be equal."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        key = (*tensor.shape, tensor.double().numpy().tobytes())
        assert key not in seen, f"{name} equals {seen[key]}: the kind tells nothing"
        seen[key] = name


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), sys.argv[2:])
