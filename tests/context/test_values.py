import numpy as np
import pytest

from spmdctx.context.options import BY_NAME, OPTIONS
from spmdctx.context.state import DEFAULT_CONTEXT
from spmdctx.context.values import plain
from spmdctx.errors import ContextError, UnsupportedError

SCHEDULERS = ("gpipe", "1f1b", "zero_bubble_h1", "zero_bubble_v")
ENTRY = {"mode": "auto", "config": None}

ACCEPTED = [
    ("device_num", [1, 7, 4096]),
    ("global_rank", [0, 4095]),
    ("parallel_mode", ["stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel"]),
    ("search_mode", ["recursive_programming", "dynamic_programming", "sharding_propagation"]),
    ("strategy_ckpt_load_file", ["", "no/such/file.ckpt"]),
    ("strategy_ckpt_config", [{}, {"load_file": "a"}, {"only_trainable_params": False}]),
    ("dataset_strategy", ["full_batch", ((8, 1), (3,)), ((), (8,))]),
    (
        "parallel_optimizer_config",
        [{}, {"parallel_optimizer_threshold": 0}, {"optimizer_weight_shard_size": -1}, {"optimizer_level": "level2"}],
    ),
    ("optimizer_weight_shard_size", [-1, 1, 8]),
    ("all_reduce_fusion_config", [[], [0], [20, 35], [1000000]]),
    ("comm_fusion", [{}, {"openstate": False}, {"allreduce": ENTRY}, {"allreduce": {"mode": "index", "config": [3, 10]}}]),
    ("comm_fusion", [{"allgather": {"mode": "size", "config": 1}}, {"reducescatter": {"mode": "auto", "config": 64}}]),
    ("pipeline_stages", [1, 3]),
    ("pipeline_config", [{}, {"pipeline_interleave": True}, *({"pipeline_scheduler": name} for name in SCHEDULERS)]),
    ("pipeline_segments", [1, 5]),
    ("grad_accumulation_step", [1, 16]),
    ("mem_coeff", [0.25, 1, 1e-9]),
    ("group_ckpt_save_file", [""]),
    ("communi_parallel_mode", ["all_group_parallel"]),
    ("optimizer_weight_shard_aggregated_save", [False]),
]

BAD_VALUES = [
    ("device_num", [0, -1, 4097]),
    ("global_rank", [-1, 4096]),
    ("parallel_mode", ["", "AUTO_PARALLEL", "auto"]),
    ("search_mode", ["", "dynamic"]),
    ("strategy_ckpt_config", [{"file": ""}]),
    ("dataset_strategy", ["", "full", (), ((0, 1),), ((8,), (-1,))]),
    ("parallel_optimizer_config", [{"parallel_optimizer_threshold": -1}, {"optimizer_level": "level4"}, {"threshold": 1}]),
    ("parallel_optimizer_config", [{"optimizer_weight_shard_size": 0}, {"optimizer_weight_shard_size": -2}]),
    ("optimizer_weight_shard_size", [0, -2]),
    ("all_reduce_fusion_config", [[3, 3], [3, 1], [-1, 2]]),
    (
        "comm_fusion",
        [{"all_reduce": ENTRY}, {"allreduce": {"mode": "auto"}}, {"allreduce": {"config": None}}, {"allgather": {**ENTRY, "x": 1}}],
    ),
    ("comm_fusion", [{"allgather": {"mode": "index", "config": [1]}}, {"allreduce": {"mode": "size", "config": 0}}]),
    ("comm_fusion", [{"allreduce": {"mode": "size", "config": -1}}, {"allreduce": {"mode": "index", "config": []}}]),
    ("pipeline_stages", [0, -1]),
    ("pipeline_config", [{"pipeline_scheduler": "1F1B"}, {"pipeline_scheduler": ""}, {"scheduler": "1f1b"}]),
    ("pipeline_segments", [0, -2]),
    ("grad_accumulation_step", [0, -4]),
    ("mem_coeff", [0, 0.0, -0.1, float("nan"), float("inf")]),
    ("communi_parallel_mode", ["some_group_parallel"]),
]

