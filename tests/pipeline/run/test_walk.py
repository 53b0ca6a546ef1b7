"""Walks of all schedules give the loss and its gradient, hold as many micro-batches as theory says, and move what was planned."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdctx.context.layers import current_context
from spmdctx.ir.graph import Role
from spmdctx.machine.presets import topology
from spmdctx.pipeline.programs.passes import Passes
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.run.compiled import compiled_chunk
from spmdctx.pipeline.run.routes import Spot
from spmdctx.pipeline.run.tape import Tape
from spmdctx.pipeline.run.walk import Held, Walk
from spmdctx.pipeline.schedule.orders import gpipe, interleaved, one_f_one_b
from spmdctx.pipeline.schedule.simulate import simulate
from spmdctx.pipeline.schedule.tasks import Costs, cost_of
from spmdctx.pipeline.schedule.zero_bubble import zero_bubble_h1, zero_bubble_v
from spmdctx.pipeline.stages.captured import LossLeaf
from spmdctx.pipeline.stages.plans import ChunkPlanner
from spmdctx.step.planning.planner import plan_program
from spmdctx.trace.scope.settings import Settings
from tests.pipeline import losses
from tests.pipeline.cut.test_chunks import cut_line
from tests.pipeline.schedule.theory import in_flight_of

EVEN = Costs(1.0, 2.0, 1.0, 1.0)
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": lambda p, m: interleaved(p, m, 2),
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_v": lambda p, m: zero_bubble_v(p, m, cost_of([EVEN] * 2 * p)),
}


def walked(fn, params, batch, schedule, mode):
    """Runs a loss by a schedule; returns the mean loss, the mean gradients by leaf, and the walk's counts."""
    num_micro, stages = schedule.num_micro, schedule.num_stages
    parts = [jax.tree.map(lambda leaf, micro=micro: leaf[micro::num_micro], batch) for micro in range(num_micro)]
    chunks, leaves, still = cut_line(fn, params, parts[0], schedule.num_chunks)
    count = len(jax.tree.leaves(params))
    names = [LossLeaf(f"leaf{index}", Role.PARAMETER if index < count else Role.BATCH) for index in range(len(leaves))]
    passes = [Passes(chunk, frozenset(range(count)), 0, still) for chunk in chunks]
    context = current_context().with_checked({"parallel_mode": mode, "device_num": 8 // stages})
    settings = Settings(context, 8 // stages, None, topology("tpu-v5p"))
    planned = ChunkPlanner(plan_program, settings, names, splits_backward=schedule.splits_backward).plan(passes)
    devices = np.array(jax.devices()).reshape(stages, -1)
    compiled = [compiled_chunk(one, devices[stage]) for one, stage in zip(planned, schedule.stage_of, strict=True)]
    tape, held, fed = Tape(), [], {}
    for number, (chunk, one, own) in enumerate(zip(chunks, compiled, passes, strict=True)):

        def placed(slot, value, *name, one=one, number=number):
            spot = Spot((number, slot, *name), one.shardings[slot], jax.typeof(value))
            fed[spot.name] = jax.device_put(value, spot.place)
            return spot

        step = {
            slot: placed(slot, leaves[leaf]) for leaf in chunk.leaves if leaf < count and (slot := Slot(Holds.LEAF, leaf)) in one.shardings
        }
        for leaf in own.weights:
            slot, struct = Slot(Holds.SUM, leaf), own.sum_of(leaf)
            step[slot] = placed(slot, jnp.zeros(struct.shape, struct.dtype))
        given = [Slot(Holds.LEAF, leaf) for leaf in chunk.leaves if leaf >= count]
        micro = {
            index: {slot: placed(slot, [*leaves[:count], *jax.tree.leaves(part)][slot.number], index) for slot in given}
            for index, part in enumerate(parts)
        }
        held.append(Held(step, micro))
    run = simulate(schedule, cost_of([EVEN] * schedule.num_chunks))
    Walk(tape, compiled, schedule.stage_of, [{}] * len(chunks)).write(run.order, held)
    assert not any(store.micro for store in held)
    sums = [(leaf, store.step[Slot(Holds.SUM, leaf)].name) for own, store in zip(passes, held, strict=True) for leaf in own.weights]
    values = [spot.name for spot in held[-1].results[0].values()]
    program = tape.finished(list(fed), [*values, *(name for _, name in sums)])
    results = [np.asarray(one) for one in program(list(fed.values()))]
    total = {}
    for (leaf, _), value in zip(sums, results[len(values) :], strict=True):
        total[leaf] = total.get(leaf, 0) + value / num_micro
    return np.mean(results[: len(values)]), [total[leaf] for leaf in sorted(total)], program.counts


@pytest.mark.parametrize(
    ("name", "stages", "num_micro", "mode", "tied", "remat"),
    [
        ("1f1b", 2, 4, "auto_parallel", True, False),
        ("1f1b", 4, 8, "semi_auto_parallel", False, True),
        ("gpipe", 2, 4, "semi_auto_parallel", True, True),
        ("interleaved", 2, 4, "auto_parallel", True, False),
        ("zero_bubble_h1", 4, 8, "auto_parallel", True, False),
        ("zero_bubble_v", 2, 4, "semi_auto_parallel", True, False),
        ("1f1b", 8, 8, "auto_parallel", True, False),
    ],
)
def test_a_walk_gives_one_device_s_numbers(name, stages, num_micro, mode, tied, remat):
    schedule = SCHEDULES[name](stages, num_micro)
    with jax.enable_x64(True):
        params, batch = losses.decoder(jax.random.key(0), schedule.num_chunks, tied=tied), losses.batch(jax.random.key(1), 4 * num_micro)
        fn = partial(losses.loss, remat=remat)
        value, gradient, counts = walked(fn, params, batch, schedule, mode)
        want, wanted = jax.jit(jax.value_and_grad(fn))(params, batch)
    assert value == pytest.approx(float(want), abs=1e-12)
    for one, other in zip(gradient, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
    if schedule.num_chunks == stages:
        assert tuple(counts.in_flight[stage] for stage in range(stages)) == in_flight_of(schedule.name, stages, num_micro)
    assert all(counts.moves[chunk, chunk + 1] >= num_micro for chunk in range(schedule.num_chunks - 1))
