"""Marks that say on which stage of a pipeline a function or a module runs.

While the loss of a pipelined step is traced, what a marked call computes gets a scope by which the cut finds it. Everywhere else marks
do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any, TypeVar

import jax
from jax.extend import source_info_util

from spmdctx.errors import ContextError, shown
from spmdctx.pipeline.cut.pins import scope_of
from spmdctx.trace.flax_modules import flax_is_used, linen, nnx

Marked = TypeVar("Marked", bound=Callable[..., Any])

_ATTRIBUTE = "pipeline_stage"

# Source lines are those of the user's code, and not of the call that looks for a mark.
source_info_util.register_exclusion(__file__)


class Marks:
    """The marks that a trace has met; `records` says whether what they mark gets a scope."""

    def __init__(self, *, records: bool) -> None:
        self.records = records
        self.stages: set[int] = set()


_marks: ContextVar[Marks | None] = ContextVar("spmdctx_pipeline_marks", default=None)
_lock = RLock()


def pipeline_stage(fn_or_module: Marked, stage: int) -> Marked:
    """Says on which stage of a pipeline a part of the loss runs: all that calls of a function or of a module compute.

    `module.pipeline_stage = i` does the same to an nnx module. What has no mark is cut automatically, between the marks around it.
    A mark inside of another one comes first. Without `pipeline_stages`, and outside of `parallel`, marks have no effect.

    Args:
        fn_or_module: a function, or a module of nnx or linen. A module is marked itself.
        stage: from 0. With several chunks on each stage, a mark of an earlier stage goes to its next chunk.

    Returns:
        The marked module, or a function that computes the same as the given one.

    Raises:
        ContextError: the stage is no whole number from 0, or a class is given.
    """
    number = _checked(stage, "pipeline_stage")
    if isinstance(fn_or_module, type) or not callable(fn_or_module):
        raise ContextError(
            "pipeline_stage marks functions and modules that can be called.",
            got=shown(fn_or_module),
            fix="mark the module that the class makes, or the elements of a list of modules",
        )
    if isinstance(fn_or_module, nnx.Module):
        setattr(fn_or_module, _ATTRIBUTE, number)
        return fn_or_module
    if isinstance(fn_or_module, linen.Module):
        # Clones of the module, which linen makes, keep its class.
        cls: Any = type(fn_or_module)
        object.__setattr__(fn_or_module, "__class__", _marked_class(cls, number))
        return fn_or_module

    @functools.wraps(fn_or_module)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with _in_stage(number):
            return fn_or_module(*args, **kwargs)

    return marked  # type: ignore[return-value]  # wraps keeps the type, which mypy cannot see


@contextmanager
def marks_met(*, records: bool) -> Iterator[Marks]:
    """Collects the marks that are met inside; with `records`, all that marked calls compute gets a scope."""
    found = Marks(records=records)
    token = _marks.set(found)
    try:
        if records:
            with _nnx_calls_in_stages():
                yield found
        else:
            yield found
    finally:
        _marks.reset(token)


def is_marked(objects: Any) -> bool:
    """Returns whether an nnx module in a tree has a mark."""
    if not flax_is_used():
        return False
    nodes = jax.tree.leaves(objects, is_leaf=lambda node: isinstance(node, nnx.Module))
    modules = [node for node in nodes if isinstance(node, nnx.Module)]
    return any(_ATTRIBUTE in vars(node) for module in modules for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Module))


def _checked(stage: Any, where: str) -> int:
    if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
        raise ContextError(
            "A stage of a pipeline is a whole number.", where=where, got=shown(stage), need="0, 1, ... below pipeline_stages"
        )
    return stage


@contextmanager
def _in_stage(stage: int) -> Iterator[None]:
    marks = _marks.get()
    if marks is not None:
        marks.stages.add(stage)
    if marks is None or not marks.records:
        yield
        return
    with jax.named_scope(scope_of(stage)):
        yield


@functools.cache
def _marked_class(cls: type[Any], stage: int) -> type[Any]:
    """Returns a class of linen modules whose calls run on a stage; its name is the old one, from which linen names variables."""
    base = getattr(cls, "_spmdctx_unmarked", cls)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _in_stage(stage):
            return base.__call__(self, *args, **kwargs)

    body = {"__call__": functools.wraps(base.__call__)(call), "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**body, "_spmdctx_unmarked": base})


@contextmanager
def _nnx_calls_in_stages() -> Iterator[None]:
    """Gives calls of nnx modules the scope of their attribute `pipeline_stage`; other modules are called as ever."""
    with _lock:
        changed = [(cls, cls.__dict__["__call__"]) for cls in _subclasses(nnx.Module) if "__call__" in cls.__dict__]
        for cls, call in changed:
            setattr(cls, "__call__", _call_in_stage(cls, call))  # noqa: B010  mypy knows no such attribute
        try:
            yield
        finally:
            for cls, call in changed:
                setattr(cls, "__call__", call)  # noqa: B010  mypy knows no such attribute


def _call_in_stage(cls: type[Any], call: Any) -> Callable[..., Any]:
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = call.__get__(self, cls) if hasattr(call, "__get__") else call
        if _ATTRIBUTE not in vars(self):
            return bound(*args, **kwargs)
        with _in_stage(_checked(vars(self)[_ATTRIBUTE], f"{type(self).__name__}.pipeline_stage")):
            return bound(*args, **kwargs)

    return functools.wraps(call)(marked) if callable(call) else marked


def _subclasses(cls: type[Any]) -> list[type[Any]]:
    """Returns all classes below one, each once."""
    found: dict[type[Any], None] = {}
    pending = [cls]
    while pending:
        below = [sub for sub in pending.pop().__subclasses__() if sub not in found]
        found.update(dict.fromkeys(below))
        pending += below
    return list(found)
