"""What a forward pass keeps lies in memory as its compiler chooses, and the backward pass reads it so."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.pipeline.run import compiled as compiled_module
from tests.audit.compile_only import need_tpu
from tests.step.pipelined import small

HEADS, TOKENS, WIDTH = 4, 256, 256


def platforms(monkeypatch, *names):
    monkeypatch.setattr(compiled_module, "LAYOUTS_ON", frozenset(names))


def turned(formats):
    return sorted(
        own.layout.major_to_minor
        for own in jax.tree.leaves(formats)
        if own.layout is not None and own.layout.major_to_minor != tuple(range(len(own.layout.major_to_minor)))
    )


def turning_loss(params, batch):
    x = batch["x"]
    for weight in params["layers"]:
        x = jnp.sin((weight @ x.T).T)
    return jnp.mean((x - batch["y"]) ** 2)


def descent(loss):
    def step(params, batch):
        gradients = spmdctx.grad(loss)(params, batch)
        return jax.tree.map(lambda old, new: old - jnp.asarray(0.1, old.dtype) * new, params, gradients)

    return step


def turning(scheduler):
    keys = jax.random.split(jax.random.key(3), 4)
    options = {
        "devices": jax.devices()[:4],
        "pipeline_stages": 2,
        "grad_accumulation_step": 4,
        "pipeline_config": {"pipeline_scheduler": scheduler},
    }
    step = spmdctx.parallel(descent(turning_loss), parallel_mode="auto_parallel", **options)
    return step, ({"layers": [jax.random.normal(key, (16, 16)) / 4 for key in keys]}, small.batch_of(32))


def trained(scheduler):
    step, (params, batch) = turning(scheduler)
    for _ in range(2):
        params = step(params, batch)
    return step, jax.tree.leaves(params)


@pytest.mark.parametrize(
    ("scheduler", "reader", "maker"),
    [("1f1b", "backward0", "forward0"), ("zero_bubble_h1", "weight0", "forward0"), ("zero_bubble_h1", "weight1", "input1")],
)
def test_readers_take_what_is_kept_as_its_maker_lays_it_out(monkeypatch, scheduler, reader, maker):
    platforms(monkeypatch)
    _, wanted = trained(scheduler)
    platforms(monkeypatch, "cpu")
    step, found = trained(scheduler)
    lowered = step.lower(*turning(scheduler)[1])
    made = turned(lowered[maker].compile().output_formats)
    assert made
    assert set(made) <= set(turned(lowered[reader].compile().input_formats))
    assert all(np.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in zip(found, wanted, strict=True))


def test_a_call_compiles_no_program_that_was_lowered_with_chosen_layouts(monkeypatch, caplog):
    platforms(monkeypatch, "cpu")
    step, args = turning("1f1b")
    step.lower(*args).compile()
    with jax.log_compiles():
        step(*args)
    assert not [record.message for record in caplog.records if "Compiling jit(pipeline_" in record.message]


def attention_loss(params, batch):
    x = batch["x"]
    for layer in params["layers"]:
        q, k, v = (jnp.reshape(x @ layer[name], (*x.shape[:2], HEADS, -1)) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + mixed.reshape(x.shape) @ layer["o"]
    return jnp.mean(x.astype(jnp.float32) ** 2)


def copied_bytes():
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16")
    params = {"layers": [dict.fromkeys("qkvo", weight)] * 2}
    step = spmdctx.parallel(
        descent(attention_loss),
        **{"devices": need_tpu()[:2], "parallel_mode": "auto_parallel", "pipeline_stages": 2, "grad_accumulation_step": 2},
    )
    lowered = step.lower(params, {"x": jax.ShapeDtypeStruct((32, TOKENS, WIDTH), "bfloat16")})
    texts = [lowered[name].compile().as_text() for name in ("forward1", "backward1")]
    return sum(
        np.prod([int(size) for size in dims.split(",")]) * {"f32": 4, "bf16": 2}[kind]
        for text in texts
        for kind, dims in re.findall(r"= (f32|bf16)\[([\d,]+)\]\S* copy\(", text)
    )


def test_tpu_copies_less_of_what_attention_keeps(monkeypatch):
    free = copied_bytes()
    platforms(monkeypatch)
    assert free < copied_bytes() / 2
