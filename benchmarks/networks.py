"""A name for benchmarks that have not moved; goes with the last of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.common.networks import *  # noqa: E402, F403
