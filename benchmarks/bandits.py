"""Our bandit agents beside other packages': reward over the optimum's, regret over Uniform's, decisions per second.

    python benchmarks/bandits.py [--quick] [--alone] [--problems ...] [--agents ...] [--rivals ...] [--rounds 2000]
        [--runs 30] [--seed 1000] [--device cuda] [--out out/bench]

Stopped, it resumes: each problem and player is a file in out/bench/bandits, so that several processes may take some
problems or rivals each, and one that asks for all of them then prints the tables. A rival that is not installed is
left out, with the reason.

All meet the same contexts and rewards, run by run, on one core; paces are of CPU time, which other processes on the
machine hardly change. Ours plays with one setting for all problems: `simulate`, all runs at once, and for the pace
"one by one" an agent of `make_agent` on the first 600 rounds.

A rival plays its default and, of a few settings, the one that is best on this problem: each plays two runs, the best
of them play all runs, and the one with the highest mean stands in the table. It is picked after the fact, which
favours it. Vowpal Wabbit has 120 settings, every exploration, learning rate and cost, with and without the products
of two features; for the others, and what they are given, see `bandit_rivals.py`. A rival's contexts are in its own
format before the clock starts; "one by one" has that inside the loop, as a service would.

The scikit-learn sets are classification problems whose rows are drawn with replacement. A rival that is too slow for
all rounds or runs plays the first of them, and the table says so; the column "in the first 500" compares all.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bayesadam.bandits.problems import Numbers

from bandit_rivals import RIVALS, Diverged, Entrant, Setting
from bayesadam.bandits import (
    AGENTS,
    BanditProblem,
    Rounds,
    agent_settings,
    classification_problem,
    make_agent,
    problem,
    simulate,
)
from bayesadam.weights.draws import stream_seed
from harness import against, arguments, number, one_core, read_cell, replaced, setting, write_cell, write_results

SHOWDOWN = ("mushroom", "statlog", "covertype", "adult", "jester", "financial")
SCIKIT_LEARN = ("digits", "breast_cancer", "wine")
OURS = ("hybrid", "linear", "neural-linear", "badam")
CPU_ROUNDS, LIVE_ROUNDS, EARLY = 2000, 600, 500
SCREENED_RUNS = 2
Found = dict[str, Any]


# --- problems -------------------------------------------------------------------------------------------------------


def drawn_rounds(table: Rounds, seed: int, rounds: int) -> Rounds:
    """Rows of a table, drawn with replacement."""
    random = np.random.Generator(np.random.SFC64(stream_seed(seed, "rows")))
    rows = random.integers(len(table.contexts), size=rounds)
    return Rounds(table.contexts[rows], table.rewards[rows], table.expected[rows])


def scikit_learn_problem(name: str) -> BanditProblem:
    """One of scikit-learn's own sets, its features standardised, with as many rounds as are asked for."""
    X, y = getattr(importlib.import_module("sklearn.datasets"), f"load_{name}")(return_X_y=True)
    once = classification_problem(X, y, name=name)
    return replace(once, rounds=CPU_ROUNDS, most_rounds=None, make=partial(drawn_rounds, once.run(0)))


def first(rounds: Rounds, most: int | None) -> Rounds:
    """The first rounds of a run."""
    return Rounds(rounds.contexts[:most], rounds.rewards[:most], rounds.expected[:most])


# --- scores ---------------------------------------------------------------------------------------------------------


def scores(played: Sequence[Rounds], rewards: Sequence[float], rounds: int) -> Found:
    """Of total rewards after so many rounds, run by run: over the optimum's, and the regret over Uniform's."""
    optimum = np.array([one.optimum[:rounds].sum() for one in played])
    uniform = np.array([one.uniform[:rounds].sum() for one in played])
    reward = np.asarray(rewards, np.float64)
    return {
        "rounds": rounds,
        "reward_ratio": (reward / optimum).tolist(),
        "regret_ratio": ((optimum - reward) / (optimum - uniform)).tolist(),
    }


@dataclass(frozen=True, eq=False)
class Game:
    """What a rival chose and was paid, round by round, and its decisions per second."""

    arms: Numbers
    rewards: Numbers
    per_second: float


# --- rivals ---------------------------------------------------------------------------------------------------------


