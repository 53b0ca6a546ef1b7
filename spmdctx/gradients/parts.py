"""Parts of a micro-batch that run side by side: their equations take turns, so that one part computes while another one communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from spmdctx.errors import SpmdctxError, StrategyError
from spmdctx.gradients.keys import fold
from spmdctx.gradients.loss import LossCall, Traced
from spmdctx.gradients.operands import Operand, SeenCall
from spmdctx.gradients.options import GradientOptions
from spmdctx.gradients.reduce import is_low_precision
from spmdctx.gradients.results import Fate, Row, piece_shape, rows_of
from spmdctx.trace.build.jaxprs.equations import struct_of

_MOST_LISTED, _LONGEST_REASON = 4, 200
_SUMMED = (Fate.REDUCED, Fate.AVERAGED, Fate.OWN)


def side_by_side(
    call: LossCall, traced: Traced, operands: Sequence[Operand], rows: Mapping[str, Row], avals: Sequence[Any], count: int
) -> Traced:
    """Returns a program over a whole micro-batch that runs the program of a part once for each part.

    Part j of n holds the elements j, j+n, ... of every batch dimension. Gradients, losses and floating scalars are means over the parts,
    what grows with the batch is joined, and state passes from part to part. Keys that are arguments are folded with j.

    Args:
        call: the call.
        traced: its program over one part, with or without gradients.
        operands: how each leaf enters the loss.
        rows: how each result is joined, by its path.
        avals: the types of the leaves of the micro-batch.
        count: n.
    """
    parts = _Parts(call, traced, operands, [rows[made.path] for made in traced.results], count)
    return Traced(jax.make_jaxpr(parts.run)(*map(struct_of, avals)), traced.results)


def traced_in_parts(
    seen: SeenCall, call: LossCall, trace: Callable[[Sequence[Any]], Traced], operands: Sequence[Operand], options: GradientOptions
) -> tuple[Traced, list[Row]]:
    """Traces a loss for one replica and one micro-batch, in parts if the call asks for them; returns a row for each result, too.

    Args:
        seen: the call as the first trace saw it.
        call: the call.
        trace: traces it for leaves of given types.
        operands: how each leaf enters the loss.
        options: of the gradients.
    """
    avals = pieces_of(call, operands, options)
    if seen.num_parts == 1:
        traced = traced_for(seen, call, trace, avals)
        return traced, rows_of(seen, call, traced, operands, options)
    smaller = options._replace(micro_batches=options.micro_batches * seen.num_parts)
    traced = traced_for(seen, call, trace, pieces_of(call, operands, smaller))
    rows = rows_of(seen, call, traced, operands, smaller)
    joined = side_by_side(call, traced, operands, {row.path: row for row in rows}, avals, seen.num_parts)
    # Without replicas and micro-batches nothing reads how results are joined.
    return joined, rows_of(seen, call, joined, operands, options) if options.acts else rows


def traced_for(seen: SeenCall, call: LossCall, trace: Callable[[Sequence[Any]], Traced], avals: Sequence[Any]) -> Traced:
    """Traces a loss for leaves with fewer rows.

    Raises:
        StrategyError: the loss takes the rows of the whole batch only: the first trace took those.
    """
    try:
        return trace(avals)
    except SpmdctxError:
        raise
    except Exception as error:
        pairs = list(zip(call.paths, call.values, avals, strict=True))
        cut = [f"'{path}' {tuple(own.shape)} of {tuple(whole.shape)}" for path, whole, own in pairs if own.shape != whole.shape]
        if not cut:
            raise
        reason = next(filter(None, map(str.strip, str(error).splitlines())), "")
        raise StrategyError(
            f"The loss cannot be traced for the rows of one device or micro-batch: {reason[:_LONGEST_REASON]} ({type(error).__name__})",
            where=seen.where,
            got=", ".join(cut[:_MOST_LISTED]) + (f", and {len(cut) - _MOST_LISTED} more" if len(cut) > _MOST_LISTED else ""),
            need="a loss that takes any number of rows; what is not listed stays whole",
            fix="take sizes from the shapes, as in x.shape[0]; batch_argnames= says which arguments hold the batch",
        ) from error


def pieces_of(call: LossCall, operands: Sequence[Operand], options: GradientOptions) -> list[jax.ShapeDtypeStruct]:
    """Returns the type of each leaf in one replica and one micro-batch."""
    return [
        jax.ShapeDtypeStruct(piece_shape(value.shape, operand, options), value.dtype, weak_type=_is_weak(value))
        for value, operand in zip(call.values, operands, strict=True)
    ]


def _is_weak(value: Any) -> bool:
    return bool(getattr(jax.typeof(value), "weak_type", False))


class _Parts:
    def __init__(self, call: LossCall, traced: Traced, operands: Sequence[Operand], rows: Sequence[Row], count: int) -> None:
        self._body, self._consts = traced.jaxpr.jaxpr, traced.jaxpr.consts
        self._operands, self._rows, self._count = operands, rows, count
        self._folded = {index for index, operand in enumerate(operands) if operand.is_key and not call.is_stateful_key(index)}
        self._carried = {row.carry: self._body.outvars[index] for index, row in enumerate(rows) if row.carry is not None}

    def run(self, *leaves: Any) -> list[Any]:
        """Runs all parts on the leaves of the whole micro-batch."""
        shared: dict[Any, Any] = dict(zip(self._body.constvars, self._consts, strict=True))
        own: list[dict[Any, Any]] = [{} for _ in range(self._count)]
        for index, (var, leaf) in enumerate(zip(self._body.invars, leaves, strict=True)):
            dim = self._operands[index].batch_dim
            if dim is not None:
                for part, value in zip(own, _parted(leaf, dim, self._count), strict=True):
                    part[var] = value
            elif index in self._folded:
                for number, part in enumerate(own):
                    part[var] = fold(leaf, np.uint32(number))
            elif index in self._carried:
                own[0][var] = leaf
            else:
                shared[var] = leaf
        for number, eqn in self._order():
            self._evaluate(eqn, shared, own, number)
        for number in range(1, self._count):
            self._carry(self._body.invars, shared, own, number)
        return [self._joined(index, [self._value(atom, shared, part) for part in own]) for index, atom in enumerate(self._body.outvars)]

    def _order(self) -> Iterator[tuple[int, Any]]:
        """Yields the equations of all parts in turn, each with its part; one that reads state comes after the part before has made it."""
        made = {var: place for place, eqn in enumerate(self._body.eqns) for var in eqn.outvars}
        lag = 0
        for leaf, atom in self._carried.items():
            var = self._body.invars[leaf]
            first = next((place for place, eqn in enumerate(self._body.eqns) if any(one is var for one in eqn.invars)), None)
            if first is not None and not isinstance(atom, jexc.Literal):
                lag = max(lag, made.get(atom, -1) - first + 1)
        size = len(self._body.eqns)
        for turn in range(size + lag * (self._count - 1)):
            for number in range(self._count):
                if 0 <= turn - lag * number < size:
                    yield number, self._body.eqns[turn - lag * number]

    def _evaluate(self, eqn: Any, shared: dict[Any, Any], own: Sequence[dict[Any, Any]], number: int) -> None:
        """Runs an equation of a part; what is the same in all parts runs once."""
        if all(isinstance(atom, jexc.Literal) or atom in shared for atom in eqn.invars) and not eqn.effects:
            target = shared
            if number:
                return
        else:
            target = own[number]
            self._carry(eqn.invars, shared, own, number)
        inputs = list(dict.fromkeys(atom for atom in eqn.invars if not isinstance(atom, jexc.Literal)))
        alone = self._body.replace(
            constvars=[],
            invars=inputs,
            outvars=eqn.outvars,
            eqns=[eqn],
            effects=eqn.effects,
            debug_info=self._body.debug_info._replace(arg_names=None, result_paths=None),
        )
        values = [self._value(atom, shared, own[number]) for atom in inputs]
        target.update(zip(eqn.outvars, jexc.jaxpr_as_fun(jexc.ClosedJaxpr(alone, []))(*values), strict=True))

    def _carry(self, atoms: Sequence[Any], shared: Mapping[Any, Any], own: Sequence[dict[Any, Any]], number: int) -> None:
        """Gives a part the state that the part before has left, as far as it is among some atoms."""
        for leaf, atom in self._carried.items():
            var = self._body.invars[leaf]
            if var not in own[number] and any(one is var for one in atoms):
                value = self._value(atom, shared, own[number - 1])
                own[number][var] = value if value.dtype == var.aval.dtype else value.astype(var.aval.dtype)

    def _value(self, atom: Any, shared: Mapping[Any, Any], own: Mapping[Any, Any]) -> Any:
        if isinstance(atom, jexc.Literal):
            return jnp.asarray(atom.val, atom.aval.dtype)
        return shared[atom] if atom in shared else own[atom]

    def _joined(self, index: int, values: Sequence[Any]) -> Any:
        row, aval = self._rows[index], self._body.outvars[index].aval
        if row.carry is None and row.fate is Fate.STACKED and row.dim is not None:
            stacked = jnp.stack(values, row.dim + 1)
            return stacked.reshape((*stacked.shape[: row.dim], -1, *stacked.shape[row.dim + 2 :]))
        if row.carry is None and row.fate in _SUMMED:
            dtype = jnp.float32 if is_low_precision(aval.dtype) else aval.dtype
            return (sum(value.astype(dtype) for value in values) / len(values)).astype(aval.dtype)
        return values[-1]


def _parted(x: Any, dim: int, count: int) -> list[Any]:
    """Splits an array into parts; no element leaves its device."""
    apart = x.reshape((*x.shape[:dim], x.shape[dim] // count, count, *x.shape[dim + 1 :]))
    return [jax.lax.index_in_dim(apart, number, dim + 1, keepdims=False) for number in range(count)]
