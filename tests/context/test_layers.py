import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spmdctx.context import layers as context
from spmdctx.context.layers import (
    auto_parallel_context,
    current_context,
    get_algo_parameters,
    get_auto_parallel_context,
    reset_algo_parameters,
    reset_auto_parallel_context,
    set_algo_parameters,
    set_auto_parallel_context,
)
from spmdctx.context.options import ALGO_OPTIONS, OPTIONS
from spmdctx.errors import ContextError

AUTO = {"mode": "auto", "config": None}
DEFAULTS = {
    "device_num": 1,
    "global_rank": 0,
    "gradients_mean": False,
    "gradient_fp32_sync": True,
    "loss_repeated_mean": True,
    "parallel_mode": "stand_alone",
    "search_mode": "dynamic_programming",
    "auto_parallel_search_mode": "dynamic_programming",
    "sharding_propagation": False,
    "parameter_broadcast": False,
    "strategy_ckpt_load_file": "",
    "strategy_ckpt_save_file": "",
    "strategy_ckpt_config": {"load_file": "", "save_file": "", "only_trainable_params": True},
    "group_ckpt_save_file": "",
    "full_batch": False,
    "dataset_strategy": "data_parallel",
    "enable_parallel_optimizer": False,
    "parallel_optimizer_config": {
        "gradient_accumulation_shard": True,
        "parallel_optimizer_threshold": 64,
        "optimizer_weight_shard_size": -1,
        "optimizer_level": "level1",
    },
    "optimizer_weight_shard_size": -1,
    "optimizer_weight_shard_aggregated_save": False,
    "enable_alltoall": False,
    "all_reduce_fusion_config": [],
    "comm_fusion": {"openstate": True, "allreduce": AUTO, "allgather": AUTO, "reducescatter": AUTO},
    "pipeline_stages": 1,
    "pipeline_config": {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"},
    "pipeline_segments": 2,
    "auto_pipeline": False,
    "grad_accumulation_step": 1,
    "communi_parallel_mode": "all_group_parallel",
    "mem_coeff": 0.1,
}


@pytest.fixture(autouse=True)
def _fresh_context():
    reset_auto_parallel_context()
    reset_algo_parameters()
    yield
    reset_auto_parallel_context()
    reset_algo_parameters()


def everything():
    return {option.name: get_auto_parallel_context(option.name) for option in OPTIONS}


def test_every_option_has_its_documented_default():
    assert everything() == DEFAULTS


def test_the_documented_example_is_accepted_line_by_line():
    lines = [
        {"device_num": 8},
        {"global_rank": 0},
        {"gradients_mean": True},
        {"gradient_fp32_sync": False},
        {"parallel_mode": "auto_parallel"},
        {"search_mode": "dynamic_programming"},
        {"auto_parallel_search_mode": "dynamic_programming"},
        {"parameter_broadcast": False},
        {"strategy_ckpt_load_file": "./strategy_stage1.ckpt"},
        {"strategy_ckpt_save_file": "./strategy_stage1.ckpt"},
        {"dataset_strategy": ((1, 8), (1, 8))},
        {"enable_parallel_optimizer": False},
        {"enable_alltoall": False},
        {"all_reduce_fusion_config": [8, 160]},
        {"pipeline_stages": 2},
        {
            "parallel_optimizer_config": {"gradient_accumulation_shard": True, "parallel_optimizer_threshold": 24},
            "enable_parallel_optimizer": True,
        },
        {
            "parallel_optimizer_config": {
                "gradient_accumulation_shard": True,
                "parallel_optimizer_threshold": 24,
                "optimizer_weight_shard_size": 2,
                "optimizer_level": "level3",
            }
        },
        {"comm_fusion": {"allreduce": {"mode": "size", "config": 32}, "allgather": {"mode": "size", "config": 32}}},
        {"strategy_ckpt_config": {"load_file": "./stra0.ckpt", "save_file": "./stra1.ckpt", "only_trainable_params": False}},
        {"grad_accumulation_step": 4},
        {"loss_repeated_mean": True, "auto_pipeline": True, "mem_coeff": 0.25, "full_batch": False},
    ]
    for line in lines:
        set_auto_parallel_context(**line)
    expected = DEFAULTS.copy()
    for line in lines:
        expected |= line
    expected |= {
        "dataset_strategy": [[1, 8], [1, 8]],
        "optimizer_weight_shard_size": 2,
        "strategy_ckpt_load_file": "./stra0.ckpt",
        "strategy_ckpt_save_file": "./stra1.ckpt",
        "comm_fusion": {"openstate": True, **lines[17]["comm_fusion"], "reducescatter": AUTO},
    }
    assert everything() == expected


def test_a_failing_call_changes_nothing():
    set_auto_parallel_context(device_num=8, comm_fusion={"allreduce": {"mode": "size", "config": 4}})
    before, number = current_context(), context.version()
    with pytest.raises(ContextError):
        set_auto_parallel_context(device_num=4, full_batch=True, pipeline_stages=0)
    with pytest.raises(ContextError):
        set_auto_parallel_context(comm_fusion={"openstate": False, "allgather": {"mode": "size", "config": 0}})
    with pytest.raises(TypeError):
        set_algo_parameters(enable_algo_approxi=True, tensor_slice_align_size="16")
    assert current_context() is before
    assert context.version() == number


@pytest.mark.parametrize(("name", "near"), [("devcie_num", "device_num"), ("DEVICE_NUM", "device_num"), ("paralel_mode", "parallel_mode")])
def test_an_unknown_name_is_refused_with_the_nearest_one(name, near):
    with pytest.raises(ContextError, match=f"(?s)Set context keyword '{name}' is not recognized.*did you mean '{near}'"):
        set_auto_parallel_context(**{name: 1})
    with pytest.raises(ContextError, match=f"(?s)Get context keyword '{name}' is not recognized.*did you mean '{near}'"):
        get_auto_parallel_context(name)


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("gradient_accumulation_shard", "parallel_optimizer_config"),
        ("pipeline_scheduler", "pipeline_config"),
        ("allreduce", "comm_fusion"),
        ("only_trainable_params", "strategy_ckpt_config"),
    ],
)
def test_a_key_of_an_option_s_value_names_the_option(key, option):
    with pytest.raises(ContextError, match=f"it is a key of {option}"):
        context.set_auto_parallel_context(**{key: True})


