"""The command line. A command parses its options here and does its work in `bayesadam.paper`.

Nothing here imports torch before a command has begun, so that help, errors in options and completion are immediate.
"""

from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from bayesadam._extras import require
from bayesadam._version import __version__
from bayesadam.cli_data import app as data_app
from bayesadam.errors import SettingError

# The names that options take. Those who do the work have them too, and a test holds both together.
REGRESSION_METHODS = (
    *("gp", "badam", "mc-dropout", "bbb", "vadam"),
    *("map", "laplace-diagonal", "laplace-full", "swag", "ivon", "ensemble"),
)
PRUNING_METHODS = ("badam", "mc-dropout", "bbb", "vadam", "swag", "ivon", "laplace-diagonal")
PROBLEMS = ("mushroom", "financial", "jester", "statlog", "adult", "covertype", "census", "wheel")
AGENTS = (
    *("hybrid", "badam", "badam-map", "mc-dropout", "bbb", "vadam", "greedy", "uniform"),
    *("epsilon-greedy", "ivon", "neural-linear", "linear", "bootstrap"),
)
EXPERIMENTS = ("regression", "pruning", "bandits")
RANKINGS = ("snr", "snr-posterior", "magnitude", "saliency")
SCOPES = ("global", "layer")
MERGING_METHODS = ("fisher", "gradient-matching", "kronecker")
COMPRESSIONS = ("8bit", "factored")
STRUCTURES = ("diagonal", "kronecker")
IMAGE_SETS = ("mnist", "fashion-mnist", "digits")
ACTIVATIONS = ("relu", "tanh", "sigmoid", "silu", "gelu", "elu")
BANDIT_SETTINGS = ("paper", "tuned")
ENGINES = ("local", "ray")
DEVICES = ("cpu", "cuda")

_FILES = "On a file of yours (no model and no data needed)"
_LOOK = "To look at"
_PAPER = "The paper's experiments, and data"


