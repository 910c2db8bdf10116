"""Checkpoints written by the libraries that people use, against what was live: read right, refused, misread or crashed.

    python -m benchmarks.checkpoints.wild [--only NAME ...] [--keep FOLDER] [--also PYTHON ...] [--out out/bench]

Every kind is written by its own library where that is installed (`libraries`), in a process that has no bayesadam
(`write`), together with v̂ of the live optimiser, computed without bayesadam in double precision. `--also` names the
Python of another environment, which writes what could not be imported in this one. What was written is then read here,
where none of those libraries has been imported.

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
from benchmarks.common.harness import markdown, setting, write_results

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-6
# Letters of a message in the table; the results have all of it.
SHOWN = 200


def outcome(expected: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, str, set[str]]:
    """One call: "read", "in part", "refused", "MISREAD" or "CRASH", what is to be said, and the live names read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = read_checkpoint(expected["path"], **options)
            moments = dict(read_curvature(checkpoint, **options).second_moment)
            weights = {name: checkpoint.weights[name] for name in moments}
    except BayesAdamError as error:
        return "refused", first_line(error).replace(expected["path"], Path(expected["path"]).name), set()
    except Exception as error:
        return "CRASH", f"{type(error).__name__}: {first_line(error)}", set()
    if not expected["live"]:
        return "MISREAD", f"{len(moments)} parameters, though {expected['unsaid']}", set()
    right: set[str] = set()
    for name, moment in moments.items():
        key, wrong = compared(expected, name, moment, weights[name])
        if wrong:
            return "MISREAD", wrong, right
        right.add(key)
    missing = expected["live"].keys() - right - set(expected["optional"])
    if missing:
        return "in part", f"{len(right)} of {len(expected['live'])}, without {min(missing)}", right
    return "read", "", right


def compared(expected: Mapping[str, Any], name: str, moment: Tensor, weight: Tensor) -> tuple[str, str]:
    """Which live parameter was read under a name, and what is wrong with it, "" for nothing."""
    same = [key for key, w in expected["weights"].items() if w.shape == weight.shape and torch.equal(w, weight.to(w))]
    if len(same) != 1:
        return "", f"{name} has weights that none of the live parameters has"
    live = same[0].rpartition(":")[2]
    if not any(f".{name}".endswith(f".{one}") for one in (live, *expected["aliases"].get(same[0], ()))):
        return same[0], f"{name} has the weights of {live}"

    def close(v: Tensor) -> bool:
        return v.shape == moment.shape and bool(((moment.double() - v).abs() <= TOLERANCE * v).all())

    if close(wanted := expected["live"][same[0]]):
        return same[0], ""
    others = [f"that of {key}" for key, v in expected["live"].items() if close(v)]
    return same[0], f"v̂ of {name} is {[*others, f'{moment.double().mean():.2g}, not {wanted.mean():.2g}'][0]}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def judged(expected: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one kind."""
    status, said, _ = outcome(expected, {})
    row = {key: expected[key] for key in ("kind", "library", "unsaid", "options")}
    row |= {"status": status, "said": said, "with_options": "", "said_with_options": ""}
    if status in ("refused", "in part") and expected["options"]:
        calls = [outcome(expected, one) for one in expected["options"]]
        complete = set(expected["optional"]).union(*(names for *_, names in calls)) >= expected["live"].keys()
        row["with_options"] = "read" if complete else "in part"
        for bad in ("refused", "MISREAD", "CRASH"):
            for worst in (call for call in calls if call[0] == bad):
                row |= {"with_options": bad, "said_with_options": worst[1]}
    return row


def shown(row: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    first = row["status"] + (", rightly" if row["unsaid"] and row["status"] == "refused" else "")
    second = row["with_options"]
    if second:
        second += f" ({', '.join(sorted({key for one in row['options'] for key in one}))})"
    parts = ((row["kind"], row["unsaid"], " ({})"), (row["library"], "", ""))
    parts += ((first, row["said"], ": {}"), (second, row["said_with_options"], ": {}"))
    cells = (text + (form.format(more) if more else "") for text, more, form in parts)
    return [cell[:SHOWN].replace("|", "\\|").replace("\n", " ") for cell in cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the results")
    parser.add_argument("--only", nargs="+", default=[], help="kinds whose name holds one of these")
    parser.add_argument("--keep", type=Path, help="folder for what is written, which stays there")
    parser.add_argument("--also", nargs="+", default=[], help="Pythons of environments that write what this one cannot")
    options = parser.parse_args()
    if options.keep and options.keep.is_dir() and any(options.keep.iterdir()):
        sys.exit(f"{options.keep} is not empty")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        for python in (sys.executable, *options.also):
            command = [python, "-m", "benchmarks.checkpoints.write", str(folder), *options.only]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            if done.returncode:
                sys.exit(f"{python} could not write:\n{done.stderr[-4000:]}")
            (folder / f"log-{Path(python).parents[1].name}.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        rows = [judged(torch.load(path, weights_only=True)) for path in sorted(folder.glob("*/expected.pt"))]
        left_out = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/left_out.json"))]
    absent = [[one["kind"], "", f"left out: {one['left_out'][:SHOWN]}", ""] for one in left_out]
    print(markdown(("Kind", "Written by", "First call", "With options"), [*map(shown, rows), *absent]))
    write_results(options.out, "wild", {**setting(), "rows": rows, "left_out": left_out})
    due = [row for row in rows if not row["unsaid"]]
    refused = [row["status"] == "refused" for row in rows if row["unsaid"]]
    both = [row[key] for row in rows for key in ("status", "with_options")]
    more = sum(row["with_options"] == "read" for row in due)
    print(f"read with options {more} more; refused rightly {sum(refused)} of {len(refused)}")
    read = sum(row["status"] == "read" for row in due)
    print(f"read {read} of {len(due)}, misread {both.count('MISREAD')}, crashed {both.count('CRASH')}")


if __name__ == "__main__":
    main()
