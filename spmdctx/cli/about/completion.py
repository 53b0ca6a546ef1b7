"""`spmdctx completion`: prints the script by which a shell completes commands, options and their values."""

from __future__ import annotations

import argparse
import sys

from argcomplete.shell_integration import shellcode

from spmdctx.cli.output import Output


def completion(arguments: argparse.Namespace, output: Output) -> int:
    """Prints the script, to be read by the shell when it starts."""
    shell = arguments.shell
    script: str = shellcode(["spmdctx"], shell=shell)
    if not output.as_json:
        sys.stdout.write(script)
    output.finish_with("completion", {"shell": shell, "script": script})
    return 0
