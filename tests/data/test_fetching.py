"""Fetching from a real HTTP server that misbehaves in every way a server can."""

import errno
import gzip
import hashlib
import io
import os
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bayesadam.data import fetch, fetching, find, locate
from bayesadam.data.fetching import DataFile, DataSet
from bayesadam.errors import DataError, SettingError
from processes import PATIENCE, SOURCE, eventually, run_python

TESTS = str(Path(__file__).parents[1])

CONTENT = b"a,b,c\n" * 50_000
PACKED = gzip.compress(CONTENT, mtime=0)


class Server:
    """Answers each path by its script: bytes, a status, or a number of bytes after which it hangs up."""

    def __init__(self) -> None:
        self.answers: dict[str, list[object]] = {}
        self.asked: list[str] = []
        self.encodings: set[str | None] = set()
        self.before_answer = self.midway = lambda: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.encodings.add(self.headers["Accept-Encoding"])
                outer.before_answer()
                script = outer.answers.get(self.path, [404])
                answer = script.pop(0) if len(script) > 1 else script[0]
                if isinstance(answer, tuple):
                    self.reply(*answer)
                elif isinstance(answer, int):
                    self.send_error(answer)
                else:
                    self.reply(answer, len(answer))

            def reply(self, content: bytes, sent: int) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: sent // 2])
                outer.midway()
                self.wfile.write(content[sent // 2 : sent])

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.server.shutdown()
    thread.join()
    server.server.server_close()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def record(*urls: str) -> DataSet:
    file = DataFile("tiny.csv", len(CONTENT), digest(CONTENT), urls)
    return DataSet("tiny", "a test", "tables/tiny", (file,), instead="wheel")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("BAYESADAM_DATA", raising=False)
    monkeypatch.setenv("BAYESADAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "TIMEOUT", PATIENCE)
    return tmp_path / "cache" / "tables" / "tiny"


@pytest.fixture
def tiny(cache, server, monkeypatch) -> Path:
    """The set `tiny` with two sources, /first and /second; gives the path it would be cached at."""
    monkeypatch.setitem(fetching.DATA_SETS, "tiny", record(f"{server.url}/first", f"{server.url}/second"))
    return cache / "tiny.csv"


def users(tmp_path: Path, monkeypatch, name: str, content: bytes) -> Path:
    """A file of `tiny` in a folder that BAYESADAM_DATA names."""
    path = tmp_path / "data" / "tables" / "tiny" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    monkeypatch.setenv("BAYESADAM_DATA", str(tmp_path / "data"))
    return path


def nothing_left(folder: Path) -> bool:
    return not folder.exists() or list(folder.iterdir()) == []


# --- the places -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "content"), [("tiny.csv", CONTENT), ("tiny.csv.gz", PACKED)])
def test_the_users_folder_comes_first_in_either_form(tiny, server, tmp_path, monkeypatch, name, content):
    tiny.parent.mkdir(parents=True)
    tiny.write_bytes(CONTENT)
    path = users(tmp_path, monkeypatch, name, content)
    assert locate("tiny") == {"tiny.csv": path}
    assert fetch("tiny") == (path,)
    assert server.asked == []


def test_then_the_cache_then_the_source_and_only_once(tiny, server):
    server.answers = {"/first": [CONTENT]}
    assert find("tiny") == {}
    assert locate("tiny") == {"tiny.csv": tiny}
    assert tiny.read_bytes() == CONTENT
    assert locate("tiny") == {"tiny.csv": tiny}
    assert fetch("tiny", progress=False) == (tiny,)
    assert server.asked == ["/first"]
    # Packed for the journey, a file would be unpacked on arrival, and a .gz file with it.
    assert server.encodings == {"identity"}
    assert list(tiny.parent.iterdir()) == [tiny]


def test_only_the_wanted_files_are_fetched(tiny, server):
    assert locate("tiny", ()) == {}
    assert server.asked == []


def test_an_embedded_set_has_nothing_to_fetch(cache):
    assert fetch("digits") == ()
    assert locate("wheel") == {}


def test_a_users_folder_that_is_not_there_is_an_error(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESADAM_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(SettingError, match="nowhere, which is not a folder"):
        locate("tiny")


# --- packed sources -------------------------------------------------------------------------------------------------


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("readme.txt", "small")
        archive.writestr("folder/tiny.csv", CONTENT)
    return stream.getvalue()


@pytest.mark.parametrize(("path", "answer"), [("/tiny.csv.gz", PACKED), ("/other.zip", zipped())])
def test_a_packed_source_is_unpacked_before_the_check(cache, server, monkeypatch, path, answer):
    monkeypatch.setitem(fetching.DATA_SETS, "tiny", record(server.url + path))
    server.answers = {path: [answer]}
    assert locate("tiny")["tiny.csv"].read_bytes() == CONTENT
    assert [file.name for file in cache.iterdir()] == ["tiny.csv"]


@pytest.mark.parametrize("path", ["/tiny.csv.gz", "/other.zip"])
@pytest.mark.parametrize(
    "answer",
    [b"<html>", b"", PACKED[:100], gzip.compress(b"another file", mtime=0)],
    ids=["a page", "nothing", "half", "another file"],
)
def test_a_packed_source_that_is_not_is_refused(cache, server, monkeypatch, path, answer):
    monkeypatch.setitem(fetching.DATA_SETS, "tiny", record(server.url + path))
    server.answers = {path: [answer]}
    with pytest.raises(DataError, match=r"not a packed file|wrong checksum"):
        locate("tiny")
    assert nothing_left(cache)


# --- servers that fail ----------------------------------------------------------------------------------------------


def test_a_wrong_checksum_is_not_kept_and_the_next_source_is_asked(tiny, server):
    wrong = b"x" * len(CONTENT)
    server.answers = {"/first": [wrong], "/second": [CONTENT]}
    assert locate("tiny")["tiny.csv"].read_bytes() == CONTENT
    assert server.asked == ["/first", "/second"]


def test_wrong_checksums_alone_leave_nothing_behind(tiny, server):
    wrong = b"x" * len(CONTENT)
    server.answers = {"/first": [wrong], "/second": [wrong]}
    with pytest.raises(DataError, match="wrong checksum") as caught:
        locate("tiny")
    assert digest(wrong) in str(caught.value)
    assert digest(CONTENT) in str(caught.value)
    assert server.asked == ["/first", "/second"]
    assert nothing_left(tiny.parent)


@pytest.mark.parametrize(("answer", "said"), [((CONTENT, 1000), "IncompleteRead"), (500, "500"), (404, "404")])
def test_a_source_that_fails_is_named_and_the_next_is_asked(tiny, server, answer, said):
    server.answers = {"/first": [answer], "/second": [answer]}
    with pytest.raises(DataError, match=f"/first: .*{said}.*/second: .*{said}"):
        locate("tiny")
    assert nothing_left(tiny.parent)
    server.answers = {"/first": [answer], "/second": [CONTENT]}
    assert locate("tiny")["tiny.csv"].read_bytes() == CONTENT


def test_without_a_network_the_error_names_file_place_and_embedded_set(cache, monkeypatch):
    # A port that nothing listens on.
    closed = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = closed.server_address[1]
    closed.server_close()
    monkeypatch.setitem(fetching.DATA_SETS, "tiny", record(f"http://127.0.0.1:{port}/tiny.csv"))
    with pytest.raises(DataError, match="refused") as caught:
        locate("tiny")
    for part in ("tiny.csv", "'tiny'", "BAYESADAM_DATA (not set)", str(cache.parents[1]), "embedded set 'wheel'"):
        assert part in str(caught.value)


def test_without_a_source_the_error_says_so(cache, monkeypatch):
    monkeypatch.setitem(fetching.DATA_SETS, "tiny", record())
    with pytest.raises(DataError, match=r"put it there by hand.*no public source is known"):
        locate("tiny")


def test_without_pooch_the_error_names_the_extra_and_local_files_still_serve(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("BAYESADAM_CACHE")
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DataError, match=r"'wheel'.*pip install 'bayesadam\[data\]'"):
        locate("tiny")
    path = users(tmp_path, monkeypatch, "tiny.csv", CONTENT)
    assert locate("tiny") == {"tiny.csv": path}
    assert fetch("tiny") == (path,)


# --- files that are whole or absent ---------------------------------------------------------------------------------


def test_the_name_appears_only_when_the_file_is_whole(tiny, server):
    seen = []

    def look() -> None:
        """Once half of the file is on the disk, what names are there?"""
        eventually(lambda: any(path.stat().st_size for path in tiny.parent.iterdir()))
        seen.extend((path.name, path.stat().st_size) for path in tiny.parent.iterdir())

    server.midway = look
    server.answers = {"/first": [CONTENT]}
    assert locate("tiny") == {"tiny.csv": tiny}
    ((name, size),) = seen
    assert name != "tiny.csv"
    assert 0 < size < len(CONTENT)


def test_no_space_left_is_named(tiny, server, monkeypatch):
    def full(path: Path, like: str) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    server.answers = {"/first": [CONTENT]}
    monkeypatch.setattr(fetching, "_digest", full)
    with pytest.raises(DataError, match=f"cannot save to {tiny}: No space left on device"):
        locate("tiny")
    assert nothing_left(tiny.parent)


def test_a_cache_that_cannot_be_made_is_named(tiny, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match=str(tmp_path / "cache")):
        locate("tiny")


@pytest.mark.slow
def test_two_processes_fetch_at_once(tiny, server):
    # Neither is answered before both have asked.
    server.before_answer = threading.Barrier(2, timeout=PATIENCE).wait
    server.answers = {"/first": [CONTENT]}
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import {Path(__file__).stem} as tests
        from bayesadam.data import fetch, fetching
        fetching.DATA_SETS["tiny"] = tests.record("{server.url}/first")
        print(*fetch("tiny", progress=False))
    """
    results = []
    threads = [threading.Thread(target=lambda: results.append(python(script))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done.stdout for done in results] == [f"{tiny}\n"] * 2, results
    assert tiny.read_bytes() == CONTENT
    assert list(tiny.parent.iterdir()) == [tiny]
    assert server.asked == ["/first", "/first"]


def python(script: str) -> subprocess.CompletedProcess[str]:
    slow = f"from bayesadam.data import fetching\nfetching.TIMEOUT = {PATIENCE}\n"
    return run_python(slow + textwrap.dedent(script), env={"PYTHONPATH": os.pathsep.join([SOURCE, TESTS])})


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [gzip.compress(b"other", mtime=0), PACKED[:100]])
def test_a_packed_file_of_the_users_is_checked_by_its_content(tiny, tmp_path, monkeypatch, content):
    path = users(tmp_path, monkeypatch, "tiny.csv.gz", content)
    with pytest.raises(DataError, match="is damaged"):
        fetch("tiny")
    path.write_bytes(PACKED)
    assert fetch("tiny") == (path,)


def test_a_truncated_file_is_refused_by_its_size(tiny, server, tmp_path, monkeypatch):
    path = users(tmp_path, monkeypatch, "tiny.csv", CONTENT[:-10])
    with pytest.raises(DataError, match="truncated") as caught:
        locate("tiny")
    for part in (str(path), f"{len(CONTENT) - 10:,} bytes", f"{len(CONTENT):,}", "bayesadam data fetch tiny"):
        assert part in str(caught.value)
    assert server.asked == []


def test_a_damaged_file_of_the_users_is_an_error_and_left_alone(tiny, server, tmp_path, monkeypatch):
    wrong = b"x" * len(CONTENT)
    path = users(tmp_path, monkeypatch, "tiny.csv", wrong)
    with pytest.raises(DataError, match="is damaged") as caught:
        fetch("tiny", progress=False)
    for part in (str(path), digest(wrong), digest(CONTENT)):
        assert part in str(caught.value)
    assert path.read_bytes() == wrong
    assert server.asked == []


def test_a_damaged_file_in_the_cache_is_fetched_anew(tiny, server):
    server.answers = {"/first": [CONTENT]}
    tiny.parent.mkdir(parents=True)
    tiny.write_bytes(b"x" * len(CONTENT))
    assert fetch("tiny", progress=False) == (tiny,)
    assert tiny.read_bytes() == CONTENT


def test_the_source_is_named_where_progress_is_wanted(tiny, server, capsys):
    server.answers = {"/first": [CONTENT]}
    fetch("tiny", progress=False)
    assert capsys.readouterr().err == ""
    tiny.unlink()
    fetch("tiny")
    assert capsys.readouterr().err == f"tiny: {len(CONTENT):,} bytes from {server.url}/first\n"


@pytest.mark.parametrize(("name", "content"), [("tiny.csv", CONTENT), ("tiny.csv.gz", PACKED)])
def test_files_are_verified_by_their_content(tiny, tmp_path, monkeypatch, name, content):
    assert fetching.verify("tiny") == {"tiny.csv": "missing"}
    path = users(tmp_path, monkeypatch, name, content)
    assert fetching.verify("tiny") == {}
    path.write_bytes(content[:-1] + b"!")
    assert "expected checksum" in fetching.verify("tiny")["tiny.csv"]


def test_a_file_may_be_known_by_its_git_blob(cache, server, monkeypatch):
    """Its size is not known; `git hash-object` gives its name."""
    blob = DataFile("tiny.csv", 0, "git:ce013625030ba8dba906f756967f9e9ca394464a", (f"{server.url}/first",))
    monkeypatch.setitem(fetching.DATA_SETS, "tiny", DataSet("tiny", "a test", "tables/tiny", (blob,), instead="wheel"))
    server.answers = {"/first": [b"hello", b"hello\n"]}
    with pytest.raises(DataError, match="wrong checksum: git:"):
        fetch("tiny", progress=False)
    assert fetch("tiny", progress=False) == (cache / "tiny.csv",)
    assert locate("tiny") == {"tiny.csv": cache / "tiny.csv"}
    assert fetching.verify("tiny") == {}
