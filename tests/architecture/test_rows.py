"""Who may import whom: rows of packages, rows inside of packages, no circle, and no JAX in the middle."""

from graphlib import TopologicalSorter

import pytest

from tests.architecture.tree import MODULES, PACKAGE, ROOT, imports_of, own_imports_of, parts_of, place_of, unit_of

TOP = (
    "errors _compat",
    "ir communication",
    "wording rules",
    "context audit machine",
    "trace cost",
    "ops lowering search",
    "gradients plan",
    "checkpoint data",
    "step",
    "api",
    "shard",
    "models",
    "cli",
    "__main__",
)
INNER = {
    "ir": ("arrays sharding", "primitives", "rule", "graph collective", "mesh layout", "domain projection", "analysis"),
    "machine": ("topology", "presets", "devices torus", "collectives", "reshard_table", "reshard", "xla"),
    "trace": ("specs collector", "build", "capture", "marker", "scope"),
    "cost": ("roofline", "needs", "shared_reads", "memory", "bill", "price", "step evaluate bodies region_groups"),
    "search": (
        *("solver", "setup", "problem", "propagation", "optimizer"),
        *("dynamic", "recursive", "whatif", "reduced_once", "select"),
    ),
    "search/solver": ("problem", "unlimited", "limited", "solve"),
    "lowering": ("compile_options compile_only", "scheduler_limit", "rewrite", "compile"),
    "plan": ("rows alternatives", "data", "groups mismatch", "mindspore library", "diff explain pareto file", "show", "plan"),
    "step": (
        "planning processes direct out_of_memory agreement options",
        "entry",
        "placement broadcast verify",
        "step",
    ),
}
"""The rows of the package and of packages in it, from the lowest to the highest.

What is in a package imports lower rows of it and itself; names in one row do not import each other.
"""

ROWS = {(): TOP, **{tuple(folder.split("/")): rows for folder, rows in INNER.items()}}
WITHOUT_JAX = {"errors", "wording", "ir", "rules", "context", "machine", "cost", "search", "plan"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}


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


def test_what_is_private_in_jax_is_named_in_one_file_only():
    private = "jax." + "_src"
    files = [path for folder in ("spmdctx", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in files if private in path.read_text()] == [PACKAGE / "_compat.py"]
