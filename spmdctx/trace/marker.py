"""The marker primitive of `shard()`: an identity that carries a strategy through every transformation and lowers to nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from spmdctx.ir.layout import FREE, Layout
from spmdctx.ir.primitives import MARKER

_GRAD = "_grad"

shard_p = Primitive(MARKER)
"""The marker: `shard_p.bind(x, region=, side=, index=, strategy=, label=)` is x."""

_regions = itertools.count()


# A marker's source line is where the user calls the sharded function, not a line of this package.
for _file in ("trace/marker.py", "shard/decorate.py", "shard/call.py", "shard/modules.py"):
    source_info_util.register_exclusion(str(Path(__file__).parents[1] / _file))

_traced_mode: ContextVar[str | None] = ContextVar("spmdctx_traced_mode", default=None)


@contextmanager
def tracing_in(mode: str) -> Iterator[None]:
    """Sets the parallel mode of the step that is traced inside; a step's options may differ from the context's."""
    token = _traced_mode.set(mode)
    try:
        yield
    finally:
        _traced_mode.reset(token)


def traced_mode() -> str | None:
    """Returns the parallel mode of the step that is being traced, or None outside of one."""
    return _traced_mode.get()


def new_region() -> int:
    """Returns a number that no other region of this process has; traces that JAX caches keep theirs."""
    return next(_regions)


def mark(x: Any, *, region: int, side: str, index: int, strategy: tuple[int, ...] | Layout | None, label: str) -> Any:
    """Marks one boundary value of a region; see `ir.graph.Mark` for the meaning of the parameters."""
    return _bind(x, region=region, side=side, index=index, strategy=strategy, label=label)


def _bind(x: Any, **params: Any) -> Any:
    return shard_p.bind(x, **params)


def _identity(x: Any, **_: Any) -> Any:
    return x


def _transpose(cotangent: Any, operand: Any, *, side: str, **params: Any) -> list[Any]:
    del operand
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    other_side = side.removesuffix(_GRAD) if side.endswith(_GRAD) else side + _GRAD
    return [_bind(cotangent, side=other_side, **params)]


def _batch(args: tuple[Any], dims: tuple[int], *, strategy: tuple[int, ...] | Layout | None, **params: Any) -> tuple[Any, int]:
    (dim,) = dims
    return _bind(args[0], strategy=_with_free_dim(strategy, dim), **params), dim


def _with_free_dim(strategy: tuple[int, ...] | Layout | None, dim: int) -> tuple[int, ...] | Layout | None:
    if strategy is None:
        return None
    if isinstance(strategy, Layout):
        return strategy.with_free_dim(dim)
    return (*strategy[:dim], FREE, *strategy[dim:])


shard_p.def_impl(_identity)
shard_p.def_abstract_eval(_identity)
ad.deflinear2(shard_p, _transpose)
batching.primitive_batchers[shard_p] = _batch
mlir.register_lowering(shard_p, lambda ctx, x, **_: [x])
