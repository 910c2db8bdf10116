"""The command line. A command parses its options here and does its work in `bayesadam.experiments`."""

from ast import literal_eval
from collections.abc import Callable
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from bayesadam._extras import require
from bayesadam._version import __version__
from bayesadam.checkpoint import CheckpointOptions
from bayesadam.cli_data import app as data_app
from bayesadam.errors import SettingError


class _Group(TyperGroup):
    """Ends Ctrl-C in one line and exit code 130; typer's own handling differs between its versions."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("bayesadam: interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="bayesadam",
    cls=_Group,
    no_args_is_help=True,
    # An error of ours is one line, printed by `main`; any other is a bug, whose plain traceback belongs in a report.
    pretty_exceptions_enable=False,
)

app.add_typer(data_app, name="data")

Seed = Annotated[int, Option(help="Fixes every random number: same seed, same results.")]
Out = Annotated[Path, Option(help="The folder to write to; made if absent.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the paths written, one per line.")]
Device = Annotated[str, Option(help="cpu or cuda; by default cuda where there is one.")]
Jobs = Annotated[int, Option(min=1, help="Parallel processes, on a CPU.")]
Methods = Annotated[str | None, Option(help="Which methods, separated by commas; all by default.")]
Checkpoint = Annotated[Path, typer.Argument(help="What the trainer saved: weights and optimiser state.")]
_OptimizerFile = Option(help="The optimiser's state, where it has a file of its own.")
_InOrder = Option("--groups-in-order", help="Every parameter group was filled in the model's order.")
_WeightsKey = Option(
    help="Which weights, where the file holds several: model.ema. Repeated for several networks, in the optimiser's order."
)
_OptimizerKey = Option(help="Which optimiser's state, where the file holds several: optimizer_states.0.")


def _checkpoint_options(
    optimizer_file: Annotated[Path | None, _OptimizerFile] = None,
    optimizer: Annotated[
        str, Option(help="The optimiser that wrote the state; identified by its keys if absent.")
    ] = "",
    groups_in_order: Annotated[bool, _InOrder] = False,
    weights_key: Annotated[list[str] | None, _WeightsKey] = None,
    optimizer_key: Annotated[str | None, _OptimizerKey] = None,
) -> CheckpointOptions:
    """The options of every command that reads a checkpoint."""
    weights = ",".join(weights_key) if weights_key else None
    return CheckpointOptions(optimizer_file, optimizer or None, None, groups_in_order, weights, optimizer_key)


def _reads_checkpoint(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose argument `options` is given on the command line by the options of `_checkpoint_options`.

    Of several checkpoints each has a state of its own, so that no option names its file.
    """
    own = signature(command, eval_str=True).parameters
    added = dict(signature(_checkpoint_options, eval_str=True).parameters)
    if "checkpoints" in own:
        del added["optimizer_file"]

    def run(**given: Any) -> None:
        command(options=_checkpoint_options(**{name: given.pop(name) for name in added}), **given)

    parameters = [p for name, each in own.items() for p in (added.values() if name == "options" else [each])]
    # By keyword alone, so that options with and without a default may come in any order.
    run.__signature__ = Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _chosen(**options: str | None) -> dict[str, Any]:
    """The names given to each option, without the options that were left out, which stand for their defaults."""
    found = {option: _names(text) for option, text in options.items() if text is not None}
    for option in (option for option, names in found.items() if not names):
        raise SettingError(f"--{option} names nothing: leave it out for the default, or give names separated by commas")
    return found


def _changes(texts: list[str]) -> dict[str, Any]:
    """`name=value` by name: values are Python's numbers, tuples, True, False and None, all else is text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise SettingError(f"--set takes name=value, such as epsilon=0.02, got {text!r}")
        if name in found:
            raise SettingError(f"--set {name} is given twice")
        try:
            found[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def _device(asked: str) -> str:
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device cuda: torch sees no CUDA device here; leave the option out, or say --device cpu")
    if asked not in ("", "cpu", "cuda"):
        raise SettingError(f"--device must be cpu or cuda, got {asked!r}")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"bayesadam {__version__}")
        raise typer.Exit


_Version = Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")


@app.callback()
def bayesadam(version: Annotated[bool, _Version] = False) -> None:
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
    methods: Methods = None,
    epochs: Annotated[int, Option(min=1, help="Passes over the 200 training points.")] = 20_000,
    seeds: Annotated[int, Option("--seeds", min=1, help="Data sets and networks for each method.")] = 10,
    gap: Annotated[bool, Option("--gap", help="Train with a hole in the middle of the range.")] = False,
    quick: Annotated[bool, Option("--quick", help="Two seeds and 500 epochs.")] = False,
    jobs: Jobs = 2,
    seed: Seed = 0,
    out: Out = Path("out/regression"),
    quiet: Quiet = False,
) -> None:
    """Figure 1: the paper's toy regression with every method."""
    require("matplotlib")
    from bayesadam.experiments.regression import RegressionSettings, run_regression

    settings = RegressionSettings(n_seeds=seeds, epochs=epochs, gap=gap, **_chosen(methods=methods))
    run_regression(seed=seed, out=out, quiet=quiet, settings=settings.quick() if quick else settings, jobs=jobs)


