"""Checkpoints written by the libraries that people use, against what was live: read right, refused, misread or crashed.

    python -m benchmarks.checkpoints.wild [--only NAME ...] [--keep FOLDER] [--also PYTHON ...] [--out out/bench]

Every kind is written by its own library where that is installed (`libraries`), or by a script with torch alone
(`kinds`), in a process that has no bayesadam (`write`), together with v̂ of the live optimiser,
computed without bayesadam in double precision. `--also` names the Python of another environment, which writes what
could not be imported in this one. What was written is then read here, where none of those libraries has been imported.

The first call has no options; where it refuses, the options that say what no file says follow. A parameter that was
read is identified by its weights, which no other has, and its name must end as the live one's does: v̂ must be that
parameter's to one part in a million. What the file leaves open is right to be refused; what is read must be right all
the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam.errors import BayesAdamError
from bayesadam.readers import read_checkpoint, read_curvature

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-6
# Letters of a message in the table; the results have all of it.
SHOWN = 200


# --- reading --------------------------------------------------------------------------------------------------------


def outcome(expected: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, str, set[str]]:
    """One call: "read", "in part", "refused", "MISREAD" or "CRASH", what is to be said, and the live names read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = read_checkpoint(expected["path"], **options)
            found = dict(read_curvature(checkpoint, **options).second_moment)
            weights = {name: checkpoint.weights[name] for name in found}
    except BayesAdamError as error:
        return "refused", first_line(error).replace(expected["path"], Path(expected["path"]).name), set()
    except Exception as error:
        return "CRASH", f"{type(error).__name__}: {first_line(error)}", set()
    return compared(expected, found, weights)


def compared(
    expected: Mapping[str, Any], found: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> tuple[str, str, set[str]]:
    if not expected["live"]:
        return "MISREAD", f"{len(found)} parameters, though {expected['unsaid']}", set()
    right: set[str] = set()
    for name, moment in found.items():
        same = [own for own, tensor in expected["weights"].items() if alike(tensor, weights[name])]
        if len(same) != 1:
            return "MISREAD", f"{name} has weights that none of the live parameters has", right
        live = same[0].rpartition(":")[2]
        names = (live, *expected["aliases"].get(same[0], ()))
        if expected["named"] and not any(f".{name}".endswith(f".{one}") for one in names):
            return "MISREAD", f"{name} has the weights of {live}", right
        wanted = expected["live"][same[0]]
        error = (moment.double() - wanted).abs() if moment.shape == wanted.shape else torch.tensor(torch.inf)
        if not bool((error <= TOLERANCE * wanted).all()):
            others = [own for own, v in expected["live"].items() if v.shape == moment.shape and close(moment, v)]
            whose = f"that of {others[0]}" if others else f"off by {float((error / wanted).max()):.2g} of it"
            return "MISREAD", f"v̂ of {name} is {whose}", right
        right.add(same[0])
    missing = expected["live"].keys() - right - set(expected["optional"])
    if missing:
        return "in part", f"{len(right)} of {len(expected['live'])}, without {min(missing)}", right
    return "read", "", right


def alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other.to(one.dtype))


def close(one: Tensor, other: Tensor) -> bool:
    return bool(((one.double() - other).abs() <= TOLERANCE * other).all())


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def judged(expected: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one kind."""
    status, said, _ = outcome(expected, {})
    row = {key: expected[key] for key in ("kind", "library", "note", "unsaid")}
    row |= {"status": status, "said": said, "with_options": ""}
    if status in ("refused", "in part") and expected["options"]:
        calls = [outcome(expected, one) for one in expected["options"]]
        row["options"] = expected["options"]
        worst = next((call for bad in ("CRASH", "MISREAD", "refused") for call in calls if call[0] == bad), None)
        complete = set(expected["optional"]).union(*(names for _, _, names in calls)) >= expected["live"].keys()
        row["with_options"] = worst[0] if worst else "read" if complete else "in part"
        row["said_with_options"] = worst[1] if worst else ""
    return row


def shown(row: Mapping[str, Any]) -> str:
    """A row of the table, in Markdown."""
    rightly = ", rightly" if row["unsaid"] and row["status"] == "refused" else ""
    status = {"in part": "read in part"}.get(row["status"], row["status"])
    first = status + rightly + (f": {row['said']}" if row["said"] else "")
    second = ""
    if row["with_options"]:
        named = ", ".join(sorted({key for one in row["options"] for key in one}))
        second = f"{row['with_options']} ({named})" + (
            f": {row['said_with_options']}" if row["said_with_options"] else ""
        )
    told = row["library"] + (f" ({row['note']})" if row["note"] else "")
    cells = (row["kind"] + (f" ({row['unsaid']})" if row["unsaid"] else ""), told, first[:SHOWN], second[:SHOWN])
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the results")
    parser.add_argument("--only", nargs="+", default=[], help="kinds whose name holds one of these")
    parser.add_argument("--keep", type=Path, help="folder for what is written, which stays there")
    parser.add_argument("--also", nargs="+", default=[], help="Pythons of environments that write what this one cannot")
    given = parser.parse_args()
    if given.keep and given.keep.is_dir() and any(given.keep.iterdir()):
        sys.exit(f"{given.keep} is not empty")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        for python in (sys.executable, *given.also):
            command = [python, "-m", "benchmarks.checkpoints.write", str(folder), *given.only]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            if done.returncode:
                sys.exit(f"{python} could not write:\n{done.stderr[-4000:]}")
            (folder / f"log-{Path(python).parents[1].name}.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        found = sorted(folder.glob("*/expected.pt"))
        rows = [judged(torch.load(path, weights_only=True)) for path in found]
        left_out = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/left_out.json"))]
    print("| Kind | Written by | First call | With options |\n|---|---|---|---|")
    print("\n".join(map(shown, rows)))
    for one in left_out:
        print(f"| {one['kind']} | | left out: {one['left_out'][:SHOWN]} | |")
    given.out.mkdir(parents=True, exist_ok=True)
    results = {"torch": torch.__version__, "rows": rows, "left_out": left_out}
    (given.out / "wild.json").write_text(json.dumps(results, indent=2, ensure_ascii=False), encoding="utf-8")
    print(summary(rows))


def summary(rows: list[dict[str, Any]]) -> str:
    due = [row for row in rows if not row["unsaid"]]
    open_ones = [row for row in rows if row["unsaid"]]
    both = [row[key] for row in rows for key in ("status", "with_options")]
    refused = sum(row["status"] == "refused" for row in open_ones)
    more = sum(row["with_options"] == "read" for row in due)
    print(f"read with options {more} more; refused rightly {refused} of {len(open_ones)}")
    return (
        f"read {sum(row['status'] == 'read' for row in due)} of {len(due)}, misread {both.count('MISREAD')}, "
        f"crashed {both.count('CRASH')}"
    )


if __name__ == "__main__":
    main()
