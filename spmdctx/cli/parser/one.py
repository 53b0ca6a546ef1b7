"""What all commands have in common: `--json`, exit codes, and the name of the function that runs them."""

from __future__ import annotations

import argparse
from typing import Any

EPILOG = (
    "Exit code: 0, 1 where the check failed, 2 where the command was used wrongly or the program failed, 70 where spmdctx itself did, "
    "75 where SIGTERM came and the training has saved, 130 where it was interrupted."
)


def add_command(commands: Any, name: str, run: str, text: str) -> argparse.ArgumentParser:
    """Adds a command; `run` is its function, as "module:function" below `spmdctx.cli`."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EPILOG)
    parser.add_argument("--json", action="store_true", help="print one JSON object to standard output; progress goes to standard error")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what goes on (tracing, planning, compiling) to standard error")
    parser.set_defaults(run=f"spmdctx.cli.{run}")
    return parser
