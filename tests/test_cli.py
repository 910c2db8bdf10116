"""The command line: one line an error, the right exit code, and files that are whole or absent."""

import hashlib
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import bayesadam as ba
from bayesadam import __version__, cli
from bayesadam.__main__ import main
from bayesadam._files import replacing
from bayesadam.bandits import PAPER_AGENTS, PROBLEMS
from bayesadam.commands import demo
from bayesadam.commands.running import Run
from bayesadam.data import fetching
from bayesadam.errors import FileError, SettingError
from bayesadam.paper import pruning, regression
from processes import PATIENCE, eventually

SOURCE = Path(__file__).parents[1] / "src"
SMALL = demo.DemoSettings(steps=10, draws=5, n_test=20)


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def raising(error: BaseException):
    def command(*_: object, **__: object) -> None:
        raise error

    return command


@pytest.fixture
def small_demo(monkeypatch):
    monkeypatch.setattr(demo, "run_demo", partial(demo.run_demo, settings=SMALL))


# --- asking ---------------------------------------------------------------------------------------------------------


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"bayesadam {__version__}\n"


def test_help_names_the_commands_and_their_options(capsys):
    assert run("--help") == 0
    assert "demo" in capsys.readouterr().out
    assert run("demo", "--help") == 0
    text = capsys.readouterr().out
    for option in ("--seed", "--out", "--quiet"):
        assert option in text


def test_an_unknown_command_is_refused(capsys):
    assert run("nonsense") == 2
    assert "nonsense" in capsys.readouterr().err


