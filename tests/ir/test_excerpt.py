"""A program whose ops stand in a row in a larger one is split as it is there."""

import jax
import jax.numpy as jnp
import pytest

from spmdctx.ir.excerpt import excerpt
from spmdctx.ir.graph import Role
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.trace.build.build import Argument, build

X, W = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)


def first(x, w):
    return jnp.tanh(x @ w)


def second(kept, w):
    return jnp.sin(kept) @ w.T * 2.0


def graph(function, *shapes):
    return build(jax.make_jaxpr(function)(*shapes), [Argument("", Role.ARGUMENT)] * len(shapes)).graph


def numbered(whole):
    """Returns an assignment in which each value and op has an axis of its own."""
    ops = tuple(OpSharding(((f"op{op.id}",), *((),) * (len(op.rule.sizes) - 1))) for op in whole.ops)
    values = tuple(((f"value{number}",), *((),) * (len(value.shape) - 1)) for number, value in enumerate(whole.values))
    return Assignment(ops, values, "dynamic_programming")


@pytest.fixture
def whole():
    return graph(lambda x, w: second(first(x, w), w), X, W)


@pytest.mark.parametrize(("function", "starts"), [(first, 0), (second, 2)], ids=["first", "second"])
def test_a_row_of_ops_is_split_as_in_the_larger_program(whole, function, starts):
    part, assignment = graph(function, X, W), numbered(whole)
    found = excerpt(whole, assignment, starts, part, {})
    assert found is not None
    assert found.ops == assignment.ops[starts : starts + len(part.ops)]
    for own, other in zip(part.ops, whole.ops[starts:], strict=False):
        for value, twin in zip((*own.operands, *own.results), (*other.operands, *other.results), strict=True):
            assert value < 0 or found.values[value] == assignment.values[twin]


def test_what_is_decided_stays(whole):
    part = graph(second, X, W)
    given = (("other",), ())
    found = excerpt(whole, numbered(whole), 2, part, {part.inputs[0]: given})
    assert found is not None
    assert found.values[part.inputs[0]] == given


def test_what_no_op_reads_is_whole(whole):
    part = graph(lambda x, w, unread: first(x, w), X, W, W)
    found = excerpt(whole, numbered(whole), 0, part, {})
    assert found is not None
    assert found.values[part.inputs[2]] == ((), ())


@pytest.mark.parametrize(
    ("function", "starts"),
    [(first, 1), (second, 3), (lambda x, w: jnp.cos(x @ w), 0), (lambda x, w: jnp.tanh(x @ w.T), 0), (lambda x, w: first(x, x.T), 0)],
    ids=["place", "end", "primitive", "more", "factors"],
)
def test_other_ops_are_no_part_of_it(whole, function, starts):
    assert excerpt(whole, numbered(whole), starts, graph(function, X, W), {}) is None
