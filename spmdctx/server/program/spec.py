"""What servers are told, as plain data: their programs as exported StableHLO, and how parts become whole results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from spmdctx.gradients.reduce import is_low_precision
from spmdctx.gradients.results import Fate, Row
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.cut import Cut, ServerPart

_SUMMED = (Fate.REDUCED, Fate.AVERAGED, Fate.OWN)


class Join(NamedTuple):
    """How one result of the loss becomes whole: "mean", "last", or "stack" along a dimension.

    `dtype` is its own, `sum_dtype` the one in which parts are added.
    """

    kind: str
    dtype: str
    sum_dtype: str
    dim: int = 0


class RoundSpec(NamedTuple):
    """One program: as `jax.export` writes it, and the slots that it reads and makes."""

    blob: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class ServerSpec(NamedTuple):
    """What one server does; see `ServerPart`.

    Attributes:
        held: for the slot of each array that it holds, the path of the input.
        renewed: for each such slot, the slot of its next value; arrays for literals.
        joins: for the slot of each result of the loss that it gets, how parts become one.
        given: the slots that workers send with part 0.
        rounds: its programs.
        posts: see `ServerPart`.
        awaits: see `ServerPart`.
        results: the slots of results of the step, by number.
        num_parts: of each step.
        x64: whether JAX computes in 64 bits.
    """

    held: Mapping[str, str]
    renewed: Mapping[str, Any]
    joins: Mapping[str, Join]
    given: tuple[str, ...]
    rounds: tuple[RoundSpec | None, ...]
    posts: tuple[tuple[str, ...], ...]
    awaits: tuple[tuple[str, ...], ...]
    results: Mapping[int, str]
    num_parts: int
    x64: bool


def server_specs(step: ServedStep, cut: Cut, *, x64: bool) -> list[ServerSpec]:
    """Returns what each server is told."""
    return [_spec(step, cut, part, x64=x64) for part in cut.servers]


def fingerprint(step: ServedStep) -> str:
    """Returns what is the same for all processes that run the same step."""
    leaves = [(leaf.path, leaf.shape, leaf.dtype) for leaf in step.captured.inputs]
    primitives = [eqn.primitive.name for eqn in step.captured.jaxpr.jaxpr.eqns] + [eqn.primitive.name for eqn in step.loss.part.jaxpr.eqns]
    return hashlib.sha256(repr((leaves, primitives, step.loss.num_parts)).encode()).hexdigest()


def _spec(step: ServedStep, cut: Cut, part: ServerPart, *, x64: bool) -> ServerSpec:
    inputs = step.captured.inputs
    outvars = {leaf.carried_from: cut.around.jaxpr.jaxpr.outvars[number] for number, leaf in enumerate(step.captured.outputs)}
    renewed: dict[str, Any] = {}
    for number in part.held:
        slot, atom = cut.held[number], outvars[number]
        renewed[f"in/{number}"] = slot if slot else np.asarray(atom.val, atom.aval.dtype)
    avals = step.loss.part.out_avals
    return ServerSpec(
        held={f"in/{number}": inputs[number].path for number in part.held},
        renewed=renewed,
        joins={f"loss/{number}": _join(step.loss.rows[number], avals[number], step.loss.num_parts) for number in part.joined},
        given=tuple(f"in/{number}" for number in part.given),
        rounds=tuple(None if own is None else RoundSpec(exported(own.jaxpr), own.inputs, own.outputs) for own in part.rounds),
        posts=part.posts,
        awaits=part.awaits,
        results=part.results,
        num_parts=step.loss.num_parts,
        x64=x64,
    )


def _join(row: Row, aval: Any, num_parts: int) -> Join:
    dtype = str(aval.dtype)
    if row.fate in _SUMMED and num_parts > 1:
        return Join("mean", dtype, "float32" if is_low_precision(aval.dtype) else dtype)
    if row.fate is Fate.STACKED and row.dim is not None and num_parts > 1:
        return Join("stack", dtype, dtype, row.dim)
    return Join("last", dtype, dtype)


def exported(closed: jexc.ClosedJaxpr) -> bytes:
    """Returns a program for CPUs, in which keys are the words that they are made of."""
    avals = closed.in_avals
    run = jexc.jaxpr_as_fun(closed)

    def plain(*values: Any) -> list[Any]:
        return [raw(made) for made in run(*(typed(value, aval) for value, aval in zip(values, avals, strict=True)))]

    structs = [raw_type(aval) for aval in avals]
    return bytes(jax.export.export(jax.jit(plain), platforms=["cpu"])(*structs).serialize())


def raw(value: Any) -> Any:
    """Returns an array, or the words of a typed key."""
    return jax.random.key_data(value) if is_key(value.dtype) else value


def typed(value: Any, aval: Any) -> Any:
    """Returns an array as its type says: a typed key of its words."""
    return jax.random.wrap_key_data(value, impl=_impl(aval)) if is_key(aval.dtype) else value


def _impl(aval: Any) -> Any:
    """Returns the generator of a type of keys, which JAX tells of arrays alone."""
    found = []

    def look(key: Any) -> Any:
        found.append(jax.random.key_impl(key))
        return 0

    jax.eval_shape(look, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return found[0]


def raw_type(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of what `raw` gives."""
    if not is_key(aval.dtype):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    struct: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return struct


def is_key(dtype: Any) -> bool:
    """Returns whether a type is that of typed keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))
