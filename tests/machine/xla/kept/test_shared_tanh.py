"""A tanh of 16 bits that several fusions read stays in memory on GPU, in the plan and in what the compiler makes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from spmdctx.ir.graph import Role
from spmdctx.machine.presets import CPU, GPU
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.compiled import as_compiled
from tests.audit.compile_only import need_gpu

ROWS, WIDTH, HIDDEN = 4096, 64, 256
EXACT = partial(jax.nn.gelu, approximate=False)


def plain(activation, w, x):
    return x + activation(x @ w["a"] + w["bias"]) @ w["b"]


def normalized(activation, w, x):
    made = activation(x @ w["a"] + w["bias"]) @ w["b"]
    return x + made * jax.lax.rsqrt(jnp.mean(made * made, -1, keepdims=True) + 1e-5)


def gradients(layer, activation, w, x):
    def loss(w, x):
        return jnp.sum(jax.checkpoint(partial(layer, activation))(w, x).astype(jnp.float32) ** 2)

    return jax.grad(loss)(w, x)


def arguments(dtype, **how):
    shapes = {"a": (WIDTH, HIDDEN), "bias": (HIDDEN,), "b": (HIDDEN, WIDTH)}
    return {name: jax.ShapeDtypeStruct(shape, dtype, **how) for name, shape in shapes.items()}, jax.ShapeDtypeStruct(
        (ROWS, WIDTH), dtype, **how
    )


def kept(function, args, compiler, *names):
    """Whether the results of the ops of some primitives are in memory."""
    jaxpr = jax.make_jaxpr(function)(*args)
    program = as_compiled(build(jaxpr, [Argument("", Role.ARGUMENT)] * len(jaxpr.jaxpr.invars)), compiler)
    return [not op.fused >> len(op.operands) & 1 for op in program.graph.ops if op.primitive in names]


CASES = {
    "gelu, bfloat16": (jax.nn.gelu, "bfloat16", True),
    "gelu, float16": (jax.nn.gelu, "float16", True),
    "exact gelu": (EXACT, "bfloat16", True),
    "gelu, float32": (jax.nn.gelu, "float32", False),
    "silu": (jax.nn.silu, "bfloat16", False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_keeps_what_the_compiler_keeps(case):
    activation, dtype, wanted = CASES[case]
    function, names = partial(gradients, normalized, activation), ("tanh", "erfc", "logistic")
    assert any(kept(function, arguments(dtype), GPU, *names)) == wanted
    args = arguments(dtype, sharding=SingleDeviceSharding(need_gpu(1)[0]))
    entry = jax.jit(function).lower(*args).compile().as_text().split("ENTRY")[1]
    two = re.findall(rf"= \(\w+\[{ROWS},{HIDDEN}\]\S*, \w+\[{ROWS},{HIDDEN}\]\S*\) fusion", entry)
    assert bool(two) == wanted


def test_other_compilers_and_single_fusions_keep_nothing():
    forward = partial(plain, jax.nn.gelu)
    assert kept(forward, arguments("bfloat16"), GPU, "tanh") == [False]
    assert not any(kept(partial(gradients, normalized, jax.nn.gelu), arguments("bfloat16"), CPU, "tanh"))


def test_what_all_readers_share_stays_in_the_place_of_the_tanh():
    """Only the square of the tanh is read twice."""

    def function(x, w):
        shared = jnp.tanh(x) ** 2
        return jnp.sin(shared) @ w, jnp.cos(shared) @ w

    args = jax.ShapeDtypeStruct((ROWS, WIDTH), "bfloat16"), jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16")
    assert kept(function, args, GPU, "tanh") == [False]
    assert kept(function, args, GPU, "square", "integer_pow") == [True]
