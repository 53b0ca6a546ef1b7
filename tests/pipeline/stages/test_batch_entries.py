"""A dataset_strategy with an entry for each batch leaf: it holds for the stages that read the leaf, and for no other array."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.errors import StrategyError


def step(params, batch):
    def loss(params, batch):
        x = batch["x"]
        for weight in params:
            x = x + jnp.tanh(x @ weight)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradient = spmdctx.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda own, grad: own - 0.1 * grad, params, gradient), value


def planned(dataset, mode):
    params, batch = [jnp.ones((16, 16))] * 4, {"x": jnp.ones((32, 16)), "y": jnp.ones((32, 16))}
    run = spmdctx.parallel(step, parallel_mode=mode, pipeline_stages=2, device_num=8, grad_accumulation_step=4, dataset_strategy=dataset)
    plan = run.plan(params, batch)
    return plan, {leaf.path: leaf for leaf in plan.inputs if leaf.path.startswith("batch")}


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize(("x", "y"), [((4, 1), (4, 1)), ((2, 1), (1, 2))])
def test_each_stage_splits_the_leaves_that_it_reads(x, y, mode):
    plan, leaves = planned((x, y), mode)
    for path, wanted in (("batch/x", x), ("batch/y", y)):
        own = next(row for stage in plan.stages for task in stage.tasks.values() for row in task.inputs if row.path == path)
        assert tuple(plan.logical_mesh.num_slices(axes) for axes in own.sharding) == wanted
    assert leaves.keys() == {"batch/x", "batch/y"}


def test_entries_that_do_not_match_the_leaves_of_the_step_are_refused():
    with pytest.raises(StrategyError, match="dataset_strategy has 3 entries, but the step has 2 batch leaves"):
        planned(((2, 1), (2, 1), (2, 1)), "semi_auto_parallel")
