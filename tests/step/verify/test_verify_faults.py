"""Planted faults: whatever a wrong lowering does to a step, `verify` finds it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdctx
from spmdctx.step.entry import Entry

DEVICES, BATCH, SEQ, WIDTH, HEADS, EXPERTS = 8, 16, 8, 16, 2, 4


def numbers(*shape, seed=0, size=1.0):
    return (size * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def attention(fault):
    """A layer of masked attention with dropout, under Adam with clipping, whose key bias has no true gradient."""

    def loss(params, x, y, key):
        query, keys, value = (x @ params[name] + params[f"{name}_bias"] for name in ("query", "key", "value"))
        if fault == "a bias is added on every device":
            value = value + 7 * params["value_bias"]
        heads = [part.reshape(BATCH, SEQ, HEADS, -1) for part in (query, keys, value)]
        scores = jnp.einsum("bqhd,bkhd->bhqk", heads[0], heads[1]) / np.sqrt(WIDTH / HEADS)
        if fault != "the mask is lost":
            scores = jnp.where(np.tril(np.ones((SEQ, SEQ), bool)), scores, -1e9)
        weights = jax.nn.softmax(scores)
        if fault == "a softmax is normalised by half of its keys":
            weights = weights / weights[..., : SEQ // 2].sum(-1, keepdims=True)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads[2]).reshape(x.shape)
        if fault == "the heads of one device are lost":
            mixed = mixed.at[..., : WIDTH // HEADS].set(0)
        if fault == "devices share one dropout key":
            kept = jnp.tile(jax.random.bernoulli(key, 0.8, (BATCH // DEVICES, SEQ, WIDTH)), (DEVICES, 1, 1))
        else:
            kept = jax.random.bernoulli(jax.random.fold_in(key, 1) if fault == "a key is folded" else key, 0.8, x.shape)
        out = jnp.where(kept, mixed / 0.8, 0) @ params["out"]
        if fault == "results move by one row":
            out = jnp.roll(out, 1, axis=1)
        if fault == "the shards of the batch are permuted":
            out = jnp.roll(out, BATCH // DEVICES, axis=0)
        errors = (out - y) ** 2
        if fault == "a shard of the batch is dropped":
            errors = errors[: -BATCH // DEVICES]
        return errors.sum() / errors.size * (1.001 if fault == "the loss is scaled by 1.001" else 1)

    def step(params, state, x, y, key):
        value, gradients = jax.value_and_grad(loss)(params, x, y, key)
        if fault == "no gradient is summed over devices":
            gradients = jax.grad(loss)(params, *(jnp.tile(part[: BATCH // DEVICES], (DEVICES, 1, 1)) for part in (x, y)), key)
        gradients = gradients_of(fault, gradients)
        norm = optax.tree.norm(gradients)
        if fault == "gradients are clipped by a local norm":
            norm = norm / np.sqrt(DEVICES)
        gradients = jax.tree.map(lambda gradient: gradient / jnp.maximum(norm, 0.5), gradients)
        optimizer = optax.adam(1e-3, eps=1e-7 if fault == "epsilon is ten times too large" else 1e-8)
        updates, new = optimizer.update(gradients, state)
        if fault == "the second moment is stale":
            new = (new[0]._replace(nu=state[0].nu), *new[1:])
        if fault == "the step is counted on every device":
            new = (new[0]._replace(count=state[0].count + DEVICES), *new[1:])
        made = optax.apply_updates(params, updates)
        if fault == "one parameter is not updated":
            made["value_bias"] = params["value_bias"]
        if fault == "an update is applied twice":
            made["out"] = made["out"] + updates["out"]
        if fault == "two parameters change places":
            made["query"], made["key"] = made["key"], made["query"]
        return made, new, value

    params = {name: numbers(WIDTH, WIDTH, seed=index, size=0.3) for index, name in enumerate(("query", "key", "value", "out"))}
    params |= {f"{name}_bias": np.zeros(WIDTH, np.float32) for name in ("query", "key", "value")}
    batch = numbers(BATCH, SEQ, WIDTH, seed=5), numbers(BATCH, SEQ, WIDTH, seed=6)
    return step, (params, optax.adam(1e-3).init(params), *batch, jax.random.key(0))


def gradients_of(fault, gradients):
    """Gradients that are not summed as they should be."""
    if fault == "a gradient is divided by the devices":
        return {**gradients, "query": gradients["query"] / DEVICES}
    if fault == "a small gradient is off by a thousandth":
        return {**gradients, "query_bias": gradients["query_bias"] * 1.001}
    if fault == "one value of a gradient is wrong":
        return {**gradients, "out": gradients["out"].at[3, 5].multiply(1.01)}
    if fault == "one gradient is summed twice":
        return {**gradients, "value": gradients["value"] * DEVICES}
    if fault == "gradients are reduced in bfloat16":
        return jax.tree.map(lambda gradient: gradient.astype(jnp.bfloat16).astype(np.float32), gradients)
    return gradients


def vision(fault):
    """A convolution with normalisation over the batch, and experts, in micro-batches, under momentum."""

    def convolve(kernel, x):
        where = "SAME"
        if fault == "the halo of a convolution is lost":
            blocks = [jax.lax.conv_general_dilated(part, kernel, (1, 1), where, dimension_numbers=DIMS) for part in jnp.split(x, 2, axis=1)]
            return jnp.concatenate(blocks, axis=1)
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), where, dimension_numbers=DIMS)

    def loss(params, x, labels):
        hidden = convolve(params["kernel"], x) + params["bias"]
        axes = (1, 2) if fault == "statistics are each device's own" else (0, 1, 2)
        mean, variance = hidden.mean(axes, keepdims=True), hidden.var(axes, keepdims=True)
        hidden = jax.nn.relu((hidden - mean) * jax.lax.rsqrt(variance + 1e-5)).mean((1, 2))
        chosen = jnp.argmax(hidden @ params["router"], -1)
        if fault == "a shard of labels is shifted":
            labels = labels.at[:2].set((labels[:2] + 1) % 10)
        gates = jax.nn.one_hot(chosen, EXPERTS)
        if fault == "an expert is lost":
            gates = gates.at[:, jnp.argmax(gates.sum(0))].set(0)
        logits = jnp.einsum("be,bd,edf->bf", gates, hidden, params["experts"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (mean.mean((0, 1, 2)), chosen)

    def step(params, velocity, x, labels):
        def micro_batch(total, part):
            (value, (mean, chosen)), gradients = jax.value_and_grad(loss, has_aux=True)(params, *part)
            return jax.tree.map(jnp.add, total, gradients), (value, mean, chosen)

        parts = tuple(value.reshape(2, -1, *value.shape[1:]) for value in (x, labels))
        if fault == "a micro-batch is lost":
            parts = jax.tree.map(lambda part: part[:1].repeat(2, 0), parts)
        gradients, (values, means, chosen) = jax.lax.scan(micro_batch, jax.tree.map(jnp.zeros_like, params), parts)
        if fault == "micro-batches are summed and not averaged":
            gradients = jax.tree.map(lambda gradient: 2 * gradient, gradients)
        if fault == "a tie of the router is decided otherwise":
            chosen = chosen.at[0, 0].set((chosen[0, 0] + 1) % EXPERTS)
        if fault == "statistics miss one micro-batch":
            means = means[:1]
        if fault == "gradients are summed over devices twice":
            gradients = jax.tree.map(lambda gradient: DEVICES * gradient, gradients)
        velocity = jax.tree.map(lambda old, gradient: 0.9 * old + gradient / 2, velocity, gradients)
        made = jax.tree.map(lambda param, change: param - 0.1 * change, params, velocity)
        if fault == "a wrong slice is updated":
            made["experts"] = params["experts"].at[1:].set(made["experts"][:-1])
        if fault == "a result is not a number on one device":
            made["bias"] = made["bias"].at[0].set(np.nan)
        return made, velocity, values.mean(), means.mean(0), chosen

    params = {"kernel": numbers(3, 3, 3, 8, seed=1, size=0.3), "bias": np.zeros(8, np.float32)}
    params |= {"router": numbers(8, EXPERTS, seed=2), "experts": numbers(EXPERTS, 8, 10, seed=3, size=0.3)}
    batch = numbers(BATCH, 8, 8, 3, seed=4), np.random.default_rng(5).integers(0, 10, BATCH).astype(np.int32)
    return step, (params, jax.tree.map(np.zeros_like, params), *batch)


DIMS = ("NHWC", "HWIO", "NHWC")

ATTENTION = (
    "a bias is added on every device",
    "the mask is lost",
    "a softmax is normalised by half of its keys",
    "the heads of one device are lost",
    "devices share one dropout key",
    "a key is folded",
    "results move by one row",
    "the shards of the batch are permuted",
    "a shard of the batch is dropped",
    "the loss is scaled by 1.001",
    "no gradient is summed over devices",
    "gradients are clipped by a local norm",
    "epsilon is ten times too large",
    "the second moment is stale",
    "the step is counted on every device",
    "one parameter is not updated",
    "an update is applied twice",
    "two parameters change places",
    "a gradient is divided by the devices",
    "a small gradient is off by a thousandth",
    "one value of a gradient is wrong",
    "one gradient is summed twice",
    "gradients are reduced in bfloat16",
)

VISION = (
    "the halo of a convolution is lost",
    "statistics are each device's own",
    "a shard of labels is shifted",
    "an expert is lost",
    "a micro-batch is lost",
    "micro-batches are summed and not averaged",
    "gradients are summed over devices twice",
    "a tie of the router is decided otherwise",
    "statistics miss one micro-batch",
    "a wrong slice is updated",
    "a result is not a number on one device",
)


@functools.cache
def right(program):
    """The step of a program without a fault, whose noise is measured by one program for all faults."""
    step, args = program("")
    return spmdctx.parallel(step, parallel_mode="auto_parallel", dataset_strategy="data_parallel", topology="cpu"), args


def wrong(program, fault):
    """A compiled program with a fault, over flat arguments."""
    step, args = program(fault)

    def flat(leaves):
        return jax.tree.leaves(step(*jax.tree.unflatten(jax.tree.structure(args), leaves)))

    return lambda _, leaves: jax.jit(flat).lower(leaves).compile({"xla_backend_optimization_level": 0})(leaves)


@pytest.mark.parametrize("program", [attention, vision])
def test_a_step_without_a_fault_is_the_same(program):
    step, args = right(program)
    report = step.verify(*args)
    assert report.ok, report


@pytest.mark.parametrize(
    ("program", "fault"),
    [*((attention, fault) for fault in ATTENTION), *((vision, fault) for fault in VISION)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_fault_is_found(monkeypatch, program, fault):
    step, args = right(program)
    monkeypatch.setattr(Entry, "execute", wrong(program, fault))
    report = step.verify(*args)
    assert not report.ok, report
