"""Runs a step so that every operation rounds otherwise than it did: its results show how far rounding alone can move them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from spmdctx._compat import scan_counts
from spmdctx.rules.control_flow import CALLS, bodies_of, call_body, call_operands, opened
from spmdctx.step.verify.noise.callbacks import Answers, only_reports
from spmdctx.step.verify.noise.primitives import ADDING, PRODUCTS, SUMMING, amplification, is_exact, is_float, widens
from spmdctx.step.verify.noise.rounding import Noise

_MOST_BLOCKS = 8
"""Partial sums into which a sum is cut, as a mesh would cut it."""


class _Value(NamedTuple):
    """A value of the run.

    `known` means that it follows from whole numbers, keys and scalars alone, which every device computes alike; `moved` that
    it was moved already.
    """

    array: Any
    known: bool = False
    moved: bool = False


def noisy_program(jaxpr: jexc.ClosedJaxpr, answers: Answers) -> Callable[..., Sequence[Any]]:
    """Returns a function of a Noise and the step's flat arguments, whose results are one sample of the step's.

    Args:
        jaxpr: the step.
        answers: gives what the host has answered to the step's calls with effects.
    """

    def run(noise: Noise, *leaves: Any) -> list[Any]:
        given = [_Value(leaf, known=not is_float(leaf) or not jnp.ndim(leaf)) for leaf in leaves]
        return _arrays(_Interpreter(noise, answers).run(jaxpr.jaxpr, jaxpr.consts, given))

    return run


def largest_array(jaxpr: Any) -> int:
    """Returns the number of elements of the largest array in a program, or in a program inside."""
    sizes = [math.prod(getattr(var.aval, "shape", ())) for eqn in jaxpr.eqns for var in (*eqn.invars, *eqn.outvars)]
    for eqn in jaxpr.eqns:
        sizes += [largest_array(opened(program)) for program in bodies_of(eqn.params)]
    return max(sizes, default=0)


def _arrays(values: Sequence[_Value]) -> list[Any]:
    return [value.array for value in values]


class _Interpreter:
    """Evaluates a program, moving the result of each equation that rounds, and the terms of each that sums."""

    def __init__(self, noise: Noise, answers: Answers) -> None:
        self._noise, self._answers = noise, answers
        self._sites = itertools.count(1)

    def run(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[_Value]) -> list[_Value]:
        """Returns the results of an open jaxpr."""
        known = dict(zip(jaxpr.constvars, [_Value(const, known=not jnp.ndim(const)) for const in consts], strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val, known=True) if isinstance(atom, jexc.Literal) else known[atom]

        waiting = _read_by_products_only(jaxpr)
        for eqn in jaxpr.eqns:
            if not only_reports(eqn):
                with eqn.ctx.manager:
                    results = self._equation(eqn, [read(atom) for atom in eqn.invars], waits=waiting.issuperset(eqn.outvars))
                known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[_Value], *, waits: bool) -> list[_Value]:
        name = eqn.primitive.name
        if name in _WALKED:
            return _WALKED[name](self, eqn, operands)
        if name == "shard_map":
            return self._manual(eqn, operands)
        if name in CALLS:
            body = call_body(name, eqn.params)
            jaxpr, consts = (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())
            return self.run(jaxpr, consts, [operands[index] for index in call_operands(name, eqn.params, len(operands))])
        if waits and name in PRODUCTS:
            return [_Value(result, all(operand.known for operand in operands)) for result in self._bound(eqn, _arrays(operands))]
        known = all(operand.known for operand in operands)
        if name in ADDING and all(operand.moved or operand.known for operand in operands) and not known:
            # The terms have moved by more than their sum is rounded.
            return [_Value(result, moved=is_float(result)) for result in self._bound(eqn, _arrays(operands))]
        # Any other program, such as a kernel, is not entered.
        has_floats = any(map(is_float, _types(eqn.outvars)))
        is_sum = has_floats and (name in SUMMING or bool(bodies_of(eqn.params)))
        if not is_sum and (known or is_exact(eqn) or not has_floats):
            was_moved = any(operand.moved for operand in operands)
            return [_Value(result, known, was_moved and is_float(result)) for result in self._bound(eqn, _arrays(operands))]
        results = self._sum(eqn, operands) if is_sum else self._bound(eqn, _arrays(operands))
        return [_Value(self._moved(result), moved=True) if is_float(result) else _Value(result) for result in results]

    def _moved(self, values: Any, times: float = 1.0) -> Any:
        return self._noise.moved(values, next(self._sites), times)

    def _bound(self, eqn: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
        if eqn.primitive.name == "io_callback":
            changed["callback"] = self._answers.repeating(eqn.params["callback"])
        results = eqn.primitive.bind(*operands, **{**eqn.params, **changed})
        return list(results) if eqn.primitive.multiple_results else [results]

    def _sum(self, eqn: Any, operands: Sequence[_Value]) -> list[Any]:
        """Adds up other terms, in other blocks, those of low precision in float32."""
        widened, times = widens(eqn), amplification(eqn)
        arrays = []
        for operand in operands:
            array = operand.array
            if is_float(array):
                array = array.astype(jnp.float32) if widened else array
                array = array if operand.moved and times == 1.0 else self._moved(jnp.asarray(array), times)
            arrays.append(array)
        changed = {"preferred_element_type": jnp.float32} if widened and "preferred_element_type" in eqn.params else {}
        results = self._in_blocks(eqn, arrays[0]) if eqn.primitive.name == "reduce_sum" else self._bound(eqn, arrays, **changed)
        return [result.astype(var.aval.dtype) for result, var in zip(results, eqn.outvars, strict=True)] if widened else results

    def _in_blocks(self, eqn: Any, terms: Any) -> list[Any]:
        axes, shape = eqn.params["axes"], terms.shape
        axis = max(axes, key=lambda axis: shape[axis], default=None)
        blocks = 1 if axis is None else next(count for count in range(_MOST_BLOCKS, 0, -1) if shape[axis] % count == 0)
        if axis is None or blocks == 1 or shape[axis] <= blocks:
            return self._bound(eqn, [terms])
        cut = terms.reshape(*shape[:axis], blocks, shape[axis] // blocks, *shape[axis + 1 :])
        inner = tuple(other if other < axis else other + 1 for other in axes)
        kept = sum(other not in axes for other in range(axis))
        return [jax.lax.reduce_sum(self._moved(jax.lax.reduce_sum(cut, inner)), (kept,))]

    def _manual(self, eqn: Any, operands: Sequence[_Value]) -> list[_Value]:
        """Runs a shard_map whose body moves its values, in the same directions on every device."""
        params = eqn.params
        names, body, everywhere = params["newly_manual_axes"], params["jaxpr"], jax.P()

        def local(noise: Noise, *arrays: Any) -> list[Any]:
            inside = _Interpreter(noise, self._answers)
            given = [_Value(array, operand.known) for array, operand in zip(arrays, operands, strict=True)]
            return _arrays(inside.run(body, (), given))

        mapped = jax.shard_map(
            local,
            mesh=params["mesh"],
            in_specs=(everywhere, *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=names,
            check_vma=params["check_vma"],
        )
        return [_Value(array) for array in mapped(self._noise.at(next(self._sites)), *_arrays(operands))]

    def inside(self, number: Any) -> _Interpreter:
        """Returns an interpreter of a body, in the iteration `number`."""
        return _Interpreter(self._noise.at(number), self._answers)

    def of_bodies(self) -> _Interpreter:
        """Returns an interpreter with noise of its own, for the next equation with bodies."""
        return self.inside(next(self._sites))


def _read_by_products_only(jaxpr: Any) -> set[Any]:
    """Returns variables whose rounding errors show in products as much as they would if the variables were moved."""
    products = {atom for eqn in jaxpr.eqns if eqn.primitive.name in PRODUCTS for atom in eqn.invars if not isinstance(atom, jexc.Literal)}
    others = {atom for eqn in jaxpr.eqns if eqn.primitive.name not in PRODUCTS for atom in eqn.invars if not isinstance(atom, jexc.Literal)}
    return products - others - {atom for atom in jaxpr.outvars if not isinstance(atom, jexc.Literal)}


def _types(variables: Sequence[Any]) -> list[Any]:
    return [var.aval for var in variables]


def _entering(operands: Sequence[_Value]) -> list[_Value]:
    """Returns what a loop carries as its body sees it: whole numbers are counters."""
    return [_Value(operand.array, known=not is_float(operand.array)) for operand in operands]


def _scan(outer: _Interpreter, eqn: Any, operands: list[_Value]) -> list[_Value]:
    interpreter, params = outer.of_bodies(), eqn.params
    num_consts, num_carry = scan_counts(params)
    consts, carried, scanned = operands[:num_consts], operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    body = params["jaxpr"]

    def iteration(state: Any, slices: Any) -> Any:
        number, carry = state
        given = [*consts, *_entering([_Value(array) for array in carry])]
        given += [_Value(array, operand.known) for array, operand in zip(slices, scanned, strict=True)]
        results = _arrays(interpreter.inside(number).run(body.jaxpr, body.consts, given))
        return (number + jnp.uint32(1), _as_carried(results[:num_carry], carry)), results[num_carry:]

    (_, carry), stacked = jax.lax.scan(
        iteration,
        (jnp.uint32(0), _as_arrays(carried)),
        _arrays(scanned),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [_Value(array) for array in (*carry, *stacked)]


def _while(outer: _Interpreter, eqn: Any, operands: list[_Value]) -> list[_Value]:
    interpreter, params = outer.of_bodies(), eqn.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    for_cond, for_body, carried = operands[:num_cond], operands[num_cond : num_cond + num_body], operands[num_cond + num_body :]

    def goes_on(state: Any) -> Any:
        return jexc.jaxpr_as_fun(cond)(*_arrays(for_cond), *state[1])[0]

    def iteration(state: Any) -> Any:
        number, carry = state
        given = [*for_body, *_entering([_Value(array) for array in carry])]
        results = _arrays(interpreter.inside(number).run(body.jaxpr, body.consts, given))
        return number + jnp.uint32(1), _as_carried(results, carry)

    _, carry = jax.lax.while_loop(goes_on, iteration, (jnp.uint32(0), _as_arrays(carried)))
    return [_Value(array) for array in carry]


def _as_arrays(values: Sequence[_Value]) -> list[Any]:
    return [jnp.asarray(value.array) for value in values]


def _as_carried(results: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    """Returns results of the carry's types: a literal has a type of its own."""
    return [result if _is_key(result) else jnp.asarray(result, before.dtype) for result, before in zip(results, carry, strict=True)]


def _is_key(value: Any) -> bool:
    """Returns whether a value holds keys of random numbers."""
    return jnp.issubdtype(getattr(value, "dtype", jnp.int32), jax.dtypes.prng_key)


def _cond(outer: _Interpreter, eqn: Any, operands: list[_Value]) -> list[_Value]:
    interpreter = outer.of_bodies()
    index, *others = operands

    def branch(body: Any) -> Callable[..., list[Any]]:
        def run(*arrays: Any) -> list[Any]:
            given = [_Value(array, operand.known, operand.moved) for array, operand in zip(arrays, others, strict=True)]
            return _as_carried(_arrays(interpreter.run(body.jaxpr, body.consts, given)), _types(eqn.outvars))

        return run

    branches = [branch(body) for body in eqn.params["branches"]]
    return [_Value(array) for array in jax.lax.switch(jnp.int32(index.array), branches, *_arrays(others))]


_WALKED: dict[str, Callable[[_Interpreter, Any, list[_Value]], list[_Value]]] = {"scan": _scan, "while": _while, "cond": _cond}
