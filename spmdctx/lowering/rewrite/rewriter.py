"""Writes an assignment into the jaxpr: sharding constraints at every op where the partitioner could choose otherwise.

A data rewrite: equations are copied with fresh variables, calls are dissolved, loop and remat bodies are rewritten too. The
order in which equations and body boundaries are met is that of `trace.build.control_flow`, which is how ops are found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc
from jax.sharding import Mesh

from spmdctx.cost.price.directives import Directives, completed
from spmdctx.ir.analysis.gradient_order import carriers
from spmdctx.ir.graph import LITERAL, Op, item_bytes
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import partial_axes, project
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.lowering.rewrite.block import _Block
from spmdctx.lowering.rewrite.control_flow import _BODIES, _kept_call
from spmdctx.lowering.rewrite.local_ops import ISLANDS, island
from spmdctx.lowering.rewrite.loop_sums import HeldSums
from spmdctx.lowering.rewrite.precision import PASSED_ON, passed_on, wide
from spmdctx.lowering.rewrite.waits import wait_for
from spmdctx.machine.reshard import reshard_steps
from spmdctx.machine.xla.narrowing import sharers
from spmdctx.machine.xla.partitioner.equal_values import IDENTITIES, equal_values, free_values, turned_products
from spmdctx.machine.xla.partitioner.needed_constraints import Anchors
from spmdctx.machine.xla.partitioner.recompute import refines, slices
from spmdctx.machine.xla.partitioner.repetition import is_repeated
from spmdctx.machine.xla.reductions import reduction_plan
from spmdctx.rules.control_flow import call_body, call_operands
from spmdctx.rules.elementwise import ELEMENTWISE
from spmdctx.trace.build.control_flow import INLINED, open_jaxpr
from spmdctx.trace.build.program import Program
from spmdctx.trace.build.user_pins import has_explicit_spec
from spmdctx.trace.specs import named_sharding

Substitution = dict[Any, Any]


def constrain(
    program: Program, assignment: Assignment, mesh: LogicalMesh, jax_mesh: Mesh, directives: Directives | None = None
) -> jexc.ClosedJaxpr:
    """Returns the program's jaxpr with the assignment's shardings as constraints, and the directives written into it.

    Without directives those are written that follow from the assignment alone.
    """
    if directives is None:
        directives = completed(Directives(), program.graph, assignment, mesh)
    rewriter = _Rewriter(program, assignment, mesh, jax_mesh, directives)
    closed = program.jaxpr
    block = _Block(rewriter)
    substitution = {var: var for var in (*closed.jaxpr.constvars, *closed.jaxpr.invars)}
    eqns, outputs = block.finish(rewriter.rewrite(closed.jaxpr, substitution, block, None))
    for update in directives.waits:
        eqns, outputs = wait_for(eqns, outputs, *[rewriter.noted[value] for value in (update.gate, *update.results)])
    return jexc.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns, outvars=outputs), closed.consts)


class _Rewriter:
    def __init__(self, program: Program, assignment: Assignment, mesh: LogicalMesh, jax_mesh: Mesh, directives: Directives) -> None:
        self.directives = directives
        self.tied = directives.tied
        self.carriers = carriers(program.graph, self.tied) if self.tied else {}
        self.carried = frozenset(self.carriers.values())
        self.graph, self.assignment, self.mesh, self.jax_mesh = program.graph, assignment, mesh, jax_mesh
        self.held = HeldSums(self, directives.loop_sums)
        self._sites = iter(program.op_of_site)
        self._moved = directives.moved
        self._anchors = Anchors(assignment, mesh, self._moved)
        # What is left as it is made, where it is stored so.
        self._open = turned_products(program.graph, assignment) | free_values(program.graph, program.loose, self._moved)
        self._equal = equal_values(program.graph, program.scopes, assignment, self._moved)
        self._routes, self._scopes, self._sharers = directives.routes, program.scopes, sharers(program.graph)
        self._repeated = directives.repeated
        self._apart = directives.barriers
        self._templates: dict[Any, Any] = {}
        self._made: dict[int, list[Any]] = {}
        # The variables of what waits, and of what is waited for.
        self.noted: dict[int, Any] = dict.fromkeys(value for update in directives.waits for value in (update.gate, *update.results))
        self._info: Any = None

    def bucket(self, value: int) -> int | None:
        """The bucket of a gradient's sum, None where it has none."""
        terms = self.held.totals[value].terms if value in self.held.totals else (value,)
        return next((self.tied[term] for term in terms if term in self.tied), None)

    def next_op(self) -> Op | None:
        """The op of the next site, None where it is dead."""
        index = next(self._sites)
        return self.graph.ops[index] if index >= 0 else None

    def constraint(self, source: Any, target: Any, sharding: TensorSharding) -> Any:
        """An equation, at the source line now being rewritten, that constrains `source` to `sharding` and calls the result `target`."""
        aval = source.aval
        key = (aval.shape, aval.dtype, aval.weak_type, sharding)
        template = self._templates.get(key)
        if template is None:
            named = named_sharding(self.jax_mesh, sharding)
            struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            template = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, named))(struct).jaxpr.eqns[0]
            self._templates[key] = template
        return template.replace(invars=[source], outvars=[target], source_info=self._info)

    def steps(self, value: int, source: TensorSharding, target: TensorSharding) -> list[TensorSharding]:
        """The shardings that a value passes through between two shardings."""
        if source == target:
            return []
        known = self.graph.values[value]
        steps = reshard_steps(known.shape, item_bytes(known.dtype), source, target, self.mesh, self.directives.all_to_all)
        return [step.sharding for step in steps]

    # One op

    def use(self, block: _Block, op: Op, position: int, atom: Any, *, recomputes: bool = True) -> Any:
        """The operand at `position` in the sharding in which the op takes it; slices may be recomputed."""
        value = op.operands[position]
        if value == LITERAL or isinstance(atom, jexc.Literal):
            return atom
        target = project(op.rule.operands[position], self.assignment.ops[op.id].axes)
        via = self._routes.get((self._scopes[op.id], value)) if self._sharers[op.id] else None
        if via is None or target == self.assignment.values[value]:
            return self._taken(block, value, atom, target, recomputes)
        return block.reshard(self._taken(block, value, atom, via, recomputes), value, via, target)

    def _taken(self, block: _Block, value: int, atom: Any, target: TensorSharding, recomputes: bool = True) -> Any:
        stored = self.assignment.values[value]
        if recomputes and target != stored and value in block.recipes and refines(stored, target):
            made = self._recomputed(block, value, target)
            if made is not None:
                return made
        if value in self._moved or target != stored:
            # All readers take the value from here, or the partitioner would give them what one of them asks for.
            atom = block.constrain(atom, stored)
        return block.reshard(atom, value, stored, target)

    def _recomputed(self, block: _Block, value: int, target: TensorSharding) -> Any:
        """A slice of a value that only exists on the way into its readers, from slices of its operands; None where they are none."""
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

    def _spread(self, block: _Block, op: Op, eqn: Any, operands: list[Any], made: TensorSharding) -> list[Any]:
        """The operands of an equation whose result is split as `made`: those repeated where readers want different splits of them."""
        shape = getattr(eqn.outvars[0].aval, "shape", ())
        return [
            block.repeat(atom, made, eqn) if value in self._repeated and is_repeated(atom.aval.shape, shape) else atom
            for value, atom in zip(op.operands, operands, strict=True)
        ]

    def settle(self, block: _Block, op: Op, position: int, var: Any) -> Any:
        """The result at `position` reduced and brought into its stored sharding."""
        value = op.results[position]
        axes = self.assignment.ops[op.id].axes
        natural = project(op.rule.results[position], axes)
        stored = self.assignment.values[value]
        partial = partial_axes(op.rule, axes)
        if natural == stored and value in self._open:
            return var
        if partial:
            reduction = reduction_plan(op, natural, stored, partial)
            if reduction.scattered and not reduction.reduced:
                # Asked for the scattered result alone, XLA may use idle axes and permute instead.
                var = block.constrain(var, natural)
            natural = reduction.after
        if partial or natural != stored or value in self._equal or op in self._anchors:
            var = block.constrain(var, natural)
        var = block.reshard(var, value, natural, stored)
        if value in self._apart:
            var = block.part(var)
            # The barrier makes a new variable, which its readers share.
            var = block.constrain(var, stored) if value in self._equal else var
        if value in self.noted:
            self.noted[value] = var
        return var

    # Equations

    def rewrite(self, jaxpr: Any, substitution: Substitution, block: _Block, outer: Any) -> list[Any]:
        """Appends the rewritten equations to `block`; returns the atoms of the results."""
        caller = self._info
        for eqn in jaxpr.eqns:
            operands = [atom if isinstance(atom, jexc.Literal) else substitution[atom] for atom in eqn.invars]
            name = eqn.primitive.name
            if outer is not None:
                eqn = eqn.replace(source_info=_nested(eqn.source_info, outer))
            self._info = eqn.source_info
            if name in INLINED:
                results = self._inline(eqn, operands, block)
            elif name in _BODIES:
                results = _BODIES[name](self, eqn, operands, block)
            elif name in IDENTITIES:
                results = self._identity(operands, block)
            else:
                results = self._equation(eqn, operands, block)
            substitution.update(zip(eqn.outvars, results, strict=True))
        self._info = caller
        return [atom if isinstance(atom, jexc.Literal) else substitution[atom] for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Any], block: _Block) -> list[Any]:
        op = self.next_op()
        if op is None:
            return self.emit(eqn, operands, block)
        results = self._made.get(op.id)
        if results is None:
            results = self._made[op.id] = self._computed(op, eqn, operands, block)
        return results

    def _computed(self, op: Op, eqn: Any, operands: list[Any], block: _Block) -> list[Any]:
        is_held = bool(op.results) and op.results[0] in self.held
        if is_held and not self.held.is_whole(op):
            return [self.held.equation(block, op, eqn, operands)]
        if op.results and op.results[0] in self.directives.recomputed and (self.directives.all_to_all or not _repeats(eqn)):
            block.recipes[op.results[0]] = op, eqn, operands
        operands = [self.use(block, op, position, atom) for position, atom in enumerate(operands)]
        if op.primitive in ELEMENTWISE:
            operands = self._spread(block, op, eqn, operands, project(op.rule.results[0], self.assignment.ops[op.id].axes))
        eqn = self._as_island(eqn, op)
        widened = self._widened(eqn, op, operands, block)
        results = self.emit(eqn, operands, block) if widened is None else [widened]
        made = block.eqns[-1]
        results = [self.settle(block, op, position, var) for position, var in enumerate(results)]
        block.note(op, made, results)
        if widened is not None:
            results = [block.narrowed(results[0], eqn.outvars[0].aval.dtype)]
        return [self.held.added_by_one(block, op, results[0], eqn.source_info)] if is_held else results

    def _widened(self, eqn: Any, op: Op, operands: list[Any], block: _Block) -> Any:
        """The op's result in float32 where that is what is reduced, or what it passes on of such; None elsewhere."""
        if not self.directives.widened or eqn.primitive.name != op.primitive:
            return None
        if op.results and op.results[0] in self.directives.widened and partial_axes(op.rule, self.assignment.ops[op.id].axes):
            written = wide(eqn, operands)
        elif op.primitive in PASSED_ON and operands and all(not isinstance(atom, jexc.Literal) and atom in block.wide for atom in operands):
            operands = [block.wide[atom] for atom in operands]
            written = passed_on(eqn, operands)
        else:
            return None
        block.eqns += written
        return written[-1].outvars[0] if written else operands[0]

    def _as_island(self, eqn: Any, op: Op) -> Any:
        """The equation, made to work per block where the partitioner would not split it."""
        axes = self.assignment.ops[op.id].axes
        if op.primitive not in ISLANDS or not any(axes):
            return eqn
        operands = [project(dims, axes) for dims in op.rule.operands]
        template = island(eqn, operands, [project(dims, axes) for dims in op.rule.results], self.jax_mesh)
        return template.replace(outvars=eqn.outvars, source_info=eqn.source_info)

    def emit(self, eqn: Any, operands: Sequence[Any], block: _Block, avals: Sequence[Any] = (), **params: Any) -> list[Any]:
        """Writes the equation with new operands and fresh results, of `avals` where they are other ones."""
        fresh: list[Any] = [jexc.Var(aval) for aval in avals or [var.aval for var in eqn.outvars]]
        block.eqns.append(eqn.replace(invars=list(operands), outvars=fresh, params={**eqn.params, **params}))
        return fresh

    def _identity(self, operands: list[Any], block: _Block) -> list[Any]:
        op = self.next_op()
        if op is None:
            return operands
        if op.results[0] in self.held:
            return [self.held.handed_on(block, op, operands[0], self._info)]
        results = [self.settle(block, op, 0, self.use(block, op, 0, operands[0]))]
        block.note(op, None, results)
        return results

    def _inline(self, eqn: Any, operands: list[Any], block: _Block) -> list[Any]:
        name = eqn.primitive.name
        jaxpr, consts = open_jaxpr(call_body(name, eqn.params))
        operands = [operands[index] for index in call_operands(name, eqn.params, len(operands))]
        operands = self._explicit(eqn.params.get("in_shardings", ()), operands, block)
        if consts:
            # Its constants can only be held by a call of its own.
            results = _kept_call(self, eqn, operands, block)
        else:
            results = self.rewrite(jaxpr, dict(zip(jaxpr.invars, operands, strict=True)), block, eqn.source_info)
        return self._explicit(eqn.params.get("out_shardings", ()), results, block)

    def _explicit(self, shardings: Sequence[Any], atoms: list[Any], block: _Block) -> list[Any]:
        for index, sharding in enumerate(shardings):
            if has_explicit_spec(sharding):
                atoms[index] = self._identity([atoms[index]], block)[0]
        return atoms

    def body(self, jaxpr: Any, operands: Sequence[Any] = ()) -> tuple[_Block, Substitution]:
        """A new block with fresh inputs for `jaxpr`, like its operands where they are known."""
        fresh = {var: jexc.Var(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
        for var, atom in zip(jaxpr.invars, operands, strict=False):
            if atom.aval.shape != var.aval.shape:
                fresh[var] = jexc.Var(atom.aval)
        return _Block(self), fresh

    def close(self, body: Any, block: _Block, fresh: Substitution, outputs: list[Any]) -> Any:
        """The rewritten body, open or closed as it was."""
        jaxpr, consts = open_jaxpr(body)
        eqns, outputs = block.finish(outputs)
        new = jaxpr.replace(
            constvars=[fresh[var] for var in jaxpr.constvars],
            invars=[fresh[var] for var in jaxpr.invars],
            outvars=outputs,
            eqns=eqns,
        )
        return jexc.ClosedJaxpr(new, consts) if hasattr(body, "consts") else new

    def enter(self, atom: Any, block: _Block, inner: _Block, fresh: Substitution, own: Any) -> tuple[Any, Any]:
        """A loop's entry boundary: the outer operand as the loop takes it, and the inner input `own` in its stored sharding."""
        op, var = self.next_op(), fresh[own]
        if op is None:
            return atom, var
        if op.results[0] in self.held:
            atom = self.held.started(block, op, atom, self._info)
            fresh[own] = jexc.Var(atom.aval)
            return atom, inner.constrain(fresh[own], (self.held.axes_of(op.results[0]), *self.assignment.values[op.results[0]]))
        atom, stored = self.use(block, op, 0, atom), self.assignment.values[op.results[0]]
        natural = project(op.rule.results[0], self.assignment.ops[op.id].axes)
        if getattr(atom.aval, "shape", ()) == getattr(var.aval, "shape", ()):
            # What is the same in every turn, or the first turn's, is moved outside.
            return block.reshard(atom, op.operands[0], natural, stored), inner.constrain(var, stored)
        return atom, inner.reshard(inner.constrain(var, natural), op.results[0], natural, stored)


def _repeats(eqn: Any) -> bool:
    """Whether an equation repeats an operand along dimensions of size 1.

    XLA makes the repeated operand once for all copies of the equation, and moves it between their shardings, by all-to-all too.
    """
    shape = eqn.outvars[0].aval.shape
    return any(getattr(atom.aval, "shape", ()) not in ((), shape) for atom in eqn.invars)


def _nested(info: Any, outer: Any) -> Any:
    return info.replace(name_stack=outer.name_stack + info.name_stack)
