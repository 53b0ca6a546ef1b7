"""The plan of a pipeline shows itself: tables, page, and explanations of its stages."""

import pytest

from tests.step.pipelined import small


@pytest.fixture(scope="module")
def plan():
    return small.parallel(4).plan(*small.state_of(8, tied=False), small.batch_of())


def test_a_stage_tells_what_it_holds_and_why_it_is_cut_there(plan):
    text = str(plan.explain("stage 1"))
    assert "stage 1 of 4" in text
    assert "params/layers/" in text
    assert "small.py:" in text
    assert "begins" in text
    assert "ends" in text
    assert "cross each way" in text
    assert "it wins if" in text
    first, last = str(plan.explain("Stage 0")), str(plan.explain("stage_3"))
    assert "begins" not in first
    assert "params/first" in first
    assert "ends" not in last
    assert "params/last" in last
    # The limit and the bytes of neighbours are those of the cut itself.
    (reason,) = plan.cut_reasons[:1]
    assert all(other.longest_s > reason.limit_s or other.crossing_bytes >= reason.crossing_bytes for other in reason.others)


def test_a_path_is_explained_by_the_programs_that_read_it(plan):
    found = plan.explain("layers/7")
    assert found
    assert "stage 3, forward3" in str(found)
    assert not plan.explain("stage 4")
    assert "'stage 0' to 'stage 3'" in str(plan.explain("nothing/like/it"))


def test_sums_of_gradients_are_explained_where_devices_share_a_stage():
    plan = small.parallel(2, device_num=4).plan(*small.state_of(2, tied=False), small.batch_of())
    assert "gradient of params/last" in str(plan.explain("params/last"))


def test_the_page_has_the_timeline_and_all_stages(plan, tmp_path):
    plan.save_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count('class="task') == sum(map(len, plan.simulation.schedule.stages))
    assert page.count("<svg") == page.count("</svg>") == 1
    assert all(f">{words}<" in page for words in ("activations", "their gradients", "values after the loss"))
    assert "<svg" in plan._repr_html_()
    assert "<svg" in plan.timeline()._repr_html_()


def test_text_has_stages_timeline_and_transfers(plan):
    text = str(plan)
    assert "stage 3  " in text
    assert "activations" in text
    assert text.count("values after the loss") == 1
    assert plan.step_s == pytest.approx(plan.simulation.makespan_s + plan.after_s)
    assert "4 stages" in repr(plan)
