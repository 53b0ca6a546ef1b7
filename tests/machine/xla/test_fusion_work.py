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
    assert is_inside(ops(program, "reduce_sum")[0])


@pytest.mark.parametrize(("early", "is_apart"), [(True, False), (False, True)], ids=["made before", "made after"])
def test_a_product_sums_what_it_makes_with_what_was_made_before(early, is_apart):
    def step(x, w):
        other = jnp.sort(w.T @ w) if early else None
        y = x.T @ x
        other = other[:256, :256] if early else jnp.sort(y)
        return y, (y * other).sum(1)

    assert is_inside(ops(trace(step, X, W), "reduce_sum")[0]) != is_apart


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


def loss(x, w, labels, wide):
    logits = (x @ w).astype(wide)
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).sum()


LABELS = jnp.zeros((512,), int)


def test_logits_are_written_twice_by_their_product_and_read_narrow():
    program = trace(lambda x, w: loss(x, w, LABELS, jnp.float32), X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    rows = WIDE / 512
    assert ops(program, "dot_general")[0].work.moved[2] == pytest.approx(NARROW + WIDE + rows)
    assert all(is_inside(op) for name in ("convert_element_type", "reduce_max") for op in ops(program, name))
    assert ops(program, "reduce_sum")[0].work.moved[0] == pytest.approx(NARROW + rows)


@pytest.mark.parametrize(("dtype", "bytes_each"), [(jnp.bfloat16, NARROW), (jnp.float32, WIDE)])
def test_the_gradient_of_logits_is_made_in_the_products_that_read_it(dtype, bytes_each):
    program = trace(jax.grad(lambda x, w: loss(x, w, LABELS, jnp.float32), (0, 1)), X.astype(dtype), W.astype(dtype))
    assert is_inside(ops(program, "scatter-add")[0])
    _, *gradients = ops(program, "dot_general")
    reads = [max(dot.work.moved[:2]) for dot in gradients]
    assert reads == pytest.approx([bytes_each] * 2, rel=0.01)


CHANGED = {
    "scaled": lambda y: 0.7 * y.astype(jnp.float32),
    "biased": lambda y: y.astype(jnp.float32) + jnp.arange(512.0),
    "capped": lambda y: 30 * jnp.tanh(y.astype(jnp.float32) / 30),
    "capped in low precision": lambda y: 30 * jnp.tanh(y / 30),
    "padded": lambda y: jnp.where(jnp.arange(512) < 500, y.astype(jnp.float32), -1e9),
    "capped and padded": lambda y: jnp.where(jnp.arange(512) < 500, 30 * jnp.tanh(y.astype(jnp.float32) / 30), -1e9),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_what_is_made_of_logits_is_written_by_their_product_and_read_narrow(change):
    def step(x, w):
        logits = change(x @ w).astype(jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, LABELS[:, None], -1)[:, 0]).sum()

    program = trace(jax.value_and_grad(step, (0, 1)), X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    made, *gradients = ops(program, "dot_general")
    assert made.work.moved[2] == pytest.approx(NARROW + WIDE, rel=0.01)
    assert ops(program, "reduce_sum")[0].work.moved[0] == pytest.approx(NARROW, rel=0.01)
    assert is_inside(ops(program, "scatter-add")[0])
    assert all(max(dot.work.moved[:2]) <= 1.02 * NARROW for dot in gradients)


def test_a_part_of_a_split_that_is_looked_up_is_not_written_by_the_product():
    def step(x, w):
        first, second = jnp.split((x @ w).astype(jnp.float32), 2, 1)
        return first[LABELS], second

    program = trace(step, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    assert not is_inside(ops(program, "split")[0]) or ops(program, "dot_general")[0].work.moved[2] == 2 * WIDE


def test_a_gradient_of_logits_that_others_read_too_is_written():
    def step(x, w):
        logits = x @ w
        (gradient,) = jax.grad(lambda y: jnp.take_along_axis(y, LABELS[:, None], -1).sum(), (0,))(logits)
        return x.T @ gradient, jnp.sort(gradient)

    program = trace(step, X, W)
    assert ops(program, "scatter-add")[0].work.moved[-1] == WIDE


def test_parts_of_a_tensor_are_read_as_such():
    program = trace(lambda x, w: x[:, :128] @ w[:128], X, W)
    assert ops(program, "dot_general")[0].work.moved[:2] == (WIDE, WIDE)


def test_a_loop_takes_its_slices_on_its_own():
    program = trace(lambda xs: jax.lax.scan(lambda carry, x: (carry + jnp.sin(x), None), xs[0], xs)[0], X)
    assert {op.work for op in ops(program, "scan.enter")} == {None}
