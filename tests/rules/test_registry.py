"""The table of rules and the builder."""

import pytest

from spmdctx.ir.rule import FactorKind
from spmdctx.rules import RULES, RuleBuilder, identity, replicate, rule, rule_for


def test_a_primitive_without_a_rule_is_kept_whole_and_named():
    found = rule_for("mystery", ((8, 4), ()), ((8,),), {})
    assert found.reason == "no rule for primitive 'mystery'"
    assert found.operands == (((), ()), ())
    assert not found.sizes


def test_a_second_rule_for_a_primitive_is_refused():
    with pytest.raises(ValueError, match="'add' already has a rule"):
        rule("add")(lambda operands, results, params: identity(results[0]))


def test_a_registered_rule_is_found_by_the_name_of_its_primitive(monkeypatch):
    monkeypatch.delitem(RULES, "add")
    rule("add")(lambda operands, results, params: replicate(operands, results, "just because"))
    assert rule_for("add", ((8,), (8,)), ((8,),), {}).reason == "just because"


def test_the_builder_writes_a_matrix_product_in_shardys_syntax():
    b = RuleBuilder()
    i, k, j = b.factor(8), b.factor(16, FactorKind.REDUCTION), b.factor(32)
    assert str(b.build([(i, k), (k, j)], [(i, j)])) == "([i, j], [j, k])->([i, k]) {i=8, j=16, k=32} reduction={j}"


def test_compound_dimensions_are_sums_of_factors():
    b = RuleBuilder()
    i, j = b.factor(2), b.factor(4)
    assert str(b.build([(i + j,)], [(i, j)])) == "([(i j)])->([i, j]) {i=2, j=4}"


@pytest.mark.parametrize("size", [0, 1])
def test_a_dimension_that_nothing_can_split_has_no_factor(size):
    assert RuleBuilder().factor(size) == ()


def test_a_blocked_factor_relates_dimensions_and_never_splits():
    b = RuleBuilder()
    dims = b.factors((8, 4), blocked=True)
    built = b.build([dims], [dims])
    assert built.operands == built.results == (((0,), (1,)),)
    assert built.splittable == (False, False)
