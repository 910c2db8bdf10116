"""`python -m bayesadam`, and the `bayesadam` command."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from bayesadam._extras import require
from bayesadam.errors import BayesAdamError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; errors of the library, Ctrl-C and missing packages end in one line, not in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        # Reports hold Greek letters and signs; a console that cannot show them gets question marks, not a crash.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        for package in ("typer", "rich"):
            require(package)
        require("bayesadam.cli").app(arguments, prog_name="bayesadam")
    except BayesAdamError as error:
        print("bayesadam:", *str(error).split(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bayesadam: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
