"""The shape of the package: who may import whom, who may know JAX, and how large things may be."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "spmdctx"
ROWS = (
    ("errors", "_compat", "ir"),
    ("mesh", "layout"),
    ("communication", "launch", "context", "sharding_marks"),
    ("rules", "cost"),
    ("trace",),
    ("search",),
    ("plan",),
    ("planner", "lowering"),
    ("audit", "checkpoint", "data"),
    ("step",),
    ("api",),
    ("shard",),
    ("models", "calibrate"),
    ("cli",),
)
"""Units from the lowest row to the highest; a module imports its own unit and lower rows."""

FAMILIES = {
    **dict.fromkeys(
        (
            "broadcast",
            "direct",
            "entry",
            "gradients",
            "mesh_scope",
            "ops",
            "out_of_memory",
            "placement",
            "plan_agreement",
            "processes",
            "verify",
            "step_options",
        ),
        "step",
    ),
    "__main__": "cli",
    "wording": "errors",
    "arrays": "errors",
    "domains": "mesh",
    **dict.fromkeys(("strategy_files", "insight"), "planner"),
    **dict.fromkeys(("shard_batches", "shard_call", "shard_eager", "shard_modules"), "shard"),
}
"""Modules that belong to a unit without being in its folder, beside those whose name starts with `context_` or `cli_`."""

WITHOUT_JAX = {"errors", "ir", "mesh", "layout", "context", "rules", "cost", "search", "plan"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def unit_of(module):
    """The unit of a module given as its dotted path below the package."""
    name = module.split(".")[0]
    if name.startswith(("context_", "cli_")):
        return name.split("_")[0]
    return FAMILIES.get(name, name)


def name_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports_of(path):
    """Every module that is imported anywhere in a file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions_of(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node):
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", [path for path in MODULES if path != PACKAGE / "__init__.py"], ids=name_of)
def test_a_module_imports_its_own_unit_and_lower_rows(path):
    row = {unit: number for number, units in enumerate(ROWS) for unit in units}
    unit = unit_of(name_of(path))
    for name in imports_of(path):
        root, _, rest = name.partition(".")
        if root == "spmdctx":
            other = unit_of(rest)
            assert other in row, f"{name} is in no row"
            assert other == unit or row[other] < row[unit], f"{unit} imports {name}"


@pytest.mark.parametrize("path", [path for path in MODULES if unit_of(name_of(path)) in WITHOUT_JAX], ids=name_of)
def test_the_middle_knows_no_jax(path):
    for name in imports_of(path):
        root, _, rest = name.partition(".")
        assert root not in JAX
        assert root != "spmdctx" or unit_of(rest) in WITHOUT_JAX, f"imports {name}"


def test_what_is_private_in_jax_is_named_in_one_file_only():
    private = "jax." + "_src"
    root = PACKAGE.parent
    files = [path for folder in ("spmdctx", "tests", "benchmarks") for path in (root / folder).rglob("*.py")]
    assert {path.relative_to(root).as_posix() for path in files if private in path.read_text()} <= {"spmdctx/_compat.py"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_are_short(path):
    assert len(path.read_text().splitlines()) <= 600
    assert [node.name for node in functions_of(path) if length(node) > 80] == []


def test_most_functions_fit_on_half_a_screen():
    lengths = sorted(length(node) for path in MODULES for node in functions_of(path))
    assert lengths[len(lengths) * 9 // 10] < 35
    assert lengths[len(lengths) // 2] <= 10
