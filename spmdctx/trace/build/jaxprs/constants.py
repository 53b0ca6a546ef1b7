"""Drops from a step what its results cannot depend on: operands of integer and boolean equations whose result is known.

XLA does the same behind its partitioner, so the collectives of such operands never run. What is dropped here is not planned or lowered.
Only exact identities count (`x ^ x`, `x & False`, an integer times zero, a choice by a known predicate, a sort of single elements, what a
scatter overwrites in all, the start of a carry that no iteration reads), never sums or products of floats.
What depends on literals alone stays as it is: no plan moves it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax.dtypes import extended

from spmdctx._compat import acts_outside, scan_counts
from spmdctx.rules.control_flow import CALLS, CONTROL_FLOW, LOOPS, body_parameter, opened, with_bodies
from spmdctx.trace.build.jaxprs.equations import renamed, written
from spmdctx.trace.build.jaxprs.liveness import Liveness

_COMPARED: Mapping[str, Callable[[Any, Any], Any]] = {
    **{"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
}

_COMPUTED: Mapping[str, Callable[..., Any]] = {
    **_COMPARED,
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "neg": np.negative},
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum},
    **{"select_n": lambda which, *cases: cases[int(which)], "convert_element_type": lambda value: value},
}
"""Element-wise equations whose results are known where all operands are."""

_HANDED_ON = frozenset(
    {
        *("broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "slice", "copy"),
        *("reduce_and", "reduce_or", "reduce_max", "reduce_min"),
    }
)
"""Equations whose result has the one number that all elements of their operand are."""

_SPECIAL = frozenset({"custom_linear_solve"})
"""Calls of several bodies, which stay as they are."""

_NOT_COMPARED = CONTROL_FLOW | {"rng_uniform", "pure_callback"}
"""Equations of which two may differ although they are written alike, or that are costly to compare."""


def without_constants(closed: jexc.ClosedJaxpr) -> jexc.ClosedJaxpr:
    """Returns the program without what its results cannot depend on; one in which nothing changes comes back as it is."""
    jaxpr, _ = _Folding().body(closed.jaxpr, dict(zip(closed.jaxpr.constvars, map(_single_number, closed.consts), strict=True)))
    return closed if jaxpr is closed.jaxpr else jexc.ClosedJaxpr(jaxpr, closed.consts)


class _Folding:
    """Folds one body after the other; `known` has the number that all elements of a variable are, `free` what depends on literals alone."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}
        self.free: set[Any] = set()
        self.makers: dict[Any, Any] = {}

    def body(self, jaxpr: Any, given: Mapping[Any, Any]) -> tuple[Any, list[Any]]:
        """Returns a body with what is `given` of its inputs, and what is known of its results, None where nothing is."""
        inner = _Folding()
        inner.known.update({var: value for var, value in given.items() if value is not None})
        inner.free.update(inner.known)
        names: dict[Any, Any] = {}
        eqns, changed = [], False
        for eqn in jaxpr.eqns:
            own = eqn.replace(invars=[renamed(atom, names) for atom in eqn.invars]) if names else eqn
            made = inner.equation(own)
            if made is not None:
                eqns += made[0]
                names.update(zip(eqn.outvars, made[1], strict=True))
                changed = True
                continue
            new = inner.with_bodies(own)
            changed |= new is not eqn
            eqns.append(new)
            if len(new.outvars) == 1 and not new.effects and new.primitive.name not in _NOT_COMPARED:
                inner.makers[new.outvars[0]] = new
        outvars = [renamed(atom, names) for atom in jaxpr.outvars]
        results = [inner.value(atom) for atom in outvars]
        return (jaxpr.replace(eqns=eqns, outvars=outvars) if changed else jaxpr), results

    def value(self, atom: Any) -> Any:
        """Returns the number that all elements of an atom are, or None if it is not known."""
        if isinstance(atom, jexc.Literal):
            return np.asarray(atom.val, atom.aval.dtype)[()] if hasattr(atom.aval, "dtype") and np.ndim(atom.val) == 0 else None
        return self.known.get(atom)

    def is_free(self, atom: Any) -> bool:
        return isinstance(atom, jexc.Literal) or atom in self.free

    def with_bodies(self, eqn: Any) -> Any:
        """Returns an equation that stays, with its bodies folded, and notes what is known of its results."""
        name = eqn.primitive.name
        if name in CALLS and name not in _SPECIAL:
            return self.call(eqn)
        if name in LOOPS or name == "cond":
            params = with_bodies(eqn.params, self.alone)
            return eqn.replace(params=params) if any(params[key] is not value for key, value in eqn.params.items()) else eqn
        if not eqn.effects and name != "random_seed" and all(map(self.is_free, eqn.invars)):
            self.free.update(eqn.outvars)
        if len(eqn.outvars) != 1:
            return eqn
        if name in _COMPUTED or name in _HANDED_ON:
            value = self.computed(eqn)
        elif name == "iota":
            value = 0 if eqn.params["shape"][eqn.params["dimension"]] == 1 else None
        elif name == "concatenate":
            values = {self.value(atom) for atom in eqn.invars}
            value = values.pop() if len(values) == 1 else None
        else:
            value = self.value(eqn.invars[2]) if self.overwrites(eqn) else None
        if value is not None:
            self.known[eqn.outvars[0]] = np.asarray(value).astype(eqn.outvars[0].aval.dtype)[()]
        return eqn

    def overwrites(self, eqn: Any) -> bool:
        """Returns whether an equation is a scatter whose one update, at known indices, takes the place of the whole operand."""
        if eqn.primitive.name != "scatter":
            return False
        operand, indices, updates = eqn.invars
        numbers, place = eqn.params["dimension_numbers"], self.value(indices)
        has_one = math.prod(indices.aval.shape[:-1]) == 1 and not numbers.operand_batching_dims
        return has_one and place is not None and int(place) == 0 and math.prod(updates.aval.shape) == math.prod(operand.aval.shape)

    def overwritten(self, eqn: Any) -> tuple[list[Any], list[Any]] | None:
        """Returns the equations that stand for a scatter which overwrites all, and their result; None for any other."""
        if self.is_free(eqn.invars[0]) or not self.overwrites(eqn):
            return None
        (var,), updates = eqn.outvars, eqn.invars[2]
        if updates.aval.shape == var.aval.shape:
            return [], [updates]
        eqns, atoms = written(lambda made: jnp.reshape(made, var.aval.shape), [updates], eqn.source_info)
        self.note(atoms, [self.value(updates)])
        return eqns, atoms

    def alone(self, body: Any) -> Any:
        """Returns a body, open or closed, of which no input is known."""
        jaxpr = opened(body)
        made, _ = self.body(jaxpr, {})
        return body if made is jaxpr else jexc.ClosedJaxpr(made, body.consts) if hasattr(body, "consts") else made

    def call(self, eqn: Any) -> Any:
        """Returns a call whose body knows what its operands are."""
        key = body_parameter(eqn.primitive.name, eqn.params)
        body = eqn.params[key]
        jaxpr = opened(body)
        made, results = self.body(jaxpr, dict(zip(jaxpr.invars, map(self.value, eqn.invars), strict=True)))
        self.note(eqn.outvars, results)
        if made is jaxpr:
            return eqn
        return eqn.replace(params={**eqn.params, key: jexc.ClosedJaxpr(made, body.consts) if hasattr(body, "consts") else made})

    def computed(self, eqn: Any) -> Any:
        """Returns the number that all elements of an equation's result are, or None if it is not known."""
        values, (var,) = [self.value(atom) for atom in eqn.invars], eqn.outvars
        if not values or any(value is None for value in values) or 0 in eqn.invars[0].aval.shape:
            return None
        if jnp.issubdtype(var.aval.dtype, jnp.integer) and jnp.issubdtype(eqn.invars[-1].aval.dtype, jnp.inexact):
            return None
        with np.errstate(all="ignore"):
            compute = _COMPUTED.get(eqn.primitive.name)
            made = values[0] if compute is None else compute(*values)
            return np.asarray(made).astype(var.aval.dtype)[()]

    def equation(self, eqn: Any) -> tuple[list[Any], list[Any]] | None:
        """Returns the equations that stand for one which drops an operand, and the atoms of its results; None for any other."""
        name = eqn.primitive.name
        if name == "cond":
            return self.branch(eqn)
        if name == "scan":
            return self.unread(eqn)
        if name == "scatter":
            return self.overwritten(eqn)
        if name in _SAME:
            kept = _SAME[name](eqn)
            return None if kept is None or all(map(self.is_free, eqn.invars)) else ([], kept)
        if name not in _FOLDS or len(eqn.outvars) != 1 or all(map(self.is_free, eqn.invars)):
            return None
        (var,) = eqn.outvars
        if name == "select_n":
            return self.choice(eqn)
        number = _FOLDS[name](self, eqn)
        if number is None:
            return None
        eqns, atom = self.filled(var.aval, number, eqn.source_info)
        return eqns, [atom]

    def filled(self, aval: Any, number: Any, source_info: Any) -> tuple[list[Any], Any]:
        """Returns the equations that fill a tensor with a number, and its atom."""
        number = np.asarray(number).astype(aval.dtype)[()]
        eqns, (atom,) = written(lambda: jnp.full(aval.shape, number, aval.dtype), [], source_info)
        self.note([atom], [number])
        return eqns, atom

    def unread(self, eqn: Any) -> tuple[list[Any], list[Any]] | None:
        """Returns a loop that starts with zeros where its first iteration reads no start."""
        num_constants, num_carried = scan_counts(eqn.params)
        places = [place for place in range(num_constants, num_constants + num_carried) if not self.is_free(eqn.invars[place])]
        if not places or not eqn.params["length"]:
            return None
        loop = self.with_bodies(eqn)
        body = opened(loop.params["jaxpr"])
        _, reads = Liveness(acts_outside, lambda eqn, needed: None).alive(body, [True] * len(body.outvars))
        unread = [place for place in places if not reads[place] and not jnp.issubdtype(eqn.invars[place].aval.dtype, extended)]
        if not unread:
            return None
        invars, eqns = list(eqn.invars), []
        for place in unread:
            made, invars[place] = self.filled(invars[place].aval, 0, eqn.source_info)
            eqns += made
        return [*eqns, loop.replace(invars=invars)], list(eqn.outvars)

    def choice(self, eqn: Any) -> tuple[list[Any], list[Any]] | None:
        which, cases = self.value(eqn.invars[0]), eqn.invars[1:]
        if which is None or all(self.is_free(case) for place, case in enumerate(cases) if place != int(which)):
            return None
        return [], [cases[int(which)]]

    def branch(self, eqn: Any) -> tuple[list[Any], list[Any]] | None:
        """Returns the equations of the branch that a conditional with a known index takes."""
        which, branches, operands = self.value(eqn.invars[0]), eqn.params["branches"], eqn.invars[1:]
        if which is None or any(branch.consts for branch in branches):
            return None
        taken = branches[min(max(int(which), 0), len(branches) - 1)].jaxpr
        taken, results = self.body(taken, dict(zip(taken.invars, map(self.value, operands), strict=True)))
        names = dict(zip(taken.invars, operands, strict=True))
        eqns = []
        for own in taken.eqns:
            fresh = [jexc.Var(var.aval) for var in own.outvars]
            eqns.append(own.replace(invars=[renamed(atom, names) for atom in own.invars], outvars=fresh))
            names.update(zip(own.outvars, fresh, strict=True))
        atoms = [renamed(atom, names) for atom in taken.outvars]
        self.note(atoms, results)
        return eqns, atoms

    def note(self, atoms: Sequence[Any], numbers: Sequence[Any]) -> None:
        """Remembers which variables have one known number."""
        found = {
            atom: number for atom, number in zip(atoms, numbers, strict=True) if number is not None and not isinstance(atom, jexc.Literal)
        }
        self.known.update(found)
        self.free.update(found)

    def is_same(self, first: Any, second: Any, depth: int = 4) -> bool:
        """Returns whether two atoms are sure to be equal: one variable, or made alike of the same variables."""
        if isinstance(first, jexc.Literal) or isinstance(second, jexc.Literal):
            number = self.value(first)
            return number is not None and first.aval == second.aval and bool(number == self.value(second))
        if first is second:
            return True
        one, other = self.makers.get(first), self.makers.get(second)
        if one is None or other is None or not depth or one.primitive is not other.primitive or not _are_equal(one.params, other.params):
            return False
        pairs = zip(one.invars, other.invars, strict=False)
        return len(one.invars) == len(other.invars) and all(self.is_same(*pair, depth - 1) for pair in pairs)


