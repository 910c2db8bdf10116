"""The command line of the experiments: `python -m experiments figure1 | figure2 | table1 | cost | report`.

All write `metrics.json` and a picture or a table to a folder; stopped, they resume.
"""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bayesadam.errors import BayesAdamError, SettingError


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _parser() -> ArgumentParser:
    whole: Any = {"type": _count, "metavar": "N"}
    names: Any = {"type": _split, "metavar": "NAMES"}
    seeds: Any = {**whole, "dest": "n_seeds", "default": 5, "help": "data sets and networks, %(default)s"}
    epochs: Any = {**whole, "help": "passes over the training data, %(default)s"}
    methods: Any = {**names, "help": "separated by commas, by default all"}
    title = "The paper's experiments: Figure 1, Figure 2, Table 1, costs, the report."
    parser = ArgumentParser("python -m experiments", description=title)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, words: str, *, device: bool = False, data: bool = False) -> ArgumentParser:
        one = commands.add_parser(name, help=words, description=words)
        one.add_argument("--seed", type=int, default=0, help="fixes every random number: same seed, same results")
        one.add_argument("--quiet", "-q", action="store_true", help="print only the paths written, one per line")
        if name != "report":
            out = Path("out") / name
            one.add_argument("--out", "-o", type=Path, metavar="DIR", default=out, help="where results go, %(default)s")
        if device:
            one.add_argument("--device", metavar="cpu|cuda", help="by default on cuda where there is one")
        if data:
            one.add_argument("--data", default="mnist", help="mnist, fashion-mnist or digits")
        return one

    one = command("figure1", "The paper's toy regression with every method.")
    one.add_argument("--methods", **methods)
    one.add_argument("--epochs", default=20_000, **epochs)
    one.add_argument("--seeds", **seeds)

    one = command("figure2", "Accuracy after pruning, with every method.", device=True, data=True)
    one.add_argument("--methods", **methods)
    one.add_argument("--epochs", default=100, **epochs)
    one.add_argument("--seeds", **seeds)

    one = command("table1", "Thompson sampling on the bandit problems.", device=True)
    one.add_argument("--problems", **names, help="wheel:0.95 has δ = 0.95; by default the paper's")
    one.add_argument("--agents", **names, help="by default the paper's")
    one.add_argument("--runs", **whole, default=10, help="runs of each cell, %(default)s")
    one.add_argument("--rounds", **whole, help="rounds of each run; by default the problem's")
    one.add_argument("--settings", default="tuned", metavar="tuned|paper", help="the agents': or what the paper states")

    one = command("cost", "What a step, a posterior and a prediction cost, next to Adam.", data=True)
    one.add_argument("--rounds", **whole, default=10, help="how often everything is timed, %(default)s")

    words = "Everything on one HTML page: runs in DIR are taken as they are, missing ones are run."
    one = command("report", words, device=True)
    one.add_argument("out", type=Path, metavar="DIR", help="holds the runs, and the page; made if absent")
    one.add_argument("--quick", action="store_true", help="few epochs, seeds and rounds, on this machine's data")
    return parser


def _run(asked: Namespace) -> None:
    module = import_module(f"experiments.{asked.command}")
    # What is not said has the settings' own default.
    options = {name: value for name, value in vars(asked).items() if value is not None and name != "command"}
    common = {name: options.pop(name) for name in ("seed", "out", "quiet")}
    if hasattr(asked, "device"):
        common["device"] = _device(options.pop("device", None))
    if asked.command == "report":
        module.run(**common, **options)
    else:
        module.run(**common, settings=module.Settings(**options))


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _device(asked: str | None) -> str:
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
