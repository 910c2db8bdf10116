"""The kinds of files and folders that are known: one record each, distinguished by their content."""

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bayesadam.errors import FileError, MissingFileError, SettingError
from bayesadam.readers.formats.contents import Contents, Keys

_WEIGHTS = re.compile(r"(?<![a-z])(params|parameters|weights|model|net|network|module)(?![a-z])", re.IGNORECASE)
_STATES = ("optimizer", "optim", "opt")


@dataclass(frozen=True)
class Format:
    """A kind of file or folder.

    Attributes:
        name: its name in `Checkpoint.format`.
        recognises: (path, the first bytes; none for a folder) → whether it is of this kind.
        read: (path) → all that it holds; raises FileError where it is damaged.
        rewrite: (source, keys of some weights, those keys → other weights, target) writes it again with these; or None.
        folder: whether it is a folder.
    """

    name: str
    recognises: Callable[[Path, bytes], bool]
    read: Callable[[Path], Contents]
    rewrite: Callable[[Path, Collection[Keys], Callable[[Keys], Tensor], Path], None] | None = None
    folder: bool = False


_registry: dict[str, Format] = {}


def registered_formats() -> tuple[Format, ...]:
    """Every known format, the last registered first: that is the order in which they are tried."""
    return tuple(reversed(_registry.values()))


def register_format(added: Format) -> Format:
    """Add a format; a later one is tried before an earlier one."""
    if added.name in _registry:
        raise SettingError(f"a format named {added.name!r} exists already: choose another name")
    _registry[added.name] = added
    return added


def format_of(path: str | os.PathLike[str]) -> Format:
    """The format of a file or folder, by its content."""
    path = Path(path)
    if not path.exists():
        raise MissingFileError(f"no file at {path}")
    is_folder, head = path.is_dir(), b""
    if not is_folder:
        try:
            with path.open("rb") as file:
                head = file.read(512)
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror}") from None
        if not head:
            raise FileError(f"{path} is empty")
    for kind in registered_formats():
        if kind.folder == is_folder and kind.recognises(path, head):
            return kind
    if is_folder:
        inside = sorted(entry.name for entry in path.iterdir())[:8]
        raise FileError(f"{path} is a folder of no known format; it has {inside}. Pass the file with the weights")
    raise FileError(f"{path} is of no known format; it starts with {head[:32]!r}")


def states_beside(path: Path) -> list[Path]:
    """The files with an optimiser's state next to weights: `optimizer.pt` next to `params.pt`, as by skorch.

    Without one, the saved posterior that was published with them: `posterior.safetensors` next to `model.safetensors`
    or `pytorch_model.bin`.
    """
    role = _WEIGHTS.search(path.stem)
    if role is None:
        return []
    before, after = path.name[: role.start()], path.name[role.end() :]
    states = [path.with_name(before + word + after) for word in _STATES]
    published = path.with_name(before.removesuffix("pytorch_") + "posterior" + after).with_suffix(".safetensors")
    return [file for file in states if file.is_file()] or [file for file in [published] if file.is_file()]
