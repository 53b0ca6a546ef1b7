"""JAX's own harnesses as steps: each primitive with many shapes, types and parameters, plain or under a transformation.

`run_case` plans one of them in five ways, runs every distinct program, and compares it with one device.
The harnesses are private to JAX's tests, and there is no public list of them: `all_harnesses` is the one place that reads it.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx
from benchmarks.split_checks import DEVICES, FREE_LINKS, crash_text, first_line, plain_array
from spmdctx.errors import SpmdctxError

WAYS: Mapping[str, Mapping[str, Any]] = {
    "data_parallel": {"parallel_mode": "data_parallel"},
    "semi_auto_parallel": {"parallel_mode": "semi_auto_parallel", "dataset_strategy": "full_batch"},
    "dynamic_programming": {"parallel_mode": "auto_parallel", "search_mode": "dynamic_programming", "topology": FREE_LINKS},
    "recursive_programming": {"parallel_mode": "auto_parallel", "search_mode": "recursive_programming", "topology": FREE_LINKS},
    "sharding_propagation": {
        "parallel_mode": "auto_parallel",
        "search_mode": "sharding_propagation",
        "dataset_strategy": "data_parallel",
    },
}
"""The five ways of planning, with the options of each."""

Case = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step and its arguments."""


class NotApplicable(Exception):
    """A harness that has no such form, or that JAX itself does not run on one CPU device."""


@lru_cache(maxsize=1)
def all_harnesses() -> dict[str, Any]:
    """Returns JAX's harnesses by full name."""
    from jax._src.internal_test_util import test_harnesses  # private: JAX publishes no list of its primitives' cases

    return {harness.fullname: harness for harness in test_harnesses.all_harnesses}


_TYPE = re.compile(r"_(bool|u?int\d+|b?float\d+(_e\d\w*?)?|complex\d+)(?=_|$)|_enable_?xla_(True|False)")


def shape_of(name: str) -> str:
    """Returns a harness's name without types of numbers, and without an option that other compilers read."""
    return _TYPE.sub("_T", name)


def case_of(name: str, wrap: str) -> Case:
    """Returns a harness under a transformation, one of `WRAPS`, with arguments that depend on the name alone.

    Raises:
        NotApplicable: the harness has no arguments to map over, or none to differentiate by.
    """
    harness = all_harnesses()[name]
    random = np.random.RandomState(zlib.crc32(name.encode()))

    def drawn() -> tuple[Any, ...]:
        return tuple(jax.tree.map(jnp.asarray, harness.dyn_args_maker(random)))

    return WRAPS[wrap](harness.dyn_fun, drawn)


def _plain(fn: Callable[..., Any], drawn: Callable[[], tuple[Any, ...]]) -> Case:
    return fn, drawn()