@app.command()
def pruning(
    data: Annotated[str, Option(help="mnist, fashion-mnist or digits.")] = "mnist",
    methods: Methods = None,
    epochs: Annotated[int, Option(min=1, help="Passes over the training images.")] = 100,
    seeds: Annotated[int, Option("--seeds", min=1, help="Networks for each method.")] = 3,
    activation: Annotated[str, Option(help="relu or sigmoid.")] = "relu",
    sparse: Annotated[bool, Option("--sparse", help="Networks trained to be pruned, instead.")] = False,
    device: Device = "",
    jobs: Jobs = 2,
    seed: Seed = 0,
    out: Out = Path("out/pruning"),
    quiet: Quiet = False,
) -> None:
    """Figure 2: accuracy after pruning by signal-to-noise ratio, with every method."""
    require("matplotlib")
    from bayesadam.experiments import pruning as experiment

    where = _device(device)
    asked: Any = {"data": data, "n_seeds": seeds, "epochs": epochs}
    own: Any = {} if sparse else {"activation": activation, **_chosen(methods=methods)}
    settings = experiment.SparseSettings(**asked) if sparse else experiment.PruningSettings(**asked, **own)
    shared: Any = {"device": where, "jobs": jobs if where == "cpu" else 1}
    experiment.run_pruning(seed=seed, out=out, quiet=quiet, settings=settings, **shared)


_Set = Option("--set", metavar="NAME=VALUE", help="Change one of the settings, such as epsilon=0.02; repeatable.")


@app.command()
def bandits(
    problems: Annotated[str | None, Option(help="Which problems, separated by commas; the paper's by default.")] = None,
    agents: Annotated[str | None, Option(help="Which agents, separated by commas; the paper's by default.")] = None,
    runs: Annotated[int, Option(min=1, help="Runs of each cell.")] = 10,
    rounds: Annotated[int | None, Option(min=1, help="Rounds of each run; the problem's by default.")] = None,
    settings: Annotated[str, Option(help="tuned, one setting for all problems, or paper.")] = "tuned",
    change: Annotated[list[str] | None, _Set] = None,
    engine: Annotated[str, Option(help="local, or ray to distribute the cells over a Ray cluster.")] = "local",
    device: Device = "",
    seed: Seed = 0,
    out: Out = Path("out/bandits"),
    quiet: Quiet = False,
) -> None:
    """Table 1: Thompson sampling on the bandit problems with every agent."""
    require("matplotlib")
    from bayesadam.experiments.bandits import BanditSettings, run_bandits

    chosen = _chosen(problems=problems, agents=agents)
    asked = BanditSettings(runs=runs, rounds=rounds, settings=settings, changes=_changes(change or []), **chosen)
    run_bandits(seed=seed, out=out, quiet=quiet, settings=asked, device=_device(device), engine=engine)


_Quick = Option("--quick", help="Few epochs, seeds and rounds, on embedded data and what is on this machine.")
_Only = Option(help="What to run where missing: regression, pruning, bandits; all by default.")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Holds the runs, and the page; made if absent.")],
    quick: Annotated[bool, _Quick] = False,
    only: Annotated[str | None, _Only] = None,
    settings: Annotated[str, Option(help="The bandits': tuned, one setting for all problems, or paper.")] = "",
    device: Device = "",
    jobs: Jobs = 2,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Figure 1, Figure 2 and Table 1 on one HTML page: runs in DIR are taken as they are, missing ones are run."""
    require("matplotlib")
    require("jinja2")
    from bayesadam.experiments.report import ReportSettings, run_report

    asked = ReportSettings(quick=quick, settings=settings or None, **_chosen(only=only))
    run_report(seed=seed, out=folder, quiet=quiet, settings=asked, device=_device(device), jobs=jobs)


@app.command()
@_reads_checkpoint
def prune(
    checkpoint: Checkpoint,
    fraction: Annotated[float, Option(min=0, max=1, help="The share of weights to remove.")],
    out: Annotated[Path, Option("--out", "-o", help="The file to write; .safetensors for the weights alone.")],
    options: CheckpointOptions,
    ranking: Annotated[str, Option(help="snr, magnitude or saliency.")] = "snr",
    scope: Annotated[str, Option(help="global, or layer for the same share of each parameter.")] = "global",
    exclude: Annotated[str, Option(help="Parameters to leave whole: names, patterns, biases.")] = "",
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Prune a saved network by its optimiser's state, without the model and without data."""
    from bayesadam.experiments.saved_file import run_prune

    settings: Any = {"fraction": fraction, "ranking": ranking, "scope": scope, "exclude": _names(exclude)}
    run_prune(seed=seed, out=out, quiet=quiet, checkpoint=checkpoint, options=options, **settings)


