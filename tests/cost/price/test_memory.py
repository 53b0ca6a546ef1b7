"""Peaks of passes that leave gradients unreduced: products wait for nothing, unless they hide gathers."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.cost.price import memory

WIDTH, HEADS, TOKENS = 512, 8, 256


def scaled(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


@jax.checkpoint
def layer(own, x):
    q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in jnp.split(scaled(x) @ own["qkv"] + own["b"], 3, -1))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    x = x + own["g"] * (jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ own["o"])
    return x + jax.nn.gelu(scaled(x) @ own["u"]) @ own["d"]


def step(params, batch):
    def loss(params, batch):
        x = batch["x"] @ params["in"] + params["pos"]
        for own in params["layers"]:
            x = layer(own, x)
        return jnp.mean((x.mean(1) @ params["head"] - batch["y"]) ** 2)

    return jax.tree.map(lambda old, new: old - 0.1 * new, params, spmdctx.grad(loss)(params, batch))


def stage_peaks(topology, mode="auto_parallel"):
    def of(*shape):
        return jax.ShapeDtypeStruct(shape, "float32")

    sizes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "b": (3 * WIDTH,),
        "g": (WIDTH,),
        "o": (WIDTH, WIDTH),
        "u": (WIDTH, 4 * WIDTH),
        "d": (4 * WIDTH, WIDTH),
    }
    layers = [{name: of(*shape) for name, shape in sizes.items()} for _ in range(6)]
    params = {"layers": layers, "in": of(192, WIDTH), "pos": of(TOKENS, WIDTH), "head": of(WIDTH, 100)}
    options = {"topology": topology, "device_num": 4, "pipeline_stages": 2, "grad_accumulation_step": 2, "donate_argnums": 0}
    plan = spmdctx.plan(step, params, {"x": of(64, TOKENS, 192), "y": of(64, 100)}, parallel_mode=mode, **options)
    return [stage.memory_bytes for stage in plan.stages]


def test_no_product_waits_in_a_stage_whose_sums_wait_for_the_last_micro_batch(monkeypatch):
    known, counted = stage_peaks("tpu-v5p"), memory.compiled_memory
    monkeypatch.setattr(memory, "compiled_memory", lambda *facts, is_split=True: counted(*facts, is_split=True))
    assert all(peak > 1.5 * own for peak, own in zip(stage_peaks("tpu-v5p"), known, strict=True))


def modulated_peaks(topology):
    """Peaks of two stages, of which the first gathers the small products by which its layers scale and shift."""

    @jax.checkpoint
    def modulated(own, x, about):
        shifts = jnp.split((about @ own["m"])[:, None], 3, -1)
        return x + shifts[2] * (jax.nn.gelu((x * (1 + shifts[0]) + shifts[1]) @ own["u"]) @ own["d"])

    def loss(params, batch):
        x, about = batch
        about = jax.nn.silu(about @ params["t"])
        for own in params["layers"]:
            x = modulated(own, x, about)
        return jnp.mean(x**2)

    def descend(params, batch):
        return jax.tree.map(lambda old, new: old - 0.1 * new, params, spmdctx.grad(loss)(params, batch))

    sizes = {"m": (1024, 3072), "u": (1024, 4096), "d": (4096, 1024)}
    layers = [{name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in sizes.items()}] * 4
    params = {"t": jax.ShapeDtypeStruct((1024, 1024), "float32"), "layers": layers}
    batch = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 512, 1024), (64, 1024)))
    options = {"topology": topology, "device_num": 8, "pipeline_stages": 2, "grad_accumulation_step": 4, "donate_argnums": 0}
    return [stage.memory_bytes for stage in spmdctx.plan(descend, params, batch, parallel_mode="auto_parallel", **options).stages]


@pytest.mark.parametrize(("topology", "hides"), [("tpu-v5e", True), ("tpu-v6e", False)])
def test_products_wait_in_such_a_stage_where_the_chip_hides_gathers_behind_them(topology, hides, monkeypatch):
    known, counted = modulated_peaks(topology), memory.compiled_memory
    monkeypatch.setattr(memory, "compiled_memory", lambda *facts, is_split=True: counted(*facts, is_split=False))
    assert (known[0] > modulated_peaks(topology)[0]) == hides


def test_gradients_wait_for_sums_on_gpu_where_devices_communicate(monkeypatch):
    @jax.checkpoint
    def perceptron(own, x):
        return x + jnp.tanh(x @ own["up"]) @ own["down"]

    def loss(params, x):
        for own in params["layers"]:
            x = perceptron(own, x)
        return jnp.mean((x @ params["out"]) ** 2)

    def descend(params, batch):
        return jax.tree.map(lambda old, new: old - 0.1 * new, params, spmdctx.grad(loss)(params, batch))

    def peaks():
        layers = [{name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in {"up": (512, 2048), "down": (2048, 512)}.items()}] * 8
        args = {"out": jax.ShapeDtypeStruct((512, 1024), "float32"), "layers": layers}, jax.ShapeDtypeStruct((1024, 512), "float32")
        options = {"topology": "h100", "device_num": 4, "pipeline_stages": 2, "grad_accumulation_step": 2, "donate_argnums": 0}
        return [stage.memory_bytes for stage in spmdctx.plan(descend, *args, parallel_mode="auto_parallel", **options).stages]

    known = peaks()
    monkeypatch.setattr(memory, "updates_wait", lambda *_: {})
    assert all(own < peak for own, peak in zip(peaks(), known, strict=True))


def test_without_collectives_gpu_is_planned_in_the_order_of_one_device(monkeypatch):
    """But for gradients, which wait for barriers between the layers."""

    def first_peak():
        return stage_peaks("h100", "semi_auto_parallel")[0]

    known = first_peak()
    monkeypatch.setattr(memory, "barriers_wait", lambda *_: {})
    early = first_peak()
    real = memory.compiled_memory
    monkeypatch.setattr(memory, "compiled_memory", lambda *args, is_split: real(*args, is_split=True))
    assert early < known < first_peak()
