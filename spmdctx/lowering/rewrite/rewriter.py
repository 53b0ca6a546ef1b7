"""Writes an assignment into the jaxpr: sharding constraints at every op where the partitioner could choose otherwise.

The rewriter copies equations with fresh variables, dissolves calls, and rewrites loop and remat bodies too. It meets equations and body
boundaries in the order of `trace.build.control_flow`, and so finds their ops again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np

from spmdctx.ir.graph import LITERAL, Op
from spmdctx.ir.primitives import IDENTITIES
from spmdctx.ir.projection import partial_axes, project
from spmdctx.ir.sharding import TensorSharding
from spmdctx.lowering.rewrite.block import Block, Constraints
from spmdctx.lowering.rewrite.equations import clamped_starts
from spmdctx.lowering.rewrite.local_ops import is_local, local_op
from spmdctx.lowering.rewrite.loop_sums import LoopSums
from spmdctx.lowering.rewrite.precision import PASSED_ON, passed_on, rounds, wide
from spmdctx.lowering.rewrite.values import NO_RECORD, ShardedProgram, Values
from spmdctx.machine.xla.narrowing import sharers
from spmdctx.machine.xla.partitioner.equal_values import WRITTEN_AGAIN
from spmdctx.machine.xla.partitioner.recompute import operand_shardings, refines, slices
from spmdctx.machine.xla.partitioner.repetition import is_repeated
from spmdctx.machine.xla.reductions import reduction_plan
from spmdctx.rules.elementwise import ELEMENTWISE

Substitution = dict[Any, Any]

Body = Callable[["Rewriter", Any, list[Any], Block], list[Any]]
"""Rewrites an equation that holds bodies, on its rewritten operands, into a block; returns the atoms of its results."""


class Rewriter:
    """Writes equations and their bodies into blocks; `bodies` has the functions that rewrite equations with bodies."""

    def __init__(self, sharded: ShardedProgram, bodies: Mapping[str, Body]) -> None:
        program = sharded.program
        self.sharded, self.assignment, self._bodies = sharded, sharded.assignment, bodies
        self._graph, self._scopes, self._sharers = program.graph, program.scopes, sharers(program.graph)
        self._routes = sharded.directives.routes
        self._widens = bool(sharded.directives.widened)
        self._sites = iter(program.op_of_site)
        self._made: dict[int, list[Any]] = {}
        # For values from literals: the op, its equation and operands, and the block that holds them.
        self._from_literals: dict[int, tuple[Op, Any, list[Any], Block]] = {}
        self.values, self.constraints = Values(sharded), Constraints(sharded)
        self.loop_sums = LoopSums(sharded, self.values, self.constraints, partial(self.use, recomputes=False))
        # The variables of values that wait, or that others wait for.
        self.waited_for: dict[int, Any] = {}

    def block(self, outer: Block | None = None) -> Block:
        """Returns a new block, which writes into `outer` where one is given."""
        return Block(self.constraints, self.sharded, self.values, outer)

    def next_op(self) -> Op | None:
        """Returns the op of the next site, or None if it is dead."""
        index = next(self._sites)
        return self._graph.ops[index] if index >= 0 else None

    def use(self, block: Block, op: Op, position: int, atom: Any, *, recomputes: bool = True) -> Any:
        """Returns the operand at `position` in the sharding in which the op takes it; slices may be recomputed."""
        value = op.operands[position]
        if value == LITERAL or isinstance(atom, jexc.Literal):
            return atom
        target = project(op.rule.operands[position], self.assignment.ops[op.id].axes)
        via = self._routes.get((self._scopes[op.id], value)) if self._sharers[op.id] else None
        if via is None or target == self.assignment.values[value]:
            return self._taken(block, value, atom, target, recomputes)
        return block.reshard(self._taken(block, value, atom, via, recomputes), value, via, target)

    def _taken(self, block: Block, value: int, atom: Any, target: TensorSharding, recomputes: bool = True) -> Any:
        stored = self.assignment.values[value]
        record = self.values[value]
        if recomputes and target != stored and value in block.recipes and refines(stored, target):
            made = self._recomputed(block, value, target)
            if made is not None:
                return made
        if target != stored and value in self._from_literals and not refines(stored, target):
            made = self._made_again(block, value, target)
            if made is not None:
                return made
        if record.is_moved or target != stored:
            # All readers take the value from here, or the partitioner would give all of them what one asks for.
            atom = block.constrain(atom, stored)
        return block.reshard(atom, value, stored, target)

    def _recomputed(self, block: Block, value: int, target: TensorSharding) -> Any:
        """Computes a slice of a value from slices of its operands; returns None if they are no slices."""
        known = block.slices.get((value, target))
        if known is not None:
            return known
        op, eqn, atoms = block.recipes[value]
        needed = slices(op, target, self.assignment.values)
        if needed is None:
            return None
        operands = [
            atom if operand == LITERAL or isinstance(atom, jexc.Literal) else self._taken(block, operand, atom, sharding)
            for operand, atom, sharding in zip(op.operands, atoms, needed, strict=True)
        ]
        (var,) = self.emit(eqn, self._spread(block, op, eqn, operands, target), block)
        made = block.slices[value, target] = block.constrain(var, target)
        return made

    def _made_again(self, block: Block, value: int, target: TensorSharding) -> Any:
        """Makes a value from literals in another sharding, since no plan moves such a value; returns None if an op tells not how."""
        known = block.slices.get((value, target))
        if known is not None:
            return known
        op, eqn, atoms, home = self._from_literals[value]
        needed, operands = operand_shardings(op, target), []
        for operand, atom, sharding in zip(op.operands, atoms, needed or (), strict=needed is not None):
            if operand == LITERAL or isinstance(atom, jexc.Literal):
                made = atom
            elif home is block:
                made = self._taken(block, operand, atom, sharding)
            else:
                # Another body does not see the operand.
                made = self._made_again(block, operand, sharding) if operand in self._from_literals else None
            operands.append(made)
        if needed is None or any(made is None for made in operands):
            return None
        (var,) = operands if eqn is None else self.emit(eqn, operands, block)
        made = block.slices[value, target] = block.constrain(var, target)
        return made

    def _note_literal(self, block: Block, op: Op, eqn: Any, operands: list[Any]) -> None:
        """Remembers how a value from literals is made; `eqn` is None for another name of its operand."""
        if len(op.results) == 1 and op.results[0] in self.sharded.program.from_literals:
            self._from_literals[op.results[0]] = op, eqn, operands, block

    def _spread(self, block: Block, op: Op, eqn: Any, operands: list[Any], made: TensorSharding) -> list[Any]:
        """Returns the operands of an equation whose result is split as `made`, repeated if readers split them differently."""
        shape, values = getattr(eqn.outvars[0].aval, "shape", ()), self.values
        return [
            block.repeat(atom, made, eqn)
            if value != LITERAL and values[value].is_repeated and is_repeated(atom.aval.shape, shape)
            else atom
            for value, atom in zip(op.operands, operands, strict=True)
        ]

    def settle(self, block: Block, op: Op, position: int, var: Any) -> Any:
        """Returns the result at `position`, reduced and in its stored sharding."""
        value, record = op.results[position], self.values[op.results[position]]
        axes = self.assignment.ops[op.id].axes
        natural = project(op.rule.results[position], axes)
        stored = self.assignment.values[value]
        partial = partial_axes(op.rule, axes)
        if natural == stored and record.is_unconstrained:
            return var
        if partial:
            reduction = reduction_plan(op, natural, stored, partial)
            if reduction.scattered and not reduction.reduced:
                # With a constraint on the scattered result alone, XLA may use idle axes and permute instead.
                var = block.constrain(var, natural)
            natural = reduction.after
        again = None if partial or refines(natural, stored) or value not in self._from_literals else self._made_again(block, value, stored)
        if again is None and (partial or natural != stored or record.is_constrained):
            var = block.constrain(var, natural)
        var = block.reshard(var, value, natural, stored) if again is None else again
        if record.has_barrier:
            var = block.part(var)
            # The barrier makes a new variable, which its readers share.
            var = block.constrain(var, stored) if record.is_equal else var
        if record.is_waited_for:
            self.waited_for[value] = var
        return var

    def rewrite(self, jaxpr: Any, substitution: Substitution, block: Block, outer: Any) -> list[Any]:
        """Appends the rewritten equations to `block`; returns the atoms of the results."""
        caller = self.constraints.source_info
        for eqn in jaxpr.eqns:
            operands = [atom if isinstance(atom, jexc.Literal) else substitution[atom] for atom in eqn.invars]
            name = eqn.primitive.name
            if outer is not None:
                eqn = eqn.replace(source_info=_nested(eqn.source_info, outer))
            self.constraints.source_info = eqn.source_info
            if name in self._bodies:
                results = self._bodies[name](self, eqn, operands, block)
            elif name in IDENTITIES:
                results = self.identity(operands, block)
            else:
                results = self._equation(eqn, operands, block)
            substitution.update(zip(eqn.outvars, results, strict=True))
        self.constraints.source_info = caller
        return [atom if isinstance(atom, jexc.Literal) else substitution[atom] for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Any], block: Block) -> list[Any]:
        op = self.next_op()
        if op is None:
            # Nothing reads what a dead kernel makes, but the compiler meets it before it finds that out.
            return self.emit(self._as_local(eqn, None), operands, block)
        results = self._made.get(op.id)
        if results is None:
            results = self._made[op.id] = self._computed(op, eqn, operands, block)
        return results

    def _computed(self, op: Op, eqn: Any, operands: list[Any], block: Block) -> list[Any]:
        record = self.values[op.results[0]] if op.results else NO_RECORD
        if record.is_partial and not self.loop_sums.is_whole(op):
            return [self.loop_sums.equation(block, op, eqn, operands)]
        if record.is_recomputed:
            block.recipes[op.results[0]] = op, eqn, operands
        if op.primitive in WRITTEN_AGAIN:
            self._note_literal(block, op, eqn, operands)
        operands = [self.use(block, op, position, atom) for position, atom in enumerate(operands)]
        if op.primitive == "select_n" and op.operands[0] == LITERAL and not isinstance(operands[0], jexc.Literal):
            # All cases are equal: no op reads what selects, and its split must not reach the result.
            operands[0] = _first_case(operands[0].aval.dtype)
        if op.primitive == "dynamic_slice" and self._is_sliced_again(op):
            clamps, operands = clamped_starts(eqn, operands)
            block.eqns += clamps
        if op.primitive in ELEMENTWISE:
            operands = self._spread(block, op, eqn, operands, project(op.rule.results[0], self.assignment.ops[op.id].axes))
        widened = self._widened(eqn, op, operands, block) if self._widens and eqn.primitive.name == op.primitive else None
        results = self.emit(self._as_local(eqn, op), operands, block) if widened is None else [widened]
        made = block.eqns[-1]
        results = [self.settle(block, op, position, var) for position, var in enumerate(results)]
        block.note(op, made, results)
        if widened is not None:
            results = [block.narrowed(results[0], eqn.outvars[0].aval.dtype)]
        return [self.loop_sums.added_by_one(block, op, results[0], eqn.source_info)] if record.is_partial else results

    def _is_sliced_again(self, op: Op) -> bool:
        """Returns whether the one result of an op is moved where it is made or read, or read by another slice."""
        (value,) = op.results
        natural = project(op.rule.results[0], self.assignment.ops[op.id].axes)
        if self.values[value].is_moved or natural != self.assignment.values[value]:
            return True
        return any(reader.primitive == "dynamic_slice" for reader in self._graph.readers[value])

    def _widened(self, eqn: Any, op: Op, operands: list[Any], block: Block) -> Any:
        """Returns the op's result in float32 if that is reduced, or passed on from such a result; else None."""
        if op.results and self.values[op.results[0]].is_widened and partial_axes(op.rule, self.assignment.ops[op.id].axes):
            written = self._written_wide(eqn, op, operands)
        elif op.primitive in PASSED_ON and operands and all(not isinstance(atom, jexc.Literal) and atom in block.wide for atom in operands):
            operands = [block.wide[atom] for atom in operands]
            written = passed_on(eqn, operands)
        else:
            return None
        block.eqns += written
        return written[-1].outvars[0] if written else operands[0]

    def _written_wide(self, eqn: Any, op: Op, operands: list[Any]) -> list[Any]:
        """Returns equations that reduce the op's result in float32; the last makes it."""
        mesh, axes = self.sharded.jax_mesh, self.assignment.ops[op.id].axes
        platform = mesh.devices.flat[0].platform
        if rounds(eqn, platform):
            return [local_op(eqn.replace(invars=operands), op.rule, axes, mesh, widens=True)]
        written = wide(eqn, operands, platform)
        return [*written[:-1], self._as_local(written[-1], op)]

    def _as_local(self, eqn: Any, op: Op | None) -> Any:
        """Returns the equation, made to work on blocks if the partitioner would not split it as planned; dead ones are whole."""
        axes = self.assignment.ops[op.id].axes if op is not None else ()
        rule = op.rule if op is not None else None
        return local_op(eqn, rule, axes, self.sharded.jax_mesh) if is_local(eqn, rule, axes, self.sharded.jax_mesh) else eqn

    def emit(self, eqn: Any, operands: Sequence[Any], block: Block, avals: Sequence[Any] = (), **params: Any) -> list[Any]:
        """Writes the equation with new operands and fresh results, which are of the types `avals` if these are given."""
        fresh: list[Any] = [jexc.Var(aval) for aval in avals or [var.aval for var in eqn.outvars]]
        block.eqns.append(eqn.replace(invars=list(operands), outvars=fresh, params={**eqn.params, **params}))
        return fresh

    def identity(self, operands: list[Any], block: Block) -> list[Any]:
        """Rewrites an equation that changes nothing but the sharding of its operand."""
        op = self.next_op()
        if op is None:
            return operands
        if self.values[op.results[0]].is_partial:
            return [self.loop_sums.handed_on(block, op, operands[0], self.constraints.source_info)]
        self._note_literal(block, op, None, operands)
        results = [self.settle(block, op, 0, self.use(block, op, 0, operands[0]))]
        block.note(op, None, results)
        return results


def _first_case(dtype: Any) -> Any:
    """Returns an atom that selects the first case."""
    number = np.zeros((), dtype)
    return jexc.Literal(number, jax.typeof(number))


def _nested(info: Any, outer: Any) -> Any:
    return info.replace(name_stack=outer.name_stack + info.name_stack)
