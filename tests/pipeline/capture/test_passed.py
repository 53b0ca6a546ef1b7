"""Results of a loss that are its leaves: found through calls and loops, and kept out of the passes of a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.pipeline.programs.slots import Holds
from spmdctx.trace.build.jaxprs.passed import passed_inputs

X, W = jnp.ones((4, 4)), jnp.ones((3, 4, 4))


def rows_and_carry(x, w):
    (final, fixed), rows = jax.lax.scan(lambda c, one: ((jnp.sin(c[0] @ one), c[1]), (one, one + 1)), (x, x), w)
    return final, fixed, *rows


def swapped(x, w):
    (one, other), _ = jax.lax.scan(lambda c, _: ((c[1], c[0]), None), (x, w[0]), None, length=3)
    return one, other


@jax.custom_vjp
def kept(x, w):
    return x, w


kept.defvjp(lambda x, w: ((x, w), None), lambda _, given: given)


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (lambda x, w: (w, x + 1, x, 3.0), [1, None, 0, None]),
        (jax.checkpoint(lambda x, w: (jnp.sin(x), w)), [None, 1]),
        (jax.jit(lambda x, w: jax.checkpoint(jax.jit(lambda a, b: (b, a)))(x, w)), [1, 0]),
        (rows_and_carry, [None, 0, 1, None]),
        (swapped, [None, None]),
        (kept, [0, 1]),
    ],
    ids=["plain", "checkpoint", "nested", "scan", "swapped_carry", "custom_vjp"],
)
def test_inputs_are_followed_through_calls_and_loops(program, wanted):
    assert passed_inputs(jax.make_jaxpr(program)(X, W)) == wanted


class Deep(nnx.Module):
    def __init__(self, rngs, *, is_scanned):
        self.is_scanned = is_scanned
        if is_scanned:
            self.layers = nnx.vmap(lambda own: nnx.Linear(8, 8, rngs=own), in_axes=(0,), out_axes=0)(rngs.split(4))
        else:
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        step = nnx.remat(lambda x, layer: x + jnp.tanh(layer(x)))
        if self.is_scanned:
            x = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            for layer in self.layers:
                x = step(x, layer)
        self.seen[...] += 1
        return x


def train(model, optimizer, batch):
    def loss(model, batch):
        return jnp.mean((model(batch) - 1) ** 2)

    value, gradient = spmdctx.value_and_grad(spmdctx.PipelineCell(loss, micro_size=4))(model, batch)
    optimizer.update(model, gradient)
    return value


def made(is_scanned):
    model = Deep(nnx.Rngs(0), is_scanned=is_scanned)
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


@pytest.mark.parametrize("is_scanned", [False, True], ids=["layers", "scanned"])
def test_weights_that_nnx_gives_back_are_no_results_of_micro_batches(is_scanned):
    batch = jax.random.normal(jax.random.key(1), (16, 8))
    step = spmdctx.parallel(train, parallel_mode="auto_parallel", pipeline_stages=2, device_num=4)
    entry = step._entry_of((*made(is_scanned), batch), {})
    results = [
        (slot.number, var.aval.shape)
        for chunk in entry.pipeline.planned
        for task in chunk.tasks.values()
        for slot, var in zip(task.program.outputs, task.program.jaxpr.jaxpr.outvars, strict=True)
        if slot.holds is Holds.RESULT
    ]
    # The loss, and the count that each micro-batch raises.
    assert sorted(shape for _, shape in results) == [(), ()]
    got, want = made(is_scanned), made(is_scanned)
    for _ in range(2):
        value, wanted = step(*got, batch), train(*want, batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert got[0].seen[...] == 8
    for one, other in zip(jax.tree.leaves(nnx.state(got[0], nnx.Param)), jax.tree.leaves(nnx.state(want[0], nnx.Param)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_leaf_that_the_loss_does_not_read_has_a_gradient_of_zeros():
    params = {"up": jnp.eye(8), "down": 2 * jnp.eye(8), "unused": jnp.ones((3, 8))}
    batch = jax.random.normal(jax.random.key(1), (16, 8))

    def step(params, batch):
        def loss(params, batch):
            x = jax.checkpoint(lambda x, up, unread: jnp.tanh(x @ up) + 0 * unread.shape[0])(batch, params["up"], params["unused"])
            return jnp.mean((x @ params["down"]) ** 2)

        value, gradient = spmdctx.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda own, grad: own - 0.1 * grad, params, gradient), value, gradient["unused"]

    run = spmdctx.parallel(step, parallel_mode="auto_parallel", pipeline_stages=2, device_num=4, grad_accumulation_step=4)
    got, want = run(params, batch), step(params, batch)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_leaf_that_is_given_as_an_aux_result_comes_back_as_it_was():
    params = {"up": jnp.eye(8), "down": 2 * jnp.eye(8), "unused": jnp.ones(3)}
    batch = jax.random.normal(jax.random.key(1), (16, 8))

    def step(params, batch):
        def loss(params, batch):
            return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2), (params["down"], params["unused"])

        (value, aux), gradient = spmdctx.value_and_grad(loss, has_aux=True)(params, batch)
        return jax.tree.map(lambda own, grad: own - 0.1 * grad, params, gradient), value, aux

    run = spmdctx.parallel(step, parallel_mode="auto_parallel", pipeline_stages=2, device_num=4, grad_accumulation_step=4)
    *_, (down, unused) = run(params, batch)
    np.testing.assert_array_equal(down, params["down"])
    np.testing.assert_array_equal(unused, params["unused"])
