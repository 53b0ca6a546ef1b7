"""Figures of a run as JSON lines, in TensorBoard and in W&B."""

import json
import sys
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.errors import ContextError, FileError, UnsupportedError
from spmdctx.step.report import metrics as metrics_module


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Recorder:
    """What a TensorBoard writer or a W&B run is given."""

    def __init__(self, *where, **named):
        self.where, self.rows, self.is_closed = where or named, [], False

    def add_scalar(self, name, value, step):
        self.rows.append((step, name, value))

    def log(self, figures, step):
        self.rows += [(step, name, value) for name, value in figures.items()]

    def close(self):
        self.is_closed = True

    finish = close


@pytest.fixture
def fakes(monkeypatch):
    """tensorboardX and wandb as modules that keep what they are given."""
    made = {}

    def keep(name):
        def make(*where, **named):
            made[name] = Recorder(*where, **named)
            return made[name]

        return make

    for name, function in (("tensorboardX", "SummaryWriter"), ("wandb", "init")):
        module = ModuleType(name)
        setattr(module, function, keep(name))
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture
def without(monkeypatch):
    """Nothing is installed."""
    for name in ("tensorboardX", "torch", "torch.utils", "torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)


def test_each_call_appends_one_line(tmp_path):
    path = tmp_path / "runs" / "one.jsonl"
    with spmdctx.Metrics(path) as metrics:
        metrics.write(1, loss=jnp.float32(0.5), note="warm")
        metrics.write(2, {"loss": np.float64(0.25)}, rows=3)
        assert len(lines_of(path)) == 2  # before it is closed
    with spmdctx.Metrics(path) as metrics:
        metrics.write(3, loss=float("nan"), up=jnp.float32(jnp.inf), down=-np.inf)
    rows = lines_of(path)
    assert [{name: value for name, value in row.items() if name != "time"} for row in rows] == [
        {"step": 1, "loss": 0.5, "note": "warm"},
        {"step": 2, "loss": 0.25, "rows": 3},
        {"step": 3, "loss": "NaN", "up": "Infinity", "down": "-Infinity"},
    ]
    assert rows[0]["time"] <= rows[2]["time"]
    assert float(rows[2]["up"]) == float("inf")


@pytest.mark.parametrize(
    ("name", "target", "where"),
    [("tensorboardX", "tensorboard:logs", ("logs",)), ("wandb", "wandb:project", {"project": "project"})],
    ids=["tensorboard", "wandb"],
)
def test_what_is_installed_is_used(fakes, name, target, where):
    with spmdctx.Metrics(target) as metrics:
        metrics.write(7, loss=jnp.ones(()), note="no number")
    made = fakes[name]
    assert (made.where, made.rows, made.is_closed) == (where, [(7, "loss", 1.0)], True)


def test_all_targets_get_the_same(fakes, tmp_path):
    with spmdctx.Metrics(tmp_path / "one.jsonl", "tensorboard:logs", "wandb:project") as metrics:
        metrics.write(1, loss=2.0)
    assert fakes["tensorboardX"].rows == fakes["wandb"].rows == [(1, "loss", 2.0)]
    assert lines_of(tmp_path / "one.jsonl")[0]["loss"] == 2.0


def test_the_report_of_a_step_is_written(tmp_path, fakes):
    step = spmdctx.parallel(lambda w, x: w + jnp.mean(x @ w), parallel_mode="semi_auto_parallel")
    w = jnp.ones((8, 8))
    for _ in range(3):
        w = step(w, jnp.ones((16, 8)))
    with spmdctx.Metrics(tmp_path / "one.jsonl", "wandb:project") as metrics:
        metrics.report(step.report())
    (row,) = lines_of(tmp_path / "one.jsonl")
    assert row["step"] == row["report/num_calls"] == 3
    assert row["report/step_s"] > 0
    assert ("report/name" in row, "report/name" in [name for _, name, _ in fakes["wandb"].rows]) == (True, False)


@pytest.mark.parametrize(
    ("target", "names"),
    [("tensorboard:logs", ["tensorboardX or torch", "spmdctx[tensorboard]"]), ("wandb:one", ["wandb", "spmdctx[wandb]"])],
    ids=["tensorboard", "wandb"],
)
def test_what_is_missing_is_named_with_what_to_install(without, target, names):
    with pytest.raises(UnsupportedError) as caught:
        spmdctx.Metrics(target)
    assert all(name in str(caught.value) for name in names)


def test_a_module_that_is_broken_says_so_itself(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'else'", name="else")

    monkeypatch.setattr(metrics_module.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="else"):
        spmdctx.Metrics("wandb:one")


def test_nothing_stays_open_if_one_target_fails(without, tmp_path, monkeypatch):
    closed, close = [], metrics_module._Lines.close

    def closing(self):
        closed.append(self)
        close(self)

    monkeypatch.setattr(metrics_module._Lines, "close", closing)
    with pytest.raises(UnsupportedError):
        spmdctx.Metrics(tmp_path / "one.jsonl", "wandb:one")
    assert len(closed) == 1


@pytest.mark.parametrize("target", ["run.csv", "wandb:", "", "mlflow:one"])
def test_other_targets_are_refused(target):
    with pytest.raises(ContextError, match="tensorboard:FOLDER"):
        spmdctx.Metrics(target)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"one\.jsonl"):
        spmdctx.Metrics(tmp_path / "file" / "one.jsonl")


@pytest.mark.parametrize("figure", [np.ones(3), object(), [1]], ids=["array", "object", "list"])
def test_only_single_figures_are_taken(tmp_path, figure):
    with spmdctx.Metrics(tmp_path / "one.jsonl") as metrics, pytest.raises(TypeError, match="scalar array"):
        metrics.write(1, loss=figure)


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_module.jax, "process_index", lambda: 1)
    with spmdctx.Metrics(tmp_path / "one.jsonl") as metrics:
        metrics.write(1, loss=1.0)
    assert not (tmp_path / "one.jsonl").exists()


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX is an extra")
    with spmdctx.Metrics(f"tensorboard:{tmp_path}") as metrics:
        metrics.write(1, loss=0.5)
    (path,) = tmp_path.glob("events.*")
    assert b"loss" in path.read_bytes()
