"""Charts: nothing is lost by thinning, everything is inside of the picture, and each has a title."""

from __future__ import annotations

import re

import pytest

from spmdctx.ir.collective import Cause, CauseForm, Collective
from spmdctx.plan.file import parse_plan, plan_json
from spmdctx.plan.plan import Plan
from spmdctx.plan.show.charts import HEIGHT, WIDTH, Mark, area_chart, scatter_chart, thinned
from spmdctx.plan.show.page_charts import memory_chart, time_bands, time_parts
from tests.plan import small_plan
from tests.plan.show.test_page import read

PROFILE = (10, 40, 20, 80, 30, 30)


@pytest.mark.parametrize("size", [1, 5, 7, 100, 5000])
def test_thinning_keeps_the_largest_value_where_it_is(size):
    values = [(position * 7919) % 1009 for position in range(size)]
    values[size // 3] = 5000
    pairs = thinned(values, 7)
    assert len(pairs) <= 7
    assert (size // 3, 5000) in pairs
    assert [position for position, _ in pairs] == sorted(position for position, _ in pairs)
    assert all(values[position] == value for position, value in pairs)


def points_of(svg):
    text = re.search(r'class="line" points="([^"]*)"', svg).group(1)
    return [tuple(map(float, pair.split(","))) for pair in text.split()]


@pytest.mark.parametrize("limit", [None, 100, 20])
def test_an_area_chart_stays_in_its_picture_and_marks_the_peak(limit):
    svg = area_chart(PROFILE, limit, ("80 B", "limit", "ops"), "memory <over> time")
    read(svg)
    points = points_of(svg)
    assert len(points) == len(PROFILE)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert min(points, key=lambda point: point[1])[0] == points[3][0]
    assert ('class="limit"' in svg) == (limit is not None)
    assert "memory &lt;over&gt; time" in svg


def test_a_chart_of_zeros_is_flat():
    assert len({y for _, y in points_of(area_chart((0, 0, 0), None, ("0 B", "", ""), ""))}) == 1


def test_a_scatter_chart_has_a_dot_per_mark():
    svg = scatter_chart([Mark(1.0, 2.0, "axis0", "one", True), Mark(3.0, 1.0, "axis1", "two", False)], ("3", "2", "x", "y"), "t")
    assert read(svg).seen.count("circle") == 2
    assert svg.count("dot filled") == 1


def test_the_memory_chart_says_where_the_peak_is_and_what_the_budget_is():
    chart = memory_chart(small_plan(memory_profile=PROFILE, memory_limit_bytes=100))
    assert "the peak is at op 4, dot_general (model.py:12" in chart
    assert 'class="limit"' in chart
    assert 'class="limit"' not in memory_chart(small_plan(memory_profile=PROFILE, memory_limit_bytes=10**6))


@pytest.mark.parametrize("profile", [None, (), (5,)])
def test_where_no_profile_is_known_there_is_no_chart(profile):
    assert memory_chart(small_plan(memory_profile=profile)) == ""


def test_reworded_causes_make_the_same_parts(monkeypatch):
    before = [part[1:] for part in time_parts(small_plan())]
    for form in CauseForm:
        monkeypatch.setattr(form, "_value_", f"another wording: {form.value}")
    assert [part[1:] for part in time_parts(small_plan())] == before


def test_a_plan_file_keeps_what_the_parts_are_told_apart_by():
    plan = small_plan()
    assert time_parts(parse_plan(plan_json(plan), "text", Plan)) == time_parts(plan)


def test_time_is_told_apart_by_cause_and_axes():
    extra = (
        Collective("all_to_all", ("data",), 64, 1e-6, 2, Cause.move(0, "dot_general", "", "[data, -]", "[-, data]")),
        Collective("all_reduce", ("data",), 64, 5e-6, 1, Cause(CauseForm.WRITTEN, primitive="psum")),
    )
    plan = small_plan(collectives=(*small_plan().collectives, *extra))
    parts = time_parts(plan)
    assert [part.name for part in parts] == [
        "compute",
        "partial result of dot_general over data",
        "moving parameter leaves over data",
        "collectives of the step itself",
        "moving activations over data",
    ]
    assert sum(part.time_s for part in parts[1:]) == pytest.approx(sum(row.time_s * row.repeats for row in plan.collectives))
    read(time_bands(plan))


def test_what_hides_behind_compute_is_said():
    plan = small_plan(cost=small_plan().cost._replace(hidden_communication_s=2e-5))
    assert "20.0 µs of communication hides behind compute" in time_bands(plan)
