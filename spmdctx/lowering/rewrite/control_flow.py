"""Rewrites the equations that hold bodies: calls, remat, loops and branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc

from spmdctx._compat import scan_counts
from spmdctx.ir.projection import project
from spmdctx.lowering.rewrite.block import Block
from spmdctx.lowering.rewrite.equations import barrier_of
from spmdctx.lowering.rewrite.rewriter import Body, Rewriter, Substitution
from spmdctx.rules.control_flow import RECOMPUTED, body_parameter, call_body, call_operands
from spmdctx.trace.build.control_flow import INLINED, KEPT, open_jaxpr
from spmdctx.trace.build.user_pins import has_explicit_spec


def _inline(rewriter: Rewriter, eqn: Any, operands: list[Any], block: Block) -> list[Any]:
    name = eqn.primitive.name
    jaxpr, consts = open_jaxpr(call_body(name, eqn.params))
    operands = [operands[index] for index in call_operands(name, eqn.params, len(operands))]
    operands = _explicit(rewriter, eqn.params.get("in_shardings", ()), operands, block)
    if consts:
        # Only a call of its own can keep its constants.
        results = _kept_call(rewriter, eqn, operands, block)
    else:
        results = rewriter.rewrite(jaxpr, dict(zip(jaxpr.invars, operands, strict=True)), block, eqn.source_info)
    return _explicit(rewriter, eqn.params.get("out_shardings", ()), results, block)


def _explicit(rewriter: Rewriter, shardings: Sequence[Any], atoms: list[Any], block: Block) -> list[Any]:
    for index, sharding in enumerate(shardings):
        if has_explicit_spec(sharding):
            atoms[index] = rewriter.identity([atoms[index]], block)[0]
    return atoms


def _opened(rewriter: Rewriter, jaxpr: Any, operands: Sequence[Any] = ()) -> tuple[Block, Substitution]:
    """Returns a new block with fresh inputs for `jaxpr`, like its operands where they are known."""
    fresh = {var: jexc.Var(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
    for var, atom in zip(jaxpr.invars, operands, strict=False):
        if atom.aval.shape != var.aval.shape:
            fresh[var] = jexc.Var(atom.aval)
    return rewriter.block(), fresh


def _closed(body: Any, block: Block, fresh: Substitution, outputs: list[Any]) -> Any:
    """Returns the rewritten body, open or closed as it was."""
    jaxpr, consts = open_jaxpr(body)
    eqns, outputs = block.finish(outputs)
    new = jaxpr.replace(
        constvars=[fresh[var] for var in jaxpr.constvars],
        invars=[fresh[var] for var in jaxpr.invars],
        outvars=outputs,
        eqns=eqns,
    )
    return jexc.ClosedJaxpr(new, consts) if hasattr(body, "consts") else new


def _enter(rewriter: Rewriter, atom: Any, block: Block, inner: Block, fresh: Substitution, own: Any) -> tuple[Any, Any]:
    """Writes a loop's entry boundary; returns the outer operand as the loop takes it, and the inner input `own` in its stored sharding."""
    op, var = rewriter.next_op(), fresh[own]
    if op is None:
        return atom, var
    if rewriter.values[op.results[0]].is_partial:
        atom = rewriter.loop_sums.started(block, op, atom, rewriter.constraints.source_info)
        fresh[own] = jexc.Var(atom.aval)
        return atom, inner.constrain(fresh[own], (rewriter.loop_sums.axes_of(op.results[0]), *rewriter.assignment.values[op.results[0]]))
    atom, stored = rewriter.use(block, op, 0, atom), rewriter.assignment.values[op.results[0]]
    natural = project(op.rule.results[0], rewriter.assignment.ops[op.id].axes)
    if getattr(atom.aval, "shape", ()) == getattr(var.aval, "shape", ()):
        # Values that are the same in every iteration, and those of the first iteration, move outside of the loop.
        return block.reshard(atom, op.operands[0], natural, stored), inner.constrain(var, stored)
    return atom, inner.reshard(inner.constrain(var, natural), op.results[0], natural, stored)


def _kept_call(rewriter: Rewriter, eqn: Any, operands: list[Any], block: Block) -> list[Any]:
    name = body_parameter(eqn.primitive.name, eqn.params)
    body = eqn.params[name]
    jaxpr, _ = open_jaxpr(body)
    inner, fresh = _opened(rewriter, jaxpr, operands)
    outputs = rewriter.rewrite(jaxpr, dict(fresh), inner, None)
    return rewriter.emit(eqn, operands, block, [atom.aval for atom in outputs], **{name: _closed(body, inner, fresh, outputs)})


