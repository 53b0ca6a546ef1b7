"""Element counts of recursive_programming against the formulas and the figures of MindFormers' guide."""

import pytest

from spmdctx.rules.contraction import dot_general
from spmdctx.rules.convolution import conv_general_dilated
from spmdctx.search.recursive.costs import NO_CUT, Option, describe, describe_choice, op_costs, roles_of


def dot(lhs, rhs, contracting=(1, 0), batch=((), ()), swapped=False):
    numbers = {"dimension_numbers": (((contracting[0],), (contracting[1],)), batch)}
    rule = dot_general((lhs, rhs), ((1,),), numbers)
    return roles_of(rule, rule.splittable, is_conv=False, swapped=swapped), rule


def costs(i, k, j, mem_coeff, parts=2):
    roles, rule = dot((i, k), (k, j))
    return op_costs(roles, (i * k, k * j, i * j), rule.sizes, parts, mem_coeff)


def test_the_figures_of_the_guide():
    assert costs(64, 32, 128, 0.01) == pytest.approx({"I": 20.48, "J": 1024, "K": 4096, NO_CUT: 16.777216})


def test_recorded_costs_of_mindspore():
    """x 256x64 by w 64x128 at the default coefficient (MindSpore 2.10.0)."""
    assert costs(256, 64, 128, 0.1) == pytest.approx({"I": 409.6, "J": 8192, "K": 16384, NO_CUT: 6710.8864})


@pytest.mark.parametrize(("coefficient", "cut"), [(0.01, NO_CUT), (0.013, "I")])
def test_where_not_cutting_gets_dearer_than_cutting_rows(coefficient, cut):
    found = costs(128, 64, 64, coefficient)
    assert min(found, key=lambda name: found[name]) == cut


def test_a_cut_into_more_parts_saves_more():
    assert costs(96, 32, 64, 0.1, parts=3)["J"] == pytest.approx(96 * 32 * 2 / 3)


def test_roles_of_a_product_whose_weight_is_on_the_left():
    roles, rule = dot((48, 64), (32, 64), contracting=(1, 1), swapped=True)
    assert [[rule.sizes[factor] for factor in roles.cuts[cut]] for cut in "IJK"] == [[32], [48], [64]]


@pytest.mark.parametrize(
    ("batch", "first", "second"),
    [((64, 8), 0.0, 2.0), ((16, 64), 1.0, 0.0), ((8, 2), 3.0, 14.0)],
)
def test_a_batched_product_prefers_a_long_batch(batch, first, second):
    lhs, rhs = (*batch, 16, 32), (*batch, 32, 8)
    roles, rule = dot(lhs, rhs, contracting=(3, 2), batch=((0, 1), (0, 1)))
    elements = [1.0, 2.0, 3.0]
    found = op_costs(roles, elements, rule.sizes, 2, 0.1)
    least = 0.15 * 0.5
    assert found["B"] == pytest.approx(first * least)
    assert found["X"] == pytest.approx(second * least)
    assert (found["I"], found["J"], found["K"]) == (1.0, 0.5, 1.5)
    assert found[NO_CUT] == pytest.approx(least**2 / 25)


def test_a_convolution_costs_its_filter_per_batch_cut():
    spec = type("Spec", (), {"lhs_spec": (0, 1, 2, 3), "rhs_spec": (0, 1, 2, 3), "out_spec": (0, 1, 2, 3)})
    params = {"dimension_numbers": spec, "batch_group_count": 1, "feature_group_count": 1}
    rule = conv_general_dilated(((8, 16, 9, 9), (32, 16, 3, 3)), ((8, 32, 9, 9),), params)
    roles = roles_of(rule, rule.splittable, is_conv=True, swapped=False)
    assert op_costs(roles, (100.0, 10.0, 200.0), rule.sizes, 2, 0.1) == {"B": 5.0, "K": 50.0, "Q": 100.0, NO_CUT: 0.0}


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (Option("I", 0, 20.48, 0.0), "If the I-axis is cut, the op-cost is 20.48, the rest-cost is 0, and the total cost is 20.48"),
        (Option("K", 2, 4096, 512), "If the K-axis is cut, the op-cost is 4096, the rest-cost is 512, and the total cost is 4608"),
        (Option(NO_CUT, -1, 16.777216, 0), "If no axis is cut, the op-cost is 16.7772, the rest-cost is 0, and the total cost is 16.7772"),
        (Option("J", 1, 1024, 0, "the K-axis is cut already"), "The J-axis is forbidden: the K-axis is cut already."),
    ],
)
def test_the_lines_of_the_log(option, line):
    assert describe(option, 2) == line


def test_the_choice_is_said():
    assert describe_choice(Option(NO_CUT, -1, 1.0, 0.0)) == "Choose NOT to cut"
    assert describe_choice(Option("I", 0, 1.0, 0.0)) == "Choose to cut the I-axis"
