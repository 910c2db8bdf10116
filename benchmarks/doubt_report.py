"""Tables of `doubt.py`, of the cells found: means and standard errors over choices and seeds, and verdicts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from doubt_data import NEAR
from doubt_rows import ROWS
from harness import Cell, mean_and_error, number

Found = dict[str, Any]
# The scores of each row, one a network, the baseline of the same network's temperature with each.
Rows = dict[str, list[Found]]
BASELINE, JOINT, COSTS = "temperature", "all", "costs"
SCORES = ("accuracy", "nll", "ece")


def read_cells(where: Path) -> list[Cell]:
    """All that are finished."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(where.glob("*.json"))]


def grouped(cells: Iterable[Cell]) -> dict[str, Rows]:
    """By data set and network, in the order of their names."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(f"{cell['data']}, {cell['network']}", []).append(cell)
    return {title: _rows(found) for title, found in groups.items()}


def _rows(cells: Sequence[Cell]) -> Rows:
    """A joint cell's baseline is the mean of the temperatures of its choice; costs timed alone replace the others."""
    found: Rows = {}
    costs = [cell["rows"] for cell in cells if cell["seed"] == COSTS]
    for cell in (each for each in cells if each["seed"] != COSTS):
        same = [c for c in cells if c["choice"] == cell["choice"] and c["seed"] in (cell["seed"], *cell["seeds"])]
        bases = [c["rows"][BASELINE] for c in same if "nll" in c["rows"].get(BASELINE, {})]
        base = {key: statistics.fmean(of(row) for row in bases) for key, of in RATIOS.items() if _all(of, bases)}
        for name, row in cell["rows"].items():
            own = [row["cost"]] if "cost" in row else []
            better = [rows[name]["cost"] for rows in costs if "cost" in rows.get(name, {})]
            more = {"base": base, "costs": better or own, "joint": cell["seed"] == JOINT}
            found.setdefault(name, []).append({**row, **more})
    return {name: found[name] for name in dict.fromkeys([*ROWS, *found]) if name in found}


def _all(of: Callable[[Found], float | None], rows: Sequence[Found]) -> bool:
    return bool(rows) and all(of(row) is not None for row in rows)


# --- figures of one row ---------------------------------------------------------------------------------------------


def done(rows: Iterable[Found]) -> list[Found]:
    """Without those that were skipped."""
    return [row for row in rows if "skipped" not in row]


def shifted(row: Found, key: str, kind: str | None = None) -> float | None:
    """The mean over strengths, of one kind of shift or of all; None of a row without probabilities."""
    kinds = row.get("shifted", {})
    values = [found[key] for name, each in kinds.items() if kind in (None, name) for found in each]
    return statistics.fmean(values) if values else None


def of_sets(row: Found, key: str, *, near: bool | None = None) -> float | None:
    """The mean over the near sets, the far ones, or all."""
    values = [value for name, value in row[key].items() if near in (None, name == NEAR)]
    return statistics.fmean(values) if values else None


RATIOS: Mapping[str, Callable[[Found], Any]] = {"nll": lambda r: r.get("nll"), "shifted": lambda r: shifted(r, "nll")}


def ratio(row: Found, key: str) -> float | None:
    """NLL over that of the temperature."""
    value = RATIOS[key](row)
    return value / row["base"][key] if value is not None and key in row["base"] else None


COLUMNS: Mapping[str, Callable[[Found], Any]] = {
    "accuracy": lambda r: r.get("accuracy"),
    "NLL": lambda r: r.get("nll"),
    "÷ temperature's": lambda r: ratio(r, "nll"),
    "ECE": lambda r: r.get("ece"),
    "shifted: accuracy": lambda r: shifted(r, "accuracy"),
    "shifted: NLL": lambda r: shifted(r, "nll"),
    "shifted: ÷ temperature's": lambda r: ratio(r, "shifted"),
    "shifted: ECE": lambda r: shifted(r, "ece"),
    "near AUROC": lambda r: of_sets(r, "auroc", near=True),
    "far AUROC": lambda r: of_sets(r, "auroc", near=False),
    "AUROC of all sets": lambda r: of_sets(r, "auroc"),
    "FPR95 of all sets": lambda r: of_sets(r, "fpr95"),
}


def values(rows: Sequence[Found], of: Callable[[Found], Any]) -> list[float]:
    """Of the rows that have it."""
    return [value for row in done(rows) if (value := of(row)) is not None]


# --- tables ---------------------------------------------------------------------------------------------------------


