"""What the fusions of a traced step read, write and compute, and at which op."""

import jax
import jax.numpy as jnp
import pytest

from tests.road import ops, trace

X, W = jnp.ones((512, 256)), jnp.ones((256, 512))
WIDE, NARROW = 4.0, 2.0


def is_inside(op):
    """Whether an op is computed in another's fusion."""
    return op.work is not None and op.work.moved == ()


def test_what_a_chain_reads_is_read_by_its_product():
    program = trace(lambda x, w: x @ w.astype(jnp.bfloat16), X.astype(jnp.bfloat16), W)
    (cast,), (dot,) = ops(program, "convert_element_type"), ops(program, "dot_general")
    assert is_inside(cast)
    assert dot.work.moved == (NARROW, WIDE, NARROW)


def test_what_follows_a_product_reads_and_writes_with_it():
    program = trace(lambda x, w, y: jnp.exp(x @ w) * y, X, W, X @ W)
    (dot,) = ops(program, "dot_general")
    assert all(is_inside(op) for name in ("exp", "mul") for op in ops(program, name))
    assert dot.work.moved == (WIDE, WIDE, 2 * WIDE)


def test_arithmetic_is_told_of_the_main_op():
    program = trace(lambda x, w: jnp.tanh(x + 1.0) @ w, X, W)
    (dot,), (add,) = ops(program, "dot_general"), ops(program, "add")
    assert dot.work.vector_flops == 11 * X.size
    assert 0 < add.work.vector_flops < 0.1 * X.size


def test_a_tensor_that_a_chain_reads_twice_is_read_once():
    program = trace(lambda x, w: (x * jnp.sin(x)) @ w, X, W)
    assert ops(program, "dot_general")[0].work.moved[0] == WIDE


def test_a_small_tensor_is_read_by_its_size():
    program = trace(lambda x, w, scale: (x * scale) @ w, X, W, jnp.ones((256,)))
    assert ops(program, "dot_general")[0].work.moved[0] == pytest.approx(WIDE * (1 + 1 / 512))


def test_a_reduction_is_computed_with_the_tensor_it_reads():
    program = trace(lambda x, w: ((y := x @ w + 1.0), jnp.square(y).sum(1)), X, W)
    (dot,), (total,) = ops(program, "dot_general"), ops(program, "reduce_sum")
    assert is_inside(total)
    assert dot.work.moved[2] == pytest.approx(WIDE * (1 + 1 / 512))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: jnp.exp(y - y.max(1, keepdims=True)).sum(1),
        lambda y: (y * X.T).sum(1),
    ],
    ids=["what an earlier reduction must end for", "two tensors"],
)
def test_a_reduction_that_needs_more_is_apart(function):
    program = trace(lambda x: ((y := x.T + 1.0), function(y)), X)
    assert not is_inside(ops(program, "reduce_sum")[0])


def test_a_long_chain_of_values_that_are_read_several_times_is_walked_once():
    def step(x, w):
        y = x @ w
        for _ in range(400):
            y = y * (1.5 - 0.5 * y * y)
        return y.sum()

    program = trace(step, X, W)  # 3 ** 400 ways lead from the sum to the product
    (total,) = ops(program, "reduce_sum")
    assert total.work.moved == (WIDE, WIDE)


def test_a_reduction_in_another_computation_is_apart():
    def step(x):
        y = x + 1.0
        return y, jax.checkpoint(lambda y: jnp.square(y).sum(1))(y)

    assert not is_inside(ops(trace(step, X), "reduce_sum")[0])


def test_a_widened_result_is_kept_narrow_for_several_readers():
    def step(x, w):
        wide = (x @ w).astype(jnp.float32)
        return jnp.sin(wide), jnp.cos(wide)

    program = trace(step, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    assert ops(program, "dot_general")[0].work.moved[2] == NARROW
    assert [ops(program, name)[0].work.moved for name in ("sin", "cos")] == [(NARROW, WIDE), (0.0, WIDE)]


def test_parts_of_a_tensor_are_read_as_such():
    program = trace(lambda x, w: x[:, :128] @ w[:128], X, W)
    assert ops(program, "dot_general")[0].work.moved[:2] == (WIDE, WIDE)


def test_a_loop_takes_its_slices_on_its_own():
    program = trace(lambda xs: jax.lax.scan(lambda carry, x: (carry + jnp.sin(x), None), xs[0], xs)[0], X)
    assert {op.work for op in ops(program, "scan.enter")} == {None}
