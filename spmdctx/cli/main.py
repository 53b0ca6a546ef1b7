"""Runs the command that the command line names; its module, and with it JAX, is imported only then."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from spmdctx.cli.parser.commands import command_parser

if TYPE_CHECKING:
    from spmdctx.cli.output import Output


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Arguments of a script on a cluster follow "--"; those of launch follow the script.
    end = words.index("--") if words[:1] == ["k8s"] and "--" in words else len(words)
    parser = command_parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)  # answers a shell, and ends the process
    arguments = parser.parse_args(words[:end])
    if end < len(words) or words[:1] == ["k8s"]:
        arguments.arguments = words[end + 1 :]
    from spmdctx.cli.output import Output, failed

    output = Output(arguments.json)
    if getattr(arguments, "verbose", False):
        logging.basicConfig(stream=sys.stderr, format="%(message)s")
        logging.getLogger("spmdctx").setLevel(logging.INFO)
    with warnings.catch_warnings(), output.prints_aside():
        warnings.showwarning = _show_warning
        try:
            return _command_of(arguments)(arguments, output)
        except (Exception, KeyboardInterrupt) as error:
            return failed(error)


def _command_of(arguments: argparse.Namespace) -> Callable[[argparse.Namespace, Output], int]:
    module, _, name = arguments.run.partition(":")
    run: Callable[[argparse.Namespace, Output], int] = getattr(import_module(module), name)
    return run


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    from spmdctx.cli.output import print_warning

    print_warning(category.__name__, str(message))


if __name__ == "__main__":
    sys.exit(main())
