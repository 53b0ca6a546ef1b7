"""The commands about plans: `plan`, `explain`, `diff`, `audit` and `verify`."""

from __future__ import annotations

import argparse
from pathlib import Path

from spmdctx.cli.output import Output
from spmdctx.cli.program import choose, started, target_options
from spmdctx.errors import ContextError, naming_file
from spmdctx.plan.plan import Plan
from spmdctx.wording.files import check_writable


def plan(arguments: argparse.Namespace, output: Output) -> int:
    """Plans a program; needs no devices."""
    if bool(arguments.export) != bool(arguments.out):
        raise ContextError("--export and --out go together.", fix="such as --export jax --out step.py")
    choice = choose(arguments)
    for option, file, what in (("--save", arguments.save, "plan"), ("--html", arguments.html, "page"), ("--out", arguments.out, "export")):
        if file:
            with naming_file(option, file, f"the {what} cannot be written"):
                check_writable(file)  # before the planning, which takes longer
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
    if arguments.export:
        with naming_file("--out", arguments.out, "the export cannot be written"):
            made.export(arguments.export, arguments.out)
    output.finish(made)
    return 0


def explain(arguments: argparse.Namespace, output: Output) -> int:
    """Explains what a plan does with the tensors or ops that match; returns 1 if none does."""
    explanation = _read_plan("plan", arguments.plan).explain(arguments.pattern)
    output.show(explanation)
    output.finish(explanation)
    return 0 if explanation else 1


def diff(arguments: argparse.Namespace, output: Output) -> int:
    """Compares two plans; returns 1 if they differ."""
    found = _read_plan("before", arguments.before).diff(_read_plan("after", arguments.after))
    output.show(found)
    output.finish(found)
    return 1 if found else 0


def audit(arguments: argparse.Namespace, output: Output) -> int:
    """Compiles a program and compares it with its plan; returns 1 if they disagree."""
    choice = started(arguments, output) if arguments.target == "cpu" else choose(arguments)
    with choice.context(), output.waiting(f"compiling for {arguments.target}"):
        options = target_options(arguments.target)
        step, args = choice.program(concrete=False)
        report = choice.parallel(step, **options).audit(*args)
    output.show(report)
    output.finish(report)
    return 0 if report.ok else 1


def verify(arguments: argparse.Namespace, output: Output) -> int:
    """Runs a step split and on one device; returns 1 if the numbers differ."""
    choice = started(arguments, output)
    with choice.context(), output.waiting("running the step split and on one device"):
        step, args = choice.program(concrete=True)
        report = choice.parallel(step).verify(*args, rtol=arguments.rtol)
    output.show(report)
    output.finish(report)
    return 0 if report.ok else 1


def _read_plan(argument: str, path: Path) -> Plan:
    with naming_file(argument, path, "the plan file cannot be read"):
        return Plan.load(path)
