"""scikit-learn estimators: small networks trained by AdamW, with the posterior that it kept."""

from bayesadam._extras import require

# Before the estimators import it by name: a missing scikit-learn is to be met with the extra that brings it.
require("sklearn")

from bayesadam.errors import DivergedError  # noqa: E402
from bayesadam.sklearn.estimators import BadamClassifier, BadamRegressor  # noqa: E402

__all__ = ["BadamClassifier", "BadamRegressor", "DivergedError"]