@pytest.mark.parametrize(
    ("name", "fix"), [("nope", "the parameters are fully_use_devices, .*algo_approxi_epsilon"), ("fully_use_device", "'fully_use_devices'")]
)
def test_unknown_algo_parameters_are_called_that(name, fix):
    with pytest.raises(ContextError, match=f"(?s)Set algo parameter '{name}' is not recognized.*{fix}"):
        set_algo_parameters(**{name: 1})
    with pytest.raises(ContextError, match=f"(?s)Get algo parameter '{name}' is not recognized.*{fix}"):
        get_algo_parameters(name)


def test_an_option_of_later_versions_is_refused_by_name():
    with pytest.raises(ContextError, match=r"(?s)'pipeline_result_broadcast' is not recognized.*after 2\.0"):
        set_auto_parallel_context(pipeline_result_broadcast=True)


def test_get_wants_a_string():
    with pytest.raises(TypeError, match="name of an option"):
        get_auto_parallel_context(3)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        set_auto_parallel_context({"device_num": 8})
    assert list(inspect.signature(set_auto_parallel_context).parameters) == [option.name for option in OPTIONS]


def test_either_name_of_the_search_mode_sets_both():
    set_auto_parallel_context(auto_parallel_search_mode="recursive_programming")
    assert get_auto_parallel_context("search_mode") == "recursive_programming"
    set_auto_parallel_context(search_mode="sharding_propagation")
    assert get_auto_parallel_context("auto_parallel_search_mode") == "sharding_propagation"
    assert current_context().is_set("search_mode")


def test_the_older_switch_selects_propagation():
    set_auto_parallel_context(sharding_propagation=True)
    assert current_context().effective_search_mode == "sharding_propagation"
    assert get_auto_parallel_context("search_mode") == "dynamic_programming"


@pytest.mark.parametrize(
    ("calls", "full_batch", "strategy"),
    [
        ([{"full_batch": True}], True, "full_batch"),
        ([{"dataset_strategy": "full_batch"}], True, "full_batch"),
        ([{"full_batch": True}, {"dataset_strategy": "data_parallel"}], False, "data_parallel"),
        ([{"dataset_strategy": "full_batch"}, {"full_batch": False}], False, "data_parallel"),
        ([{"full_batch": True}, {"dataset_strategy": ((8, 1),)}], True, [[8, 1]]),
        ([{"dataset_strategy": ((8, 1),)}, {"full_batch": True}], True, [[8, 1]]),
        ([{"dataset_strategy": ((8, 1),)}, {"dataset_strategy": "full_batch"}], True, "full_batch"),
    ],
)
def test_full_batch_and_the_strings_of_dataset_strategy_are_one(calls, full_batch, strategy):
    for call in calls:
        set_auto_parallel_context(**call)
    assert get_auto_parallel_context("full_batch") is full_batch
    assert get_auto_parallel_context("dataset_strategy") == strategy
    assert current_context().batch_is_pinned


