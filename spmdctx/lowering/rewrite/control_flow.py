"""Rewrites the equations that hold bodies: calls, remat, loops and branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.extend.core as jexc

from spmdctx._compat import scan_counts
from spmdctx.ir.graph import Op
from spmdctx.lowering.rewrite.block import _Block
from spmdctx.lowering.rewrite.equations import barrier_of
from spmdctx.lowering.rewrite.loop_sums import HeldSums
from spmdctx.rules.control_flow import body_parameter
from spmdctx.trace.build.control_flow import KEPT, open_jaxpr

if TYPE_CHECKING:
    from spmdctx.lowering.rewrite.rewriter import _Rewriter


def _kept_call(rewriter: _Rewriter, eqn: Any, operands: list[Any], block: _Block) -> list[Any]:
    name = body_parameter(eqn.primitive.name, eqn.params)
    body = eqn.params[name]
    jaxpr, _ = open_jaxpr(body)
    inner, fresh = rewriter.body(jaxpr, operands)
    outputs = rewriter.rewrite(jaxpr, dict(fresh), inner, None)
    return rewriter.emit(eqn, operands, block, [atom.aval for atom in outputs], **{name: rewriter.close(body, inner, fresh, outputs)})


def _remat(rewriter: _Rewriter, eqn: Any, operands: list[Any], block: _Block) -> list[Any]:
    """A remat; where gradients have buckets dissolved, as JAX does it when it lowers one, or no barrier could reach inside."""
    jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
    if not rewriter.tied or consts:
        return _kept_call(rewriter, eqn, operands, block)
    prevents = eqn.params["prevent_cse"]
    prevents = prevents if isinstance(prevents, tuple) else (prevents,) * len(operands)
    held = [
        place
        for place, atom in enumerate(operands)
        if prevents[place] and not isinstance(atom, jexc.Literal) and eqn.params["differentiated"]
    ]
    if held:
        fresh = [jexc.Var(operands[place].aval) for place in held]
        block.eqns.append(barrier_of([operands[place] for place in held], fresh, eqn.source_info))
        for place, var in zip(held, fresh, strict=True):
            operands[place] = var
    return rewriter.rewrite(jaxpr, dict(zip(jaxpr.invars, operands, strict=True)), _Block(rewriter, block), eqn.source_info)


def _scan(rewriter: _Rewriter, eqn: Any, operands: list[Any], block: _Block) -> list[Any]:
    body, (_, num_carry) = eqn.params["jaxpr"], scan_counts(eqn.params)
    held, info = rewriter.held, eqn.source_info
    jaxpr, _ = open_jaxpr(body)
    inner, fresh = rewriter.body(jaxpr)
    substitution = dict(fresh)
    for index, var in enumerate(jaxpr.invars):
        operands[index], substitution[var] = rewriter.enter(operands[index], block, inner, fresh, var)
    outputs = rewriter.rewrite(jaxpr, substitution, inner, None)
    ops = [rewriter.next_op() for _ in outputs]
    avals = [var.aval for var in eqn.outvars]
    for index, op in enumerate(ops):
        if op is None:
            continue
        if _is_held(held, op):
            outputs[index] = held.handed_on(inner, op, outputs[index], info)
            own = outputs[index].aval
            avals[index] = own if index < num_carry else own.update(shape=(*avals[index].shape[:1], *own.shape))
            continue
        outputs[index] = rewriter.use(inner, op, 0, outputs[index])
        if index < num_carry:
            outputs[index] = rewriter.settle(inner, op, 0, outputs[index])
    results = rewriter.emit(eqn, operands, block, avals, jaxpr=rewriter.close(body, inner, fresh, outputs))
    return [
        var
        if op is None
        else held.left(block, op, var, info)
        if _is_held(held, op)
        else rewriter.settle(block, op, 0, var)
        if index >= num_carry
        else block.constrain(var, rewriter.assignment.values[op.results[0]])
        for index, (op, var) in enumerate(zip(ops, results, strict=True))
    ]


def _is_held(held: HeldSums, op: Op) -> bool:
    return op.results[0] in held or op.results[0] in held.totals


def _while(rewriter: _Rewriter, eqn: Any, operands: list[Any], block: _Block) -> list[Any]:
    params = eqn.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    num_cond = params["cond_nconsts"]
    in_cond, fresh_cond = rewriter.body(cond.jaxpr)
    in_body, fresh_body = rewriter.body(body.jaxpr)
    sub_cond, sub_body = dict(fresh_cond), dict(fresh_body)
    for index, var in enumerate(cond.jaxpr.invars[:num_cond]):
        operands[index], sub_cond[var] = rewriter.enter(operands[index], block, in_cond, fresh_cond, var)
    for index, var in enumerate(body.jaxpr.invars):
        position = num_cond + index
        operands[position], sub_body[var] = rewriter.enter(operands[position], block, in_body, fresh_body, var)
    cond_outputs = rewriter.rewrite(cond.jaxpr, sub_cond, in_cond, None)
    outputs = rewriter.rewrite(body.jaxpr, sub_body, in_body, None)
    ops = [rewriter.next_op() for _ in outputs]
    for index, op in enumerate(ops):
        if op is not None:
            outputs[index] = rewriter.settle(in_body, op, 0, rewriter.use(in_body, op, 0, outputs[index]))
    new_cond = rewriter.close(cond, in_cond, fresh_cond, cond_outputs)
    results = rewriter.emit(eqn, operands, block, cond_jaxpr=new_cond, body_jaxpr=rewriter.close(body, in_body, fresh_body, outputs))
    return [
        var if op is None else block.constrain(var, rewriter.assignment.values[op.results[0]]) for op, var in zip(ops, results, strict=True)
    ]


def _cond(rewriter: _Rewriter, eqn: Any, operands: list[Any], block: _Block) -> list[Any]:
    built = []
    for branch in eqn.params["branches"]:
        inner, fresh = rewriter.body(branch.jaxpr)
        built.append((branch, inner, fresh, rewriter.rewrite(branch.jaxpr, dict(fresh), inner, None)))
    ops = [rewriter.next_op() for _ in eqn.outvars]
    branches = []
    for number, (branch, inner, fresh, outputs) in enumerate(built):
        outputs = [atom if op is None else rewriter.use(inner, op, number, atom) for op, atom in zip(ops, outputs, strict=True)]
        branches.append(rewriter.close(branch, inner, fresh, outputs))
    results = rewriter.emit(eqn, operands, block, branches=tuple(branches))
    return [var if op is None else rewriter.settle(block, op, 0, var) for op, var in zip(ops, results, strict=True)]


_BODIES = {
    **dict.fromkeys(KEPT, _kept_call),
    **dict.fromkeys(("remat2", "remat", "checkpoint"), _remat),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
