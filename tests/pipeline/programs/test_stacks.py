"""Where the layers of stacks are kept, and which of them cross, against counting them one by one."""

import itertools

import pytest

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.pipeline.programs.stacks import Layers, Rows, Stack, pieces_between, stored, together, union_mesh


def stack_of(bounds, *, is_gradient=False, may_spread=True):
    parts = tuple(Layers(f"part{first}", number, first, last) for number, (first, last) in enumerate(itertools.pairwise(bounds)))
    return Stack("whole", parts, is_gradient, may_spread)


@pytest.mark.parametrize("is_gradient", [False, True])
@pytest.mark.parametrize(("bounds", "stages"), [((0, 5, 8), (0, 1)), ((0, 1, 2, 6, 8), (0, 1, 0, 1)), ((0, 3, 7), (1, 0))])
def test_each_layer_goes_from_where_it_is_to_where_it_is_wanted(bounds, stages, is_gradient):
    own = stored(stack_of(bounds, is_gradient=is_gradient), stages, 2)
    assert own.is_spread == (bounds[-1] % 2 == 0)
    sources, targets = (own.used, own.kept) if is_gradient else (own.kept, own.used)
    got = [(piece.source, piece.target, layer) for piece in own.pieces for layer in range(piece.first, piece.last)]
    want = [
        (source, target, layer)
        for layer in range(bounds[-1])
        for source, target in itertools.product(range(len(sources)), range(len(targets)))
        if sources[source].first <= layer < sources[source].last and targets[target].first <= layer < targets[target].last
    ]
    assert sorted(got) == sorted(want)
    assert len({layer for *_, layer in got}) == bounds[-1]


@pytest.mark.parametrize(
    ("bounds", "stages", "copied"),
    [((0, 4, 8), (0, 1), []), ((0, 4, 8), (1, 0), ["part0", "part4"]), ((0, 2, 4, 8), (0, 0, 1), ["part0", "part2"])],
)
def test_stages_copy_what_is_no_share_of_theirs(bounds, stages, copied):
    own = stored(stack_of(bounds), stages, 2)
    assert [part.var for part in own.copied] == copied
    assert own.is_at_home == (not copied)


def test_layers_that_cannot_be_shared_lie_on_the_stage_of_the_first_ones():
    for own in (stored(stack_of((0, 2, 8), may_spread=False), (1, 2), 4), together(stored(stack_of((0, 2, 8)), (1, 2), 4))):
        assert own.kept == (Rows(1, 0, 8),)
        assert [(piece.first, piece.last) for piece in own.pieces] == [(0, 2), (2, 8)]
    assert pieces_between([Rows(0, 0, 2)], [Rows(1, 2, 4)]) == []


def test_the_mesh_of_all_stages_has_an_axis_of_its_own_for_them():
    assert union_mesh(LogicalMesh.of({"data": 2, "model": 4}), 3).axes == (("stage", 3), ("data", 2), ("model", 4))
    assert union_mesh(LogicalMesh.of({"stage": 2}), 2).names == ("stage_", "stage")
