"""Finds a data set's files: the folder BAYESADAM_DATA, then the user's cache, then their public source.

Every folder is laid out alike, as `DataSet.folder` says. A download is checked against its checksum before it takes its
name, so a file in the cache is whole.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam.data.registry import Copy, DataFile, DataSet, data_set
from bayesadam.errors import DataError, FileError, MissingExtraError, SettingError

DATA_VARIABLE = "BAYESADAM_DATA"
CACHE_VARIABLE = "BAYESADAM_CACHE"

# Rounds over the sources that may yet answer, and the seconds before the second round; each later wait is twice as long.
ROUNDS = 3
FIRST_WAIT = 0.5
TIMEOUT = 20.0
# Answers that a second try may change.
_PASSING = {408, 425, 429}
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Found:
    """A file of a data set on this machine, and the form in which it lies there."""

    copy: Copy
    path: Path


@dataclass(frozen=True)
class FileCheck:
    """What `verify` says of one file, by its published name; `path` is None where it is missing.

    `expected` is the sha256 of the form that is there, or of the published file where none is; `found` that of the file.
    """

    data_set: str
    file: str
    status: Literal["ok", "missing", "wrong checksum"]
    expected: str
    found: str | None = None
    path: Path | None = None


def data_folder() -> Path | None:
    """The folder named by BAYESADAM_DATA, if any is."""
    named = os.environ.get(DATA_VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise SettingError(f"{DATA_VARIABLE} names {folder}, which is not a folder: correct it, or unset it")
    return folder


def cache_folder() -> Path | None:
    """The folder downloads go to: BAYESADAM_CACHE, or pooch's for this user; None where pooch is not installed."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    try:
        return Path(require("pooch").os_cache("bayesadam"))
    except MissingExtraError:
        return None


def find(name: str, folders: Collection[Path] | None = None) -> dict[str, Found]:
    """The files of a data set in some folders, by default the usual ones, by published name; nothing is read or fetched."""
    record, found = data_set(name), dict[str, Found]()
    for file, folder in product(record.files, _folders() if folders is None else folders):
        for copy in file.copies:
            path = folder / record.folder / copy.name
            if path.is_file():
                # The first that is there counts: setdefault keeps it.
                found.setdefault(file.name, Found(copy, path))
    return found


def locate(name: str, files: Collection[str] | None = None, *, progress: bool = False) -> dict[str, Path]:
    """Where the wanted files of a data set are, by published name; what is in neither folder is downloaded to the cache.

    Raises:
        DataError: a file has the wrong size, or is absent and cannot be downloaded.
    """
    record, present = data_set(name), find(name)

    def path(file: DataFile) -> Path:
        found = present.get(file.name)
        return _download(record, file, cache_folder(), progress) if found is None else _sized(record, found)

    return {file.name: path(file) for file in record.files if files is None or file.name in files}


def fetch(name: str, *, folder: str | Path | None = None, progress: bool = True) -> tuple[Path, ...]:
    """Bring every file of a data set to this machine, check it against its checksum, and say where it is.

    A damaged file in the cache is fetched again; one in BAYESADAM_DATA is the user's, and so an error. An embedded set
    has no files. The files are brought to `folder`, for use as BAYESADAM_DATA; by default they are looked for in the
    usual places, and the cache takes those that are in neither.
    """
    record = data_set(name)
    target = cache_folder() if folder is None else Path(folder)
    paths, users = [], data_folder()
    for file, check in zip(record.files, verify(name, None if folder is None else (Path(folder),)), strict=True):
        if check.status == "wrong checksum" and check.path and users in check.path.parents:
            damage = f"{check.path} is damaged: its sha256 is {check.found}, expected {check.expected}"
            raise DataError(f"{damage}: replace it, or remove it to have it fetched")
        if check.status == "ok" and check.path is not None:
            paths.append(check.path)
        else:
            paths.append(_download(record, file, target, progress))
    return tuple(paths)


def verify(name: str, folders: Collection[Path] | None = None) -> list[FileCheck]:
    """Read every file of a data set, as `find` does, and compare its sha256 with the published one; nothing is fetched."""
    record, present, checks = data_set(name), find(name, folders), []
    for file in record.files:
        found = present.get(file.name)
        if found is None:
            checks.append(FileCheck(record.name, file.name, "missing", file.published.sha256))
            continue
        digest = _sha256(found.path)
        status: Literal["ok", "wrong checksum"] = "ok" if digest == found.copy.sha256 else "wrong checksum"
        checks.append(FileCheck(record.name, file.name, status, found.copy.sha256, digest, found.path))
    return checks


def _folders() -> tuple[Path, ...]:
    return tuple(folder for folder in (data_folder(), cache_folder()) if folder is not None)


def _sized(record: DataSet, found: Found) -> Path:
    """The path, if the size is right: a truncated file is caught without reading it."""
    size = found.path.stat().st_size
    if size != found.copy.n_bytes:
        raise DataError(
            f"{found.path} has {size:,} bytes, expected {found.copy.n_bytes:,}: it is truncated or another file; "
            f"remove it, then `bayesadam data fetch {record.name}`"
        )
    return found.path


