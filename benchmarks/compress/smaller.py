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
from benchmarks.common.inputs import load
from benchmarks.compress import published
from benchmarks.compress.trained import NETS, data_of, score, some_inputs, trained

FRACTIONS, BITS, COUNTS = (0.5, 0.75, 0.9, 0.95, 0.98, 0.99), (8, 4, 3, 2), (100, 300, 1000)
SEQUENCES, JOINT = 128, 4
OTHERS = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
Row = dict[str, Any]
# Of a posterior, the inputs that a method gets, a fraction, and bits or None for weights as they are.
Method = Callable[[ba.Posterior, Tensor, float, int | None], nn.Module]


# --- methods --------------------------------------------------------------------------------------------------------


def pruned(q: ba.Posterior, fraction: float, **how: Any) -> ba.Posterior:
    """By this library, of the matrices that all methods prune."""
    exclude = [name for name in q.mode if name not in published.matrices(q.model)]
    return ba.prune(q, fraction, exclude=exclude, **how) if fraction else q


def ours(q: ba.Posterior, x: Tensor, fraction: float, bits: int | None, **how: Any) -> nn.Module:
    small = pruned(q, fraction, inputs=x, **how)
    return small.model if bits is None else ba.quantise(small, bits, inputs=x).model


def sparsegpt(q: ba.Posterior, x: Tensor, fraction: float, bits: int | None) -> nn.Module:
    return published.sparsegpt(q.model, x, fraction, bits=bits)


def wanda(q: ba.Posterior, x: Tensor, fraction: float, bits: int | None) -> nn.Module:
    return published.wanda(q.model, x, fraction)


def gptq(q: ba.Posterior, x: Tensor, fraction: float, bits: int | None, **how: Any) -> nn.Module:
    return published.gptq(q.model, x, bits or 0, **how)


def rtn(q: ba.Posterior, x: Tensor, fraction: float, bits: int | None, **how: Any) -> nn.Module:
    return published.rtn(q.model, bits or 0, **how)


def magnitude(q: ba.Posterior, x: Tensor, fraction: float, bits: int | None, **how: Any) -> nn.Module:
    return published.magnitude(q.model, fraction, **how)


def conditioned(method: Method) -> Method:
    """The dense network given the zeros that another method chose."""

    def given_zeros(q: ba.Posterior, x: Tensor, fraction: float, bits: int | None) -> nn.Module:
        small = method(q, x, fraction, bits)
        masks = {name: small.get_parameter(name) != 0 for name in published.matrices(q.model)}
        return ba.compress.condition(q, masks, x).model

    return given_zeros


ALONE: dict[str, Method] = {
    "ratio alone": lambda q, x, fraction, bits: pruned(q, fraction).model,
    "magnitude": magnitude,
    "magnitude by layer": partial(magnitude, uniform=True),
}
PRUNERS: dict[str, Method] = {
    "ours": ours,
    "sparsegpt": sparsegpt,
    "sparsegpt conditioned": conditioned(sparsegpt),
    "wanda": wanda,
    "wanda conditioned": conditioned(wanda),
    "magnitude conditioned": partial(ours, ranking="magnitude"),
}
ROUNDERS: dict[str, Method] = {
    "ours": ours,
    "gptq": gptq,
    "gptq searched": partial(gptq, search=True),
    "rtn": rtn,
    "rtn searched": partial(rtn, search=True),
}
BOTH: dict[str, Method] = {"ours": ours, "sparsegpt": sparsegpt}


