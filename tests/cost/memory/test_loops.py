"""Narrow copies of stacks live from the first loop that reads them to the end of the last, and count as a device stores the stack."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmdctx
from spmdctx.cost.memory.lives import step_memory
from spmdctx.machine.presets import PRESETS
from tests.road import trace

LAYERS, WIDTH = 6, 64
WEIGHTS, X = jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((32, WIDTH), "bfloat16")


def scanned(weights, x, dtype="bfloat16"):
    layer = jax.checkpoint(lambda y, one: jnp.tanh(y @ one.astype(dtype)).astype(y.dtype))
    y, _ = lax.scan(lambda y, one: (layer(y, one), None), x, weights)
    return y.astype(jnp.float32).sum()


def both_passes(weights, x):
    return jax.grad(scanned)(weights, x)


def several(weights, xs):
    """Passes of micro-batches."""
    return lax.scan(lambda total, x: (total + both_passes(weights, x), None), jnp.zeros_like(weights), xs)[0]


@pytest.mark.parametrize(("fn", "x"), [(scanned, X), (both_passes, X), (several, jnp.stack([X] * 3))])
def test_a_narrow_copy_lives_from_the_first_loop_to_the_end_of_the_last(fn, x):
    program = trace(fn, WEIGHTS, x)
    graph = program.graph
    (stack,) = step_memory(graph, program.scopes).stacks
    entering = [op.id for op in graph.ops if op.primitive == "scan.enter" and op.operands[0] == graph.inputs[0]]
    assert (stack.value, stack.start, stack.share) == (graph.inputs[0], min(entering), 0.5)
    assert stack.end > max(op.id for op in graph.ops if op.primitive.startswith("dot_general"))


@pytest.mark.parametrize("donated", [False, True])
def test_the_copy_of_a_stack_that_is_given_back_lies_in_the_result(donated):
    def frozen(weights, x):
        def loss(x):
            y, same = lax.scan(jax.checkpoint(lambda y, one: (jnp.tanh(y @ one.astype(y.dtype)), one)), x, weights)
            return y.astype(jnp.float32).sum(), same

        return jax.value_and_grad(loss, has_aux=True)(x)

    program = trace(frozen, WEIGHTS, X)
    given = frozenset(program.graph.inputs[:1]) if donated else frozenset()
    assert len(step_memory(program.graph, program.scopes, given).stacks) == donated


STACK = jax.ShapeDtypeStruct((8, 2048, 2048), jnp.float32)


def plan(machine, **options):
    x = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16)

    def step(weights, x):
        return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, both_passes(weights, x))

    return spmdctx.parallel(step, topology=machine, donate_argnums=0, **options).plan(STACK, x)


@pytest.mark.parametrize("machine", ["tpu-v5p", "h100"])
def test_only_tpu_has_narrow_copies(machine):
    plain = replace(PRESETS[machine], narrows_matrix_operands=False)
    with_copies, without = (plan(one, parallel_mode="stand_alone").cost.memory_bytes for one in (machine, plain))
    assert with_copies - without == (STACK.size * 2 if machine == "tpu-v5p" else 0)


def test_a_device_has_its_part_of_the_copy(monkeypatch):
    options = {"parallel_mode": "auto_parallel", "device_num": 8}
    counted = plan("tpu-v5p", **options)
    monkeypatch.setattr("spmdctx.cost.memory.lives.narrowed", lambda *_: ())
    plain = plan("tpu-v5p", **options)
    stored = counted.inputs[0].sharding
    assert stored == plain.inputs[0].sharding
    parts = counted.logical_mesh.num_slices([axis for axes in stored for axis in axes])
    assert parts > 1
    assert counted.cost.memory_bytes - plain.cost.memory_bytes == STACK.size * 2 // parts
