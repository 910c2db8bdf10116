"""Arguments that are what they should be, and in their order."""

from bayesadam.errors import MatchError


def require_kind(value: object, kind: type | tuple[type, ...], name: str) -> None:
    """Raise unless the argument of that name is of a kind.

    >>> require_kind("a.pt", (dict, list), "masks")
    Traceback (most recent call last):
    bayesadam.errors.MatchError: masks must be a dict or list, got str: are the arguments in their order?
    """
    if not isinstance(value, kind):
        kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise MatchError(f"{name} must be a {kinds}, got {type(value).__name__}: are the arguments in their order?")
