"""The command line: one line an error, the right exit code, and files that are whole or absent."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from bayesadam import __version__
from bayesadam.__main__ import main
from bayesadam.errors import FileError, SettingError
from bayesadam.experiments import demo
from bayesadam.experiments.run import Run

SOURCE = Path(__file__).parents[1] / "src"
SMALL = demo.DemoSettings(steps=10, draws=5, n_test=20)


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def raising(error: BaseException):
    def command(**_: object) -> None:
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


# --- the demo -------------------------------------------------------------------------------------------------------


def test_demo_ends_with_the_paths(small_demo, tmp_path, capsys):
    assert run("demo", "--seed", 3, "--out", tmp_path) == 0
    captured = capsys.readouterr()
    paths = [str(tmp_path / "demo.png"), str(tmp_path / "metrics.json")]
    assert captured.out.splitlines()[-2:] == paths
    assert "hidden2.weight" in captured.out
    assert "zero-curvature" in captured.out
    assert "RMSE" in captured.out
    assert "training" in captured.err
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
    monkeypatch.setattr(demo, "run_demo", raising(SettingError("n_data must be positive,\n   got -1")))
    assert run("demo") == 2
    captured = capsys.readouterr()
    assert captured.err == "bayesadam: n_data must be positive, got -1\n"
    assert captured.out == ""


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr(demo, "run_demo", raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("demo")


def test_interrupting_is_one_line_and_code_130(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run_demo", raising(KeyboardInterrupt()))
    assert run("demo") == 130
    assert capsys.readouterr().err == "bayesadam: interrupted\n"


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_real_ctrl_c_leaves_nothing_behind(tmp_path):
    # The folder appears once the run has begun; the command then trains for seconds.
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-m", "bayesadam", "demo", "--quiet", "--out", out],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run started in the background may have inherited that Ctrl-C is to be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while process.poll() is None and not out.exists():
            time.sleep(0.05)
        # Past torch's own late imports, inside which an interrupt can be lost.
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "bayesadam: interrupted"
    assert "Traceback" not in stderr
    assert stdout == ""
    assert list(out.iterdir()) == []


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


def test_metrics_are_json_that_any_reader_takes(tmp_path):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    run = Run("try", 5, tmp_path, {"rates": (0.1, 0.2)}, device="cuda:0")
    (path,) = run.finish({}, {"nll": float("inf"), "curve": [1.0, float("nan")]})
    metrics = json.loads(path.read_text(), parse_constant=refuse)
    assert metrics["results"] == {"nll": None, "curve": [1.0, None]}
    assert metrics["settings"] == {"rates": [0.1, 0.2]}
    assert (metrics["seed"], metrics["device"]) == (5, "cuda:0")
