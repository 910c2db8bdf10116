"""What the figures of README and docs rest on: `python -m benchmarks.FOLDER.NAME`, from the root of a clone."""

import sys
from pathlib import Path

# A clone needs no installation.
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
