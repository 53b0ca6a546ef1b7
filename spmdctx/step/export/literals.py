"""Writes values as Python source, so that a module can hold them; what has no short form is refused."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np
from jax.extend.core import Primitive, primitives
from jax.sharding import PartitionSpec

_COMBINERS = ("add", "mul", "min", "max")


def literal_bytes(atom: Any) -> bytes:
    """Returns the bytes of a literal in its own type: Python's numbers and those of NumPy are alike."""
    return np.asarray(atom.val, atom.aval.dtype).tobytes()


class NoLiteralError(Exception):
    """A value that no short Python source makes again."""


def spec_source(spec: Any) -> str:
    """Returns the source of a PartitionSpec, such as `P("data", None)`."""
    return f"P({', '.join(map(source, spec))})"


def source(value: Any) -> str:
    """Returns Python source that makes a value; `jax` is imported and `P` is PartitionSpec where it stands.

    Raises:
        NoLiteralError: there is none.
    """
    if isinstance(value, PartitionSpec):
        return spec_source(value)
    if isinstance(value, str):
        return '"' + repr(value)[1:-1].replace('"', '\\"') + '"' if "'" not in value else repr(value)
    if isinstance(value, np.bool_ | np.number):
        return source(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or (isinstance(value, bool | int | float) and not isinstance(value, Enum)):
        return repr(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return f'jax.numpy.dtype("{np.dtype(value).name}")'
    if isinstance(value, Enum):
        return _of_lax(type(value).__name__, f".{value.name}")
    fields = getattr(value, "_fields", None)
    if isinstance(value, tuple) and fields:
        return _of_lax(type(value).__name__, f"({', '.join(f'{name}={source(own)}' for name, own in zip(fields, value, strict=True))})")
    if isinstance(value, tuple):
        return f"({', '.join(map(source, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(source, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{source(key)}: {source(own)}' for key, own in value.items())}}}"
    if isinstance(value, jexc.Jaxpr):
        return _operation(value)
    if isinstance(value, Primitive):
        return next((f"primitives.{name}" for name, own in vars(primitives).items() if own is value), None) or _none(value.name)
    if isinstance(value, frozenset) and not value:
        return "frozenset()"
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(sorted(map(source, value)))}}})"
    return _none(type(value).__name__)


def _operation(body: jexc.Jaxpr) -> str:
    """Returns the source of a body that combines two numbers by one operation, such as that of a scatter-add."""
    name = body.eqns[0].primitive.name if len(body.eqns) == 1 else ""
    if name not in _COMBINERS or list(body.eqns[0].invars) != list(body.invars) or list(body.eqns[0].outvars) != list(body.outvars):
        raise NoLiteralError(type(body).__name__)
    numbers = ", ".join(f'jax.ShapeDtypeStruct((), "{var.aval.dtype.name}")' for var in body.invars)
    return f"jax.make_jaxpr(jax.lax.{name})({numbers}).jaxpr"


def _none(name: str) -> str:
    raise NoLiteralError(name)


def _of_lax(name: str, rest: str) -> str:
    if not hasattr(jax.lax, name):
        raise NoLiteralError(name)
    return f"jax.lax.{name}{rest}"
