"""A step with twenty parameters, and the collectives of its compiled program by their operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmdctx.audit.collectives import KINDS
from spmdctx.audit.hlo import Module, read_module
from spmdctx.audit.provenance import Place, Scope, operands, parts

NUM_PARAMETERS = 20


def widths(index: int) -> int:
    """Parameters differ in their number of rows, by which their gradients are told apart."""
    return 256 + 8 * index


def step(weights: list[Any], x: Any) -> tuple[Any, list[Any]]:
    """One step of gradient descent through products with all weights, each [rows, 512]."""

    def loss(weights: list[Any]) -> Any:
        hidden = x
        for weight in weights:
            hidden = jnp.tanh(hidden[:, : weight.shape[0]] @ weight)
        return jnp.mean(hidden**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return value, [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]


def arguments(rows: Any = widths, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """Weights and a batch of 64, abstract."""
    weights = [jax.ShapeDtypeStruct((rows(index), 512), dtype) for index in range(NUM_PARAMETERS)]
    return weights, jax.ShapeDtypeStruct((64, 512), dtype)


class Combined(NamedTuple):
    """One compiled collective: the shapes and types of its operands."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


def combined(text: str) -> list[Combined]:
    """The collectives of a program, each with all that was combined in it. Copies of asynchronous gathers count once."""
    module = read_module(text)
    found, seen = [], set()
    for computation in module.computations.values():
        scope = Scope(computation)
        for one in computation.instructions.values():
            kind = KINDS.get(one.opcode.removesuffix("-start"))
            channel = one.attributes.partition("channel_id=")[2].partition(",")[0]
            if kind is None or channel in seen:
                continue
            if "async_collective_fusion_config" in one.attributes:
                seen.add(channel)
            if computation.name.startswith("all-reduce-scatter"):
                kind = "reduce_scatter"
            leaves = [leaf for place in _parts(Place(one, scope), module, kind) for leaf in place.instruction.leaves]
            found.append(Combined(kind, tuple(leaf.shape for leaf in leaves), tuple(leaf.dtype for leaf in leaves)))
    return found


def _parts(place: Place, module: Module, kind: str) -> list[Place]:
    made = list(operands(place))
    return [part for one in made for part in (parts(one, module) if kind == "all_reduce" else [one])]
