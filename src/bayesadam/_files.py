"""Files that are whole or absent."""

import glob
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bayesadam.errors import FileError, MatchError, MissingFileError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

# What reading a damaged file may raise.
DAMAGE = (
    *(RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(MemoryError, AssertionError, struct.error, zlib.error, zipfile.BadZipFile),
)


@contextmanager
def damage_named(name: object, writer: str) -> Iterator[None]:
    """Whatever reading a damaged file raises becomes a FileError that names it, also of settings that mean nothing."""
    try:
        yield
    except (FileError, MatchError):
        raise
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise FileError(f"{name} is truncated, damaged or not a file of {writer} ({reason})") from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file in the folder of `path` that replaces it on success and is removed otherwise.

    It is locked, so that the next save of the same path can remove what a killed process left, and nothing else.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise MissingFileError(f"cannot save to {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise FileError(f"cannot save to {target}: it is a folder")
    try:
        for left in target.parent.glob(f".{glob.escape(target.name)}.????????.tmp"):
            _remove_left(left)
        descriptor, temporary = _locked(target)
        try:
            yield temporary
            with temporary.open("rb+") as handle:
                os.fsync(handle.fileno())
            os.umask(mask := os.umask(0))
            temporary.chmod(target.stat().st_mode if target.exists() else 0o666 & ~mask)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"cannot save to {target}: {error.strerror or error}") from error


def _locked(target: Path) -> tuple[int, Path]:
    """A new temporary file, open and locked."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        if fcntl is None:
            # Windows replaces no file that is open.
            os.close(descriptor)
            return os.open(os.devnull, os.O_RDONLY), Path(name)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another save may have taken it for left before it was locked.
        if os.fstat(descriptor).st_nlink:
            return descriptor, Path(name)
        os.close(descriptor)


def _remove_left(path: Path) -> None:
    """Remove a temporary file that no process has locked."""
    # Where files cannot be locked, nothing is removed.
    with suppress(OSError), path.open("rb+") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def keep_apart(out: Path, *sources: Path | None) -> None:
    """Refuse to overwrite a file, or one inside a folder, that is read."""
    for source in sources:
        if source is None or not out.exists() or not source.exists():
            continue
        if out.samefile(source) or (source.is_dir() and source.resolve() in out.resolve().parents):
            raise FileError(f"{out} would overwrite what is read: write to another file")
