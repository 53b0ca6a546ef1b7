"""The command line: `spmdctx train | generate | plan | explain | audit | diff | verify | strategies | calibrate | launch | k8s`."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from spmdctx.cli.calibrate import add_calibrate_arguments, calibrate_devices
from spmdctx.cli.generate import add_generate_arguments, generate
from spmdctx.cli.k8s.commands import add_k8s_commands
from spmdctx.cli.launch import add_launch_arguments, launch
from spmdctx.cli.output import Output, audit_data, diff_data, explain_data, failed, plan_data, verify_data
from spmdctx.cli.program import add_program_arguments, add_target_argument, choose, started, target_options
from spmdctx.cli.strategies import add_strategies_arguments, strategies
from spmdctx.cli.train import add_train_arguments, train
from spmdctx.errors import naming_file
from spmdctx.plan.plan import Plan
from spmdctx.step.verify.verify import checked_rtol

_EPILOG = (
    "Exit code: 0, 1 where the check failed, 2 where the command was used wrongly or the program failed, 70 where spmdctx itself did, "
    "130 where it was interrupted."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Arguments of a script on a cluster follow "--"; those of launch follow the script.
    end = words.index("--") if words[:1] == ["k8s"] and "--" in words else len(words)
    arguments = command_parser().parse_args(words[:end])
    if end < len(words) or words[:1] == ["k8s"]:
        arguments.arguments = words[end + 1 :]
    output = Output(arguments.json)
    if getattr(arguments, "verbose", False):
        logging.basicConfig(stream=sys.stderr, format="%(message)s")
        logging.getLogger("spmdctx").setLevel(logging.INFO)
    run: Callable[[argparse.Namespace, Output], int] = arguments.run
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return run(arguments, output)
        except (Exception, KeyboardInterrupt) as error:
            return failed(error)


def plan(arguments: argparse.Namespace, output: Output) -> int:
    """Plans a program; needs no devices."""
    choice = choose(arguments)
    step, args = choice.program(concrete=False)
    with choice.context(), output.waiting("planning"):
        made = choice.parallel(step).plan(*args)
    output.show(made)
    if arguments.save:
        with naming_file("--save", arguments.save, "the plan cannot be written"):
            made.save(arguments.save)
    if arguments.html:
        with naming_file("--html", arguments.html, "the page cannot be written"):
            made.save_html(arguments.html)
    output.finish(plan_data(made))
    return 0


def explain(arguments: argparse.Namespace, output: Output) -> int:
    """Explains what a plan does with the tensors or ops that match; returns 1 if none does."""
    explanation = _read_plan("plan", arguments.plan).explain(arguments.pattern)
    output.show(explanation)
    output.finish(explain_data(explanation))
    return 0 if explanation else 1


def diff(arguments: argparse.Namespace, output: Output) -> int:
    """Compares two plans; returns 1 if they differ."""
    found = _read_plan("before", arguments.before).diff(_read_plan("after", arguments.after))
    output.show(found)
    output.finish(diff_data(found))
    return 1 if found else 0


def _read_plan(argument: str, path: Path) -> Plan:
    with naming_file(argument, path, "the plan file cannot be read"):
        return Plan.load(path)


def audit(arguments: argparse.Namespace, output: Output) -> int:
    """Compiles a program and compares it with its plan; returns 1 if they disagree."""
    choice = started(arguments, output) if arguments.target == "cpu" else choose(arguments)
    with choice.context(), output.waiting(f"compiling for {arguments.target}"):
        options = target_options(arguments.target)
        step, args = choice.program(concrete=False)
        report = choice.parallel(step, **options).audit(*args)
    output.show(report)
    output.finish(audit_data(report))
    return 0 if report.ok else 1


def verify(arguments: argparse.Namespace, output: Output) -> int:
    """Runs a step split and on one device; returns 1 if the numbers differ."""
    choice = started(arguments, output)
    with choice.context(), output.waiting("running the step split and on one device"):
        step, args = choice.program(concrete=True)
        report = choice.parallel(step).verify(*args, rtol=arguments.rtol)
    output.show(report)
    output.finish(verify_data(report))
    return 0 if report.ok else 1


def command_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(prog="spmdctx", description="Automatic parallelism for JAX training steps.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"spmdctx {sys.modules['spmdctx'].__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train_arguments(_command(commands, "train", train, "train a small language model: plan, progress, audit, numerics check"))
    add_generate_arguments(_command(commands, "generate", generate, "generate text from a checkpoint, split over other devices"))
    one = _command(commands, "plan", plan, "show how a program would be split, and what it would communicate")
    one.add_argument("--save", type=Path, metavar="FILE", help="write the plan as JSON (default: no file)")
    one.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page (default: no file)")
    add_program_arguments(one)
    one = _command(commands, "explain", explain, "say why tensors or ops of a saved plan are split as they are")
    one.add_argument("plan", type=Path, help="a plan file")
    one.add_argument("pattern", help="part of a path such as layers/3/attention, a glob, an op name or a source line")
    one = _command(commands, "audit", audit, "compile a program and compare its collectives and memory with the plan")
    add_target_argument(one)
    add_program_arguments(one)
    one = _command(commands, "diff", diff, "compare two saved plans")
    one.add_argument("before", type=Path, help="a plan file")
    one.add_argument("after", type=Path, help="another")
    one = _command(commands, "verify", verify, "run a step split and on one device, and compare the numbers")
    one.add_argument("--rtol", type=_relative, metavar="X", help=_RTOL_HELP)
    add_program_arguments(one)
    add_strategies_arguments(_command(commands, "strategies", strategies, "make the library of ready strategies, or check its files"))
    one = _command(commands, "calibrate", calibrate_devices, "measure the devices that are there, as a topology to plan with")
    add_calibrate_arguments(one)
    add_launch_arguments(_command(commands, "launch", launch, "run a script as several processes on this machine"))
    one = commands.add_parser(
        "k8s", help="run a script on a Kubernetes cluster", description="Jobs on a Kubernetes cluster.", epilog=_EPILOG
    )
    add_k8s_commands(one, _command)
    return parser


_RTOL_HELP = (
    "accept differences of X times a result's largest value (default: only what rounding alone does to the result on one device, "
    "which is measured)"
)


def _relative(text: str) -> float:
    """Reads a number that is finite and not negative."""
    try:
        return checked_rtol(float(text))
    except ValueError:  # ContextError is one
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number from 0 on") from None


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace, Output], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EPILOG)
    parser.add_argument("--json", action="store_true", help="print one JSON object to standard output; progress goes to standard error")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what goes on (tracing, planning, compiling) to standard error")
    parser.set_defaults(run=run)
    return parser


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    Console(stderr=True, highlight=False).print(f"[yellow]{category.__name__}:[/] {escape(str(message))}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
