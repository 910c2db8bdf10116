"""Optional packages, and the extra that installs each."""

import importlib
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from bayesadam.errors import MissingExtraError

# import name → extra; None for the light packages of the command line, which a plain install has.
EXTRA_OF: dict[str, str | None] = {
    **dict.fromkeys(("matplotlib", "typer")),
    **dict.fromkeys(("accelerate", "peft", "transformers"), "transformers"),
    **dict.fromkeys(("onnx", "onnxscript"), "onnx"),
    **{name: name for name in ("botorch", "lightning", "sklearn")},
    "torch_pruning": "prune",
}


def require(module: str) -> ModuleType:
    """Import `module`, or say how to install it.

    >>> require("math").__name__
    'math'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise
        extra = EXTRA_OF.get(package)
        target = f"bayesadam[{extra}]" if extra else "bayesadam" if package in EXTRA_OF else package
        message = f"this needs the package {package!r}, which is not installed: pip install '{target}'"
        raise MissingExtraError(message, name=package) from error


def from_extra(package: str, names: Collection[str], module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package with some names of a module, which an extra's package is imported with."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module.rpartition('.')[0]!r} has no attribute {name!r}")
        require(package)
        return getattr(importlib.import_module(module), name)

    return get
