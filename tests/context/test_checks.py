import warnings

import pytest

from spmdctx.context.checks import check_consistency, device_count, ineffective, warn_ineffective
from spmdctx.context.options import ALGO_OPTIONS, OPTIONS, PARALLEL_MODES
from spmdctx.context.state import DEFAULT_CONTEXT, AlgoParameters
from spmdctx.errors import ContextError, ContextWarning, StrategyError

SEMI = {"parallel_mode": "semi_auto_parallel"}


def context(**options):
    return DEFAULT_CONTEXT.replace(**options)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 127, 4096])
def test_any_device_count_is_consistent(count):
    check_consistency(context(device_num=count, **SEMI), 8)
    check_consistency(context(**SEMI), count, running=True)


def test_an_unset_device_num_means_all_devices():
    assert device_count(context(), 8) == 8
    assert device_count(context(device_num=1), 8) == 1


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel", "semi_auto_parallel"])
def test_a_plan_may_want_more_devices_than_there_are_and_a_run_may_not(mode):
    wanted = context(parallel_mode=mode, device_num=16)
    check_consistency(wanted, 8)
    with pytest.raises(ContextError, match="device_num is 16, but there are 8 devices"):
        check_consistency(wanted, 8, running=True)


def test_one_device_is_not_several_and_the_fix_names_both_ways_to_more():
    with pytest.raises(ContextError, match=r"(?s)there is 1 device\.\n.*device_num 1 to run.*jax_num_cpu_devices', 8.*count=8"):
        check_consistency(context(device_num=8, **SEMI), 1, running=True)


def test_a_mesh_and_device_num_must_agree():
    check_consistency(context(device_num=4, **SEMI), 8, mesh_devices=4)
    with pytest.raises(ContextError, match="device_num is 8, but the mesh has 4"):
        check_consistency(context(device_num=8, **SEMI), 8, mesh_devices=4)


def test_the_rank_is_below_the_device_count():
    check_consistency(context(global_rank=7, device_num=8, **SEMI), 8)
    with pytest.raises(ContextError, match="global_rank is 8, but there are 8 devices"):
        check_consistency(context(global_rank=8, device_num=8, **SEMI), 8)
    with pytest.raises(ContextError, match="global_rank is 8"):
        check_consistency(context(global_rank=8, **SEMI), 8)


def test_stages_divide_the_devices():
    check_consistency(context(device_num=6, pipeline_stages=3, **SEMI), 8)
    with pytest.raises(ContextError, match=r"(?s)pipeline_stages is 3, .* 8 devices.*1, 2, 4, 8"):
        check_consistency(context(device_num=8, pipeline_stages=3, **SEMI), 8)


def test_the_optimizer_group_fits_into_a_stage():
    options = {"enable_parallel_optimizer": True, "pipeline_stages": 2, **SEMI}
    check_consistency(context(optimizer_weight_shard_size=4, **options), 8)
    with pytest.raises(ContextError, match="optimizer_weight_shard_size is 8, but a stage has 4"):
        check_consistency(context(optimizer_weight_shard_size=8, **options), 8)


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel"])
@pytest.mark.parametrize("options", [{"full_batch": True}, {"dataset_strategy": "full_batch"}])
def test_the_whole_batch_cannot_be_fed_in_data_parallel(mode, options):
    with pytest.raises(ContextError, match=f"full_batch cannot be used in {mode}"):
        check_consistency(context(parallel_mode=mode, **options), 8)
    check_consistency(context(**SEMI, **options), 8)


def test_full_batch_contradicts_a_strategy_that_splits():
    check_consistency(context(full_batch=True, dataset_strategy=((1, 1), (1,)), **SEMI), 8)
    with pytest.raises(ContextError, match="contradict"):
        check_consistency(context(full_batch=True, dataset_strategy=((8, 1), (8,)), **SEMI), 8)


@pytest.mark.parametrize(("strategy", "stages"), [(((8, 1), (3,)), 1), (((1, 1), (4, 4)), 1), (((1, 1), (8,)), 2)])
def test_a_dataset_strategy_divides_the_devices_of_a_stage(strategy, stages):
    with pytest.raises(StrategyError, match=r"dataset_strategy\[1\] has"):
        check_consistency(context(dataset_strategy=strategy, pipeline_stages=stages, **SEMI), 8)
    check_consistency(context(dataset_strategy=((4, 1), (2,)), pipeline_stages=stages, **SEMI), 8)


@pytest.mark.parametrize("options", [{"search_mode": "sharding_propagation"}, {"sharding_propagation": True}])
def test_propagation_is_accepted_under_both_names(options):
    check_consistency(context(parallel_mode="auto_parallel", **options), 8)


def test_stand_alone_looks_at_counts_only():
    check_consistency(context(full_batch=True, pipeline_stages=3, device_num=8), 8)
    with pytest.raises(ContextError):
        check_consistency(context(device_num=16), 8, running=True)


