"""Which gradients XLA reduces at once on TPU, and that they are in memory together."""

import re
from math import prod

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.collectives.combining import MOST_BYTES, Reduced, combined, combines_up_to
from tests.audit.compile_only import need_tpu
from tests.road import ops, trace

MIB = 2**20
X = jnp.ones((8, 2048))
WIDTHS = {"a": 4096, "b": 8192, "c": 4096, "d": 2048}


def step(weights, x):
    """Trains matrices of 32, 64, 32 and 16 MiB; the backward pass makes the gradient of `a` first."""

    def loss(weights):
        return sum(jnp.sum(jnp.tanh(x @ weights[name])) for name in sorted(weights, reverse=True))

    return {name: weights[name] - 0.1 * gradient for name, gradient in jax.grad(loss)(weights).items()}


def weights():
    return {name: jnp.ones((2048, width)) for name, width in WIDTHS.items()}


def reduced(program, groups=None):
    made = ops(program, "dot_general")[len(WIDTHS) :]
    sizes = [4 * prod(program.graph.values[op.results[0]].shape) for op in made]
    return [Reduced(op.id, op.results[0], groups and groups[place], sizes[place]) for place, op in enumerate(made)]


@pytest.mark.parametrize(
    ("most", "groups", "expected"),
    [
        (MOST_BYTES, None, [112, 32]),
        (130 * MIB, None, [128, 16]),
        (1, None, [16, 32, 32, 64]),
        (1000 * MIB, None, [144]),
        (MOST_BYTES, "xyxy", [64, 80]),
    ],
)
def test_gradients_share_an_all_reduce_in_the_order_of_outputs(most, groups, expected):
    program = trace(step, weights(), X)
    found = [sum(one.bytes for one in together) // MIB for together in combined(program.graph, reduced(program, groups), most)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(("device", "most"), [("tpu-v5e", MOST_BYTES), ("tpu-v6e", MOST_BYTES), ("h100", 0), ("cpu", 0)])
def test_the_limit_is_known_of_tpus(device, most):
    assert combines_up_to(PRESETS[device]) == most


def test_tpu_s_compiler_does_so_and_the_plan_counts_what_waits():
    shapes = jax.eval_shape(weights)
    devices = need_tpu("v5p:2x2x2")
    run = spmdctx.parallel(step, devices=devices, topology="tpu-v5p", parallel_mode="data_parallel", donate_argnums=0)
    text = run.lower(shapes, X).compile().as_text()
    results = [re.findall(r"f32\[2048,(\d+)\]", made) for made in re.findall(r" = (.*?) all-reduce\(", text)]
    sizes = [sum(8192 * int(width) for width in widths) // MIB for widths in results]
    assert sorted(size for size in sizes if size) == [32, 112]
    plan = run.plan(shapes, X)
    arguments = sum(leaf.local_bytes(plan.logical_mesh) for leaf in plan.inputs)
    assert max(plan.memory_profile) - arguments >= 112 * MIB
