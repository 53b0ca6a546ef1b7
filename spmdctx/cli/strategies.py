"""`spmdctx strategies`: makes the files of the library of strategies, or checks that they are up to date."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spmdctx.cli.library import PLAN_SUFFIX, hand_texts, searched_text
from spmdctx.cli.output import Output
from spmdctx.errors import InfeasibleError, PlanError
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.plan.file import parse_any_plan
from spmdctx.plan.library import ROWS_FILE, Library, Row, read_library
from spmdctx.plan.plan import Plan
from spmdctx.plan.show.diff import PlanDiff
from spmdctx.wording.files import write_file


class FileState(NamedTuple):
    """One file of the library.

    Its state is "written", "same", "differs", "missing", "no plan" where none keeps to the budget, or "unknown": no row makes it.
    """

    path: str
    state: str
    num_bytes: int
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True if the file is as the library would make it."""
        return self.state in ("written", "same")


def strategies(arguments: argparse.Namespace, output: Output) -> int:
    """Makes or checks the library's files; 1 where one differs, is missing or belongs to no row."""
    library = read_library(arguments.folder)
    states = []
    for state in _states(library, arguments, output):
        output.say(f"{state.state:<8} {state.num_bytes:>9} bytes  {state.path}")
        if state.detail:
            output.say(state.detail)
        states.append(state)
    ok = all(state.ok for state in states)
    output.finish_with("strategies", {"ok": ok, "files": [{**state._asdict(), "ok": state.ok} for state in states]})
    return 0 if ok else 1


def _states(library: Library, arguments: argparse.Namespace, output: Output) -> Iterator[FileState]:
    for row in _rows(library, arguments):
        if arguments.only != "searched":
            for path, text in hand_texts(library, row):
                yield _settle(library.folder, path, text, arguments.check)
        if arguments.only != "hand":
            with output.waiting(f"searching {row.model} on {row.device_num} devices"):
                yield _searched(library, row, arguments)
    if arguments.check:
        yield from _unknown(library)


def _searched(library: Library, row: Row, arguments: argparse.Namespace) -> FileState:
    try:
        path, text = searched_text(library, row, arguments.search_mode)
    except InfeasibleError as error:
        return FileState(row.searched_file.as_posix(), "no plan", 0, str(error))
    return _settle(library.folder, path, text, arguments.check)


def _rows(library: Library, arguments: argparse.Namespace) -> list[Row]:
    found = [row for row in library.rows if arguments.model in (None, row.model) and arguments.device_num in (None, row.device_num)]
    if not found:
        known = ", ".join(f"{row.model} on {row.device_num}" for row in library.rows)
        raise PlanError(
            "The library has no such row.", got=f"{arguments.model or 'any model'}, {arguments.device_num or 'any'} devices", need=known
        )
    return found


def _settle(folder: Path, path: Path, text: str, check: bool) -> FileState:
    """Writes a file, or compares it."""
    target, size = folder / path, len(text.encode())
    if not check:
        write_file(target, text)
        return FileState(path.as_posix(), "written", size)
    if not target.is_file():
        return FileState(path.as_posix(), "missing", size)
    if target.read_text(encoding="utf-8") == text:
        return FileState(path.as_posix(), "same", size)
    if path.suffix != PLAN_SUFFIX:
        return FileState(path.as_posix(), "differs", size)
    return _compare_plans(target, path, text)


def _compare_plans(target: Path, path: Path, text: str) -> FileState:
    """Compares a plan file with a new plan; ops that moved to other source lines make no difference."""
    old: Any = Plan.load(target)
    new = parse_any_plan(text, "the new plan", Plan)
    if isinstance(old, PipelinePlan) and isinstance(new, PipelinePlan):
        detail = pipelines_differ(old, new)
    elif isinstance(old, Plan) and isinstance(new, Plan):
        detail = _plans_differ(old, new)
    else:
        detail = f"{old!r} has become {new!r}"
    return FileState(path.as_posix(), "differs" if detail else "same", len(text.encode()), detail)


def _plans_differ(old: Plan, new: Plan) -> str:
    """Returns how two plans of a program differ, or nothing."""
    diff = old.diff(new)
    return "" if _decides_alike(diff) else str(diff)


def pipelines_differ(old: PipelinePlan, new: PipelinePlan) -> str:
    """Returns in what two plans of a pipeline differ, or nothing."""
    names = ("mode", "search_mode", "topology", "logical_mesh", "simulation", "inputs", "outputs", "cuts", "transfers", "notes")
    changed = [name for name in names if getattr(old, name) != getattr(new, name)]
    if changed:
        return f"{', '.join(changed)} differ"
    found = [f"chunk {number}: {text}" for number, own in enumerate(old.joints) if (text := _plans_differ(own, new.joints[number]))]
    for before, after in zip(old.stages, new.stages, strict=True):
        theirs = {**after.tasks, **after.after}
        for name, plan in {**before.tasks, **before.after}.items():
            found += [f"{name}: {text}"] if (text := _plans_differ(plan, theirs[name])) else []
    return "\n".join(found)


def _decides_alike(diff: PlanDiff) -> bool:
    changes = (diff.settings, diff.costs, diff.tensors, diff.communication, diff.notes_added, diff.notes_removed)
    return not any(changes) and not diff.num_ops


def _unknown(library: Library) -> Iterator[FileState]:
    """Yields the files that no row makes."""
    known = {Path(ROWS_FILE)}
    for row in library.rows:
        known |= {row.searched_file, row.searched_context_file}
        known |= {name(*degrees) for degrees in row.hand for name in (row.hand_file, row.hand_context_file)}
    for path in sorted(path.relative_to(library.folder) for path in library.folder.rglob("*") if path.is_file()):
        if path not in known:
            yield FileState(path.as_posix(), "unknown", (library.folder / path).stat().st_size)
