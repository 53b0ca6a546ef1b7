"""Writes figures of a run to JSON lines, TensorBoard or Weights & Biases."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import jax

from spmdctx.errors import ContextError, FileError, UnsupportedError, message, shown
from spmdctx.step.report.report import StepReport
from spmdctx.wording.targets import TARGETS, metrics_target

_WRITERS = ("tensorboardX", "torch.utils.tensorboard")
"""Modules with a SummaryWriter; the first that is installed is used."""


class _Sink(Protocol):
    def write(self, step: int, figures: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Where the figures of a run go: any number of files, TensorBoard folders and W&B projects.

    Only the first process of a job writes. A context: at its end everything is closed.

    Args:
        targets: "run.jsonl" (one JSON object a line, appended), "tensorboard:FOLDER" or "wandb:PROJECT". TensorBoard needs tensorboardX or
            PyTorch, and W&B needs wandb: `pip install 'spmdctx[tensorboard]'` or `'spmdctx[wandb]'`.

    Raises:
        ContextError: a target that is none of these.
        UnsupportedError: what a target needs is not installed.
        FileError: a file that cannot be written.
    """

    def __init__(self, *targets: str | os.PathLike[str]) -> None:
        kinds = [_kind_of(target) for target in targets]
        self._sinks: list[_Sink] = []
        if jax.process_index() == 0:
            try:
                for make, where in kinds:
                    self._sinks.append(make(where))
            except BaseException:
                self.close()
                raise

    def write(self, step: int, figures: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Writes figures of a step: numbers and scalar arrays by name, which are waited for; texts only in JSON lines.

        Raises:
            TypeError: a figure that is none of these, by its name.
        """
        plain = {name: _plain(name, value) for name, value in {**(figures or {}), **more}.items()}
        for sink in self._sinks:
            sink.write(step, plain)

    def report(self, report: StepReport, step: int | None = None) -> None:
        """Writes what `step.report()` says, under names that begin with `report/`; by default at the number of its calls."""
        figures = {name: value for name, value in report.to_dict().items() if value is not None}
        self.write(report.num_calls if step is None else step, {f"report/{name}": value for name, value in figures.items()})

    def close(self) -> None:
        """Closes everything; nothing may be written afterwards."""
        while self._sinks:
            self._sinks.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Lines:
    """A file with one JSON object a line, each there once `write` returns. JSON has no NaN and no infinity: these are texts."""

    def __init__(self, path: str) -> None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115  it stays open
        except OSError as error:
            raise FileError("The metrics cannot be written.", where=path, got=error.strerror or str(error)) from None

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        row = {name: _in_json(value) for name, value in figures.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **row}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, folder: str) -> None:
        module = _installed("TensorBoard", "tensorboard", *_WRITERS)
        self._writer = module.SummaryWriter(folder)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        for name, value in _numbers(figures):
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, project: str) -> None:
        self._run = _installed("Weights & Biases", "wandb", "wandb").init(project=project)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        self._run.log(dict(_numbers(figures)), step=step)

    def close(self) -> None:
        self._run.finish()


_SINKS: Mapping[str, Any] = {"lines": _Lines, "tensorboard": _TensorBoard, "wandb": _Wandb}


def _kind_of(target: str | os.PathLike[str]) -> tuple[Any, str]:
    """Returns what writes to a target, and where."""
    found = metrics_target(os.fspath(target))
    if found is None:
        raise ContextError("Metrics cannot go there.", got=shown(os.fspath(target)), need=TARGETS)
    return _SINKS[found.kind], found.where


def _installed(what: str, extra: str, *modules: str) -> Any:
    """Returns the first of some modules that is installed."""
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A module that is there and misses another one says so itself.
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.") or error.name == "tensorboard"):
                raise
    need = " or ".join(modules)
    raise UnsupportedError(f"Metrics for {what} need {need}, which is not installed.", fix=f"pip install 'spmdctx[{extra}]'")


def _numbers(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield from ((name, value) for name, value in figures.items() if isinstance(value, (int, float)))


def _in_json(value: Any) -> Any:
    """Returns a number that JSON does not have as the text by which Python and JavaScript read it."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain(name: str, value: Any) -> Any:
    """Returns a figure as a number or a text; scalar arrays are waited for."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    own = getattr(value, "item", None)
    if own is not None and getattr(value, "size", 1) == 1:
        return own()
    shape = getattr(value, "shape", None)
    got = type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
    raise TypeError(message("A figure must be a number, a scalar array or a text.", where=name, got=got))
