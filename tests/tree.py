"""Reads the package as text: its modules, what they import, and what they define."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spmdctx"
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES})


def place_of(path: Path) -> str:
    """Where a module or folder is, below the package: the id of a test."""
    return path.relative_to(PACKAGE).as_posix()


def parts_of(path: Path) -> tuple[str, ...]:
    """The names of the packages around a module, and its own."""
    return path.relative_to(PACKAGE).with_suffix("").parts


def unit_of(path: Path) -> str:
    """The package or module at the top that a module belongs to."""
    return parts_of(path)[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """The full name of whatever a module imports, inside functions and for type checkers too."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def own_imports_of(path: Path) -> Iterator[tuple[str, ...]]:
    """What a module imports of this package, as names below the package."""
    for name in imports_of(path):
        root, *names = name.split(".")
        if root == PACKAGE.name:
            yield tuple(names)


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length_of(node: ast.stmt) -> int:
    return node.end_lineno - node.lineno + 1


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()
