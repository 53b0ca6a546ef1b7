"""The table of cheapest chains against a shortest-path search written out plainly."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest

from spmdctx.ir.domain import domain
from spmdctx.ir.mesh import LogicalMesh, divides
from spmdctx.ir.sharding import TensorSharding
from spmdctx.machine.collectives import collective_time_s
from spmdctx.machine.presets import topology
from spmdctx.machine.reshard import reshard_steps
from spmdctx.machine.reshard_table import reshard_table
from spmdctx.machine.topology import Preferences, as_asked

CASES = [((8,), (32, 64)), ((2, 4), (32, 64)), ((2, 4), (2, 6, 16)), ((2, 2, 2), (8, 16)), ((2, 3), (6, 4, 3)), ((2, 2), (4,))]


def every_sharding(mesh: LogicalMesh, shape: tuple[int, ...]) -> list[TensorSharding]:
    """All ordered axes per dimension that are disjoint and divide."""
    choices = [own for count in range(len(mesh.names) + 1) for own in itertools.permutations(mesh.names, count)]
    found = []
    for dims in itertools.product(choices, repeat=len(shape)):
        used = [name for own in dims for name in own]
        if len(used) == len(set(used)) and divides(shape, dims, mesh):
            found.append(dims)
    return found


def single_step(before: TensorSharding, after: TensorSharding, mesh: LogicalMesh) -> float:
    """What one step between two shardings counts, in units of the whole tensor; infinite where it takes several."""
    slices = math.prod(mesh.num_slices(own) for own in before)
    collective = 0.51 / mesh.num_devices
    options = [math.inf]
    if [mesh.num_slices(own) for own in before] == [mesh.num_slices(own) for own in after]:
        options.append(1 / slices + collective)
    changed = [dim for dim in range(len(before)) if before[dim] != after[dim]]
    if len(changed) == 1:
        old, new = before[changed[0]], after[changed[0]]
        if len(new) == len(old) + 1 and new[: len(old)] == old:
            options.append(1e-6)
        if len(new) < len(old) and old[: len(new)] == new:
            options.append((mesh.num_slices(old[len(new) :]) - 1) / slices + collective)
    if len(changed) == 2:
        for giver, taker in (changed, changed[::-1]):
            kept, leaving = after[giver], before[giver][len(after[giver]) :]
            if leaving and before[giver] == kept + leaving and after[taker] == before[taker] + leaving:
                group = mesh.num_slices(leaving)
                options.append((group - 1) / group / slices + collective)
    return min(options)


def shortest(states: list[TensorSharding], start: int, mesh: LogicalMesh) -> list[float]:
    best = [math.inf] * len(states)
    queue = [(0.0, start)]
    while queue:
        price, place = heapq.heappop(queue)
        if price >= best[place]:
            continue
        best[place] = price
        for other, after in enumerate(states):
            if best[other] == math.inf:
                heapq.heappush(queue, (price + single_step(states[place], after, mesh), other))
    return best


@pytest.mark.parametrize(("axes", "shape"), CASES)
def test_the_domain_holds_every_sharding_once(axes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = LogicalMesh.of(axes)
    known = domain(mesh, shape)
    assert sorted(known.shardings) == sorted(every_sharding(mesh, shape))
    assert [known.number(sharding) for sharding in known.shardings] == list(range(len(known)))
    assert known.shardings[0] == ((),) * len(shape)


@pytest.mark.parametrize(("axes", "shape"), CASES)
def test_chains_are_as_short_as_a_plain_search_finds_and_seconds_add_up(axes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh, topo = LogicalMesh.of(axes), topology("h100")
    known = domain(mesh, shape)
    table = reshard_table(known, topo)
    total = 4 * math.prod(shape)
    for first, source in enumerate(known.shardings):
        best = shortest(list(known.shardings), first, mesh)
        for last, target in enumerate(known.shardings):
            steps = reshard_steps(shape, 4, source, target, mesh)
            counted, current, seconds = 0.0, source, 0.0
            for step in steps:
                if step.kind == "slice":
                    counted += 1e-6 * (sum(map(len, step.sharding)) - sum(map(len, current)))
                else:
                    counted += single_step(current, step.sharding, mesh)
                    seconds += collective_time_s(step.kind, step.payload_bytes, step.axes, mesh, topo)
                current = step.sharding
            assert current == target
            assert counted == pytest.approx(best[last], abs=1e-9)
            assert table.fixed_s[first, last] + table.s_per_byte[first, last] * total == pytest.approx(seconds, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("axes", "shape"), CASES)
def test_seconds_without_all_to_all_are_those_of_the_chains_without_it(axes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh, machine = LogicalMesh.of(axes), as_asked(topology("h100"), Preferences(allows_all_to_all=False))
    known = domain(mesh, shape)
    table = reshard_table(known, machine)
    for first, source in enumerate(known.shardings):
        for last, target in enumerate(known.shardings):
            steps = reshard_steps(shape, 4, source, target, mesh, all_to_all=False)
            assert "all_to_all" not in {step.kind for step in steps}
            seconds = sum(
                collective_time_s(step.kind, step.payload_bytes, step.axes, mesh, machine) for step in steps if step.kind != "slice"
            )
            predicted = table.fixed_s[first, last] + table.s_per_byte[first, last] * 4 * math.prod(shape)
            assert predicted == pytest.approx(seconds, rel=1e-9, abs=1e-15)
