"""Tables: the estimators beside those of other packages."""
