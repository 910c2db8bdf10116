"""Every example runs as a user would run it, in an empty folder, and prints what it promises."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import PATIENCE, SOURCE

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def number(after: str, output: str) -> float:
    """The number that follows these words."""
    found = re.search(re.escape(after) + r"\s*(-?\d+(?:\.\d+)?)", output)
    assert found, f"{after!r} is not in\n{output}"
    return float(found[1])


def cnn(output: str) -> None:
    assert number("answered, of these", output) <= 0.02
    assert number("hold the true class", output) > 0.9
    assert number("digits:", output) < 0.12
    for name in ("inverted", "turned", "noise"):
        line = next(line for line in output.splitlines() if line.startswith(name))
        assert number("AUROC", line) > 0.9
    assert number("from the file:", output) < 1e-4
    assert 397 <= number("drift told at input", output) < 600


def table(output: str) -> None:
    assert number("R² on test data", output) > 0.2
    assert 0.85 < number("95 % bands hold", output) <= 1


def smaller(output: str) -> None:
    before, after = (next(line for line in output.splitlines() if line.startswith(name)) for name in ("last", "tiny"))
    assert number("accuracy", after) > number("accuracy", before) - 0.02 > 0.9
    assert size(before) > 40 * size(after)


def size(line: str) -> int:
    """Bytes at the end of a line."""
    return int(line.removesuffix(" bytes").rpartition(" ")[2].replace(",", ""))


def bandit_service(output: str) -> None:
    assert number("of the first fifty,", output) > number("bought:", output)


def crystals(output: str) -> None:
    alone, given = (number(f"{how}: energies of other salts move by", output) for how in ("without data", "24 salts"))
    assert given < alone < 30
    assert min(number(name, output) for name in ("NaCl, squeezed:", "RaS:")) > 2 * number("NaCl:", output)


def digits(output: str) -> None:
    assert number("right:", output) > 0.95


def waves(output: str) -> None:
    # The noise alone is .2.
    assert number("root mean square error:", output) < 0.25


def adapter(output: str) -> None:
    assert number("loss of the last batch:", output) < 2


# What each example needs beside the library, and what its output must say.
CASES: dict[str, tuple[tuple[str, ...], Callable[[str], None]]] = {
    "digits.py": (("sklearn",), digits),
    "waves.py": ((), waves),
    "adapter.py": (("peft", "transformers"), adapter),
    "cnn.py": (("sklearn", "onnxscript", "onnxruntime"), cnn),
    "table.py": (("sklearn",), table),
    "smaller.py": (("sklearn",), smaller),
    "crystals.py": (("chgnet",), crystals),
    "bandit_service.py": ((), bandit_service),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    needed, check = CASES[name]
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'bayesadam[...]', see examples/README.md")
    given = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout)
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_every_example_is_run_and_listed() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert there == set(CASES)
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"]({name})" in listed for name in there)
