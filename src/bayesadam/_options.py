"""The library's messages in the words of the command line."""

import re

# Keywords in error messages, and the options of the command line for them.
_OPTIONS = {
    "reader='ogd', optimizer='ogd' of a file": "--optimizer ogd",
    ", or pass forward=lambda model, batch: ...": "",
    "fraction=": "--fraction",
    "scope=": "--scope",
    "n_data=": "--n-data",
    "batch_size=": "--batch-size",
    "base=": "--base",
    "method=": "--method",
    "weights=": "--weight",
    "exclude=": "--exclude",
    "optimizer=": "--optimizer",
    "optimizer_path=": "--optimizer-file",
    "optimizer_key=": "--optimizer-key",
    "weights_key=": "--weights-key",
    "groups_in_order=True": "--groups-in-order",
    "param_names=[...]": "param_names=[...] in Python",
}


def in_options(message: str) -> str:
    """An error's message with the library's keywords as options.

    >>> in_options("pass n_data=, or say which with weights_key='ema'")
    "pass --n-data, or say which with --weights-key 'ema'"
    >>> in_options("weights_key='a,b', optimizer_key='o'")
    "--weights-key 'a,b' --optimizer-key 'o'"
    """
    for keyword, option in _OPTIONS.items():
        spaced = re.sub(rf"(?<!\w){re.escape(keyword)}(?=['\"\d])", f"{option} ", message)
        message = re.sub(rf"(?<!\w){re.escape(keyword)}", option, spaced)
    # Options that are given together, as on a command line.
    return re.sub(r"', (?=--)", "' ", message)
