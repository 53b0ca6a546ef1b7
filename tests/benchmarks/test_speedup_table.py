"""The table of speedups: the lower of two estimates, programs that exceed the memory left out."""

import json

import pytest

from benchmarks.judge import Judgement
from benchmarks.judge_compile import Judged, key_of
from benchmarks.speedup_table import MODULE, ROWS, Contender, Row, known_contenders, speedup, table, template_jobs

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


def test_each_estimate_takes_the_best_template_that_fits_and_was_judged():
    assert speedup(WAYS, "", "dynamic_programming", 8 * GIB) == pytest.approx(1.1)
    assert speedup(WAYS, "", "dynamic_programming", 10 * GIB) == pytest.approx(0.8)


def test_what_does_not_compile_or_fit_has_no_speedup():
    assert speedup(WAYS, "dp8", "recursive_programming", 8 * GIB) is None
    assert speedup(WAYS, "zero3_8", "dynamic_programming", 8 * GIB) is None


def test_the_table_has_the_form_of_mindspores():
    lines = table([(Row("llama2-7b", 8, ((8, 1),)), "small", WAYS)], 8 * GIB, 0.1).splitlines()
    assert lines[0].startswith("model, parallel_config in semi, mem_coeff in auto, SpeedUp")
    assert lines[1:] == [
        "llama2-7b on 8, dp=8, 0.1, 110.0%, small, 120.0%, 110.0%, 110.0%, 110.0%, none",
        "geometric mean, , , , , 120.0%, 110.0%, 110.0%, 110.0%, none",
        "least, , , , , 120.0%, 110.0%, 110.0%, 110.0%, none",
    ]


def test_what_was_judged_before_is_read_with_its_cycles_where_they_are_known(tmp_path):
    start = {"topology": "v5p:2x2x2", "model": "llama2-7b", "layers": 2, "batch": 8, "seq": 2048}
    jobs = template_jobs(ROWS[0], 8, start)
    for name, cycles_s, codegen in (("dp8", 0.0, False), ("tp8", 0.0, False), ("tp8", 0.02, True)):
        made = contender(name, cycles_s, 0.01).outcome.judgement
        text = json.dumps({"judgement": made.to_dict(), "planned": {}, "seconds": 1.0, "error": ""})
        (tmp_path / f"{key_of(jobs[name], MODULE, codegen)}.json").write_text(text)
    found = known_contenders(ROWS[0], 8, start, GIB, tmp_path)
    assert sorted((one.name, one.outcome.judgement.cycles_s) for one in found) == [("dp8", 0.0), ("tp8", 0.02)]


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
