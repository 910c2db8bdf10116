"""Pruned and rounded networks: ours, and others as published, on the same inputs.

    python -m benchmarks.compress.smaller --nets DIR [--only 'resnet18-*'] [--methods ours sparsegpt] [--report]

`DIR` has what `trained` wrote. Every row is a file of `--out`: stopped, it resumes, and several processes share the
work by `--only`. All methods prune the same matrices and get the same training inputs, without labels. A row has the
score before and after batch norms are estimated again from these inputs, seconds and memory of the method alone; a
method that fails is told and has no row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import arguments, cells, markdown, mean_and_error, measured, replaced
from benchmarks.common.inputs import folder, load
from benchmarks.compress import published
from benchmarks.compress.trained import NETS, data_of, score, some_inputs, trained

FRACTIONS, BITS, COUNTS = (0.5, 0.75, 0.9, 0.95, 0.98, 0.99), (8, 4, 3, 2), (100, 300, 1000)
SEQUENCES, JOINT = 128, 4
OTHER = "fashion-mnist"
Row = dict[str, Any]
# Of a posterior, the inputs that a method gets, a fraction, and bits or None for weights as they are.
Method = Callable[[ba.Posterior, Tensor, float, int | None], nn.Module]


def ours(q: ba.Posterior, x: Tensor | None, fraction: float, bits: int | None, **how: Any) -> nn.Module:
    """Of the matrices that all methods prune; without inputs by the ratio alone."""
    exclude = [name for name in q.mode if name not in published.matrices(q.model)]
    small = ba.prune(q, fraction, exclude=exclude, inputs=x, **how) if fraction else q
    return small.model if bits is None else ba.quantise(small, bits, inputs=x).model


def given_zeros(method: Method) -> Method:
    """The dense network conditioned on the zeros that another method chose."""

    def conditioned(q: ba.Posterior, x: Tensor, fraction: float, bits: int | None) -> nn.Module:
        small = method(q, x, fraction, bits)
        masks = {name: small.get_parameter(name) != 0 for name in published.matrices(q.model)}
        return ba.compress.condition(q, masks, x).model

    return conditioned


def other_images(n: int) -> Tensor:
    """Of another set than the network's."""
    return load(OTHER, "test", made_up=folder() is None)[0][:n]


METHODS: dict[str, Method] = {
    "dense": lambda q, x, f, b: q.model,
    "ratio alone": lambda q, x, f, b: ours(q, None, f, b),
    "magnitude": lambda q, x, f, b: published.magnitude(q.model, f),
    "magnitude by layer": lambda q, x, f, b: published.magnitude(q.model, f, uniform=True),
    "ours": ours,
    f"ours, images of {OTHER}": lambda q, x, f, b: ours(q, other_images(len(x)).to(x.device), f, b),
    "ours, uniform noise": lambda q, x, f, b: ours(q, torch.rand_like(x), f, b),
    "magnitude conditioned": partial(ours, ranking="magnitude"),
    "sparsegpt": lambda q, x, f, b: published.sparsegpt(q.model, x, f, bits=b),
    "wanda": lambda q, x, f, b: published.wanda(q.model, x, f),
    "gptq": lambda q, x, f, b: published.gptq(q.model, x, b or 0),
    "gptq searched": lambda q, x, f, b: published.gptq(q.model, x, b or 0, search=True),
    "rtn": lambda q, x, f, b: published.rtn(q.model, b or 0),
    "rtn searched": lambda q, x, f, b: published.rtn(q.model, b or 0, search=True),
}
METHODS |= {f"{name} conditioned": given_zeros(METHODS[name]) for name in ("sparsegpt", "wanda")}
PRUNERS = ("ours", "sparsegpt", "sparsegpt conditioned", "wanda", "wanda conditioned", "magnitude conditioned")
ROUNDERS = ("ours", "gptq", "gptq searched", "rtn", "rtn searched")


def jobs(data: str, counts: tuple[int, ...], *, quick: bool) -> list[tuple[str, float, int | None, int]]:
    """Every row of a network: its method, the fraction, the bits, and how many inputs."""
    fractions, bits = ((0.5, 0.9), (3,)) if quick else (FRACTIONS, BITS)
    wrong = (f"ours, images of {OTHER}", "ours, uniform noise") if data == "mnist" else ()
    return [
        ("dense", 0.0, None, 0),
        *product(("ratio alone", "magnitude", "magnitude by layer"), fractions, (None,), (0,)),
        *product(PRUNERS, fractions, (None,), counts[::-1]),
        *product(ROUNDERS, (0.0,), bits, counts[-1:]),
        *product(("ours", "sparsegpt"), fractions, (JOINT,), counts[-1:]),
        *product(wrong, fractions, (None,), counts[-1:]),
    ]


def size_of(model: nn.Module, bits: int | None) -> int:
    """Bytes of a file: what is kept, the entropy of where, with bits a scale of 16 a row; all else in float32."""
    total, matrices = 0.0, published.matrices(model)
    for name, parameter in model.named_parameters():
        n, wide = parameter.numel(), 32
        if name in matrices:
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


