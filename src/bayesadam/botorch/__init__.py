"""A BoTorch model of networks that know how sure they are, and the process behind it, which needs no BoTorch."""

from typing import TYPE_CHECKING, Any

from bayesadam._extras import require

if TYPE_CHECKING:
    from bayesadam.botorch.model import BadamModel

__all__ = ["BadamModel"]


def __getattr__(name: str) -> Any:
    """The model: BoTorch, an extra, is imported with it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("botorch")
    from bayesadam.botorch import model

    return getattr(model, name)
