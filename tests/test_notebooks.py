"""Every notebook runs from a fresh kernel, without errors, and shows what it promises."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _executed(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The notebook with its outputs; the kernel asks for its devices itself, as a user's would."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook


def _pages(notebook: Any) -> list[str]:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    return [output.data["text/html"] for output in outputs if output.output_type == "execute_result" and "text/html" in output.data]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert not [cell for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]


# ipykernel and zmq warn of their own affairs.
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::RuntimeWarning")
def test_the_first_plan_shows_its_page_and_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = _pages(_executed(NOTEBOOKS[0], monkeypatch))
    assert len(pages) == 5
    assert "all_reduce" in pages[0]
    assert "up/kernel" in pages[1]
    assert "agrees with the plan" in pages[2]
    assert "same on 8 devices" in pages[3]
    assert "layers" in pages[4]
