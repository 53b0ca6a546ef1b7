"""Writes equations by tracing functions of what atoms of a jaxpr look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns an abstract value as an argument, with shape, dtype and weak type but no sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def structs_of(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns what some atoms look like as arguments."""
    return [struct_of(atom.aval) for atom in atoms]


def renamed(atom: Any, names: Mapping[Any, Any]) -> Any:
    """Returns the new name of an atom, or the atom itself if `names` has none."""
    return atom if isinstance(atom, jexc.Literal) else names.get(atom, atom)


def written(fn: Callable[..., Any], atoms: Sequence[Any], source_info: Any) -> tuple[list[Any], list[Any]]:
    """Returns the equations by which a function of some atoms is computed, and the atoms of its results."""
    made = jax.make_jaxpr(fn)(*structs_of(atoms)).jaxpr
    names = dict(zip(made.invars, atoms, strict=True))
    eqns = []
    for eqn in made.eqns:
        fresh = [jexc.Var(var.aval) for var in eqn.outvars]
        eqns.append(eqn.replace(invars=[renamed(atom, names) for atom in eqn.invars], outvars=fresh, source_info=source_info))
        names.update(zip(eqn.outvars, fresh, strict=True))
    return eqns, [renamed(atom, names) for atom in made.outvars]