WITHOUT_TORCH = """
import sys
from bayesadam.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code or 0
print(code, sorted({"torch", "numpy", "matplotlib", "rich.console"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["inspect", "--help"], 0),
        pytest.param(["paper", "--help"], 0, marks=pytest.mark.slow),
        pytest.param(["data", "fetch", "--help"], 0, marks=pytest.mark.slow),
        (["nonsense"], 2),
        (["prune", "a.pt", "--fraction", "2"], 2),
    ],
    ids=str,
)
def test_help_and_errors_in_options_do_not_wait_for_torch(arguments, code):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == f"{code} []"


def test_no_line_of_a_list_of_commands_is_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for group in ((), ("paper",), ("data",)):
        assert run(*group, "--help") == 0
        assert "..." not in capsys.readouterr().out.replace("[ARGS]...", "")


@pytest.mark.parametrize(("command", "drawn"), [("prune", False), ("export", False), ("sample", True)])
def test_a_seed_is_offered_where_something_is_drawn(command, drawn, capsys):
    assert run(command, "--help") == 0
    assert ("--seed" in capsys.readouterr().out) == drawn


def listed(text: str) -> list[str]:
    """The commands in a help text, in order."""
    return re.findall(r"^  ([a-z]+) +[A-Z]", text, flags=re.MULTILINE)


def test_the_users_commands_come_first_and_the_papers_are_together(capsys):
    assert run("--help") == 0
    commands = listed(capsys.readouterr().out)
    own = ["inspect", "doctor", "prune", "sample", "merge", "export", "deploy"]
    assert commands == [*own, "demo", "play", "paper", "data"]
    assert run("paper", "--help") == 0
    assert listed(capsys.readouterr().out) == ["regression", "pruning", "bandits", "cost", "report"]


@pytest.mark.parametrize("name", ["regression", "pruning", "bandits", "cost", "report"])
def test_the_short_names_go_on_working(name, tmp_path, monkeypatch):
    module = importlib.import_module(f"bayesadam.paper.{name}")
    calls = []
    monkeypatch.setattr(module, f"run_{name}", lambda **given: calls.append(given))
    given = [tmp_path] if name == "report" else ["--out", tmp_path]
    given += ["--device", "cpu"] if name not in ("regression", "cost") else []
    for words in (["paper", name], [name]):
        assert run(*words, *given) == 0
    one, other = calls
    assert one == other
    assert one["out"] == tmp_path


CHOICES = [
    (("prune", "a.pt", "--fraction", 0.5), "--ranking", ("snr", "snr-posterior", "magnitude", "saliency")),
    (("prune", "a.pt", "--fraction", 0.5), "--scope", ("global", "layer")),
    (("merge", "a.pt", "b.pt"), "--method", ("fisher", "gradient-matching", "kronecker")),
    (("export", "a.pt"), "--compress", ("bfloat16", "factored")),
    (("export", "a.pt"), "--structure", ("diagonal", "kronecker")),
    (("paper", "pruning"), "--data", ("mnist", "fashion-mnist", "digits")),
    (("paper", "pruning"), "--activation", ("relu", "tanh", "sigmoid", "silu", "gelu", "elu")),
    (("paper", "pruning"), "--device", ("cpu", "cuda")),
    (("paper", "bandits"), "--settings", ("paper", "tuned")),
]
LISTS = [
    ("regression", "--methods", tuple(regression.TITLES)),
    ("pruning", "--methods", tuple(pruning.TITLES)),
    ("bandits", "--agents", PAPER_AGENTS),
    ("bandits", "--problems", tuple(PROBLEMS)),
]


def found_command(words):
    command = get_command(cli.app)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    return command


@pytest.mark.parametrize(("words", "option", "names"), CHOICES, ids=str)
def test_an_option_of_few_values_lists_completes_and_checks_them(words, option, names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (found,) = [param for param in found_command(words).params if option in param.opts]
    context = found_command(words).context_class(found_command(words))
    assert [item.value for item in found.shell_complete(context, "")] == list(names)
    assert [item.value for item in found.shell_complete(context, names[-1])] == [names[-1]]
    assert run(*words[: 2 if words[0] == "paper" else 1], "--help") == 0
    assert f"{option} {'|'.join(names)}" in " ".join(capsys.readouterr().out.split())
    assert run(*words, option, "luck") == 2
    assert capsys.readouterr().err == f"bayesadam: {option} must be one of {', '.join(names)}, got 'luck'\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "option", "names"), LISTS)
def test_names_are_listed_in_help_and_in_the_error(command, option, names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["paper", command]
    assert run(*words, "--help") == 0
    # Lines may break after a hyphen.
    assert ",".join(names) in "".join(capsys.readouterr().out.split())
    assert run(*words, option, f"{names[0]},luck") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bayesadam: {option} must be some, separated by commas, of {', '.join(names)}, got ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_option_that_takes_names_is_in_the_lists_above():
    known = {(found_command(words).name, option) for words, option, _ in CHOICES}
    known |= {(command, option) for command, option, _ in LISTS}
    known |= {("bandits", "--device"), ("report", "--device"), ("cost", "--data")}
    groups = [get_command(cli.app), found_command(["paper"])]
    commands = [command for group in groups for command in group.commands.values() if not command.hidden]
    assert known == {
        (c.name, p.opts[0]) for c in commands for p in c.params if re.search("[:|]|NAMES", p.metavar or "")
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("bayesadam ins", ["inspect"]),
        pytest.param("bayesadam regr", [], marks=pytest.mark.slow),
        pytest.param("bayesadam paper b", ["bandits"], marks=pytest.mark.slow),
        ("bayesadam prune --fra", ["--fraction"]),
        pytest.param("bayesadam prune a.pt --ranking sn", ["snr", "snr-posterior"], marks=pytest.mark.slow),
        pytest.param("bayesadam data fetch fash", ["fashion-mnist"], marks=pytest.mark.slow),
        pytest.param("bayesadam paper bandits --agents badam,gr", ["badam,greedy"], marks=pytest.mark.slow),
        pytest.param("bayesadam paper bandits --problems s", ["statlog"], marks=pytest.mark.slow),
    ],
)
def test_the_shell_completes_commands_options_and_names(words, expected):
    position = {"_BAYESADAM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "bayesadam"],
        env={**os.environ, **position, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.split() == expected


# --- where results go -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1, betas=(0.9, 0.99))
    # And a second network, for what takes two.
    for name in ("other.pt", "last.pt"):
        for _ in range(100):
            adam.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            adam.step()
        torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), "n_data": 4}, folder / name)
    return folder


@pytest.fixture
def saved(trained, tmp_path):
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True) / "last.pt"


@pytest.mark.parametrize(
    ("command", "extra", "usual"),
    [
        ("prune", ["--fraction", 0.5], "pruned.pt"),
        ("sample", [], "sample.safetensors"),
        ("merge", ["other.pt"], "merged.safetensors"),
        ("export", [], "posterior.safetensors"),
    ],
)
def test_out_is_a_folder_or_a_file_with_an_ending(command, extra, usual, saved, tmp_path, monkeypatch, capsys):
    given = [command, saved, *extra, "-q"]
    # A folder, made if absent; one that is there is a folder whatever its name; a file; and no word of it.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v1.2").mkdir()
    named = f"net{Path(usual).suffix}"
    for out, file, record in (
        (("--out", "new/deep"), f"new/deep/{usual}", "new/deep/metrics.json"),
        (("-o", "v1.2"), f"v1.2/{usual}", "v1.2/metrics.json"),
        (("--out", f"files/{named}"), f"files/{named}", "files/net.metrics.json"),
        ((), f"out/{command}/{usual}", f"out/{command}/metrics.json"),
    ):
        assert run(*given, *out) == 0
        assert capsys.readouterr().out.splitlines() == [file, record]
        assert Path(file).stat().st_size
        assert json.loads(Path(record).read_text())["command"] == command


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize(
    ("command", "file", "said"),
    [
        (["sample"], "none.pt", "no file at"),
        (["sample", "--prior-precision", 0, "--n-data", 4], "dead.pt", "prior precision 0"),
        (["prune", "--fraction", 0.5], "none.pt", "no file at"),
        (["export"], "dead.pt", "--n-data"),
        (["merge", "last.pt"], "none.pt", "no file at"),
        (["inspect", "--out", "out/inspect"], "none.pt", "no file at"),
        (["doctor", "--out", "out/doctor"], "none.pt", "no file at"),
    ],
    ids=str,
)
def test_a_folder_is_made_only_where_there_is_something_to_write(
    command, file, said, made, saved, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    tree = torch.load("last.pt")
    tree["optimizer"]["state"][0]["exp_avg_sq"][0] = 0.0
    torch.save({key: tree[key] for key in ("model", "optimizer")}, "dead.pt")
    if made:
        # What was there before stays, empty or not.
        (tmp_path / "out" / command[0]).mkdir(parents=True)
    assert run(command[0], file, *command[1:], "-q") == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "out").exists() == made
    assert (tmp_path / "out" / command[0]).exists() == made


# --- the demo -------------------------------------------------------------------------------------------------------


def test_demo_ends_with_the_paths(small_demo, tmp_path, capsys):
    assert run("demo", "--seed", 3, "--out", tmp_path) == 0
    captured = capsys.readouterr()
    paths = [str(tmp_path / "demo.png"), str(tmp_path / "metrics.json")]
    assert captured.out.splitlines()[-2:] == paths
    assert "hidden2.weight" in captured.out
    assert "zero-curvature" in captured.out
    assert "RMSE" in captured.out
    assert json.loads((tmp_path / "metrics.json").read_text())["seed"] == 3


def test_quiet_prints_the_paths_alone(small_demo, tmp_path, capsys):
    assert run("demo", "--out", tmp_path, "--quiet") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [str(tmp_path / "demo.png"), str(tmp_path / "metrics.json")]
    assert captured.err == ""


def test_a_console_without_greek_gets_question_marks(small_demo, tmp_path, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run("demo", "--out", tmp_path) == 0
    stdout.flush()
    assert b"?" in stdout.buffer.getvalue()


# --- failing --------------------------------------------------------------------------------------------------------


def test_an_error_of_ours_is_one_line_and_code_2(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run_demo", raising(SettingError("n_data must be positive,\ngot  -1")))
    assert run("demo") == 2
    captured = capsys.readouterr()
    assert captured.err == "bayesadam: n_data must be positive, got -1\n"
    assert captured.out == ""


def test_what_there_is_to_choose_from_has_a_line_each(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run_demo", raising(SettingError("say which with\n  weights_key='a'\n  weights_key='b'")))
    assert run("demo") == 2
    assert capsys.readouterr().err == "bayesadam: say which with\n  --weights-key 'a'\n  --weights-key 'b'\n"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("pass n_data=", "pass --n-data"),
        (
            "Pass the file that has it as optimizer_path=, or save",
            "Pass the file that has it as --optimizer-file, or save",
        ),
        ("say which with weights_key='ema.model'", "say which with --weights-key 'ema.model'"),
        ("under optimizer_key='o'; there", "under --optimizer-key 'o'; there"),
        ("with optimizer=, or describe", "with --optimizer, or describe"),
        ("or groups_in_order=True if", "or --groups-in-order if"),
        ("as prior_precision=", "as --prior-precision"),
        ("Pass param_names=[...], the names", "Pass param_names=[...] in Python, the names"),
        ("torch.load(path, weights_only=False), my_n_data=3", "torch.load(path, weights_only=False), my_n_data=3"),
    ],
)
def test_an_error_speaks_of_options(monkeypatch, capsys, said, told):
    monkeypatch.setattr(demo, "run_demo", raising(SettingError(said)))
    assert run("demo") == 2
    assert capsys.readouterr().err == f"bayesadam: {told}\n"


@pytest.mark.parametrize("command", ["inspect", "prune", "sample"])
def test_every_option_that_an_error_names_is_there(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    for option in ("--optimizer-file", "--optimizer-key", "--weights-key", "--groups-in-order", "--optimizer "):
        assert option in text


@pytest.mark.parametrize("given", ["", " ", ","])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("paper", "regression"), "--methods"),
        (("paper", "pruning"), "--methods"),
        (("paper", "bandits"), "--agents"),
        (("bandits",), "--problems"),
    ],
)
def test_a_list_that_names_nothing_is_refused(command, option, given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*command, option, given) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bayesadam: {option} must be some, separated by commas, of ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr(demo, "run_demo", raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("demo")


def test_interrupting_is_one_line_and_code_130(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run_demo", raising(KeyboardInterrupt()))
    assert run("demo") == 130
    assert capsys.readouterr().err == "bayesadam: interrupted\n"


# Trains until it is stopped, and says so once it is past torch's own late imports, which can lose an interrupt.
ENDLESS = """
import sys
from pathlib import Path
from bayesadam.__main__ import main
from bayesadam.commands import demo

