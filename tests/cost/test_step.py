"""The bills of the last assignments are kept, each for its mesh and machine."""

import jax.numpy as jnp

from spmdctx.cost import step as memo
from spmdctx.cost.price.assigned import Step
from spmdctx.ir.mesh import LogicalMesh
from tests.road import CPU, MESH, spread, trace


def test_a_bill_is_kept_while_another_assignment_is_priced(monkeypatch):
    priced = []
    monkeypatch.setattr(
        memo, "price", lambda step, assignment, mesh, *rest, made=memo.price: priced.append(1) or made(step, assignment, mesh, *rest)
    )
    program = trace(lambda x, w: jnp.sum(jnp.tanh(x @ w)), jnp.zeros((8, 16)), jnp.zeros((16, 16)))
    step = Step(program.graph, program.scopes, program.from_literals)
    first, other = spread(program, {}), spread(program, {0: ((MESH.names[0],), ())})
    bills = [memo.bill_of(step, own, MESH, CPU).total_s for own in (first, other, first, other)]
    assert len(priced) == 2
    assert bills[:2] == bills[2:]
    turned = LogicalMesh(tuple(zip(MESH.names, reversed(MESH.shape), strict=True)))
    memo.bill_of(step, first, turned, CPU)
    assert len(priced) == 3
