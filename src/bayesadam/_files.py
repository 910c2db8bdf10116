"""Files that are whole or absent."""

import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bayesadam.errors import FileError, MatchError, MissingFileError

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
    """A temporary file in the folder of `path` that replaces it on success and is removed otherwise."""
    target = Path(path)
    if not target.parent.is_dir():
        raise MissingFileError(f"cannot save to {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise FileError(f"cannot save to {target}: it is a folder")
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            with temporary.open("rb+") as handle:
                os.fsync(handle.fileno())
            os.umask(mask := os.umask(0))
            temporary.chmod(target.stat().st_mode if target.exists() else 0o666 & ~mask)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"cannot save to {target}: {error.strerror or error}") from error


def keep_apart(out: Path, *sources: Path | None) -> None:
    """Refuse to overwrite a file, or one inside a folder, that is read."""
    for source in sources:
        if source is None or not out.exists() or not source.exists():
            continue
        if out.samefile(source) or (source.is_dir() and source.resolve() in out.resolve().parents):
            raise FileError(f"{out} would overwrite what is read: write to another file")
