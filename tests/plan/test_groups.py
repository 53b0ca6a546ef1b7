"""Joining rows that say the same thing."""

from __future__ import annotations

import pytest

from spmdctx.ir.collective import Cause, Collective
from spmdctx.ir.graph import Role
from spmdctx.plan import PlannedTensor
from spmdctx.plan.groups import by_cause, by_kind, group_tensors

WHOLE, SPLIT = ((), ()), (("data",), ())


def tensor(path, sharding=WHOLE, role=Role.PARAMETER):
    return PlannedTensor(path, role, (4, 4), "float32", sharding)


@pytest.mark.parametrize(
    ("paths", "patterns"),
    [
        (["w"], ["w"]),
        (["layers/0/w", "layers/1/w"], ["layers/*/w"]),
        (["layers_0/w", "layers_1/w"], ["layers_*/w"]),
        (["layers/0/q", "layers/0/k", "layers/1/q", "layers/1/k"], ["layers/*/{q,k}"]),
        (["opt/0/mu/layers/3/w", "opt/0/mu/layers/4/w"], ["opt/0/mu/layers/*/w"]),
        (["mu/a/w", "nu/a/w", "mu/b/w", "nu/b/w"], ["{mu,nu}/{a,b}/w"]),
        (["a", "b/c"], ["a", "b/c"]),
        ([f"{letter}/w" for letter in "abcdefgh"], ["{a,b,c,d,e,+3}/w"]),
    ],
)
def test_paths_that_differ_in_numbers_or_one_name_are_joined(paths, patterns):
    groups = group_tensors(map(tensor, paths))
    assert [group.pattern for group in groups] == patterns
    assert sorted(row.path for group in groups for row in group.tensors) == sorted(paths)


def test_a_layer_that_is_split_otherwise_is_named_by_its_number():
    rows = [tensor(f"layers/{number}/w", SPLIT if number == 5 else WHOLE) for number in range(8)]
    assert [group.pattern for group in group_tensors(rows)] == ["layers/0-4,6-7/w", "layers/5/w"]


def test_roles_come_in_their_order():
    rows = [tensor("b", role=Role.BATCH), tensor("o", role=Role.OPTIMIZER), tensor("p")]
    assert [group.pattern for group in group_tensors(rows)] == ["p", "o", "b"]


def test_nothing_gives_no_groups():
    assert group_tensors([]) == ()


def collective(kind, time_s, cause, repeats=1):
    return Collective(kind, ("data",), 100, time_s, repeats, cause, "model.py:3")


def gathered(path):
    return Cause.move(0, "dot", path, "[data, -]", "[-, -]")


ROWS = [
    collective("all_gather", 1.0, gathered("layers/0/w")),
    collective("all_reduce", 1.5, Cause.sum("dot"), repeats=4),
    collective("all_gather", 1.0, gathered("layers/12/w"), repeats=2),
]


def test_collectives_of_one_kind_are_added_with_their_repeats():
    assert [(row.kind, row.count, row.payload_bytes, row.time_s) for row in by_kind(ROWS)] == [
        ("all_reduce", 4, 400, 6.0),
        ("all_gather", 3, 300, 3.0),
    ]


def test_layers_are_one_cause():
    assert [(row.cause, row.count) for row in by_cause(ROWS)] == [(Cause.sum("dot"), 4), (gathered("layers/*/w"), 3)]
