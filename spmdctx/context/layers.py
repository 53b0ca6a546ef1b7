"""The auto-parallel context: MindSpore's set, get and reset, and layers for `with` and decorators.

There is one process-wide layer, which new threads see. Each thread (or async task) also has a stack of layers, pushed by
`auto_parallel_context`. Setters change only the innermost layer. A layer holds a frozen AutoParallelContext, so that a step
reads one consistent state however many threads set options.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, wraps
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

from spmdctx.context.checks import check_consistency, device_count, ineffective, warn_ineffective
from spmdctx.context.files import ContextConfig, load_config
from spmdctx.context.options import ALGO_BY_NAME, OPTIONS, checked, find
from spmdctx.context.servers import DEFAULT_SERVERS, checked_server_options, find_server_option
from spmdctx.context.state import DEFAULT_ALGO, DEFAULT_CONTEXT, AlgoParameters, AutoParallelContext
from spmdctx.context.typed import AlgoOptions, ContextOptions
from spmdctx.context.values import plain
from spmdctx.errors import message

__all__ = [
    "OPTIONS",
    "AlgoParameters",
    "AutoParallelContext",
    "ContextConfig",
    "ContextLayer",
    "auto_parallel_context",
    "check_consistency",
    "current_context",
    "device_count",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_ps_context",
    "ineffective",
    "load_config",
    "load_context",
    "mark_for_servers",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "reset_ps_context",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "set_ps_context",
    "version",
    "warn_ineffective",
]

F = TypeVar("F", bound=Callable[..., Any])


class _Layer(NamedTuple):
    context: AutoParallelContext
    version: int
    outer: _Layer | None


_versions = count()


@cache
def _version_of(context: AutoParallelContext) -> int:
    """Returns one number for each distinct context, so that entering a layer again costs a step no new look-up."""
    return next(_versions)


def _layer(context: AutoParallelContext, outer: _Layer | None) -> _Layer:
    with _lock:
        return _Layer(context, _version_of(context), outer)


_lock = threading.RLock()
_base = _layer(DEFAULT_CONTEXT, None)
_inner: ContextVar[_Layer | None] = ContextVar("spmdctx_context", default=None)


def current_context() -> AutoParallelContext:
    """Returns the current context: that of this thread's innermost layer, else the process-wide one."""
    return (_inner.get() or _base).context


def version() -> int:
    """Returns a number that equal contexts share and different ones do not; the cheapest test for a change."""
    return (_inner.get() or _base).version


def _update(change: Callable[[AutoParallelContext], AutoParallelContext]) -> None:
    """Applies a change to the innermost layer; nothing happens where it raises."""
    global _base
    layer = _inner.get()
    if layer is not None:
        _inner.set(_layer(change(layer.context), layer.outer))
        return
    with _lock:
        _base = _layer(change(_base.context), None)


def set_auto_parallel_context(**options: Unpack[ContextOptions]) -> None:
    """Sets options of the innermost layer: of the process, or of the enclosing `with auto_parallel_context(...)`.

    All or nothing: where one option is bad, none is set. Options that contradict each other are found when a step is
    planned or called, so they can be set in any order. `docs/options.md` lists them.

    Raises:
        ContextError: an unknown name (the nearest one is named) or a bad value.
        TypeError: a value of a wrong type.
        UnsupportedError: an option that JAX has no counterpart of.
    """
    values = checked(options)
    _update(lambda context: context.with_checked(values))


def get_auto_parallel_context(attr_key: str) -> Any:
    """Returns the value of one option: the one that was set, or the documented default.

    Raises:
        ContextError: the name is unknown.
    """
    option = find(attr_key, "Get")
    return plain(current_context().value(option))


def reset_auto_parallel_context() -> None:
    """Gives every option of the innermost layer its default again; search parameters stay."""
    _update(lambda context: DEFAULT_CONTEXT.with_algo(context.algo).with_servers(context.servers))


def load_context(source: str | os.PathLike[str] | Mapping[str, Any]) -> ContextConfig:
    """Sets the options of a configuration file or mapping, all or nothing.

    Args:
        source: A YAML file or a mapping, with MindFormers' keys (use_parallel, parallel, parallel_config) or plain options.

    Returns:
        What was read: the options that were set, and the parts of parallel_config that belong to the model.

    Raises:
        ContextError: an unknown name, a bad value, or a file that is no such configuration.
        TypeError: a value of a wrong type.
        FileNotFoundError: no such file.
    """
    config = load_config(source)
    set_auto_parallel_context(**config.options)
    return config


def set_ps_context(**options: Any) -> None:
    """Sets options of the parameter server, all or nothing.

    Raises:
        ContextError: an unknown name or a bad value.
        TypeError: a value of a wrong type.
        UnsupportedError: an option that has no counterpart.
    """
    values = checked_server_options(options)

    def change(context: AutoParallelContext) -> AutoParallelContext:
        return context.with_servers(replace(context.servers, **values, explicit=context.servers.explicit | frozenset(values)))

    _update(change)


