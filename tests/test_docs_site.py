"""The site of the documentation: each page has a place in it, and each Python block is run when `make docs` builds it."""

import ast
import re
from pathlib import Path

import pytest

import spmdctx
from docs.site.build import PAGES
from docs.site.cells import LANGUAGES, as_notebook, cells_of, languages_of, python_blocks
from docs.site.docstrings import as_rst
from docs.site.gallery import EXHIBITS
from spmdctx.machine.presets import PRESETS as MACHINES
from spmdctx.models import PRESETS as MODELS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
MARKDOWN = [path for path in SITE if path.suffix == ".md"]
HOW_TOS = {
    "first_gpu_run",
    "first_tpu_run",
    "out_of_memory",
    "mixed_precision",
    "evaluation",
    "lora",
    "moe",
    "gradient_accumulation",
    "pipeline",
    "parameter_server",
    "several_machines",
    "checkpoints_and_inference",
}
MIGRATIONS = {"pmap", "jit_partition_spec", "logical_rules", "fsdp", "mindspore"}

_TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"^[ >]*```python", re.MULTILINE)
_CELL = "```{code-cell} ipython3\n"


def name_of(path):
    return path.relative_to(ROOT).with_suffix("").as_posix()


def named_by(path):
    """The files that the toctrees of a page name."""
    entries = [line for tree in _TOCTREE.findall(path.read_text()) for line in tree.splitlines() if line and not line.startswith(":")]
    found = [match for entry in entries for suffix in (".md", ".ipynb") for match in path.parent.glob(entry + suffix)]
    return {match.resolve() for match in found}


def test_each_page_has_a_place_in_a_toctree():
    placed = set().union(*(named_by(path) for path in MARKDOWN))
    assert [name_of(path) for path in SITE if path.resolve() not in placed] == ["docs/index"]


@pytest.mark.parametrize(("folder", "names"), [("howto", HOW_TOS), ("migrate", MIGRATIONS)])
def test_a_page_on_each_topic_runs_an_example(folder, names):
    pages = {path.stem: path.read_text() for path in (DOCS / folder).glob("*.md")}
    assert names <= pages.keys()
    for name in names:
        assert len(python_blocks(pages[name])) > 1, name
        assert "## What can go wrong" in pages[name], name


@pytest.mark.parametrize("path", MARKDOWN, ids=name_of)
def test_each_block_has_a_language_and_python_is_run(path):
    text = path.read_text()
    assert [language for language in languages_of(text) if language not in LANGUAGES and not language.startswith("{")] == []
    assert len(_PYTHON.findall(text)) == len(python_blocks(text))
    assert as_notebook(text).count(_CELL) == len(cells_of(text))
    for cell in cells_of(text):
        ast.parse(cell)


def test_a_hidden_cell_runs_in_its_place_and_is_not_shown():
    page = "# A\n\n<!-- hidden\nx = 1\n-->\n\n```python\nprint(x)\n```\n\n<!-- output\nx\n-->\n"
    assert cells_of(page) == ["x = 1\n", "print(x)\n", "x\n"]
    notebook = as_notebook(page)
    assert notebook.startswith("---\nfile_format: mystnb\n")
    assert f"{_CELL}:tags: [remove-cell]\n\nx = 1\n```" in notebook
    assert f"{_CELL}print(x)\n```" in notebook
    assert f"{_CELL}:tags: [remove-input]\n\nx\n```" in notebook


def test_a_page_without_python_is_left_as_it_is():
    page = "# A\n\n```sh\nmake docs\n```\n"
    assert as_notebook(page) == page


def test_the_reference_has_every_public_name():
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    named = set(re.findall(r"^\.\. auto\w+:: spmdctx\.(\w+)$", text, re.MULTILINE))
    assert set(spmdctx.__all__) <= named


def test_the_gallery_shows_models_and_machines_that_exist():
    assert {exhibit.model for exhibit in EXHIBITS} <= set(MODELS)
    assert {exhibit.topology for exhibit in EXHIBITS} <= set(MACHINES)
    assert all(data * model == exhibit.num_devices for exhibit in EXHIBITS for data, model in [exhibit.hand])
    assert len({exhibit.name for exhibit in EXHIBITS}) == len(EXHIBITS)


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Takes *args, not `*args`.", r"Takes \*args, not `*args`."),
        ("Two `Parameter`s.", r"Two `Parameter`\ s."),
        ("As so:\n\n    x = 1\n\nAnd on.", "As so:\n\n.. code-block:: python\n\n    x = 1\n\nAnd on."),
        ("Args:\n    x: it has\n        more lines.", "Args:\n    x: it has\n        more lines."),
        ("| a | b |\n| - | - |\n| 1 | 2 |", "\n.. list-table::\n   :header-rows: 1\n\n   * - a\n     - b\n   * - 1\n     - 2\n"),
    ],
    ids=["emphasis", "code", "indented code", "arguments", "table"],
)
def test_a_docstring_becomes_what_autodoc_reads(docstring, expected):
    assert "\n".join(as_rst(docstring.split("\n"))) == expected
