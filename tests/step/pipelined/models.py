"""Small networks of every kind and flavour, whose losses know nothing of a pipeline.

A case is a state, a step over it, and a batch; `step(state, batch)` gives the
next state, or changes it, and the loss with what else the loss gives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import spmdctx

KINDS = ("tied", "untied", "remat", "scanned", "dropout", "batch_norm", "aux")
FLAVOURS = ("pytree", "linen", "nnx")
SCANNED, WIDTH, WIDE, BATCH = 3, 8, 12, 32
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))


class Case(NamedTuple):
    """A state, a step over it and a batch."""

    state: Any
    step: Any
    batch: Any


def case(flavour: str, kind: str, layers: int) -> Case:
    """Makes a case of so many layers; twice the same makes two states alike."""
    keys = jax.random.split(jax.random.key(0), 3)
    batch = {"x": jax.random.normal(keys[0], (BATCH, WIDE)), "y": jax.random.normal(keys[1], (BATCH, WIDE))}
    return {"pytree": _pytree, "linen": _linen, "nnx": _nnx}[flavour](kind, layers, keys[2], batch)


def _error(out: Any, y: Any, kind: str) -> Any:
    value = jnp.mean((out - y) ** 2)
    return (value, {"out": out, "mean": out.mean(), "scale": jnp.ones(3)}) if kind == "aux" else value


# Pytrees


def _layer(own: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ own["w"] + own["b"])


def _normed(own: Any, stats: Any, x: Any) -> Any:
    mean, var = x.mean(0), x.var(0)
    y = (x - mean) * jax.lax.rsqrt(var + 1e-5) * own["scale"]
    return y, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, stats, {"mean": mean, "var": var})


def _pytree_loss(params: Any, stats: Any, batch: Any, key: Any, kind: str) -> Any:
    x, layer, found = batch["x"] @ params["first"], jax.checkpoint(_layer) if kind == "remat" else _layer, []
    for number, own in enumerate(params["layers"]):
        x = layer(own, x)
        if kind == "dropout":
            x = x * jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, x.shape) / 0.8
        if kind == "batch_norm":
            x, stat = _normed(own, stats[number], x)
            found.append(stat)
        if kind == "scanned" and number == len(params["layers"]) // 2:
            x, _ = jax.lax.scan(lambda x, own: (_layer(own, x), None), x, params["scanned"])
    out = x @ (params["first"].T if kind == "tied" else params["last"])
    return (_error(out, batch["y"], kind), {"batch_stats": found}) if kind == "batch_norm" else _error(out, batch["y"], kind)


def _pytree(kind: str, count: int, key: Any, batch: Any) -> Case:
    first, last, *keys = jax.random.split(key, count + SCANNED + 2)
    layers = [{"w": 0.3 * jax.random.normal(one, (WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)} for one in keys]
    params = {"first": 0.3 * jax.random.normal(first, (WIDE, WIDTH)), "layers": layers[:count]}
    if kind != "tied":
        params["last"] = 0.3 * jax.random.normal(last, (WIDTH, WIDE))
    if kind == "scanned":
        params["scanned"] = jax.tree.map(lambda *own: jnp.stack(own), *layers[count:])
    stats = [{"mean": jnp.zeros(WIDTH), "var": jnp.ones(WIDTH)} for _ in range(count)] if kind == "batch_norm" else []
    if kind == "batch_norm":
        params["layers"] = [{**own, "scale": jnp.ones(WIDTH)} for own in params["layers"]]

    def step(state: Any, batch: Any) -> Any:
        params, moments, stats, key = state
        key, own = jax.random.split(key)

        def loss(params: Any, batch: Any, own: Any) -> Any:
            return _pytree_loss(params, stats, batch, own, kind)

        has_aux = kind in ("aux", "batch_norm")
        value, gradient = spmdctx.value_and_grad(loss, has_aux=has_aux)(params, batch, own)
        update, moments = TX.update(gradient, moments, params)
        stats = value[1]["batch_stats"] if kind == "batch_norm" else stats
        return (optax.apply_updates(params, update), moments, stats, key), value

    return Case((params, TX.init(params), stats, jax.random.key(3)), step, batch)


# Linen


class _LinenLayer(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x + jnp.tanh(nn.Dense(WIDTH, param_dtype=x.dtype)(x))
        if self.kind == "dropout":
            x = nn.Dropout(0.2, deterministic=False)(x)
        return nn.BatchNorm(use_running_average=False, param_dtype=x.dtype)(x) if self.kind == "batch_norm" else x


class _LinenNet(nn.Module):
    kind: str
    count: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        first = self.param("first", nn.initializers.normal(0.3), (WIDE, WIDTH), x.dtype)
        x, layer = x @ first, nn.remat(_LinenLayer) if self.kind == "remat" else _LinenLayer
        for number in range(self.count):
            x = layer(self.kind)(x)
            if self.kind == "scanned" and number == self.count // 2:
                loop = nn.scan(
                    lambda module, x, _: (module(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=SCANNED
                )
                x, _ = loop(_LinenLayer("plain"), x, None)
        return x @ first.T if self.kind == "tied" else nn.Dense(WIDE, param_dtype=x.dtype)(x)


def _linen(kind: str, count: int, key: Any, batch: Any) -> Case:
    net = _LinenNet(kind, count)
    variables = dict(net.init({"params": key, "dropout": key}, batch["x"]))
    params, stats = variables["params"], variables.get("batch_stats", {})

    def step(state: Any, batch: Any) -> Any:
        params, moments, stats, key = state
        key, own = jax.random.split(key)

        def loss(params: Any, batch: Any, own: Any) -> Any:
            given, rngs = {"params": params}, {"dropout": own} if kind == "dropout" else None
            if kind == "batch_norm":
                out, changed = net.apply({**given, "batch_stats": stats}, batch["x"], mutable=["batch_stats"])
                return _error(out, batch["y"], kind), changed
            return _error(net.apply(given, batch["x"], rngs=rngs), batch["y"], kind)

        value, gradient = spmdctx.value_and_grad(loss, has_aux=kind in ("aux", "batch_norm"))(params, batch, own)
        update, moments = TX.update(gradient, moments, params)
        stats = value[1]["batch_stats"] if kind == "batch_norm" else stats
        return (optax.apply_updates(params, update), moments, stats, key), value

    return Case((params, TX.init(params), stats, jax.random.key(3)), step, batch)


# nnx


class _NnxLayer(nnx.Module):
    def __init__(self, kind: str, rngs: nnx.Rngs, dtype: Any) -> None:
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=dtype)
        self.dropout = nnx.Dropout(0.2, rngs=rngs) if kind == "dropout" else None
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, param_dtype=dtype) if kind == "batch_norm" else None
        if self.norm is not None:  # whose statistics are float32 else
            self.norm.mean, self.norm.var = nnx.BatchStat(jnp.zeros(WIDTH, dtype)), nnx.BatchStat(jnp.ones(WIDTH, dtype))

    def __call__(self, x: Any) -> Any:
        x = x + jnp.tanh(self.dense(x))
        x = x if self.dropout is None else self.dropout(x)
        return x if self.norm is None else self.norm(x)


class _NnxNet(nnx.Module):
    def __init__(self, kind: str, count: int, rngs: nnx.Rngs, dtype: Any) -> None:
        self.kind = kind
        self.first = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDE, WIDTH), dtype))
        self.layers = nnx.List([_NnxLayer(kind, rngs, dtype) for _ in range(count)])
        if kind == "scanned":
            self.loop = nnx.vmap(lambda key: _NnxLayer("plain", nnx.Rngs(key), dtype))(jax.random.split(rngs.params(), SCANNED))
        self.last = None if kind == "tied" else nnx.Linear(WIDTH, WIDE, rngs=rngs, param_dtype=dtype)

    def __call__(self, x: Any) -> Any:
        x = x @ self.first[...]
        for number, layer in enumerate(self.layers):
            x = nnx.remat(lambda layer, x: layer(x))(layer, x) if self.kind == "remat" else layer(x)
            if self.kind == "scanned" and number == len(self.layers) // 2:
                x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.loop)
        return x @ self.first[...].T if self.last is None else self.last(x)


def _nnx(kind: str, count: int, key: Any, batch: Any) -> Case:
    model = _NnxNet(kind, count, nnx.Rngs(key), batch["x"].dtype)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = state

        def loss(model: Any, batch: Any) -> Any:
            return _error(model(batch["x"]), batch["y"], kind)

        value, gradient = spmdctx.value_and_grad(loss, has_aux=kind == "aux")(model, batch)
        optimizer.update(model, gradient)
        return value

    return Case((model, optimizer), step, batch)
