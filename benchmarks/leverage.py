"""Leverage: how its settings were chosen, how many inputs it needs, and what it has to do with variances.

    python benchmarks/leverage.py [PART ...] [--quick] [--groups ...] [--jobs 1] [--device cuda] [--out out/bench]

Without a PART all of them run. Images and texts are in $BAYESADAM_DATA.

- choose: development networks, three of a group, on seeds and left-out classes that no other benchmark has. Novelty
  is judged by the mean of the AUROC against the near set and that against far ones; temperatures by the NLL under 24
  shifts over that of plain temperature scaling, as long as the clean NLL grows by no more than 0.5 %. Each group is
  also scored by the setting chosen on the others. 500 familiar inputs give A, the medians and T₀.
- sizes: the library's own `calibrate` on 50 to 1,000 familiar inputs, drawn anew for each of 20 splits.
- regression: the NLL of tables by what of the variance σ² + Var f grows with leverage, on gap splits, whose test rows
  are the middle third of one input, on splits whose test rows are one of its ends, and on ordinary ones. One network
  of 50-50 ReLU units under AdamW a split, stopped by a fifth of the training rows; the same rows give A, the medians
  and, with the growth in place, σ². Forms are chosen on made-up tables and diabetes, and reported of three UCI tables
  out of $BAYESADAM_DATA/uci.
- relation: the exact variance of small linearised networks under a Kronecker-factored posterior, beside r.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

import bayesadam as ba
from bayesadam.calibration.fits import log_prior
from harness import arguments, number, parallel, setting, write_results
from leverage_cases import GROUPS, Case, case
from leverage_variances import MEANS, layers, left_out, leverage, regression, relation, relative, root

Key = tuple[str, ...]
Scored = dict[str, dict[str, float]]

SOURCES = ("inputs", "gradients", "second moments")
POOLING = ("pooled", "by position")
RIDGES = ("0.001", "0.01", "0.1")
EXPONENTS = ("1", "1.5", "2")
GROWTH: Mapping[str, Callable[[Tensor], Tensor]] = {
    "((1 + r)/2)^¼": lambda r: ((1 + r) / 2) ** 0.25,
    "((1 + r)/2)^½": lambda r: ((1 + r) / 2) ** 0.5,
    "(1 + r)/2": lambda r: (1 + r) / 2,
    "max(1, r)^½": lambda r: r.clamp(min=1) ** 0.5,
    "max(1, r)": lambda r: r.clamp(min=1),
    "r^½": lambda r: r**0.5,
}
SHARED = {"source": SOURCES, "positions": POOLING, "ε": RIDGES, "mean over layers": tuple(MEANS)}
AXES = {"novelty": {**SHARED, "exponent": EXPONENTS}, "growth": {**SHARED, "T(x)/T₀": tuple(GROWTH)}}
DEAREST = 1.005
HELD_OUT = 500
TEMPERATURES = torch.linspace(math.log(0.25), math.log(20), 300).exp()


def ours(what: str, source: str = "inputs") -> Key:
    """The library's setting."""
    if what == "growth":
        return source, "pooled", "0.01", "geometric", "((1 + r)/2)^½"
    return source, "pooled", "0.01", "power 4" if source == "second moments" else "mean", "1.5"


# --- choose: what a network's layers see -----------------------------------------------------------------------------


