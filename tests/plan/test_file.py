"""Plan files: the same bytes for equal plans, everything back, and nothing damaged gets through."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from spmdctx.errors import PlanFormatError
from spmdctx.plan import Plan, Timing
from spmdctx.plan.data import PeakForm, PeakNote
from spmdctx.plan.file import _checksum, plan_json
from tests.plan import small_plan

FULL = {
    "options": (("dataset_strategy", ((8, 1), (8,))), ("comm_fusion", {"allreduce": {"mode": "auto"}})),
    "lower_bound_s": 3.9e-4,
    "gap": 0.1 + 0.2,
    "memory_limit_bytes": 2**34,
}


@pytest.mark.parametrize("changes", [{}, FULL], ids=["plain", "full"])
def test_a_loaded_plan_is_the_saved_one(tmp_path, changes):
    plan = small_plan(**changes)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.assignment == plan.assignment
    assert list(loaded.ops) == list(plan.ops)
    assert loaded.op_table.inputs == plan.op_table.inputs


@pytest.mark.parametrize("changes", [{}, FULL], ids=["plain", "full"])
def test_saving_a_loaded_plan_gives_the_same_bytes(tmp_path, changes):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    small_plan(**changes).save(first)
    Plan.load(first).save(second)
    assert first.read_bytes() == second.read_bytes()


def test_timing_is_not_in_the_file():
    assert plan_json(small_plan(timing=Timing(123.0, 456.0))) == plan_json(small_plan())


def test_saving_leaves_nothing_else_behind(tmp_path):
    small_plan().save(str(tmp_path / "plan.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_each_sharding_and_rule_is_written_once():
    body = json.loads(plan_json(small_plan()))
    assert body["shardings"] == [[["data"], []], [[], []]]
    assert len(body["ops"]["rules"]) == 3


def load_text(tmp_path, text: str) -> Plan:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    return Plan.load(path)


@pytest.mark.parametrize("text", ["", "no JSON", plan_json(small_plan())[:-30]])
def test_text_that_is_no_json_is_refused(tmp_path, text):
    with pytest.raises(PlanFormatError, match=r"does not hold JSON text[\s\S]*plan\.json"):
        load_text(tmp_path, text)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "other"}', '{"format": []}', '{"format": {}}', "3"])
def test_json_that_is_no_plan_is_refused(tmp_path, text):
    with pytest.raises(PlanFormatError, match="its format is not 'spmdctx plan'"):
        load_text(tmp_path, text)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFormatError, match="does not hold JSON text"):
        Plan.load(tmp_path / "plan.json")


def test_another_version_is_refused_by_number(tmp_path):
    body = json.loads(plan_json(small_plan()))
    body["format_version"] = 99
    with pytest.raises(PlanFormatError, match=r"another format version[\s\S]*got: +99[\s\S]*need: +1"):
        load_text(tmp_path, json.dumps(body))


def test_a_changed_value_is_found_by_the_checksum(tmp_path):
    body = json.loads(plan_json(small_plan()))
    body["cost"]["memory_bytes"] += 1
    with pytest.raises(PlanFormatError, match="checksum does not match"):
        load_text(tmp_path, json.dumps(body))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda body: body.pop("cost"), "KeyError: 'cost'"),
        (lambda body: body.update(values=[99]), "values: 99 is no whole number"),
        (lambda body: body["ops"]["flops"].pop(), "ValueError"),
        (lambda body: body["inputs"][0].pop(), "ValueError"),
        (lambda body: body.update(notes=3), "notes: 3 is no list"),
    ],
    ids=["missing", "no such sharding", "short column", "short row", "wrong type"],
)
def test_a_file_with_a_right_checksum_but_wrong_parts_is_refused(tmp_path, change, what):
    body = json.loads(plan_json(small_plan()))
    body.pop("sha256")
    change(body)
    body["sha256"] = _checksum(body)
    with pytest.raises(PlanFormatError, match=f"does not have the parts of a plan[\\s\\S]*{what}"):
        load_text(tmp_path, json.dumps(body))


def test_a_missing_file_is_an_ordinary_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")


def test_a_file_gives_notes_on_the_peak_their_kind_back(tmp_path):
    over = PeakNote(PeakForm.OVER_BUDGET, peak="2 bytes", budget=1)
    plan = replace(small_plan(), notes=("another note", over))
    plan.save(tmp_path / "plan.json")
    other, peak = Plan.load(tmp_path / "plan.json").notes
    assert (other, peak) == plan.notes
    assert not isinstance(other, PeakNote)
    assert (peak.form, peak.gaps) == (over.form, over.gaps)


WRONG = {
    "a negative number of a row": lambda body: body["values"].__setitem__(0, -1),
    "true for a number": lambda body: body["inputs"][0].__setitem__(4, True),
    "an axis that the mesh has not": lambda body: body["shardings"].append([["model"]]),
    "an axis twice": lambda body: body["shardings"].append([["data"], ["data"]]),
    "a sharding of another rank": lambda body: body["inputs"][0].__setitem__(2, [32]),
    "a negative size": lambda body: body["inputs"][0].__setitem__(2, [-32, 32]),
    "a size of half": lambda body: body["inputs"][0].__setitem__(2, [32.0, 32]),
    "a role": lambda body: body["inputs"][0].__setitem__(1, "other"),
    "a mesh axis of size 0": lambda body: body["mesh"].__setitem__(0, ["data", 0]),
    "a mesh that no machine has": lambda body: body["mesh"].append(["model", 2**40]),
    "a name that XLA cannot take": lambda body: body["mesh"].append(["d\\", 1]),
    "a huge time": lambda body: body["cost"].update(total_s=10**400),
    "a negative time": lambda body: body["collectives"][0].__setitem__(3, -1.0),
    "a kind of collective": lambda body: body["collectives"][0].__setitem__(0, "broadcast"),
    "a part of the cost more": lambda body: body["cost"].update(more=1),
    "a text that is none": lambda body: body["texts"].append(3),
    "a note that is none": lambda body: body["notes"].append(None),
    "a constant for an input": lambda body: body["ops"]["inputs"].__setitem__(0, -1),
    "an operand that is no value": lambda body: body["ops"]["operands"][0].__setitem__(0, 99),
    "an operand too few": lambda body: body["ops"]["operands"][0].pop(),
    "a factor that the rule has not": lambda body: body["ops"]["rules"][0][0][0][0].append(7),
    "a choice of another rule": lambda body: body["ops"]["choices"].append([]) or body["ops"]["axes"].__setitem__(0, 2),
    "an option of a large number": lambda body: body["options"].append(["x", {"a": [10**400]}]),
    "a fingerprint": lambda body: body.update(fingerprint=["f"]),
    "no mode": lambda body: body["assignment"].pop("mode"),
}


@pytest.mark.parametrize("name", WRONG)
def test_content_that_no_plan_has_is_refused_under_a_right_checksum(tmp_path, name):
    body = json.loads(plan_json(small_plan()))
    body.pop("sha256")
    WRONG[name](body)
    body["sha256"] = _checksum(body)
    with pytest.raises(PlanFormatError, match="does not have the parts of a plan") as caught:
        load_text(tmp_path, json.dumps(body))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("kind", ["folder", "pipe", "large", "device", "nul", "link to itself"])
def test_what_is_no_plan_file_is_refused_without_reading_it(tmp_path, kind):
    path = tmp_path / "plan.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "link to itself":
        path.symlink_to(path)
    with pytest.raises(PlanFormatError, match="The file is no plan"):
        Plan.load({"device": "/dev/zero", "nul": "a\0b"}.get(kind, path))
