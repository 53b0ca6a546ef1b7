"""The collectives written in a shard_map that the plan counts are those that XLA leaves in the program."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from spmdctx.audit.collectives import parse_collectives
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.trace.build.build import Argument, build

SIZES = {"d": 4}
RING = [(place, (place + 1) % 4) for place in range(4)]
ROWS = P("d")
X = jnp.arange(64.0).reshape(16, 4)


def passed_on(x):
    return jax.lax.ppermute(x, "d", RING)


def split(body, results=ROWS):
    mesh = jax.make_mesh((4,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    return jax.shard_map(body, mesh=mesh, in_specs=ROWS, out_specs=results, check_vma=False)


def ring(x, held):
    total = jnp.zeros_like(x)
    for _ in range(4):
        total += x * held
        held = passed_on(held)
    return total


def in_scan(x):
    def turn(carry, _):
        own, other, third = carry
        return (own + third, passed_on(other), passed_on(third)), jax.lax.psum(own, "d")

    return jax.lax.scan(turn, (x, x, x), None, length=3)[0][0]


def in_while(x):
    def turn(carry):
        index, own, other, third = carry
        return index + 1, own + third, passed_on(other), passed_on(third)

    return jax.lax.while_loop(lambda carry: carry[0] < x[0, 0], turn, (0.0, x, x, x))[1]


def both_sums(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: (x * 2, jax.lax.psum(x, "d")), lambda x: (x * 3, passed_on(x)), x)


CASES = {
    "last turn of a ring": split(lambda x: ring(x, x + 1)),
    "result of a shard_map": lambda x: split(lambda x: (x * 2, jax.lax.psum(x, "d")), (P("d"), P()))(x)[0],
    "one of several operands": split(lambda x: jax.lax.psum((x, x * 2), "d")[1]),
    "carry of a scan": split(in_scan),
    "carry of a while loop": split(in_while),
    "result of a branch": split(lambda x: both_sums(x)[0]),
    "used result of a branch": split(lambda x: both_sums(x)[1]),
    "result of a call": split(lambda x: jax.jit(lambda x: (x * 2, jax.lax.all_gather(x, "d")))(x)[0]),
    "result of a remat": split(lambda x: jax.checkpoint(lambda x: (x * 2, jax.lax.psum(x, "d")))(x)[0]),
    "equal sums": split(lambda x: jax.lax.psum(x, "d") * x + jnp.sin(jax.lax.psum(x, "d"))),
    "equal gathers of equal values": split(
        lambda x: jax.lax.all_gather(x * 2, "d", tiled=True)[:4] + jnp.sin(jax.lax.all_gather(x * 2, "d", tiled=True)[4:8])
    ),
    "equal sums in calls": split(lambda x: sum(f(x) for f in [jax.jit(lambda x: jax.lax.psum(x, "d")) for _ in range(2)])),
    "sums of different values": split(lambda x: jax.lax.psum(x, "d") * jax.lax.psum(x * x, "d")),
    "a sum and a maximum": split(lambda x: jax.lax.psum(x, "d") * jax.lax.pmax(x, "d")),
    "one call for two values": split(lambda x: (lambda f: f(x) * f(x * x))(jax.jit(partial(jax.lax.psum, axis_name="d")))),
    "sum of a scatter": split(lambda x: jax.lax.psum(x.at[x[:, 0].astype(int) % 4].add(1.0), "d")[:4]),
    "gradient of a ring": jax.grad(lambda x: jnp.sum(split(lambda x: ring(x, x + 1))(x) ** 2)),
}


def planned(function):
    jaxpr = jax.make_jaxpr(function)(X)
    program = build(jaxpr, [Argument("x", Role.ARGUMENT)])
    return executions(row for region in program.manual for row in region.collectives)


def executions(rows):
    found = Counter()
    for row in rows:
        found[row.kind] += row.repeats
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_plan_counts_the_collectives_that_xla_leaves(name):
    text = jax.jit(CASES[name]).lower(X).compile().as_text()
    assert planned(CASES[name]) == executions(parse_collectives(text, LogicalMesh.of(SIZES)))