def test_reset_brings_every_default_back_after_a_tuple():
    set_auto_parallel_context(dataset_strategy=((8, 1),), device_num=8, comm_fusion={"openstate": False})
    set_algo_parameters(fully_use_devices=False)
    reset_auto_parallel_context()
    assert everything() == DEFAULTS
    assert not current_context().explicit
    assert not current_context().batch_is_pinned
    assert get_algo_parameters("fully_use_devices") is False


def test_comm_fusion_updates_and_does_not_replace():
    set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "size", "config": 32}})
    set_auto_parallel_context(comm_fusion={"allgather": {"mode": "size", "config": 8}, "openstate": False})
    assert get_auto_parallel_context("comm_fusion") == {
        "openstate": False,
        "allreduce": {"mode": "size", "config": 32},
        "allgather": {"mode": "size", "config": 8},
        "reducescatter": AUTO,
    }


def test_between_index_mode_and_fusion_indices_the_later_call_wins():
    set_auto_parallel_context(all_reduce_fusion_config=[20, 35])
    assert current_context().index_fusion
    set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "index", "config": [3, 10]}})
    assert get_auto_parallel_context("all_reduce_fusion_config") == [3, 10]
    set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "size", "config": 4}})
    assert not current_context().index_fusion
    set_auto_parallel_context(all_reduce_fusion_config=[5])
    assert current_context().index_fusion
    assert current_context().all_reduce_fusion_config == (5,)
    set_auto_parallel_context(comm_fusion={"allgather": {"mode": "size", "config": 4}})
    assert current_context().index_fusion
    set_auto_parallel_context(all_reduce_fusion_config=[])
    assert not current_context().index_fusion


def test_dictionaries_given_by_get_are_copies():
    get_auto_parallel_context("comm_fusion")["openstate"] = False
    get_auto_parallel_context("all_reduce_fusion_config").append(3)
    assert everything() == DEFAULTS


def test_a_layer_changes_and_restores():
    set_auto_parallel_context(device_num=8)
    with auto_parallel_context(parallel_mode="data_parallel") as inner:
        assert inner is current_context()
        assert (inner.device_num, inner.parallel_mode) == (8, "data_parallel")
        with auto_parallel_context(device_num=4):
            assert get_auto_parallel_context("device_num") == 4
            assert get_auto_parallel_context("parallel_mode") == "data_parallel"
        assert get_auto_parallel_context("device_num") == 8
    assert get_auto_parallel_context("parallel_mode") == "stand_alone"


def test_setters_inside_a_layer_change_that_layer_only():
    set_auto_parallel_context(device_num=8)
    set_algo_parameters(tensor_slice_align_size=8)
    with auto_parallel_context(global_rank=1):
        with auto_parallel_context():
            set_auto_parallel_context(device_num=2, full_batch=True)
            set_algo_parameters(tensor_slice_align_size=4)
            assert get_auto_parallel_context("device_num") == 2
        assert get_auto_parallel_context("device_num") == 8
        assert get_algo_parameters("tensor_slice_align_size") == 8
        reset_auto_parallel_context()
        assert everything() == DEFAULTS
    assert get_auto_parallel_context("device_num") == 8
    assert get_auto_parallel_context("full_batch") is False


def test_a_layer_ends_where_its_body_raises():
    layer = auto_parallel_context(device_num=4)
    with pytest.raises(KeyError), layer:
        raise KeyError
    assert get_auto_parallel_context("device_num") == 1


def test_one_layer_object_can_be_nested_and_used_again():
    layer = auto_parallel_context(device_num=4)
    with layer:
        set_auto_parallel_context(device_num=2)
        with layer:
            assert get_auto_parallel_context("device_num") == 4
        assert get_auto_parallel_context("device_num") == 2
    assert get_auto_parallel_context("device_num") == 1


def test_a_layer_decorates_a_function():
    @auto_parallel_context(device_num=4)
    def count(depth):
        """Counts."""
        return get_auto_parallel_context("device_num") if depth == 0 else count(depth - 1)

    assert count(2) == 4
    assert count.__doc__ == "Counts."
    assert get_auto_parallel_context("device_num") == 1


