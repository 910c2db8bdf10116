"""A command parses its options and calls the library, which nothing imports before a command has begun."""

import inspect as signatures
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from bayesadam._extras import require
from bayesadam._version import __version__
from bayesadam.cli import output
from bayesadam.errors import SettingError


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
Factory = Annotated[str | None, Option("--model", metavar="FACTORY", help="module:function that gives the network.")]
Inputs = Annotated[Path | None, Option(metavar="FILE", help="Inputs to make up for it: .npy .npz .pt .safetensors")]
Exclude = Annotated[str, Option(metavar="NAMES", help='Leave whole, by commas: "*.norm*,biases".')]
Out = Annotated[Path, Option("--out", "-o", metavar="PATH", help="The file, or its folder.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the path of the file.")]
StateFile = Annotated[Path | None, Option("--optimizer-file", metavar="FILE", help="The state, where it is apart.")]
Reader = Annotated[str | None, Option(metavar="NAME", help="What wrote the state; by default its keys say.")]
InOrder = Annotated[bool, Option("--groups-in-order", help="Vouch that groups follow the model's order.")]
WeightsKey = Annotated[list[str] | None, Option(metavar="KEY", help="Which weights, of several in the file.")]
StateKey = Annotated[str | None, Option(metavar="KEY", help="Which state, of several in the file.")]
# How a checkpoint is read: `bayesadam.readers.CheckpointKeywords`.
_READING: dict[str, tuple[Any, bool | None]] = {
    "optimizer_path": (StateFile, None),
    "optimizer": (Reader, None),
    "groups_in_order": (InOrder, False),
    "weights_key": (WeightsKey, None),
    "optimizer_key": (StateKey, None),
}


