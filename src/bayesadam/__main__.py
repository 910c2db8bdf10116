"""`python -m bayesadam`, and the `bayesadam` command."""

import io
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bayesadam._extras import require
from bayesadam._options import in_options
from bayesadam.errors import BayesAdamError, BayesAdamWarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the library's errors, Ctrl-C and missing packages end in one line, without a traceback.

    With `--json` an error of the library is an object on standard output, too: whoever parses that finds it there.
    """
    for stream in (sys.stdout, sys.stderr):
        # A console that cannot show Greek letters gets question marks, not a crash.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        require("typer")
        with _plain_warnings():
            require("bayesadam.cli").app(arguments, prog_name="bayesadam")
    except BayesAdamError as error:
        # A list of what to choose from has an indented line for each.
        message = "\n  ".join(" ".join(line.split()) for line in in_options(str(error)).split("\n  "))
        print("bayesadam:", message, file=sys.stderr)
        if "--json" in (sys.argv if arguments is None else arguments):
            print(json.dumps({"error": message}, ensure_ascii=False))
        return 2
    except KeyboardInterrupt:
        print("bayesadam: interrupted", file=sys.stderr)
        return 130
    return 0


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """The library's warnings without the file and the line, which are not the user's."""
    usual = warnings.formatwarning

    def plain(message: Any, category: type[Warning], *place: Any, **others: Any) -> str:
        if not issubclass(category, BayesAdamWarning):
            return usual(message, category, *place, **others)
        return f"bayesadam: warning: {in_options(str(message))}\n"

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


if __name__ == "__main__":
    sys.exit(main())