def jobs(data: str, counts: tuple[int, ...], *, quick: bool) -> Iterator[tuple[str, Method, float, int | None, int]]:
    """Every row of a network: what it is called, its method, the fraction, the bits, and how many inputs."""
    fractions, bits = ((0.5, 0.9), (3,)) if quick else (FRACTIONS, BITS)
    yield "dense", lambda q, *_: q.model, 0.0, None, 0
    yield from ((*method, fraction, None, 0) for method, fraction in product(ALONE.items(), fractions))
    for n, method, fraction in product(counts[::-1], PRUNERS.items(), fractions):
        yield *method, fraction, None, n
    yield from ((*method, 0.0, width, counts[-1]) for method, width in product(ROUNDERS.items(), bits))
    yield from ((*method, fraction, JOINT, counts[-1]) for method, fraction in product(BOTH.items(), fractions))
    if data in OTHERS:
        # Of which inputs does it take?
        images = load(OTHERS[data], "test", made_up=quick)[0]
        wrong: dict[str, Method] = {
            f"ours, images of {OTHERS[data]}": lambda q, x, *how: ours(q, images[: len(x)].to(x.device), *how),
            "ours, uniform noise": lambda q, x, *how: ours(q, torch.rand_like(x), *how),
        }
        yield from ((*method, fraction, None, counts[-1]) for method, fraction in product(wrong.items(), fractions))


# --- rows -----------------------------------------------------------------------------------------------------------


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


def row_of(path: Path, about: Row, method: Method, device: str, *, quick: bool) -> Row | None:
    """One method on one network; None where it fails."""
    net, n = NETS[about["net"]], about["inputs"]
    data = data_of(net, device, made_up=quick)
    q, x = posterior_of(path, device, len(data.train[0])), some_inputs(net, data, max(n, 1), about["seed"])
    made: list[nn.Module] = []
    try:
        cost = measured(lambda: made.append(method(q, x, about["fraction"], about["bits"])), device)
    except Exception as error:
        print(f"{about} failed: {type(error).__name__}: {error}", flush=True)
        return None
    small, again = made[0], score(net, published.renormed(made[0], x), data) if n else None
    row = about | cost | {"score": score(net, small, data), "renormed": again, "bytes": size_of(small, about["bits"])}
    print(row, flush=True)
    return row


def means(rows: list[Row]) -> list[Row]:
    """One row for those of all seeds: mean score and standard error, the mean with norms again, mean bytes."""
    keys, grouped = ("net", "method", "fraction", "bits", "inputs"), dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        grouped.setdefault(tuple(row[key] for key in keys), []).append(row)
    found = []
    for about, some in grouped.items():
        mean, error = mean_and_error(row["score"] for row in some)
        again = fmean(row["score"] if row["renormed"] is None else row["renormed"] for row in some)
        scored = {"score": round(mean, 4), "error": round(error, 4) if len(some) > 1 else 0.0}
        scored |= {"norms again": round(again, 4), "bytes": round(fmean(row["bytes"] for row in some))}
        found.append(dict(zip(keys, about, strict=True)) | {"seeds": len(some)} | scored)
    return found


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
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="how many images, ascending")
    parser.add_argument("--report", action="store_true", help="the tables of what is there")
    options = parser.parse_args()
    nets, folder = options.nets or options.out / "nets", options.out / "smaller"
    if options.quick and not (nets / "lenet300-0.pt").is_file():
        trained("lenet300", 0, nets / "lenet300-0.pt", options.device, made_up=True)
    for path in sorted(nets.glob("*.pt")) if not options.report else ():
        name, _, seed = path.stem.rpartition("-")
        if any(fnmatchcase(path.stem, pattern) for pattern in options.only):
            counts = (SEQUENCES,) if NETS[name].smaller_is_better else tuple(options.counts)
            makes = {}
            for title, method, *how in jobs(NETS[name].data, (100,) if options.quick else counts, quick=options.quick):
                if title in (options.methods or (title,)):
                    about = dict(zip(("fraction", "bits", "inputs"), how, strict=True), method=title)
                    about |= {"net": name, "seed": int(seed)}
                    of = partial(row_of, path, about, method, options.device, quick=options.quick)
                    makes[f"{path.stem}, {title}, {', '.join(map(str, how))}"] = of
            cells(folder, makes, {"quick": options.quick})
    rows = means([json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))])
    print("\n\n".join(tables(rows)))
    lines = ",\n".join(json.dumps(row) for row in rows)
    replaced(options.out / "smaller.json", lambda path: path.write_text(f"[\n{lines}\n]\n", encoding="utf-8"))


if __name__ == "__main__":
    main()
