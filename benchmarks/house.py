"""The size of the source, and what a reader meets along four paths through it: files, functions, depth of calls.

    python benchmarks/house.py

A path is run once under `sys.setprofile`. A function of this package counts once, comprehensions and lambdas do not;
the depth is the most frames of the package, comprehensions with them, that were on the stack together.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import bayesadam as ba

SOURCE = Path(ba.__file__ or "").parent
DATA = torch.randn(200, 8), torch.randint(3, (200,))


@cache
def one_expression(file: str) -> set[int]:
    """The first lines of functions whose body is one statement."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if len(body) == 1 and isinstance(body[0], ast.Return | ast.Expr):
                found |= {line.lineno for line in (node, *node.decorator_list)}
    return found


def counted(work: Callable[[], object]) -> dict[str, int]:
    """Files, functions, the deepest call and functions of one expression that the work runs through."""
    functions: set[tuple[str, int]] = set()
    depth = deepest = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, deepest
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(SOURCE)):
            return
        depth += 1 if event == "call" else -1
        deepest = max(deepest, depth)
        if not code.co_name.startswith("<"):
            functions.add((code.co_filename, code.co_firstlineno))

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    short = sum(line in one_expression(file) for file, line in functions)
    files = len({file for file, _ in functions})
    return {"files": files, "functions": len(functions), "deepest": deepest, "one expression": short}


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(DATA[0]), DATA[1]).backward()
        optimizer.step()
    return model, optimizer


def paths(folder: Path) -> dict[str, Callable[[], object]]:
    model, optimizer = trained()
    file = folder / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    posteriors = [ba.Posterior.from_optimizer(*trained(seed), 200, batch_size=200) for seed in range(2)]

    def predict() -> None:
        posterior = ba.Posterior.from_optimizer(model, optimizer, 200, batch_size=200)
        found = ba.calibrate(posterior, DATA, likelihood="classification").predict(DATA[0], likelihood="classification")
        _ = found.probs, found.novelty

    def bandit() -> None:
        agent = ba.bandits.make_agent("hybrid", n_features=8, n_arms=3)
        for context in DATA[0][:25].numpy():
            arm = agent.act(context)
            agent.update(context, arm, float(arm == 1))

    return {
        "from_optimizer, calibrate, predict, probs, novelty": predict,
        "from_checkpoint": lambda: ba.Posterior.from_checkpoint(file, trained()[0], 200),
        "hybrid agent, 25 rounds": bandit,
        "merge of two": lambda: ba.merge(posteriors, method="fisher"),
    }


def main() -> None:
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        package = parts[0] if len(parts) > 1 else "(modules)"
        lines[package] += len(path.read_text(encoding="utf-8").splitlines())
        files[package] += 1
    for package in sorted(lines):
        print(f"{package:14s} {files[package]:4d} files {lines[package]:7,} lines")
    print(f"{'all':14s} {files.total():4d} files {lines.total():7,} lines")
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for name, work in paths(Path(folder)).items():
            found = counted(work)
            print(f"{name:52s} " + ", ".join(f"{key} {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