def _sha256(path: Path) -> str:
    try:
        digest = hashlib.sha256()
        with path.open("rb") as handle:
            while chunk := handle.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


class _UnansweredError(Exception):
    """A source did not deliver, and may yet."""


class _RefusedError(_UnansweredError):
    """A source answered, and asking it again would not help."""


def _download(record: DataSet, file: DataFile, folder: Path | None, progress: bool) -> Path:
    """Download one file into `folder`; it has its name only once it is whole."""
    if not file.urls:
        raise DataError(f"{_absent(record, file, folder)}; no public source is known")
    try:
        require("pooch")
    except MissingExtraError as error:
        raise DataError(f"{_absent(record, file, folder)}; to download it, {error}") from error
    if folder is None:
        raise DataError(f"{_absent(record, file, folder)}; to download it, name a folder in {CACHE_VARIABLE}")
    target = folder / record.folder / file.name
    reasons = dict.fromkeys(file.urls, "")
    waiting = list(file.urls)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for number in range(ROUNDS):
            if number and waiting:
                time.sleep(FIRST_WAIT * 2 ** (number - 1))
            for url in tuple(waiting):
                try:
                    with replacing(target) as temporary, _bar(f"{record.name}/{file.name}", progress) as bar:
                        _get(url, temporary, bar)
                        _unpack(url, temporary, file)
                        _check(temporary, file)
                    return target
                except _UnansweredError as error:
                    reasons[url] = str(error)
                    if isinstance(error, _RefusedError):
                        waiting.remove(url)
    except DataError:
        raise
    except FileError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"cannot save to {target}: {error.strerror or error}") from error
    answers = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
    raise DataError(f"{_absent(record, file, folder)}; no source delivered it ({answers})")


def _get(url: str, target: Path, bar: Callable[..., object]) -> None:
    # It comes with pooch.
    requests = require("requests")
    # A server that packs what it sends would have it unpacked on arrival, .gz files included.
    asked: Any = {"stream": True, "timeout": TIMEOUT, "headers": {"Accept-Encoding": "identity"}}
    try:
        with requests.get(url, **asked) as answer, target.open("wb") as file:
            answer.raise_for_status()
            bar(total=int(answer.headers.get("content-length", 0)) or None)
            for chunk in answer.iter_content(_CHUNK):
                file.write(chunk)
                bar(advance=len(chunk))
    except requests.RequestException as error:
        answer = error.response if isinstance(error, requests.HTTPError) else None
        if answer is not None and 400 <= answer.status_code < 500 and answer.status_code not in _PASSING:
            raise _RefusedError(f"HTTP {answer.status_code} {answer.reason}") from error
        raise _UnansweredError(_first_cause(error)) from error


def _unpack(url: str, path: Path, file: DataFile) -> None:
    """Put the packed file's content in its place, where the source delivers it packed."""
    packing = PurePosixPath(url).suffix
    if packing not in (".gz", ".zip") or file.name.endswith(packing):
        return
    # One byte more than expected shows a wrong file, whatever it would unpack to.
    limit = file.published.n_bytes + 1
    try:
        with ExitStack() as stack:
            if packing == ".gz":
                stream: Any = stack.enter_context(gzip.open(path))
            else:
                archive = stack.enter_context(zipfile.ZipFile(path))
                largest = max(archive.infolist(), key=lambda member: member.file_size)
                stream = stack.enter_context(archive.open(largest))
            content = stream.read(limit)
    except (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise _RefusedError(f"not a {packing} file ({error})") from error
    path.write_bytes(content)


def _check(path: Path, file: DataFile) -> None:
    digest = _sha256(path)
    if digest != file.published.sha256:
        raise _RefusedError(
            f"wrong checksum: {path.stat().st_size:,} bytes of sha256 {digest}, "
            f"expected {file.published.n_bytes:,} of {file.published.sha256}"
        )


def _absent(record: DataSet, file: DataFile, folder: Path | None) -> str:
    """What is missing, where it was looked for, and what to do."""
    named = data_folder()
    data = f"{DATA_VARIABLE} (not set)" if named is None else str(named / record.folder)
    places = [data] if folder is None else [data, str(folder / record.folder)]
    return (
        f"{file.name} of the data set {record.name!r} is in none of {', '.join(places)}: put it there by hand, "
        f"or use the embedded set {record.instead!r}, which needs no file"
    )


def _first_cause(error: BaseException) -> str:
    """What went wrong, without the layers that passed it on."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    return str(error) or type(error).__name__


@contextmanager
def _bar(name: str, shown: bool) -> Iterator[Callable[..., object]]:
    """What is told the total and each advance in bytes; with `shown`, rich draws it on standard error."""
    if not shown:
        yield lambda **_: None
        return
    rich = require("rich.progress")
    console = require("rich.console").Console(stderr=True)
    kinds = (rich.BarColumn, rich.DownloadColumn, rich.TransferSpeedColumn, rich.TimeRemainingColumn)
    with rich.Progress("{task.description}", *(kind() for kind in kinds), console=console) as bars:
        yield partial(bars.update, bars.add_task(name, total=None))