@torch.no_grad()
def spread(model: nn.Module, x: Tensor, batch: int = 250) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Outputs and every layer's input at each position, (n, positions, width); an embedding's is the mean over them."""
    found: dict[str, Tensor] = {}

    def see(layer: Any, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if layer.tokens:
            found[layer.module] = layer.pooled(module, args[0], len(args[0]), None)[:, None]
        elif isinstance(module, _ConvNd):
            found[layer.module] = args[0].flatten(2).mT
        else:
            found[layer.module] = args[0].reshape(len(args[0]), -1, layer.width)

    hooks = [model.get_submodule(each.module).register_forward_pre_hook(partial(see, each)) for each in layers(model)]
    try:
        for part in x.split(batch):
            yield model(part), dict(found)
    finally:
        for hook in hooks:
            hook.remove()


def curvatures(one: Case, x: Tensor, batches: int = 50, size: int = 64) -> dict[tuple[str, str], dict[str, Tensor]]:
    """A of every layer by source and pooling; an embedding's is the column sums of v̂ whatever the source."""
    diagonal, right = {}, {}
    rows = torch.randint(len(one.train[0]), (batches, size))
    for some in rows:
        one.model.zero_grad()
        F.cross_entropy(one.model(one.train[0][some]), one.train[1][some]).backward()
        for layer in layers(one.model):
            gradient = one.model.get_parameter(layer.weight).grad
            assert gradient is not None
            if not layer.tokens:
                each = gradient.flatten(2) if gradient.dim() > 2 else gradient[..., None]
                right[layer.module] = right.get(layer.module, 0) + torch.einsum("oik,ojk->ij", each, each)
    for layer in layers(one.model):
        v = one.optimizer.state[one.model.get_parameter(layer.weight)]["exp_avg_sq"]
        diagonal[layer.module] = layer.columns(v)
    sums: dict[str, dict[str, Tensor]] = {how: {} for how in POOLING}
    for _, seen in spread(one.model, x):
        for key, a in seen.items():
            for how, rows in (("pooled", a.mean(dim=1)), ("by position", a.flatten(0, 1))):
                sums[how][key] = sums[how].get(key, 0) + rows.mT @ rows / (
                    len(x) if how == "pooled" else len(x) * a.shape[1]
                )
    tokens = {layer.module for layer in layers(one.model) if layer.tokens}
    found = {}
    for how in POOLING:
        for source, by_name in zip(SOURCES, (sums[how], right, diagonal), strict=True):
            found[source, how] = {key: diagonal[key] if key in tokens else by_name[key] for key in diagonal}
    return found


def observed(one: Case, x: Tensor, factors: Mapping[Key, Mapping[str, Tensor]]) -> tuple[Tensor, dict[Key, Tensor]]:
    """Outputs, and h by setting, (n, layers)."""
    outputs, found = [], {key: [] for key in factors}  # type: ignore[var-annotated]
    for out, seen in spread(one.model, x):
        outputs.append(out)
        for key, by_name in factors.items():
            at = {name: a.mean(dim=1, keepdim=True) if key[1] == "pooled" else a for name, a in seen.items()}
            found[key].append(torch.stack([leverage(at[name], w).mean(dim=1) for name, w in by_name.items()], dim=1))
    return torch.cat(outputs), {key: torch.cat(parts) for key, parts in found.items()}


# --- choose: scores --------------------------------------------------------------------------------------------------


def temperature(logits: Tensor, y: Tensor) -> float:
    """T of the greatest likelihood and prior."""
    logs = (logits / TEMPERATURES.to(logits)[:, None, None]).log_softmax(dim=2)
    losses = -logs.gather(2, y.expand(len(logs), -1)[..., None]).mean(dim=(1, 2)).cpu()
    priors = torch.tensor([log_prior(t) for t in TEMPERATURES.tolist()])
    return float(TEMPERATURES[(losses - priors / len(y)).argmin()])


