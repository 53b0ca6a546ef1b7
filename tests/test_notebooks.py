"""Every notebook runs from a fresh kernel, without errors, and shows what it promises.

`python -m tests.test_notebooks` runs them all and stores their outputs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.quick import QUICK

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST, MODES, READING, CHECKPOINTS, PIPELINES = NOTEBOOKS
MACHINE_PATH = re.compile(r"/(?:home|root|tmp|usr|work|Users)/")


def _executed(path: Path) -> Any:
    """The notebook with new outputs; the kernel asks for its devices itself, as a user's would."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment that a kernel starts in; it needs no home that can be written to, and compiles fast."""
    monkeypatch.setenv("XLA_FLAGS", QUICK)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for name, value in _environment().items():
        monkeypatch.setenv(name, value)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def _outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def _pages(notebook: Any) -> list[str]:
    outputs = _outputs(notebook)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    return [output.data["text/html"] for output in outputs if output.output_type == "execute_result" and "text/html" in output.data]


def _printed(notebook: Any) -> str:
    return "".join(output.text for output in _outputs(notebook) if output.output_type == "stream")


def _store(path: Path) -> None:
    """Executes a notebook and keeps what it shows, without the times of its cells and texts of what has a page."""
    notebook = _executed(path)
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        kept: list[Any] = []
        for output in cell.get("outputs", ()):
            if "text/html" in output.get("data", {}):
                output.data.pop("text/plain", None)
            if kept and output.output_type == "stream" and kept[-1].get("name") == output.name:
                kept[-1].text += output.text
            else:
                kept.append(output)
        if cell.cell_type == "code":
            cell.outputs = kept
    nbformat.write(notebook, path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_the_outputs_of_one_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert _pages(notebook)
    assert not MACHINE_PATH.search(path.read_text())


# ipykernel and zmq warn of their own affairs.
quietly = pytest.mark.filterwarnings("default::DeprecationWarning", "default::RuntimeWarning")


@quietly
def test_the_first_plan_shows_its_page_and_holds(kernel: None) -> None:
    pages = _pages(_executed(FIRST))
    assert len(pages) == 5
    assert "all_reduce" in pages[0]
    assert "up/kernel" in pages[1]
    assert "agrees with the plan" in pages[2]
    assert "same on 8 devices" in pages[3]
    assert "layers" in pages[4]


@quietly
def test_the_search_modes_log_bound_and_hold(kernel: None) -> None:
    notebook = _executed(MODES)
    shown = _printed(notebook)
    assert len(_pages(notebook)) == 1
    assert "the total cost is 16.7772\nChoose NOT to cut" in shown
    assert "Choose to cut the I-axis" in shown
    gaps = dict(re.findall(r"^(\w+) .*gap +(-?[\d.]+)%$", shown, re.MULTILINE))
    assert list(gaps) == ["dynamic_programming", "recursive_programming", "sharding_propagation"]
    assert float(gaps["dynamic_programming"]) == 0
    assert "keeps the step within memory_bytes=" in shown
    assert "agrees with the plan" in shown
    assert "same on 8 devices" in shown


@quietly
def test_reading_a_plan_shows_all_of_it(kernel: None) -> None:
    notebook = _executed(READING)
    shown = _printed(notebook)
    pages = _pages(notebook)
    assert len(pages) == 3
    assert "memory" in pages[0]
    assert "layers" in pages[2]
    assert "runner-up" in shown
    assert "GiB at operation" in shown
    assert "device-seconds" in shown
    assert re.search(r"^True \d+ bytes$", shown, re.MULTILINE)
    assert "'tensor_map': [" in shown


@quietly
def test_checkpoints_resume_load_and_generate(kernel: None) -> None:
    notebook = _executed(CHECKPOINTS)
    shown = _printed(notebook)
    assert len(_pages(notebook)) == 1
    assert "steps 40 to 119, loss " in shown
    for claim in ("bit for bit", "same values", "likeliest tokens the same", "drawn tokens the same"):
        assert f"{claim}: True" in shown
    assert "its checksum differs" in shown
    assert "rank 1 of 2 needs the files of ranks [" in shown
    assert all(float(ratio) < 1.5 for ratio in re.findall(r"([\d.]+) bytes read per byte needed", shown))
    assert len(re.findall(r"^'The value of the.+'$", shown, re.MULTILINE)) == 2


@quietly
def test_pipelines_run_as_they_are_drawn(kernel: None) -> None:
    notebook = _executed(PIPELINES)
    shown = _printed(notebook)
    assert "<svg" in _pages(notebook)[0]
    assert "stage 1 of 4" in shown
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", shown, re.MULTILINE)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert "first layer on [0, 1]" in shown
    assert "last layer on [6, 7]" in shown
    assert "The pipeline agrees with its plan" in shown
    assert re.search(r"^True$", shown, re.MULTILINE)
    assert "auto_pipeline chose 1 stage of at most 4" in shown


if __name__ == "__main__":
    os.environ.pop("XLA_FLAGS", None)
    os.environ.update(_environment())
    for notebook_path in NOTEBOOKS:
        _store(notebook_path)
