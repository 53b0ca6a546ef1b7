import pytest

from spmdctx.context.files import load_config
from spmdctx.context.layers import (
    current_context,
    get_auto_parallel_context,
    load_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from spmdctx.errors import ContextError, ContextWarning

MINDFORMERS = """
seed: 0
use_parallel: True
parallel:
  parallel_mode: 1 # semi-auto parallel
  gradients_mean: False
  enable_alltoall: False
  full_batch: False
  dataset_strategy: [[&dp 4, 1], [*dp, 1], [*dp]]
  search_mode: "sharding_propagation"
  enable_parallel_optimizer: True
  strategy_ckpt_config:
    save_file: "./ckpt_strategy.ckpt"
    only_trainable_params: False
  parallel_optimizer_config:
    gradient_accumulation_shard: False
    parallel_optimizer_threshold: 64
parallel_config:
  data_parallel: *dp
  model_parallel: 2
  pipeline_stage: 2
  micro_batch_num: 4
  use_seq_parallel: True
  vocab_emb_dp: False
  gradient_aggregation_group: 4
micro_batch_interleave_num: 1
context:
  mode: 0
  device_target: "Ascend"
  max_device_memory: "58GB"
model:
  model_config: {type: LlamaConfig}
"""


@pytest.fixture(autouse=True)
def _fresh_context():
    reset_auto_parallel_context()
    yield
    reset_auto_parallel_context()


def written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_a_mindformers_file_sets_the_context(tmp_path):
    config = load_context(written(tmp_path, MINDFORMERS))
    context = current_context()
    assert (context.parallel_mode, context.device_num, context.pipeline_stages) == ("semi_auto_parallel", 16, 2)
    assert context.dataset_strategy == ((4, 1), (4, 1), (4,))
    assert context.strategy_ckpt_config == ("", "./ckpt_strategy.ckpt", False)
    assert context.parallel_optimizer_config.gradient_accumulation_shard is False
    assert config.parallel_config["model_parallel"] == 2
    assert config.memory_bytes == 58 * 2**30


def test_reading_a_file_sets_nothing(tmp_path):
    assert load_config(str(written(tmp_path, MINDFORMERS))).options["device_num"] == 16
    assert current_context().explicit == frozenset()


def test_use_parallel_false_is_stand_alone():
    load_context({"use_parallel": False, "parallel": {"parallel_mode": 2}, "parallel_config": {"data_parallel": 8}})
    assert current_context().explicit == {"parallel_mode"}
    assert current_context().parallel_mode == "stand_alone"


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (0, "data_parallel"),
        (1, "semi_auto_parallel"),
        (2, "auto_parallel"),
        (3, "hybrid_parallel"),
        ("AUTO_PARALLEL", "auto_parallel"),
        ("semi_auto_parallel", "semi_auto_parallel"),
    ],
)
def test_modes_have_numbers_and_names(mode, name):
    assert load_config({"parallel": {"parallel_mode": mode}}).options == {"parallel_mode": name}


def test_degrees_count_the_devices_only_where_the_user_splits():
    degrees = {"data_parallel": 2, "model_parallel": 4}
    assert load_config({"parallel": {"parallel_mode": 1}, "parallel_config": degrees}).options["device_num"] == 8
    assert "device_num" not in load_config({"parallel": {"parallel_mode": 2}, "parallel_config": degrees}).options
    stated = load_config({"parallel": {"parallel_mode": 1, "device_num": 32}, "parallel_config": degrees})
    assert stated.options["device_num"] == 32


def test_the_guide_of_recursive_programming_reads():
    config = load_config(
        {
            "use_parallel": True,
            "parallel": {"parallel_mode": 2, "search_mode": "recursive_programming"},
            "parallel_config": {"pipeline_stage": 2, "mem_coeff": 0.25, "auto_pipeline": True, "optimizer_shard": True},
            "runner_config": {"gradient_accumulation_steps": 4},
        }
    )
    assert config.options == {
        "parallel_mode": "auto_parallel",
        "search_mode": "recursive_programming",
        "pipeline_stages": 2,
        "mem_coeff": 0.25,
        "auto_pipeline": True,
        "enable_parallel_optimizer": True,
        "grad_accumulation_step": 4,
    }


def test_the_keys_of_a_pipeline_act_where_it_has_stages():
    keys = {"pipeline_stage": 4, "micro_batch_num": 16, "pp_interleave_num": 3}
    config = load_config({"parallel": {"parallel_mode": 1, "pipeline_config": {"pipeline_interleave": True}}, "parallel_config": keys})
    assert config.options == {
        "parallel_mode": "semi_auto_parallel",
        "device_num": 4,
        "pipeline_config": {"pipeline_interleave": True},
        "pipeline_stages": 4,
        "pipeline_segments": 3,
        "grad_accumulation_step": 16,
    }
    alone = load_config({"parallel": {"parallel_mode": 2}, "parallel_config": {**keys, "pipeline_stage": 1}})
    assert alone.options == {"parallel_mode": "auto_parallel"}


