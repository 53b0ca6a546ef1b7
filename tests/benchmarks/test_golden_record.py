"""The golden record: what it keeps of a compiled program, and that a comparison names every text that differs."""

import pytest

from benchmarks import golden_programs, golden_record

PROGRAM = """HloModule jit_step

FileNames
1 "model.py"

ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %sine = f32[8]{0} sine(%x), metadata={op_name="jit(step)/sin" source_file="model.py" source_line=3}
}
"""


@pytest.fixture
def records(tmp_path):
    """Two records of the same texts, the second of which a test may change."""
    folders = tmp_path / "before", tmp_path / "after"
    for folder in folders:
        for name in ("cells/mlp", "options/micro"):
            (folder / name).mkdir(parents=True)
            (folder / name / "plan.txt").write_text(f"the plan of {name}\n")
    return folders


def test_equal_records_pass(records, capsys):
    assert golden_record.compare(*records, "") == 0
    assert capsys.readouterr().out == "2 texts, 0 differ\n"


@pytest.mark.parametrize("change", ["altered", "missing", "new"])
def test_a_text_that_differs_is_named(records, capsys, change):
    text = records[1] / "cells/mlp" / ("warnings.txt" if change == "new" else "plan.txt")
    if change == "missing":
        text.unlink()
    else:
        text.write_text("another plan\n")
    assert golden_record.compare(*records, "") == 1
    assert f"cells/mlp/{text.name}:" in capsys.readouterr().out


def test_only_the_entries_that_were_asked_for_are_compared(records):
    (records[1] / "cells/mlp/plan.txt").write_text("another plan\n")
    assert golden_record.compare(*records, "options") == 0


def test_an_empty_record_does_not_pass(records):
    assert golden_record.compare(*records, "no such entry") == 1


def test_a_compiled_program_is_kept_without_the_places_in_the_source():
    kept = golden_programs.without_places(PROGRAM)
    assert "sine(%x)\n" in kept
    assert "model.py" not in kept


def test_entries_have_names_of_their_own():
    names = [name for name, _ in golden_programs.entries()]
    assert len(names) == len(set(names)) > 200