def get_ps_context(attr_key: str) -> Any:
    """Returns the value of one option of the parameter server: the one that was set, or the documented default.

    Raises:
        ContextError: the name is unknown.
    """
    return getattr(current_context().servers, find_server_option(attr_key).name)


def reset_ps_context() -> None:
    """Gives every option of the parameter server its default again."""
    _update(lambda context: context.with_servers(DEFAULT_SERVERS))


def mark_for_servers(patterns: Sequence[str], *, init_in_server: bool) -> None:
    """Adds patterns of the paths of parameters that servers hold, and of which they make the first values where so said."""

    def change(context: AutoParallelContext) -> AutoParallelContext:
        servers = context.servers
        made = (*servers.made_by_servers, *patterns) if init_in_server else servers.made_by_servers
        marked = (*servers.marked, *patterns)
        return context.with_servers(replace(servers, marked=tuple(dict.fromkeys(marked)), made_by_servers=tuple(dict.fromkeys(made))))

    _update(change)


def set_algo_parameters(**parameters: Unpack[AlgoOptions]) -> None:
    """Sets parameters of the search, all or nothing.

    Raises:
        ContextError: an unknown name or a bad value.
        TypeError: a value of a wrong type.
    """
    values = checked(parameters, ALGO_BY_NAME)

    def change(context: AutoParallelContext) -> AutoParallelContext:
        state = {name: getattr(context.algo, name) for name in ALGO_BY_NAME}
        return context.with_algo(AlgoParameters(**{**state, **values}, explicit=context.algo.explicit | frozenset(values)))

    _update(change)


def get_algo_parameters(attr_key: str) -> Any:
    """Returns the value of one parameter of the search.

    Raises:
        ContextError: the name is unknown.
    """
    return getattr(current_context().algo, find(attr_key, "Get", ALGO_BY_NAME).name)


def reset_algo_parameters() -> None:
    """Gives every parameter of the search its default again."""
    _update(lambda context: context.with_algo(DEFAULT_ALGO))


class ContextLayer:
    """A layer of the context for a `with` block or as a decorator, which can be reused and nested."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._values = checked(options)

    def __enter__(self) -> AutoParallelContext:
        outer = _inner.get()
        context = current_context().with_checked(self._values)
        _inner.set(_layer(context, outer))
        return context

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        layer = _inner.get()
        _inner.set(layer.outer if layer is not None else None)

    def __call__(self, function: F) -> F:
        """Wraps a function so that it runs inside the layer.

        A parallel step stays one, and its own options override those of the layer.
        """
        if hasattr(function, "with_context"):
            return cast(F, function.with_context(**self._options))
        if inspect.isclass(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            # Their bodies would run after the layer has ended.
            raise TypeError(
                message("auto_parallel_context decorates functions and coroutines only.", got=repr(function), fix="use `with` inside it")
            )
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return awaited  # type: ignore[return-value]  # what functools and inspect put on functions has no type

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        _decorated[called] = function, self._options
        return called  # type: ignore[return-value]  # what functools and inspect put on functions has no type


_decorated: WeakKeyDictionary[Callable[..., Any], tuple[Callable[..., Any], dict[str, Any]]] = WeakKeyDictionary()
"""Functions that ContextLayer wrapped, with the function that each calls and its options."""


def beneath_layers(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a function without its `auto_parallel_context` decorators, and their options; inner ones win.

    A step plans and compiles outside of its function, where it would not see these layers.
    """
    options: dict[str, Any] = {}
    try:
        while function in _decorated:
            function, own = _decorated[function]
            options |= own
    except TypeError:  # a callable object without hash or weak references
        pass
    return function, options


def auto_parallel_context(**options: Unpack[ContextOptions]) -> ContextLayer:
    """Makes a layer of the context, for a `with` block or as a decorator; leaving it restores the old state.

    Inside, `set_auto_parallel_context` and `reset_auto_parallel_context` change only this layer. Other threads do not
    see it. The options are checked at once, not on entry.

    Raises:
        ContextError: a name is unknown or a value is bad.
        TypeError: a value has the wrong type.
        UnsupportedError: JAX has no counterpart of an option.
    """
    return ContextLayer(options)


def _signature(returns: object) -> inspect.Signature:
    """Makes a signature of keyword-only options with their defaults, so that notebooks and editors complete them."""
    keywords = [inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=plain(option.default)) for option in OPTIONS]
    return inspect.Signature(keywords, return_annotation=returns)


set_auto_parallel_context.__signature__ = _signature(None)  # type: ignore[attr-defined]  # inspect reads it; functions have no type for it
auto_parallel_context.__signature__ = _signature(ContextLayer)  # type: ignore[attr-defined]  # inspect reads it; functions have no type for it
