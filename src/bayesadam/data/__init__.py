"""Data sets: what there is, where it is, and how to load it."""

from bayesadam.data.fetching import FileCheck, fetch, find, locate, verify
from bayesadam.data.images import Images, load_images, load_split
from bayesadam.data.registry import DataSet, data_set, data_sets
from bayesadam.data.tables import Table, load_table
from bayesadam.data.toy import ToyData, toy_function, toy_grid, toy_points

__all__ = [
    "DataSet",
    "FileCheck",
    "Images",
    "Table",
    "ToyData",
    "data_set",
    "data_sets",
    "fetch",
    "find",
    "load_images",
    "load_split",
    "load_table",
    "locate",
    "toy_function",
    "toy_grid",
    "toy_points",
    "verify",
]
