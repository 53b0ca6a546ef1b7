"""XLA on TPU gives stacks a narrower type before the loops that read narrow slices of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdctx.machine.xla.kept.narrow_stacks import narrow_stacks
from tests.audit.compile_only import need_tpu
from tests.road import trace

LAYERS, WIDTH, ROWS = 6, 256, 512
STACK = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)


def scanned(layer, weights, x):
    body = jax.checkpoint(lambda x, own: (jnp.tanh(layer(x, own)).astype(x.dtype), None))
    return lax.scan(body, x, weights)[0].astype(jnp.float32).sum()


def narrow(x, own):
    return x @ own.astype(x.dtype)


def of_products(x, own):
    return x.astype(jnp.float32) @ own


def turned(x, own):
    return x @ own.T.astype(x.dtype)


def scaled(x, own):
    return x @ (own * 0.5).astype(x.dtype)


def wide_too(x, own):
    """Both passes read the slice in its own type."""
    return x @ own.astype(x.dtype) + (own * own).sum().astype(x.dtype)


def both(layer):
    return lambda weights, x: jax.grad(lambda weights: scanned(layer, weights, x))(weights)


def reshaped(weights, x):
    return both(lambda x, own: narrow(x, own.reshape(WIDTH, WIDTH)))(weights.reshape(LAYERS, WIDTH, 4, WIDTH // 4), x)


def in_groups(weights, x):
    """A loop over groups of layers, and one over the layers of each."""

    def group(x, own):
        return lax.scan(lambda x, one: (jnp.tanh(narrow(x, one)), None), x, own)[0], None

    return lax.scan(group, x, weights.reshape(2, LAYERS // 2, WIDTH, WIDTH))[0]


def counted(weights, x):
    """A loop that takes its slices itself."""
    return lax.fori_loop(0, LAYERS, lambda i, x: jnp.tanh(narrow(x, lax.dynamic_index_in_dim(weights, i, keepdims=False))), x)


def micro_batches(weights, x):
    xs = x.reshape(4, ROWS // 4, WIDTH)
    return lax.scan(lambda total, x: (total + both(narrow)(weights, x), None), jnp.zeros_like(weights), xs)[0]


def a_part(weights, x):
    return both(narrow)(weights[: LAYERS // 2], x)


def doubled(weights, x):
    return both(narrow)(weights * 2, x)


def once(weights, x):
    """A loop that reads the whole of what it reads."""
    return lax.scan(lambda x, _: (jnp.tanh(narrow(x, weights[0])), None), x, length=LAYERS)[0]


NARROWED = [both(narrow), both(of_products), both(turned), reshaped, in_groups, counted, micro_batches]
LEFT = [both(scaled), both(wide_too), a_part]
NAMES = ["conversion", "products", "turned", "reshaped", "groups", "counted", "micro-batches"]
LEFT_NAMES = ["scaled", "wide", "part"]


def found(fn, stack=STACK):
    program = trace(fn, stack, X)
    return program.graph, list(narrow_stacks(program.graph, dict(program.graph.ties)))


@pytest.mark.parametrize("fn", NARROWED, ids=NAMES)
def test_a_stack_whose_slices_are_read_narrow_has_a_copy_of_half_its_bytes(fn):
    graph, stacks = found(fn)
    assert {(one.value, one.share) for one in stacks} == {(graph.inputs[0], 0.5)}


@pytest.mark.parametrize("fn", [*LEFT, doubled, once], ids=[*LEFT_NAMES, "made", "whole"])
def test_others_have_none(fn):
    assert found(fn)[1] == []


def test_a_stack_that_is_narrow_has_none():
    assert found(both(narrow), jax.ShapeDtypeStruct(STACK.shape, jnp.bfloat16))[1] == []


def test_a_loop_that_reads_the_wide_type_has_none_beside_one_that_has():
    def one_of_each(weights, x):
        return scanned(narrow, weights, x) + scanned(wide_too, weights, x)

    graph, stacks = found(one_of_each)
    entering = [op.id for op in graph.ops if op.primitive == "scan.enter" and op.operands[0] == graph.inputs[0]]
    assert [one.entering for one in stacks] == [min(entering)]
    assert copies_in(one_of_each, f"{LAYERS},{WIDTH},{WIDTH}")


def copies_in(fn, shape, split=None):
    """The shapes of the narrow copies that the compiled program's entry makes of the weights."""
    devices = list(need_tpu("v5p:2x2x2"))[: 8 if split else 1]
    mesh = Mesh(np.array(devices), ("x",))
    stored = NamedSharding(mesh, split or P())
    text = jax.jit(fn, in_shardings=(stored, NamedSharding(mesh, P("x")))).lower(STACK, X).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    return re.findall(rf" = bf16\[{shape}\]\S* (?:convert|copy|fusion)\(", entry)


@pytest.mark.parametrize("fn", NARROWED, ids=NAMES)
def test_the_compiler_makes_the_copy(fn):
    assert copies_in(fn, rf"(?:6|2,3),{WIDTH},{WIDTH}")


@pytest.mark.parametrize("fn", LEFT, ids=LEFT_NAMES)
def test_the_compiler_makes_none_of_others(fn):
    assert not copies_in(fn, rf"[63],{WIDTH},{WIDTH}")


def test_the_compiler_narrows_what_each_device_stores():
    assert copies_in(both(narrow), f"6,{WIDTH // 8},{WIDTH}", P(None, "x"))
