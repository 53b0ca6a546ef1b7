"""The code of an exported module that runs operations from a table. Imports JAX alone; exports copy what is below MARK."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.extend.core import primitives

# MARK


class Body(NamedTuple):
    """The body of a loop, a branch or a recomputed part.

    `inputs` has (type, shape) pairs, `rows` has (primitive, operands, parameters, names of results), and `results` has names or numbers.
    """

    inputs: Any
    rows: Any
    results: Any
    is_open: bool = False


class Named(NamedTuple):
    """A parameter that JAX gives by a name alone: the kind of a random key ("impl"), or where an array lies ("memory_space")."""

    kind: str
    name: str


def run_rows(rows: Any, results: Any, inputs: Any) -> tuple[Any, ...]:
    """Runs operations on some inputs, which are named "in.0", "in.1" and so on."""
    values = {f"in.{place}": value for place, value in enumerate(inputs)}

    def read(name: Any) -> Any:
        return values[name] if isinstance(name, str) else scalar(*name)

    for kind, operands, params, names in rows:
        own = primitive(kind)
        made = own.bind(*map(read, operands), **{name: _made(value) for name, value in params.items()})
        values.update(zip(names, made if own.multiple_results else [made], strict=True))
    return tuple(map(read, results))


def scalar(number: Any, dtype: str) -> Any:
    """Returns a number of a type."""
    return jax.device_get(jax.numpy.asarray(number, dtype))[()]


def _made(value: Any) -> Any:
    if isinstance(value, Body):
        inputs = [jax.ShapeDtypeStruct(shape, _dtype(name)) for name, shape in value.inputs]
        closed = jax.make_jaxpr(lambda *own: run_rows(value.rows, value.results, own))(*inputs)
        return closed.jaxpr if value.is_open else closed
    if isinstance(value, Named):
        return named(*value)
    return tuple(map(_made, value)) if type(value) is tuple else value


def named(kind: str, name: str) -> Any:
    """Returns a parameter by its name."""
    if kind == "memory_space":
        return type(jax.typeof(jax.numpy.zeros(())).memory_space)[name]
    return jax.make_jaxpr(lambda: jax.random.key(0, impl=name))().jaxpr.eqns[0].params[kind]


def _dtype(name: str) -> Any:
    """Returns a type by its name, also that of a random key, such as "key<fry>"."""
    if not name.startswith("key<"):
        return jax.numpy.dtype(name)
    kinds = [jax.random.key(0, impl=impl).dtype for impl in KEYS]
    return next(kind for kind in kinds if str(kind) == name)


KEYS = ("threefry2x32", "rbg", "unsafe_rbg")

# Primitives without a public name, and what makes an equation of each.
_MADE_BY = {
    "optimization_barrier": lambda x: jax.lax.optimization_barrier(x),
    "stack": lambda x: jax.numpy.stack([x, x]),
    "split": lambda x: jax.lax.split(x, (1, 1)),
    "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "i"),
    "random_wrap": lambda x: jax.random.wrap_key_data(x.astype("uint32"), impl="threefry2x32"),
    "random_unwrap": lambda x: jax.random.key_data(jax.random.wrap_key_data(x.astype("uint32"), impl="threefry2x32")),
}


def primitive(kind: str) -> Any:
    """Returns one of JAX's primitives by its name.

    Raises:
        KeyError: there is no public way to it.
    """
    found = next((own for own in vars(primitives).values() if getattr(own, "name", None) == kind), None)
    if found is None:
        eqns = jax.make_jaxpr(_MADE_BY[kind], axis_env=[("i", 2)])(jax.ShapeDtypeStruct((2,), "float32")).jaxpr.eqns
        found = next(eqn.primitive for eqn in eqns if eqn.primitive.name == kind)
    return found