def play(chosen: BanditProblem, rounds: Rounds, played: Setting, seed: int, *, inside: bool = False) -> Game:
    """One run of a rival; its contexts are put into its format before the clock starts, or inside the loop."""
    rival = played.make(chosen, len(rounds.contexts), seed)
    pays = rounds.rewards.tolist()
    ready = None if inside else [rival.prepare(context) for context in rounds.contexts]
    arms = np.zeros(len(pays), np.int64)
    began = time.process_time()
    for count, context in enumerate(rounds.contexts):
        shown = rival.prepare(context) if ready is None else ready[count]
        arms[count] = arm = rival.act(shown)
        rival.learn(shown, arm, pays[count][arm])
    per_second = len(pays) / (time.process_time() - began)
    return Game(arms, rounds.rewards[np.arange(len(arms)), arms].astype(np.float64), per_second)


class Season:
    """A rival's games on one problem; one that was played is not played again."""

    def __init__(self, chosen: BanditProblem, played: Sequence[Rounds], seeds: Sequence[int]) -> None:
        self.chosen, self.played, self.seeds = chosen, played, seeds
        self._games: dict[tuple[str, int], Game | None] = {}

    def game(self, tried: Setting, run: int) -> Game | None:
        """One run with a setting; None where it diverged."""
        key = tried.name, run
        if key not in self._games:
            try:
                self._games[key] = play(self.chosen, self.played[run], tried, self.seeds[run])
            except Diverged:
                self._games[key] = None
        return self._games[key]

    def mean(self, tried: Setting, runs: int) -> float:
        """The mean of reward over the optimum's in the first runs; −∞ where one diverged."""
        games = [self.game(tried, run) for run in range(runs)]
        rewards = [game.rewards.sum() for game in games if game is not None]
        if len(rewards) < runs:
            return -float("inf")
        return statistics.fmean(scores(self.played[:runs], rewards, len(self.played[0].contexts))["reward_ratio"])

    def result(self, tried: Setting) -> Found:
        """All runs with a setting."""
        games = [game for run in range(len(self.played)) if (game := self.game(tried, run)) is not None]
        if len(games) < len(self.played):
            return {"setting": tried.name, "skipped": f"diverged in {len(self.played) - len(games)} runs"}
        rounds = len(self.played[0].contexts)
        early = min(EARLY, rounds)
        live = play(self.chosen, first(self.played[0], LIVE_ROUNDS), tried, self.seeds[0], inside=True)
        return {
            "setting": tried.name,
            **scores(self.played, [game.rewards.sum() for game in games], rounds),
            "early": scores(self.played, [game.rewards[:early].sum() for game in games], early),
            "per_second": statistics.median(game.per_second for game in games),
            "per_second_live": live.per_second,
        }


def rival_result(
    chosen: BanditProblem, played: Sequence[Rounds], seeds: Sequence[int], entrant: Entrant, quick: bool
) -> Found:
    """Its default and the best of its settings."""
    played = [first(one, entrant.most_rounds) for one in played[: entrant.most_runs]]
    season = Season(chosen, played, seeds)
    tried = entrant.settings[:2] if quick else entrant.settings
    screened = {one.name: season.mean(one, SCREENED_RUNS) for one in tried}
    finalists = sorted(tried, key=lambda one: -screened[one.name])[: entrant.finalists]
    best = max((*finalists, tried[0]), key=lambda one: season.mean(one, len(played)))
    finite = {name: mean if np.isfinite(mean) else None for name, mean in screened.items()}
    rows = {"best": season.result(best), "default": season.result(tried[0])}
    return {"rows": rows, "screened": finite, "version": importlib.metadata.version(entrant.package)}


# --- ours -----------------------------------------------------------------------------------------------------------


def our_result(chosen: BanditProblem, played: Sequence[Rounds], seed: int, agent: str, device: str) -> Found:
    """An agent's runs, all at once, and its pace when it is shown one context at a time."""
    rounds, runs = len(played[0].contexts), len(played)
    began = time.process_time()
    found = simulate(chosen, agent, runs=runs, rounds=rounds, seed=seed, device=device, settings="tuned")
    seconds = time.process_time() - began if device == "cpu" else found.seconds
    optimum = found.reward[:, -1] + found.regret[:, -1]
    assert np.allclose(optimum, [one.optimum.sum() for one in played]), "the two sides met other rounds"
    # The curve has 500 points at most.
    point = int(np.searchsorted(found.points, EARLY, side="right")) - 1
    row = {
        "setting": "tuned",
        **scores(played, found.reward[:, -1], rounds),
        "early": scores(played, found.reward[:, point], int(found.points[point])),
        "per_second": runs * rounds / seconds,
        "per_second_live": live_pace(chosen, first(played[0], LIVE_ROUNDS), agent),
    }
    return {"rows": {"": row}}


