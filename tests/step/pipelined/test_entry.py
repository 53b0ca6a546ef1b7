"""Steps of several pipeline stages: one device's numbers, whatever kind of model, optimizer and schedule."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import ContextError, ContextWarning, StrategyError, UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import local_shape
from tests.pipeline import losses
from tests.step.pipelined import small

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))


def assert_close(got, want, tolerance=1e-9):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=tolerance, rtol=tolerance)


def decoder_step(params, state, batch):
    loss, gradient = spmdctx.value_and_grad(spmdctx.PipelineCell(losses.loss, micro_size=8))(params, batch)
    update, state = CLIPPED.update(gradient, state, params)
    return optax.apply_updates(params, update), state, loss, optax.tree.norm(gradient)


@pytest.mark.parametrize(("stages", "layers", "mode"), [(2, 3, "auto_parallel"), (4, 4, "semi_auto_parallel"), (8, 8, "auto_parallel")])
def test_steps_of_a_pipeline_have_one_device_s_numbers(stages, layers, mode):
    with jax.enable_x64(True):
        params, batch = losses.decoder(jax.random.key(0), layers), losses.batch(jax.random.key(1), 32)
        got = want = (params, CLIPPED.init(params))
        step = spmdctx.parallel(decoder_step, parallel_mode=mode, pipeline_stages=stages)
        plain = jax.jit(decoder_step)
        for _ in range(3):
            *got, loss, norm = step(*got, batch)
            *want, wanted, wanted_norm = plain(*want, batch)
        assert_close((got, loss, norm), (want, wanted, wanted_norm))
        assert len(step.plan(*want, batch).stages) == stages


def test_stacked_layers_and_their_state_have_one_device_s_numbers():
    with jax.enable_x64(True):
        params, batch = losses.decoder(jax.random.key(0), 7, stacked=True), losses.batch(jax.random.key(1), 32)
        got = want = (params, CLIPPED.init(params))
        step, plain = spmdctx.parallel(decoder_step, parallel_mode="auto_parallel", pipeline_stages=2), jax.jit(decoder_step)
        for _ in range(3):
            *got, loss, norm = step(*got, batch)
            *want, wanted, wanted_norm = plain(*want, batch)
        assert_close((got, loss, norm), (want, wanted, wanted_norm))


def test_each_stage_holds_its_own_parameters_alone():
    params, *_ = small.parallel(4)(*small.state_of(4, tied=False), small.batch_of())
    devices = [frozenset(leaf.devices()) for leaf in jax.tree.leaves(params)]
    assert {len(own) for own in devices} == {2}
    assert len(set(devices)) == 4


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm, self.dropout = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dropout(self.norm(self.dense(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_statistics_and_streams_of_keys_pass_from_micro_batch_to_micro_batch():
    def step(model, optimizer, x, y):
        loss, gradient = spmdctx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, gradient)
        return loss

    x, y = jax.random.normal(jax.random.key(0), (32, 16)), jax.random.normal(jax.random.key(1), (32, 4))
    found = []
    for options in ({"pipeline_stages": 2}, {}):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        parallel = spmdctx.parallel(step, parallel_mode="auto_parallel", grad_accumulation_step=4, **options)
        values = [float(parallel(model, optimizer, x, y)) for _ in range(2)]
        found.append((values, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))), int(model.layers[0].dropout.rngs.count[...])))
    assert_close(*found, 1e-5)


def test_linen_with_aux_results_of_every_kind():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(4):
                x = jnp.tanh(nn.Dense(16)(x))
            return nn.Dense(4)(x)

    def loss(params, x, y):
        out = Net().apply({"params": params}, x)
        return jnp.mean((out - y) ** 2), {"out": out, "mean": out.mean(), "scale": jnp.ones(3)}

    def step(params, x, y):
        (value, aux), gradient = spmdctx.value_and_grad(loss, has_aux=True)(params, x, y)
        return jax.tree.map(lambda own, grad: own - 0.1 * grad, params, gradient), value, aux

    x, y = jax.random.normal(jax.random.key(0), (16, 16)), jax.random.normal(jax.random.key(1), (16, 4))
    params = Net().init(jax.random.key(2), x)["params"]
    parallel = spmdctx.parallel(step, parallel_mode="auto_parallel", pipeline_stages=2, grad_accumulation_step=4)
    assert_close(parallel(params, x, y), jax.jit(step)(params, x, y), 1e-5)


@pytest.mark.parametrize(("asked", "noted"), [(1, 0), (2, 1), (8, 0)])
def test_the_plan_says_whose_number_of_micro_batches_counts(asked, noted):
    params, batch = losses.decoder(jax.random.key(0), 2), losses.batch(jax.random.key(1), 32)
    step = spmdctx.parallel(decoder_step, parallel_mode="auto_parallel", pipeline_stages=2, grad_accumulation_step=asked)
    plan = step.plan(params, CLIPPED.init(params), batch)
    assert plan.simulation.schedule.num_micro == 8
    assert (
        sum(note == f"grad_accumulation_step={asked} has no effect: PipelineCell asks for 8 micro-batches." for note in plan.notes) == noted
    )


def test_few_micro_batches_are_refused_with_the_remedy():
    params, batch = losses.decoder(jax.random.key(0), 4), losses.batch(jax.random.key(1), 32)
    step = spmdctx.parallel(
        lambda params, batch: spmdctx.value_and_grad(losses.loss)(params, batch), parallel_mode="auto_parallel", pipeline_stages=4
    )
    with pytest.raises(ContextError, match="PipelineCell"):
        step(params, batch)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda params, batch: jax.value_and_grad(losses.loss)(params, batch), "no call of spmdctx.value_and_grad"),
        (
            lambda params, batch: [spmdctx.grad(partial(losses.loss, remat=remat))(params, batch) for remat in (True, False)],
            "needs one loss to cut",
        ),
    ],
)
def test_steps_without_one_loss_are_refused(step, words):
    params, batch = losses.decoder(jax.random.key(0), 4), losses.batch(jax.random.key(1), 32)
    with pytest.raises(UnsupportedError, match=words):
        spmdctx.parallel(step, parallel_mode="auto_parallel", pipeline_stages=2, grad_accumulation_step=4)(params, batch)


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_a_pipeline_cell_needs_a_number(size):
    with pytest.raises(ContextError, match="micro_size"):
        spmdctx.PipelineCell(losses.loss, size)


def chain(params, x):
    return jnp.mean(sum(jnp.tanh(x @ w) for w in params) ** 2)


def doubled(params, x):
    return chain(params, spmdctx.shard(lambda x: x * 2, in_strategy=((8, 1),))(x))


FAULTS = {
    "cell and rows": (
        (chain, 4),
        15,
        {},
        ["4 micro-batches", "15 is not divisible by 4", "(15, 4)", "such as 16", "micro_size of PipelineCell"],
    ),
    "cell and stages": ((chain, 4), 64, {"pipeline_stages": 8}, ["PipelineCell(micro_size=4), and pipeline_stages=8"]),
    "option and stages": ((chain, None), 66, {"grad_accumulation_step": 3}, ["grad_accumulation_step=3, and pipeline_stages=4"]),
    "devices of a stage": (
        (doubled, 4),
        64,
        {},
        ["each of 4 pipeline stages has 2 of 8 devices", "4 micro-batches 16 of the batch's 64 rows"],
    ),
    "slices of a batch": ((chain, 4), 60, {"dataset_strategy": ((2, 1),)}, ["size 15", "4 micro-batches 15 of the batch's 60 rows"]),
    "slices and stages": ((chain, 4), 64, {"dataset_strategy": ((8, 1),)}, ["2 devices of each of 4 pipeline stages", "8 devices in all"]),
}


def chain_step(loss, micro_size):
    own = loss if micro_size is None else spmdctx.PipelineCell(loss, micro_size)
    return lambda params, x: spmdctx.value_and_grad(own)(params, x)


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_have_the_numbers_that_the_user_gave(fault):
    made, rows, options, words = FAULTS[fault]
    step = spmdctx.parallel(chain_step(*made), **{"parallel_mode": "semi_auto_parallel", "pipeline_stages": 4, **options})
    with pytest.raises((StrategyError, ContextError)) as caught:
        step.plan([jnp.eye(4)] * 8, jnp.ones((rows, 4)))
    assert [word for word in words if word not in str(caught.value)] == []


def test_rows_that_the_devices_of_a_stage_do_not_share_are_said_at_the_first_call():
    step = spmdctx.parallel(chain_step(chain, 4), parallel_mode="semi_auto_parallel", pipeline_stages=2)
    params, x = [jnp.eye(4)] * 8, jnp.ones((60, 4))
    with pytest.warns(ContextWarning, match=r"4 micro-batches.*do not divide over data of a stage.*multiple of 16 rows.*'x' \[60, 4\]"):
        step(params, x)
    assert sum("do not divide" in note for note in step.plan(params, x).notes) == 1


def test_a_mesh_that_is_too_large_for_a_stage_is_named():
    step = spmdctx.parallel(chain_step(chain, 4), parallel_mode="semi_auto_parallel", pipeline_stages=2, mesh={"data": 8})
    with pytest.raises(ContextError, match=r"(?s)16 devices, and 8.*pipeline_stages=2, each on 8 devices.*mesh of 4 devices"):
        step([jnp.eye(4)] * 8, jnp.ones((64, 4)))


def test_a_cell_without_stages_is_noted():
    plan = spmdctx.plan(chain_step(chain, 4), [jnp.eye(4)], jnp.ones((16, 4)), parallel_mode="semi_auto_parallel")
    (note,) = [note for note in plan.notes if "PipelineCell" in note]
    assert note.startswith("PipelineCell(micro_size=4) has no effect: pipeline_stages is 1. grad_accumulation_step=4")


def test_a_pipeline_s_state_is_made_on_its_stages_and_its_batch_is_placed():
    batch, step = small.batch_of(), small.parallel()
    params, state = step.init(lambda: small.state_of(tied=False), batch=batch)
    assert len({frozenset(leaf.devices()) for leaf in jax.tree.leaves(params)}) == 2
    assert_close(params, small.state_of(tied=False)[0], 1e-6)
    before = jax.tree.map(lambda leaf: leaf.sharding, params)
    params, *_ = step(params, state, step.shard_batch(batch))
    assert jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sharding, params)) == jax.tree.leaves(before)


def test_the_plan_names_the_stage_of_each_leaf_and_what_its_programs_note():
    params, batch = losses.decoder(jax.random.key(0), 2, tied=False), losses.batch(jax.random.key(1), 32)
    options = {"enable_parallel_optimizer": True, "layerwise_parallel": ["nowhere"]}
    step = spmdctx.parallel(decoder_step, parallel_mode="auto_parallel", pipeline_stages=2, **options)
    args = (params, CLIPPED.init(params), batch)
    plan = step.plan(*args)
    results = step(*args)
    leaves = jax.tree.leaves((params, args[1]))
    state = [leaf for leaf in plan.inputs if leaf.role in (Role.PARAMETER, Role.OPTIMIZER)]
    assert len(state) == len(leaves)
    assert {leaf.stage for leaf in state} == {0, 1}
    stages = [frozenset(jax.devices()[: plan.num_devices // 2]), frozenset(jax.devices()[plan.num_devices // 2 : plan.num_devices])]
    for planned, made in zip(plan.outputs, jax.tree.leaves(results), strict=True):
        assert made.devices() == stages[planned.stage] or not made.ndim
        assert made.sharding.shard_shape(made.shape) == local_shape(planned.shape, planned.sharding, plan.logical_mesh)
    assert sum("parallel_optimizer_threshold" in note and note.startswith("Stage") for note in plan.notes) > 0
    assert sum("'nowhere' matches no argument" in note for note in plan.notes) == 1
    assert not any("batch_argnums" in note for note in plan.notes)


def test_modes_whose_devices_all_run_the_whole_loss_have_no_stages():
    params, batch = losses.decoder(jax.random.key(0), 2), losses.batch(jax.random.key(1), 32)
    args = (params, CLIPPED.init(params), batch)
    step = spmdctx.parallel(decoder_step, parallel_mode="data_parallel", pipeline_stages=2, gradients_mean=True)
    with pytest.warns(ContextWarning, match="pipeline_stages=2 has no effect"):
        plan = step.plan(*args)
    assert plan.logical_mesh.num_devices == 8
    assert_close(step(*args)[2], jax.jit(decoder_step)(*args)[2], 1e-5)


def test_what_a_pipeline_does_not_have_is_refused_by_name():
    params, batch = losses.decoder(jax.random.key(0), 2), losses.batch(jax.random.key(1), 32)
    args = (params, CLIPPED.init(params), batch)
    step = spmdctx.parallel(decoder_step, parallel_mode="auto_parallel", pipeline_stages=2)
    plan = step.plan(*args)
    assert "1f1b" in str(plan)
    with pytest.raises(UnsupportedError, match="plan of a pipeline"):
        plan.collectives  # noqa: B018  # asking for it is the test
    with pytest.raises(UnsupportedError, match="jit"):
        jax.jit(step)(*args)
    with pytest.raises(AttributeError):
        plan.nonsense  # noqa: B018  # asking for it is the test
