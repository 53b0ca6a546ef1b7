"""The parser of the command line: `spmdctx train | generate | plan | explain | audit | diff | verify | strategies | ...`."""

from __future__ import annotations

import argparse
from pathlib import Path

from spmdctx import __version__
from spmdctx.cli.parser.k8s import add_k8s_commands
from spmdctx.cli.parser.one import EPILOG, CommandParser, add_command
from spmdctx.cli.parser.others import (
    add_calibrate_arguments,
    add_completion_arguments,
    add_env_arguments,
    add_launch_arguments,
    add_strategies_arguments,
)
from spmdctx.cli.parser.program import add_program_arguments, add_target_argument
from spmdctx.cli.parser.training import add_generate_arguments, add_train_arguments
from spmdctx.cli.parser.values import fraction

_RTOL_HELP = (
    "accept differences of X times a result's largest value (default: only what rounding alone does to the result on one device, "
    "which is measured)"
)


def command_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(prog="spmdctx", description="Automatic parallelism for JAX training steps.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"spmdctx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    add_train_arguments(
        add_command(commands, "train", "train:train", "train a small language model: plan, progress, audit, numerics check")
    )
    add_generate_arguments(
        add_command(commands, "generate", "generate:generate", "generate text from a checkpoint, split over other devices")
    )
    one = add_command(commands, "plan", "plans:plan", "show how a program would be split, and what it would communicate")
    one.add_argument("--save", type=Path, metavar="FILE", help="write the plan as JSON (default: no file)")
    one.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page (default: no file)")
    one.add_argument(
        "--export",
        choices=("jax", "rules"),
        help="what to write to --out: a module for JAX alone, or logical axis rules (default: nothing)",
    )
    one.add_argument("--out", type=Path, metavar="FILE", help="the file for --export (default: no file)")
    add_program_arguments(one)
    one = add_command(commands, "explain", "plans:explain", "say why tensors or ops of a saved plan are split as they are")
    one.add_argument("plan", type=Path, help="a plan file")
    one.add_argument("pattern", help="part of a path such as layers/3/attention, a glob, an op name or a source line")
    one = add_command(commands, "audit", "plans:audit", "compile a program and compare its collectives and memory with the plan")
    add_target_argument(one)
    add_program_arguments(one)
    one = add_command(commands, "diff", "plans:diff", "compare two saved plans")
    one.add_argument("before", type=Path, help="a plan file")
    one.add_argument("after", type=Path, help="another")
    one = add_command(commands, "verify", "plans:verify", "run a step split and on one device, and compare the numbers")
    one.add_argument("--rtol", type=fraction, metavar="X", help=_RTOL_HELP)
    add_program_arguments(one)
    add_strategies_arguments(
        add_command(commands, "strategies", "strategies:strategies", "make the library of ready strategies, or check its files")
    )
    one = add_command(
        commands, "calibrate", "calibrate:calibrate_devices", "measure the devices that are there, as a topology to plan with"
    )
    add_calibrate_arguments(one)
    add_launch_arguments(add_command(commands, "launch", "launch:launch", "run a script as several processes on this machine"))
    add_env_arguments(add_command(commands, "env", "about.environment:env", "print what a bug report needs: versions, devices, variables"))
    add_completion_arguments(
        add_command(commands, "completion", "about.completion:completion", "print the script by which a shell completes commands")
    )
    one = commands.add_parser(
        "k8s", help="run a script on a Kubernetes cluster", description="Jobs on a Kubernetes cluster.", epilog=EPILOG
    )
    add_k8s_commands(one)
    return parser