def nlls(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y.repeat(len(logits) // len(y)), reduction="none")


def judged(one: Case, quick: bool) -> dict[str, Scored]:
    """Every setting's scores on one network, novelty's and temperature's."""
    x, y = (part[:HELD_OUT] for part in one.familiar)
    _, seen = next(spread(one.model, x[:2]))
    ridges = RIDGES[1:2] if quick else RIDGES
    factors: dict[Key, dict[str, Tensor]] = {}
    for (source, how), by_name in curvatures(one, x).items():
        for ridge in ridges:
            factors[source, how, ridge] = {name: root(a, float(ridge)) for name, a in by_name.items()}
    outputs, reference = observed(one, x, factors)
    # Leaving an example out has a closed form where it is one row of A; an embedding's A is not of these inputs.
    alone = [not layer.tokens and seen[layer.module].shape[1] == 1 for layer in layers(one.model)]
    inputs = [not layer.tokens for layer in layers(one.model)]
    exact = {"pooled": torch.tensor(inputs, device=x.device), "by position": torch.tensor(alone, device=x.device)}
    sets = {"test": one.test[0], "near": one.near, **one.far, **{f"shift {k}": x for k, x in one.shifted.items()}}
    there = {name: observed(one, each, factors) for name, each in sets.items()}
    kinds, far, y_test = [f"shift {kind}" for kind in one.shifted], list(one.far), one.test[1]
    plain = temperature(outputs, y)
    usual = {name: float(nlls(there[name][0] / plain, y_test).mean()) for name in ("test", *kinds)}
    found: dict[str, Scored] = {
        "novelty": {"network alone": _aurocs({k: _entropy(v[0]) for k, v in there.items()}, far)}
    }
    found["growth"] = {}
    for key, familiar in reference.items():
        if key[0] == "inputs":
            familiar = torch.where(exact[key[1]], left_out(familiar, len(x)), familiar)
        familiar = familiar.clamp(min=1e-30).log()
        logs = {name: h.clamp(min=1e-30).log() for name, (_, by) in there.items() for h in (by[key],)}
        for mean, p in MEANS.items():
            usual_r = relative(familiar, familiar, p)
            r = {name: relative(familiar, log, p) for name, log in logs.items()}
            for exponent in EXPONENTS:
                hot = {
                    k: (1 + 10 * math.pi / 4 * r[k] ** float(exponent)).sqrt()[:, None] for k in ("test", "near", *far)
                }
                novelty = {k: _entropy(there[k][0] / t) for k, t in hot.items()}
                found["novelty"]["|".join((*key, mean, exponent))] = _aurocs(novelty, far)
            for form, growth in GROWTH.items():
                t = temperature(outputs / growth(usual_r)[:, None], y)
                now = {k: float(nlls(there[k][0] / (t * growth(r[k])[:, None]), y_test).mean()) for k in usual}
                ratios = {"clean": now["test"] / usual["test"]}
                ratios["shifted"] = sum(now[k] for k in kinds) / sum(usual[k] for k in kinds)
                ratios["worst"] = max(now[k] / usual[k] for k in kinds)
                found["growth"]["|".join((*key, mean, form))] = ratios
    return found


def _entropy(logits: Tensor) -> Tensor:
    logs = logits.double().log_softmax(dim=1)
    return -(logs.exp() * logs).sum(dim=1)


def _aurocs(novelty: Mapping[str, Tensor], far: Iterable[str]) -> dict[str, float]:
    near = ba.scores.auroc(novelty["test"], novelty["near"])
    away = statistics.fmean(ba.scores.auroc(novelty["test"], novelty[name]) for name in far)
    return {"near": near, "far": away, "both": (near + away) / 2}


def of_group(group: str, networks: int, quick: bool, device: str) -> dict[str, Scored]:
    """The mean scores of a group's networks."""
    torch.set_num_threads(1)
    each = [judged(case(group, i, quick=quick, device=device), quick) for i in range(networks)]
    return {
        what: {
            key: {score: statistics.fmean(one[what][key][score] for one in each) for score in values}
            for key, values in each[0][what].items()
        }
        for what in each[0]
    }


# --- choose: the choice ----------------------------------------------------------------------------------------------


def best(results: Mapping[str, Mapping[str, Scored]], what: str, groups: Sequence[str], source: str) -> str:
    """The setting of a source with the best mean over groups; of temperatures that are not too dear."""
    keys = [key for key in results[groups[0]][what] if key.startswith(f"{source}|")]

    def mean(key: str, score: str) -> float:
        return statistics.fmean(results[group][what][key][score] for group in groups)

    if what == "novelty":
        return max(keys, key=lambda key: mean(key, "both"))
    cheap = [key for key in keys if mean(key, "clean") <= DEAREST] or keys
    return min(cheap, key=lambda key: mean(key, "shifted"))


def replaced(key: Key, place: int, value: str) -> Key:
    return (*key[:place], value, *key[place + 1 :])


def choice(results: Mapping[str, Mapping[str, Scored]]) -> str:
    """Markdown: every axis by itself, the others as the library has them; then each group left out in turn."""
    groups = list(results)
    columns = ("AUROC near", "far", "NLL shifted", "clean", "worst kind")
    lines = [f"| mean of {len(groups)} groups | " + " | ".join(columns) + " |", "|---" * 6 + "|"]
    titles = {("novelty", "network alone"): "network alone"}
    for what, axes in AXES.items():
        titles[what, "|".join(ours(what))] = f"{what}: ours"
        for place, (axis, values) in enumerate(axes.items()):
            for value in values:
                key = "|".join(ours(what, value) if axis == "source" else replaced(ours(what), place, value))
                if key in results[groups[0]][what]:
                    titles.setdefault((what, key), f"{what}: {axis} {value}")
    for (what, key), title in titles.items():
        scores = ("near", "far") if what == "novelty" else ("shifted", "clean", "worst")
        cells = [f"{statistics.fmean(results[g][what][key][s] for g in groups):.3f}" for s in scores]
        cells = [*cells, "", "", ""] if what == "novelty" else ["", "", *cells]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    for source, what in product(SOURCES, AXES):
        score = "both" if what == "novelty" else "shifted"
        all_of_them = best(results, what, groups, source)
        lines += ["", f"{what}, {source}; the best for all: {all_of_them}", ""]
        lines += [
            "| left out | chosen on the others | its score here | best for all | ours | best here |",
            "|---" * 6 + "|",
        ]
        for group in groups:
            others = [each for each in groups if each != group] or groups
            chosen = best(results, what, others, source)
            keys = (chosen, all_of_them, "|".join(ours(what, source)), best(results, what, [group], source))
            cells = [f"{results[group][what][key][score]:.3f}" for key in keys]
            lines.append(f"| {group} | {chosen.partition('|')[2].replace('|', ', ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def choose(options: Any) -> dict[str, Any]:
    groups = options.groups or (GROUPS[:2] if options.quick else GROUPS)
    calls = [partial(of_group, group, 1 if options.quick else 3, options.quick, options.device) for group in groups]
    results = dict(zip(groups, parallel(calls, jobs=options.jobs), strict=True))
    told = choice(results)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "leverage-choose.md").write_text(told + "\n", encoding="utf-8")
    print(told, flush=True)
    return results


# --- sizes -----------------------------------------------------------------------------------------------------------

SIZES = (50, 100, 300, 1000)
LEVELS = (0.01, 0.05, 0.2)


def with_few(group: str, networks: int, quick: bool, device: str) -> dict[str, dict[str, list[float]]]:
    """Scores by the number of familiar inputs, split by split."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    for i in range(networks):
        one = case(group, i, quick=quick, device=device)
        n = len(one.train[0])
        whole = ba.Posterior.from_optimizer(one.model, one.optimizer, n, batch_size=128, likelihood="classification")
        (x, y), y_test, new = one.familiar, one.test[1], torch.cat([one.near, *one.far.values()])
        shifted, far = torch.cat(list(one.shifted.values())), list(one.far.values())
        for size, seed in product(SIZES[:1] if quick else SIZES, range(2 if quick else 20)):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
            some, rest = order[:size], order[size : size + 1500]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ba.errors.HeldOutWarning)
                posterior = ba.calibrate(whole, (x[some], y[some]))
            fresh, away, worse = (posterior.predict(each) for each in (x[rest], new, shifted))
            with torch.no_grad():
                plain = temperature(one.model(x[some]), y[some])
                logits = one.model(x[rest]), one.model(shifted)
            novelty = away.novelty.split([len(one.near), *map(len, far)])
            aurocs = [ba.scores.auroc(fresh.novelty, each) for each in novelty]
            row = {f"false alarms at {a:g}": float((fresh.novelty_pvalue <= a).double().mean()) for a in LEVELS}
            row |= {"AUROC near": aurocs[0], "AUROC far": statistics.fmean(aurocs[1:])}
            row["NLL shifted"] = _ratio(worse.probs, logits[1] / plain, y_test.repeat(len(shifted) // len(y_test)))
            row["NLL clean"] = _ratio(fresh.probs, logits[0] / plain, y[rest])
            for key, value in row.items():
                found.setdefault(str(size), {}).setdefault(key, []).append(value)
    return found


def _ratio(probs: Tensor, logits: Tensor, y: Tensor) -> float:
    """Our NLL over that of plain logits."""
    ours = -probs.double().gather(1, y[:, None]).clamp(min=1e-300).log().mean()
    return float(ours / F.cross_entropy(logits.double(), y))


def sizes(options: Any) -> dict[str, Any]:
    groups = options.groups or [group for group in GROUPS if group.endswith(("-mlp", "-lenet"))]
    groups = groups[:1] if options.quick else groups
    calls = [partial(with_few, group, 1 if options.quick else 2, options.quick, options.device) for group in groups]
    results = dict(zip(groups, parallel(calls, jobs=options.jobs), strict=True))
    scores = list(results[groups[0]][str(SIZES[0])])
    lines = ["| familiar inputs | " + " | ".join(scores) + " |", "|---" * (len(scores) + 1) + "|"]
    for size in results[groups[0]]:
        cells = [number([v for group in groups for v in results[group][size][score]], 4) for score in scores]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    told = "\n".join(lines)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "leverage-sizes.md").write_text(told + "\n", encoding="utf-8")
    print(told, flush=True)
    return results


PARTS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "choose": choose,
    "sizes": sizes,
    "regression": regression,
    "relation": relation,
}


def main() -> None:
    parser = arguments(__doc__, quick="one split, one network, made-up images", device=True, jobs=1)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    options = parser.parse_args()
    parts = options.parts or list(PARTS)
    results = {part: PARTS[part](options) for part in parts}
    write_results(options.out, "-".join(["leverage", *options.parts]), {**setting(), "results": results})
    print(f"{len(results)} parts")


if __name__ == "__main__":
    main()