def _single_number(constant: Any) -> Any:
    """Returns the number of a constant of one element, or None for any other."""
    if np.size(constant) != 1 or jnp.issubdtype(jnp.result_type(constant), extended) or not getattr(constant, "is_fully_addressable", True):
        return None
    return np.asarray(constant).reshape(())[()]


def _are_equal(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except (TypeError, ValueError):
        return False  # arrays among parameters have no single truth


def _is_exact(eqn: Any) -> bool:
    """Returns whether an equation computes integers or booleans."""
    dtype = eqn.invars[0].aval.dtype
    return bool(jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_))


def _of_single(eqn: Any) -> Any:
    """Returns the number of an index among single elements."""
    shape = eqn.invars[0].aval.shape
    return 0 if all(shape[axis] == 1 for axis in eqn.params["axes"]) else None


def _sorted(eqn: Any) -> list[Any] | None:
    """Returns the operands of a sort of single elements."""
    return list(eqn.invars) if eqn.invars[0].aval.shape[eqn.params["dimension"]] == 1 else None


def _sliced(eqn: Any) -> list[Any] | None:
    """Returns the operand of a slice of everything; a start beyond the operand is moved back into it."""
    return [eqn.invars[0]] if eqn.outvars[0].aval.shape == eqn.invars[0].aval.shape else None


