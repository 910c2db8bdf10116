"""A Gaussian posterior over a network's weights, read off the adaptive optimiser that trained it."""

from typing import TYPE_CHECKING, Any

from bayesadam._version import __version__ as __version__

if TYPE_CHECKING:
    from bayesadam._public import *  # noqa: F403
else:
    from importlib import import_module
    from importlib.util import find_spec

    def __getattr__(name: str) -> Any:
        """A module of this package, or a public name: torch is imported with the first of them and not before."""
        if not name.startswith("__") and find_spec(f"bayesadam.{name}") is not None:
            return import_module(f"bayesadam.{name}")
        if name == "__all__" or not name.startswith("_"):
            public = import_module("bayesadam._public")
            if name == "__all__" or name in public.__all__:
                return globals().setdefault(name, getattr(public, name))
        raise AttributeError(f"module 'bayesadam' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("bayesadam._public").__all__})
