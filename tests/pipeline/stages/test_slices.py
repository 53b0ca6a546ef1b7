"""Stacked layers: each chunk has those that it runs as leaves of its own, and what cannot be sliced stays whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from tests.pipeline import losses


def planned(loss, params, batch):
    """The planned pipeline of a plain step of two stages, and the step."""

    def step(params, batch):
        value, gradient = spmdctx.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda own, grad: own - 0.1 * grad, params, gradient), value

    run = spmdctx.parallel(step, parallel_mode="auto_parallel", pipeline_stages=2, grad_accumulation_step=2)
    return run._entry_of((params, batch), {}).pipeline, run, step


def layers_of(pipeline):
    paths = pipeline.step.loss.paths
    return [sorted(paths[leaf] for leaf in chunk.leaves if "layers" in paths[leaf]) for chunk in pipeline.chunks]


def test_each_chunk_has_its_layers_and_the_sums_of_their_gradients():
    params, batch = losses.decoder(jax.random.key(0), 5, stacked=True), losses.batch(jax.random.key(1), 16)
    pipeline, *_ = planned(losses.loss, params, batch)
    first, second = layers_of(pipeline)
    cut = int(first[0].partition(":")[2][:-1])
    assert all(path.endswith(f"[0:{cut}]") for path in first)
    assert all(path.endswith(f"[{cut}:5]") for path in second)
    assert len(first) == len(second) == 9
    for number, chunk in enumerate(pipeline.planned):
        shapes = {chunk.passes.sum_of(leaf).shape[0] for leaf in chunk.passes.weights if "layers" in pipeline.step.loss.paths[leaf]}
        assert shapes == {cut if number == 0 else 5 - cut}


@pytest.mark.parametrize("reads_all", [False, True])
def test_casts_come_after_slices_and_what_is_read_as_a_whole_stays(reads_all):
    def loss(params, batch):
        words, targets = batch
        x = params["embed"][words]
        cast = params["layers"].astype(jnp.float32)
        x, _ = jax.lax.scan(lambda x, own: (x + jnp.tanh(x @ own), None), x, cast)
        value = jnp.mean((x - params["embed"][targets]) ** 2)
        return value + jnp.sum(params["layers"] ** 2) if reads_all else value

    with jax.enable_x64(True):
        width = losses.WIDTH
        params = {"embed": jnp.ones((losses.WORDS, width), jnp.float32), "layers": jax.random.normal(jax.random.key(0), (4, width, width))}
        params["embed"] = jax.random.normal(jax.random.key(1), (losses.WORDS, width), jnp.float32)
        batch = losses.batch(jax.random.key(1), 16)
        pipeline, run, step = planned(loss, params, batch)
        got, want = run(params, batch), jax.jit(step)(params, batch)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-6)
    sliced = [path for own in layers_of(pipeline) for path in own if "[" in path]
    assert len(sliced) == (0 if reads_all else 2)
    assert any("read as a whole too" in note for note in pipeline.notes) == reads_all
    assert not any("Between steps" in note for note in pipeline.notes)
    assert [own.is_at_home for own in pipeline.stacks] == ([] if reads_all else [True, True])
