"""The command line. A command parses its options here and does its work in `bayesadam.experiments`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bayesadam._extras import require
from bayesadam._version import __version__


class _Group(TyperGroup):
    """Ends Ctrl-C in one line and exit code 130: what typer itself makes of it differs between its versions."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("bayesadam: interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="bayesadam",
    cls=_Group,
    help="A Gaussian posterior over a network's weights, read off the adaptive optimiser that trained it.",
    no_args_is_help=True,
    # An error of ours is one line, printed by `main`; any other is a bug, whose plain traceback belongs in a report.
    pretty_exceptions_enable=False,
)

Seed = Annotated[int, typer.Option("--seed", help="Fixes every random number: same seed, same results.")]
Out = Annotated[Path, typer.Option("--out", help="The folder to write to; made if absent.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the paths written, one a line.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"bayesadam {__version__}")
        raise typer.Exit


@app.callback()
def bayesadam(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A Gaussian posterior over a network's weights, read off the adaptive optimiser that trained it."""


@app.command()
def demo(seed: Seed = 0, out: Out = Path("out/demo"), quiet: Quiet = False) -> None:
    """Train a small network with AdamW, read its posterior, calibrate, predict, prune: one picture, one table."""
    # Before any training, so that a missing package costs no time.
    require("matplotlib")
    from bayesadam.experiments.demo import run_demo

    run_demo(seed=seed, out=out, quiet=quiet)


@app.command()
def regression(
    methods: Annotated[str, typer.Option(help="Which methods, separated by commas; all by default.")] = "",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 200 training points.")] = 20_000,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Data sets and networks for each method.")] = 10,
    gap: Annotated[bool, typer.Option("--gap", help="Train with a hole in the middle of the range.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds and 500 epochs.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 2,
    seed: Seed = 0,
    out: Out = Path("out/regression"),
    quiet: Quiet = False,
) -> None:
    """Figure 1: the paper's toy regression, every method beside the others."""
    require("matplotlib")
    from bayesadam.experiments.regression import RegressionSettings, run_regression

    chosen = tuple(name.strip() for name in methods.split(",") if name.strip())
    settings = RegressionSettings(n_seeds=seeds, epochs=epochs, gap=gap)
    if chosen:
        settings = RegressionSettings(methods=chosen, n_seeds=seeds, epochs=epochs, gap=gap)
    run_regression(seed=seed, out=out, quiet=quiet, settings=settings.quick() if quick else settings, jobs=jobs)