train = demo.train_network

def endless(*arguments):
    while True:
        train(*arguments)
        Path(sys.argv[1]).touch()

demo.train_network = endless
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_real_ctrl_c_leaves_nothing_behind(tmp_path):
    out, training = tmp_path / "out", tmp_path / "training"
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, training, "demo", "--quiet", "--out", out],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run started in the background may have inherited that Ctrl-C is to be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        eventually(lambda: process.poll() is not None or training.exists(), "training")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE)
    # Struck inside code that runs from a string, Python ends by the signal itself, which a shell calls 130 too.
    assert process.returncode in (130, -signal.SIGINT)
    assert stderr.splitlines()[-1] == "bayesadam: interrupted"
    assert "Traceback" not in stderr
    assert stdout == ""
    assert not out.exists()


@pytest.mark.parametrize("below", [False, True])
def test_out_that_is_a_file_is_refused_before_any_work(tmp_path, monkeypatch, capsys, below):
    file = tmp_path / "file"
    file.write_text("precious")
    monkeypatch.setattr(demo, "compute", raising(AssertionError("worked all the same")))
    assert run("demo", "--out", file / "folder" if below else file) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(file) in error
    assert "is a file" in error
    assert file.read_text() == "precious"


def test_a_demo_that_fails_leaves_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "compute", raising(ba.BayesAdamError("no convergence")))
    assert run("demo", "--out", tmp_path / "made" / "out") == 2
    assert "no convergence" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("package", ["typer", "rich", "matplotlib"])
