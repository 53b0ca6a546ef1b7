"""The output of the command line: tables and progress for people, or one JSON object for programs; and its failures.

The user's own program may fail anywhere below `plan` or `verify`. Its error is told from one of this package by the frames it passed.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spmdctx.audit import AuditReport
from spmdctx.errors import is_laid_out
from spmdctx.ir.collective import Collective
from spmdctx.ir.mesh import format_sharding
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.pipeline.show.explanation import StageExplanation
from spmdctx.plan.plan import Plan
from spmdctx.plan.show.diff import PlanDiff
from spmdctx.plan.show.explanation import Explanation
from spmdctx.step.verify.verify import VerifyReport
from spmdctx.wording import is_framework
from spmdctx.wording.phases import telling

WIDTH = 120
"""Columns of output to a file or a pipe."""

USAGE = 2
"""Exit code where the command was used wrongly, or the user's program failed."""

INTERNAL = 70
"""Exit code where spmdctx itself failed: EX_SOFTWARE of sysexits.h."""

INTERRUPTED = 130
"""Exit code of a command that was interrupted, as shells give it."""

_MAX_FRAMES = 5

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARY = sysconfig.get_paths()["stdlib"]


class Output:
    """Standard output for results; with `as_json` only `finish` writes there, all else goes to standard error."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.is_quiet = False
        self.console = Console(stderr=as_json, highlight=False)
        if not self.console.is_terminal:
            self.console.width = WIDTH

    def be_quiet(self) -> None:
        """Stops all output, since another process of the job writes it."""
        self.is_quiet = self.console.quiet = True

    def title(self, text: str) -> None:
        """Prints a heading."""
        self.console.rule(f"[bold]{escape(text)}", align="left", style="dim")

    def show(self, thing: Any) -> None:
        """Prints a renderable or a report, unless the output is JSON."""
        if not self.as_json:
            renderable = hasattr(thing, "__rich__") or hasattr(thing, "__rich_console__")
            self.console.print(thing if renderable else escape(str(thing)))

    def say(self, text: str) -> None:
        """Prints one line about what happens."""
        self.console.print(escape(text))

    def finish(self, data: dict[str, Any]) -> None:
        """Prints the whole result as JSON if the user asked for JSON."""
        if self.as_json and not self.is_quiet:
            json.dump(data, sys.stdout, indent=2, default=str)
            sys.stdout.write("\n")

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Shows a spinner during one long piece of work, and how far a search in it is."""
        with self.console.status(escape(text)) as status, telling(lambda more: status.update(escape(f"{text}: {more}"))):
            yield

    def steps(self, count: int, run: Callable[[int], float]) -> Iterator[float]:
        """Runs `run` for each step under a progress bar that shows the loss it returns."""
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("training", total=count, loss="-")
            for index in range(count):
                loss = run(index)
                progress.update(task, advance=1, loss=f"{loss:.3f}")
                yield loss


def plan_data(plan: Plan | PipelinePlan) -> dict[str, Any]:
    """Returns a plan as plain data, with what its table says."""
    if isinstance(plan, PipelinePlan):
        return plan.to_dict()
    return {
        "summary": plan.summary,
        "mesh": plan.mesh,
        "mode": plan.mode,
        "search_mode": plan.search_mode,
        "topology": plan.topology,
        "options": dict(plan.options),
        "cost": plan.cost._asdict(),
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "timing": plan.timing._asdict(),
        "rates": plan.rates._asdict(),
        "made_for": {"step": plan.about.step, "model": plan.about.model, "versions": dict(plan.about.versions)},
        "inputs": [
            {"path": leaf.path, "role": leaf.role, "shape": leaf.shape, "dtype": leaf.dtype, "sharding": format_sharding(leaf.sharding)}
            for leaf in plan.inputs
        ],
        "num_ops": len(plan.ops),
        "collectives": _collectives_data(plan.collectives),
        "notes": list(plan.notes),
    }


def audit_data(report: AuditReport) -> dict[str, Any]:
    """Returns an audit as plain data."""
    return report.to_dict()


def verify_data(report: VerifyReport) -> dict[str, Any]:
    """Returns a numerics check as plain data."""
    return {"ok": report.ok, "num_devices": report.num_devices, "rows": [{**row._asdict(), "ok": row.ok} for row in report.rows]}


def diff_data(diff: PlanDiff) -> dict[str, Any]:
    """Returns a comparison as plain data."""
    changes = {name: [vars_of(change) for change in getattr(diff, name)] for name in ("settings", "costs", "tensors", "communication")}
    return {"same": diff.same, **changes, "num_ops": diff.num_ops, "notes_added": diff.notes_added, "notes_removed": diff.notes_removed}


def explain_data(explanation: Explanation | StageExplanation) -> dict[str, Any]:
    """Returns an explanation as plain data."""
    if isinstance(explanation, StageExplanation):
        return {"pattern": explanation.pattern, "stages": explanation.stages, "text": str(explanation).splitlines()}
    tensors = [
        {
            "paths": one.paths,
            "sharding": format_sharding(one.tensor.sharding),
            "reason": one.tensor.reason,
            "uses": [use._asdict() for use in one.uses],
            "reshards": [row._asdict() for row in one.reshards],
            "alternatives": [row._asdict() for row in one.alternatives],
        }
        for one in explanation.tensors
    ]
    ops = [{**op._asdict(), "rule": str(op.rule)} for op in explanation.ops]
    kinds = [
        {
            "op": kind.op.name,
            "split": kind.op.sharding,
            "num_runs": kind.num_runs,
            "missing": kind.missing,
            "alternatives": [row._asdict() for row in kind.alternatives],
        }
        for kind in explanation.op_kinds
    ]
    collectives = _collectives_data(explanation.collectives)
    return {"pattern": explanation.pattern, "tensors": tensors, "ops": ops, "op_kinds": kinds, "collectives": collectives}


def vars_of(row: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass with slots."""
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def _collectives_data(rows: Iterable[Collective]) -> list[dict[str, Any]]:
    return [vars_of(row) for row in rows]


def failed(error: BaseException) -> int:
    """Prints what ended a command, and returns its exit code."""
    if isinstance(error, KeyboardInterrupt):
        _print_error("interrupted")
        return INTERRUPTED
    own = own_frames(error.__traceback__)
    if is_laid_out(error) or (isinstance(error, OSError) and not own):
        _print_error("\n".join((str(error), *getattr(error, "__notes__", ()))))
        return USAGE
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    if not own:
        traceback.print_exception(error)
        _print_error(f"spmdctx failed, which is a fault of its own: {text}")
        return INTERNAL
    _print_error("\n".join((f"The program raised {text}", *(f"  at {frame}" for frame in own))))
    return USAGE


def own_frames(passed: TracebackType | None) -> list[str]:
    """Returns the frames of the user's own code that an error passed, the innermost first, as `file:line (function)`."""
    frames = traceback.extract_tb(passed)
    # What comes before this package is the script that started it.
    first = next((number for number, frame in enumerate(frames) if frame.filename.startswith(_PACKAGE)), 0)
    own = [frame for frame in frames[first:] if _is_own(frame.filename)]
    return [f"{frame.filename}:{frame.lineno} ({frame.name})" for frame in reversed(own)][:_MAX_FRAMES]


def _is_own(file: str) -> bool:
    in_library = file.startswith(_LIBRARY) and "site-packages" not in file
    return not (file.startswith((_PACKAGE, "<")) or in_library or is_framework(file))


def _print_error(text: str) -> None:
    sys.stdout.flush()
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)
