"""Ragged products whose rows are split: each device multiplies its own, and nothing is gathered."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmdctx.audit.collectives import parse_collectives
from spmdctx.cost.price import price
from spmdctx.cost.roofline import compute_time_s
from spmdctx.cost.step import Step
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.lowering.compile import jit_program
from spmdctx.machine.presets import PRESETS
from tests.audit.compile_only import need_tpu
from tests.road import bill_of, ops, run, spread, trace

MESH = LogicalMesh.of({"data": 2, "model": 4})
SIZES = np.array([5, 0, 13, 9], np.int32)
"""Of groups that end before the last of 32 rows, some within a device's rows."""
ROWS, WEIGHTS = (32, 16), (4, 16, 8)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), jnp.float32)


def with_gradients(x, weights, cotangent, sizes):
    made, pull = jax.vjp(lambda x, weights: lax.ragged_dot(x, weights, sizes), x, weights)
    return made, *pull(cotangent)


def arguments():
    return normal(*ROWS), normal(*WEIGHTS, seed=1), normal(32, 8, seed=2), SIZES


@pytest.mark.parametrize("rows", [("data",), ("model", "data"), ("data", "model")])
def test_split_rows_meet_their_own_groups_and_only_the_weights_gradient_is_reduced(rows):
    made = run(with_gradients, *arguments(), pins={0: (rows, ()), 2: (rows, ())}, mesh=MESH)
    made.check()
    assert {kind for kind, _, _ in made.executed} == {"all_reduce"}
    assert {size for _, _, size in made.executed} == {4 * 4 * 16 * 8}


def test_rows_and_features_split_on_two_axes():
    made = run(with_gradients, *arguments(), pins={0: (("data",), ()), 1: ((), (), ("model",)), 2: (("data",), ("model",))}, mesh=MESH)
    made.check()


def test_gradients_that_a_loop_adds_up_stay_unreduced_until_it_ends():
    def gradient(weights, x, sizes):
        def loss(weights, rows, sizes):
            return jnp.sum(jnp.tanh(lax.ragged_dot(rows, weights, sizes)) ** 2)

        start = jnp.zeros_like(weights)
        return lax.scan(lambda total, one: (total + jax.grad(loss)(weights, *one), None), start, (x, sizes))[0]

    sizes = np.stack([SIZES, SIZES[::-1], np.roll(SIZES, 1)])
    made = run(gradient, normal(*WEIGHTS), normal(3, *ROWS, seed=1), sizes, pins={1: ((), ("data", "model"), ())}, mesh=MESH)
    np.testing.assert_allclose(made.got[0], made.want[0], rtol=1e-4, atol=1e-4)
    assert {count for (kind, _, _), count in made.executed.items() if kind == "all_reduce"} == {1}


@pytest.mark.parametrize("stored", [((), (), ()), ((), ("data",), ())])
def test_tpu_gathers_no_rows(stored):
    shapes = ((4096, 512), (8, 512, 256), (4096, 256))
    structs = [*(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes), jax.ShapeDtypeStruct((8,), "int32")]
    program = trace(with_gradients, *structs)
    (gradient,) = (op for op in ops(program, "ragged_dot_general") if program.graph.values[op.results[0]].shape == shapes[1])
    assignment = spread(program, {0: (("data",), ()), 2: (("data",), ()), gradient: stored}, MESH)
    text = jit_program(program, assignment, MESH, need_tpu()).jitted.lower(*structs).compile().as_text()
    planned = [(row.kind, row.axes) for row in bill_of(program, assignment, MESH).collectives]
    assert [(one.kind, one.axes) for one in parse_collectives(text, MESH)] == planned
    assert len(planned) == 1


MANY, GROUPS, WIDTH = 4096, 8, 1024


def seconds(device):
    """Of a product and of its two gradients on one device: first those that contract features, then the one that contracts rows."""
    shapes = (MANY, WIDTH), (GROUPS, WIDTH, WIDTH), (MANY, WIDTH)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    graph = trace(with_gradients, *arguments, jax.ShapeDtypeStruct((GROUPS,), jnp.int32)).graph
    machine = replace(PRESETS[device], kernel_s=0.0)
    one = LogicalMesh.of({"data": 1})
    own = [op for op in graph.ops if op.primitive == "ragged_dot_general"]
    found = {graph.values[op.results[0]].shape: compute_time_s(graph, op, ((),) * len(op.rule.sizes), one, machine) for op in own}
    return found[shapes[0]], found[shapes[1]]


def test_without_a_kernel_all_rows_are_masked_and_multiplied_for_each_group():
    machine, all_groups = PRESETS["h100"], 2 * MANY * WIDTH * WIDTH * GROUPS
    masked_bytes = GROUPS * MANY * WIDTH * 2
    made, gradient = seconds("h100")
    assert made == pytest.approx(all_groups / machine.peak_flops_per_s + 3 * masked_bytes / machine.memory_bytes_per_s)
    assert gradient == pytest.approx(max(all_groups / machine.peak_flops_per_s, 2 * masked_bytes / machine.memory_bytes_per_s))


def test_tpu_multiplies_each_row_once_but_where_rows_are_summed():
    made, gradient = seconds("tpu-v5e")
    products = 2 * MANY * WIDTH * WIDTH / PRESETS["tpu-v5e"].peak_flops_per_s
    assert made < 1.5 * products
    assert gradient == pytest.approx(GROUPS * products)


def test_masked_rows_of_all_groups_and_turned_ones_are_in_memory_while_they_are_read():
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((MANY, WIDTH), (GROUPS, WIDTH, WIDTH))]
    program = trace(lax.ragged_dot, *arguments, jax.ShapeDtypeStruct((GROUPS,), jnp.int32))
    step, assignment = Step(program.graph, program.scopes, program.from_literals), spread(program, {})
    peaks = [price(step, assignment, MESH, PRESETS[device]).memory_bytes for device in ("tpu-v5e", "h100")]
    assert peaks[1] - peaks[0] == 2 * GROUPS * MANY * WIDTH * 2
