"""Regions with a fusion number: what their ops reduce in both passes is combined by number in the compiled program."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from tests.audit.compile_only import need_gpu, need_tpu
from tests.lowering.gradients import combined

TARGETS = {"tpu": (need_tpu, "tpu-v5e"), "gpu": (need_gpu, "h100")}
NUMBERS = (1, 2, 1, None, 2, 1)
ROWS = [64 + 8 * index for index in range(len(NUMBERS))]
"""Products differ in their number of rows, by which their sums are told apart."""
WIDTH, HIDDEN = 256, 512


def layer(x, up, down):
    return jnp.tanh(x @ up) @ down


def loss(scales, ups, downs):
    total = 0.0
    for number, scale, up, down in zip(NUMBERS, scales, ups, downs, strict=True):
        split = spmdctx.shard(layer, ((1, 1), (1, 8), (8, 1)), ((1, 1),), fusion=number)
        total += jnp.sum(jnp.tanh(split(jnp.tanh(scale), up, down)) ** 2)
    return total


def forward(scales, ups, downs):
    return loss(scales, ups, downs)


def backward(scales, ups, downs):
    value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(scales, ups, downs)
    return value, jax.tree.map(lambda leaf, one: leaf - 0.1 * one, (scales, ups, downs), gradients)


def arguments():
    rng = np.random.default_rng(0)
    shapes = [[(rows, WIDTH) for rows in ROWS], [(WIDTH, HIDDEN)] * len(ROWS), [(HIDDEN, WIDTH)] * len(ROWS)]
    return [[jnp.asarray(rng.normal(size=shape) / 16, jnp.float32) for shape in own] for own in shapes]


def parallel(step, **options):
    return spmdctx.parallel(step, parallel_mode="semi_auto_parallel", dataset_strategy="full_batch", batch_argnums=(), **options)


def by_rows(compiled):
    """The rows of the sums of activations in each all-reduce; the loss may ride along."""
    sizes = [[math.prod(shape) for shape in one.shapes] for one in combined(compiled.as_text()) if one.kind == "all_reduce"]
    found = [sorted(size // WIDTH for size in own if size >= WIDTH) for own in sizes]
    return sorted(rows for rows in found if rows)


@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize(("step", "passes"), [(forward, 1), (backward, 2)], ids=["forward", "both"])
def test_sums_of_a_number_are_one_collective_and_apart_from_others(backend, step, passes):
    need, topology = TARGETS[backend]
    run = parallel(step, devices=need(), topology=topology)
    wanted = [[rows for rows, number in zip(ROWS, NUMBERS, strict=True) if number == own] for own in (1, 2, None)]
    assert by_rows(run.lower(*arguments()).compile()) == sorted(wanted * passes)
    assert run.audit(*arguments()).ok


def test_grouping_changes_no_numbers_and_cpu_says_that_it_has_none():
    run = parallel(backward)
    with pytest.warns(spmdctx.ContextWarning, match="the CPU compiler drops what keeps them apart"):
        plan = run.plan(*arguments())
    assert any("the CPU compiler combines what does not wait" in note for note in plan.notes)
    assert run.verify(*arguments()).ok


def test_sums_that_need_each_other_are_reduced_one_after_the_other():
    def chained(x, up, down):
        split = spmdctx.shard(layer, ((1, 1), (1, 8), (8, 1)), ((1, 1),), fusion=1)
        return split(jnp.tanh(split(x, up, down)), up, down)

    scales, ups, downs = arguments()
    run = parallel(chained, devices=need_tpu())
    assert by_rows(run.lower(scales[0], ups[0], downs[0]).compile()) == [[ROWS[0]]] * 2


def test_what_a_region_gathers_is_named():
    def gathered(x, up, down):
        return spmdctx.shard(layer, ((1, 1), (1, 8), (1, 8)), ((1, 8),), fusion=3)(x, up, down)

    scales, ups, downs = arguments()
    run = spmdctx.parallel(
        gathered, parallel_mode="semi_auto_parallel", dataset_strategy="full_batch", batch_argnums=(), topology="tpu-v5e", device_num=8
    )
    plan = run.plan(scales[0], ups[0], downs[0])
    assert [row.kind for row in plan.collectives] == ["all_gather"]
    assert any(note.startswith("shard(fusion=3) groups what its ops reduce; its 1 all_gather") for note in plan.notes)
