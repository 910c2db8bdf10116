"""A BoTorch model of a network that knows how sure it is."""

from typing import TYPE_CHECKING

from bayesadam._extras import from_extra

if TYPE_CHECKING:
    from bayesadam.botorch.model import BadamModel

__all__ = ["BadamModel"]
# It is imported with the first of these names.
__getattr__ = from_extra("botorch", __all__, "bayesadam.botorch.model")
