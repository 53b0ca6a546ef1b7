"""Origins of ops: the user's own lines, and the modules of flax.linen."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from spmdctx import parallel, plan, value_and_grad
from spmdctx.trace.build.origins import definition_line, scope_path, source_line


class Mlp(nn.Module):
    """Two products with a norm before."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))


class Stack(nn.Module):
    """Two layers, recomputed in the backward pass."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(2):
            x = nn.remat(Mlp)(name=f"layers_{number}")(x)
        return x


def _linen_step(params, state, x):
    loss, gradients = jax.value_and_grad(lambda params: (Stack().apply(params, x) ** 2).mean())(params)
    updates, state = optax.adam(1e-3).update(gradients, state)
    return optax.apply_updates(params, updates), state, loss


@pytest.fixture(scope="module")
def linen_plan():
    params = jax.eval_shape(Stack().init, jax.random.key(0), jnp.ones((8, 16)))
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    return plan(_linen_step, params, state, x, parallel_mode="semi_auto_parallel", device_num=8, topology="tpu-v5e")


def test_lines_of_flax_and_optax_are_those_of_the_user(linen_plan):
    assert {op.source.partition(":")[0] for op in linen_plan.ops} == {"test_origins.py"}


def test_ops_and_collectives_of_linen_name_their_module(linen_plan):
    products = {op.source.rpartition(" in ")[2] for op in linen_plan.ops if op.primitive == "dot_general"}
    assert products == {f"Stack/layers_{layer}/Dense_{dense})" for layer in (0, 1) for dense in (0, 1)}
    assert "(layers_*/Dense_0)" in str(linen_plan)


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
@pytest.mark.parametrize("bind", [lambda fn: fn, functools.partial], ids=["plain", "partial"])
def test_what_the_library_does_for_a_step_comes_from_the_line_of_its_function(mode, bind):
    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    made = parallel(bind(value_and_grad(loss)), parallel_mode=mode, device_num=8, grad_accumulation_step=2, gradients_mean=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sources = {op.source for op in made.plan(jnp.eye(16), jnp.ones((64, 16))).ops}
    lines = {source.split(" (")[0] for source in sources}
    first = loss.__code__.co_firstlineno
    assert f"test_origins.py:{first}" in lines
    assert lines <= {f"test_origins.py:{first}", f"test_origins.py:{first + 1}"}


def test_functions_of_jax_have_no_line_of_the_user():
    assert [definition_line(fn) for fn in (jnp.dot, jax.grad, plan, functools.partial(jnp.dot, 1))] == [""] * 4


def test_lines_of_nnx_are_those_of_the_module_that_calls():
    class Head(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm, self.linear = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.linear(self.norm(x))

    head = Head(nnx.Rngs(0))
    lines = {source_line(eqn.source_info) for eqn in jax.make_jaxpr(head)(jnp.ones((4, 8))).eqns}
    assert {line.partition(" (")[2].rsplit(".", 2)[-2:][0] for line in lines} == {"Head"}


def test_a_framework_alone_keeps_its_own_line():
    space: dict = {}
    exec(compile("def double(x):\n    return x + x\n", "/usr/lib/python3/site-packages/flax/core/double.py", "exec"), space)
    info = jax.make_jaxpr(space["double"])(1.0).eqns[0].source_info
    assert source_line(info) == "double.py:2 (double)"


@pytest.mark.parametrize("folder", ["/home/me/my models", "/home/me/a:b", "/usr/lib/site-packages/mine"])
def test_folders_of_any_name_leave_the_file_and_the_line(folder):
    space: dict = {}
    exec(compile("def double(x):\n    return x + x\n", f"{folder}/net.py", "exec"), space)
    assert source_line(jax.make_jaxpr(space["double"])(1.0).eqns[0].source_info) == "net.py:2 (double)"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("", ""),
        ("jvp()", ""),
        ("transpose(jvp(Model))/layers_1/Dense_0", "Model/layers_1/Dense_0"),
        ("transpose(jvp(Model))/rematted_computation/block/norm", "Model/block/norm"),
        ("jvp(Model)/jvp(Model)/layers_0/Dense_0", "Model/layers_0/Dense_0"),
        ("a/b/a/b/c", "a/b/c"),
        ("vmap(encoder)/shard:attention", "encoder"),
    ],
)
def test_the_scope_of_an_op_is_its_modules(name, path):
    assert scope_path(name) == path
