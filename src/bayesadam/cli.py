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
