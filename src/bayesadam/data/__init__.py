"""Data sets."""

from bayesadam.data.toy import ToyData, toy_function, toy_grid, toy_points

__all__ = ["ToyData", "toy_function", "toy_grid", "toy_points"]
