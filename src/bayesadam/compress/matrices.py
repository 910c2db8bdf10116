"""Layers as matrices, see `predict.matrices`."""

from bayesadam.predict.matrices import Matrix, matrices_of

__all__ = ["Matrix", "matrices_of"]
