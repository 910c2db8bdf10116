"""The command line: one line an error, the right exit code, and files that are whole or absent."""

import io
import json
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bayesadam as ba
from bayesadam import __version__
from bayesadam import inspect as inspect_checkpoint
from bayesadam.__main__ import main
from bayesadam.cli import demo, output
from bayesadam.compress import RANKINGS
from bayesadam.errors import SettingError
from bayesadam.merging import METHODS
from cases import mlp, train
from processes import run_python

COMMANDS = ("inspect", "doctor", "prune", "quantise", "merge", "export", "deploy", "demo")
READING = ("--optimizer-file", "--optimizer", "--groups-in-order", "--weights-key", "--optimizer-key")


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
def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Its last input is always zero, so that a column of the first layer is dead."""
    torch.manual_seed(0)
    model = mlp(4, 20, 1)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.99))
    train(model, optimizer, steps=100, dead=3)
    return model, optimizer


@pytest.fixture
def saved(pair, tmp_path, monkeypatch) -> Path:
    """`last.pt` and, for what takes two, `other.pt`, in the current folder."""
    model, optimizer = pair
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n_data": 500}
    for name in ("last.pt", "other.pt"):
        torch.save(tree, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "last.pt"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*command.split(), "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    told = "\n".join(lines)
    assert "..." not in told.replace("[ARGS]...", "").replace("}...", "")
    if not command:
        assert [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]] == list(COMMANDS)
    missing = {"inspect": (), "doctor": (), "prune": (), "export": (), "merge": ("--optimizer-file",)}.get(command)
    assert missing is None or [option for option in READING if f"{option} " not in told] == list(missing)
    assert all(name in told for name in {"prune": RANKINGS, "merge": METHODS}.get(command, ()))


WITHOUT_TORCH = """
import sys
from bayesadam.__main__ import main
for arguments in (["--help"], ["--version"], ["prune", "--help"], ["nonsense"], ["prune", "a.pt"]):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code or 0
    print(code, sorted({"torch", "numpy", "matplotlib", "rich.console"} & set(sys.modules)), file=sys.stderr)
