"""Reads V_t out of an optimiser or its saved state: one record each, one registry."""

from bayesadam.curvature.read import Curvature, read_optimizer, read_state_dict
from bayesadam.curvature.reader import StateReader
from bayesadam.curvature.registry import reader_named, reader_of, register, registered

__all__ = [
    "Curvature",
    "StateReader",
    "read_optimizer",
    "read_state_dict",
    "reader_named",
    "reader_of",
    "register",
    "registered",
]
