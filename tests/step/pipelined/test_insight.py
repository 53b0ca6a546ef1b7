"""Plans of pipelines are weighed against memory, and have certificates."""

import pickle

import jax
import pytest

from spmdctx.errors import UnsupportedError
from spmdctx.pipeline.plan import PipelinePlan
from tests.step.pipelined import small
from tests.step.pipelined.test_auto import planned


@pytest.fixture(scope="module")
def plan():
    return planned(pipeline_stages=2)


def test_budgets_and_devices_are_weighed_with_as_many_stages(plan):
    told = []
    found = plan.pareto([plan.memory_bytes, 1000], [1, 2, 4], progress=told.append)
    assert [(point.num_devices, point.mesh.axes[0]) for point in found.points] == [(2, ("stage", 2)), (4, ("stage", 2))]
    assert [(one.num_devices, one.memory_limit_bytes) for one in found.unmet] == [(1, None), (2, plan.memory_bytes), (4, 1000)]
    assert "1 device cannot be divided into 2 stages" in found.unmet[0].reason
    same = found.plans[1]
    assert (same.cost, same.cuts) == (plan.cost, plan.cuts)
    assert set(same.notes) <= set(plan.notes)
    assert found.points[1].total_s == plan.step_s
    assert len(told) == 6
    assert not found.notes
    assert len(same.pareto([], [4]).points) >= 1


def test_the_certificate_holds_for_every_cut_and_is_no_larger_than_the_step(plan):
    assert plan.certify() is plan
    assert 0 < plan.lower_bound_s < plan.step_s
    assert plan.gap == plan.step_s / plan.lower_bound_s - 1
    for other in plan.pareto([plan.memory_bytes], [4]).plans:
        assert other.step_s >= plan.lower_bound_s


def test_plans_from_files_and_pickles_say_that_they_hold_no_step(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded, pickled = PipelinePlan.load(tmp_path / "plan.json"), pickle.loads(pickle.dumps(plan))
    assert loaded == plan == pickled
    for one in (loaded, pickled):
        with pytest.raises(UnsupportedError, match="cannot be planned again"):
            one.pareto()
    assert pickled.certify().gap == plan.gap
    with pytest.raises(UnsupportedError, match="This plan of a pipeline cannot be certified"):
        loaded.certify()


def test_without_a_search_there_is_no_certificate():
    args = (*jax.eval_shape(small.state_of), jax.eval_shape(small.batch_of))
    plan = small.parallel(parallel_mode="semi_auto_parallel", device_num=2).plan(*args)
    with pytest.raises(UnsupportedError, match="semi_auto_parallel"):
        plan.certify()
    assert len(plan.pareto(num_devices=[2]).points) == 1


def test_with_auto_pipeline_the_number_of_stages_is_chosen_anew():
    plan = planned(pipeline_stages=2, auto_pipeline=True, device_num=2)
    assert not isinstance(plan, PipelinePlan)
    again = plan.replan(memory_bytes=2 * plan.cost.memory_bytes)
    assert again.cost == plan.cost
    assert any(note.startswith("auto_pipeline chose 1 stage of at most 2") for note in again.notes)
