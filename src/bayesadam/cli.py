"""The command line. A command parses its options here, and its work is a function elsewhere.

Nothing here imports torch before a command has begun: the names that an option takes are read from their registry when
its help, its check or its completion needs them.
"""

from ast import literal_eval
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from bayesadam._extras import require
from bayesadam._version import __version__
from bayesadam.errors import BayesAdamError, SettingError


class _Group(TyperGroup):
    """Ends Ctrl-C in one line and exit code 130, in every version of typer."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("bayesadam: interrupted", err=True)
            raise typer.Exit(130) from None


class _Command(TyperCommand):
    """Puts the names that an option takes into its help, when that is shown."""

    def get_help(self, ctx: Any) -> str:
        for param in self.params:
            several, source = (param.metavar or "").startswith("NAMES "), (param.metavar or "").removeprefix("NAMES ")
            if ":" in source:
                param.metavar = "NAMES" if several else "|".join(names(source))
                if several:
                    param.help += f", separated by commas: {', '.join(names(source))}."  # type: ignore[attr-defined]
        return super().get_help(ctx)


# Plain help: rich's would take longer to import than all else. An error of ours is one line, printed by `main`; any
# other is a bug, whose plain traceback belongs in a report.
_LOOKS: Any = {"no_args_is_help": True, "rich_markup_mode": None, "pretty_exceptions_enable": False}
_LOOKS |= {"context_settings": {"max_content_width": 120}}
app = typer.Typer(name="bayesadam", cls=_Group, **_LOOKS)
paper = typer.Typer(
    name="paper", cls=_Group, help="The paper's experiments: Figure 1, Figure 2, Table 1, costs.", **_LOOKS
)
data_app = typer.Typer(name="data", help="The paper's data sets: list them, fetch them, verify them.", **_LOOKS)
app.add_typer(paper)
app.add_typer(data_app)


def names(source: str) -> tuple[str, ...]:
    """The names in a registry, a tuple or a Literal, by module and attribute; or words, separated by spaces.

    >>> names("bayesadam.data.loaders:IMAGE_SETS"), names(":cpu cuda")
    (('mnist', 'fashion-mnist', 'digits'), ('cpu', 'cuda'))
    """
    module, _, name = source.partition(":")
    if not module:
        return tuple(name.split())
    found = getattr(import_module(module), name)
    return get_args(found) or tuple(found)


def _named(source: str, what: str, *, several: bool = False) -> Any:
    """An option that takes one of the `names`, or several as a tuple; its help lists them, all others are refused."""

    def known(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> Any:
        # Completion does not wait for the registry of an option that is not being completed.
        if value is None or ctx.resilient_parsing:
            return value
        given = _split(value) if several else (value,)
        # A wheel has its δ after a colon.
        if not given or any(name.partition(":")[0] not in names(source) for name in given):
            which = "some, separated by commas," if several else "one"
            raise SettingError(f"{param.opts[0]} must be {which} of {', '.join(names(source))}, got {value!r}")
        return given if several else value

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [found for name in names(source) if (found := before + comma + name).startswith(incomplete)]

    metavar = f"NAMES {source}" if several else source
    return Option(metavar=metavar, help=what, callback=known, autocompletion=complete)


_names_of = partial(_named, several=True)


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _out(metavar: str, help: str) -> Any:
    return Option("--out", "-o", metavar=metavar, help=help)


Seed = Annotated[int, Option(help="Fixes every random number: same seed, same results.")]
Out = Annotated[Path, _out("DIR", "Where the results go: a folder, made if absent.")]
OutFile = Annotated[Path, _out("PATH", "Where the result goes: a folder, or a file's name, which has an ending.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the paths written, one per line.")]
Device = Annotated[str | None, _named(":cpu cuda", "Where to compute; by default on cuda where there is one.")]
Json = Annotated[bool, Option("--json", help='Print what was found, or {"error": …}, as one JSON object alone.')]
NData = Annotated[float | None, Option(metavar="N", help="Training examples, where the checkpoint does not say.")]
_Saved = typer.Argument(metavar="CHECKPOINT", help="What the trainer saved: weights and optimiser state.")
Checkpoint = Annotated[Path, _Saved]


_IN_ORDER = "Vouch that every parameter group was filled in the model's order."
_WEIGHTS_KEY = "Which weights, where the file holds several: model.ema. Repeat it for several networks."


def _checkpoint_options(
    optimizer_file: Annotated[Path | None, Option(help="The optimiser's state, where it is another file.")] = None,
    optimizer: Annotated[str, Option(help="What wrote the state; identified by its keys if absent.")] = "",
    groups_in_order: Annotated[bool, Option("--groups-in-order", help=_IN_ORDER)] = False,
    weights_key: Annotated[list[str] | None, Option(metavar="KEY", help=_WEIGHTS_KEY)] = None,
    optimizer_key: Annotated[str | None, Option(metavar="KEY", help="Which optimiser's state, of several.")] = None,
) -> Any:
    """The options of every command that reads a checkpoint."""
    from bayesadam.readers import CheckpointOptions

    weights = ",".join(weights_key) if weights_key else None
    return CheckpointOptions(optimizer_file, optimizer or None, None, groups_in_order, weights, optimizer_key)


def _on_a_file(command: Callable[..., None]) -> Callable[..., None]:
    """A command `name`, whose work is `commands.files.run_name`, with the options of `_checkpoint_options` besides.

    Of several checkpoints each has a state of its own, so that no option names its file.
    """
    own = signature(command, eval_str=True).parameters
    added = dict(signature(_checkpoint_options, eval_str=True).parameters)
    if "checkpoints" in own:
        del added["optimizer_file"]

    def run(**given: Any) -> None:
        options = _checkpoint_options(**{name: given.pop(name) for name in added})
        work = getattr(import_module("bayesadam.commands.files"), f"run_{command.__name__}")
        if work(options=options, **given) is False:
            raise typer.Exit(1)

    parameters = [*own.values(), *added.values()]
    # By keyword alone, so that options with and without a default may come in any order.
    run.__signature__ = Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return app.command(cls=_Command)(run)


def _of_the_paper(settings: str) -> Callable[..., Any]:
    """A command `name` of `bayesadam paper`, which also runs without that word.

    Its work is `paper.NAME.run_NAME`. All but the common options are fields of its `settings`; what the command
    returns replaces them.
    """

    def register(command: Callable[..., Any]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            require("matplotlib")
            given |= command(**given) or {}
            module = import_module(f"bayesadam.paper.{command.__name__}")
            own: dict[str, Any] = {name: given.pop(name) for name in ("seed", "out", "quiet", "quick") if name in given}
            if "device" in given:
                own["device"] = _device(given.pop("device"))
            if settings:
                own["settings"] = getattr(module, settings)(**{k: v for k, v in given.items() if v is not None})
            getattr(module, f"run_{command.__name__}")(**own)

        app.command(hidden=True, cls=_Command)(run)
        return paper.command(cls=_Command)(run)

    return register


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


@_on_a_file
def inspect(
    checkpoint: Checkpoint,
    n_data: Annotated[float | None, Option(metavar="N", help="Training examples; the order needs none.")] = None,
    plot: Annotated[bool, Option("--plot", help="Draw the ratios: to --out, or to NAME-snr.png here.")] = False,
    json: Json = False,
    why: Annotated[bool, Option("--why", help="Say how the file was read: keys, optimiser, matching.")] = False,
    out: Annotated[Path | None, _out("PATH", "A folder for metrics.json and the picture, or that .png.")] = None,
    quiet: Quiet = False,
) -> None:
    """Signal-to-noise ratio and dead weights, layer by layer.

    CHECKPOINT is what a trainer saved, or a posterior of ours: what Posterior.save or `bayesadam export` wrote.
    """


@_on_a_file
def doctor(
    checkpoint: Checkpoint,
    n_data: NData = None,
    json: Json = False,
    out: Annotated[Path | None, _out("DIR", "Write metrics.json to this folder.")] = None,
    quiet: Quiet = False,
) -> None:
    """What is wrong or notable about a saved optimiser state.

    To read before a posterior is trusted. Ends with code 1 where no posterior can be read.
    """


_Ranking = _named("bayesadam.pruning:RANKINGS", "The score, of which the lowest are removed; see docs/pruning.md.")
_Exclude = Option(help='Leave whole, separated by commas: names, "*.norm*", biases.', callback=_split)
_Scope = _named("bayesadam.pruning.masks:Scope", "All weights compete, or each parameter loses the same share.")


@_on_a_file
def prune(
    checkpoint: Checkpoint,
    fraction: Annotated[float, Option(min=0, max=1, help="The share of weights to remove.")],
    ranking: Annotated[str, _Ranking] = "snr",
    scope: Annotated[str, _Scope] = "global",
    exclude: Annotated[str, _Exclude] = "",
    out: OutFile = Path("out/prune"),
    quiet: Quiet = False,
) -> None:
    """Set the weights with the lowest signal-to-noise ratio to zero.

    All else in the file stays as it was; without --out it goes to out/prune/pruned.*.
    """


@_on_a_file
def sample(
    checkpoint: Checkpoint,
    n_data: NData = None,
    prior_precision: Annotated[float | None, Option(min=0, help="δ; by default N × the weight decay.")] = None,
    seed: Seed = 0,
    out: OutFile = Path("out/sample"),
    quiet: Quiet = False,
) -> None:
    """Draw the weights once from their posterior.

    The draw is a safetensors file; without --out it is out/sample/sample.safetensors.
    """


_Method = _named("bayesadam.merging:METHODS", "By default gradient-matching with a base, else fisher.")
_Merged = typer.Argument(metavar="CHECKPOINT", help="What the trainers saved: weights and optimiser state.")
_Count = Option("--weight", metavar="NUMBER", help="How much a checkpoint counts, once for each; 1 each by default.")


@_on_a_file
def merge(
    checkpoints: Annotated[list[Path], _Merged],
    base: Annotated[Path | None, Option(help="The network before fine-tuning, for gradient matching.")] = None,
    method: Annotated[str | None, _Method] = None,
    weights: Annotated[list[float] | None, _Count] = None,
    out: OutFile = Path("out/merge"),
    quiet: Quiet = False,
) -> None:
    """Make one network of several fine-tuned from one start.

    Weighted by their second moments, as a safetensors file; without --out it is out/merge/merged.safetensors.
    """


_Compress = _named("bayesadam.readers.compression:Compression", "bfloat16 is half of the bytes, factored far less.")
_Structure = _named("bayesadam.gaussian.bases:STRUCTURES", "kronecker is for the state of a SOAP.")


@_on_a_file
def export(
    checkpoint: Checkpoint,
    n_data: NData = None,
    batch_size: Annotated[int | None, Option(min=1, help="Examples behind one gradient.")] = None,
    compress: Annotated[str | None, _Compress] = None,
    structure: Annotated[str, _Structure] = "diagonal",
    out: OutFile = Path("out/export"),
    quiet: Quiet = False,
) -> None:
    """Write the posterior as a small file, to publish.

    Without --out it is out/export/posterior.safetensors.
    """


_Posterior = typer.Argument(metavar="POSTERIOR", help="What `Posterior.save` wrote, calibrated.")
_Model = typer.Argument(metavar="FACTORY", help="module:function that gives the model, with its buffers.")
_Example = Option(metavar="FACTORY", help="module:function that gives a batch of two, where shapes vary.")


@app.command()
def deploy(
    posterior: Annotated[Path, _Posterior],
    model: Annotated[str, _Model],
    example: Annotated[str | None, _Example] = None,
    level: Annotated[float, Option(help="Of prediction sets and intervals.")] = 0.95,
    out: OutFile = Path("out/deploy"),
    quiet: Quiet = False,
) -> None:
    """Write the calibrated model with its doubt, as .pt2 or .onnx.

    Torch alone runs the one, onnxruntime the other; the ending of --out says which. Without it, it is
    out/deploy/served.pt2.
    """
    from bayesadam.commands.files import run_deploy

    run_deploy(posterior=posterior, model=model, example=example, level=level, out=out, quiet=quiet)


@app.command()
def demo(seed: Seed = 0, out: Out = Path("out/demo"), quiet: Quiet = False) -> None:
    """Train a small network, read its posterior, calibrate, prune.

    In ten seconds, on embedded data: one picture, one table.
    """
    # Before any training, so that a missing package costs no time.
    require("matplotlib")
    from bayesadam.commands.demo import run_demo

    run_demo(seed=seed, out=out, quiet=quiet)


@app.command()
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


@_of_the_paper("RegressionSettings")
def regression(
    methods: Annotated[str | None, _names_of("bayesadam.paper.regression:TITLES", "Methods, by default all")] = None,
    epochs: Annotated[int, Option(min=1, help="Passes over the 200 training points.")] = 20_000,
    n_seeds: Annotated[int, Option("--seeds", min=1, help="Data sets and networks for each method.")] = 5,
    gap: Annotated[bool, Option("--gap", help="Train with a hole in the middle of the range.")] = False,
    seed: Seed = 0,
    out: Out = Path("out/regression"),
    quiet: Quiet = False,
) -> None:
    """Figure 1: the paper's toy regression with every method."""


