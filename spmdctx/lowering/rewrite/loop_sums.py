"""Writes the sums of loops that stay unreduced into a program: their terms, the way to the total, and the total's one reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax.extend.core as jexc
from jax.sharding import Mesh

from spmdctx.cost.price.directives import Directives
from spmdctx.ir.analysis.loop_sums import Holds, reduced_dtype
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import ADDITIONS
from spmdctx.ir.projection import partial_axes, project
from spmdctx.ir.sharding import Assignment, AxisNames, TensorSharding
from spmdctx.lowering.rewrite.partial_terms import added, complete, linear, of_type, partial_term, unstacked, whole_term


class _Block(Protocol):
    """The body that is written to."""

    def write(self, made: tuple[list[Any], Any]) -> Any: ...

    def constrain(self, var: Any, sharding: TensorSharding) -> Any: ...

    def note_total(self, value: int, eqn: Any, var: Any) -> None: ...


class _Rewriter(Protocol):
    """What knows the shardings of values."""

    graph: Graph
    assignment: Assignment
    directives: Directives
    jax_mesh: Mesh

    def steps(self, value: int, source: TensorSharding, target: TensorSharding) -> list[TensorSharding]: ...

    def use(self, block: Any, op: Op, position: int, atom: Any, *, recomputes: bool) -> Any: ...


class HeldSums:
    """The values that hold on to partial sums; each has a leading dimension, split over the axes of its sum."""

    def __init__(self, rewriter: _Rewriter, holds: Holds) -> None:
        self._rewriter, self._holds = rewriter, holds
        self._graph, self._stored, self._ops = rewriter.graph, rewriter.assignment.values, rewriter.assignment.ops
        self._terms = frozenset(term for total in holds.totals.values() for term in total.terms)
        self.totals = holds.totals

    def __contains__(self, value: int) -> bool:
        """Whether a value is one of them."""
        return value in self._holds.axes

    def axes_of(self, value: int) -> AxisNames:
        """The axes over which a value, or what a total is made from, is partial."""
        return self.totals[value].axes if value in self.totals else self._holds.axes[value]

    def is_whole(self, op: Op) -> bool:
        """Whether a term is partial over none of the axes that its sum is: it is reduced where it is made, and added by one device."""
        value = op.results[0]
        partial = partial_axes(op.rule, self._ops[op.id].axes)
        return value in self._terms and set(self._holds.axes[value]).isdisjoint(partial)

    def equation(self, block: _Block, op: Op, eqn: Any, operands: Sequence[Any]) -> Any:
        """Writes an op that makes such a value."""
        value, axes = op.results[0], self._holds.axes[op.results[0]]
        if value in self._terms:
            shardings = [project(dims, self._ops[op.id].axes) for dims in op.rule.operands]
            # Beside a slice that is computed again XLA would gather the whole from such slices.
            taken = [self._rewriter.use(block, op, position, atom, recomputes=False) for position, atom in enumerate(operands)]
            is_wide = value in self._rewriter.directives.widened
            partial = partial_axes(op.rule, self._ops[op.id].axes)
            alike = tuple(name for name in axes if name not in partial)
            made = partial_term(eqn, taken, shardings, axes, alike, self._rewriter.jax_mesh, is_wide=is_wide)
        elif op.primitive in ADDITIONS:
            shape = self._graph.values[value].shape
            first, second = (self._taken(block, op, place, atom, axes, shape, eqn.source_info) for place, atom in enumerate(operands))
            made = added(first, second, eqn.source_info)
        else:
            place = next(index for index, operand in enumerate(op.operands) if operand != LITERAL)
            shape = self._graph.values[op.operands[place]].shape
            made = linear(eqn, self._taken(block, op, place, operands[place], axes, shape, eqn.source_info), place)
        return self._settled(block, op, block.write(made))

    def added_by_one(self, block: _Block, op: Op, var: Any, source_info: Any) -> Any:
        """A whole term as one of the first device alone."""
        value = op.results[0]
        axes, shape = self._holds.axes[value], self._graph.values[value].shape
        lifted = block.write(whole_term(var, shape, axes, self._rewriter.jax_mesh, source_info))
        return block.constrain(lifted, (axes, *self._stored[value]))

    def handed_on(self, block: _Block, op: Op, atom: Any, source_info: Any) -> Any:
        """What an op that changes nothing, or the end of a loop's turn, makes of its operand; the loop's carry has the total's type."""
        value, shape = op.results[0], self._graph.values[op.operands[0]].shape
        var = self._taken(block, op, 0, atom, self.axes_of(value), shape, source_info)
        if op.primitive != "scan.next":
            return var if op.primitive == "scan.exit" else self._settled(block, op, var)
        var = block.write(of_type(var, self._graph.values[value].dtype, source_info))
        return self._settled(block, op, var)

    def started(self, block: _Block, op: Op, atom: Any, source_info: Any) -> Any:
        """What a loop's first turn adds to."""
        value = op.results[0]
        axes, shape = self._holds.axes[value], self._graph.values[value].shape
        return self._settled(block, op, self._taken(block, op, 0, atom, axes, shape, source_info))

    def left(self, block: _Block, op: Op, var: Any, source_info: Any) -> Any:
        """What a loop leaves: a total, or a part of one that a loop around it adds up."""
        value = op.results[0]
        if op.primitive == "scan.exit":
            var = self._settled(block, op, block.write(unstacked(var, source_info)))
        if value not in self.totals:
            return var
        own = self._graph.values[value].dtype
        asked = reduced_dtype(self._graph, value, self.totals[value].terms, self._rewriter.directives.widened)
        eqns, result = complete(block.write(of_type(var, asked, source_info)), source_info)
        block.write((eqns, result))
        reduced = block.constrain(result, self._stored[value])
        block.note_total(value, eqns[-1], reduced)
        return block.write(of_type(reduced, own, source_info))

    def _taken(self, block: _Block, op: Op, place: int, atom: Any, axes: AxisNames, shape: Sequence[int], source_info: Any) -> Any:
        """An operand as its op takes it; where it is no such value, one device adds it."""
        value, wanted = op.operands[place], project(op.rule.operands[place], self._ops[op.id].axes)
        if value in self:
            return self._moved(block, atom, value, axes, self._stored[value], wanted)
        if value != LITERAL and not isinstance(atom, jexc.Literal):
            atom = self._rewriter.use(block, op, place, atom, recomputes=False)
        var = block.write(whole_term(atom, shape, axes, self._rewriter.jax_mesh, source_info))
        return block.constrain(var, (axes, *(wanted if value != LITERAL else ((),) * len(shape))))

    def _settled(self, block: _Block, op: Op, var: Any) -> Any:
        """A result in its stored sharding."""
        value = op.results[0]
        axes, natural = self.axes_of(value), project(op.rule.results[0], self._ops[op.id].axes)
        return self._moved(block, block.constrain(var, (axes, *natural)), value, axes, natural, self._stored[value])

    def _moved(self, block: _Block, var: Any, value: int, axes: AxisNames, source: TensorSharding, target: TensorSharding) -> Any:
        for sharding in self._rewriter.steps(value, source, target):
            var = block.constrain(var, (axes, *sharding))
        return var
