"""Rounds that cut alike become one axis."""

import math

import pytest

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.search.recursive.mesh import join_axes, joined_mesh, round_mesh, translate, translate_all

A, B, C, D = "data", "model", "axis2", "axis3"


@pytest.mark.parametrize(
    ("devices", "sizes"), [(1, (1,)), (2, (2,)), (8, (2, 2, 2)), (6, (3, 2)), (12, (3, 2, 2)), (7, (7,)), (4096, (2,) * 12)]
)
def test_a_round_per_prime_factor(devices, sizes):
    assert round_mesh(devices).shape == sizes


@pytest.mark.parametrize(
    ("uses", "groups"),
    [
        ([], [(A, B, C)]),
        ([((A, B, C), 1.0)], [(A, B, C)]),
        ([((A, B), 1.0), ((C,), 1.0)], [(A, B), (C,)]),
        ([((A,), 1.0), ((B, C), 1.0)], [(A,), (B, C)]),
        ([((A, C), 1.0), ((B,), 1.0)], [(A,), (B,), (C,)]),
    ],
)
def test_axes_that_are_used_as_one_are_joined(uses, groups):
    assert join_axes(round_mesh(8), uses) == groups


def test_the_lightest_uses_are_broken_where_there_are_too_many_axes():
    uses = [((A,), 9.0), ((B,), 1.0), ((C,), 2.0), ((D,), 9.0)]
    assert join_axes(round_mesh(16), uses) == [(A,), (B, C), (D,)]


def test_pinned_axes_are_never_broken():
    uses = [((name,), math.inf) for name in round_mesh(16).names]
    assert len(join_axes(round_mesh(16), uses)) == 4


def test_joined_axes_get_the_default_names():
    assert joined_mesh(round_mesh(16), [(A, B, C), (D,)]) == LogicalMesh.of((8, 2))


def test_names_are_translated_by_whole_groups():
    groups = {A: ("data", (A, B)), B: ("data", (A, B)), C: ("model", (C,))}
    assert translate((A, B, C), groups) == ("data", "model")
    assert translate((C,), groups) == ("model",)
    assert translate((A, C), groups) == ()
    assert translate((C, A), groups) == ("model",)
    assert translate_all(((A, B), (), (C,)), groups) == (("data",), (), ("model",))
