"""The command line of the experiments: `python -m experiments figure1 | figure2 | table1 | cost | report`.

All write `metrics.json` and a picture or a table to a folder; stopped, they resume. Torch is imported with the work.
"""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from ast import literal_eval
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bayesadam.errors import BayesAdamError, SettingError


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _parser() -> ArgumentParser:
    whole: Any = {"type": _count, "metavar": "N"}
    parser = ArgumentParser(
        "python -m experiments", description="The paper's experiments: Figure 1, Figure 2, Table 1, costs, the report."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, words: str, *, device: bool = False) -> ArgumentParser:
        one = commands.add_parser(name, help=words, description=words)
        one.add_argument("--seed", type=int, default=0, help="fixes every random number: same seed, same results")
        one.add_argument("--quiet", "-q", action="store_true", help="print only the paths written, one per line")
        if name != "report":
            out = Path("out") / name
            one.add_argument("--out", "-o", type=Path, metavar="DIR", default=out, help="where results go, %(default)s")
        if device:
            one.add_argument("--device", metavar="cpu|cuda", help="by default on cuda where there is one")
        return one

    one = command("figure1", "The paper's toy regression with every method.")
    one.add_argument("--methods", metavar="NAMES", help="separated by commas, by default all")
    one.add_argument("--epochs", **whole, default=20_000, help="passes over the 200 training points, %(default)s")
    one.add_argument("--seeds", **whole, default=5, help="data sets and networks for each method, %(default)s")
    one.add_argument("--gap", action="store_true", help="train with a hole in the middle of the range")

    one = command("figure2", "Accuracy after pruning, with every method.", device=True)
    one.add_argument("--data", default="mnist", help="mnist, fashion-mnist or digits")
    one.add_argument("--methods", metavar="NAMES", help="separated by commas, by default all")
    one.add_argument("--epochs", **whole, default=100, help="passes over the training images, %(default)s")
    one.add_argument("--seeds", **whole, default=5, help="networks for each method, %(default)s")
    one.add_argument("--activation", default="relu", help="of the hidden units, %(default)s")
    one.add_argument("--sparse", action="store_true", help="networks trained to be pruned, in their own ways")

    one = command("table1", "Thompson sampling on the bandit problems.", device=True)
    one.add_argument("--problems", metavar="NAMES", help="wheel:0.95 has δ = 0.95; by default the paper's")
    one.add_argument("--agents", metavar="NAMES", help="by default the paper's")
    one.add_argument("--runs", **whole, default=10, help="runs of each cell, %(default)s")
    one.add_argument("--rounds", **whole, help="rounds of each run; by default the problem's")
    one.add_argument("--settings", default="tuned", metavar="tuned|paper", help="the agents': or what the paper states")
    one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="epsilon=0.02; repeatable")

    one = command("cost", "What a step, a posterior and a prediction cost, next to Adam.")
    one.add_argument("--data", default="mnist", help="mnist, fashion-mnist or digits")
    one.add_argument("--rounds", **whole, default=10, help="how often everything is timed, %(default)s")

    words = "Everything on one HTML page: runs in DIR are taken as they are, missing ones are run."
    one = command("report", words, device=True)
    one.add_argument("out", type=Path, metavar="DIR", help="holds the runs, and the page; made if absent")
    one.add_argument("--quick", action="store_true", help="few epochs, seeds and rounds, on this machine's data")
    return parser


def _run(asked: Namespace) -> None:
    module = import_module(f"experiments.{asked.command}")
    common: Any = {"seed": asked.seed, "out": asked.out, "quiet": asked.quiet}
    if hasattr(asked, "device"):
        common["device"] = _device(asked.device)
    match asked.command:
        case "figure1":
            names = _names(asked.methods, module.TITLES)
            common["settings"] = module.RegressionSettings(names, asked.seeds, asked.epochs, gap=asked.gap)
        case "figure2":
            names, own = _names(asked.methods, module.TITLES), {"activation": asked.activation, "sparse": asked.sparse}
            common["settings"] = module.PruningSettings(asked.data, names, asked.seeds, asked.epochs, **own)
        case "table1":
            chosen = {name: _split(getattr(asked, name)) for name in ("problems", "agents") if getattr(asked, name)}
            own = {name: getattr(asked, name) for name in ("runs", "rounds", "settings")}
            common["settings"] = module.BanditSettings(**chosen, **own, changes=dict(map(_change, asked.set)))
        case "cost":
            common["settings"] = module.CostSettings(asked.data, asked.rounds)
        case "report":
            common["quick"] = asked.quick
    module.run(**common)


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _names(text: str | None, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(known) if text is None else _split(text)
    if not names or any(name not in known for name in names):
        raise SettingError(f"--methods must be some, separated by commas, of {', '.join(known)}, got {text!r}")
    return names


def _change(text: str) -> tuple[str, Any]:
    """Name and value: one of Python's numbers or tuples, True, False, None, or else text."""
    name, _, value = (part.strip() for part in text.partition("="))
    if not (name and value):
        raise SettingError(f"--set takes name=value, such as epsilon=0.02, got {text!r}")
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _device(asked: str | None) -> str:
    import torch

    available = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if asked is not None and asked not in available:
        raise SettingError(f"--device must be one of {', '.join(available)} on this machine, got {asked!r}")
    return asked or available[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the library's errors end in one line, without a traceback."""
    try:
        _run(_parser().parse_args(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    except BayesAdamError as error:
        print("experiments:", *str(error).split(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