class _Group(TyperGroup):
    """Lists its commands panel by panel, and ends Ctrl-C in one line and exit code 130, which differs in typer's versions."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            if not command.hidden:
                panel = getattr(command, "rich_help_panel", None) or "Commands"
                panels.setdefault(panel, []).append((name, command.get_short_help_str(formatter.width)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("bayesadam: interrupted", err=True)
            raise typer.Exit(130) from None


# Plain help: rich's would take longer to import than all else. An error of ours is one line, printed by `main`; any other is
# a bug, whose plain traceback belongs in a report.
_LOOKS: Any = {
    "no_args_is_help": True,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"max_content_width": 120},
}

app = typer.Typer(name="bayesadam", cls=_Group, **_LOOKS)
paper = typer.Typer(name="paper", cls=_Group, help="The paper's experiments: Figure 1, Figure 2, Table 1.", **_LOOKS)
app.add_typer(paper, rich_help_panel=_PAPER)
app.add_typer(data_app, name="data", rich_help_panel=_PAPER)


def _among(names: Sequence[str]) -> Any:
    """Completes a list of names, the last of which is being typed."""

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        given = before.split(",")
        found = [before + comma + name for name in names if name not in given]
        return [text for text in found if text.startswith(incomplete)]

    return complete


def _list_of(what: str, names: Sequence[str], default: str) -> Any:
    listed = ", ".join(names)
    return Option(help=f"{what}, separated by commas: {listed}. By default {default}.", autocompletion=_among(names))


def _one_of(names: Sequence[str], what: str) -> Any:
    """An option that takes one of the names: listed in its help, completed by the shell, and all others refused."""

    def known(param: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and value not in names:
            raise SettingError(f"{param.opts[0]} must be one of {', '.join(names)}, got {value!r}")
        return value

    return Option(metavar="|".join(names), help=what, callback=known, autocompletion=lambda: list(names))


Seed = Annotated[int, Option(help="Fixes every random number: same seed, same results.")]
# Of commands that draw no random number: accepted by all, so that one set of options serves several.
UnusedSeed = Annotated[int, Option("--seed", hidden=True)]
Out = Annotated[Path, Option("--out", "-o", metavar="DIR", help="Where the results go: a folder, made if absent.")]
OutFile = Annotated[
    Path,
    Option(
        "--out", "-o", metavar="PATH", help="Where the result goes: a folder, or a file's name, which has an ending."
    ),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the paths written, one per line.")]
Device = Annotated[str | None, _one_of(DEVICES, "Where to compute; by default on cuda where there is one.")]
Jobs = Annotated[int, Option(min=1, help="Parallel processes, on a CPU.")]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="What the trainer saved: weights and optimiser state.")
]
_OptimizerFile = Option(help="The optimiser's state, where it has a file of its own.")
_InOrder = Option("--groups-in-order", help="Vouch that every parameter group was filled in the model's order.")
_WeightsKey = Option(
    metavar="KEY",
    help="Which weights, where the file holds several: model.ema. Repeated for several networks, in the optimiser's order.",
)
_OptimizerKey = Option(metavar="KEY", help="Which optimiser's state, where the file holds several: optimizer_states.0.")


def _checkpoint_options(
    optimizer_file: Annotated[Path | None, _OptimizerFile] = None,
    optimizer: Annotated[
        str, Option(help="The optimiser that wrote the state; identified by its keys if absent.")
    ] = "",
    groups_in_order: Annotated[bool, _InOrder] = False,
    weights_key: Annotated[list[str] | None, _WeightsKey] = None,
    optimizer_key: Annotated[str | None, _OptimizerKey] = None,
) -> Any:
    """The options of every command that reads a checkpoint."""
    from bayesadam.readers import CheckpointOptions

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


def _chosen(option: str, text: str | None, known: Sequence[str]) -> dict[str, Any]:
    """The names given to an option, by its own; nothing where it was left out, which stands for its default."""
    if text is None:
        return {}
    names = _names(text)
    # A wheel has its δ after a colon.
    unknown = [name for name in names if name.partition(":")[0] not in known]
    if not names:
        raise SettingError(
            f"--{option} names nothing: leave it out for the default, or give some of {', '.join(known)}, separated by commas"
        )
    if unknown:
        raise SettingError(
            f"--{option} has no {', '.join(unknown)}: choose from {', '.join(known)}, separated by commas"
        )
    return {option: names}


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


def _device(asked: str | None) -> str:
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device cuda: torch sees no CUDA device here; leave the option out, or say --device cpu")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"bayesadam {__version__}")
        raise typer.Exit


_Version = Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")


@app.callback()
def bayesadam(version: Annotated[bool, _Version] = False) -> None:
    """A Gaussian posterior over a network's weights, read off the adaptive optimiser that trained it.

    --help after a command lists its options; --install-completion makes the shell complete commands, options and names.
    """


_NData = Option(
    metavar="N", help="Training examples; without them only the order of the signal-to-noise ratios means something."
)
_Below = Option(min=0, help="Count the weights with a ratio below this; by default 1, where N is known.")
_Json = Option("--json", help='Print what was found, or {"error": …}, as one JSON object and nothing else.')
_Why = Option("--why", help="Say how the file was read: container, keys, optimiser, rule of matching.")
_Plot = Option("--plot", help="Draw the ratios parameter by parameter: to --out, or to NAME-snr.png here.")
_MayWrite = Option(
    "--out",
    "-o",
    metavar="PATH",
    help="Write metrics.json and the picture to this folder, or the picture to this .png; without it nothing is written.",
)
_Record = Option("--out", "-o", metavar="DIR", help="Write metrics.json to this folder; without it nothing is written.")


@app.command(rich_help_panel=_FILES)
@_reads_checkpoint
def inspect(
    checkpoint: Checkpoint,
    n_data: Annotated[float | None, _NData] = None,
    snr: Annotated[float | None, _Below] = None,
    plot: Annotated[bool, _Plot] = False,
    as_json: Annotated[bool, _Json] = False,
    why: Annotated[bool, _Why] = False,
    seed: Seed = 0,
    out: Annotated[Path | None, _MayWrite] = None,
    quiet: Quiet = False,
    *,
    options: Any,
) -> None:
    """Signal-to-noise ratio and dead weights, layer by layer.

    CHECKPOINT is what a trainer saved, or a posterior of ours: what Posterior.save or `bayesadam export` wrote.
    """
    require("matplotlib")
    from bayesadam.paper.inspection import run_inspect

    settings: Any = {"plot": plot, "json": as_json, "why": why, "n_data": n_data, "snr": snr}
    run_inspect(seed=seed, out=out, quiet=quiet, path=checkpoint, options=options, **settings)


@app.command(rich_help_panel=_FILES)
@_reads_checkpoint
def doctor(
    checkpoint: Checkpoint,
    n_data: Annotated[
        float | None, Option(metavar="N", help="Training examples: the prior that weight decay implies needs them.")
    ] = None,
    as_json: Annotated[bool, _Json] = False,
    out: Annotated[Path | None, _Record] = None,
    quiet: Quiet = False,
    *,
    options: Any,
) -> None:
    """What is wrong or notable about a saved optimiser state.

    To read before a posterior is trusted. Ends with code 1 where no posterior can be read.
    """
    require("matplotlib")
    from bayesadam.paper.inspection import run_doctor

    if not run_doctor(out=out, quiet=quiet, path=checkpoint, options=options, n_data=n_data, json=as_json):
        raise typer.Exit(1)


_Ranking = _one_of(RANKINGS, "By |μ|/σ, the same with a prior (which a file has not), by |θ|, or by ½ θ² v̂.")
_Scope = _one_of(SCOPES, "All weights compete, or the same share is removed from each parameter.")
_Exclude = Option(help='Parameters to leave whole, separated by commas: names, patterns such as "*.norm*", biases.')


@app.command(rich_help_panel=_FILES)
@_reads_checkpoint
def prune(
    checkpoint: Checkpoint,
    fraction: Annotated[float, Option(min=0, max=1, help="The share of weights to remove.")],
    ranking: Annotated[str, _Ranking] = "snr",
    scope: Annotated[str, _Scope] = "global",
    exclude: Annotated[str, _Exclude] = "",
    seed: UnusedSeed = 0,
    out: OutFile = Path("out/prune"),
    quiet: Quiet = False,
    *,
    options: Any,
) -> None:
    """Set the weights with the lowest signal-to-noise ratio to zero.

    All else in the file stays as it was; without --out it goes to out/prune/pruned.*.
    """
    from bayesadam.paper.saved_file import run_prune

    settings: Any = {"fraction": fraction, "ranking": ranking, "scope": scope, "exclude": _names(exclude)}
    run_prune(seed=seed, out=out, quiet=quiet, checkpoint=checkpoint, options=options, **settings)


_Prior = Option(min=0, help="δ of the prior; by default N × the weight decay.")
_N = Option(metavar="N", help="Training examples, where the checkpoint does not say.")


@app.command(rich_help_panel=_FILES)
@_reads_checkpoint
def sample(
    checkpoint: Checkpoint,
    n_data: Annotated[float | None, _N] = None,
    prior_precision: Annotated[float | None, _Prior] = None,
    seed: Seed = 0,
    out: OutFile = Path("out/sample"),
    quiet: Quiet = False,
    *,
    options: Any,
) -> None:
    """Draw the weights once from their posterior.

    The draw is a safetensors file; without --out it is out/sample/sample.safetensors.
    """
    from bayesadam.paper.saved_file import run_sample

    settings: Any = {"n_data": n_data, "prior_precision": prior_precision}
    run_sample(seed=seed, out=out, quiet=quiet, checkpoint=checkpoint, options=options, **settings)


_Base = Option(help="The network before fine-tuning, for gradient matching: a checkpoint or weights alone.")
_Method = _one_of(
    MERGING_METHODS,
    "By default gradient-matching with a base, else fisher; kronecker needs eigenbases, such as SOAP's.",
)
_Count = Option(
    "--weight",
    metavar="NUMBER",
    help="How much a checkpoint is to count, given once for each in their order; 1 each by default.",
)
_Merged = typer.Argument(
    metavar="CHECKPOINT",
    help="What the trainers saved: weights and optimiser state, in one file or next to each other.",
)


@app.command(rich_help_panel=_FILES)
@_reads_checkpoint
def merge(
    checkpoints: Annotated[list[Path], _Merged],
    base: Annotated[Path | None, _Base] = None,
    method: Annotated[str | None, _Method] = None,
    weight: Annotated[list[float] | None, _Count] = None,
    out: OutFile = Path("out/merge"),
    quiet: Quiet = False,
    *,
    options: Any,
) -> None:
    """Make one network of several fine-tuned from one start.

    Weighted by their second moments, as a safetensors file; without --out it is out/merge/merged.safetensors.
    """
    from bayesadam.paper.merging import run_merge

    settings: Any = {"base": base, "method": method, "weights": weight or None}
    run_merge(out=out, quiet=quiet, checkpoints=checkpoints, options=options, **settings)


_Compress = _one_of(
    COMPRESSIONS, "8bit takes a quarter of the bytes; factored next to none, and is much coarser; float32 if absent."
)
_Structure = _one_of(STRUCTURES, "kronecker is for a SOAP's state.")


@app.command(rich_help_panel=_FILES)
@_reads_checkpoint
def export(
    checkpoint: Checkpoint,
    n_data: Annotated[float | None, _N] = None,
    batch_size: Annotated[int | None, Option(min=1, help="Examples behind one gradient.")] = None,
    compress: Annotated[str | None, _Compress] = None,
    structure: Annotated[str, _Structure] = "diagonal",
    seed: UnusedSeed = 0,
    out: OutFile = Path("out/export"),
    quiet: Quiet = False,
    *,
    options: Any,
) -> None:
    """Write the posterior as a small file to publish beside the weights.

    Without --out it is out/export/posterior.safetensors.
    """
    from bayesadam.paper.saved_file import run_export

    settings: Any = {"n_data": n_data, "batch_size": batch_size, "compress": compress, "structure": structure}
    run_export(seed=seed, out=out, quiet=quiet, checkpoint=checkpoint, options=options, **settings)


@app.command(rich_help_panel=_LOOK)
def demo(seed: Seed = 0, out: Out = Path("out/demo"), quiet: Quiet = False) -> None:
    """Train a small network, read its posterior, calibrate, predict, prune.

    In ten seconds, on embedded data: one picture, one table.
    """
    # Before any training, so that a missing package costs no time.
    require("matplotlib")
    from bayesadam.paper.demo import run_demo

    run_demo(seed=seed, out=out, quiet=quiet)


@app.command(rich_help_panel=_LOOK)
def play(
    port: Annotated[int, Option(min=0, max=65535, help="Where to listen on 127.0.0.1; 0 takes any free port.")] = 8765,
    open_browser: Annotated[bool, Option("--open/--no-open", help="Show the page in a browser.")] = True,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print only the address.")] = False,
) -> None:
    """Click data onto a plane and watch the methods' bands change.

    A page on this machine, served to it alone.
    """
    from bayesadam.play.server import run_play

    run_play(port=port, open_browser=open_browser, quiet=quiet)


def _of_the_paper(command: Callable[..., None]) -> Callable[..., None]:
    """A command of `bayesadam paper`, which still runs without that word, hidden and with a hint."""

    @wraps(command)
    def hinting(**given: Any) -> None:
        command(**given)
        if not given["quiet"]:
            name = command.__name__
            typer.echo(f"bayesadam: {name} is now `bayesadam paper {name}`; the short name goes on working", err=True)

    app.command(hidden=True)(hinting)
    paper.command()(command)
    return command


@_of_the_paper
def regression(
    methods: Annotated[str | None, _list_of("Which methods", REGRESSION_METHODS, "all")] = None,
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
    chosen = _chosen("methods", methods, REGRESSION_METHODS)
    require("matplotlib")
    from bayesadam.paper.regression import RegressionSettings, run_regression

    settings = RegressionSettings(n_seeds=seeds, epochs=epochs, gap=gap, **chosen)
    run_regression(seed=seed, out=out, quiet=quiet, settings=settings.quick() if quick else settings, jobs=jobs)


_Sparse = Option("--sparse", help="Networks trained to be pruned, instead; --methods and --activation do not count.")


@_of_the_paper
def pruning(
    data: Annotated[str, _one_of(IMAGE_SETS, "Which images.")] = "mnist",
    methods: Annotated[str | None, _list_of("Which methods", PRUNING_METHODS, "all")] = None,
    epochs: Annotated[int, Option(min=1, help="Passes over the training images.")] = 100,
    seeds: Annotated[int, Option("--seeds", min=1, help="Networks for each method.")] = 3,
    activation: Annotated[str, _one_of(ACTIVATIONS, "Of the hidden units.")] = "relu",
    sparse: Annotated[bool, _Sparse] = False,
    device: Device = None,
    jobs: Jobs = 2,
    seed: Seed = 0,
    out: Out = Path("out/pruning"),
    quiet: Quiet = False,
) -> None:
    """Figure 2: accuracy after pruning, with every method."""
    chosen = _chosen("methods", methods, PRUNING_METHODS)
    require("matplotlib")
    from bayesadam.paper import pruning as experiment

    where = _device(device)
    asked: Any = {"data": data, "n_seeds": seeds, "epochs": epochs}
    own: Any = {} if sparse else {"activation": activation, **chosen}
    settings = experiment.SparseSettings(**asked) if sparse else experiment.PruningSettings(**asked, **own)
    shared: Any = {"device": where, "jobs": jobs if where == "cpu" else 1}
    experiment.run_pruning(seed=seed, out=out, quiet=quiet, settings=settings, **shared)


_SETTINGS = "The agents': those that the paper states, or tuned ones, the same for all problems."
_Problems = _list_of("Which problems (wheel:0.95 is the wheel with δ = 0.95)", PROBLEMS, "the paper's")
_Set = Option("--set", metavar="NAME=VALUE", help="Change one of the settings, such as epsilon=0.02; repeatable.")


@_of_the_paper
def bandits(
    problems: Annotated[str | None, _Problems] = None,
    agents: Annotated[str | None, _list_of("Which agents", AGENTS, "the paper's")] = None,
    runs: Annotated[int, Option(min=1, help="Runs of each cell.")] = 10,
    rounds: Annotated[int | None, Option(min=1, help="Rounds of each run; the problem's by default.")] = None,
    settings: Annotated[str, _one_of(BANDIT_SETTINGS, _SETTINGS)] = "tuned",
    change: Annotated[list[str] | None, _Set] = None,
    engine: Annotated[str, _one_of(ENGINES, "ray distributes the cells over a Ray cluster.")] = "local",
    device: Device = None,
    seed: Seed = 0,
    out: Out = Path("out/bandits"),
    quiet: Quiet = False,
) -> None:
    """Table 1: Thompson sampling on the bandit problems."""
    chosen = _chosen("problems", problems, PROBLEMS) | _chosen("agents", agents, AGENTS)
    require("matplotlib")
    from bayesadam.paper.bandits import BanditSettings, run_bandits

    asked = BanditSettings(runs=runs, rounds=rounds, settings=settings, changes=_changes(change or []), **chosen)
    run_bandits(seed=seed, out=out, quiet=quiet, settings=asked, device=_device(device), engine=engine)


_Quick = Option("--quick", help="Few epochs, seeds and rounds, on embedded data and what is on this machine.")
_Only = _list_of("What to run where missing", EXPERIMENTS, "all")


@_of_the_paper
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Holds the runs, and the page; made if absent.")],
    quick: Annotated[bool, _Quick] = False,
    only: Annotated[str | None, _Only] = None,
    settings: Annotated[
        str | None, _one_of(BANDIT_SETTINGS, f"{_SETTINGS} By default those of a run in DIR, or tuned.")
    ] = None,
    device: Device = None,
    jobs: Jobs = 2,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Figure 1, Figure 2 and Table 1 on one HTML page.

    Runs in DIR are taken as they are, missing ones are run.
    """
    chosen = _chosen("only", only, EXPERIMENTS)
    require("matplotlib")
    require("jinja2")
    from bayesadam.paper.report import ReportSettings, run_report

    asked = ReportSettings(quick=quick, settings=settings, **chosen)
    run_report(seed=seed, out=folder, quiet=quiet, settings=asked, device=_device(device), jobs=jobs)
