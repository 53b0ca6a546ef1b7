"""How the rows of a table are made at first, so that nobody but its servers ever holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

BLOCK = 1 << 14
"""Rows that are made at once, from a key of their own: so they do not depend on the number of servers."""


class Recipe(NamedTuple):
    """How rows are made.

    Attributes:
        shape: of the whole table.
        dtype: of its elements.
        blob: the program of a block of rows, as `jax.export` writes it, of the words of a key and the number of the block; or empty.
        words: of the key.
        row: what all rows are if there is no program.
    """

    shape: tuple[int, ...]
    dtype: str
    blob: bytes = b""
    words: np.ndarray[Any, Any] | None = None
    row: np.ndarray[Any, Any] | None = None


def recipe_of(shape: tuple[int, ...], dtype: Any, init: Callable[..., Any], key: Any) -> Recipe:
    """Returns how `init(key, shape, dtype)` makes a table, a block of rows at a time."""
    is_typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
    impl = jax.random.key_impl(key) if is_typed else None
    words = np.asarray(jax.random.key_data(key) if is_typed else key)

    def block(own: Any, number: Any) -> Any:
        whole = jax.random.wrap_key_data(own, impl=impl) if is_typed else own
        return init(jax.random.fold_in(whole, number), (BLOCK, *shape[1:]), dtype)

    structs = jax.ShapeDtypeStruct(words.shape, words.dtype), jax.ShapeDtypeStruct((), np.uint32)
    blob = bytes(jax.export.export(jax.jit(block), platforms=["cpu", "cuda", "rocm", "tpu"])(*structs).serialize())
    return Recipe(shape, str(jax.dtypes.canonicalize_dtype(dtype)), blob, words)


def made_rows(recipe: Recipe, server: int = 0, num_servers: int = 1) -> np.ndarray[Any, Any]:
    """Returns the rows that a server has: row i is on server i modulo their number."""
    num_rows = recipe.shape[0]
    out = np.empty((len(range(server, num_rows, num_servers)), *recipe.shape[1:]), jax.numpy.dtype(recipe.dtype))
    if recipe.row is not None:
        out[:] = recipe.row
        return out
    run = jax.jit(jax.export.deserialize(bytearray(recipe.blob)).call)
    for start in range(0, num_rows, BLOCK):
        rows = np.arange(start, min(start + BLOCK, num_rows))
        wanted = rows % num_servers == server
        out[rows[wanted] // num_servers] = np.asarray(run(recipe.words, np.uint32(start // BLOCK)))[: len(rows)][wanted]
    return out