def _stacked(drawn: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    examples = [drawn() for _ in range(DEVICES)]
    if not jax.tree.leaves(examples[0]):
        raise NotApplicable("no arguments to map over")
    return tuple(jax.tree.map(lambda *leaves: jnp.stack(leaves), *examples))


def _vmap(fn: Callable[..., Any], drawn: Callable[[], tuple[Any, ...]]) -> Case:
    return jax.vmap(fn), _stacked(drawn)


def _scan(fn: Callable[..., Any], drawn: Callable[[], tuple[Any, ...]]) -> Case:
    """Runs it in a loop that carries its last results and stacks those before."""

    def loop(*stacked: Any) -> Any:
        first = fn(*jax.tree.map(lambda leaf: leaf[0], stacked))
        return jax.lax.scan(lambda last, xs: (jax.tree.map(lambda new, _: new, fn(*xs), last), last), first, stacked)

    return loop, _stacked(drawn)


def _grad(fn: Callable[..., Any], drawn: Callable[[], tuple[Any, ...]]) -> Case:
    """Differentiates a weighted sum of its results by all arguments that are real or complex."""
    arguments = drawn()
    leaves, structure = jax.tree.flatten(arguments)
    chosen = [index for index, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not chosen:
        raise NotApplicable("no arguments to differentiate by")

    def loss(some: Sequence[Any], everything: Sequence[Any]) -> Any:
        full = list(everything)
        for index, leaf in zip(chosen, some, strict=True):
            full[index] = leaf
        return sum((_weighted(leaf) for leaf in jax.tree.leaves(fn(*jax.tree.unflatten(structure, full)))), jnp.float32(0))

    def gradients(*args: Any) -> Any:
        everything = jax.tree.leaves(args)
        return jax.value_and_grad(loss)([everything[index] for index in chosen], everything)

    return gradients, arguments


def _weighted(leaf: Any) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.float32(0)
    weights = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape)
    parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
    terms = [part.astype(jnp.float32) * weights for part in parts]
    # A sum whose terms cancel is all rounding; their magnitudes, whose gradient is left out, keep it as large as they are.
    return sum((jnp.sum(term) + jax.lax.stop_gradient(jnp.sum(jnp.abs(term))) for term in terms), jnp.float32(0))


def _checkpoint(fn: Callable[..., Any], drawn: Callable[[], tuple[Any, ...]]) -> Case:
    """Differentiates through jax.checkpoint where it can, and runs it in one where it cannot."""
    again = jax.checkpoint(fn)
    try:
        gradients, arguments = _grad(again, drawn)
        jax.eval_shape(gradients, *arguments)
    except Exception:  # whatever JAX says of what it cannot differentiate
        return again, drawn()
    return gradients, arguments


WRAPS: Mapping[str, Callable[[Callable[..., Any], Callable[[], tuple[Any, ...]]], Case]] = {
    "plain": _plain,
    "vmap": _vmap,
    "scan": _scan,
    "checkpoint": _checkpoint,
    "grad": _grad,
}
"""The transformations, each of which makes a case from a function and what draws its arguments."""


def run_case(name: str, wrap: str, ways: Sequence[str] = tuple(WAYS), *, run: bool = True) -> dict[str, Any]:
    """Plans a harness in several ways, runs each distinct program, and compares with one device.

    Returns:
        A row for JSON: `name`, `wrap`, `seconds`, `programs` (compiled), and either `skipped` (why one device does not run it), or
        `ways`: for each way `outcome` (ok, refused, crashed or wrong), whether something is `split`, and what went wrong.
    """
    start = time.perf_counter()
    row: dict[str, Any] = {"name": name, "wrap": wrap}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fn, arguments = case_of(name, wrap)
            # Its own wrapper, so that JAX's caches of traces do not depend on what ran before.
            alone = jax.jit(lambda *args: fn(*args))
            wanted = jax.device_get(alone(*arguments)) if run else alone.lower(*arguments)
        except Exception as error:
            row["skipped"] = first_line(error)
        else:
            seen: dict[str, str] = {}
            row["ways"] = {way: _run_way(fn, arguments, way, wanted, seen if run else None) for way in ways}
            row["programs"] = len(seen)
    row["seconds"] = round(time.perf_counter() - start, 3)
    return row


def _run_way(fn: Callable[..., Any], arguments: tuple[Any, ...], way: str, wanted: Any, seen: dict[str, str] | None) -> dict[str, Any]:
    """Plans in one way; runs the program unless `seen` has the outcome of the same program, or is None."""
    try:
        step = spmdctx.parallel(lambda *args: fn(*args), **WAYS[way], **_batch_options(arguments, way))
        if seen is None:
            shardings = jax.tree.leaves((step.in_shardings(*arguments), step.out_shardings(*arguments)))
            return {"outcome": "ok", "split": not all(sharding.is_fully_replicated for sharding in shardings)}
        text = step.lower(*arguments).as_text()
        # Names of functions and numbers of values aside, programs of one text are one program.
        key = hashlib.sha1(text.encode()).hexdigest()
        split = bool(re.search(r'\[[^]]*\{"', text))
        if key not in seen:
            seen[key] = difference(jax.device_get(step(*arguments)), wanted, lowest_precision(arguments))
    except SpmdctxError as error:
        return {"outcome": "refused", "error": f"{type(error).__name__}: {error.summary}"}
    except Exception as error:
        return {"outcome": "crashed", "error": crash_text(error)}
    if seen[key]:
        return {"outcome": "wrong", "split": split, "error": seen[key]}
    return {"outcome": "ok", "split": split}


def _batch_options(arguments: tuple[Any, ...], way: str) -> dict[str, Any]:
    """Returns the devices, and the arguments that are batches: those whose leading dimensions divide over the devices.

    data_parallel splits all arguments that have dimensions, over as many devices as divide them, and refuses where these are one.
    """
    sizes = [[leaf.shape[0] if leaf.shape else 1 for leaf in jax.tree.leaves(argument)] for argument in arguments]
    ranked = [index for index, leaves in enumerate(arguments) if all(leaf.ndim for leaf in jax.tree.leaves(leaves))]
    common = math.gcd(DEVICES, *(size for index in ranked for size in sizes[index]))
    if way == "data_parallel" and ranked and common > 1:
        return {"device_num": common, "batch_argnums": tuple(ranked)}
    batch = tuple(index for index in ranked if sizes[index] and not any(size % DEVICES for size in sizes[index]))
    return {"device_num": DEVICES, **({"batch_argnums": batch} if batch else {})}


def lowest_precision(tree: Any) -> float:
    """Returns the largest rounding unit among a tree's types."""
    types = [leaf.dtype for leaf in jax.tree.leaves(tree)]
    return max((float(jnp.finfo(dtype).eps) for dtype in types if jnp.issubdtype(dtype, jnp.inexact)), default=0.0)


def difference(got: Any, wanted: Any, unit: float) -> str:
    """Returns in words what differs between two trees of NumPy arrays, or "" if they agree as their types allow.

    Args:
        got: of the split program.
        wanted: of one device.
        unit: the rounding unit of the arguments; that of a result counts where it is larger.
    """
    for index, (one, other) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)):
        one, other = plain_array(one), plain_array(other)
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"result {index}: {one.dtype}{one.shape} instead of {other.dtype}{other.shape}"
        if not jnp.issubdtype(other.dtype, jnp.inexact):
            if (one != other).any():
                return f"result {index}: {int((one != other).sum())} of {one.size} elements differ"
            continue
        allowed = (
            1000 * max(unit, float(jnp.finfo(other.dtype).eps)) if other.dtype.itemsize > 2 else 16 * float(jnp.finfo(other.dtype).eps)
        )
        wide = np.complex128 if jnp.iscomplexobj(other) else np.float64
        one, other = one.astype(wide), other.astype(wide)
        if (np.isnan(one) != np.isnan(other)).any():
            return f"result {index}: NaN in other places"
        finite = np.isfinite(one) & np.isfinite(other)
        if (one != other)[~finite & ~np.isnan(one)].any():
            return f"result {index}: infinite in other places"
        scale = max(np.abs(other[finite]).max(initial=0.0), 1e-3)
        worst = np.abs(one[finite] - other[finite]).max(initial=0.0) / scale
        if worst > allowed:
            return f"result {index}: differs by {worst:.1e}, allowed {allowed:.1e}"
    return ""
