"""Pictures of schedules: every task that runs is drawn once, where and as long as it runs."""

import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from spmdctx.pipeline.schedule.orders import gpipe, interleaved, one_f_one_b
from spmdctx.pipeline.schedule.simulate import simulate
from spmdctx.pipeline.schedule.tasks import Costs, cost_of
from spmdctx.pipeline.schedule.zero_bubble import zero_bubble_h1, zero_bubble_v
from spmdctx.pipeline.show.timeline import Timeline

EVEN = Costs(1.0, 2.0, 1.0, 1.0)
SCHEDULES = [gpipe(2, 3), one_f_one_b(4, 8), interleaved(2, 4, 2), zero_bubble_h1(4, 8), zero_bubble_v(2, 4, cost_of([EVEN] * 4))]


def timeline(schedule):
    return Timeline(simulate(schedule, cost_of([EVEN] * schedule.num_chunks)))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.name)
def test_each_task_is_drawn_once_and_as_long_as_it_takes(schedule):
    drawn = timeline(schedule)
    svg = drawn.svg()
    rects = re.findall(r'class="task (\w)[^"]*" x="([\d.]+)" y="(\d+)" width="([\d.]+)"', svg)
    tasks = [(str(task.kind), stage) for stage, own in enumerate(schedule.stages) for task in own]
    assert Counter((kind, int(y) // 32) for kind, _, y, _ in rects) == Counter(tasks)
    scale = 840 / drawn.simulation.makespan_s
    for stage, busy in enumerate(drawn.simulation.busy_s):
        assert sum(float(width) for _, _, y, width in rects if int(y) // 32 == stage) == pytest.approx(busy * scale, rel=1e-3)
    assert svg.count('class="idle"') == schedule.num_stages
    assert "spmdctx-idle" in svg
    assert ElementTree.fromstring(svg).tag == "svg"
    assert 'class="key F"' in drawn._repr_html_()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.name)
def test_the_text_names_each_task_that_has_room(schedule):
    lines = str(timeline(schedule)).splitlines()
    assert len(lines) == schedule.num_stages + 1
    for stage, own in enumerate(schedule.stages):
        assert lines[stage].lstrip().startswith(f"stage {stage}")
        for task in own:
            letter = str(task.kind) if task.chunk == own[0].chunk else str(task.kind).lower()
            assert f"{letter}{task.micro}" in lines[stage]
    assert ("small letters" in lines[-1]) is (schedule.num_chunks > schedule.num_stages)


def test_many_tasks_fit_in_a_line():
    assert all(len(line) <= 120 for line in str(timeline(one_f_one_b(8, 256))).splitlines())
