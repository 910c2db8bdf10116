"""Priors that the hybrid agent learns from earlier problems: regret on a new one of the family, with and without.

    BAYESADAM_DATA=... python benchmarks/bandit_priors.py [--quick] [--families wheel turned-wheel statlog covertype]
        [--earlier 60] [--steps 30000] [--hidden 200 200 200] [--runs 30] [--rounds N] [--seed 1000] [--device cuda]
        [--out out/bench]

Families: the wheel, whose earlier δ are uniform in (0, 1) and whose new one is 0.99; the same with every wheel turned
by an angle of its own; and classification problems whose arms are permuted, the earlier ones on one half of the table's
rows, the new one on the other. A prior of the first two has arms that mean the same, of the others exchangeable ones.
The agent knows the range of the wheel's rewards in both rows. The earlier problems depend on a seed that no run has.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bayesadam.bandits import BanditProblem, Rounds, agent_settings, fit_prior, problem, reward_problem, simulate, wheel
from bayesadam.bandits.prior import Arms
from harness import against, arguments, at_most, number, setting, write_results

NEW_DELTA, GOAL = 0.99, 9.8
EARLIER_SEED, EARLIER_ROUNDS = 600, 3000


@dataclass(frozen=True, eq=False)
class Family:
    """Earlier problems, a new one, what its arms are, and what rewards can be where the agent is told."""

    earlier: list[BanditProblem]
    new: BanditProblem
    arms: Arms
    reward_range: tuple[float, float] | None


def turned_rounds(base: BanditProblem, angle: float, seed: int, rounds: int) -> Rounds:
    """A problem of the plane, its contexts turned."""
    played = base.make(seed, rounds)
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]], np.float32)
    return Rounds(played.contexts @ turn, played.rewards, played.expected)


def turned(base: BanditProblem, angle: float) -> BanditProblem:
    make = partial(turned_rounds, base, angle)
    return BanditProblem(f"{base.name} turned", base.n_features, base.n_arms, base.rounds, None, make)


def wheels(earlier: int, *, turn: bool) -> Family:
    random = np.random.default_rng(EARLIER_SEED)
    deltas, angles = random.uniform(0.01, 0.99, earlier), random.uniform(0, 2 * math.pi, earlier + 1) * turn
    old = [turned(wheel(float(delta)), float(angle)) for delta, angle in zip(deltas, angles[:-1], strict=True)]
    return Family(old, turned(wheel(NEW_DELTA), float(angles[-1])), "same", (0.0, 50.0))


def permuted(name: str, earlier: int) -> Family:
    random = np.random.default_rng(EARLIER_SEED)
    rows = problem(name).run(EARLIER_SEED)
    half = len(rows.contexts) // 2

    def version(part: slice) -> BanditProblem:
        order = random.permutation(rows.rewards.shape[1])
        pays = rows.rewards[part][:, order]
        return reward_problem(rows.contexts[part], pays, name=f"{name} permuted", standardise=False)

    return Family([version(slice(half)) for _ in range(earlier)], version(slice(half, None)), "exchangeable", None)


FAMILIES = {
    "wheel": partial(wheels, turn=False),
    "turned-wheel": partial(wheels, turn=True),
    "statlog": partial(permuted, "statlog"),
    "covertype": partial(permuted, "covertype"),
}


def measured(family: Family, options: Any, rounds: int | None) -> dict[str, Any]:
    """Both agents' runs, and the seconds of the fit."""
    began = time.perf_counter()
    prior = fit_prior(
        family.earlier,
        arms=family.arms,
        hidden=tuple(options.hidden),
        rounds=EARLIER_ROUNDS,
        steps=options.steps,
        seed=EARLIER_SEED,
        device=options.device,
    )
    found: dict[str, Any] = {"fit_seconds": time.perf_counter() - began}
    chosen = agent_settings("hybrid", reward_range=family.reward_range)
    most = family.new.most_rounds
    asked = rounds if rounds is None or most is None else min(rounds, most)
    for row, given in (("hybrid", None), ("hybrid with a prior", prior)):
        played = simulate(
            family.new,
            "hybrid",
            runs=options.runs,
            rounds=asked,
            seed=options.seed,
            device=options.device,
            settings=chosen,
            prior=given,
        )
        tenth = len(played.points) // 10
        uniform = played.regret[:, -1] / played.regret_ratio * played.points[tenth] / played.rounds
        found[row] = {
            "rounds": played.rounds,
            "regret": (100 * played.regret_ratio).tolist(),
            "first_tenth": (100 * played.regret[:, tenth] / uniform).tolist(),
        }
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """Regret in % of Uniform's."""
    lines = ["| | regret, % of Uniform's | worst run | in the first tenth |", "|---|---|---|---|"]
    for name, found in results.items():
        for row in ("hybrid", "hybrid with a prior"):
            cells = [number(found[row]["regret"], 1), f"{max(found[row]['regret']):.1f}"]
            lines.append(f"| {name}, {row} | {' | '.join([*cells, number(found[row]['first_tenth'], 1)])} |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="two runs of 100 rounds on the wheel, three earlier ones", device=True)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--earlier", type=int, default=60, help="problems that the prior is learnt from")
    parser.add_argument("--steps", type=int, default=30_000, help="mini-batches of its training")
    parser.add_argument("--hidden", type=int, nargs="+", default=[200, 200, 200], help="widths of its network")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument(
        "--rounds", type=int, default=None, help="of a run, as many as the problem says where not given"
    )
    parser.add_argument("--seed", type=int, default=1000, help="the runs' seeds come from it")
    options = parser.parse_args()
    if options.quick:
        options.families, options.earlier, options.steps, options.hidden = ["wheel"], 3, 50, [10]
        options.runs, options.rounds = 2, 100
    results = {}
    for name in options.families:
        results[name] = measured(FAMILIES[name](options.earlier), options, options.rounds)
        mine, alone = (results[name][row]["regret"] for row in ("hybrid with a prior", "hybrid"))
        word, gap, error = against(mine, alone, larger_is_better=False)
        told = f"the prior {word} none by {gap:+.1f} ± {error:.1f} points"
        print(f"{name}: fitted in {results[name]['fit_seconds']:.0f} s; {told}", flush=True)
        write_results(options.out, "bandit_priors", {**setting(), "options": _plain(options), "results": results})
    print(table(results))
    if "wheel" in results:
        found = results["wheel"]["hybrid with a prior"]["regret"]
        at_most(f"regret on the wheel of δ = {NEW_DELTA}, %", GOAL, sum(found) / len(found))


def _plain(options: Any) -> dict[str, Any]:
    return {name: str(value) if name == "out" else value for name, value in vars(options).items()}


if __name__ == "__main__":
    main()
