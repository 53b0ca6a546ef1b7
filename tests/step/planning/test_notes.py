"""What is true of several leaves is said once, with their number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx

PARAMS = [np.ones((16, 16), np.float32) for _ in range(3)]


def batch(rows, count=6):
    return {f"field{number}": np.ones((rows, 16), np.float32) for number in range(count)}


def loss(params, frozen, batch):
    x = sum(batch.values())
    for own, fixed in zip(params, frozen, strict=True):
        x = x + jnp.tanh(x @ (own + fixed))
    return jnp.mean(x**2)


def step(params, batch):
    value, gradients = jax.value_and_grad(loss)(params, params, batch)
    return jax.tree.map(jnp.subtract, params, gradients), value


def adapted(params, frozen, batch):
    value, gradients = jax.value_and_grad(loss)(params, frozen, batch)
    return jax.tree.map(jnp.subtract, params, gradients), value


@pytest.mark.parametrize("mode", ["auto_parallel", "semi_auto_parallel"])
def test_leaves_that_do_not_divide_are_one_note(mode):
    planned = spmdctx.parallel(step, parallel_mode=mode, dataset_strategy="data_parallel")
    with pytest.warns(spmdctx.ContextWarning, match="do not divide over") as caught:
        planned(PARAMS, batch(27))
    (note,) = [note for note in planned.plan(PARAMS, batch(27)).notes if "do not divide over" in note]
    assert note.startswith("6 batch leaves do not divide over ")
    assert note.endswith(
        "They are 'batch/field0' (27, 16), 'batch/field1' (27, 16), 'batch/field2' (27, 16), 'batch/field3' (27, 16), and 2 more."
    )
    assert note in [str(one.message) for one in caught]


def test_leaves_of_other_sizes_are_each_in_the_note_of_their_kind():
    leaves = {"even": np.ones((32, 16), np.float32), **batch(27, 2), "other": np.ones((26, 16), np.float32)}
    plan = spmdctx.plan(
        lambda params, batch: (params, [jnp.sum(leaf) for leaf in batch.values()]),
        PARAMS,
        leaves,
        parallel_mode="semi_auto_parallel",
        mesh={"data": 8},
    )
    (note,) = [note for note in plan.notes if "do not divide over" in note]
    assert note.startswith("3 batch leaves do not divide over data: every device holds them whole. A multiple of 8 rows would.")
    assert "'batch/other' (26, 16)" in note
    assert "even" not in note


def test_arguments_that_are_no_batch_for_one_reason_are_one_note():
    plan = spmdctx.plan(adapted, PARAMS, PARAMS, batch(32), parallel_mode="auto_parallel")
    (note,) = [note for note in plan.notes if "taken as the batch" in note]
    assert note == (
        "3 arguments are not taken as the batch: their dimension 0 is also dimension 0 of 'params/0'; batch_argnames= says it otherwise. "
        "They are 'frozen/0', 'frozen/1', 'frozen/2'."
    )


def test_raw_keys_are_one_note():
    def drawn(params, *keys):
        return params, sum(jax.random.normal(key, (16, 16)) for key in keys)

    plan = spmdctx.plan(drawn, PARAMS, *[jax.random.PRNGKey(number) for number in range(5)], parallel_mode="auto_parallel")
    assert [note for note in plan.notes if "raw PRNG key" in note] == [
        "keys/0, keys/1, keys/2, and 2 more: uint32[2] is taken as a raw PRNG key."
    ]


def test_a_stage_says_once_that_its_devices_repeat_work():
    def pipelined(params, batch):
        cell = spmdctx.PipelineCell(lambda params, batch: loss(params, params, batch), micro_size=2)
        value, gradients = spmdctx.value_and_grad(cell)(params, batch)
        return jax.tree.map(jnp.subtract, params, gradients), value

    plan = spmdctx.plan(pipelined, PARAMS, batch(36), parallel_mode="semi_auto_parallel", pipeline_stages=2, device_num=16)
    said = [note for note in plan.notes if "repeat each other" in note]
    assert said
    assert len({note[: len("Stage 0")] for note in said}) == len(said)
