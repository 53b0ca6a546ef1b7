"""`shard(cross_batch=True)`: reductions over the batch that stay inside each device's part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmdctx.context.layers import current_context
from spmdctx.context.options import PLANNED_MODES
from spmdctx.errors import StrategyError
from spmdctx.ir.layout import Layout
from spmdctx.shard.call import Spec
from spmdctx.trace.marker import traced_mode


def on_own_batch(fn: Callable[..., Any], in_strategy: tuple[Spec, ...], label: str) -> Callable[..., Any]:
    """Returns a function that runs `fn` on each part of the batch separately, as `in_strategy` splits dimension 0 of its arrays.

    Results with a batch dimension are joined again. Floating results without one are the means over the parts. In modes where
    `shard()` splits nothing, the function runs `fn` on the whole batch.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if (traced_mode() or current_context().parallel_mode) not in PLANNED_MODES:
            return fn(*args, **kwargs)
        tree: Any
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [index for index, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
        parts = _parts([leaves[place] for place in places], in_strategy, label)
        count = max(parts, default=1)
        if count == 1:
            return fn(*args, **kwargs)

        def flat(*arrays: Any) -> Any:
            own = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                own[place] = array
            inner_args, inner_kwargs = tree.unflatten(own)
            return fn(*inner_args, **inner_kwargs)

        whole = [leaves[place] for place in places]
        cut = [_cut(array, count) if own > 1 else array for array, own in zip(whole, parts, strict=True)]
        results = jax.vmap(flat, in_axes=[0 if own > 1 else None for own in parts])(*cut)
        return jax.tree.map(lambda result, like: _joined(result, like.shape, label), results, jax.eval_shape(flat, *whole))

    return run


def _parts(arrays: list[Any], in_strategy: tuple[Spec, ...], label: str) -> list[int]:
    """Returns for each array into how many parts its dimension 0 is split."""
    if len(in_strategy) != len(arrays):
        raise StrategyError(
            f"in_strategy has {len(in_strategy)} entries, but the call has {len(arrays)} arrays.",
            where=f"shard(cross_batch=True) of {label}",
            fix="give one entry per array, None for those that are whole",
        )
    found = []
    for array, spec in zip(arrays, in_strategy, strict=True):
        dims = spec.strategy if isinstance(spec, Layout) else spec
        found.append(dims[0] if dims and array.shape else 1)
    for array, own in zip(arrays, found, strict=True):
        if own not in (1, max(found)) or (array.shape and array.shape[0] % own):
            raise StrategyError(
                f"cross_batch splits dimension 0 of the batch into {max(found)} parts, and that of shape {array.shape} into {own}.",
                where=f"shard(cross_batch=True) of {label}",
                need="as many parts of every array of the batch, and sizes that they divide",
            )
    return found


def _cut(array: Any, count: int) -> Any:
    return jnp.reshape(array, (count, array.shape[0] // count, *array.shape[1:]))


def _joined(result: Any, shape: tuple[int, ...], label: str) -> Any:
    """Joins the parts of a result, stacked along dimension 0, to the result of `shape`."""
    grown = [dim for dim, (own, full) in enumerate(zip(result.shape[1:], shape, strict=True)) if own != full]
    if grown:
        return jnp.reshape(jnp.moveaxis(result, 0, grown[0]), shape)
    if jnp.issubdtype(result.dtype, jnp.inexact):
        return jnp.mean(result, axis=0)
    raise StrategyError(
        f"A result {result.dtype}{list(shape)} without the batch as a dimension differs between devices.",
        where=f"shard(cross_batch=True) of {label}",
        need="floating results, or results with the batch as a dimension",
    )
