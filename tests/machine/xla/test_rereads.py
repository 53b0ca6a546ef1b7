"""What the fusions of a step read again, from memory or from the chip."""

import math

import jax
import jax.numpy as jnp
import pytest

from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.memory.on_chip import held
from tests.road import ops, trace

MIB = 2**20
X, W = jnp.ones((512, 256)), jnp.ones((256, 512))


def attention(query, key, value):
    scores = jnp.einsum("qd,kd->qk", query, key).astype(jnp.float32) / 8.0
    return jnp.tanh(jax.nn.softmax(scores).astype(value.dtype) @ value)


def step(dtype):
    query = jnp.ones((256, 64), dtype)
    return trace(jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), (0, 1, 2)), query, query, query)


def moved_each(program, size):
    """The bytes per element that fusions move of tensors of `size` elements."""
    shapes = [math.prod(value.shape) for value in program.graph.values]
    found = 0.0
    for op in program.graph.ops:
        ends = (*op.operands, *op.results)
        for place, rate in (*enumerate(op.work.moved), *op.work.again) if op.work is not None else ():
            found += round(rate) * shapes[ends[place]] / size if ends[place] >= 0 and shapes[ends[place]] == size else 0.0
    return found


@pytest.mark.parametrize(("dtype", "compiled"), [(jnp.bfloat16, 30), (jnp.float32, 40)])
def test_attention_moves_as_many_bytes_for_each_score_as_its_compiled_program(dtype, compiled):
    assert moved_each(step(dtype), 256**2) == compiled


def test_arguments_are_not_read_again():
    program = trace(lambda x, w: (jnp.tanh(x) @ w, jnp.tanh(x).sum(0)), X, W)
    assert all(op.work is None or not op.work.again for op in program.graph.ops)


def test_element_wise_ops_read_nothing_again():
    # The compiler makes one fusion of those that read the same.
    program = trace(lambda x, w: ((y := jnp.tanh(x @ w), jnp.sort(y)), jnp.sin(y) * 2.0, jnp.cos(y) * 3.0), X, W)
    assert all(op.work is None or not op.work.again for op in program.graph.ops)


def test_a_float32_product_that_products_alone_read_is_written_in_their_precision():
    program = trace(lambda x, w: (x @ w) @ w.T, X, W)
    first, second = ops(program, "dot_general")
    assert (first.work.moved[2], second.work.moved[0]) == (2.0, 2.0)
    read_by_others = trace(lambda x, w: ((y := x @ w) @ w.T, jnp.sort(y)), X, W)
    assert ops(read_by_others, "dot_general")[0].work.moved[2] == 4.0


@pytest.mark.parametrize(("device", "small"), [("tpu-v5e", 0.9), ("tpu-v6e", 0.8), ("tpu-v5p", 0.5), ("tpu-v5e-measured", 0.9)])
def test_a_chip_holds_less_of_larger_tensors_and_nothing_of_the_largest(device, small):
    chip = held(PRESETS[device.removesuffix("-measured")].scratch_bytes, device)
    assert chip.moved(1.0) == pytest.approx(1 - small)
    shares = [chip.moved(size * MIB) / (size * MIB) for size in (1, 4, 15, 60, 112, 200)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_machines_without_a_chip_hold_nothing():
    assert held(0, "user").moved(3.0) == 3.0
