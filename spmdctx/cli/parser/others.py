"""The arguments of `launch`, `calibrate`, `strategies`, `env` and `completion`."""

from __future__ import annotations

import argparse
from pathlib import Path

from spmdctx.cli.parser.values import natural, positive, positive_number
from spmdctx.context.options import SEARCH_MODES
from spmdctx.context.servers import MODES


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `launch`."""
    parser.add_argument("-n", "--num-processes", type=positive, metavar="N", help="processes to start (default: servers and workers)")
    parser.add_argument("--devices-per-process", type=positive, default=1, metavar="N", help="CPU devices or GPUs of each (default: 1)")
    parser.add_argument("--timeout", type=positive_number, metavar="SECONDS", help="after it everything is killed (default: no limit)")
    served = parser.add_argument_group("parameter server", "Servers hold the state, workers run the script.")
    served.add_argument("--servers", type=positive, metavar="N", help="servers to start (default: none)")
    served.add_argument("--workers", type=positive, metavar="N", help="workers to start, with --servers (default: none)")
    served.add_argument("--mode", choices=MODES, help="whether workers wait for each other (default: sync)")
    served.add_argument("--max-staleness", type=natural, metavar="N", help="updates by which values may be late in async (default: 4)")
    served.add_argument("--save-every", type=positive, metavar="N", help="updates between two saved states (default: 10)")
    served.add_argument("--folder", metavar="FOLDER", help="where states are saved; a job goes on from those (default: a temporary one)")
    served.add_argument("--address", metavar="HOST:PORT", help="a cluster of Ray that runs (default: one on this machine)")
    served.add_argument(
        "--scale", metavar="FOLDER", help="give the job that saves there --servers or --workers, and end (default: start a job)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module, as in python -m")
    parser.add_argument("script", nargs="?", help="a Python script, which with -n calls spmdctx.communication.init()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the topology as .json or .yaml, for --topology (default: no file)")
    parser.add_argument(
        "--device-num",
        type=positive,
        default=8,
        metavar="N",
        help="virtual CPU devices without an accelerator (default: %(default)s)",
    )
    parser.add_argument("--megabytes", type=positive, help="size of the tensors that are moved (default: 64 on CPUs, else 1024)")
    parser.add_argument("--repeats", type=positive, default=5, help="timings, of which the shortest counts (default: %(default)s)")


def add_strategies_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `strategies`."""
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a file is not what would be made")
    parser.add_argument("--model", metavar="NAME", help="only this model's files (default: all models)")
    parser.add_argument("--device-num", type=positive, metavar="N", help="only those for this many devices (default: any number)")
    parser.add_argument("--only", choices=("hand", "searched"), help="hand strategies and contexts, or searched plans (default: both)")
    parser.add_argument("--search-mode", choices=SEARCH_MODES, default="", help="of the searched plans (default: the library's own)")
    parser.add_argument("--folder", type=Path, help="a library of your own, with its rows.yaml (default: the one that is installed)")


def add_env_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `env`."""
    parser.add_argument("--config", metavar="FILE.yaml", help="the file whose options belong to the report (default: none)")


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `completion`."""
    parser.description = (
        "Print the script by which a shell completes commands. Have your shell read it when it starts: for bash, put "
        'eval "$(spmdctx completion bash)" into ~/.bashrc; for zsh the same with zsh into ~/.zshrc; for fish, '
        "spmdctx completion fish | source into ~/.config/fish/config.fish."
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
