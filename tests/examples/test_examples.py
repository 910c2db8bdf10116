"""Every example runs as a user would run it, in an empty folder, and prints what it promises."""

from __future__ import annotations

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


def cnn_ood(output: str) -> None:
    assert number("test accuracy", output) > 0.93
    assert number("hold the true class", output) > 0.9
    assert number("familiar:", output) < 0.12
    for name in ("inverted", "turned", "noise"):
        line = next(line for line in output.splitlines() if line.startswith(name))
        assert number("AUROC", line) > max(0.9, number("entropy has", line))


def huggingface_classifier(output: str) -> None:
    assert number("held-out NLL", output) <= number("of the network alone", output)
    assert number("surest of", output) > number("test accuracy", output)
    assert number("hold the true class", output) > 0.8


def lightning_run(output: str) -> None:
    assert 0.1 < number("estimated standard deviation", output) < 0.3
    assert 0.8 < number("intervals hold", output) < 0.98


def lora(output: str) -> None:
    assert number("parameters in the posterior,", output) > 0
    assert number("calibrated: test NLL", output) < number("network: test NLL", output)


def sklearn_pipeline(output: str) -> None:
    assert number("R² on test data", output) > 0.2
    assert 0.85 < number("95 % bands hold", output) <= 1


def bandit_delayed(output: str) -> None:
    assert number("loaded at visitor 200:", output) == 10
    last = number("of the first hundred,", output)
    assert number("by chance", output) + 0.1 < last


def merge_two(output: str) -> None:
    rows = {line[:22].strip(): [float(cell) for cell in line.split()[-4:]] for line in output.splitlines()[1:]}
    tasks, means = {name: row[:2] for name, row in rows.items()}, {name: row[2] for name, row in rows.items()}
    assert all(row[3] == min(tasks[name]) for name, row in rows.items())
    assert means["ba.merge"] > max(means["mirrored"], means["upside down"], means["average of both"])
    for name in ("ba.merge", "ba.merge with base"):
        assert all(ours > plain for ours, plain in zip(tasks[name], tasks["average of both"], strict=True))


def prune_checkpoint(output: str) -> None:
    names = ("last", "pruned", "small", "tiny")
    lines = {name: next(line for line in output.splitlines() if line.startswith(f"{name}: ")) for name in names}
    zeros, accuracy = ([number(after, lines[name]) for name in names] for after in (":", "accuracy"))
    assert zeros[:2] == [0, 0.75]
    assert min(zeros[2:]) > 0.93
    assert min(accuracy) > accuracy[0] - 0.04 > 0.85
    assert number("total", output[output.index("codes of 4 bits") :].replace(",", "")) == 55210


def serve(output: str) -> None:
    assert 150 <= number("drift at input", output) < 250
    assert number("health page:", output) == 200


def label_digits(output: str) -> None:
    chosen = number("300 chosen labels: accuracy", output)
    assert chosen > number("300 random labels: accuracy", output)
    assert chosen > number("all 1400 labels: accuracy", output) - 0.02


def optimise_function(output: str) -> None:
    assert number("has the value", output) > max(-2.5, number("random points:", output))


# What each example is called with, to end by itself.
ARGUMENTS = {"serve.py": ("--port", "0", "--rehearse", "300")}
# What each example needs beside the library, and what its output must say.
CASES: dict[str, tuple[tuple[str, ...], Callable[[str], None]]] = {
    "cnn_ood.py": (("sklearn",), cnn_ood),
    "huggingface_classifier.py": (("transformers", "accelerate"), huggingface_classifier),
    "lightning_run.py": (("lightning",), lightning_run),
    "lora.py": (("peft", "transformers"), lora),
    "sklearn_pipeline.py": (("sklearn",), sklearn_pipeline),
    "bandit_delayed.py": ((), bandit_delayed),
    "merge_two.py": (("sklearn",), merge_two),
    "prune_checkpoint.sh": (("sklearn",), prune_checkpoint),
    "label_digits.py": (("sklearn",), label_digits),
    "optimise_function.py": (("botorch",), optimise_function),
    "serve.py": (("sklearn", "starlette", "uvicorn"), serve),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    needed, check = CASES[name]
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'bayesadam[...]', see examples/README.md")
    # `python` and `bayesadam` of a shell script are those of this environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    given = {"PATH": path, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash" if name.endswith(".sh") else sys.executable, EXAMPLES / name, *ARGUMENTS.get(name, ())],
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
