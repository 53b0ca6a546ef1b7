"""Checkpoints of a pipelined state: bit for bit into other stages or none, and a training that goes on from one."""

import jax
import numpy as np

import spmdctx
from tests.processes import work_pipeline as work


def made(stages):
    options = {"pipeline_stages": stages} if stages > 1 else {"grad_accumulation_step": work.MICRO}
    step = spmdctx.parallel(work.train_step, parallel_mode="auto_parallel", topology="cpu", **options)
    return step, step.init(work.create, jax.random.key(stages), batch=work.batches(1)[0])


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_a_state_of_two_stages_is_restored_into_four_or_none_and_goes_on(tmp_path):
    data = work.batches(4)
    with jax.enable_x64(True):
        step, state = made(2)
        with spmdctx.CheckpointManager(tmp_path) as checkpoints:
            for number, batch in enumerate(data, 1):
                *state, value, _ = step(*state, batch)
                checkpoints.save(number, {"state": state})
        for stages in (4, 1, 2):
            _, empty = made(stages)
            with spmdctx.CheckpointManager(tmp_path) as checkpoints:
                restored = checkpoints.restore({"state": empty}, step=3).state["state"]
                last = checkpoints.restore({"state": empty}, step=4).state["state"]
            for new, old in zip(jax.tree.leaves(last), jax.tree.leaves(empty), strict=True):
                assert new.sharding == old.sharding
            assert bits(last) == bits(state)
        *continued, repeated, _ = step(*restored, data[3])
        assert bits((continued, repeated)) == bits((state, value))