def test_micro_batches_of_a_pipeline_come_before_accumulation():
    content = {"parallel_config": {"pipeline_stage": 2, "micro_batch_num": 8}, "runner_config": {"gradient_accumulation_steps": 2}}
    with pytest.warns(ContextWarning, match="gradient_accumulation_steps=2 is left out: a pipeline takes .*micro_batch_num"):
        assert load_config(content).options["grad_accumulation_step"] == 8
    content["runner_config"]["gradient_accumulation_steps"] = 8
    assert load_config(content).options["grad_accumulation_step"] == 8


def test_interleaved_parts_of_a_file_are_given_to_the_user():
    with pytest.warns(ContextWarning, match=r"micro_batch_interleave_num=2 acts where .*MicroBatchInterleaved\(loss, 2\)"):
        config = load_config({"parallel": {}, "micro_batch_interleave_num": 2})
    assert config.micro_batch_interleave_num == 2
    with pytest.raises(ContextError, match="micro_batch_interleave_num does not accept 0"):
        load_config({"parallel": {}, "micro_batch_interleave_num": 0})
    with pytest.raises(TypeError, match="micro_batch_interleave_num"):
        load_config({"parallel": {}, "micro_batch_interleave_num": True})


@pytest.mark.parametrize(
    ("content", "name", "kept"),
    [
        ({"parallel": {"pipeline_result_broadcast": True, "device_num": 8}}, "parallel.pipeline_result_broadcast", {"device_num"}),
        ({"parallel": {"parallel_mode": 1, "full_batch": True, "dataset_strategy": [[8]]}}, "parallel.dataset_strategy", {"full_batch"}),
        ({"parallel": {"parallel_mode": 0, "full_batch": True}}, "parallel.full_batch", set()),
        ({"parallel_config": {"model_paralel": 8}}, "parallel_config.model_paralel", set()),
    ],
)
def test_what_is_left_out_is_named(content, name, kept):
    with pytest.warns(ContextWarning, match=f"^{name}=.* is left out"):
        assert load_config(content).options.keys() == {"parallel_mode"} | kept


def test_plain_options_are_read_from_files_and_mappings(tmp_path):
    load_context(written(tmp_path, "parallel_mode: semi_auto_parallel\ndataset_strategy: [[8, 1], [8]]\ndevice_num: 8\n"))
    assert get_auto_parallel_context("dataset_strategy") == [[8, 1], [8]]
    load_context({"device_num": 4, "all_reduce_fusion_config": [3, 10]})
    assert get_auto_parallel_context("device_num") == 4
    assert get_auto_parallel_context("parallel_mode") == "semi_auto_parallel"


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        ({"device_nums": 8}, ContextError, "(?s)'device_nums' is not recognized.*'device_num'"),
        ({"use_paralel": True}, ContextError, "(?s)'use_paralel' is not recognized.*'use_parallel'"),
        ({"parallel": {"search_mod": "x"}}, ContextError, "(?s)'search_mod' is not recognized.*'search_mode'"),
        ({"parallel": {"parallel_mode": 4}}, ContextError, r"(?s)parallel_mode does not accept 4.*0 \(data_parallel\)"),
        ({"parallel": {"parallel_mode": True}}, TypeError, "parallel_mode"),
        ({"parallel": [1]}, TypeError, "parallel does not take values of type list"),
        ({"use_parallel": 1}, TypeError, "use_parallel"),
        ({"parallel_config": {"data_parallel": 0}}, ContextError, "parallel_config.data_parallel does not accept 0"),
        ({"parallel_config": {"data_parallel": "2"}}, TypeError, "parallel_config.data_parallel"),
        ({"parallel": {}, "context": {"max_device_memory": 58}}, TypeError, "max_device_memory"),
        ({"parallel": {}, "context": {"max_device_memory": "58 chips"}}, ContextError, "max_device_memory"),
        ({"parallel": {"dataset_strategy": [[0, 1]]}}, ContextError, "dataset_strategy"),
        ({3: 4}, TypeError, "name of an option"),
    ],
)
def test_a_bad_configuration_is_refused_and_sets_nothing(content, error, text):
    set_auto_parallel_context(device_num=2)
    before = current_context()
    with pytest.raises(error, match=text):
        load_context({"device_num": 8, **content} if "parallel" not in content else content)
    assert current_context() is before


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1\nb: 2", "(?s)no valid YAML.*run.yaml.*line 2"), ("- 1", "(?s)holds no options.*run.yaml"), ("", "holds no options")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, message):
    with pytest.raises(ContextError, match=message):
        load_context(written(tmp_path, text))


def test_errors_in_a_file_name_it(tmp_path):
    with pytest.raises(ContextError) as caught:
        load_context(written(tmp_path, "device_num: 0"))
    assert "run.yaml" in caught.value.__notes__[0]


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_context(tmp_path / "none.yaml")