def row_of(path: Path, job: tuple[str, float, int | None, int], device: str, *, quick: bool) -> Row | None:
    """One method on one network; None where it fails."""
    (name, _, seed), (method, fraction, bits, n) = path.stem.rpartition("-"), job
    about: Row = {"net": name, "seed": int(seed), "method": method, "fraction": fraction, "bits": bits, "inputs": n}
    net, data = NETS[name], data_of(NETS[name], device, made_up=quick)
    q, x = posterior_of(path, device, len(data.train[0])), some_inputs(net, data, max(n, 1), int(seed))
    made: list[nn.Module] = []
    try:
        cost = measured(lambda: made.append(METHODS[method](q, x, fraction, bits)), device)
    except Exception as error:
        print(f"{about} failed: {type(error).__name__}: {error}", flush=True)
        return None
    row = about | cost | {"score": score(net, made[0], data), "bytes": size_of(made[0], bits)}
    print(f"{path.stem}, {method}, {fraction:g}: {row['score']:.3f} in {row['seconds']:.1f} s, {row['mib']:.0f} MiB")
    return row | {"renormed": score(net, published.renormed(made[0], x), data) if n else None}


def means(rows: list[Row]) -> list[Row]:
    """One row for those of all seeds: mean score and standard error, the mean with norms again, mean bytes."""
    keys, grouped = ("net", "method", "fraction", "bits", "inputs"), dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        grouped.setdefault(tuple(row[key] for key in keys), []).append(row)
    averages = []
    for about, some in grouped.items():
        mean, error = mean_and_error(row["score"] for row in some)
        again = fmean(row["score"] if row["renormed"] is None else row["renormed"] for row in some)
        scored = {"score": round(mean, 4), "error": round(error, 4) if len(some) > 1 else 0.0}
        scored |= {"norms again": round(again, 4), "bytes": round(fmean(row["bytes"] for row in some))}
        averages.append(dict(zip(keys, about, strict=True)) | {"seeds": len(some)} | scored)
    return averages


def tables(rows: list[Row]) -> Iterator[str]:
    """A network's mean scores, after a semicolon with batch norms estimated again where that is another number."""
    for net, (title, column, which) in product(
        dict.fromkeys(row["net"] for row in rows),
        (
            ("pruned by", "fraction", lambda row: row["bits"] is None),
            ("rounded to bits", "bits", lambda row: row["bits"] and not row["fraction"]),
            (f"at {JOINT} bits, pruned by", "fraction", lambda row: row["bits"] and row["fraction"]),
        ),
    ):
        digits, lines = 3 if NETS[net].smaller_is_better else 1, dict[str, dict[float, str]]()
        for row in (row for row in rows if row["net"] == net and which(row)):
            told = f"{row['score']:.{digits}f}" + (f" ± {row['error']:.{digits}f}" if row["seeds"] > 1 else "")
            told += f"; {row['norms again']:.{digits}f}" if row["norms again"] != row["score"] else ""
            lines.setdefault(f"{row['method']}, {row['inputs'] or 'no'} inputs", {})[row[column]] = told
        heads = sorted({head for line in lines.values() for head in line}, reverse=column == "bits")
        cells_of = ((label, *(line.get(head, "–") for head in heads)) for label, line in lines.items())
        yield markdown((f"{net}, {title}", *heads), cells_of)


def main() -> None:
    parser = arguments(__doc__, quick="one small network on made-up images", device=True)
    parser.add_argument("--nets", type=Path, help="folder of the trained networks")
    parser.add_argument("--only", nargs="+", default=["*"], help="of these, by pattern: resnet18-*")
    parser.add_argument("--methods", nargs="+", help="of these alone")
    parser.add_argument("--report", action="store_true", help="the tables of what is there")
    options = parser.parse_args()
    nets, folder = options.nets or options.out / "nets", options.out / "smaller"
    if options.quick and not (nets / "lenet300-0.pt").is_file():
        trained("lenet300", 0, nets / "lenet300-0.pt", options.device, made_up=True)
    for path in sorted(nets.glob("*.pt")) if not options.report else ():
        name = path.stem.rpartition("-")[0]
        if any(fnmatchcase(path.stem, pattern) for pattern in options.only):
            counts = (SEQUENCES,) if NETS[name].smaller_is_better else COUNTS
            wanted = jobs(NETS[name].data, (100,) if options.quick else counts, quick=options.quick)
            makes = {
                f"{path.stem}, {', '.join(map(str, job))}": partial(
                    row_of, path, job, options.device, quick=options.quick
                )
                for job in wanted
                if job[0] in (options.methods or METHODS)
            }
            cells(folder, makes, {"quick": options.quick})
    rows = means([json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))])
    print("\n\n".join(tables(rows)))
    lines = ",\n".join(json.dumps(row) for row in rows)
    replaced(options.out / "smaller.json", lambda path: path.write_text(f"[\n{lines}\n]\n", encoding="utf-8"))


if __name__ == "__main__":
    main()
