"""State that several parts of a loss share: carried where one chunk has it, refused by name where several would."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import UnsupportedError

WIDTH = 8
pytestmark = pytest.mark.usefixtures("quick_compiler")
X, Y = (jax.random.normal(jax.random.key(seed), (16, WIDTH)) for seed in (0, 1))


class Twice(nnx.Module):
    """Two layers, or four, behind each of which the same statistics are kept."""

    def __init__(self, rngs, mark=None):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm, self.mark = nnx.BatchNorm(WIDTH, rngs=rngs), mark

    def __call__(self, x):
        x = jnp.tanh(self.layers[1](jnp.tanh(self.layers[0](x))))

        def both(x):
            return self.norm(jnp.tanh(self.layers[2](self.norm(x))))

        x = both(x) if self.mark is None else spmdctx.pipeline_stage(both, self.mark)(x)
        return jnp.tanh(self.layers[3](x))


class Scaled(nnx.Module):
    """A network that scales its input by the mean of what its end gave in the batch before."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.mean = nnx.BatchStat(jnp.ones(WIDTH))

    def __call__(self, x):
        x = x * self.mean[...]
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        return x


def stepped(model, **options):
    def step(model, optimizer, x, y):
        loss, gradient = spmdctx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, gradient)
        return loss

    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    value = spmdctx.parallel(step, grad_accumulation_step=4, **options)(model, optimizer, X, Y)
    return value, nnx.to_pure_dict(nnx.state(model))


@pytest.mark.parametrize("model", [Twice, Scaled])
def test_state_that_two_chunks_share_is_refused_by_name(model):
    marks = {Twice: lambda one: spmdctx.pipeline_stage(one.layers[2], 1), Scaled: lambda one: one}
    one = model(nnx.Rngs(0))
    marks[model](one)
    with pytest.raises(UnsupportedError, match=r"(?s)share the state '.*mean.*chunks? 0.*pipeline_stage"):
        stepped(one, parallel_mode="auto_parallel", pipeline_stages=2)


def test_a_mark_keeps_shared_state_on_one_stage():
    got = stepped(Twice(nnx.Rngs(0), mark=1), parallel_mode="auto_parallel", pipeline_stages=2)
    want = stepped(Twice(nnx.Rngs(0)), parallel_mode="stand_alone")
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Recomputed(nnx.Module):
    """Four recomputed layers: nnx.remat returns the state of a layer as the layer left it."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(nnx.remat(lambda layer, x: layer(x))(layer, x))
        return x


def test_weights_that_recomputed_layers_hand_on_are_no_results_of_a_chunk():
    got, want = (
        stepped(Recomputed(nnx.Rngs(0)), parallel_mode="auto_parallel", pipeline_stages=2),
        stepped(Recomputed(nnx.Rngs(0)), parallel_mode="stand_alone"),
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    model = Recomputed(nnx.Rngs(0))

    def step(model, x, y):
        return spmdctx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)

    plan = spmdctx.parallel(step, grad_accumulation_step=4, parallel_mode="auto_parallel", pipeline_stages=2).plan(model, X, Y)
    assert not [leaf.path for leaf in plan.stages[0].tasks["forward0"].outputs if leaf.path.startswith("result")]