@_of_the_paper("PruningSettings")
def pruning(
    data: Annotated[str, _named("bayesadam.data.loaders:IMAGE_SETS", "Which images.")] = "mnist",
    methods: Annotated[str | None, _names_of("bayesadam.paper.pruning:TITLES", "Methods, by default all")] = None,
    epochs: Annotated[int, Option(min=1, help="Passes over the training images.")] = 100,
    n_seeds: Annotated[int, Option("--seeds", min=1, help="Networks for each method.")] = 5,
    activation: Annotated[str, _named("bayesadam.engine.network:ACTIVATIONS", "Of the hidden units.")] = "relu",
    sparse: Annotated[bool, Option("--sparse", help="Networks trained to be pruned, in their own ways.")] = False,
    device: Device = None,
    seed: Seed = 0,
    out: Out = Path("out/pruning"),
    quiet: Quiet = False,
) -> None:
    """Figure 2: accuracy after pruning, with every method."""


def _change(text: str) -> tuple[str, Any]:
    """Name and value: one of Python's numbers or tuples, True, False, None, or else text."""
    name, _, value = (part.strip() for part in text.partition("="))
    if not (name and value):
        raise SettingError(f"--set takes name=value, such as epsilon=0.02, got {text!r}")
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


_Settings = _named("bayesadam.bandits:SETTINGS", "The agents': those that the paper states, or tuned ones.")
_Problems = _names_of("bayesadam.bandits:PROBLEMS", "Problems (wheel:0.95 has δ = 0.95), by default the paper's")
_Set = Option("--set", metavar="NAME=VALUE", help="Change a setting, such as epsilon=0.02; repeatable.")