NON_DEFAULT = {
    "gradients_mean": True,
    "gradient_fp32_sync": True,
    "loss_repeated_mean": False,
    "search_mode": "sharding_propagation",
    "sharding_propagation": True,
    "parameter_broadcast": True,
    "strategy_ckpt_load_file": "a",
    "strategy_ckpt_save_file": "b",
    "strategy_ckpt_config": {"load_file": "c"},
    "full_batch": True,
    "dataset_strategy": ((8, 1),),
    "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {"optimizer_level": "level2"},
    "optimizer_weight_shard_size": 2,
    "enable_alltoall": True,
    "all_reduce_fusion_config": [3],
    "comm_fusion": {"openstate": False},
    "pipeline_stages": 2,
    "pipeline_config": {"pipeline_scheduler": "gpipe"},
    "pipeline_segments": 3,
    "auto_pipeline": True,
    "grad_accumulation_step": 2,
    "mem_coeff": 0.5,
}


NEEDED = {
    "mem_coeff": {"search_mode": "recursive_programming"},
    "parallel_optimizer_config": {"enable_parallel_optimizer": True},
    "optimizer_weight_shard_size": {"enable_parallel_optimizer": True},
    "pipeline_config": {"pipeline_stages": 2},
    "pipeline_segments": {"pipeline_stages": 2, "pipeline_config": {"pipeline_interleave": True}},
}
"""Other options without which one has no effect."""


@pytest.mark.parametrize("mode", PARALLEL_MODES)
@pytest.mark.parametrize("name", NON_DEFAULT)
def test_what_has_no_effect_is_warned_of_by_name_and_only_that(mode, name):
    option = next(option for option in OPTIONS if option.name == name)
    needed = NEEDED.get(name, {}) if mode in option.modes else {}
    changed = context(parallel_mode=mode, **{name: NON_DEFAULT[name]}, **needed)
    if mode in option.modes and option.built:
        assert not ineffective(changed)
        return
    with pytest.warns(ContextWarning, match=f"^{name}=") as caught:
        notes = warn_ineffective(changed)
    assert [str(warning.message) for warning in caught] == list(notes)
    assert len(notes) == 1
    assert caught[0].filename == __file__
    assert (f"parallel_mode '{mode}' does not use it" in notes[0]) == (mode not in option.modes)


def test_every_option_with_modes_is_in_the_table_of_warnings():
    always = {"device_num", "global_rank", "parallel_mode", "auto_parallel_search_mode"}
    assert NON_DEFAULT.keys() | always == {option.name for option in OPTIONS if option.modes}


OFF = {
    "gradients_mean": False,
    "gradient_fp32_sync": False,
    "parameter_broadcast": False,
    "enable_parallel_optimizer": False,
    "enable_alltoall": False,
    "full_batch": False,
    "dataset_strategy": "data_parallel",
    "pipeline_stages": 1,
    "strategy_ckpt_load_file": "",
}


@pytest.mark.parametrize("mode", PARALLEL_MODES)
def test_values_that_ask_for_nothing_are_quiet(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_ineffective(context(parallel_mode=mode, **OFF)) == ()


def test_search_parameters_without_effect_are_warned_of():
    values = {option.name: option.default for option in ALGO_OPTIONS} | {"tensor_slice_align_enable": True}
    changed = DEFAULT_CONTEXT.with_algo(AlgoParameters(**values, explicit=frozenset(("tensor_slice_align_enable",))))
    assert [name for name, _ in ineffective(changed)] == ["tensor_slice_align_enable"]


@pytest.mark.parametrize("name", ["parallel_optimizer_config", "optimizer_weight_shard_size"])
def test_options_of_the_parallel_optimizer_have_no_effect_where_it_is_off(name):
    changed = context(parallel_mode="data_parallel", **{name: NON_DEFAULT[name]})
    found = dict(ineffective(changed))
    assert name in found
    assert found[name].endswith("has no effect: enable_parallel_optimizer is off.")


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"pipeline_config": {"pipeline_scheduler": "gpipe"}}, "pipeline_config", "pipeline_stages is 1"),
        ({"pipeline_segments": 4, "pipeline_stages": 2}, "pipeline_segments", "pipeline_interleave is off"),
        (
            {"pipeline_segments": 4, "pipeline_stages": 2, "pipeline_config": {"pipeline_scheduler": "zero_bubble_v"}},
            "pipeline_segments",
            "zero_bubble_v has two chunks on each stage",
        ),
    ],
)
def test_options_of_pipelines_say_when_they_have_no_effect(options, name, reason):
    found = dict(ineffective(context(**SEMI, **options)))
    assert found.keys() == {name}
    assert found[name].endswith(f"has no effect: {reason}.")


def test_a_schedule_with_one_chunk_on_each_stage_contradicts_interleaving():
    config = {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_h1"}
    check_consistency(context(pipeline_config=config, **SEMI), 8)
    with pytest.raises(ContextError, match=r"(?s)zero_bubble_h1, which has one chunk.*pipeline_interleave=False"):
        check_consistency(context(pipeline_config=config, pipeline_stages=2, **SEMI), 8)


@pytest.mark.parametrize("search", [{"search_mode": "dynamic_programming"}, {"sharding_propagation": True}, {}])
def test_mem_coeff_acts_in_one_search_only(search):
    changed = context(parallel_mode="auto_parallel", mem_coeff=0.5, **search)
    with pytest.warns(ContextWarning, match=r"^mem_coeff=0\.5 has no effect: search_mode .* \(it acts in recursive_programming\)"):
        assert len(warn_ineffective(changed)) == 1
