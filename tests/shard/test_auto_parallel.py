"""MindSpore's `AutoParallel`: each of its methods sets an option, or is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx import AutoParallel, ContextError, UnsupportedError

PARAMS = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
X = jnp.ones((32, 64))


def step(params, x):
    value, grads = jax.value_and_grad(lambda params: jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2))(params)
    return jax.tree.map(lambda old, new: old - 0.1 * new, params, grads), value


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("semi_auto", {"parallel_mode": "semi_auto_parallel"}),
        ("sharding_propagation", {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"}),
        ("recursive_programming", {"parallel_mode": "auto_parallel", "search_mode": "recursive_programming"}),
    ],
)
def test_a_mode_plans_and_runs_as_its_options(mode, options):
    net = AutoParallel(step, parallel_mode=mode)
    assert net.plan(PARAMS, X).to_json() == spmdctx.plan(step, PARAMS, X, **options).to_json()
    np.testing.assert_allclose(net(PARAMS, X)[1], step(PARAMS, X)[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "arguments", "options"),
    [
        ("dataset_strategy", ("full_batch",), {"dataset_strategy": "full_batch"}),
        ("dataset_strategy", (((4, 1),),), {"dataset_strategy": ((4, 1),)}),
        ("hsdp", (4, 0, "level3"), {"enable_parallel_optimizer": True, "optimizer_weight_shard_size": 4}),
        ("pipeline", (2,), {"pipeline_stages": 2}),
        ("comm_fusion", ({"allreduce": {"mode": "size", "config": 32}},), {}),
        ("enable_gradients_mean", (), {"gradients_mean": True}),
        ("disable_gradient_fp32_sync", (), {"gradient_fp32_sync": False}),
        ("disable_loss_repeated_mean", (), {"loss_repeated_mean": False}),
        ("load_param_strategy_file", ("plan.json",), {"strategy_ckpt_load_file": "plan.json"}),
        ("save_operator_strategy_file", ("/tmp/plan.json",), {"strategy_ckpt_save_file": "/tmp/plan.json"}),
    ],
)
def test_a_method_sets_its_option(method, arguments, options):
    net = AutoParallel(step)
    getattr(net, method)(*arguments)
    assert {name: getattr(net.context, name) for name in options} == options


def test_methods_add_up_and_act_from_the_next_call_on(tmp_path):
    net = AutoParallel(step, device_num=8)
    before = net.plan(PARAMS, X)
    net.hsdp(threshold=0)
    net.dataset_strategy("full_batch")
    net.save_param_strategy_file(str(tmp_path / "plan.json"))
    net.disable_strategy_file_only_for_trainable_params()
    assert net.context.strategy_ckpt_save_file == str(tmp_path / "plan.json")
    after = net.plan(PARAMS, X)
    assert before.inputs != after.inputs
    assert spmdctx.Plan.load(tmp_path / "plan.json").to_json() == after.to_json()


def test_the_number_of_stages_is_read_back():
    net = AutoParallel(step)
    assert net.get_pipeline_stages() == 1
    net.pipeline(stages=4, interleave=True, scheduler="gpipe")
    assert net.get_pipeline_stages() == 4


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("enable_fp32_communication", ()),
        ("print_local_norm", ()),
        ("dump_local_norm", ("norms",)),
        ("enable_device_local_norm", ()),
        ("transformer_opt", ("speed.json",)),
        ("set_group_ckpt_save_file", ("group.ckpt",)),
        ("pipeline", (2, True)),
        ("pipeline", (2, False, False, "seqpipe")),
    ],
)
def test_what_is_not_supported_is_refused_by_name(method, arguments):
    with pytest.raises(UnsupportedError):
        getattr(AutoParallel(step), method)(*arguments)


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("hsdp", (0,), ContextError),
        ("hsdp", (-1, 64, "level9"), ContextError),
        ("pipeline", (0,), ContextError),
        ("dataset_strategy", (3,), TypeError),
        ("load_param_strategy_file", (3,), TypeError),
        ("load_operator_strategy_file", ("plan.json",), ContextError),
    ],
)
def test_a_bad_value_changes_nothing(method, arguments, error):
    net = AutoParallel(step)
    before = net.context
    with pytest.raises(error):
        getattr(net, method)(*arguments)
    assert net.context == before


def test_only_known_modes_and_attributes_are_there():
    with pytest.raises(ContextError, match="no such parallel_mode"):
        AutoParallel(step, parallel_mode="auto")
    with pytest.raises(AttributeError):
        _ = AutoParallel(step).unknown
    AutoParallel(step).no_init_parameters_in_compile()
    AutoParallel(step).transformer_opt(None)


def test_a_split_loss_in_a_loss_of_each_device_is_refused_with_a_remedy():
    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    step = spmdctx.parallel(lambda w, x: spmdctx.grad(spmdctx.AutoParallel(loss))(w, x), parallel_mode="data_parallel")
    with pytest.raises(UnsupportedError, match=r"(?s)^loss is split over devices.*give spmdctx.value_and_grad the function itself"):
        step(jnp.eye(8), jnp.ones((16, 8)))
