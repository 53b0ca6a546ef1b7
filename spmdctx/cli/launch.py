"""`spmdctx launch`: runs a script as several processes on this machine."""

from __future__ import annotations

import argparse
import sys

from spmdctx.cli.output import Output
from spmdctx.cli.values import positive, positive_number
from spmdctx.communication.launch import Job, run_job


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `launch`."""
    parser.add_argument("-n", "--num-processes", type=positive, required=True, metavar="N", help="processes to start")
    parser.add_argument("--devices-per-process", type=positive, default=1, metavar="N", help="CPU devices or GPUs of each (default: 1)")
    parser.add_argument("--timeout", type=positive_number, metavar="SECONDS", help="after it everything is killed (default: no limit)")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module, as in python -m")
    parser.add_argument("script", help="a Python script that calls spmdctx.communication.init()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def launch(arguments: argparse.Namespace, output: Output) -> int:
    """Runs a script as several processes; returns the exit code of the first one that failed, or 124 after a timeout."""
    script = ["-m", arguments.script] if arguments.module else [arguments.script]
    job = Job([*script, *arguments.arguments], arguments.num_processes, arguments.devices_per_process, arguments.timeout)
    outcome = run_job(job, sys.stderr if output.as_json else None)
    if outcome.trouble:
        sys.stderr.write(f"error: {outcome.trouble}\n")
    output.finish({"exit_code": outcome.code, "trouble": outcome.trouble})
    return outcome.code