def live_pace(chosen: BanditProblem, rounds: Rounds, agent: str) -> float:
    """Decisions per second of an agent that is shown one context at a time."""
    player = make_agent(agent, chosen.n_features, chosen.n_arms)
    pays = rounds.rewards.tolist()
    began = time.process_time()
    for context, paid in zip(rounds.contexts, pays, strict=True):
        arm = player.act(context)
        player.update(context, arm, paid[arm])
    return len(pays) / (time.process_time() - began)


# --- what is printed ------------------------------------------------------------------------------------------------


def percent(found: Mapping[str, Any]) -> str:
    return number([100 * ratio for ratio in found["regret_ratio"]], 1)


def pace(found: float) -> str:
    return f"{found:,.0f}" if found >= 10 else f"{found:.1f}"


def problem_table(name: str, rounds: int, rows: Mapping[str, Found]) -> str:
    """One problem in Markdown."""
    heads = ["reward / optimum", "worst run", "regret, % of Uniform's", f"in the first {min(EARLY, rounds)}"]
    heads += ["decisions / s", "one by one", "setting"]
    runs = max(len(row.get("reward_ratio", ())) for row in rows.values())
    lines = [f"| {name}, {rounds:,d} rounds | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for who, row in rows.items():
        if "skipped" in row:
            cells = [f"skipped: {row['skipped']}", *["–"] * 5]
        else:
            fewer = f" ({row['rounds']} rounds)" if row["rounds"] < rounds else ""
            fewer += f" ({len(row['reward_ratio'])} runs)" if len(row["reward_ratio"]) < runs else ""
            cells = [number(row["reward_ratio"]) + fewer, f"{min(row['reward_ratio']):.3f}{fewer}"]
            cells += [percent(row) + fewer, percent(row["early"]), pace(row["per_second"])]
            cells += [pace(row["per_second_live"])]
        lines.append(f"| {who} | {' | '.join(cells)} | {row.get('setting', '–')} |")
    return "\n".join(lines)


def summary_table(title: str, tables: Mapping[str, Mapping[str, Found]], *, early: bool) -> str:
    """All problems in Markdown: the regret in % of Uniform's, after all rounds or the first."""
    names = list(dict.fromkeys(who for rows in tables.values() for who in rows))
    lines = [f"| {title} | {' | '.join(tables)} |", "|---" * (len(tables) + 1) + "|"]
    for who in names:
        cells = []
        for rows in tables.values():
            row = rows.get(who)
            most = max(one.get("rounds", 0) for one in rows.values())
            shown = row is not None and "skipped" not in row and (early or row["rounds"] == most)
            cells.append(percent(row["early"] if early else row) if row is not None and shown else "–")
        if any(cell != "–" for cell in cells):
            lines.append(f"| {who} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(name: str, rows: Mapping[str, Found], ours: str) -> str | None:
    """One of our agents against the rival of the highest mean, run by run; None where there is none."""
    done = {who: row for who, row in rows.items() if "skipped" not in row}
    if ours not in done:
        return None
    others = [who for who in done if who not in AGENTS and done[who]["rounds"] == done[ours]["rounds"]]
    if not others:
        return None
    best = max(others, key=lambda who: statistics.fmean(done[who]["reward_ratio"]))
    mine, theirs = done[ours], done[best]
    both = min(len(row["reward_ratio"]) for row in (mine, theirs))
    word, gap, error = against(mine["reward_ratio"][:both], theirs["reward_ratio"][:both], larger_is_better=True)
    ratio = mine["per_second_live"] / theirs["per_second_live"]
    told = f"{name}: {ours} {word} {best} ({gap:+.3f} ± {error:.3f})"
    return f"{told}; decisions per second one by one, ours / its: {ratio:.2g}"


# --- the command ----------------------------------------------------------------------------------------------------


def installed(names: Sequence[str], *, alone: bool) -> dict[str, Entrant]:
    """The rivals that can be imported; an error where none can, unless ours is measured alone."""
    if alone:
        print("rivals are left out (--alone): ours has nothing beside it")
        return {}
    found = {}
    for name in names:
        try:
            RIVALS[name].load()
            found[name] = RIVALS[name]
        except ImportError as error:
            print(f"{name} is left out: {RIVALS[name].package} cannot be imported ({error}); `make peers` installs it")
    if not found:
        sys.exit("no rival can be imported: there is nothing to compare with. --alone measures ours without them")
    return found


def cell(path: Path, about: Found, measure: partial[Found]) -> Found:
    """A cell of the tables, measured where it is not there yet; of a rival that fails, the reason."""
    found = read_cell(path, about)
    if found is None:
        began = time.perf_counter()
        try:
            found = measure()
        except Exception as error:
            if about["player"] in AGENTS:
                raise
            found = {"rows": {"best": {"skipped": f"{type(error).__name__}: {error}".splitlines()[0][:200]}}}
        found = {"settings": about, **found, "seconds": time.perf_counter() - began}
        write_cell(path, found)
        print(f"{about['problem']}, {about['player']}: {found['seconds']:.0f} s", flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__, quick="two runs of 100 rounds on wine, two settings of each rival", peer="rivals")
    every = (*SHOWDOWN, *SCIKIT_LEARN)
    parser.add_argument("--problems", nargs="+", choices=every, metavar="PROBLEM", help=", ".join(every))
    parser.add_argument(
        "--agents",
        nargs="*",
        choices=AGENTS,
        metavar="AGENT",
        help=f"{', '.join(AGENTS)}; without this {', '.join(OURS)}, and all on the scikit-learn sets",
    )
    parser.add_argument(
        "--rivals", nargs="+", choices=RIVALS, default=list(RIVALS), metavar="RIVAL", help=", ".join(RIVALS)
    )
    parser.add_argument(
        "--rounds", type=int, help="of a run; 0 for as many as the problem says; 2000 on a CPU, otherwise 0"
    )
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1000, help="the runs' seeds come from it")
    parser.add_argument("--device", default="cpu", help="of `simulate`")
    options = parser.parse_args()
    asked = options.rounds if options.rounds is not None else CPU_ROUNDS if options.device == "cpu" else 0
    names, runs, agents = options.problems or every, options.runs, options.agents
    if options.quick:
        asked, runs, names, agents = 100, 2, options.problems or ["wine"], OURS if agents is None else agents
    if runs < SCREENED_RUNS:
        parser.error(f"--runs must be at least {SCREENED_RUNS}, for there to be a standard error")
    rivals = installed(options.rivals, alone=options.alone)
    one_core()
    # With its first optimiser torch brings in modules for more than a second.
    torch.optim.Adam([torch.zeros(1)])
    seeds = [stream_seed(options.seed, "run", run) for run in range(runs)]
    tables: dict[str, dict[str, Found]] = {}
    cells, told, verdicts = [], [], []
    for name in names:
        chosen = scikit_learn_problem(name) if name in SCIKIT_LEARN else problem(name)
        played = [chosen.run(seed, asked or None) for seed in seeds]
        mine = agents if agents is not None else AGENTS if name in SCIKIT_LEARN else OURS
        measures = {agent: partial(our_result, chosen, played, options.seed, agent, options.device) for agent in mine}
        for who, entrant in rivals.items():
            measures[who] = partial(rival_result, chosen, played, seeds, entrant, options.quick)
        rows: dict[str, Found] = {}
        rounds = len(played[0].contexts)
        for who, measure in measures.items():
            about = {"problem": name, "player": who, "rounds": rounds, "runs": runs, "seed": options.seed}
            if who in mine:
                about |= {"agent": agent_settings(who).plain(), "device": options.device}
            path = options.out / "bandits" / f"{name}-{who.lower().replace(' ', '-')}.json"
            found = cell(path, about, measure)
            cells.append(found)
            rows |= {f"{who}, {key}" if key else who: row for key, row in found["rows"].items()}
        tables[name] = rows
        told.append(problem_table(name, rounds, rows))
        print(f"\n{told[-1]}\n", flush=True)
        verdicts += [line for line in [verdict(name, rows, agent) for agent in mine[:1]] if line]
    told += [
        summary_table("regret, % of Uniform's", tables, early=False),
        summary_table(f"in the first {EARLY} rounds", tables, early=True),
        f"Mean ± standard error of {runs} runs, seed {options.seed}, one core. "
        "A rival's best is picked after the fact, in its favour.",
    ]
    print("\n\n".join(told[-3:]))
    text = "\n\n".join([*told, *verdicts]) + "\n"
    replaced(options.out / "bandits.md", lambda path: path.write_text(text, encoding="utf-8"))
    write_results(options.out, "bandits", {**setting(), "device": options.device, "cells": cells})
    print(f"Tables: {options.out / 'bandits.md'}")
    print("\n".join(verdicts) or f"{len(tables)} problems without one of ours beside a rival")


if __name__ == "__main__":
    main()
