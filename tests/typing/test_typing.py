"""The package is typed: a user's strict type checker sees what each call takes and gives."""

import subprocess
import sys
from pathlib import Path

import pytest

import bayesadam
from processes import PATIENCE, SOURCE

USER = Path(__file__).with_name("user.py")
# Apart from that of `make check`, whose settings are others.
CACHE = Path(__file__).parents[2] / ".mypy_cache" / "user"


def test_the_marker_for_type_checkers_is_in_the_package():
    assert Path(bayesadam.__file__).with_name("py.typed").is_file()


@pytest.mark.slow
def test_a_users_strict_check_passes_and_finds_mistakes(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy: pip install -e '.[dev]'")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import bayesadam as ba\n"
        "import torch\n\n\n"
        "def probs(net: ba.Calibrated, x: torch.Tensor) -> torch.Tensor:\n"
        "    answer = net(x)\n"
        "    return answer.probabilities\n"
    )
    # As a user has it: no configuration of ours, and the package's marker for type checkers in its place.
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nstrict = true\nmypy_path = {SOURCE}\ncache_dir = {CACHE}\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--config-file", config, USER, wrong]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False).stdout
    assert [line for line in said.splitlines() if "user.py" in line] == []
    assert 'wrong.py:7: error: "Answer" has no attribute "probabilities"' in said
