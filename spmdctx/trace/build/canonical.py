"""Writes parameters of ops as bytes that are the same in every process: their structure, and never their printed text.

How JAX and NumPy print depends on the terminal, its width and their print options, and names of variables and functions may hold
memory addresses. Equal programs have equal bytes, whatever prints them. Left out is what says nothing of the program: source
lines, print options, log records and devices' numbers.
"""

from __future__ import annotations

import functools
import hashlib
import numbers
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

_LEFT_OUT = frozenset({"debug_info", "func_src_info", "logging_record", "name_and_src_info", "np_printoptions", "source_info", "src_info"})
"""Names of parameters and fields that say where a program was written, or how it prints."""


_SIMPLE = frozenset({int, str, bool, type(None)})
"""Types whose equal values are written alike, and once."""


class Form(NamedTuple):
    """The bytes of a value. They are not exact where only the name of something in it is written, such as that of a function."""

    text: bytes
    is_exact: bool


class Canonical:
    """Writes values as bytes; bodies that several values share are written once."""

    def __init__(self) -> None:
        self._is_exact = True
        # With the body, which is kept alive so that no other takes its identity.
        self._known: dict[int, tuple[Any, Form]] = {}
        self._around: set[int] = set()
        self._simple: dict[tuple[type, Any], bytes] = {}

    def form(self, value: Any) -> Form:
        """Returns the form of a value. Values of another structure have other forms, but for what only has a name."""
        outer, self._is_exact = self._is_exact, True
        form = Form(self.text(value), self._is_exact)
        self._is_exact = outer and form.is_exact
        return form

    def text(self, value: Any) -> bytes:
        """Returns the bytes of a value."""
        kind = type(value)
        if kind in _SIMPLE:
            known = self._simple.get((kind, value))
            if known is None:
                known = self._simple[kind, value] = _plain(value)
            return known
        if isinstance(value, Enum | numbers.Integral | float | complex | np.generic | str | bytes):
            return _plain(value)
        if isinstance(value, jexc.Jaxpr | jexc.ClosedJaxpr):
            return self._body(value)
        if isinstance(value, np.ndarray | jax.Array):
            return self._array(value)
        if id(value) in self._around:
            return _joined(b"again")
        self._around.add(id(value))
        try:
            return self._parts(value)
        finally:
            self._around.discard(id(value))

    def _parts(self, value: Any) -> bytes:
        """Returns the bytes of a value that consists of others."""
        if isinstance(value, tuple | list):
            names = getattr(value, "_fields", None)
            return self._named(value, value if names is None else dict(zip(names, value, strict=True)))
        if isinstance(value, Mapping):
            rows = [self.text(key) + self.text(item) for key, item in value.items() if key not in _LEFT_OUT]
            return _joined(b"mapping", *sorted(rows))
        if isinstance(value, Set):
            return _joined(b"set", *sorted(map(self.text, value)))
        if isinstance(value, slice | range):
            return self._named(value, (value.start, value.stop, value.step))
        if isinstance(value, np.dtype) or (hasattr(value, "itemsize") and hasattr(value, "name")):
            return _joined(b"dtype", value.name.encode())
        if isinstance(value, jax.tree_util.PyTreeDef):
            return self._named(value, (value.node_data(), value.children()))
        if isinstance(value, type):
            return _joined(b"type", _name(value))
        if isinstance(value, functools.partial):
            return self._named(value, (value.func, value.args, value.keywords))
        if callable(value) and hasattr(value, "__name__"):
            self._is_exact = False
            return _joined(b"function", _name(value))
        return self._of_jax(value)

    def _of_jax(self, value: Any) -> bytes:
        """Returns the bytes of one of JAX's objects, or of any other by its type and fields."""
        if isinstance(value, jexc.Primitive):
            return _joined(b"primitive", value.name.encode())
        if isinstance(value, jax.core.AbstractValue):
            names = ("shape", "dtype", "weak_type", "memory_space", "inner_aval")
            return self._named(value, [getattr(value, name, None) for name in names])
        if isinstance(value, Mesh | AbstractMesh):
            return _joined(b"mesh", self.text((value.axis_names, value.axis_sizes, value.axis_types)))
        if isinstance(value, jax.sharding.NamedSharding):
            return self._named(value, (value.mesh, tuple(value.spec), value.memory_kind))
        if isinstance(value, jax.sharding.Sharding):
            self._is_exact = False
            return self._named(value, (len(value.device_set), value.memory_kind))
        if isinstance(value, jax.Device):
            self._is_exact = False
            return self._named(value, (value.platform, value.device_kind))
        return self._named(value, self._fields(value))

    def _fields(self, value: Any) -> Mapping[str, Any]:
        """Returns the fields of an object; of one without fields nothing but its type is known."""
        if is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in fields(value)}
        own = {name for kind in type(value).__mro__ for name in _words(vars(kind).get("__slots__", ()))}
        own |= vars(value).keys() if hasattr(value, "__dict__") else set()
        computed = {name for name in own if isinstance(getattr(type(value), name, None), functools.cached_property)}
        known = {name: getattr(value, name) for name in own - computed if not name.startswith("__") and hasattr(value, name)}
        self._is_exact = self._is_exact and bool(known)
        return known

    def _named(self, value: Any, parts: Mapping[str, Any] | Iterable[Any]) -> bytes:
        """Returns the bytes of some parts, behind the type of the value that they make up."""
        inside = [self._parts(parts)] if isinstance(parts, Mapping) else map(self.text, parts)
        return _joined(_name(type(value)), *inside)

    def _array(self, value: Any) -> bytes:
        aval = jax.typeof(value)
        head = self.text(tuple(aval.shape)), aval.dtype.name.encode()
        if isinstance(value, jax.Array):
            # Of arrays of other processes, and of traced ones, only the type is known everywhere.
            if isinstance(value, jax.core.Tracer) or not value.is_fully_addressable:
                self._is_exact = False
                return _joined(b"array", *head)
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                value = jax.random.key_data(value)
        return _joined(b"array", *head, np.asarray(value).tobytes())

    def _body(self, body: Any) -> bytes:
        _, form = self._known.get(id(body), (None, None))
        if form is None:
            jaxpr, consts = (body, ()) if isinstance(body, jexc.Jaxpr) else (body.jaxpr, tuple(body.consts))
            outer, self._is_exact = self._is_exact, True
            digest = hashlib.blake2b(self._jaxpr(jaxpr) + self.text(consts), digest_size=16).digest()
            form = Form(_joined(b"body", digest), self._is_exact)
            self._known[id(body)] = body, form
            self._is_exact = outer
        self._is_exact = self._is_exact and form.is_exact
        return form.text

    def _jaxpr(self, jaxpr: jexc.Jaxpr) -> bytes:
        numbers_of: dict[Any, int] = {}

        def made(variables: Iterable[Any]) -> bytes:
            for var in variables:
                numbers_of[var] = len(numbers_of)
            return self.text([var.aval for var in variables])

        def read(atoms: Iterable[Any]) -> bytes:
            return self.text([(atom.val, atom.aval) if isinstance(atom, jexc.Literal) else numbers_of[atom] for atom in atoms])

        rows = [made(jaxpr.constvars), made(jaxpr.invars)]
        rows += [_joined(eqn.primitive.name.encode(), read(eqn.invars), self.text(eqn.params), made(eqn.outvars)) for eqn in jaxpr.eqns]
        return _joined(b"jaxpr", *rows, read(jaxpr.outvars))


def _plain(value: Any) -> bytes:
    """Returns the bytes of a value without parts."""
    if isinstance(value, Enum):
        return _joined(b"enum", _name(type(value)), value.name.encode())
    if value is None or isinstance(value, bool | np.bool_):
        return _joined(b"none" if value is None else b"true" if value else b"false")
    if isinstance(value, numbers.Integral):
        return _joined(b"int", b"%d" % int(value))
    if isinstance(value, float):
        return _joined(b"float", np.float64(value).tobytes())
    if isinstance(value, complex):
        return _joined(b"complex", np.complex128(value).tobytes())
    if isinstance(value, np.generic):
        return _joined(b"number", value.dtype.name.encode(), value.tobytes())
    return _joined(b"bytes", value) if isinstance(value, bytes) else _joined(b"text", str.encode(value))


def _joined(tag: bytes, *parts: bytes) -> bytes:
    """Joins parts so that no other parts give the same bytes."""
    return b"%b(%d:%b)" % (tag, len(parts), b"".join([b"%d:%b" % (len(part), part) for part in parts]))


def _name(of: Any) -> bytes:
    return f"{of.__module__}.{getattr(of, '__qualname__', of.__name__)}".encode()


def _words(names: str | Iterable[str]) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names