def test_a_layer_decorates_a_coroutine_and_stays_in_its_task():
    async def run():
        started = asyncio.Event()

        @auto_parallel_context(device_num=4)
        async def inside():
            started.set()
            await asyncio.sleep(0)
            return get_auto_parallel_context("device_num")

        task = asyncio.create_task(inside())
        await started.wait()
        return get_auto_parallel_context("device_num"), await task

    assert asyncio.run(run()) == (1, 4)


def test_a_layer_refuses_generators_and_classes():
    def numbers():
        yield 1

    for thing in (numbers, threading.Thread):
        with pytest.raises(TypeError, match="decorates functions"):
            auto_parallel_context(device_num=4)(thing)


def test_a_layer_checks_its_options_before_it_is_entered():
    with pytest.raises(ContextError):
        auto_parallel_context(device_num=0)


def test_new_threads_see_what_was_set_and_not_the_layers():
    set_auto_parallel_context(device_num=8)
    with auto_parallel_context(device_num=2), ThreadPoolExecutor(1) as pool:
        assert pool.submit(get_auto_parallel_context, "device_num").result() == 8
        pool.submit(set_auto_parallel_context, device_num=16).result()
        assert get_auto_parallel_context("device_num") == 2
    assert get_auto_parallel_context("device_num") == 16


def test_setters_of_many_threads_lose_nothing():
    names = [option.name for option in OPTIONS if option.kind == "bool" and option.modes]
    values = {name: not DEFAULTS[name] for name in names if name != "full_batch"}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: set_auto_parallel_context(**dict([item])), values.items()))
    assert {name: get_auto_parallel_context(name) for name in values} == values


def test_the_version_tells_contexts_apart():
    start = context.version()
    set_auto_parallel_context(device_num=8)
    first = context.version()
    with auto_parallel_context(device_num=4):
        inner = context.version()
    set_algo_parameters(enable_algo_approxi=True)
    algo = context.version()
    assert len({start, first, inner, algo}) == 4
    reset_algo_parameters()
    assert context.version() == first
    reset_auto_parallel_context()
    assert context.version() == start


def test_setting_a_default_counts_as_set():
    start = context.version()
    set_auto_parallel_context(device_num=1)
    assert current_context().is_set("device_num")
    assert context.version() != start


def test_replace_checks_and_leaves_the_context_alone():
    changed = current_context().replace(device_num=8, parallel_mode="data_parallel")
    assert (changed.device_num, changed.explicit) == (8, {"device_num", "parallel_mode"})
    assert get_auto_parallel_context("device_num") == 1
    assert current_context().replace() is current_context()
    with pytest.raises(ContextError):
        changed.replace(device_num=0)


def test_plan_options_hold_no_paths_and_no_ranks():
    set_auto_parallel_context(
        device_num=8, global_rank=3, dataset_strategy=((8, 1),), strategy_ckpt_save_file="/tmp/plan.json", optimizer_weight_shard_size=2
    )
    set_algo_parameters(fully_use_devices=True)
    assert current_context().plan_options() == (
        ("device_num", 8),
        ("dataset_strategy", [[8, 1]]),
        ("parallel_optimizer_config", {**DEFAULTS["parallel_optimizer_config"], "optimizer_weight_shard_size": 2}),
        ("fully_use_devices", True),
    )


def test_search_parameters_have_their_documented_defaults():
    assert {option.name: get_algo_parameters(option.name) for option in ALGO_OPTIONS} == {
        "fully_use_devices": True,
        "elementwise_op_strategy_follow": False,
        "tensor_slice_align_enable": False,
        "tensor_slice_align_size": 16,
        "enable_algo_approxi": False,
        "algo_approxi_epsilon": 0.1,
    }


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"tensor_slice_align_size": 0}, ContextError),
        ({"tensor_slice_align_size": 1025}, ContextError),
        ({"algo_approxi_epsilon": 0.0}, ContextError),
        ({"algo_approxi_epsilon": 1.5}, ContextError),
        ({"fully_use_devices": 1}, TypeError),
        ({"tensor_slice_align": True}, ContextError),
    ],
)
def test_bad_search_parameters_are_refused(parameters, error):
    with pytest.raises(error):
        set_algo_parameters(**parameters)
    with pytest.raises(ContextError):
        get_algo_parameters("device_num")