@_of_the_paper("BanditSettings")
def bandits(
    problems: Annotated[str | None, _Problems] = None,
    agents: Annotated[str | None, _names_of("bayesadam.bandits:PAPER_AGENTS", "Agents, by default the paper's")] = None,
    runs: Annotated[int, Option(min=1, help="Runs of each cell.")] = 10,
    rounds: Annotated[int | None, Option(min=1, help="Rounds of each run; the problem's by default.")] = None,
    settings: Annotated[str, _Settings] = "tuned",
    changes: Annotated[list[str] | None, _Set] = None,
    device: Device = None,
    seed: Seed = 0,
    out: Out = Path("out/bandits"),
    quiet: Quiet = False,
) -> Any:
    """Table 1: Thompson sampling on the bandit problems."""
    return {"changes": dict(map(_change, changes or ()))}


@_of_the_paper("CostSettings")
def cost(
    data: Annotated[str, _named("bayesadam.data.loaders:IMAGE_SETS", "Which images.")] = "mnist",
    rounds: Annotated[int, Option(min=1, help="How often everything is timed.")] = 10,
    seed: Seed = 0,
    out: Out = Path("out/cost"),
    quiet: Quiet = False,
) -> None:
    """What a step, a posterior and a prediction cost, next to Adam."""


@_of_the_paper("")
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