def table(title: str, rows: Rows, columns: Mapping[str, Callable[[Found], Any]], *, cost: bool = False) -> str:
    """A line a row; one that has none of the columns is left out, one that was skipped says why."""
    heads = [*columns, *(("cost at batch 1", "cost at batch 64", "keeps") if cost else ())]
    lines = [f"| {title} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, found in rows.items():
        if not done(found):
            if cost:
                reason = found[0]["skipped"].splitlines()[0][:60].replace("|", "/")
                lines.append(f"| {name} | skipped: {reason} |{' – |' * (len(heads) - 1)}")
            continue
        cells = [number(values(found, of)) for of in columns.values()]
        if not cost and set(cells) == {"–"}:
            continue
        if cost:
            for size in ("1", "64"):
                costs = [each[size] for row in done(found) for each in row["costs"]]
                cells.append(f"{statistics.median(costs):.1f}" if costs else "–")
            cells.append(found[0]["keeps"])
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(title: str, rows: Rows) -> str:
    """Everything, then the shifts kind by kind, then the sets one by one."""
    some = [row for found in rows.values() for row in done(found)]
    kinds = list(dict.fromkeys(kind for row in some for kind in row.get("shifted", {})))
    sets = list(dict.fromkeys(name for row in some for name in row["auroc"]))
    parts = [table(title, rows, COLUMNS, cost=True)]
    if kinds:
        by_kind = {kind: (lambda row, kind=kind: shifted(row, "nll", kind)) for kind in kinds}
        parts.append(table(f"{title}: NLL by kind of shift", rows, by_kind))
    by_set = {name: (lambda row, name=name: row["auroc"].get(name)) for name in sets}
    return "\n\n".join([*parts, table(f"{title}: AUROC", rows, by_set)])


# --- the same as a structure ----------------------------------------------------------------------------------------


def summary(rows: Rows) -> dict[str, Found]:
    """Of each row its columns, shifts and sets as [mean, standard error] over networks, and how many those are; a row
    that was skipped says why.
    """
    return {
        name: _summed(done(found)) if done(found) else {"skipped": found[0]["skipped"]} for name, found in rows.items()
    }


def _summed(found: Sequence[Found]) -> Found:
    kinds = {kind: lambda row, kind=kind: shifted(row, "nll", kind) for kind in found[0]["shifted"]}
    of_sets = {
        key: {of: lambda row, key=key, of=of: row[key][of] for of in found[0][key]} for key in ("auroc", "fpr95")
    }
    parts = {
        key: {name: _rounded(values(found, of)) for name, of in part.items()}
        for key, part in {"shifted: NLL by kind": kinds, **of_sets}.items()
    }
    columns = {name: _rounded(listed) for name, of in COLUMNS.items() if (listed := values(found, of))}
    costs = {size: [each[size] for row in found for each in row["costs"]] for size in ("1", "64")}
    return {
        "networks": len(found),
        "keeps": found[0]["keeps"],
        "cost": {size: round(statistics.median(each), 3) for size, each in costs.items() if each},
        **columns,
        **{key: part for key, part in parts.items() if part},
    }


def _rounded(listed: Sequence[float]) -> list[float | None]:
    mean, error = mean_and_error(listed)
    return [round(mean, 6), round(error, 6) if error == error else None]


# --- verdicts -------------------------------------------------------------------------------------------------------


def verdicts(title: str, rows: Rows) -> list[str]:
    """Our figures beside the best rival's, of one network and of several."""
    lines = []
    for joint, who in ((False, "one network"), (True, "several networks")):
        here = {name: done(found) for name, found in rows.items() if done(found) and found[0]["joint"] == joint}
        for column in ("shifted: NLL", "near AUROC", "far AUROC", "AUROC of all sets"):
            listed = {name: values(found, COLUMNS[column]) for name, found in here.items()}
            means = {name: mean_and_error(each) for name, each in listed.items() if each}
            mine, others = ({n: m for n, m in means.items() if n.startswith("ours") == own} for own in (True, False))
            if mine and others:
                pick = min if "NLL" in column else max
                rival = pick(others, key=lambda name, of=others: of[name][0])
                told = "; ".join(f"{_figure(found)} of {name}" for name, found in mine.items())
                lines.append(f"{title}, {who}, {column}: {told}; best rival {_figure(others[rival])} of {rival}")
    for name, found in rows.items():
        flagged = [row["flagged"] for row in done(found) if row.get("flagged")]
        if flagged:
            inside = statistics.fmean(each["test"] for each in flagged)
            outside = [statistics.fmean(v for k, v in each.items() if k != "test") for each in flagged]
            share = f"{100 * inside:.1f} % of test inputs, {100 * statistics.fmean(outside):.0f} % of the others"
            lines.append(f"{title}, {name}, p ≤ 0.05 flags {share}")
    return lines


def _figure(found: tuple[float, float]) -> str:
    return f"{found[0]:.3f}" + (f" ± {found[1]:.3f}" if found[1] == found[1] else "")
