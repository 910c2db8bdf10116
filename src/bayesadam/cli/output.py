"""What the commands print and write."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bayesadam._files import keep_apart
from bayesadam._options import in_options
from bayesadam.errors import FileError, SettingError


def show(report: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Print a report as JSON that any reader takes, null for what is not finite; or as text."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(plain(report), indent=2, ensure_ascii=False) if as_json else in_options(text))


def write(
    work: Callable[[Path], object], out: Path, usual: str, sources: Sequence[Path | None], quiet: bool = True
) -> None:
    """Let the work write its file, apart from what it reads; print what it reports, then the file's path.

    The file is `out` where that has an ending, else the usual name in that folder.
    """
    file = out if out.suffix and not out.is_dir() else out / usual
    keep_apart(file, *sources)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot write to {file.parent}: {error.strerror}") from None
    report = work(file)
    if not quiet:
        print(in_options(str(report or f"{file.stat().st_size:,} bytes")), end="\n\n")
    print(file)


def called(name: str) -> Any:
    """What a function gives that is named module:function; modules of this folder are found."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise SettingError(f"{name!r} must be module:function, such as app:model for `def model()` of app.py")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise SettingError(f"{name}: {error}. Modules of the current folder and installed ones are found") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    return make()