def test_a_missing_package_is_one_line_that_names_the_install(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "run_demo", raising(AssertionError("went on without it")))
    monkeypatch.setitem(sys.modules, package, None)
    assert run("demo", "--out", tmp_path / "out") == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert repr(package) in captured.err
    assert "pip install 'bayesadam'" in captured.err
    assert not (tmp_path / "out").exists()


def test_the_report_names_the_install_of_its_template_engine(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert run("report", tmp_path / "out") == 2
    assert "'jinja2'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- files ----------------------------------------------------------------------------------------------------------


def write_text(text: str):
    return lambda path: path.write_text(text)


def test_files_are_all_written_or_none(tmp_path, capsys):
    def fails(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    run = Run("try", 0, tmp_path, {})
    run.finish({"a.txt": write_text("old")}, {"value": 1})
    capsys.readouterr()
    before = (tmp_path / "metrics.json").read_text()
    with pytest.raises(FileError, match="No space left"):
        run.finish({"a.txt": write_text("new"), "b.txt": fails}, {"value": 2})
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "metrics.json"]
    assert (tmp_path / "a.txt").read_text() == "old"
    assert (tmp_path / "metrics.json").read_text() == before


def test_what_cannot_be_written_is_a_file_error_that_names_it(tmp_path, monkeypatch):
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fill(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(FileError, match=rf"cannot save to {target}: No space left"), replacing(target) as temporary:
        fill(temporary)
    assert list(tmp_path.iterdir()) == [target]

    def refuses(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuses)
    with pytest.raises(FileError, match=rf"cannot save to {target}: Permission denied"), replacing(target):
        pass
    assert target.read_text() == "old"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that nobody can write to")
def test_a_folder_that_takes_no_files_is_one_line(tmp_path, capsys):
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    adam.step()
    path = tmp_path / "c.pt"
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), "n_data": 4}, path)
    for arguments in (
        ("prune", path, "--fraction", 0.5, "-o", "/proc/x.pt"),
        ("sample", path, "-o", "/proc/x.safetensors"),
    ):
        assert run(*arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "cannot save to /proc/x" in error
    posterior = ba.Posterior.from_optimizer(model, adam, n_data=4)
    with pytest.raises(FileError, match="cannot save to /proc/x"):
        posterior.save("/proc/x.safetensors")


def test_metrics_are_json_that_any_reader_takes(tmp_path):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    run = Run("try", 5, tmp_path, {"rates": (0.1, 0.2)}, device="cuda:0")
    (path,) = run.finish({}, {"nll": float("inf"), "curve": [1.0, float("nan")]})
    metrics = json.loads(path.read_text(), parse_constant=refuse)
    assert metrics["results"] == {"nll": None, "curve": [1.0, None]}
    assert metrics["settings"] == {"rates": [0.1, 0.2]}
    assert (metrics["seed"], metrics["device"]) == (5, "cuda:0")


# --- data -----------------------------------------------------------------------------------------------------------

CONTENT = b"some data\n"


def data(*arguments: object):
    return CliRunner().invoke(cli.data_app, [str(argument) for argument in arguments])


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The set `tiny` of two files without a source, its first file in the user's folder; other sets are embedded."""
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    files = tuple(fetching.DataFile(name, len(CONTENT), sha256) for name in ("a.csv", "b.csv"))
    embedded = {record.name: record for record in fetching.data_sets() if record.embedded}
    tiny = fetching.DataSet("tiny", "a test", "tables/tiny", files, "wheel")
    # Another dict, so that the order of the real one is left alone.
    monkeypatch.setattr(fetching, "DATA_SETS", {**embedded, "tiny": tiny})
    folder = tmp_path / "data" / "tables" / "tiny"
    folder.mkdir(parents=True)
    (folder / "a.csv").write_bytes(CONTENT)
    monkeypatch.setenv("BAYESADAM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("BAYESADAM_CACHE", str(tmp_path / "cache"))
    return folder


def test_list_shows_where_each_set_is(tiny, tmp_path):
    done = data("list")
    assert done.exit_code == 0
    assert f"BAYESADAM_DATA: {tmp_path / 'data'}" in done.stdout
    assert f"cache: {tmp_path / 'cache'}" in done.stdout
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert lines["tiny"].endswith(f"1 of 2 files: {tiny}")
    assert lines["digits"].endswith("embedded")
    (tiny / "b.csv").write_bytes(CONTENT)
    assert f"  {tiny}\n" in data("list").stdout
    for path in tiny.iterdir():
        path.unlink()
    assert "  absent\n" in data("list").stdout


def test_list_knows_every_set(monkeypatch):
    monkeypatch.delenv("BAYESADAM_DATA", raising=False)
    done = data("list")
    assert done.exit_code == 0
    assert "BAYESADAM_DATA: not set" in done.stdout
    for record in fetching.data_sets():
        assert f"\n{record.name} " in done.stdout


def test_fetch_prints_the_paths(tiny):
    (tiny / "b.csv").write_bytes(CONTENT)
    done = data("fetch", "tiny", "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{tiny / 'a.csv'}\n{tiny / 'b.csv'}\n", "")


def test_fetch_goes_on_after_a_failure_and_ends_with_code_1(tiny):
    done = data("fetch", "tiny", "digits")
    assert done.exit_code == 1
    assert done.stdout == "digits is embedded: there is nothing to fetch\n"
    assert done.stderr.startswith("bayesadam: b.csv of the data set 'tiny'")
    assert done.stderr.count("\n") == 1


def test_fetch_names_a_damaged_file(tiny):
    (tiny / "b.csv").write_bytes(b"other data")
    done = data("fetch", "tiny")
    assert done.exit_code == 1
    expected, found = (hashlib.sha256(content).hexdigest() for content in (CONTENT, b"other data"))
    assert f"{tiny / 'b.csv'} is damaged: its checksum is {found}, expected {expected}" in done.stderr


def test_an_unknown_name_is_refused_before_any_work(tiny):
    done = data("fetch", "tiny", "nonsense")
    assert isinstance(done.exception, SettingError)
    assert done.output == ""
