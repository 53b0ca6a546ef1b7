"""Each rule that splits something: what spmdctx lowers for its splits gives one device's numbers on every device."""

import pytest
from jax import lax

from spmdctx.rules import RULES
from spmdctx.rules.opaque import REASONS
from tests.rules.small_programs import FAMILIES, NOT_RUN
from tests.rules.sweep import MESHES, Small, can_split, legal_splits, runs, traced, wrong
from tests.rules.test_coverage import known_primitives

FEW, MANY = 2, 4
DRAWN = {"elementwise": 1, "control": 1, "random": 1, "contraction": MANY, "reduction": MANY, "windows": MANY}
ALL = 1000


@pytest.fixture(scope="module")
def programs():
    return {family: [traced(small) for small in smalls] for family, smalls in FAMILIES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_of_every_family_give_one_device_s_numbers(family, programs):
    chosen = [run for program, _ in programs[family] for run in runs(program, DRAWN.get(family, FEW))]
    assert len(chosen) > 10
    assert wrong(programs[family], chosen) == []


def test_a_rule_that_splits_something_has_a_program_or_a_reason_for_none(programs):
    run = {op.primitive for family in programs.values() for program, _ in family for op in can_split(program)}
    assert NOT_RUN.keys().isdisjoint(run)
    named = {name for name in known_primitives() if name in RULES and name not in REASONS and not name.startswith("dot_product_attention")}
    assert sorted(named - run - NOT_RUN.keys()) == []


@pytest.mark.parametrize("window", [(1,), (3,)])
def test_every_split_of_a_convolution_of_two_groups_gives_one_device_s_numbers(window):
    program, args = traced(
        Small(lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", feature_group_count=2), ((2, 4, 5), (8, 2, *window)))
    )
    chosen = runs(program, ALL, MESHES[1:])
    assert len(chosen) == len(legal_splits(program, chosen[0].op, MESHES[1])) > 40
    assert wrong([(program, args)], chosen) == []
