"""Where a benchmark's numbers go: one JSON file in the folder that `--out` names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUT = Path("out/bench")


def write_results(out: Path, name: str, results: Mapping[str, Any]) -> Path:
    """Write `out/name.json`; the folder is made if absent."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
