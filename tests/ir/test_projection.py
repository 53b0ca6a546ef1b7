"""From tensor shardings to factor axes and back."""

import itertools

import pytest

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import decompose, joined, legal, merge, partial_axes, project
from spmdctx.ir.rule import FactorKind
from spmdctx.rules import rule_for
from spmdctx.rules.builder import RuleBuilder, identity

MESH = LogicalMesh.of({"a": 2, "b": 2, "c": 3})
DOT = rule_for("dot_general", ((12, 24), (24, 36)), ((12, 36),), {"dimension_numbers": (((1,), (0,)), ((), ()))})
FOLD = rule_for("reshape", ((2, 6, 4),), ((12, 4),), {"dimensions": None})
CONTRACTED, ROWS, COLUMNS = DOT.operands[0][1][0], DOT.operands[0][0][0], DOT.operands[1][1][0]


def merged(rule, *shardings):
    """Axes per factor, from shardings of operands and results in order; None where a tensor takes no part."""
    tensors = [(dims, own) for dims, own in zip((*rule.operands, *rule.results), shardings, strict=False) if own is not None]
    return merge(rule, tensors, rule.splittable, MESH)


@pytest.mark.parametrize(
    ("axes", "sizes", "dealt"),
    [
        (("a",), (2, 6), [(0, ("a",))]),
        (("a", "b"), (2, 6), [(0, ("a",)), (1, ("b",))]),
        (("a", "b", "c"), (2, 6), [(0, ("a",)), (1, ("b", "c"))]),
        (("b", "a"), (4, 6), [(0, ("b", "a"))]),
        (("c",), (2, 6), []),
        (("a", "b"), (6, 4), [(0, ("a",))]),
        (("a", "c", "b"), (6, 4), [(0, ("a", "c")), (1, ("b",))]),
        ((), (2, 6), []),
    ],
)
def test_the_axes_of_a_dimension_are_dealt_to_its_factors_major_first(axes, sizes, dealt):
    assert list(decompose(axes, (0, 1), sizes, MESH)) == dealt


def test_a_dot_takes_the_axes_of_all_its_operands():
    axes = merged(DOT, (("a",), ("b",)), (("b",), ("c",)))
    assert (axes[ROWS], axes[CONTRACTED], axes[COLUMNS]) == (("a",), ("b",), ("c",))
    assert partial_axes(DOT, axes) == ("b",)
    assert project(DOT.results[0], axes) == (("a",), ("c",))


def test_an_earlier_tensor_wins_and_a_later_one_may_extend():
    rule = identity((12, 24), num_operands=2)
    assert merged(rule, (("a",), ()), (("a", "b"), ("c",))) == (("a", "b"), ("c",))
    assert merged(rule, (("a",), ()), (("b",), ("c",))) == (("a",), ("c",))
    assert merged(rule, (("b",), ()), (("a",), ())) == (("b",), ())


def test_no_axis_splits_two_factors():
    assert merged(DOT, (("a",), ()), ((), ("a",)))[COLUMNS] == ()
    assert merged(DOT, (("a",), ()), ((), ("b", "a")))[COLUMNS] == ("b",)


def test_blocked_and_unsplittable_factors_take_no_axes():
    builder = RuleBuilder()
    blocked, free, whole = builder.factor(12, blocked=True), builder.factor(12), builder.factor(12, FactorKind.NEED_REPLICATION)
    rule = builder.build([(blocked, free, whole)], [(blocked, free, whole)])
    assert merged(rule, (("a",), ("b",), ("c",))) == ((), ("b",), ())


def test_an_axis_that_does_not_divide_is_not_taken():
    assert merged(identity((4, 9)), (("c",), ("c",))) == ((), ("c",))


def test_a_minor_factor_is_split_only_where_its_major_one_is_split_completely():
    assert merged(FOLD, ((), ("a",), ())) == ((), (), ())
    assert merged(FOLD, (("a",), ("b",), ())) == (("a",), ("b",), ())
    assert project(FOLD.results[0], merged(FOLD, (("a",), ("b",), ()))) == (("a", "b"), ())


def test_legality_cuts_until_nothing_changes():
    builder = RuleBuilder()
    i, j, k = builder.factor(4), builder.factor(2), builder.factor(2)
    rule = builder.build([(i + j, k)], [(i, j + k)])
    assert legal(rule, (("a",), ("b",), ("c",)), MESH) == (("a",), (), ())


@pytest.mark.parametrize("rule", [DOT, FOLD, identity((12, 24), num_operands=2)], ids=["dot", "reshape", "add"])
def test_merged_axes_are_legal_and_survive_the_way_over_each_tensor(rule):
    options = [(), ("a",), ("b",), ("a", "b"), ("c", "a"), ("b", "c", "a")]
    first = rule.operands[0]
    for sharding in itertools.product(options, repeat=len(first)):
        axes = merge(rule, [(first, sharding)], rule.splittable, MESH)
        used = [name for own in axes for name in own]
        assert len(used) == len(set(used))
        assert legal(rule, axes, MESH) == axes
        assert merge(rule, [(first, project(first, axes))], rule.splittable, MESH) == axes


@pytest.mark.parametrize(
    ("base", "offered", "shape", "expected"),
    [
        (((), ()), (("a",), ()), (12, 24), (("a",), ())),
        ((("a",), ()), (("b",), ()), (12, 24), (("a",), ())),
        ((("a",), ()), (("a", "b"), ("c",)), (12, 24), (("a", "b"), ("c",))),
        ((("a",), ()), ((), ("a",)), (12, 24), (("a",), ())),
        (((), ()), (("a", "b"), ()), (6, 24), (("a",), ())),
        ((("a", "b"), ()), (("a",), ("c",)), (12, 24), (("a", "b"), ("c",))),
    ],
    ids=["empty takes", "conflict keeps", "prefix extends", "axis in use", "does not divide", "never shortens"],
)
def test_a_sharding_only_gains_axes(base, offered, shape, expected):
    assert joined(base, offered, shape, MESH) == expected
