"""The written face: the README's example runs, pages keep their length, and every path, name and link in them leads somewhere."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spmdctx import AuditReport, ParallelStep, Plan
from tests.test_architecture import TOP, WITHOUT_JAX

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spmdctx"
README = ROOT / "README.md"
MAP = ROOT / "docs" / "architecture.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
LINKED = [*PAGES, ROOT / "CHANGELOG.md", RESULTS]
MODULES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = sorted(path.parent.relative_to(PACKAGE).as_posix() for path in MODULES if path.name == "__init__.py" and path.parent != PACKAGE)
FOLDERS = ("spmdctx", "tests", "benchmarks", "docs", "notebooks")
OBJECTS = {"plan": Plan, "step": ParallelStep, "audit": AuditReport}
"""What prose calls by the name of a package: `plan.explain` is a method of a plan."""

_ROOMS = "|".join((*FOLDERS, *(name for name in PACKAGES if "/" not in name)))
_QUOTED_PATH = re.compile(rf"`((?:{_ROOMS})/[\w./-]*|[\w/]+/\w+\.(?:py|md))(?:: (\w+))?")
_BARE_PATH = re.compile(rf"(?<![\w/.`-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)")
_DOTTED = re.compile(rf"`((?:{_ROOMS})(?:\.\w+)+)[`(=]")
_LINK = re.compile(r"\]\(([^)#]+)[^)]*\)|<img src=\"([^\"]+)\"")
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FIGURE = re.compile(r"\d+(?:\.\d+)? (?:%|ms|GiB)")
_DECIMAL = re.compile(r"\d+\.\d+")


def name_of(path):
    return path.relative_to(ROOT).with_suffix("").as_posix()


def docstrings_of(path):
    """The strings of a module that stand as statements: docstrings, and those under constants."""
    constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr)]
    return "\n".join(node.value for node in constants if isinstance(node, ast.Constant) and isinstance(node.value, str))


def found_paths(text):
    """Pairs of a path and a name that is said to be in it, empty where none is."""
    quoted = _QUOTED_PATH.findall(text)
    return [*quoted, *((path, "") for path in _BARE_PATH.findall(text))]


def file_at(path):
    """The file or folder that a path from the root or from the package means, also without `.py`."""
    places = [base / (path + suffix) for base in (ROOT, PACKAGE) for suffix in ("", ".py")]
    return next((place for place in places if place.exists()), None)


def leads_somewhere(path, name):
    place = file_at(path.rstrip("."))
    return place is not None and (not name or re.search(rf"\b(def|class) {name}\b|^{name}\b", place.read_text(), re.MULTILINE) is not None)


def is_known(dotted):
    """Whether a dotted name is a module, or an attribute of one, or of what prose calls so."""
    first, *rest = dotted.split(".")
    if first in OBJECTS and (hasattr(OBJECTS[first], rest[0]) or rest[0] in getattr(OBJECTS[first], "__dataclass_fields__", ())):
        return True
    parts = dotted.split(".") if first in FOLDERS else ["spmdctx", first, *rest]
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[end:])
    return False


def test_the_example_of_the_readme_prints_what_the_readme_shows():
    blocks = _FENCED.findall(README.read_text())
    program = next(text for language, text in blocks if language == "python")
    shown = next(text for language, text in blocks if language == "text")
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=300)
    assert _DECIMAL.sub("#", done.stdout) == _DECIMAL.sub("#", shown)
    printed, promised = ([float(number) for number in _DECIMAL.findall(text)] for text in (done.stdout, shown))
    assert printed == pytest.approx(promised, rel=0.05, abs=0.1)


@pytest.mark.parametrize(("path", "most"), [(README, 600), (MAP, 1500)], ids=["README", "architecture"])
def test_a_page_for_newcomers_stays_short(path, most):
    assert len(path.read_text().split()) <= most


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_names_every_package(package):
    assert re.search(rf"`{package}/", MAP.read_text())


def test_the_map_has_the_rows_that_are_checked():
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", MAP.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(TOP) + 1))
    assert tuple(names.replace("`", "") for _, names in rows) == TOP


@pytest.mark.parametrize("page", [MAP, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_a_page_names_all_packages_that_know_no_jax(page):
    (line,) = [line for line in page.read_text().splitlines() if "import no JAX" in line]
    assert set(re.findall(r"`(\w+)`", line.partition("import no JAX")[0].rpartition(". ")[2])) == WITHOUT_JAX


def test_every_decision_has_a_line_in_their_list():
    folder = ROOT / "docs" / "decisions"
    listed = set(_LINK.findall((folder / "README.md").read_text()))
    assert {(path.name, "") for path in folder.glob("0*.md")} <= listed


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_path_that_a_page_names_exists(path):
    assert [found for found in found_paths(path.read_text()) if not leads_somewhere(*found)] == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_module_that_a_page_names_by_dots_exists(path):
    assert [name for name in _DOTTED.findall(path.read_text()) if not is_known(name)] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_what_a_docstring_names_in_the_tree_exists(path):
    text = docstrings_of(path)
    assert [found for found in found_paths(text) if not leads_somewhere(*found)] == []
    assert [name for name in _DOTTED.findall(text) if not is_known(name)] == []


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_every_link_within_the_repository_leads_to_a_file(path):
    targets = [one or other for one, other in _LINK.findall(path.read_text())]
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", [page for page in PAGES if page.parent == README.parent or page.parent == MAP.parent], ids=name_of)
def test_every_figure_of_a_page_stands_among_the_claims(path):
    claims = RESULTS.read_text().partition("# History")[0]
    assert [figure for figure in _FIGURE.findall(_FENCED.sub("", path.read_text())) if figure not in claims] == []
