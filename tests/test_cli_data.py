"""`bayesadam data`: what it prints, and its exit codes."""

import hashlib

import pytest
from typer.testing import CliRunner

from bayesadam.cli_data import DATA_SETS, app
from bayesadam.data import fetching
from bayesadam.data.fetching import Copy, DataFile, DataSet
from bayesadam.errors import SettingError

CONTENT = b"some data\n"


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The set `tiny` of two files without a source, its first file in the user's folder; other sets are embedded."""
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    files = tuple(DataFile(Copy(name, len(CONTENT), sha256)) for name in ("a.csv", "b.csv"))
    embedded = {record.name: record for record in fetching.data_sets() if record.embedded}
    tiny = DataSet("tiny", "a test", "tables/tiny", files, "wheel")
    # Another dict, so that the order of the real one is left alone.
    monkeypatch.setattr(fetching, "DATA_SETS", {**embedded, "tiny": tiny})
    folder = tmp_path / "data" / "tables" / "tiny"
    folder.mkdir(parents=True)
    (folder / "a.csv").write_bytes(CONTENT)
    monkeypatch.setenv("BAYESADAM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("BAYESADAM_CACHE", str(tmp_path / "cache"))
    return folder


def test_the_names_completed_are_those_of_the_registry():
    assert tuple(record.name for record in fetching.data_sets()) == DATA_SETS


def test_list_shows_where_each_set_is(tiny, tmp_path):
    done = run("list")
    assert done.exit_code == 0
    assert f"BAYESADAM_DATA: {tmp_path / 'data'}" in done.stdout
    assert f"cache: {tmp_path / 'cache'}" in done.stdout
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert lines["tiny"].endswith(f"1 of 2 files: {tiny}")
    assert lines["digits"].endswith("embedded")
    (tiny / "b.csv").write_bytes(CONTENT)
    assert f"  {tiny}\n" in run("list").stdout
    for path in tiny.iterdir():
        path.unlink()
    assert "absent, and no public source is known" in run("list").stdout


def test_list_knows_every_set(monkeypatch):
    monkeypatch.delenv("BAYESADAM_DATA", raising=False)
    done = run("list")
    assert done.exit_code == 0
    assert "BAYESADAM_DATA: not set" in done.stdout
    for record in fetching.data_sets():
        assert f"\n{record.name} " in done.stdout


def test_fetch_prints_the_paths(tiny):
    (tiny / "b.csv").write_bytes(CONTENT)
    done = run("fetch", "tiny", "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{tiny / 'a.csv'}\n{tiny / 'b.csv'}\n", "")


def test_fetch_goes_on_after_a_failure_and_ends_with_code_1(tiny):
    done = run("fetch", "tiny", "digits")
    assert done.exit_code == 1
    assert done.stdout == "digits is embedded: there is nothing to fetch\n"
    assert done.stderr.startswith("bayesadam: b.csv of the data set 'tiny'")
    assert done.stderr.count("\n") == 1


def test_fetch_into_a_folder_looks_there_alone(tiny, tmp_path):
    done = run("fetch", "tiny", "--out", tmp_path / "mine")
    assert done.exit_code == 1
    assert "a.csv of the data set 'tiny'" in done.stderr
    assert str(tmp_path / "mine") in done.stderr


def test_verify_with_names_wants_every_file(tiny):
    done = run("verify", "tiny")
    assert done.exit_code == 1
    assert done.stdout == f"ok  {tiny / 'a.csv'}\n"
    assert done.stderr == "missing  tiny/b.csv\n"
    (tiny / "b.csv").write_bytes(CONTENT)
    assert run("verify", "tiny").exit_code == 0
    assert run("verify", "tiny", "--quiet").output == ""


@pytest.mark.parametrize("every", [(), ("all",)])
def test_verify_of_all_passes_over_what_was_never_fetched(tiny, every):
    (tiny / "a.csv").unlink()
    done = run("verify", *every)
    assert done.exit_code == 0
    assert done.stdout == "missing  tiny/a.csv\nmissing  tiny/b.csv\n"
    assert run("verify", *every, "--quiet").output == ""
    assert run("verify", "tiny").exit_code == 1


@pytest.mark.parametrize("every", [(), ("all",)])
def test_verify_of_all_wants_the_rest_of_what_was_begun(tiny, every):
    done = run("verify", *every)
    assert done.exit_code == 1
    assert done.stdout == f"ok  {tiny / 'a.csv'}\n"
    assert done.stderr == "missing  tiny/b.csv\n"


def test_verify_says_what_its_code_means():
    told = " ".join(run("verify", "--help").stdout.replace("│", " ").split())
    assert "Ends with code 1 where a checksum is wrong, and where a file is missing of a set" in told


def test_verify_without_names_checks_what_is_there(tiny):
    (tiny / "b.csv").write_bytes(CONTENT)
    assert run("verify").exit_code == 0
    (tiny / "a.csv").write_bytes(b"other data")
    done = run("verify", "--quiet")
    assert done.exit_code == 1
    expected, found = (hashlib.sha256(content).hexdigest() for content in (CONTENT, b"other data"))
    assert done.stderr == f"wrong checksum  {tiny / 'a.csv'}: expected sha256 {expected}, found {found}\n"


def test_an_unknown_name_is_refused_before_any_work(tiny):
    for command in ("fetch", "verify"):
        done = run(command, "tiny", "nonsense")
        assert isinstance(done.exception, SettingError)
        assert done.output == ""
