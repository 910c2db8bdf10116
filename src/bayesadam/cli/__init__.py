"""The command line."""

from bayesadam.cli.commands import app

__all__ = ["app"]
