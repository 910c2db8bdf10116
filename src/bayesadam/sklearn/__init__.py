"""scikit-learn estimators: small networks trained by AdamW, with the posterior that it kept."""

from typing import TYPE_CHECKING, Any

from bayesadam._extras import require

if TYPE_CHECKING:
    from bayesadam.sklearn.estimators import BadamClassifier, BadamRegressor

__all__ = ["BadamClassifier", "BadamRegressor"]


def __getattr__(name: str) -> Any:
    """An estimator: scikit-learn, an extra, is imported with the first of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("sklearn")
    from bayesadam.sklearn import estimators

    return getattr(estimators, name)
