"""Plans of pipelines are compared with each other, and with plans without stages."""

import pytest

import spmdctx
from spmdctx.pipeline.plan import PipelinePlan
from tests.step.pipelined import small

ARGUMENTS = (*small.state_of(8, tied=False), small.batch_of())


def planned(stages, **options):
    return small.parallel(stages, **options).plan(*ARGUMENTS)


@pytest.fixture(scope="module")
def plans():
    plain = spmdctx.parallel(small.step, parallel_mode="auto_parallel").plan(*ARGUMENTS)
    return {"four": planned(4), "two": planned(2), "gpipe": planned(4, pipeline_config={"pipeline_scheduler": "gpipe"}), "plain": plain}


def test_other_stages_have_other_cuts_costs_and_homes(plans):
    found = plans["four"].diff(plans["two"])
    settings = {one.name: (one.before, one.after) for one in found.settings}
    assert settings["stages"] == ("4", "2")
    assert "small.py:" in settings["cut 0"][0]
    assert settings["cut 2"][1] == ""
    assert {"stage 1: memory", "stage 3: memory", "crosses: activations"} <= {one.name for one in found.costs}
    assert any("stage 3" in one.before and "stage 1" in one.after for one in found.tensors)
    assert "params/layers/*" in str(found)
    assert "stage 3: memory" in found._repr_html_()


def test_another_schedule_has_more_in_flight(plans):
    found = plans["four"].diff(plans["gpipe"])
    assert ("schedule", "1f1b", "gpipe") in [(one.name, one.before, one.after) for one in found.settings]
    flights = {one.name: (one.before, one.after.split()[0]) for one in found.costs if one.name.endswith("in flight")}
    assert flights == {"stage 1: in flight": ("3", "4"), "stage 2: in flight": ("2", "4"), "stage 3: in flight": ("1", "4")}


def test_a_plan_is_equal_to_itself_and_to_its_file(plans, tmp_path):
    plans["four"].save(tmp_path / "plan.json")
    found = plans["four"].diff(PipelinePlan.load(tmp_path / "plan.json"))
    assert not found
    assert "The plans are equal." in str(found)


def test_plans_with_and_without_stages_are_compared_both_ways(plans):
    there, back = plans["plain"].diff(plans["four"]), plans["four"].diff(plans["plain"])
    assert there
    stages = next(one for one in there.settings if one.name == "stages")
    assert (stages.before, stages.after) == ("1", "4")
    assert {(one.name, one.before, one.after) for one in there.settings} == {(one.name, one.after, one.before) for one in back.settings}
    assert any(one.after.startswith("stage 2") for one in there.tensors)
    assert "stage 3: memory" in str(there)


def test_what_is_no_plan_is_refused(plans):
    with pytest.raises(TypeError, match="compared with another plan"):
        plans["four"].diff("plan.json")
