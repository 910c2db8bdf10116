"""The command line of the experiments: `python -m experiments figure1 | figure2 | table1 | cost | report`.

All write `metrics.json` and a picture or a table to a folder; stopped, they resume. Torch is imported with the work.
"""

import sys
from ast import literal_eval
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from bayesadam.errors import BayesAdamError, SettingError

app = typer.Typer(
    help="The paper's experiments: Figure 1, Figure 2, Table 1, costs, and the report.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Seed = Annotated[int, Option(help="Fixes every random number: same seed, same results.")]
Out = Annotated[Path, Option("--out", "-o", metavar="DIR", help="Where the results go: a folder, made if absent.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the paths written, one per line.")]
Device = Annotated[str | None, Option(metavar="cpu|cuda", help="By default on cuda where there is one.")]
Methods = Annotated[str | None, Option(metavar="NAMES", help="Separated by commas, by default all.")]
Images = Annotated[str, Option(help="mnist, fashion-mnist or digits.")]


@app.command()
def figure1(
    methods: Methods = None,
    epochs: Annotated[int, Option(min=1, help="Passes over the 200 training points.")] = 20_000,
    n_seeds: Annotated[int, Option("--seeds", min=1, help="Data sets and networks for each method.")] = 5,
    gap: Annotated[bool, Option("--gap", help="Train with a hole in the middle of the range.")] = False,
    seed: Seed = 0,
    out: Out = Path("out/figure1"),
    quiet: Quiet = False,
) -> None:
    """The paper's toy regression with every method."""
    from experiments import figure1

    names = _names("--methods", methods, figure1.TITLES)
    settings = figure1.RegressionSettings(names, n_seeds=n_seeds, epochs=epochs, gap=gap)
    figure1.run(seed=seed, out=out, quiet=quiet, settings=settings)


@app.command()
def figure2(
    data: Images = "mnist",
    methods: Methods = None,
    epochs: Annotated[int, Option(min=1, help="Passes over the training images.")] = 100,
    n_seeds: Annotated[int, Option("--seeds", min=1, help="Networks for each method.")] = 5,
    activation: Annotated[str, Option(help="Of the hidden units.")] = "relu",
    sparse: Annotated[bool, Option("--sparse", help="Networks trained to be pruned, in their own ways.")] = False,
    device: Device = None,
    seed: Seed = 0,
    out: Out = Path("out/figure2"),
    quiet: Quiet = False,
) -> None:
    """Accuracy after pruning, with every method."""
    from experiments import figure2

    names = _names("--methods", methods, figure2.TITLES)
    settings = figure2.PruningSettings(data, names, n_seeds, epochs, activation=activation, sparse=sparse)
    figure2.run(seed=seed, out=out, quiet=quiet, settings=settings, device=_device(device))


@app.command()
def table1(
    problems: Annotated[str | None, Option(metavar="NAMES", help="wheel:0.95 has δ = 0.95; the paper's.")] = None,
    agents: Annotated[str | None, Option(metavar="NAMES", help="By default the paper's.")] = None,
    runs: Annotated[int, Option(min=1, help="Runs of each cell.")] = 10,
    rounds: Annotated[int | None, Option(min=1, help="Rounds of each run; the problem's by default.")] = None,
    settings: Annotated[
        str, Option(metavar="tuned|paper", help="The agents': tuned, or what the paper states.")
    ] = "tuned",
    changes: Annotated[
        list[str] | None, Option("--set", metavar="NAME=VALUE", help="Such as epsilon=0.02; repeatable.")
    ] = None,
    device: Device = None,
    seed: Seed = 0,
    out: Out = Path("out/table1"),
    quiet: Quiet = False,
) -> None:
    """Thompson sampling on the bandit problems."""
    from experiments import table1

    table1.command(
        problems=_split(problems),
        agents=_split(agents),
        runs=runs,
        rounds=rounds,
        settings=settings,
        changes=dict(map(_change, changes or ())),
        device=_device(device),
        seed=seed,
        out=out,
        quiet=quiet,
    )


@app.command()
def cost(
    data: Images = "mnist",
    rounds: Annotated[int, Option(min=1, help="How often everything is timed.")] = 10,
    seed: Seed = 0,
    out: Out = Path("out/cost"),
    quiet: Quiet = False,
) -> None:
    """What a step, a posterior and a prediction cost, next to Adam."""
    from experiments import cost

    cost.run(seed=seed, out=out, quiet=quiet, settings=cost.CostSettings(data, rounds))


@app.command()
def report(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Holds the runs, and the page; made if absent.")],
    quick: Annotated[bool, Option("--quick", help="Few epochs, seeds and rounds, on this machine's data.")] = False,
    device: Device = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Figure 1, Figure 2, Table 1 and the costs on one HTML page.

    Runs in DIR are taken as they are, missing ones are run.
    """
    from experiments import report

    report.run(seed=seed, out=out, quiet=quiet, quick=quick, device=_device(device))


def _split(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _names(option: str, text: str | None, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(known) if text is None else _split(text)
    if not names or any(name not in known for name in names):
        raise SettingError(f"{option} must be some, separated by commas, of {', '.join(known)}, got {text!r}")
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
        app(arguments, prog_name="python -m experiments")
    except SystemExit as end:
        # Typer ends so where all went well, too.
        return int(end.code or 0)
    except BayesAdamError as error:
        print("experiments:", *str(error).split(), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
