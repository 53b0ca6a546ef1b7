"""What all commands have in common: `--json`, exit codes, and the name of the function that runs them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

EPILOG = (
    "Exit code: 0, 1 where the check failed, 2 where the command was used wrongly or the program failed, 70 where spmdctx itself did, "
    "75 where SIGTERM came and the training has saved, 130 where it was interrupted."
)


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: what it does not know is an error of its own, with its usage and not that of all commands."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses all arguments; `ArgumentParser` calls this for a command, and leaves the rest to the parser of all."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def add_command(commands: Any, name: str, run: str, text: str) -> argparse.ArgumentParser:
    """Adds a command; `run` is its function, as "module:function" below `spmdctx.cli`."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EPILOG)
    parser.add_argument("--json", action="store_true", help="print one JSON object to standard output; progress goes to standard error")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what goes on (tracing, planning, compiling) to standard error")
    parser.set_defaults(run=f"spmdctx.cli.{run}")
    return parser
