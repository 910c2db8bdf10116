"""Reads V_t out of an optimiser or its saved state: one record each, one registry."""

from bayesadam.readers.read import Curvature, read_optimizer, read_state_dict
from bayesadam.readers.reader import StateReader
from bayesadam.readers.registry import reader_named, reader_of, register, registered

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
