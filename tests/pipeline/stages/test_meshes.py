"""The mesh of all chunks is that of the one in the middle; where another one does not fit there, that one decides."""

from dataclasses import replace

import jax
import pytest

from spmdctx.context.layers import current_context
from spmdctx.errors import InfeasibleError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import topology
from spmdctx.pipeline.programs.passes import Passes
from spmdctx.pipeline.programs.slots import Holds
from spmdctx.pipeline.stages.captured import LossLeaf
from spmdctx.pipeline.stages.plans import ChunkPlanner
from spmdctx.step.planning.planner import plan_program
from spmdctx.trace.scope.settings import Settings
from tests.pipeline import losses
from tests.pipeline.cut.test_chunks import cut_line

ROOM = 2**30
FIRST, OTHER = LogicalMesh((("data", 4), ("model", 1))), LogicalMesh((("data", 2), ("model", 2)))


def planned(meshes, fits, *, room=None, num_limited=None, through=plan_program, splits=False):
    """Plans four chunks whose rough plans have some meshes in turn, and whose plans exist where `fits` says so of name, mesh and room."""
    params, batch = losses.decoder(jax.random.key(0), 4), losses.batch(jax.random.key(1), 8)
    chunks, leaves, still = cut_line(losses.loss, params, batch, 4)
    count = len(jax.tree.leaves(params))
    names = [LossLeaf(f"leaf{index}", Role.PARAMETER if index < count else Role.BATCH) for index in range(len(leaves))]
    passes = [Passes(chunk, frozenset(range(count)), 0, still) for chunk in chunks]
    context = current_context().with_checked({"parallel_mode": "auto_parallel", "device_num": 4})
    decided, left = [], list(meshes)

    def planner(captured, settings, **how):
        if captured.name == "pipeline_mesh":
            decided.append([number for number, own in enumerate(passes) if own.joint.jaxpr is captured.jaxpr])
            return through(captured, replace(settings, mesh=left.pop(0)), **how)
        if not fits(captured.name, settings.mesh, settings.memory_bytes):
            raise InfeasibleError(f"{captured.name} does not fit")
        return through(captured, settings, **how)

    settings = Settings(context, 4, None, topology("tpu-v5p"), memory_bytes=room)
    try:
        return ChunkPlanner(planner, settings, names, splits_backward=splits, num_limited=num_limited).plan(passes), decided
    except InfeasibleError as error:
        return str(error), decided


def test_a_chunk_that_does_not_fit_decides_the_mesh_anew():
    chunks, decided = planned([FIRST, OTHER], lambda name, mesh, room: name != "pipeline_chunk1" or mesh == OTHER)
    assert decided == [[2], [1]]
    assert [chunk.mesh for chunk in chunks] == [OTHER] * 4
    assert any(slot.holds is Holds.LEAVING for slot in chunks[0].joint.shardings)


def test_a_chunk_that_fits_nowhere_is_an_error():
    text, decided = planned([FIRST, FIRST], lambda name, mesh, room: name != "pipeline_chunk0")
    assert (text, decided) == ("pipeline_chunk0 does not fit", [[2], [0]])


def test_the_mesh_of_the_chunk_in_the_middle_is_kept():
    chunks, decided = planned([FIRST], lambda name, mesh, room: True)
    assert decided == [[2]]
    assert [chunk.mesh for chunk in chunks] == [FIRST] * 4


def test_a_task_that_takes_more_than_the_room_of_its_chunk_is_planned_without_it():
    tried = []

    def fits(name, mesh, room):
        tried.append((name, room))
        return name != "backward2" or room is None

    chunks, _ = planned([FIRST], fits, room=ROOM)
    assert len(chunks) == 4
    assert [one for one in tried if one[1] is None] == [("backward2", None)]


def test_only_the_first_chunks_keep_to_the_room_if_so_many_do():
    rooms = {}

    def fits(name, mesh, room):
        rooms[name] = room
        return True

    planned([FIRST], fits, room=ROOM, num_limited=1)
    limited = {name for name, room in rooms.items() if room == ROOM}
    assert limited == {"pipeline_chunk0", "forward0", "backward0"}
    assert len(rooms) == 12


@pytest.mark.parametrize("splits", [False, True])
def test_tasks_are_split_as_both_passes_together(splits):
    searched = []

    def seen(captured, settings, *, given=None, **how):
        searched.extend([captured.name] if given is None else [])
        return plan_program(captured, settings, given=given, **how)

    chunks, _ = planned([FIRST], lambda name, mesh, room: True, through=seen, splits=splits)
    for chunk in chunks:
        joint = chunk.joint.planned
        own = [op for task in chunk.tasks.values() for op in task.planned.assignment.ops]
        assert splits or tuple(own) == joint.assignment.ops
        # What the forward pass keeps is written and read once more.
        assert splits or sum(chunk.costs) <= 1.1 * joint.plan.cost.total_s
    # Parts of a backward pass take some of its ops in another order.
    assert [name for name in searched if name.startswith("forward")] == []
    assert any(name.startswith(("backward", "input", "weight")) for name in searched) == splits