def _reads(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of reading, as `**reading`; of several checkpoints each has its state."""
    parameters = signatures.signature(function).parameters
    options = [
        signatures.Parameter(name, signatures.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _READING.items()
        if not (name == "optimizer_path" and "checkpoints" in parameters)
    ]
    listed = [parameter for name, parameter in parameters.items() if name != "reading"]
    function.__signature__ = signatures.Signature([*listed, *options])  # type: ignore[attr-defined]
    return function


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())


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
@_reads
def inspect(
    checkpoint: Checkpoint,
    n_data: NData = None,
    json: Json = False,
    why: Annotated[bool, Option("--why", help="Say how the file was read: keys, optimiser, match.")] = False,
    **reading: Any,
) -> None:
    """Signal-to-noise ratio and dead weights, layer by layer.

    Of what a trainer saved, or of a posterior that Posterior.save or `bayesadam export` wrote; bytes by tensor of what
    `bayesadam quantise` wrote.
    """
    from dataclasses import asdict

    from bayesadam import inspecting
    from bayesadam.compress.packing import is_packed, report_packed

    if is_packed(checkpoint):
        report = report_packed(checkpoint)
        output.show(asdict(report), str(report), json)
        return
    inspection = inspecting.inspect(checkpoint, n_data=n_data, **reading)
    reasons = [*inspection.why, ""] if why else []
    output.show(inspection.to_dict(), "\n".join([*reasons, str(inspection)]), json)


@app.command()
@_reads
def doctor(checkpoint: Checkpoint, n_data: NData = None, json: Json = False, **reading: Any) -> None:
    """What is wrong or notable about a saved optimiser state.

    Ends with code 1 where no posterior can be read.
    """
    from bayesadam.inspecting import diagnose_checkpoint

    diagnosis = diagnose_checkpoint(checkpoint, n_data=n_data, **reading)
    output.show({**diagnosis.to_dict(), "healthy": diagnosis.healthy}, str(diagnosis), json)
    if any(finding.severity == "error" for finding in diagnosis.findings):
        raise typer.Exit(1)


_RANKINGS = "snr, magnitude, saliency; with --inputs between."
# Endings of files that are written again as they are; of any other the weights alone are written.
_REWRITTEN = (".pt", ".pth", ".ckpt", ".bin")


@app.command()
@_reads
def prune(
    checkpoint: Checkpoint,
    fraction: Annotated[float | None, Option(metavar="SHARE", help="The share of weights to remove.")] = None,
    pattern: Annotated[str | None, Option(metavar="N:M", help="Or keep N of every M, with --model.")] = None,
    ranking: Annotated[str | None, Option(metavar="NAME", help=_RANKINGS)] = None,
    scope: Annotated[str, Option(metavar="NAME", help="Or bounded, or layer: each alike.")] = "global",
    exclude: Exclude = "",
    model: Factory = None,
    inputs: Inputs = None,
    rounds: Annotated[int, Option(help="Of growing sparsity, with --inputs.")] = 8,
    out: Out = Path("out/prune"),
    quiet: Quiet = False,
    **reading: Any,
) -> None:
    """Set weights to zero; all else stays. A .safetensors gets the weights alone."""
    if model is None and (inputs or pattern):
        raise SettingError("--inputs and --pattern need the network: give --model module:function")
    if fraction is None and pattern is None:
        raise SettingError("how many weights? Give --fraction, such as 0.75, or --pattern, such as 2:4")
    from bayesadam import compress, readers
    from bayesadam.cli import networks

    how: Any = {"fraction": fraction, "scope": scope, "exclude": _names(exclude)}
    usual = f"pruned{checkpoint.suffix if checkpoint.is_file() and checkpoint.suffix in _REWRITTEN else '.safetensors'}"

    def work(file: Path) -> object:
        if model is None:
            return compress.prune_checkpoint(checkpoint, file, ranking=ranking or "snr", **how, **reading)
        posterior = networks.posterior(checkpoint, model, reading)
        x = networks.batch(inputs)
        small = compress.prune(posterior, inputs=x, ranking=ranking, pattern=pattern, rounds=rounds, **how)
        source, kept = readers.read_checkpoint(checkpoint, **reading), {n: w != 0 for n, w in small.mean.items()}
        readers.write_network(source, small.model, file)
        return compress.PruningReport.of_file(source, small.mean, kept, file)

    output.write(work, out, usual, [checkpoint, reading["optimizer_path"], inputs], quiet)


@app.command()
@_reads
def quantise(
    checkpoint: Checkpoint,
    bits: Annotated[int, Option(metavar="N", help="8, 4, 3 or 2; 16 for half precision.")],
    model: Annotated[str, Option(metavar="FACTORY", help="module:function that gives the network.")],
    inputs: Inputs = None,
    exclude: Exclude = "",
    group: Annotated[int | None, Option(metavar="N", help="Weights that share a scale; all of an output.")] = None,
    out: Out = Path("out/quantise"),
    quiet: Quiet = False,
    **reading: Any,
) -> None:
    """Round weights to few bits; zeros stay zeros.

    Written as a safetensors file, which ba.load(path, model) reads.
    """
    from bayesadam import compress
    from bayesadam.cli import networks
    from bayesadam.weights.gaussian import require_safetensors

    def work(file: Path) -> object:
        require_safetensors(file)
        posterior = networks.posterior(checkpoint, model, reading)
        x = networks.batch(inputs)
        small = compress.quantise(posterior, bits, inputs=x, exclude=_names(exclude), group=group)
        small.save(file)
        return small.report

    output.write(work, out, "quantised.safetensors", [checkpoint, reading["optimizer_path"], inputs], quiet)


@app.command()
@_reads
def merge(
    checkpoints: Checkpoints,
    method: Annotated[str | None, Option(metavar="NAME", help="damped, fisher, kronecker, gradient-matching.")] = None,
    base: Annotated[Path | None, Option(metavar="FILE", help="The network before fine-tuning.")] = None,
    weights: Annotated[list[float] | None, Option("--weight", help="How much a network counts, once for each.")] = None,
    trim: Annotated[float | None, Option(metavar="SHARE", help="The share of least changes to drop.")] = None,
    out: Out = Path("out/merge"),
    quiet: Quiet = False,
    **reading: Any,
) -> None:
    """Make one network of several fine-tuned from one start.

    Weighted by their second moments; written as a safetensors file.
    """
    from bayesadam.merging import merge_checkpoints

    def work(file: Path) -> object:
        how: Any = {"method": method, "base": base, "weights": weights or None, "trim": trim}
        return merge_checkpoints(checkpoints, file, **how, **reading)

    output.write(work, out, "merged.safetensors", checkpoints, quiet)


@app.command()
@_reads
def export(
    checkpoint: Checkpoint,
    n_data: NData = None,
    batch_size: Annotated[int | None, Option(metavar="B", help="Examples behind one gradient.")] = None,
    compress: Annotated[str | None, Option(metavar="NAME", help="bfloat16 or factored.")] = None,
    structure: Annotated[str, Option(metavar="NAME", help="diagonal, or kronecker for SOAP.")] = "diagonal",
    out: Out = Path("out/export"),
    quiet: Quiet = False,
    **reading: Any,
) -> None:
    """Write the posterior without the weights, to publish."""
    from bayesadam import GaussianWeights

    def work(file: Path) -> None:
        opened = GaussianWeights.open(checkpoint, n_data, batch_size=batch_size, structure=structure, **reading)
        opened.export(file, compress=compress)

    output.write(work, out, "posterior.safetensors", [checkpoint, reading["optimizer_path"]], quiet)


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
    from bayesadam import load
    from bayesadam.cli import networks

    def work(file: Path) -> str:
        net = load(posterior, networks.network(model))
        net.save(file, None if example is None else output.called(example), level=level)
        return str(net.report)

    output.write(work, out, "served.pt2", [posterior], quiet)


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
    from bayesadam.cli import demo as pictures

    output.write(lambda file: pictures.run(file, seed), out, "demo.png", [], quiet)
