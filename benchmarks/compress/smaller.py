"""Pruned and rounded networks: ours, and others as published, on the same inputs.

    python -m benchmarks.compress.smaller --nets DIR [--only 'resnet18-*'] [--methods ours sparsegpt] [--report]

`DIR` has what `trained` wrote. The rows of a network are one file of `--out`: stopped, it resumes, and several
processes share the work by `--only`. All methods prune the same matrices and get the same training inputs, without
labels. A row has the score before and after batch norms are estimated again from these inputs, the seconds of the
method alone, and on CUDA the memory at most; a method that fails is told and has no row.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import arguments, number, replaced
from benchmarks.compress import published
from benchmarks.compress.trained import NETS, data_of, score, some_inputs, trained

FRACTIONS, BITS, COUNTS = (0.5, 0.75, 0.9, 0.95, 0.98, 0.99), (8, 4, 3, 2), (100, 300, 1000)
SEQUENCES, JOINT = 128, 4
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """A network, its posterior, and the inputs that a method gets."""

    posterior: ba.Posterior
    inputs: Tensor

    @property
    def model(self) -> nn.Module:
        """The dense network."""
        return self.posterior.model

    @property
    def eligible(self) -> list[str]:
        """The weights that are pruned or rounded."""
        return list(published.matrices(self.model))

    def pruned(self, fraction: float, **how: Any) -> ba.Posterior:
        """By this library."""
        exclude = [name for name in self.posterior.mode if name not in self.eligible]
        return ba.prune(self.posterior, fraction, exclude=exclude, **how) if fraction else self.posterior

    def conditioned(self, small: nn.Module) -> nn.Module:
        """The dense network given the zeros of a pruned one."""
        masks = {name: small.get_parameter(name) != 0 for name in self.eligible}
        return ba.compress.condition(self.posterior, masks, self.inputs).model


# --- methods: of a case, a fraction and bits, None for as they are ----------------------------------------------------

Method = Callable[[Case, float, int | None], nn.Module]
# What a row is called, its method, the fraction, the bits, and how many inputs.
Job = tuple[str, Method, float, int | None, int]


def ours(case: Case, fraction: float, bits: int | None) -> nn.Module:
    small = case.pruned(fraction, inputs=case.inputs)
    return small.model if bits is None else ba.quantise(small, bits, inputs=case.inputs).model


def sparsegpt(case: Case, fraction: float, bits: int | None) -> nn.Module:
    return published.sparsegpt(case.model, case.inputs, fraction, bits=bits, eligible=case.eligible)


def wanda(case: Case, fraction: float, bits: int | None) -> nn.Module:
    return published.wanda(case.model, case.inputs, fraction, eligible=case.eligible)


def gptq(case: Case, fraction: float, bits: int | None, *, search: bool = False) -> nn.Module:
    return published.gptq(case.model, case.inputs, bits or 0, search=search, eligible=case.eligible)


def rtn(case: Case, fraction: float, bits: int | None, *, search: bool = False) -> nn.Module:
    return published.rtn(case.model, bits or 0, search=search, eligible=case.eligible)


def hqq(case: Case, fraction: float, bits: int | None) -> nn.Module:
    """HQQ's own search for a scale and a zero of each row, without inputs; rounding of the package hqq."""
    quantizer, small = importlib.import_module("hqq.core.quantize").Quantizer, copy.deepcopy(case.model)
    for name, layer in published.matrices(small).items():
        if name in case.eligible:
            w = published.matrix_of(layer)
            codes = quantizer.quantize(w, bits, group_size=None, axis=1, bitpack=False, device=w.device.type)
            published.write(layer, quantizer.dequantize(*codes))
    return small


def magnitude(case: Case, fraction: float, bits: int | None, *, uniform: bool = False) -> nn.Module:
    return published.magnitude(case.model, fraction, uniform=uniform, eligible=case.eligible)


