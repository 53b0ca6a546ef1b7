"""How large things may be, so that a reader finds a place by looking: entries of a folder, modules, functions."""

import ast

import pytest

from tests.architecture.tree import FOLDERS, MODULES, PACKAGE, functions_of, length_of, lines_of, place_of, tree_of

MODULES_AT_THE_TOP = {"__init__", "__main__", "_compat", "api", "errors", "wording"}
MOST_MODULES = {"rules": 18, "gradients": 18, "search": 3}
"""Folders of many like things, and one that is to hold packages; any other may have twelve."""


def modules_in(folder):
    return {path.stem for path in MODULES if path.parent == folder}


def test_the_top_is_taken_in_at_a_glance():
    entries = [path for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= 25
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
