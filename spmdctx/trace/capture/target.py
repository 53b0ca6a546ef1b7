"""The function that a step wraps, seen through jax.jit and its like, and what its options say about its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spmdctx._compat import JitOptions, is_pmapped, unwrap_jit
from spmdctx.errors import ContextError, UnsupportedError, message
from spmdctx.trace.capture.arguments import Names, Parameters, Positions, Selection, parameters_of
from spmdctx.trace.capture.objects import has_objects

_NOT_STATIC = {"donate": "no array whose memory a step could reuse", "batch": "no array that devices could split"}


@dataclass(frozen=True)
class Target:
    """A function as the trace calls it: with the nnx objects it is bound to as leading arguments."""

    fn: Callable[..., Any]
    leading: tuple[Any, ...]
    name: str
    parameters: Parameters
    static: Selection
    donated: Selection
    batch: Selection | None


def target_of(
    fn: Callable[..., Any],
    *,
    batch_argnums: Positions = None,
    batch_argnames: Names = None,
    static_argnums: Positions = (),
    static_argnames: Names = (),
    donate_argnums: Positions = (),
    donate_argnames: Names = (),
) -> Target:
    """Looks through jax.jit, nnx.jit, bound methods and partials of nnx objects, and resolves which arguments are which.

    Raises:
        ContextError: a position or name that the function does not have, or a static argument that is donated or batch.
        UnsupportedError: a function of jax.pmap.
        TypeError: `fn` is no function, or a position or name of a wrong type.
    """
    if not callable(fn):
        raise TypeError(message("A step must be a function, a method, or a function of jax.jit or nnx.jit.", got=type(fn).__name__))
    if is_pmapped(fn):
        raise UnsupportedError(
            "The step is a function of jax.pmap, which divides its arguments among the devices itself.",
            got=f"jax.pmap({getattr(fn, '__name__', type(fn).__name__)})",
            fix="give the function below it, without pmean and psum over devices, and arrays of the whole batch (docs/migrate/pmap.md)",
        )
    fn, leading = _unbound(fn)
    fn, jitted = unwrap_jit(fn) if not (filters := _is_filter_jit(fn)) else _unwrap_filter_jit(fn)
    parameters = parameters_of(fn)
    visible = replace(parameters, names=parameters.names[len(leading) :])

    def select(what: str, positions: Positions, names: Names) -> Selection:
        return visible.select(what, positions, names).shifted(len(leading))

    def also(selection: Selection, numbers: tuple[int, ...], words: tuple[str, ...]) -> Selection:
        return Selection(selection.positions | frozenset(numbers), selection.names | frozenset(words))

    own = select("donate", donate_argnums, donate_argnames)
    target = Target(
        fn=fn,
        leading=leading,
        name=getattr(fn, "__name__", type(fn).__name__),
        parameters=parameters,
        static=also(select("static", static_argnums, static_argnames), jitted.static_argnums, jitted.static_argnames),
        donated=also(own, jitted.donate_argnums, jitted.donate_argnames),
        batch=None if batch_argnums is None and batch_argnames is None else select("batch", batch_argnums, batch_argnames),
    )
    _check_static(target, own if filters else target.donated)
    return target


def _check_static(target: Target, donated: Selection) -> None:
    """Refuses static arguments that are also batch or `donated`; of all that `filter_jit` donates, it means the arrays."""
    for option, other in (("donate", donated), ("batch", target.batch or Selection())):
        positions, words = target.static.positions & other.positions, target.static.names & other.names
        if not positions and not words:
            continue
        names = sorted({*words, *map(target.parameters.name, positions)})
        raise ContextError(
            f"Arguments of {target.name} are static, and are also named by {option}_argnums or {option}_argnames.",
            got=", ".join(names),
            need=f"a static argument is a constant of the program, which is {_NOT_STATIC[option]}",
            fix="leave each argument out of one of the two",
        )


def _unbound(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function and the nnx objects to which it is bound, which are state and not constants."""
    if inspect.ismethod(fn) and has_objects(fn.__self__):
        return fn.__func__, (fn.__self__,)
    if isinstance(fn, functools.partial) and fn.args and not fn.keywords and has_objects(fn.args):
        inner, leading = _unbound(fn.func)
        return inner, (*leading, *fn.args)
    if not inspect.isroutine(fn) and has_objects(fn):
        return type(fn).__call__, (fn,)
    return fn, ()


def _is_filter_jit(fn: Any) -> bool:
    """Returns whether Equinox's `filter_jit` made a function."""
    return type(fn).__module__.startswith("equinox") and all(hasattr(fn, name) for name in ("__wrapped__", "donate_first", "donate_rest"))


def _unwrap_filter_jit(fn: Any) -> tuple[Callable[..., Any], JitOptions]:
    """Returns the function under Equinox's `filter_jit` with what it donates; the trace sets apart functions in modules by itself."""
    inner = fn.__wrapped__
    positions = range(len(parameters_of(inner).names))
    donated = tuple(position for position in positions if (fn.donate_rest if position else fn.donate_first))
    return inner, JitOptions(donate_argnums=donated)
