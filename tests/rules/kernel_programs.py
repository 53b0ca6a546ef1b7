"""Small Pallas kernels with grids of many forms, interpreted on CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def scaled(x: Any, w: Any) -> Any:
    """Scales rows, two at a time, by a vector that every step reads whole."""

    def kernel(rows: Any, scale: Any, out: Any) -> None:
        out[...] = rows[...] * scale[...]

    specs = [pl.BlockSpec((2, x.shape[1]), lambda i: (i, 0)), pl.BlockSpec(w.shape, lambda i: (0,))]
    return _call(kernel, x.shape, (x.shape[0] // 2,), specs, specs[0])(x, w)


def transposed(x: Any) -> Any:
    """Writes blocks of rows as blocks of columns."""

    def kernel(rows: Any, out: Any) -> None:
        out[...] = rows[...].T

    rows, columns = pl.BlockSpec((2, 4), lambda i, j: (i, j)), pl.BlockSpec((4, 2), lambda i, j: (j, i))
    return _call(kernel, x.shape[::-1], (x.shape[0] // 2, x.shape[1] // 4), [rows], columns)(x)


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, divide: Callable[[Any, int], Any] = jax.lax.div) -> Any:
    """Attends with groups of query heads to a key head: q is (batch, heads, length, features), k and v have fewer heads."""
    batch, heads, length, features = q.shape
    group = heads // k.shape[1]

    def kernel(query: Any, key: Any, value: Any, out: Any) -> None:
        scores = query[0, 0] @ key[0, 0].T
        if causal:
            rows = pl.program_id(2) * 2 + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            scores = jnp.where(rows >= jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1), scores, -1e9)
        out[0, 0] = jax.nn.softmax(scores) @ value[0, 0]

    own = pl.BlockSpec((1, 1, 2, features), lambda b, h, i: (b, h, i, 0))
    shared = pl.BlockSpec((1, 1, length, features), lambda b, h, i: (b, divide(h, group), 0, 0))
    return _call(kernel, q.shape, (batch, heads, length // 2), [own, shared, shared], own)(q, k, v)


def summed(x: Any, *, order: Sequence[int] = (0, 1, 2)) -> Any:
    """Adds blocks up in scratch memory: the last axis of x is added, and the grid's axes come in the order given."""
    rows, columns, depth = x.shape
    sizes = (rows, columns // 2, depth)
    deepest = order.index(2)

    def kernel(block: Any, out: Any, total: Any) -> None:
        @pl.when(pl.program_id(deepest) == 0)
        def _start() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += block[0, :, 0]
        out[0] = total[...]

    def place(steps: Sequence[Any]) -> tuple[Any, Any, Any]:
        row, column, step = (steps[order.index(axis)] for axis in range(3))
        return row, column, step

    read = pl.BlockSpec((1, 2, 1), lambda *steps: place(steps))
    written = pl.BlockSpec((1, 2), lambda *steps: place(steps)[:2])
    grid = tuple(sizes[axis] for axis in order)
    return _call(kernel, (rows, columns), grid, [read], written, scratch_shapes=[pltpu.VMEM((2,), jnp.float32)])(x)


def numbered(x: Any) -> Any:
    """Adds to each row the number of its step."""

    def kernel(row: Any, out: Any) -> None:
        out[...] = row[...] + pl.program_id(0)

    spec = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    return _call(kernel, x.shape, (x.shape[0],), [spec], spec)(x)


def reversed_rows(x: Any) -> Any:
    """Reads rows from the last to the first."""

    def kernel(row: Any, out: Any) -> None:
        out[...] = row[...]

    rows = x.shape[0]
    back = pl.BlockSpec((1, x.shape[1]), lambda i: (rows - 1 - i, 0))
    return _call(kernel, x.shape, (rows,), [back], pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0)))(x)


def looked_up(table: Any, x: Any) -> Any:
    """Reads the rows that a table names, which the grid has before the kernel runs."""

    def kernel(_table: Any, row: Any, out: Any) -> None:
        out[...] = 2 * row[...]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(x.shape[0], x.shape[1] // 4),
        in_specs=[pl.BlockSpec((1, 4), lambda i, j, rows: (rows[i], j))],
        out_specs=pl.BlockSpec((1, 4), lambda i, j, rows: (i, j)),
    )
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=struct, grid_spec=spec, interpret=True)(table, x)


def in_place(x: Any) -> Any:
    """Doubles rows where they are."""

    def kernel(row: Any, out: Any) -> None:
        out[...] = 2 * row[...]

    spec = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    return _call(kernel, x.shape, (x.shape[0],), [spec], spec, input_output_aliases={0: 0})(x)


def added_up(x: Any) -> Any:
    """Adds all rows up in one block of the result."""

    def kernel(row: Any, out: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _start() -> None:
            out[...] = jnp.zeros_like(out)

        out[...] += row[...]

    spec = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    return _call(kernel, (1, x.shape[1]), (x.shape[0],), [spec], pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0)))(x)


def _call(
    kernel: Callable[..., None], shape: Sequence[int], grid: tuple[int, ...], specs: Sequence[Any], out: Any, **options: Any
) -> Callable[..., Any]:
    struct = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    return pl.pallas_call(kernel, out_shape=struct, grid=grid, in_specs=list(specs), out_specs=out, interpret=True, **options)
