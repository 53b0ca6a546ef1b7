"""The shape of the tree: who may import whom, no circle, no JAX in the middle, and how large folders, modules and functions may be."""

import ast
from graphlib import TopologicalSorter

import pytest

from tests.tree import (
    FOLDERS,
    MODULES,
    PACKAGE,
    ROOT,
    functions_of,
    imports_of,
    length_of,
    lines_of,
    own_imports_of,
    parts_of,
    place_of,
    tree_of,
    unit_of,
)

TOP = (
    "errors _compat",
    "ir communication",
    "wording rules",
    "context audit machine",
    "trace cost",
    "ops lowering search",
    "gradients plan",
    "checkpoint data pipeline",
    "server",
    "step",
    "api",
    "shard",
    "models k8s",
    "cli",
    "__main__",
)
INNER = {
    "ir": ("arrays sharding", "primitives", "rule", "graph collective", "mesh layout", "domain projection excerpt", "analysis"),
    "machine": ("topology", "presets", "devices torus", "collectives", "reshard_table", "reshard", "xla"),
    "trace": ("specs collector flax_modules initials", "build", "capture", "marker", "scope"),
    "cost": ("roofline", "needs", "shared_reads", "memory", "bill", "price", "step evaluate bodies region_groups"),
    "search": (
        *("solver", "setup", "problem", "propagation", "optimizer"),
        *("dynamic", "recursive", "whatif", "reduced_once", "select"),
    ),
    "search/solver": ("problem", "unlimited", "limited", "solve"),
    "lowering": ("compile_options compile_only", "scheduler_limit", "rewrite program_options", "compile"),
    "plan": (
        "rows alternatives",
        "data",
        "groups mismatch",
        "mindspore library",
        "diff explain pareto file export summary",
        "show",
        "plan",
    ),
    "pipeline": ("schedule", "cut", "programs", "capture", "stages", "data run", "search show file diff", "plan audit", "assemble"),
    "server": ("program scale node", "results local", "state", "loads alone", "engine", "remote plan marks roles", "initial"),
    "server/program": ("balance rows recipe", "capture", "row_step", "tables split_rows", "cut", "spec worker", "row_ids crossing"),
    "server/state": (
        "progress presence row_files table",
        "folder shard",
    ),
    "server/local": ("split state",),
    "server/engine": ("rays display messages", "attendance server", "spares", "fleet", "scheduler", "own worker", "client", "job"),
    "k8s": ("job render", "operators", "manifest state", "mindspore cluster"),
    "step": (
        "planning processes direct out_of_memory agreement options state_call",
        "words",
        "entry",
        "placement broadcast verify pipelined report export jitted",
        "served exportable",
        "make",
        "step",
    ),
}
"""The rows of the package and of packages in it, from the lowest to the highest.

What is in a package imports lower rows of it and itself; names in one row do not import each other.
"""

ROWS = {(): TOP, **{tuple(folder.split("/")): rows for folder, rows in INNER.items()}}
WITHOUT_JAX = {"errors", "wording", "ir", "rules", "context", "machine", "cost", "search", "plan", "k8s"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}

MODULES_AT_THE_TOP = {"__init__", "__main__", "_compat", "api", "errors"}
MOST_MODULES = {"rules": 18, "gradients": 18, "search": 3}
"""Folders of many like things, and one that is to hold packages; any other may have twelve."""


def placed_modules():
    """Every module, once for each package around it whose rows are written down."""
    for folder in ROWS:
        for path in MODULES:
            parts = parts_of(path)
            if parts[: len(folder)] == folder and parts[len(folder)] != "__init__":
                yield pytest.param(folder, path, id=f"{'/'.join(folder) or 'top'}:{place_of(path)}")


@pytest.mark.parametrize(("folder", "path"), list(placed_modules()))
def test_a_module_imports_lower_rows_and_its_own_package(folder, path):
    row = {name: number for number, names in enumerate(ROWS[folder]) for name in names.split()}
    own = parts_of(path)[len(folder)]
    assert own in row, f"{own} is in no row"
    for names in own_imports_of(path):
        other = names[len(folder)] if len(names) > len(folder) and names[: len(folder)] == folder else own
        assert other == own or row.get(other, -1) < row[own], f"{own} imports {'.'.join(names)}"


def test_no_module_imports_itself_by_way_of_others():
    known = {parts[:-1] if parts[-1] == "__init__" else parts: path for path in MODULES for parts in [parts_of(path)]}

    def module(names):
        return names if names in known else module(names[:-1])

    graph = {own: {module(names) for names in own_imports_of(path)} - {own} for own, path in known.items()}
    TopologicalSorter({".".join(own): {".".join(names) for names in others} for own, others in graph.items()}).prepare()


@pytest.mark.parametrize("path", [path for path in MODULES if unit_of(path) in WITHOUT_JAX], ids=place_of)
def test_the_middle_knows_no_jax(path):
    assert JAX.isdisjoint(name.split(".")[0] for name in imports_of(path))
    assert {names[0] for names in own_imports_of(path)} <= WITHOUT_JAX


def test_what_is_private_in_jax_is_named_in_one_file_of_the_package():
    private = "jax." + "_src"
    files = [path for folder in ("spmdctx", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    # JAX's harnesses have no public name; the benchmark that runs them is no part of the package.
    allowed = [PACKAGE / "_compat.py", ROOT / "benchmarks" / "harness_cases.py"]
    assert [path for path in files if private in path.read_text()] == allowed


def modules_in(folder):
    return {path.stem for path in MODULES if path.parent == folder}


def test_the_top_is_taken_in_at_a_glance():
    entries = [path for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= 28
    assert modules_in(PACKAGE) <= MODULES_AT_THE_TOP


@pytest.mark.parametrize("folder", FOLDERS, ids=place_of)
def test_a_folder_has_few_modules(folder):
    assert len(modules_in(folder) - {"__init__"}) <= MOST_MODULES.get(place_of(folder), 12)


@pytest.mark.parametrize("folder", FOLDERS, ids=place_of)
def test_a_package_says_in_one_sentence_what_it_is_for(folder):
    text = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
    sentence = " ".join(text.partition("\n\n")[0].split())
    assert sentence.endswith(".")
    assert ". " not in sentence


@pytest.mark.parametrize("path", MODULES, ids=place_of)
def test_modules_and_functions_are_short(path):
    assert len(lines_of(path)) <= 400
    assert [node.name for node in functions_of(path) if length_of(node) > 80] == []


def test_most_functions_fit_on_half_a_screen():
    lengths = sorted(length_of(node) for path in MODULES for node in functions_of(path))
    assert lengths[len(lengths) * 9 // 10] < 35
    assert lengths[len(lengths) // 2] <= 10
