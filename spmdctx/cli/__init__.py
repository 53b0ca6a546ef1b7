"""The command line: one file per command; `main` reads the arguments and calls it."""

from spmdctx.cli.main import main

__all__ = ["main"]