def _updated(eqn: Any) -> list[Any] | None:
    """Returns what an update of everything writes."""
    return [eqn.invars[1]] if eqn.outvars[0].aval.shape == eqn.invars[1].aval.shape else None


_SAME: Mapping[str, Callable[[Any], list[Any] | None]] = {"sort": _sorted, "dynamic_slice": _sliced, "dynamic_update_slice": _updated}
"""For equations whose results may be some of their operands: these operands, or None."""


def _of_equals(number: int) -> Callable[[_Folding, Any], Any]:
    return lambda folding, eqn: number if _is_exact(eqn) and folding.is_same(*eqn.invars) else None


def _of_one(wanted: Callable[[Any], int]) -> Callable[[_Folding, Any], Any]:
    """Returns the fold of an equation that is the number `wanted` of its type wherever one operand is that number."""

    def fold(folding: _Folding, eqn: Any) -> Any:
        number = np.asarray(wanted(eqn)).astype(eqn.outvars[0].aval.dtype)[()]
        return number if _is_exact(eqn) and any(folding.value(atom) == number for atom in eqn.invars) else None

    return fold


def _all_bits(eqn: Any) -> int:
    return -1


def _zero(eqn: Any) -> int:
    return 0


_FOLDS: Mapping[str, Callable[[_Folding, Any], Any]] = {
    "select_n": lambda folding, eqn: None,
    "xor": _of_equals(0),
    "sub": _of_equals(0),
    **{name: _of_equals(int(compare(1, 1))) for name, compare in _COMPARED.items()},
    "and": _of_one(_zero),
    "mul": _of_one(_zero),
    "or": _of_one(_all_bits),
    "integer_pow": lambda folding, eqn: 1 if eqn.params["y"] == 0 else None,
    **dict.fromkeys(("argmax", "argmin"), lambda folding, eqn: _of_single(eqn)),
}
"""For equations that may drop operands: the number that all elements of the result are, or None. Choices have a fold of their own."""
