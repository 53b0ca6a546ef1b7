"""The command line: what it writes, what it returns, and how it refuses."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.table import Table

from spmdctx import CheckpointManager
from spmdctx.cli.main import main
from spmdctx.cli.output import Output
from spmdctx.cli.parser.commands import command_parser
from spmdctx.errors import message
from spmdctx.machine.presets import PRESETS
from spmdctx.models import WordTokenizer, read_text, read_tokenizer
from spmdctx.plan import Plan

SMALL = ["--layers", "1", "--seq", "12", "--batch-size", "8"]
COMMANDS = ("train", "generate", "plan", "explain", "audit", "diff", "verify", "strategies", "calibrate")


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Plans of the small model on 8 and on 4 devices."""
    folder = tmp_path_factory.mktemp("plans")
    files = [str(folder / f"{count}.json") for count in (8, 4)]
    for file, count in zip(files, ("8", "4"), strict=True):
        assert main(["plan", *SMALL, "--device-num", count, "--save", file]) == 0
    return files[0], files[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["jax", "rules"])
def test_plan_exports(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.py"
    code, data = _run(capsys, "plan", *SMALL, "--export", kind, "--out", str(out))
    assert code == 0
    names: dict[str, Any] = {}
    exec(out.read_text(encoding="utf-8"), names)
    assert names["AXES" if kind == "jax" else "MESH"] == data["mesh"]


def test_plan_exports_into_a_file_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--export", "jax"]) == 2
    assert "--out" in capsys.readouterr().err


def test_training_writes_state_plan_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    code, data = _run(capsys, "train", *SMALL, "--steps", "3", "--out", str(tmp_path), "--metrics", str(metrics))
    assert code == 0
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert [row["loss"] for row in rows[:3]] == data["losses"]
    assert rows[3]["report/planned_step_s"] == data["report"]["planned_step_s"]
    assert "over 2 devices" in data["plan"]["summary"]
    assert data["audit"]["ok"]
    assert data["verify"]["ok"]
    mesh = data["plan"]["mesh"]
    assert math.prod(mesh.values()) == 8
    assert len(data["losses"]) == 3
    assert data["losses"][-1] < data["losses"][0]
    assert Plan.load(tmp_path / "plan.json").mesh == mesh
    assert "<html" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert WordTokenizer.train(read_text(), 768).words == read_tokenizer(tmp_path / "tokenizer.json").words
    with CheckpointManager(tmp_path / "state") as checkpoints:
        found = checkpoints.restore({"model": {"head": {"kernel": np.zeros((192, 768), np.float32)}}}, partial=True)
    assert found.step == 3
    assert found.plan.mesh == mesh
    assert found.state["model"]["head"]["kernel"].any()


def test_a_training_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = ["train", *SMALL, "--device-num", "2", "--parallel-mode", "semi_auto_parallel", "--steps"]
    code, whole = _run(capsys, *training, "5", "--out", str(tmp_path / "whole"))
    assert code == 0
    stopped = ["--save-every", "2", "--out", str(tmp_path / "stopped")]
    code, first = _run(capsys, *training, "3", *stopped)
    assert code == 0
    (tmp_path / "stopped" / "state" / "3").rename(tmp_path / "gone")  # as if it had been stopped before
    code, rest = _run(capsys, *training, "5", *stopped)
    assert code == 0
    assert first["losses"] == whole["losses"][:3]
    assert rest["losses"] == whole["losses"][2:]
    code, again = _run(capsys, *training, "5", *stopped)
    assert (code, again["losses"]) == (0, [])


def test_training_reads_a_text_and_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, config = tmp_path / "text.txt", tmp_path / "config.yaml"
    text.write_text("to be or not to be, that is the question. " * 50, encoding="utf-8")
    config.write_text("parallel: {parallel_mode: 1}\nparallel_config: {data_parallel: 2, model_parallel: 4}\n", encoding="utf-8")
    files = ["--text", str(text), "--config", str(config), "--out", str(tmp_path / "out")]
    code, data = _run(capsys, "train", *SMALL, "--steps", "1", *files, "--model-parallel", "2")
    assert code == 0
    assert data["plan"]["mode"] == "semi_auto_parallel"
    assert data["plan"]["mesh"] == {"data": 4, "model": 2}


def test_a_model_is_planned_for_machines_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = _run(
        capsys, "plan", "--model", "llama2-7b", "--layers", "1", "--batch-size", "64", "--device-num", "64", "--topology", "tpu-v5p"
    )
    assert code == 0
    assert math.prod(data["mesh"].values()) == 64
    assert data["gap"] < 0.01
    assert data["topology"] == "tpu-v5p"
    assert data["collectives"]


def test_a_large_model_is_planned_into_the_memory_of_its_devices_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Its activations are recomputed, and the budget that nobody set is met on whatever mesh it can be."""
    machine = ["--device-num", "8", "--topology", "tpu-v5p"]
    _, data = _run(capsys, "plan", "--model", "llama2-7b", *machine)
    assert data["cost"]["memory_bytes"] <= PRESETS["tpu-v5p"].memory_bytes
    assert data["gap"] < 0.01
    _, whole = _run(capsys, "plan", "--model", "llama2-7b", "--no-remat", *machine)
    assert whole["cost"]["memory_bytes"] > PRESETS["tpu-v5p"].memory_bytes
    assert [note for note in whole["notes"] if note.startswith("No plan on 8 devices fits in the 95.7 GiB of a tpu-v5p: each has at least")]


@pytest.mark.parametrize(("devices", "sequences"), [(6, 24), (16, 32), (64, 64)])
def test_a_batch_divides_over_the_devices_by_default(devices: int, sequences: int, capsys: pytest.CaptureFixture[str]) -> None:
    _, plan = _run(capsys, "plan", "--layers", "1", "--seq", "12", "--device-num", str(devices), "--topology", "tpu-v5p")
    assert {row["shape"][0] for row in plan["inputs"] if row["path"].startswith("batch/")} == {sequences}


def test_a_plan_is_shown_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--parallel-mode", "data_parallel"]) == 0
    shown = capsys.readouterr().out
    assert "Plan" in shown
    assert "all_reduce" in shown


def test_other_tables_are_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).show(Table("all_reduce", title="measured"))
    assert "all_reduce" in capsys.readouterr().out


def test_equal_plans_have_no_difference(plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, data = _run(capsys, "diff", plans[0], plans[0])
    assert (code, data["same"]) == (0, True)


def test_plans_that_differ_are_told_apart(plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, data = _run(capsys, "diff", *plans)
    assert (code, data["same"]) == (1, False)
    assert any(change["name"] == "mesh" for change in data["settings"])


@pytest.mark.parametrize(("pattern", "code"), [("attention/query", 0), ("no/such/thing", 1)])
def test_a_saved_plan_is_explained(pattern: str, code: int, plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    returned, data = _run(capsys, "explain", plans[0], pattern)
    assert returned == code
    assert bool(data["tensors"]) == (code == 0)


def test_a_program_of_the_users_own_is_audited_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_program.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def step(w, x):\n"
        "    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)\n"
        "    return w - 0.1 * grad, loss\n"
        "def program():\n"
        "    print('not JSON')\n"
        "    return step, (jnp.ones((16, 4)), jnp.ones((8, 16)))\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    options = ["--program", "own_program:program", "--parallel-mode", "data_parallel"]
    code, data = _run(capsys, "audit", *options)
    assert (code, data["ok"]) == (0, True)
    assert [row["kind"] for row in data["rows"]] == ["all_reduce"]
    code, data = _run(capsys, "verify", *options)
    assert (code, data["ok"], data["num_devices"]) == (0, True, 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--model", "gpt-9"], "There is no model 'gpt-9'"),
        (["plan", "--config", "missing.yaml"], "missing.yaml"),
        (["plan", "--program", "no_such_module:program"], "cannot be loaded"),
        (["plan", "--strategies", "pins", "--model-parallel", "3"], "--model-parallel does not divide"),
        (["plan", *SMALL, "--batch-size", "5", "--parallel-mode", "data_parallel"], "divis"),
        (["audit", *SMALL, "--target", "abacus:8"], "There is no target 'abacus:8'"),
        (["train", *SMALL, "--text", "missing.txt"], "missing.txt"),
        (["explain", "missing.json", "x"], "missing.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_named_and_returns_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


BAD_TRAINING = [f"train {option}" for option in ("--steps -1", "--seed -1", "--learning-rate nan", "--learning-rate -1")]


@pytest.mark.parametrize("text", ["", "fly", "plan --device-num 0", "plan --layers 0", "plan --parallel-mode manual", *BAD_TRAINING])
def test_unreadable_arguments_stop_with_2(text: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(text.split())
    assert stopped.value.code == 2


@pytest.mark.parametrize("text", ["train --setps 3", "plan --layers 1 more", "k8s status --nmae x"])
def test_what_a_command_does_not_know_is_said_with_its_own_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = text.split()
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    command = " ".join(words[: 2 if words[0] == "k8s" else 1])
    said = capsys.readouterr().err
    assert said.startswith(f"usage: spmdctx {command} [-h]")
    assert f"spmdctx {command}: error: " in said


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("train --out file", "file"),
        ("train --out full", "full"),
        ("train --out new --metrics file/x.jsonl", "file"),
        ("plan --save file/x.json", "file"),
        ("plan --html full", "full"),
        ("plan --export jax --out file/x.py", "file"),
        ("calibrate --out file/x.json", "file"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_planned(
    text: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "state").write_text("a file where a folder must be")
    monkeypatch.chdir(tmp_path)
    for late in ("train.create", "measure.calibrate", "program.Choice.program"):
        monkeypatch.setattr(f"spmdctx.cli.{late}", _raises(AssertionError("this came first")))
    assert main(text.split()) == 2
    assert name in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"file", "full"}


def _raises(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("load", "code", "words"),
    [
        (_raises(TypeError(message("It is wrong."))), 2, "error: It is wrong.\n"),
        (_raises(TypeError("a\n  b")), 2, "The program raised TypeError: a\n  b\n  at "),
        (_raises(KeyError()), 2, "The program raised KeyError\n  at "),
        (_raises(KeyboardInterrupt()), 130, "error: interrupted\n"),
        (int, 70, "spmdctx failed, which is a fault of its own: TypeError: int() argument"),
    ],
    ids=["laid out", "of the program", "without words", "interrupted", "of the package"],
)
def test_each_failure_has_one_error_and_its_code(
    load: Callable[..., Any], code: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "load", load)
    assert main(["diff", "one.json", "other.json"]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


PROGRAMS = """
import jax.numpy as jnp
def indexed(w, x): return (w @ x)["a"]
def misshapen(w, x):
    return jnp.dot(w, x[:3])
def matrices(): return jnp.ones((4, 4)), jnp.ones((4, 4))
def one(): return indexed, matrices()
def two(): return misshapen, matrices()
def three(): raise KeyError("no such layer")
def opening(w, x): return open("/no/such/data")
def four(): return opening, matrices()
def five(): return indexed, matrices()[:1]
def six(): raise SystemExit(3)
PLACE = 3
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("failing_programs:one", ("The program raised TypeError: ", "failing_programs.py:3 (indexed)")),
        ("failing_programs:two", ("The program raised TypeError: dot_general", "failing_programs.py:5 (misshapen)")),
        ("failing_programs:three", ("raised an error when it was called", "KeyError: 'no such layer'", "failing_programs.py:9 (three)")),
        ("failing_programs:four", ("The program raised FileNotFoundError", "failing_programs.py:10 (opening)")),
        ("failing_programs:five", ("does not take its arguments", "1 argument: missing", "step(w, x)")),
        ("failing_programs:six", ("raised an error when it was called", "SystemExit: 3")),
        ("failing_import:one", ("cannot be loaded", "no_such_module", "failing_import.py:1")),
        ("failing_syntax:one", ("raised an error when it was imported", "SyntaxError")),
        ("json:loads", ("raised an error when it was called", "TypeError: loads() missing")),
        ("failing_programs:PLACE", ("is no function", "int")),
        ("./failing_programs.py:one", ("names no module", "failing_programs:one")),
        (":one", ("names no module", "MODULE:FUNCTION")),
        ("os:getcwd", ("must return (step, arguments)", "str")),
    ],
)
def test_a_fault_of_the_users_program_is_one_error_with_its_line(
    program: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_programs.py").write_text(PROGRAMS)
    (tmp_path / "failing_syntax.py").write_text("def one(:")
    (tmp_path / "failing_import.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    for name in ("failing_programs", "failing_syntax", "failing_import"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["plan", "--program", program]) == 2
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == []
    assert "Traceback" not in error


def test_every_option_says_its_default() -> None:
    commands = next(action for action in command_parser()._actions if isinstance(action, argparse._SubParsersAction))
    silent = {
        action.option_strings[-1]
        for parser in commands.choices.values()
        for action in parser._actions
        if action.option_strings and not action.required and action.nargs != 0 and "default" not in (action.help or "").lower()
    }
    assert silent == {"--memory-bytes"}  # --memory-gib, with which it shares its budget, says it


def test_a_check_that_fails_returns_1(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noisy_program.py").write_text(
        "import itertools, jax, numpy as np\n"
        "from jax.experimental import io_callback\n"
        "noise = itertools.count(1)\n"
        "def step(w, x):\n"
        "    return w + io_callback(lambda: np.float32(next(noise)), jax.ShapeDtypeStruct((), np.float32)), x.sum()\n"
        "def program():\n"
        "    return step, (np.ones(4, np.float32), np.ones((8, 16), np.float32))\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    code, data = _run(capsys, "verify", "--program", "noisy_program", "--parallel-mode", "data_parallel")
    assert (code, data["ok"]) == (1, False)
    assert np.isfinite(data["rows"][0]["difference"])
    code, data = _run(capsys, "verify", "--program", "noisy_program", "--parallel-mode", "data_parallel", "--rtol", "2")
    assert (code, data["ok"]) == (0, True)


def test_an_rtol_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["verify", "--rtol", "-1"])
    assert exit_.value.code == 2
    assert "'-1' is no finite number from 0 on" in capsys.readouterr().err


def test_every_command_takes_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layers", "2", "--device-num", "4", "--pipeline-stages", "2", "--grad-accumulation-step", "2"]
    options += ["--parallel-mode", "auto_parallel", "--batch-size", "8", "--seq", "16"]
    code, data = _run(capsys, "train", *options, "--steps", "2", "--out", str(tmp_path / "out"))
    assert code == 0
    assert len(data["losses"]) == 2
    assert data["audit"]["ok"]
    assert data["verify"]["ok"]
    assert [stage["chunks"] for stage in data["plan"]["stages"]] == [[0], [1]]
    assert (tmp_path / "out" / "plan.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    saved, again = str(tmp_path / "out" / "plan.json"), str(tmp_path / "again.json")
    code, plan = _run(capsys, "plan", *options, "--save", again)
    assert code == 0
    assert plan == json.loads(json.dumps(data["plan"]))
    assert Path(again).read_bytes() == Path(saved).read_bytes()
    code, told = _run(capsys, "explain", saved, "stage 1")
    assert (code, told["stages"]) == (0, [1])
    assert _run(capsys, "explain", saved, "stage 2")[0] == 1
    assert Plan.load(saved) == Plan.load(again)
    with CheckpointManager(tmp_path / "out" / "state") as checkpoints:
        found = checkpoints.restore({"model": {"head": {"kernel": np.zeros((192, 768), np.float32)}}}, partial=True)
    assert found.plan == Plan.load(saved)
    assert found.state["model"]["head"]["kernel"].any()


def test_a_command_says_what_goes_on_if_it_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = _run_for_log(capsys, "plan", *SMALL, "--device-num", "2")
    loud = _run_for_log(capsys, "plan", *SMALL, "--device-num", "2", "-v")
    assert "is planned for 2 devices" not in quiet
    assert "is planned for 2 devices" in loud
    assert "Mesh data 2: " in loud


def _run_for_log(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command in which pytest's own handlers of logs have no part; returns what it wrote to standard error."""
    root, own = logging.getLogger(), logging.getLogger("spmdctx")
    handlers, level = list(root.handlers), own.level
    try:
        root.handlers = []
        assert main([*arguments, "--json"]) == 0
    finally:
        root.handlers = handlers
        own.setLevel(level)
    return capsys.readouterr().err


def test_metrics_that_go_nowhere_are_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--metrics", "run.csv"])
    assert stopped.value.code == 2
    assert "tensorboard:FOLDER" in capsys.readouterr().err


def test_train_takes_no_program_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--program", "own_program:program"])
    assert caught.value.code == 2
    assert "--program" in capsys.readouterr().err
