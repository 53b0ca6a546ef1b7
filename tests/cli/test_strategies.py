"""`spmdctx strategies` and `--strategy`: a small library is made, checked, spoilt and used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spmdctx.cli.library import searched_text
from spmdctx.cli.main import main
from spmdctx.cli.strategies import pipelines_differ
from spmdctx.errors import InfeasibleError
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.plan import Plan
from spmdctx.plan.library import Library, Row, read_library

TABLE = """
program: {scan_layers: true, remat: false, dtype: float32}
search_mode: sharding_propagation
topology: tpu-v5e
max_device_memory: 16GB
rows:
  - {model: tiny, device_num: 4, hand: [[2, 2], [4, 1]], batch_size: 8, seq: 12, layers: 2}
"""
FILES = (
    "tiny/4/hand_dp2_mp2.context.yaml",
    "tiny/4/hand_dp2_mp2.yaml",
    "tiny/4/hand_dp4_mp1.context.yaml",
    "tiny/4/hand_dp4_mp1.yaml",
    "tiny/4/searched.context.yaml",
    "tiny/4/searched.json",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A library with all its files."""
    (tmp_path / "rows.yaml").write_text(TABLE)
    assert main(["strategies", "--folder", str(tmp_path)]) == 0
    return tmp_path


def _check(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, str]]:
    capsys.readouterr()
    code = main(["strategies", "--check", "--folder", str(folder), "--json", *options])
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] == (code == 0)
    return code, {file["path"]: file["state"] for file in data["files"]}


def test_a_library_is_made_and_is_what_would_be_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*")) == ["rows.yaml", *FILES]
    assert _check(folder, capsys) == (0, dict.fromkeys(sorted(FILES), "same") | {})
    assert sorted(_check(folder, capsys, "--only", "hand")[1]) == list(FILES[:5])


def test_files_that_differ_are_missing_or_belong_to_no_row_fail_the_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / FILES[0]).write_text("use_parallel: false\n")
    (folder / FILES[1]).unlink()
    (folder / "tiny/4/notes.txt").write_text("mine")
    plan = Plan.load(folder / "tiny/4/searched.json")
    object.__setattr__(plan, "notes", ("another note",))
    plan.save(folder / "tiny/4/searched.json")
    code, states = _check(folder, capsys)
    assert code == 1
    assert {path: state for path, state in states.items() if state != "same"} == {
        FILES[0]: "differs",
        FILES[1]: "missing",
        "tiny/4/searched.json": "differs",
        "tiny/4/notes.txt": "unknown",
    }


def test_a_plan_whose_source_lines_moved_is_still_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "tiny/4/searched.json"
    plan = Plan.load(path)
    plan.op_table.origins = tuple(origin._replace(source=f"{origin.source}0") for origin in plan.op_table.origins)
    plan.save(path)
    assert _check(folder, capsys, "--only", "searched")[0] == 0


def test_a_row_without_a_plan_in_its_budget_fails_and_the_others_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(library: Library, row: Row, mode: str) -> tuple[Path, str]:
        if row.device_num == 4:
            raise InfeasibleError("No plan fits.", need="memory_bytes=17")
        return searched_text(library, row, mode)

    monkeypatch.setattr("spmdctx.cli.strategies.searched_text", search)
    (tmp_path / "rows.yaml").write_text(f"{TABLE}  - {{model: tiny, device_num: 2, hand: [], batch_size: 8, seq: 12, layers: 1}}\n")
    code = main(["strategies", "--folder", str(tmp_path), "--only", "searched", "--json"])
    files = {file["path"]: file for file in json.loads(capsys.readouterr().out)["files"]}
    assert code == 1
    assert files["tiny/4/searched.json"]["state"] == "no plan"
    assert "memory_bytes=17" in files["tiny/4/searched.json"]["detail"]
    assert files["tiny/2/searched.json"]["state"] == "written"


def test_a_row_that_is_not_there_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "--folder", str(folder), "--model", "gpt-9"]) == 2
    assert "tiny on 4" in capsys.readouterr().err