_Prior = Option(min=0, help="Of the prior; N × the weight decay by default.")


@app.command()
@_reads_checkpoint
def sample(
    checkpoint: Checkpoint,
    out: Annotated[Path, Option("--out", "-o", help="The safetensors file to write.")],
    options: CheckpointOptions,
    n_data: Annotated[float | None, Option(help="Training examples, where the checkpoint does not say.")] = None,
    prior_precision: Annotated[float | None, _Prior] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Draw weights from the posterior of a saved network, tensor by tensor, without the model and without data."""
    from bayesadam.experiments.saved_file import run_sample

    settings: Any = {"n_data": n_data, "prior_precision": prior_precision}
    run_sample(seed=seed, out=out, quiet=quiet, checkpoint=checkpoint, options=options, **settings)


_Compress = Option(help="8bit, a quarter of the bytes; factored, next to none and much coarser; float32 if absent.")


@app.command()
@_reads_checkpoint
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, Option("--out", "-o", help="The safetensors file to write, to lie beside the weights.")],
    options: CheckpointOptions,
    n_data: Annotated[float | None, Option(help="Training examples, where the checkpoint does not say.")] = None,
    batch_size: Annotated[int | None, Option(min=1, help="Examples behind one gradient.")] = None,
    compress: Annotated[str | None, _Compress] = None,
    structure: Annotated[str, Option(help="diagonal, or kronecker for a SOAP's state.")] = "diagonal",
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Write the posterior of a saved network as a small file to publish beside its weights, without the model and data."""
    from bayesadam.experiments.saved_file import run_export

    settings: Any = {"n_data": n_data, "batch_size": batch_size, "compress": compress, "structure": structure}
    run_export(seed=seed, out=out, quiet=quiet, checkpoint=checkpoint, options=options, **settings)


_Base = Option(help="The network before fine-tuning, for gradient matching: a checkpoint or weights alone.")
_Method = Option(help="fisher, gradient-matching or kronecker; with a base gradient-matching by default, else fisher.")
_Count = Option(
    "--weight", help="How much a checkpoint is to count, given once for each in their order; 1 each by default."
)
_Merged = typer.Argument(
    help="What the trainers saved: weights and optimiser state, in one file or next to each other."
)


@app.command()
@_reads_checkpoint
def merge(
    checkpoints: Annotated[list[Path], _Merged],
    out: Annotated[Path, Option("--out", "-o", help="The safetensors file to write.")],
    options: CheckpointOptions,
    base: Annotated[Path | None, _Base] = None,
    method: Annotated[str | None, _Method] = None,
    weight: Annotated[list[float] | None, _Count] = None,
    quiet: Quiet = False,
) -> None:
    """Make one network of several that were fine-tuned from one start, without the model and without data."""
    from bayesadam.experiments.merging import run_merge

    settings: Any = {"base": base, "method": method, "weights": weight or None}
    run_merge(out=out, quiet=quiet, checkpoints=checkpoints, options=options, **settings)


_NData = Option(help="Training examples; without them only the order of SNR means something.")
_Json = Option("--json", help='Print the inspection, or {"error": …}, as one JSON object and nothing else.')
_Why = Option("--why", help="Say how the file was read: container, keys, optimiser, rule of matching.")


@app.command()
@_reads_checkpoint
def inspect(
    checkpoint: Checkpoint,
    options: CheckpointOptions,
    n_data: Annotated[float | None, _NData] = None,
    snr: Annotated[float | None, Option(min=0, help="Count weights below this; 1 where N is known.")] = None,
    as_json: Annotated[bool, _Json] = False,
    why: Annotated[bool, _Why] = False,
    seed: Seed = 0,
    out: Out = Path("out/inspect"),
    quiet: Quiet = False,
) -> None:
    """Report what a saved optimiser state says about the weights, without the model and without data."""
    require("matplotlib")
    from bayesadam.experiments.inspection import run_inspect

    settings: Any = {"json": as_json, "why": why, "n_data": n_data, "snr": snr}
    run_inspect(seed=seed, out=out, quiet=quiet, path=checkpoint, options=options, **settings)


@app.command()
def play(
    port: Annotated[int, Option(min=0, max=65535, help="Where to listen on 127.0.0.1; 0 takes any free port.")] = 8765,
    open_browser: Annotated[bool, Option("--open/--no-open", help="Show the page in a browser.")] = True,
    quiet: Quiet = False,
) -> None:
    """A page on this machine: click data onto a plane and watch the bands of five methods change."""
    from bayesadam.play.server import run_play

    run_play(port=port, open_browser=open_browser, quiet=quiet)
