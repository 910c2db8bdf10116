"""Writes every kind of checkpoint that `wild` reads, without bayesadam:
python -m benchmarks.checkpoints.write FOLDER [NAME ...].
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.checkpoints import kinds, libraries

EXPECTED, LEFT_OUT = "expected.pt", "left_out.json"
DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "rsl_rl": "rsl-rl-lib",
    "ignite": "pytorch-ignite",
    "muon": "muon-optimizer",
}


def write_all(folder: Path, only: Sequence[str]) -> None:
    """Write every kind that is not there yet; what cannot be imported leaves the reason."""
    for number, kind in enumerate([*libraries.kinds(), *kinds.kinds()]):
        own = folder / f"{number:03d}"
        if (only and not any(part in kind.name for part in only)) or (own / EXPECTED).is_file():
            continue
        own.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {"kind": kind.name, "library": "torch " + torch.__version__, "note": kind.note}
        try:
            for module in kind.needs:
                importlib.import_module(module)
            if kind.needs:
                about["library"] = library(kind.needs[0], kind.versions)
        except Exception as error:
            leave_out(own, about, str(error) or type(error).__name__)
            continue
        content = own / "content"
        shutil.rmtree(content, ignore_errors=True)
        content.mkdir()
        try:
            written = kind.write(content)
        except Exception as error:
            traceback.print_exc()
            leave_out(own, about, f"the writer fails: {type(error).__name__}: {' '.join(str(error).split())}")
            continue
        distinct(written.weights)
        options = [{key: str(v) if isinstance(v, Path) else v for key, v in one.items()} for one in written.options]
        more = {"path": str(written.path), "options": options, "unsaid": written.unsaid}
        more |= {"optional": list(written.optional), "named": written.named, "aliases": written.aliases}
        torch.save({**about, **more, "live": dict(written.live), "weights": dict(written.weights)}, own / EXPECTED)
        (own / LEFT_OUT).unlink(missing_ok=True)


def leave_out(own: Path, about: Mapping[str, Any], reason: str) -> None:
    """Note why nothing was written; the first environment's reason stays."""
    path = own / LEFT_OUT
    if not path.is_file():
        path.write_text(
            json.dumps({**about, "left_out": " ".join(reason.split())}, ensure_ascii=False), encoding="utf-8"
        )


def library(module: str, wanted: str) -> str:
    """Its name and version; an error where it is another version than the wanted."""
    name = DISTRIBUTIONS.get(module.partition(".")[0], module.partition(".")[0])
    version = importlib.metadata.version(name)
    if not version.startswith(wanted):
        raise ImportError(f"{name} {version} is installed, {wanted}* is wanted")
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