def _data_sets(what: str) -> Any:
    complete: Any = lambda: [*names("bayesadam.data.fetching:DATA_SETS"), "all"]  # noqa: E731
    return typer.Argument(metavar="NAME", help=what, autocompletion=complete)


@data_app.command("list")
def list_data() -> None:
    """Show every data set, and where it was found."""
    from bayesadam.data import data_sets, fetching, find

    cache = fetching.cache_folder() or f"none: name a folder in {fetching.CACHE_VARIABLE}"
    typer.echo(f"{fetching.DATA_VARIABLE}: {fetching.data_folder() or 'not set'}\ncache: {cache}\n")
    wide, wider = (max(len(getattr(record, part)) for record in data_sets()) for part in ("name", "title"))
    for record in data_sets():
        found = find(record.name)
        where = " and ".join(dict.fromkeys(str(path.parent) for path in found.values())) or "absent"
        if found and len(found) < len(record.files):
            where = f"{len(found)} of {len(record.files)} files: {where}"
        typer.echo(f"{record.name:{wide}}  {record.title:{wider}}  {'embedded' if record.embedded else where}")


@data_app.command("fetch")
def fetch_data(
    sets: Annotated[list[str], _data_sets("Data sets, or `all`; `bayesadam data list` shows them.")],
    quiet: Quiet = False,
) -> None:
    """Bring data sets to this machine.

    What BAYESADAM_DATA or the cache has is checked, the rest is downloaded. Ends with code 1 where a set is not whole.
    """
    from bayesadam.data import data_set, data_sets, fetch

    failed = False
    # Every name is checked before any work.
    for record in data_sets() if sets == ["all"] else [data_set(name) for name in sets]:
        try:
            for path in fetch(record.name, progress=not quiet):
                typer.echo(path)
        except BayesAdamError as error:
            typer.echo(f"bayesadam: {error}", err=True)
            failed = True
        if record.embedded and not quiet:
            typer.echo(f"{record.name} is embedded: there is nothing to fetch")
    if failed:
        raise typer.Exit(1)


@data_app.command("verify")
def verify_data(
    sets: Annotated[list[str], _data_sets("Data sets, or `all` that are here.")],
    quiet: Quiet = False,
) -> None:
    """Compare the files here with their checksums.

    Ends with code 1 where one is wrong or missing.
    """
    from bayesadam.data import data_set, data_sets, find, verify

    failed = False
    for record in [each for each in data_sets() if find(each.name)] if sets == ["all"] else map(data_set, sets):
        wrong = verify(record.name)
        failed |= bool(wrong)
        for file, what in wrong.items():
            typer.echo(f"{record.name}/{file}: {what}", err=True)
        if not wrong and not quiet:
            typer.echo(f"{record.name}: ok")
    if failed:
        raise typer.Exit(1)
