"""Saved plans of pipelines: the same again without a search, and refused by name where anything has changed."""

import json

import jax
import pytest

import spmdctx
from spmdctx.errors import PlanFormatError, PlanMismatchError, UnsupportedError
from spmdctx.pipeline import file
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.step.pipelined import entry as entry_module
from tests.step.pipelined import small
from tests.step.pipelined.test_entry import assert_close

ARGS = (*small.state_of(2), small.batch_of())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "pipeline.json"
    plan = small.parallel(strategy_ckpt_save_file=str(path)).plan(*ARGS)
    return path, plan


def test_a_plan_is_read_as_it_was_written(saved, tmp_path):
    path, plan = saved
    loaded = PipelinePlan.load(path)
    assert loaded == plan
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert str(loaded) == str(plan)
    assert str(loaded.explain("stage 1")) == str(plan.explain("stage 1"))
    assert loaded.timeline().svg() == plan.timeline().svg()


def test_a_step_runs_by_a_saved_plan_without_a_search(saved, monkeypatch):
    path, plan = saved

    def refuse(*_):
        raise AssertionError("nothing is searched for")

    monkeypatch.setattr(entry_module, "plan_program", refuse)
    step = small.parallel(strategy_ckpt_load_file=str(path))
    assert step.plan(*ARGS) == plan
    assert_close(step(*ARGS), jax.jit(small.step)(*ARGS), 1e-4)


@pytest.mark.parametrize(
    ("options", "args", "words"),
    [
        ({"pipeline_stages": 4}, ARGS, "pipeline_stages: 2 in the file, 4 here"),
        ({"parallel_mode": "semi_auto_parallel"}, ARGS, "parallel_mode: auto_parallel in the file"),
        ({"devices": jax.devices()[:4]}, ARGS, "devices: 8 in the file, 4 here"),
        ({}, (*small.state_of(2, 32), small.batch_of(16, 32)), "another program"),
        ({}, (*small.state_of(1), small.batch_of()), "another program"),
        ({}, (*small.state_of(2, tied=False), small.batch_of()), "another program"),
        ({"topology": "tpu-v5p"}, ARGS, "topology"),
    ],
)
def test_a_plan_for_something_else_is_refused_by_name(saved, options, args, words):
    step = small.parallel(**{"strategy_ckpt_load_file": str(saved[0]), **options})
    with pytest.raises(PlanMismatchError, match=words):
        step.plan(*args)


def test_files_that_are_no_plan_of_a_pipeline_are_refused(saved, tmp_path):
    path = tmp_path / "damaged.json"
    body = json.loads(saved[0].read_text())
    body["cuts"] = [1]
    path.write_text(json.dumps(body))
    with pytest.raises(PlanFormatError, match="damaged"):
        PipelinePlan.load(path)
    path.write_text("[1, 2")
    with pytest.raises(PlanFormatError, match="JSON"):
        PipelinePlan.load(path)
    single = tmp_path / "single.json"
    plain = spmdctx.parallel(lambda params, state, batch: small.loss(params, batch), parallel_mode="auto_parallel")
    plain.plan(*ARGS).save(single)
    with pytest.raises(PlanFormatError, match="no plan of a pipeline"):
        small.parallel(strategy_ckpt_load_file=str(single)).plan(*ARGS)
    with pytest.raises(PlanFormatError, match="no plan"):
        plain.with_options(strategy_ckpt_load_file=str(saved[0])).plan(*ARGS)


@pytest.mark.parametrize("fault", ["missing", "twice", "version", "order"])
def test_a_file_whose_parts_do_not_fit_is_refused(saved, tmp_path, fault):
    body = json.loads(saved[0].read_text())
    del body["sha256"]
    stages = body["schedule"]["stages"]
    if fault == "missing":
        del stages[0][2]
    elif fault == "twice":
        stages[0][2] = stages[0][1]
    elif fault == "version":
        body["format_version"] = 99
    else:
        stages[0].reverse()
    path = tmp_path / "file.json"
    path.write_text(json.dumps({**body, "sha256": file._checksum(body)}))
    with pytest.raises(PlanFormatError, match="99" if fault == "version" else "parts of a pipeline"):
        PipelinePlan.load(path)


def test_the_choice_of_the_number_of_stages_takes_no_file(saved):
    step = small.parallel(strategy_ckpt_load_file=str(saved[0]), auto_pipeline=True)
    with pytest.raises(UnsupportedError, match="leave auto_pipeline out"):
        step.plan(*ARGS)