ALONE: dict[str, Method] = {
    "ratio alone": lambda case, fraction, bits: case.pruned(fraction).model,
    "magnitude": magnitude,
    "magnitude by layer": lambda *job: magnitude(*job, uniform=True),
}
PRUNERS: dict[str, Method] = {
    "ours": ours,
    "sparsegpt": sparsegpt,
    "sparsegpt conditioned": lambda case, *job: case.conditioned(sparsegpt(case, *job)),
    "wanda": wanda,
    "wanda conditioned": lambda case, *job: case.conditioned(wanda(case, *job)),
    "magnitude conditioned": lambda case, fraction, bits: (
        case.pruned(fraction, inputs=case.inputs, ranking="magnitude").model
    ),
}
ROUNDERS: dict[str, Method] = {
    "ours": ours,
    "gptq": gptq,
    "gptq searched": lambda *job: gptq(*job, search=True),
    "rtn": rtn,
    "rtn searched": lambda *job: rtn(*job, search=True),
    "hqq": hqq,
}
BOTH: dict[str, Method] = {"ours": ours, "sparsegpt": sparsegpt}


# --- rows -----------------------------------------------------------------------------------------------------------


def jobs(counts: tuple[int, ...], *, quick: bool) -> Iterator[Job]:
    """Every row of a network."""
    fractions, bits = ((0.5, 0.9), (3,)) if quick else (FRACTIONS, BITS)
    yield "dense", lambda case, *_: case.model, 0.0, None, 0
    for (name, method), fraction in product(ALONE.items(), fractions):
        yield name, method, fraction, None, 0
    for n, (name, method), fraction in product(counts[::-1], PRUNERS.items(), fractions):
        yield name, method, fraction, None, n
    for (name, method), width in product(ROUNDERS.items(), bits):
        yield name, method, 0.0, width, counts[-1]
    for (name, method), fraction in product(BOTH.items(), fractions):
        yield name, method, fraction, JOINT, counts[-1]


def size_of(model: nn.Module, eligible: list[str], bits: int | None) -> int:
    """Bytes of a file: what is kept, the entropy of where, with bits a scale of 16 a row; all else in float32."""
    total = 0.0
    for name, parameter in model.named_parameters():
        n, wide = parameter.numel(), 32
        if name in eligible:
            kept, wide = int((parameter != 0).sum()), bits or 32
            where = sum(-part * math.log2(part / n) for part in (kept, n - kept) if part)
            total += min(kept * wide + where, n * wide) + (16 * len(parameter) if bits else 0)
        else:
            total += n * wide
    return round(total / 8)


@lru_cache(maxsize=1)
def posterior_of(path: Path, device: str, n_data: int) -> ba.Posterior:
    model = NETS[path.stem.rpartition("-")[0]].build().to(device)
    return ba.Posterior.from_checkpoint(path, model.eval(), n_data=n_data)


def row_of(path: Path, job: Job, device: str, *, quick: bool) -> Row:
    """One method on one network."""
    (name, _, seed), (title, method, fraction, bits, n) = path.stem.rpartition("-"), job
    net, is_cuda = NETS[name], device.startswith("cuda")
    data = data_of(net, device, made_up=quick)
    case = Case(posterior_of(path, device, len(data.train[0])), some_inputs(net, data, max(n, 1), int(seed)))
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    small = method(case, fraction, bits)
    if is_cuda:
        torch.cuda.synchronize()
    row: Row = {"net": name, "seed": int(seed), "method": title, "fraction": fraction, "bits": bits, "inputs": n}
    row |= {"seconds": time.perf_counter() - start, "score": score(net, small, data)}
    row["renormed"] = score(net, published.renormed(small, case.inputs), data) if n else None
    row["memory"] = torch.cuda.max_memory_allocated() if is_cuda else None
    zeros = [int((small.get_parameter(key) == 0).sum()) for key in case.eligible]
    row["sparsity"] = sum(zeros) / sum(small.get_parameter(key).numel() for key in case.eligible)
    return row | {"bytes": size_of(small, case.eligible, bits)}


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("method", "fraction", "bits", "inputs"))


def measure(path: Path, out: Path, wanted: Iterable[Job], device: str, *, quick: bool) -> list[Row]:
    """The rows of a network, and those that are not there yet into its file."""
    rows: list[Row] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else []
    done = {key_of(row) for row in rows}
    for job in wanted:
        if (job[0], *job[2:]) in done:
            continue
        try:
            rows.append(row := row_of(path, job, device, quick=quick))
        except Exception as error:
            print(f"{path.stem}, {job[0]}, {job[2:]} failed: {type(error).__name__}: {error}", flush=True)
            continue
        text = json.dumps(rows, indent=1)
        replaced(out, lambda unfinished, text=text: unfinished.write_text(text, encoding="utf-8"))
        print(f"{path.stem} {key_of(row)}: {row['score']:.3f}, {row['seconds']:.1f} s", flush=True)
    return rows


