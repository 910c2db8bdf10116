"""What a command has finished so far, on disk, so that a stopped one goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesadam._files import replacing


@dataclass(frozen=True)
class Ledger:
    """Finished parts by name, as plain data, and what else a command notes beside them; gone when all is done."""

    path: Path

    @classmethod
    def of(cls, out: Path, asked: Mapping[str, Any]) -> Ledger:
        """The ledger of a run with these settings; another setting has another."""
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:12]
        return cls(out / f"unfinished-{digest}.json")

    def read(self) -> dict[str, Any]:
        """The finished parts; none where there is no ledger or it is damaged."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, finished: Mapping[str, Any]) -> None:
        """Put them on disk, whole or not at all."""
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(finished), encoding="utf-8")

    def close(self) -> None:
        """The run is done."""
        self.path.unlink(missing_ok=True)
