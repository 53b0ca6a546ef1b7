"""Fusions of a row's reduction with what reads the row, too: they write beside what they read, on GPU alone."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.cost.memory.lives import step_memory
from spmdctx.ir.graph import Role
from spmdctx.machine.presets import CPU, GPU, TPU
from spmdctx.machine.xla.memory.row_fusions import read_with_their_rows
from spmdctx.trace.build.build import Argument, build

SIZE = 16


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def centred(x):
    return x - x.mean(-1, keepdims=True)


def normalized(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def between(fn):
    """Products on both sides keep what enters and leaves the fusion in memory."""
    return lambda x, w: fn(x @ w) @ w[:, :2]


def found_in(fn, *, fuses_rows=True):
    jaxpr = jax.make_jaxpr(fn)(jnp.ones((8, SIZE)), jnp.ones((SIZE, SIZE)))
    program = build(jaxpr, [Argument("", Role.ARGUMENT)] * 2)
    memory = step_memory(program.graph, program.scopes, fuses_into_products=False, fuses_rows=fuses_rows)
    return program.graph, memory


def most_alive(fn, *, fuses_rows):
    """Returns the most values made in the step, of the size of the rows, that are alive at once."""
    graph, memory = found_in(fn, fuses_rows=fuses_rows)
    own = [life for life in memory.lives if life.value not in graph.inputs and graph.values[life.value].shape == (8, SIZE)]
    return max(sum(life.start <= at <= life.end for life in own) for at in range(len(graph.ops)))


@pytest.mark.parametrize(
    "fn",
    [
        softmax,
        centred,
        normalized,
        lambda x: softmax(jnp.where(x > 0, x, -1e9)),
        lambda x: centred(jnp.tanh(x)),
        lambda x: x - jnp.exp(x).mean(-1, keepdims=True),
    ],
)
def test_what_is_read_with_its_rows_is_not_written_over(fn):
    assert most_alive(between(fn), fuses_rows=True) == 2
    assert most_alive(between(fn), fuses_rows=False) == 1


@pytest.mark.parametrize("fn", [jnp.tanh, lambda x: x - x.mean(0), lambda x: x - x[:, :1], lambda x: jnp.tanh(x) * x])
def test_other_elementwise_ops_write_in_place(fn):
    graph, memory = found_in(between(fn))
    assert read_with_their_rows(graph, memory.materialized) == {}
    assert most_alive(between(fn), fuses_rows=True) == most_alive(between(fn), fuses_rows=False)


def test_a_row_that_is_multiplied_before_it_is_reduced_makes_two_kernels():
    """The second one writes over what it reads, as in the gradient of a softmax that is kept."""

    def gradient(x, w):
        product, kept = x @ w, x @ jnp.sin(w)
        return (product - (product * kept).sum(-1, keepdims=True)) @ w[:, :2]

    assert most_alive(gradient, fuses_rows=True) == most_alive(gradient, fuses_rows=False)


def test_so_does_a_row_whose_two_reductions_are_added():
    def fn(x):
        return x - jax.nn.logsumexp(x, -1, keepdims=True)

    assert most_alive(between(fn), fuses_rows=True) == most_alive(between(fn), fuses_rows=False)


def test_the_cotangent_of_scores_is_written_beside_scores_softmax_and_its_cotangent():
    def attend(x, w):
        return jnp.sum(softmax(x @ w) @ w)

    graph, memory = found_in(jax.grad(attend))
    both = read_with_their_rows(graph, memory.materialized)
    products = {value for op in graph.ops if op.primitive == "dot_general" for value in op.results}
    # It reads two products with their rows: the scores, and the cotangent of their softmax.
    last, own = max((op, own & products) for op, own in both.items() if len(own & products) == 2)
    ends = {life.value: life.end for life in memory.lives}
    assert min(ends[value] for value in own) >= last


def test_gpu_alone_fuses_rows():
    assert [compiler.fuses_rows for compiler in (GPU, TPU, CPU)] == [True, False, False]
