"""The meshes that a search tries, and those that it may leave out."""

from itertools import permutations

import pytest

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import topology
from spmdctx.search.setup.meshes import candidate_meshes
from tests.oracles.exhaustive import exhaustive
from tests.search.random_graphs import random_machine, random_step


def _shapes(meshes):
    return [mesh.shape for mesh in meshes]


def test_every_factorisation_is_a_candidate_where_orders_cost_differently():
    machine = topology("h100")  # hosts of 8 devices
    assert _shapes(candidate_meshes(16, machine, 2)) == [(16,), (2, 8), (4, 4), (8, 2)]
    assert len(candidate_meshes(64, machine, 1)) == 1


def test_one_order_of_sizes_is_kept_where_all_cost_the_same():
    assert _shapes(candidate_meshes(8, topology("h100"))) == [(8,), (2, 4), (2, 2, 2)]


def test_a_prime_number_of_devices_has_one_mesh():
    assert _shapes(candidate_meshes(7, topology("h100"))) == [(7,)]


@pytest.mark.parametrize("seed", range(6))
def test_an_order_that_is_left_out_costs_the_same(seed):
    machine, step = random_machine(seed), random_step(seed, 3)
    kept = _shapes(candidate_meshes(8, machine, 2))
    by_shape = {
        shape: exhaustive(step.graph, step.scopes, step.from_literals, LogicalMesh.of(shape), machine).cost_s for shape in ((2, 4), (4, 2))
    }
    left_out = [shape for shape in permutations((2, 4)) if shape not in kept]
    assert len(kept) + len(left_out) == 3
    for shape in left_out:
        assert by_shape[shape] == pytest.approx(by_shape[shape[::-1]], rel=1e-9)
