"""scikit-learn estimators: small networks trained by AdamW, with the posterior that it kept."""

from typing import TYPE_CHECKING

from bayesadam._extras import from_extra

if TYPE_CHECKING:
    from bayesadam.sklearn.estimators import BadamClassifier, BadamRegressor, log_likelihood

__all__ = ["BadamClassifier", "BadamRegressor", "log_likelihood"]
# It is imported with the first of these names.
__getattr__ = from_extra("sklearn", __all__, "bayesadam.sklearn.estimators")