WRONG_TYPES = [
    ("device_num", [8.0, "8", True, np.int64(8)]),
    ("global_rank", [False, 1.0]),
    ("parallel_mode", [1, b"auto_parallel"]),
    ("search_mode", [0]),
    ("strategy_ckpt_load_file", [1, b"x"]),
    ("strategy_ckpt_config", ["file", {"load_file": 1}, {"only_trainable_params": 1}]),
    ("dataset_strategy", [[[8, 1]], ([8, 1],), (8, 1), ((8.0,),), ((True,),), 3]),
    ("parallel_optimizer_config", [[], {"gradient_accumulation_shard": 1}, {"parallel_optimizer_threshold": True}]),
    ("all_reduce_fusion_config", [(20, 35), 20, [True], [1.0], "20"]),
    ("comm_fusion", [[], {"allreduce": "auto"}, {"openstate": 1}, {"allgather": {"mode": "size", "config": 1.5}}]),
    ("comm_fusion", [{"allgather": {"mode": "size", "config": None}}, {"allreduce": {"mode": "index", "config": 3}}]),
    ("pipeline_stages", [1.0, True]),
    ("pipeline_config", ["1f1b", {"pipeline_interleave": 1}, {"pipeline_scheduler": None}]),
    ("pipeline_segments", [2.0, True]),
    ("grad_accumulation_step", ["4"]),
    ("mem_coeff", ["0.1", True]),
]


def rows(table):
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in table for value in values]


@pytest.mark.parametrize(("name", "value"), rows(ACCEPTED))
def test_a_legal_value_is_kept(name, value):
    changed = DEFAULT_CONTEXT.replace(**{name: value})
    assert hash(changed) is not None
    shown = plain(changed.value(BY_NAME[name]))
    if isinstance(value, dict):
        assert {key: shown[key] for key in value} == value
    else:
        assert shown == (plain(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(("name", "value"), rows(BAD_VALUES))
def test_a_bad_value_is_a_value_error_that_names_the_option(name, value):
    with pytest.raises(ContextError, match=f"^{name}") as caught:
        DEFAULT_CONTEXT.replace(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert "need:" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), rows(WRONG_TYPES))
def test_a_wrong_type_is_a_type_error_that_names_the_option(name, value):
    with pytest.raises(TypeError, match=f"^{name}.*type"):
        DEFAULT_CONTEXT.replace(**{name: value})


@pytest.mark.parametrize("name", [option.name for option in OPTIONS])
def test_what_get_gives_by_default_can_be_set(name):
    default = plain(DEFAULT_CONTEXT.value(BY_NAME[name]))
    changed = DEFAULT_CONTEXT.replace(**{name: default})
    assert plain(changed.value(BY_NAME[name])) == default
    assert not changed.fuses_by_index


@pytest.mark.parametrize("name", [option.name for option in OPTIONS])
def test_none_is_no_value(name):
    with pytest.raises(TypeError, match=name):
        DEFAULT_CONTEXT.replace(**{name: None})


@pytest.mark.parametrize("name", [option.name for option in OPTIONS if option.kind == "bool"])
def test_flags_take_bools_only(name):
    for value in (0, 1, "True"):
        with pytest.raises(TypeError, match=name):
            DEFAULT_CONTEXT.replace(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group_ckpt_save_file", "groups.ckpt"),
        ("optimizer_weight_shard_aggregated_save", True),
        ("communi_parallel_mode", "no_group_parallel"),
        ("communi_parallel_mode", "same_server_group_parallel"),
    ],
)
def test_what_jax_has_no_counterpart_of_is_refused_by_name(name, value):
    with pytest.raises(UnsupportedError, match=f"^{name}={value!r} is not supported"):
        DEFAULT_CONTEXT.replace(**{name: value})


@pytest.mark.parametrize("name", ["seqpipe", "seqvpp", "seqsmartvpp"])
def test_schedules_that_cut_sequences_are_refused_by_name(name):
    with pytest.raises(UnsupportedError, match=rf"(?s)^pipeline_config\['pipeline_scheduler'\]='{name}' is not supported.*zero_bubble_v"):
        DEFAULT_CONTEXT.replace(pipeline_config={"pipeline_scheduler": name})


def test_messages_point_into_nested_values():
    with pytest.raises(ContextError, match=r"^comm_fusion\['allreduce'\]\['config'\] does not accept 0"):
        DEFAULT_CONTEXT.replace(comm_fusion={"allreduce": {"mode": "size", "config": 0}})
    with pytest.raises(ContextError, match=r"^dataset_strategy\[1\]\[0\] does not accept 0"):
        DEFAULT_CONTEXT.replace(dataset_strategy=((8, 1), (0,)))
    with pytest.raises(ContextError, match=r"(?s)no key 'optimiser_level'.*did you mean 'optimizer_level'"):
        DEFAULT_CONTEXT.replace(parallel_optimizer_config={"optimiser_level": "level1"})