"""


def test_help_and_errors_in_options_do_not_wait_for_torch():
    done = run_python(WITHOUT_TORCH)
    assert [line for line in done.stderr.splitlines() if line.endswith(" []")] == ["0 []"] * 3 + ["2 []"] * 2
    assert f"bayesadam {__version__}\n" in done.stdout


def test_inspect_prints_a_table_or_one_json_object_and_writes_nothing(saved, capsys):
    before = sorted(Path().iterdir())
    assert run("inspect", saved) == 0
    told = capsys.readouterr().out
    assert told.index("zero-curvature") < told.index("0.weight") < told.index("5 %, median, 95 %:")
    assert run("inspect", saved, "--n-data", 7, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["source"], found["optimizer"], found["n_data"], found["dead"]) == (str(saved), "adamw", 7, 20)
    quantiles = [row.quantiles[1] for row in inspect_checkpoint(saved, n_data=7).parameters]
    assert [row["quantiles"][1] for row in found["parameters"].values()] == quantiles
    why = "\n".join(inspect_checkpoint(saved).why)
    for option, is_shown in (("--why", True), ("--json", False)):
        assert run("inspect", saved, option) == 0
        assert capsys.readouterr().out.startswith(why) == is_shown
    assert sorted(Path().iterdir()) == before
    output.show({"is not finite": [float("nan"), 1.0]}, "", True)
    assert json.loads(capsys.readouterr().out) == {"is not finite": [None, 1.0]}


def test_an_error_is_json_too_and_still_one_line_and_code_2(tmp_path, capsys):
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, optimizer, steps=2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    for file, message in (("c.pt", "the optimiser is sgd"), ("nowhere.pt", "no file at")):
        assert run("inspect", tmp_path / file, "--json") == 2
        captured = capsys.readouterr()
        found = json.loads(captured.out)
        assert list(found) == ["error"]
        assert found["error"].startswith(message)
        # In the words of the command line.
        assert "optimizer=" not in found["error"]
        assert captured.err.splitlines()[-1] == f"bayesadam: {found['error']}"


def test_the_doctor_says_of_a_file_what_it_says_live(pair, saved, tmp_path, capsys):
    live = ba.doctor(*pair, n_data=500)
    assert run("doctor", saved, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["code"], each["message"]) for each in found["findings"]] == [
        (each.code, each.message) for each in live.findings
    ]
    assert found["healthy"] == live.healthy
    torch.save(pair[0].state_dict(), tmp_path / "w.pt")
    assert run("doctor", tmp_path / "w.pt") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "✗ unreadable" in told
    assert "--optimizer-file" in told
    assert run("doctor", tmp_path / "nowhere.pt") == 2


def followed(error: str) -> list[str]:
    """The options that the last line of a message names, with what it says to give them."""
    line = next(line for line in error.splitlines()[::-1] if "--" in line)
    return [part.strip("'") for part in re.findall(r"(--[a-z-]+)(?: ('[^']*'))?", line) for part in part if part]


@pytest.mark.parametrize("command", [("inspect",), ("doctor",), ("prune", "--fraction", "0.5", "-o", "out.pt")])
@pytest.mark.parametrize("case", ["groups", "networks", "states", "apart"])
def test_what_a_message_says_to_give_is_taken(case, command, pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, optimizer = pair
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if case == "groups":
        model = mlp(3, 3, 3, 3, 3, 3, 3)
        groups = [[p for p in model.parameters() if (p.dim() > 1) is matrices] for matrices in (True, False)]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups])
        train(model, optimizer, steps=3)
        tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    elif case == "networks":
        tree = {"one": tree["model"], "two": tree["model"] | {"0.bias": torch.ones(20)}, "optimizer": tree["optimizer"]}
    elif case == "states":
        tree = {"model": tree["model"], "first": tree["optimizer"], "second": tree["optimizer"]}
    elif case == "apart":
        torch.save(tree.pop("optimizer"), "state.pt")
    torch.save(tree, "w.pt")
    first, *rest = command
    assert run(first, "w.pt", *rest) in (1, 2)
    captured = capsys.readouterr()
    options = followed(captured.err or captured.out)
    assert options, captured
    options += ["state.pt"] if options == ["--optimizer-file"] else []
    assert run(first, "w.pt", *rest, *options) == 0, (options, capsys.readouterr())


@pytest.mark.parametrize(
    ("command", "extra", "usual"),
    [
        ("prune", ["--fraction", 0.5], "pruned.pt"),
        ("merge", ["other.pt"], "merged.safetensors"),
        ("export", [], "posterior.safetensors"),
    ],
)
def test_out_is_a_folder_or_a_file_with_an_ending(command, extra, usual, saved, capsys):
    # A folder, made if absent; one that is there is a folder whatever its name; a file; and no word of it.
    Path("v1.2").mkdir()
    named = f"files/net{Path(usual).suffix}"
    for out, file in (
        (("--out", "new/deep"), f"new/deep/{usual}"),
        (("-o", "v1.2"), f"v1.2/{usual}"),
        (("--out", named), named),
        ((), f"out/{command}/{usual}"),
    ):
        assert run(command, "last.pt", *extra, "-q", *out) == 0
        assert capsys.readouterr().out == f"{file}\n"
        assert Path(file).stat().st_size
    assert run(command, "last.pt", *extra) == 0
    assert len(capsys.readouterr().out.splitlines()) > 2


def test_out_below_a_file_is_refused_before_any_work(saved, monkeypatch, capsys):
    monkeypatch.setattr(demo, "bands", raising(AssertionError("worked all the same")))
    for arguments in (("demo",), ("prune", saved, "--fraction", 0.5)):
        assert run(*arguments, "--out", saved / "folder") == 2
        error = capsys.readouterr().err
        assert error.startswith(f"bayesadam: cannot write to {saved / 'folder'}: ")
        assert error.count("\n") == 1


@pytest.fixture
def images(saved) -> torch.Tensor:
    """`app_of_ours:model`, an average of the weights in `last.pt`, and inputs in every kind of file."""
    Path("app_of_ours.py").write_text(
        "from cases import mlp\ndef model():\n    return mlp(4, 20, 1)\n", encoding="utf-8"
    )
    tree = torch.load("last.pt")
    torch.save(tree | {"ema": {name: tensor * 0.5 for name, tensor in tree["model"].items()}}, "last.pt")
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    np.save("x.npy", x.double().numpy())
    np.savez("x.npz", x=x.numpy())
    torch.save(x, "x.pt")
    save_file({"x": x}, "x.safetensors")
    yield x
    sys.modules.pop("app_of_ours", None)


WITH_MODEL = ("--model", "app_of_ours:model")


@pytest.mark.parametrize("ending", ["npy", "npz", "pt", "safetensors"])
def test_prune_with_inputs_writes_the_weights_that_python_gives(ending, images, capsys):
    given = ("--fraction", 0.7, "--exclude", "norms", "--rounds", 2, "--inputs", f"x.{ending}", "-o", "small.pt")
    assert run("prune", "last.pt", *WITH_MODEL, *given) == 0
    assert capsys.readouterr().out.splitlines()[-3].split()[:3] == ["total", "121", "51"]
    posterior = ba.Posterior.from_checkpoint("last.pt", mlp(4, 20, 1), prior_precision=0.0)
    expected = ba.prune(posterior, 0.7, inputs=images, rounds=2).mean
    tree, before = torch.load("small.pt"), torch.load("last.pt")
    for name, weight in expected.items():
        torch.testing.assert_close(tree["model"][name], weight, rtol=1e-5, atol=1e-6)
        assert (tree["ema"][name] == before["ema"][name] * (weight != 0)).all()
    assert str(tree["optimizer"]) == str(before["optimizer"])
    # What comes out is a checkpoint again, whose zeros quantising keeps.
    assert (
        run("quantise", "small.pt", *WITH_MODEL, "--bits", 4, "--inputs", "x.npy", "-q", "-o", "tiny.safetensors") == 0
    )
    tiny = ba.load("tiny.safetensors", mlp(4, 20, 1))
    assert not any(p[expected[name] == 0].any() for name, p in tiny.named_parameters())


def test_a_pattern_and_a_ranking_with_the_network_alone(images, capsys):
    given = (*WITH_MODEL, "--pattern", "1:2", "--ranking", "saliency", "-o", "small.safetensors")
    assert run("prune", "last.pt", *given) == 0
    assert "The weights alone are written" in capsys.readouterr().out
    posterior = ba.Posterior.from_checkpoint("last.pt", mlp(4, 20, 1), prior_precision=0.0)
    expected = ba.prune(posterior, pattern="1:2", ranking="saliency").mean
    assert all(load_file("small.safetensors")[name].equal(weight) for name, weight in expected.items())


def test_quantise_writes_what_inspect_reads(images, capsys):
    assert run("quantise", "last.pt", *WITH_MODEL, "--bits", 3, "--exclude", "2.*", "-o", ".") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "quantised.safetensors"
    posterior = ba.Posterior.from_checkpoint("last.pt", mlp(4, 20, 1), prior_precision=0.0)
    expected = ba.quantise(posterior, 3, exclude="2.*")
    found = ba.load("quantised.safetensors", mlp(4, 20, 1)).state_dict()
    assert all(found[name].equal(tensor) for name, tensor in expected.model.state_dict().items())
    assert run("inspect", "quantised.safetensors", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == expected.report.bytes
    assert report["parameters"] == {name: list(row) for name, row in expected.report.parameters.items()}
    assert run("inspect", "quantised.safetensors") == 0
    assert capsys.readouterr().out == f"{ba.inspect('quantised.safetensors')}\n"
    assert "1 of 4 tensors have codes of 3 bits" in str(expected.report)
    for source, out, said in (
        ("last.pt", "small.pt", "end the path in .safetensors"),
        ("quantised.safetensors", "small.safetensors", "quantised.safetensors is quantised already"),
    ):
        assert run("quantise", source, *WITH_MODEL, "--bits", 3, "-o", out) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "how many weights?"),
        (("--fraction", 2), "bayesadam: fraction must be"),
        (("--fraction", 0.5, "--ranking", "luck"), "bayesadam: ranking must be one of"),
        (("--fraction", 0.5, "--scope", "luck"), "bayesadam: scope must be one of"),
        (("--fraction", 0.5, "--inputs", "x.npy"), "give --model"),
        (("--fraction", 0.5, *WITH_MODEL, "--inputs", "none.npy"), "no file at none.npy"),
        (("--fraction", 0.5, *WITH_MODEL, "--inputs", "pickled.npy"), "Object arrays cannot be loaded"),
        (("--fraction", 0.5, *WITH_MODEL, "--inputs", "hostile.pt"), "it is made to run code"),
        (("--fraction", 0.5, *WITH_MODEL, "--inputs", "other.npy"), "does not run on these inputs"),
    ],
)
def test_what_cannot_be_pruned_is_told_in_one_line(arguments, said, images, capsys):
    np.save("pickled.npy", np.array([{}, ()], dtype=object), allow_pickle=True)
    np.save("other.npy", np.zeros((5, 7), np.float32))
    Path("hostile.pt").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    assert run("prune", "last.pt", *arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not [path for path in Path("out").rglob("*") if path.is_file()]


@pytest.fixture
def application(tmp_path, monkeypatch):
    """A calibrated network in `net.safetensors`, and `app_of_ours.py`, whose functions give models and inputs."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, x = mlp(4, 8, 3), torch.randn(80, 4)
    net = ba.calibrate(model, (x, x[:, :3].argmax(dim=1)), likelihood="classification")
    net.save("net.safetensors")
    Path("app_of_ours.py").write_text(
        "import torch\nfrom cases import mlp\n"
        "def model():\n    return mlp(4, 8, 3)\n"
        "def example():\n    return torch.zeros(2, 4)\n"
        "def nothing():\n    return None\n",
        encoding="utf-8",
    )
    yield net
    sys.modules.pop("app_of_ours", None)


