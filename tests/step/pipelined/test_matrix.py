"""Pipelines of every schedule, number of stages, kind and flavour of loss, two by two: one device's numbers, and what theory says."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

import spmdctx
from tests.pipeline.schedule.theory import in_flight_of
from tests.step.pipelined import models

SCHEDULES = {
    "gpipe": {"pipeline_scheduler": "gpipe"},
    "1f1b": {},
    "interleaved": {"pipeline_interleave": True},
    "zero_bubble_v": {"pipeline_scheduler": "zero_bubble_v"},
}
FACTORS = (tuple(SCHEDULES), (2, 4, 8), models.KINDS, models.FLAVOURS)
STEPS = 10

pytestmark = pytest.mark.usefixtures("quick_compiler")


def pairs(row):
    return set(itertools.combinations(enumerate(row), 2))


def chunks_of(schedule, stages):
    return stages * (2 if schedule in ("interleaved", "zero_bubble_v") else 1)


def covering_rows():
    """Rows that hold every pair of values of two factors, found greedily; few of them have many chunks, which compile slowly."""
    every = [*itertools.product(*FACTORS)]
    wanted = set().union(*map(pairs, every))
    rows = []
    while wanted:
        best = max(every, key=lambda row: (len(pairs(row) & wanted), -chunks_of(*row[:2])))
        wanted -= pairs(best)
        rows.append(best)
    return rows


ROWS = covering_rows()


def run(flavour, case, step):
    """Runs some steps; returns what they gave, and the last state."""
    state, found = case.state, []
    for _ in range(STEPS):
        made = step(state, case.batch)
        state, value = (state, made) if flavour == "nnx" else made
        found.append(value)
    return (found, nnx.to_pure_dict(nnx.state(state)) if flavour == "nnx" else state), state


def one_device(flavour, kind, case, micro):
    """A step on one device. Noise and statistics are those of micro-batches; all else is the whole batch's, by JAX alone."""
    if kind in ("dropout", "batch_norm"):
        return spmdctx.parallel(case.step, parallel_mode="stand_alone", grad_accumulation_step=micro)
    return (nnx.jit if flavour == "nnx" else jax.jit)(case.step)


def numbers(tree):
    leaves = (
        jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in jax.tree.leaves(tree)
    )
    return [np.asarray(leaf) for leaf in leaves]


def test_the_rows_hold_every_pair():
    assert set().union(*map(pairs, ROWS)) == set().union(*map(pairs, itertools.product(*FACTORS)))


@pytest.mark.parametrize(("schedule", "stages", "kind", "flavour"), ROWS)
def test_a_pipeline_has_one_device_s_numbers(schedule, stages, kind, flavour):
    micro = max(4, stages)
    options = {"pipeline_stages": stages, "pipeline_config": SCHEDULES[schedule], "grad_accumulation_step": micro}
    with jax.enable_x64(True):
        case, other = (models.case(flavour, kind, max(4, chunks_of(schedule, stages))) for _ in range(2))
        parallel = spmdctx.parallel(case.step, parallel_mode="auto_parallel", **options)
        got, state = run(flavour, case, parallel)
        want, _ = run(flavour, other, one_device(flavour, kind, other, micro))
        for one, wanted in zip(numbers(got), numbers(want), strict=True):
            np.testing.assert_allclose(one, wanted, atol=1e-9, rtol=1e-9)
        plan, counts = parallel.plan(state, case.batch), parallel._entry_of((state, case.batch), {}).program.jitted.counts
    counted = tuple(counts.in_flight_of_stage[stage] for stage in range(stages))
    name, rounds = {"interleaved": ("interleaved 1f1b", 2)}.get(schedule, (schedule, 1))
    expected = in_flight_of(name, stages, micro, rounds)
    if expected is None:
        assert counted == plan.simulation.in_flight
        assert max(counted) <= 2 * stages
    else:
        assert counted == expected