def _remat(rewriter: Rewriter, eqn: Any, operands: list[Any], block: Block) -> list[Any]:
    """Rewrites a remat; if sums have buckets, dissolves it as JAX's lowering does, because no barrier could reach inside."""
    jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
    if not rewriter.values.grouped or consts:
        return _kept_call(rewriter, eqn, operands, block)
    prevents = eqn.params["prevent_cse"]
    prevents = prevents if isinstance(prevents, tuple) else (prevents,) * len(operands)
    kept = [
        place
        for place, atom in enumerate(operands)
        if prevents[place] and not isinstance(atom, jexc.Literal) and eqn.params["differentiated"]
    ]
    if kept:
        fresh = [jexc.Var(operands[place].aval) for place in kept]
        block.eqns.append(barrier_of([operands[place] for place in kept], fresh, eqn.source_info))
        for place, var in zip(kept, fresh, strict=True):
            operands[place] = var
    return rewriter.rewrite(jaxpr, dict(zip(jaxpr.invars, operands, strict=True)), rewriter.block(block), eqn.source_info)


def _scan(rewriter: Rewriter, eqn: Any, operands: list[Any], block: Block) -> list[Any]:
    body, (_, num_carry) = eqn.params["jaxpr"], scan_counts(eqn.params)
    sums, info = rewriter.loop_sums, eqn.source_info
    jaxpr, _ = open_jaxpr(body)
    inner, fresh = _opened(rewriter, jaxpr)
    substitution = dict(fresh)
    for index, var in enumerate(jaxpr.invars):
        operands[index], substitution[var] = _enter(rewriter, operands[index], block, inner, fresh, var)
    outputs = rewriter.rewrite(jaxpr, substitution, inner, None)
    ops = [rewriter.next_op() for _ in outputs]
    avals = [var.aval for var in eqn.outvars]
    for index, op in enumerate(ops):
        if op is None:
            continue
        if sums.concerns(op):
            outputs[index] = sums.handed_on(inner, op, outputs[index], info)
            own = outputs[index].aval
            avals[index] = own if index < num_carry else own.update(shape=(*avals[index].shape[:1], *own.shape))
            continue
        outputs[index] = rewriter.use(inner, op, 0, outputs[index])
        if index < num_carry:
            outputs[index] = rewriter.settle(inner, op, 0, outputs[index])
    results = rewriter.emit(eqn, operands, block, avals, jaxpr=_closed(body, inner, fresh, outputs))
    return [
        var
        if op is None
        else sums.left(block, op, var, info)
        if sums.concerns(op)
        else rewriter.settle(block, op, 0, var)
        if index >= num_carry
        else block.constrain(var, rewriter.assignment.values[op.results[0]])
        for index, (op, var) in enumerate(zip(ops, results, strict=True))
    ]


def _while(rewriter: Rewriter, eqn: Any, operands: list[Any], block: Block) -> list[Any]:
    params = eqn.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    num_cond = params["cond_nconsts"]
    in_cond, fresh_cond = _opened(rewriter, cond.jaxpr)
    in_body, fresh_body = _opened(rewriter, body.jaxpr)
    sub_cond, sub_body = dict(fresh_cond), dict(fresh_body)
    for index, var in enumerate(cond.jaxpr.invars[:num_cond]):
        operands[index], sub_cond[var] = _enter(rewriter, operands[index], block, in_cond, fresh_cond, var)
    for index, var in enumerate(body.jaxpr.invars):
        position = num_cond + index
        operands[position], sub_body[var] = _enter(rewriter, operands[position], block, in_body, fresh_body, var)
    cond_outputs = rewriter.rewrite(cond.jaxpr, sub_cond, in_cond, None)
    outputs = rewriter.rewrite(body.jaxpr, sub_body, in_body, None)
    ops = [rewriter.next_op() for _ in outputs]
    for index, op in enumerate(ops):
        if op is not None:
            outputs[index] = rewriter.settle(in_body, op, 0, rewriter.use(in_body, op, 0, outputs[index]))
    new_cond = _closed(cond, in_cond, fresh_cond, cond_outputs)
    results = rewriter.emit(eqn, operands, block, cond_jaxpr=new_cond, body_jaxpr=_closed(body, in_body, fresh_body, outputs))
    return [
        var if op is None else block.constrain(var, rewriter.assignment.values[op.results[0]]) for op, var in zip(ops, results, strict=True)
    ]


def _cond(rewriter: Rewriter, eqn: Any, operands: list[Any], block: Block) -> list[Any]:
    built = []
    for branch in eqn.params["branches"]:
        inner, fresh = _opened(rewriter, branch.jaxpr)
        built.append((branch, inner, fresh, rewriter.rewrite(branch.jaxpr, dict(fresh), inner, None)))
    ops = [rewriter.next_op() for _ in eqn.outvars]
    branches = []
    for number, (branch, inner, fresh, outputs) in enumerate(built):
        outputs = [atom if op is None else rewriter.use(inner, op, number, atom) for op, atom in zip(ops, outputs, strict=True)]
        branches.append(_closed(branch, inner, fresh, outputs))
    results = rewriter.emit(eqn, operands, block, branches=tuple(branches))
    return [var if op is None else rewriter.settle(block, op, 0, var) for op, var in zip(ops, results, strict=True)]


BODIES: dict[str, Body] = {
    **dict.fromkeys(INLINED, _inline),
    **dict.fromkeys(KEPT, _kept_call),
    **dict.fromkeys(RECOMPUTED, _remat),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
"""The function that rewrites an equation with bodies, by primitive."""
