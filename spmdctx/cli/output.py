"""The output of the command line: tables and progress for people, or one JSON object for programs; and its failures.

The user's own program may fail anywhere below `plan` or `verify`. Its error is told from one of this package by the frames it passed.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spmdctx.errors import is_laid_out
from spmdctx.wording import is_framework
from spmdctx.wording.phases import telling
from spmdctx.wording.reports import Report, json_text, stamped

if TYPE_CHECKING:
    from spmdctx.pipeline.plan import PipelinePlan
    from spmdctx.plan.plan import Plan

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
        self._results = sys.stdout
        self.console = Console(stderr=as_json, highlight=False)
        if not self.console.is_terminal:
            self.console.width = WIDTH

    def prints_aside(self) -> AbstractContextManager[Any]:
        """Returns a context in which what the user's program prints goes to standard error, if the output is JSON."""
        return redirect_stdout(sys.stderr) if self.as_json else nullcontext()

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

    def finish(self, result: Report | Plan | PipelinePlan) -> None:
        """Prints a report, which is the whole result, as JSON if the user asked for JSON."""
        self._print(result.to_dict())

    def finish_with(self, command: str, figures: Mapping[str, Any]) -> None:
        """Does the same with the figures of a command whose result is no single report."""
        self._print(stamped(command, figures))

    def _print(self, data: Mapping[str, Any]) -> None:
        if self.as_json and not self.is_quiet:
            self._results.write(f"{json_text(data)}\n")

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


def print_warning(kind: str, text: str) -> None:
    """Prints a warning to standard error."""
    Console(stderr=True, highlight=False).print(f"[yellow]{kind}:[/] {escape(text)}", soft_wrap=True)


def _print_error(text: str) -> None:
    sys.stdout.flush()
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)
