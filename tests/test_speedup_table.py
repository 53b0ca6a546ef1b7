"""The table of speedups: the lower of two estimates, programs that exceed the memory left out."""

import pytest

from benchmarks.judge import Judgement
from benchmarks.judge_compile import Judged
from benchmarks.speedup_table import ROWS, Contender, Row, speedup, table, template_jobs

GIB = 2**30


def contender(name, cycles_s, roofline_s, peak_bytes=GIB):
    made = Judgement(cycles_s, roofline_s, cycles_s, roofline_s, 0.0, 0.0, peak_bytes, 0.0, (), 0)
    return Contender(name, Judged(made, {}, 1.0))


WAYS = [
    contender("dp8", 0.011, 0.012),
    contender("zero3_8", 0.0105, 0.008, peak_bytes=9 * GIB),
    contender("tp8", 0.0, 0.011),
    contender("dynamic_programming", 0.010, 0.010),
    Contender("recursive_programming", Judged(None, {}, 1.0, "out of memory")),
]


def test_the_speedup_is_the_lower_of_the_estimates():
    assert speedup(WAYS, "dp8", "dynamic_programming", 8 * GIB) == pytest.approx(1.1)


def test_the_best_template_is_taken_per_estimate_among_those_that_fit_and_were_judged():
    assert speedup(WAYS, "", "dynamic_programming", 8 * GIB) == pytest.approx(1.1)
    assert speedup(WAYS, "", "dynamic_programming", 10 * GIB) == pytest.approx(0.8)


def test_what_does_not_compile_or_fit_has_no_speedup():
    assert speedup(WAYS, "dp8", "recursive_programming", 8 * GIB) is None
    assert speedup(WAYS, "zero3_8", "dynamic_programming", 8 * GIB) is None


def test_the_table_has_the_form_of_mindspores():
    lines = table([(Row("llama2-7b", 8, ((8, 1),)), "small", WAYS)], 8 * GIB, 0.1).splitlines()
    assert lines[0].startswith("model, parallel_config in semi, mem_coeff in auto, SpeedUp")
    assert lines[1:] == ["llama2-7b on 8, dp=8, 0.1, 110.0%, 110.0%, none, small"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.devices}")
def test_every_row_has_its_hand_strategies_among_the_templates(row):
    start = {"layers": 2} if row.hands else {}
    names = template_jobs(row, 16 * row.devices, start)
    assert {f"dp{data}" * (data > 1) + "_" * (data > 1 < model) + f"tp{model}" * (model > 1) for data, model in row.hands} <= set(names)
    assert len(names) >= 10


def test_a_small_batch_has_only_the_templates_that_split_it():
    names = template_jobs(ROWS[0], 4, {"layers": 2})
    assert "dp8" not in names
    assert "dp4_tp2" in names
