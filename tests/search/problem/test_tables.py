"""Meshes of several sizes at once: whatever one of them allows is allowed, and costs no more."""

import numpy as np
import pytest

from spmdctx.cost.step import Step
from spmdctx.ir.mesh import AnySizes
from spmdctx.machine.presets import PRESETS
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import Searcher
from spmdctx.search.problem.orbits import resembling
from spmdctx.search.setup.meshes import candidate_meshes, sizes_of
from spmdctx.search.setup.request import Setup
from tests.search.random_graphs import random_machine, random_step


def _cheaper(own, joint):
    """Checks every state and every pair of states of a mesh; returns how many of them cost less on the meshes of several sizes."""
    places, count = resembling(own, joint), 0
    for node, (mine, theirs) in enumerate(zip(own.costs(), joint.costs(), strict=True)):
        assert (places[node] >= 0).all(), own.network.nodes[node]
        least = theirs[places[node]]
        assert (least <= mine * (1 + 1e-12)).all(), own.network.nodes[node]
        count += int((least < mine * (1 - 1e-9)).sum())
    for carry, load in own.network.carries.items():
        left, right = places[carry.source.node], places[carry.target]
        mine, least = own.table(carry, load), joint.table(carry, load)[np.ix_(left, right)]
        assert (least <= mine * (1 + 1e-12)).all(), carry
        count += int((least < mine * (1 - 1e-9)).sum())
    return count


@pytest.mark.parametrize("kind", ["random", "tpu-v5p", "tpu-v5e", "h100"])
@pytest.mark.parametrize("first", [7300, 7310])
def test_meshes_of_several_sizes_at_once_cost_no_more_than_each(kind, first):
    cheaper = 0
    for seed in range(first, first + 10):
        machine = random_machine(seed) if kind == "random" else PRESETS[kind]
        step = (lambda made: Step(made.graph, made.scopes, made.from_literals, frozenset()))(random_step(seed, 6))
        formulation = Searcher(step, machine, DynamicOptions())._meshes.formulation
        meshes = [mesh for mesh in candidate_meshes(16, machine, 2) if len(mesh.axes) == 2]
        assert len(set(map(sizes_of, meshes))) == 2
        joint = formulation.tables(Setup(AnySizes.of_meshes(meshes)))
        cheaper += sum(_cheaper(formulation.tables(Setup(mesh)), joint) for mesh in meshes)
    assert cheaper
