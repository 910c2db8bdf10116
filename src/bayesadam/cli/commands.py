"""A command parses its options here; its work is a function elsewhere.

Nothing here imports torch before a command has begun.
"""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from bayesadam._extras import require
from bayesadam._version import __version__


class _Group(TyperGroup):
    """Ends Ctrl-C in one line and exit code 130, in every version of typer."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("bayesadam: interrupted", err=True)
            raise typer.Exit(130) from None


# Plain help: rich's would take longer to import than all else. An error of ours is one line, printed by `main`; any
# other is a bug, whose plain traceback belongs in a report.
_LOOKS: Any = {"no_args_is_help": True, "rich_markup_mode": None, "pretty_exceptions_enable": False}
app = typer.Typer(name="bayesadam", cls=_Group, **_LOOKS)

Checkpoint = Annotated[Path, Argument(metavar="CHECKPOINT", help="What the trainer saved: weights and state.")]
Checkpoints = Annotated[list[Path], Argument(metavar="CHECKPOINT", help="What the trainers saved: weights and states.")]
NData = Annotated[float | None, Option(metavar="N", help="Training examples, where the file does not say.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")]
Out = Annotated[Path, Option("--out", "-o", metavar="PATH", help="The file, or its folder.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the path of the file.")]
# How a checkpoint is read: `bayesadam.readers.CheckpointKeywords`.
StateFile = Annotated[Path | None, Option("--optimizer-file", metavar="FILE", help="The state, where it is apart.")]
Reader = Annotated[str | None, Option(metavar="NAME", help="What wrote the state; by default its keys say.")]
InOrder = Annotated[bool, Option("--groups-in-order", help="Vouch that groups follow the model's order.")]
WeightsKey = Annotated[list[str] | None, Option(metavar="KEY", help="Which weights, of several in the file.")]
StateKey = Annotated[str | None, Option("--optimizer-key", metavar="KEY", help="Which state, of several in the file.")]


def _work(
    command: str,
    weights_key: list[str] | None,
    optimizer_file: Path | None = None,
    optimizer: str | None = None,
    groups_in_order: bool = False,
    optimizer_key: str | None = None,
    **settings: Any,
) -> Any:
    """Do a command's work, the function of its name in `files`, with the options of reading in the library's names."""
    reading = {"optimizer_path": optimizer_file, "optimizer": optimizer, "groups_in_order": groups_in_order}
    reading |= {"weights_key": ",".join(weights_key) if weights_key else None, "optimizer_key": optimizer_key}
    return getattr(import_module("bayesadam.cli.files"), command)(reading=reading, **settings)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"bayesadam {__version__}")
        raise typer.Exit


_Version = Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")


@app.callback()
def bayesadam(version: Annotated[bool, _Version] = False) -> None:
    """A Gaussian posterior over a network's weights, read off its optimiser.

    --help after a command lists its options.
    """


@app.command()
def inspect(
    checkpoint: Checkpoint,
    n_data: NData = None,
    json: Json = False,
    why: Annotated[bool, Option("--why", help="Say how the file was read: keys, optimiser, match.")] = False,
    optimizer_file: StateFile = None,
    optimizer: Reader = None,
    groups_in_order: InOrder = False,
    weights_key: WeightsKey = None,
    optimizer_key: StateKey = None,
) -> None:
    """Signal-to-noise ratio and dead weights, layer by layer.

    Of what a trainer saved, or of a posterior that Posterior.save or `bayesadam export` wrote.
    """
    _work("inspect", **locals())


@app.command()
def doctor(
    checkpoint: Checkpoint,
    n_data: NData = None,
    json: Json = False,
    optimizer_file: StateFile = None,
    optimizer: Reader = None,
    groups_in_order: InOrder = False,
    weights_key: WeightsKey = None,
    optimizer_key: StateKey = None,
) -> None:
    """What is wrong or notable about a saved optimiser state.

    Ends with code 1 where no posterior can be read.
    """
    if not _work("doctor", **locals()):
        raise typer.Exit(1)


_RANKINGS = "snr (default), magnitude, saliency."


@app.command()
def prune(
    checkpoint: Checkpoint,
    fraction: Annotated[float, Option(metavar="SHARE", help="The share of weights to remove.")],
    ranking: Annotated[str, Option(metavar="NAME", show_default=False, help=_RANKINGS)] = "snr",
    scope: Annotated[str, Option(metavar="NAME", help="Or layer: the same share of each.")] = "global",
    exclude: Annotated[str, Option(metavar="NAMES", help='Leave whole, by commas: "*.norm*,biases".')] = "",
    out: Out = Path("out/prune"),
    quiet: Quiet = False,
    optimizer_file: StateFile = None,
    optimizer: Reader = None,
    groups_in_order: InOrder = False,
    weights_key: WeightsKey = None,
    optimizer_key: StateKey = None,
) -> None:
    """Set the weights with the lowest signal-to-noise ratio to zero.

    All else in the file stays as it was.
    """
    _work("prune", **locals())


@app.command()
def merge(
    checkpoints: Checkpoints,
    method: Annotated[str | None, Option(metavar="NAME", help="fisher, gradient-matching or kronecker.")] = None,
    base: Annotated[Path | None, Option(metavar="FILE", help="The network before fine-tuning.")] = None,
    weights: Annotated[list[float] | None, Option("--weight", help="How much a network counts, once for each.")] = None,
    out: Out = Path("out/merge"),
    quiet: Quiet = False,
    optimizer: Reader = None,
    groups_in_order: InOrder = False,
    weights_key: WeightsKey = None,
    optimizer_key: StateKey = None,
) -> None:
    """Make one network of several fine-tuned from one start.

    Weighted by their second moments; written as a safetensors file.
    """
    _work("merge", **locals())


@app.command()
def export(
    checkpoint: Checkpoint,
    n_data: NData = None,
    batch_size: Annotated[int | None, Option(metavar="B", help="Examples behind one gradient.")] = None,
    compress: Annotated[str | None, Option(metavar="NAME", help="bfloat16 or factored.")] = None,
    structure: Annotated[str, Option(metavar="NAME", help="diagonal, or kronecker for SOAP.")] = "diagonal",
    out: Out = Path("out/export"),
    quiet: Quiet = False,
    optimizer_file: StateFile = None,
    optimizer: Reader = None,
    groups_in_order: InOrder = False,
    weights_key: WeightsKey = None,
    optimizer_key: StateKey = None,
) -> None:
    """Write the posterior without the weights, to publish."""
    _work("export", **locals())


@app.command()
def deploy(
    posterior: Annotated[Path, Argument(metavar="POSTERIOR", help="What was saved, calibrated.")],
    model: Annotated[str, Argument(metavar="FACTORY", help="module:function that gives the model.")],
    example: Annotated[str | None, Option(metavar="FACTORY", help="module:function that gives a batch.")] = None,
    level: Annotated[float, Option(help="Of prediction sets and intervals.")] = 0.95,
    out: Out = Path("out/deploy"),
    quiet: Quiet = False,
) -> None:
    """Write the calibrated model with its doubt.

    As .pt2 for torch alone, or .onnx for onnxruntime: as --out ends.
    """
    import_module("bayesadam.cli.files").deploy(**locals())


@app.command()
def demo(
    seed: Annotated[int, Option(help="Fixes every random number.")] = 0,
    out: Out = Path("out/demo"),
    quiet: Quiet = False,
) -> None:
    """Train a small network, read its posterior, draw its error bars.

    In ten seconds, on made-up data: one picture.
    """
    # Before any training, so that a missing package costs no time.
    require("matplotlib")
    import_module("bayesadam.cli.demo").run(**locals())
