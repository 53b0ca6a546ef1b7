"""Writes the sums of loops that stay unreduced into a program: their terms, the way to the total, and the total's one reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jexc

from spmdctx.ir.analysis.loop_sums import reduced_dtype
from spmdctx.ir.graph import LITERAL, Op
from spmdctx.ir.primitives import ADDITIONS, Boundary
from spmdctx.ir.projection import partial_axes, project
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.lowering.rewrite.block import Block, Constraints
from spmdctx.lowering.rewrite.partial_terms import (
    Term,
    added,
    complete,
    linear,
    of_type,
    partial_term,
    turned_dims,
    unstacked,
    whole_term,
)
from spmdctx.lowering.rewrite.values import ShardedProgram, Values

Take = Callable[[Block, Op, int, Any], Any]
"""Returns the operand of an op, at a position, as the op takes it; recomputes no slice of it."""


class LoopSums:
    """Writes the values that hold on to partial sums; each has a leading dimension, split over the axes of its sum."""

    def __init__(self, sharded: ShardedProgram, values: Values, constraints: Constraints, take: Take) -> None:
        self._values, self._constraints, self._take = values, constraints, take
        self._directives, self._mesh, self._sums = sharded.directives, sharded.jax_mesh, sharded.directives.loop_sums
        self._graph, self._stored, self._ops = sharded.program.graph, sharded.assignment.values, sharded.assignment.ops
        self._terms = frozenset(term for total in self._sums.totals.values() for term in total.terms)
        accumulated = (self._sums.totals[one.after].terms for one in self._graph.accumulators if one.after in self._sums.totals)
        self._accumulated = frozenset(term for terms in accumulated for term in terms)
        # Products that are written transposed already, as the op that reads them would make them.
        self._turned: set[int] = set()

    def concerns(self, op: Op) -> bool:
        """Returns whether an op makes a value that holds on to partial sums, or the total."""
        return bool(op.results) and (self._values[op.results[0]].is_partial or op.results[0] in self._sums.totals)

    def axes_of(self, value: int) -> AxisNames:
        """Returns the axes over which a value, or the terms of a total, are partial."""
        return self._sums.totals[value].axes if value in self._sums.totals else self._sums.axes[value]

    def is_whole(self, op: Op) -> bool:
        """Returns whether a term is partial over none of its sum's axes; it is then reduced where it is made, and one device adds it."""
        value = op.results[0]
        partial = partial_axes(op.rule, self._ops[op.id].axes)
        return value in self._terms and set(self._sums.axes[value]).isdisjoint(partial)

    def equation(self, block: Block, op: Op, eqn: Any, operands: Sequence[Any]) -> Any:
        """Writes an op that makes a value that holds on to partial sums."""
        value, axes = op.results[0], self._sums.axes[op.results[0]]
        if value in self._terms:
            # If operands were recomputed as slices, XLA would gather the whole value from these slices.
            taken = [self._take(block, op, position, atom) for position, atom in enumerate(operands)]
            turn = self._turn(op, eqn)
            term = Term(op.rule, self._ops[op.id].axes, axes, self._values[value].is_widened, is_turned=bool(turn))
            made = partial_term(eqn, taken, term, self._mesh)
            if turn:
                self._turned.add(value)
                return block.constrain(block.write(made), (axes, *(self._stored[value][place] for place in turn)))
        elif op.primitive == "transpose" and op.operands[0] in self._turned:
            made = [], operands[0]
        elif op.primitive in ADDITIONS:
            shape = self._graph.values[value].shape
            first, second = (self._taken(block, op, place, atom, axes, shape, eqn.source_info) for place, atom in enumerate(operands))
            made = added(first, second, eqn.source_info)
        else:
            place = next(index for index, operand in enumerate(op.operands) if operand != LITERAL)
            shape = self._graph.values[op.operands[place]].shape
            made = linear(eqn, self._taken(block, op, place, operands[place], axes, shape, eqn.source_info), place)
        return self._settled(block, op, block.write(made))

    def _turn(self, op: Op, eqn: Any) -> Sequence[int]:
        """Returns the permutation by which the reader of a term transposes it, if the term is a product that can be made so; else nothing.

        Accumulators are operands of a program: the compiler would copy each into the layout of the product, and back.
        """
        value, (reader, *_) = op.results[0], self._graph.readers[op.results[0]] or (None,)
        if value not in self._accumulated or reader is None or reader.primitive != "transpose" or eqn.primitive.name != "dot_general":
            return ()
        before, after = reader.rule.operands[0], reader.rule.results[0]
        turn = [before.index(dim) for dim in after]
        axes, stored = self._ops[op.id].axes, self._stored[value]
        is_kept = project(op.rule.results[0], axes) == stored == project(before, self._ops[reader.id].axes)
        return turn if is_kept and turn == turned_dims(eqn) else ()

    def added_by_one(self, block: Block, op: Op, var: Any, source_info: Any) -> Any:
        """Returns a whole term as a partial one that only the first device adds."""
        value = op.results[0]
        axes, shape = self._sums.axes[value], self._graph.values[value].shape
        lifted = block.write(whole_term(var, shape, axes, self._mesh, source_info))
        return block.constrain(lifted, (axes, *self._stored[value]))

    def handed_on(self, block: Block, op: Op, atom: Any, source_info: Any) -> Any:
        """Writes an op that changes nothing, or the end of a loop's iteration; the loop's carry has the total's type."""
        value, shape = op.results[0], self._graph.values[op.operands[0]].shape
        var = self._taken(block, op, 0, atom, self.axes_of(value), shape, source_info)
        if op.boundary is not Boundary.NEXT:
            return var if op.boundary is Boundary.EXIT else self._settled(block, op, var)
        var = block.write(of_type(var, self._graph.values[value].dtype, source_info))
        return self._settled(block, op, var)

    def started(self, block: Block, op: Op, atom: Any, source_info: Any) -> Any:
        """Writes the value that a loop's first iteration adds to."""
        value = op.results[0]
        axes, shape = self._sums.axes[value], self._graph.values[value].shape
        return self._settled(block, op, self._taken(block, op, 0, atom, axes, shape, source_info))

    def left(self, block: Block, op: Op, var: Any, source_info: Any) -> Any:
        """Writes the result of a loop: a total, or a part of one that a loop around it adds up."""
        value = op.results[0]
        if op.boundary is Boundary.EXIT:
            var = self._settled(block, op, block.write(unstacked(var, source_info)))
        if value not in self._sums.totals:
            return var
        own = self._graph.values[value].dtype
        asked = reduced_dtype(self._graph, value, self._sums.totals[value].terms, self._directives.widened)
        eqns, result = complete(block.write(of_type(var, asked, source_info)), source_info)
        block.write((eqns, result))
        reduced = block.constrain(result, self._stored[value])
        block.note_total(value, eqns[-1], reduced)
        return block.write(of_type(reduced, own, source_info))

    def _taken(self, block: Block, op: Op, place: int, atom: Any, axes: AxisNames, shape: Sequence[int], source_info: Any) -> Any:
        """Returns an operand as its op takes it; one device adds an operand that is not partial."""
        value, wanted = op.operands[place], project(op.rule.operands[place], self._ops[op.id].axes)
        if value != LITERAL and self._values[value].is_partial:
            return self._moved(block, atom, value, axes, self._stored[value], wanted)
        if value != LITERAL and not isinstance(atom, jexc.Literal):
            atom = self._take(block, op, place, atom)
        var = block.write(whole_term(atom, shape, axes, self._mesh, source_info))
        return block.constrain(var, (axes, *(wanted if value != LITERAL else ((),) * len(shape))))

    def _settled(self, block: Block, op: Op, var: Any) -> Any:
        """Returns a result in its stored sharding."""
        value = op.results[0]
        axes, natural = self.axes_of(value), project(op.rule.results[0], self._ops[op.id].axes)
        return self._moved(block, block.constrain(var, (axes, *natural)), value, axes, natural, self._stored[value])

    def _moved(self, block: Block, var: Any, value: int, axes: AxisNames, source: TensorSharding, target: TensorSharding) -> Any:
        for sharding in self._constraints.steps(value, source, target):
            var = block.constrain(var, (axes, *sharding))
        return var