# --- tables ---------------------------------------------------------------------------------------------------------


def tables(rows: list[Row]) -> str:
    """In Markdown, a network's scores over its seeds, and where it has batch norms those with them estimated again."""
    text = []
    for net in dict.fromkeys(row["net"] for row in rows):
        mine = [row for row in rows if row["net"] == net]
        digits = 3 if NETS[net].smaller_is_better else 1
        dense = number([row["score"] for row in mine if row["method"] == "dense"], digits)
        for title, chosen, column in (
            ("pruned by", lambda row: row["bits"] is None and row["method"] != "dense", "fraction"),
            ("rounded to bits", lambda row: row["bits"] and not row["fraction"], "bits"),
            (f"at {JOINT} bits, pruned by", lambda row: row["bits"] and row["fraction"], "fraction"),
        ):
            cells: dict[tuple[str, int], dict[float, list[Row]]] = {}
            for row in filter(chosen, mine):
                cells.setdefault((row["method"], row["inputs"]), {}).setdefault(row[column], []).append(row)
            if not cells:
                continue
            heads = sorted({row[column] for row in filter(chosen, mine)}, reverse=column == "bits")
            text += [f"\n{net} (dense {dense}), {title}\n", f"| method, inputs | {' | '.join(map(str, heads))} |"]
            text.append("|" + "---|" * (len(heads) + 1))
            for (method, n), by in cells.items():
                for again in ("score", "renormed"):
                    if again == "score" or any(r["renormed"] not in (None, r["score"]) for c in by.values() for r in c):
                        label = f"{method}, {n or 'none'}{', norms again' if again == 'renormed' else ''}"
                        found = (number([r[again] for r in by.get(head, [])], digits) for head in heads)
                        text.append(f"| {label} | {' | '.join(found)} |")
    return "\n".join(text)


def means(rows: list[Row]) -> list[Row]:
    """One row for those of all seeds: mean score and standard error, the mean with norms again, mean bytes."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["net"], *key_of(row)), []).append(row)
    found = []
    for some in cells.values():
        scores = [row["score"] for row in some]
        error = round(stdev(scores) / math.sqrt(len(some)), 4) if len(some) > 1 else 0.0
        about = {key: some[0][key] for key in ("net", "method", "fraction", "bits", "inputs")}
        size = round(fmean(row["bytes"] for row in some))
        again = round(fmean(row["score"] if row["renormed"] is None else row["renormed"] for row in some), 4)
        scored = {"score": round(fmean(scores), 4), "error": error, "norms again": again}
        found.append(about | {"seeds": len(some), **scored, "bytes": size})
    return found


def main() -> None:
    parser = arguments(__doc__, quick="one small network on made-up images", device=True)
    parser.add_argument("--nets", type=Path, help="folder of the trained networks")
    parser.add_argument("--only", nargs="+", default=["*"], help="of these, by pattern: resnet18-*")
    parser.add_argument("--methods", nargs="+", help="of these alone")
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="how many images, ascending")
    parser.add_argument("--report", action="store_true", help="the tables of what is there")
    options = parser.parse_args()
    nets, out = options.nets or options.out / "nets", options.out
    if options.quick and not (nets / "lenet300-0.pt").is_file():
        trained("lenet300", 0, nets / "lenet300-0.pt", options.device, made_up=True)
    for path in sorted(nets.glob("*.pt")) if not options.report else ():
        if any(fnmatchcase(path.stem, pattern) for pattern in options.only):
            is_text = NETS[path.stem.rpartition("-")[0]].smaller_is_better
            counts = (100,) if options.quick else (SEQUENCES,) if is_text else tuple(options.counts)
            listed = (job for job in jobs(counts, quick=options.quick) if job[0] in (options.methods or (job[0],)))
            measure(path, out / f"{path.stem}.json", listed, options.device, quick=options.quick)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*-*.json"))]
    rows = [row for rows in found for row in rows]
    print(tables(rows))
    lines = ",\n".join(json.dumps(row) for row in means(rows))
    replaced(out / "smaller.json", lambda unfinished: unfinished.write_text(f"[\n{lines}\n]\n", encoding="utf-8"))


if __name__ == "__main__":
    main()
