"""Eager calls of sharded functions and modules: compiles and runs them split, as MindSpore's functional sharding does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from spmdctx.context.layers import current_context
from spmdctx.context.options import PLANNED_MODES
from spmdctx.context.typed import ContextOptions
from spmdctx.trace.marker import traced_mode

MAX_STEPS = 512


def runs_eagerly(*trees: Any) -> bool:
    """Returns whether nothing in `trees` is traced, no step is being traced, and the context splits by strategies."""
    if traced_mode() is not None or current_context().parallel_mode not in PLANNED_MODES:
        return False
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def run_split(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls `fn` as a step of its own. What is neither array, float nor nnx object is a static argument.

    Like MindSpore, takes every argument as the global one that all devices hold, unless the context says otherwise.
    """
    leaves, tree = jax.tree.flatten((args, dict(kwargs)), is_leaf=_is_object)
    dynamic = tuple(_is_dynamic(leaf) for leaf in leaves)
    static = tuple(leaf for leaf, is_dynamic in zip(leaves, dynamic, strict=True) if not is_dynamic)
    explicit = {"full_batch", "dataset_strategy"} & current_context().explicit
    step = _step(fn, tree, dynamic, static, not explicit)
    return step(*(leaf for leaf, is_dynamic in zip(leaves, dynamic, strict=True) if is_dynamic))


def _is_object(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Module)


def _is_dynamic(leaf: Any) -> bool:
    return _is_object(leaf) or isinstance(leaf, (float, complex)) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


@functools.lru_cache(MAX_STEPS)
def _step(fn: Callable[..., Any], tree: Any, dynamic: tuple[bool, ...], static: tuple[Any, ...], full_batch: bool) -> Callable[..., Any]:
    from spmdctx.api import parallel

    def step(*leaves: Any) -> Any:
        given, fixed = iter(leaves), iter(static)
        args, kwargs = jax.tree.unflatten(tree, [next(given if is_dynamic else fixed) for is_dynamic in dynamic])
        return fn(*args, **kwargs)

    step.__name__ = getattr(fn, "__name__", "step")
    options: ContextOptions = {"full_batch": True} if full_batch else {}
    split: Callable[..., Any] = parallel(step, **options)
    return split
