"""A step whose layers follow two plans where memory is short: it fits, compiles as planned, and computes what one device does."""

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx

LAYERS, WIDTH, ROWS = 60, 64, 256


def train(weights, inputs, targets):
    def loss(weights):
        x = inputs
        for own in weights:
            x = x + jnp.tanh(x @ own["up"]) @ own["down"]
        return jnp.mean((x - targets) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda own, gradient: own - 0.1 * gradient, weights, gradients), value


def test_layers_that_follow_two_plans_fit_and_compute_what_one_device_does():
    with jax.enable_x64(True):
        random = np.random.default_rng(0)

        def array(*shape):
            return jnp.asarray(random.normal(size=shape) / 8, jnp.float64)

        weights = [{"up": array(WIDTH, 4 * WIDTH), "down": array(4 * WIDTH, WIDTH)} for _ in range(LAYERS)]
        arguments = (weights, array(ROWS, WIDTH), array(ROWS, WIDTH))

        def parallel(memory_bytes):
            devices = jax.devices()[:4]
            return spmdctx.parallel(train, parallel_mode="auto_parallel", devices=devices, topology="h100", memory_bytes=memory_bytes)

        free = parallel(2**50).plan(*arguments)
        budget = int(0.95 * free.safe_memory_bytes)
        step = parallel(budget)
        plan = step.plan(*arguments)
        (note,) = [note for note in plan.notes if "so that the plan fits" in note]
        share = float(note.partition("%")[0]) / 100
        assert 0 < share < 1
        assert plan.safe_memory_bytes <= budget
        assert free.cost.total_s < plan.cost.total_s
        assert plan.lower_bound_s <= plan.cost.total_s
        # Layers of both kinds.
        assert len({str(row.sharding) for row in plan.inputs if row.path.startswith("weights")}) > 1
        assert step.audit(*arguments).ok
        for own, other in zip(jax.tree.leaves(step(*arguments)), jax.tree.leaves(jax.jit(train)(*arguments)), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-12)
