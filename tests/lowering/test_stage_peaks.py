"""The planned peaks of a pipeline's stages are those that the compiler for GPU assigns, on one device for each stage and on two."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from tests.audit.compile_only import need_gpu
from tests.pipeline.losses import decoder, loss


def step(params, batch, *, remat):
    gradients = spmdctx.grad(partial(loss, remat=remat))(params, batch)
    return jax.tree.map(lambda own, gradient: own - 0.1 * gradient, params, gradients)


@pytest.mark.parametrize(
    ("devices", "stacked", "remat", "times", "length"), [(4, False, True, 8, 1024), (2, True, False, 16, 128), (4, False, False, 16, 256)]
)
def test_compiled_peaks_of_stages_are_the_planned_ones(devices, stacked, remat, times, length):
    options = {"parallel_mode": "auto_parallel", "pipeline_stages": 2, "grad_accumulation_step": 2, "donate_argnums": 0}
    run = spmdctx.parallel(partial(step, remat=remat), devices=need_gpu(devices), **options)
    size = 2**13 // length
    args = jax.eval_shape(
        lambda: (decoder(jax.random.key(0), 2, tied=False, stacked=stacked, times=times), (jnp.zeros((size, length), int),) * 2)
    )
    lowered, stage = run.lower(*args), run.plan(*args).stages[0]
    memory = lowered["backward0"].compile().memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert stage.memory_bytes == pytest.approx(stage.live_bytes["backward0"] + beside, rel=0.12)


@pytest.mark.parametrize("remat", [True, False])
def test_gradients_that_a_scan_stacks_unreduced_take_the_bytes_of_float32(remat):
    def loss(layers, batch):
        def layer(x, own):
            return x + jnp.tanh(x @ own["up"]) @ own["down"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, batch, layers)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(layers, batch):
        return jax.tree.map(lambda own, gradient: own - 0.1 * gradient, layers, spmdctx.grad(loss)(layers, batch))

    options = {"parallel_mode": "semi_auto_parallel", "pipeline_stages": 2, "grad_accumulation_step": 2, "donate_argnums": 0}
    run = spmdctx.parallel(step, devices=need_gpu(4), **options)
    layers = {name: jax.ShapeDtypeStruct((8, *shape), "bfloat16") for name, shape in {"up": (512, 2048), "down": (2048, 512)}.items()}
    args = layers, jax.ShapeDtypeStruct((8192, 512), "bfloat16")
    stage, memory = run.plan(*args).stages[0], run.lower(*args)["backward0"].compile().memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert stage.memory_bytes == pytest.approx(stage.live_bytes["backward0"] + beside, rel=0.05)


@pytest.mark.parametrize(("rows", "dtype"), [(32768, "bfloat16"), (8192, "float32")])
def test_recomputed_layers_keep_nothing_for_gradients_that_barriers_await(rows, dtype):
    """Planned as if these were made at the end of the pass, such stages were said to take twice what they do."""

    @jax.checkpoint
    def layer(own, x):
        return x + jnp.tanh(x @ own["up"]) @ own["down"]

    def loss(layers, x):
        for own in layers:
            x = layer(own, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(layers, batch):
        return jax.tree.map(lambda own, gradient: own - 0.1 * gradient, layers, spmdctx.grad(loss)(layers, batch))

    options = {"parallel_mode": "semi_auto_parallel", "pipeline_stages": 2, "grad_accumulation_step": 2, "donate_argnums": 0}
    run = spmdctx.parallel(step, devices=need_gpu(4), **options)
    layer_types = {"up": jax.ShapeDtypeStruct((512, 2048), dtype), "down": jax.ShapeDtypeStruct((2048, 512), dtype)}
    args = [layer_types] * 8, jax.ShapeDtypeStruct((rows, 512), dtype)
    lowered = run.lower(*args)
    for number, stage in enumerate(run.plan(*args).stages):
        memory = lowered[f"backward{number}"].compile().memory_analysis()
        beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert stage.memory_bytes == pytest.approx(stage.live_bytes[f"backward{number}"] + beside, rel=0.07)