PIPELINE = """
program: {scan_layers: true, remat: true, dtype: float32}
search_mode: dynamic_programming
topology: tpu-v5e
max_device_memory: 15GB
rows:
  - {model: tiny, device_num: 4, hand: [[2, 1]], pipeline_stages: 2, micro_batch_num: 4, scan_layers: false, batch_size: 8, seq: 12,
     layers: 2}
"""
PIPELINE_FILES = (
    "tiny/4/hand_dp2_mp1_pp2.context.yaml",
    "tiny/4/hand_dp2_mp1_pp2.yaml",
    "tiny/4/searched_pp2.context.yaml",
    "tiny/4/searched_pp2.json",
)


def test_a_row_of_a_pipeline_is_made_checked_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.yaml").write_text(PIPELINE)
    assert main(["strategies", "--folder", str(tmp_path)]) == 0
    file = tmp_path / PIPELINE_FILES[-1]
    assert _check(tmp_path, capsys) == (0, dict.fromkeys(PIPELINE_FILES, "same"))
    monkeypatch.setattr("spmdctx.cli.library.read_library", lambda: read_library(tmp_path))
    for strategy in ("hand", "searched"):
        assert main(["plan", "--strategy", strategy, "--device-num", "4", "--pipeline-stages", "2"]) == 0
        assert "Pipeline  2 stages" in capsys.readouterr().out
    old = PipelinePlan.load(file)
    assert pipelines_differ(old, old) == ""
    assert pipelines_differ(old, replace(old, cuts=tuple(cut - 1 for cut in old.cuts))) == "cuts differ"
    moved = replace(old.joints[0], notes=("another note",))
    assert "chunk 0" in pipelines_differ(old, replace(old, joints=(moved, *old.joints[1:])))


@pytest.fixture
def shipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small library in place of the shipped one."""
    monkeypatch.setattr("spmdctx.cli.library.read_library", lambda: read_library(folder))
    return folder


def _plan(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    capsys.readouterr()
    code = main(["plan", "--json", *options])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if code == 0 else {}, captured.err


@pytest.mark.parametrize(("options", "mesh"), [((), {"data": 2, "model": 2}), (("--model-parallel", "1"), {"data": 4})])
def test_a_hand_strategy_brings_its_program_and_context(
    options: tuple[str, ...], mesh: dict[str, int], shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data, _ = _plan(capsys, "--strategy", "hand", "--device-num", "4", *options)
    assert code == 0
    assert (data["mesh"], data["mode"], data["topology"]) == (mesh, "semi_auto_parallel", "tpu-v5e")
    batch = next(row for row in data["inputs"] if row["path"].startswith("batch/"))
    assert batch["shape"] == [8, 12]


def test_a_searched_plan_is_used_with_no_search(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data, _ = _plan(capsys, "--strategy", "searched", "--device-num", "4")
    assert code == 0
    saved = Plan.load(shipped / "tiny/4/searched.json")
    assert (data["mesh"], data["search_mode"]) == (saved.mesh, "sharding_propagation")
    assert data["cost"] == saved.cost._asdict()


def test_files_are_strategies_too(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = ["--layers", "2", "--batch-size", "8", "--seq", "12", "--scan-layers"]
    code, data, _ = _plan(capsys, "--strategy", str(shipped / "tiny/4/hand_dp2_mp2.yaml"), *program)
    assert (code, data["mesh"], data["mode"]) == (0, {"data": 2, "model": 2}, "semi_auto_parallel")
    code, data, _ = _plan(capsys, "--strategy", str(shipped / "tiny/4/searched.json"), *program)
    assert (code, data["topology"]) == (0, "tpu-v5e")
    code, _, error = _plan(capsys, "--strategy", str(shipped / "tiny/4/searched.json"), *program, "--layers", "3")
    assert code == 2
    assert "another program" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--strategy", "hand"], "no strategy for tiny on 8 devices"),
        (["--strategy", "hand", "--device-num", "4", "--model-parallel", "4"], "--model-parallel 2, 1"),
        (["--strategy", "missing.yaml"], "missing.yaml"),
    ],
)
def test_a_strategy_that_is_not_there_is_refused(options: list[str], words: str, shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = _plan(capsys, *options)
    assert code == 2
    assert words in error


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("spmdctx ")