@pytest.mark.slow
def test_deploy_writes_what_torch_alone_runs(application, capsys):
    assert run("deploy", "net.safetensors", "app_of_ours:model", "--example", "app_of_ours:example") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "out/deploy/served.pt2"
    program, x = torch.export.load("out/deploy/served.pt2").module(), torch.randn(5, 4)
    torch.testing.assert_close(program(x)["probs"], application(x).probs)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("app_of_ours", "must be module:function"),
        ("app_of_ours:missing", "missing"),
        ("no_such_app:model", "no_such_app"),
        ("app_of_ours:nothing", "gave NoneType"),
    ],
)
def test_deploy_says_what_is_wrong(application, model, message, capsys):
    assert run("deploy", "net.safetensors", model, "-o", "served.pt2") == 2
    assert message in capsys.readouterr().err
    assert not Path("served.pt2").exists()


@pytest.mark.slow
def test_the_demos_band_is_wider_with_the_input_side():
    drawn = demo.bands(steps=300)
    outside = (drawn["grid"].flatten() > 0.6).numpy()
    ratios = [std[outside].mean() / std[80:120].mean() for _, std in drawn["drawn"].values()]
    assert ratios[1] > 1.5 * ratios[0] > 1.5


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_demo_ends_with_the_path_in_any_encoding(encoding, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "bands", partial(demo.bands, steps=20))
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run("demo", "--out", tmp_path / "ü") == 0
    stdout.flush()
    text = stdout.buffer.getvalue().decode(encoding)
    assert text.splitlines()[-1] == str(tmp_path / ("ü" if encoding == "utf-8" else "?") / "demo.png")
    assert (tmp_path / "ü" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("n_data must be positive,\ngot  -1", "n_data must be positive, got -1"),
        # What there is to choose from has a line each.
        (
            "say which with\n  weights_key='a'\n  weights_key='b'",
            "say which with\n  --weights-key 'a'\n  --weights-key 'b'",
        ),
        ("Pass the file as optimizer_path=, or n_data=", "Pass the file as --optimizer-file, or --n-data"),
        ("SGD: reader='ogd', optimizer='ogd' of a file", "SGD: --optimizer ogd"),
        ("Pass param_names=[...], the names", "Pass param_names=[...] in Python, the names"),
        ("torch.load(path, weights_only=False), my_n_data=3", "torch.load(path, weights_only=False), my_n_data=3"),
    ],
)
def test_an_error_is_one_line_in_the_words_of_the_command_line(monkeypatch, capsys, said, told):
    monkeypatch.setattr(demo, "run", raising(SettingError(said)))
    assert run("demo") == 2
    assert capsys.readouterr() == ("", f"bayesadam: {told}\n")


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr(demo, "run", raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("demo")


@pytest.mark.parametrize("package", ["typer", "matplotlib"])
def test_a_missing_package_is_one_line_that_names_the_install(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "run", raising(AssertionError("went on without it")))
    monkeypatch.setitem(sys.modules, package, None)
    assert run("demo", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert repr(package) in error
    assert "pip install 'bayesadam'" in error


def test_interrupting_is_one_line_and_code_130(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run", raising(KeyboardInterrupt()))
    assert run("demo") == 130
    assert capsys.readouterr().err == "bayesadam: interrupted\n"
