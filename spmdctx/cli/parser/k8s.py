"""The arguments of the commands of `spmdctx k8s`."""

from __future__ import annotations

import argparse
from pathlib import Path

from spmdctx.cli.k8s.arguments import add_context_argument, add_job_arguments, add_name_arguments
from spmdctx.cli.parser.one import add_command
from spmdctx.cli.parser.values import natural, positive
from spmdctx.k8s.job.options import DEVICES


def add_k8s_commands(parser: argparse.ArgumentParser) -> None:
    """Adds the commands."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = add_command(commands, "manifest", "k8s.commands:manifest", "write the manifest of a job; no cluster is contacted")
    add_job_arguments(one)
    _add_out(one)
    one = add_command(commands, "convert", "k8s.commands:convert_file", "make an MSJob of MindSpore's operator into a JobSet or a RayJob")
    one.add_argument("file", help="a YAML file with an MSJob, or - for standard input")
    one.add_argument("--image", default="", metavar="IMAGE", help="one with JAX and spmdctx (default: the MSJob's)")
    one.add_argument("--device", default="", choices=DEVICES, help="in place of the MSJob's devices (default: those)")
    one.add_argument(
        "--claim", default="", metavar="NAME", help="a PersistentVolumeClaim for checkpoints (default: the first that workers mount)"
    )
    one.add_argument(
        "--checkpoint-path", default="", metavar="PATH", help="where it is mounted (default: /checkpoints, or as in the MSJob)"
    )
    one.add_argument("--namespace", default="", metavar="NAME", help="where the job goes (default: the MSJob's)")
    one.add_argument("--queue", default="", metavar="NAME", help="a LocalQueue of Kueue (default: the MSJob's queue)")
    _add_out(one)
    one = add_command(commands, "submit", "k8s.commands:submit", "hand a job to a cluster: the same arguments as manifest, or --file")
    add_job_arguments(one)
    one.add_argument("-f", "--file", metavar="FILE", help="a manifest to submit in place of a script, or - for standard input")
    one.add_argument("--dry-run", action="store_true", help="have the cluster check the job, and keep nothing of it")
    add_context_argument(one)
    one = add_command(commands, "status", "k8s.commands:status", "say how a job is, with its pods; the exit code is 1 if it has failed")
    add_name_arguments(one)
    one = add_command(commands, "logs", "k8s.commands:logs", "print what a process of a job writes")
    add_name_arguments(one)
    one.add_argument("--process", type=natural, metavar="N", help="its number (default: 0; with servers, what spmdctx launch writes)")
    one.add_argument("--follow", action="store_true", help="go on until it ends")
    one.add_argument("--tail", type=positive, metavar="N", help="the last N lines only (default: all)")
    one = add_command(commands, "delete", "k8s.commands:delete", "delete a job with its pods; checkpoints stay")
    add_name_arguments(one)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write files there (default: standard output)")
