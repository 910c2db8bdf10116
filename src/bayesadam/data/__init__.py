"""Data sets: what there is, where it is, and how to load it."""

from bayesadam.data.fetching import DataSet, data_set, data_sets, fetch, find, locate, verify
from bayesadam.data.loaders import Images, Table, load_images, load_split, load_table
from bayesadam.data.toy import ToyData, toy_function, toy_grid, toy_points

__all__ = [
    "DataSet",
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
